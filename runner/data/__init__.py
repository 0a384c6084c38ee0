"""Data: sources, samplers and the loader that resumes them.

The names below are imported on first use, so that `import runner.data` costs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from runner.data.datasets import MixtureDataset
    from runner.data.elastic import ElasticSampler
    from runner.data.loader import StatefulDataLoader
    from runner.data.randomness import sample_rng
    from runner.data.restartable import RestartableDataLoader, ranks, shard
    from runner.data.sampler import DistributedSampler, MixtureSampler

__all__ = [
    "DistributedSampler",
    "ElasticSampler",
    "MixtureDataset",
    "MixtureSampler",
    "RestartableDataLoader",
    "StatefulDataLoader",
    "ranks",
    "sample_rng",
    "shard",
]

_HOME = {
    "DistributedSampler": "sampler",
    "ElasticSampler": "elastic",
    "MixtureDataset": "datasets",
    "MixtureSampler": "sampler",
    "RestartableDataLoader": "restartable",
    "StatefulDataLoader": "loader",
    "ranks": "restartable",
    "sample_rng": "randomness",
    "shard": "restartable",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
