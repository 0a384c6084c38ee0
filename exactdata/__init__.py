"""Order and load data in PyTorch, and resume exactly with any number of ranks, workers and batches.

The names below are loaded on first use, so that `import exactdata` does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0+clone"  # The package is on no index, and an index refuses versions with a +.

if TYPE_CHECKING:
    from exactdata.datasets import MixtureDataset
    from exactdata.elastic import ElasticSampler
    from exactdata.loading.loader import StatefulDataLoader
    from exactdata.loading.protocols import BatchRecord, LoaderStateError, RestartableDataLoader, epoch, ranks, shard
    from exactdata.loading.randomness import sample_rng
    from exactdata.order.weights import SamplerError, SamplerStateError
    from exactdata.sampler import DistributedSampler, MixtureSampler
    from exactdata.streams import ShardedStream
    from exactdata.trainer_loader import TrainerLoader, committed_batches

__all__ = [
    "BatchRecord",
    "DistributedSampler",
    "ElasticSampler",
    "LoaderStateError",
    "MixtureDataset",
    "MixtureSampler",
    "RestartableDataLoader",
    "SamplerError",
    "SamplerStateError",
    "ShardedStream",
    "StatefulDataLoader",
    "TrainerLoader",
    "committed_batches",
    "epoch",
    "ranks",
    "sample_rng",
    "shard",
]

_MODULES = {
    "BatchRecord": "loading.protocols",
    "DistributedSampler": "sampler",
    "ElasticSampler": "elastic",
    "LoaderStateError": "loading.protocols",
    "MixtureDataset": "datasets",
    "MixtureSampler": "sampler",
    "RestartableDataLoader": "loading.protocols",
    "SamplerError": "order.weights",
    "SamplerStateError": "order.weights",
    "ShardedStream": "streams",
    "StatefulDataLoader": "loading.loader",
    "TrainerLoader": "trainer_loader",
    "committed_batches": "trainer_loader",
    "epoch": "loading.protocols",
    "ranks": "loading.protocols",
    "sample_rng": "loading.randomness",
    "shard": "loading.protocols",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
