"""Resolved config -> the datasets that an attempt trains with or evaluates on, joined to one."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import IterableDataset

from runner.config.schema import Config
from runner.config.targets import bind, check_call, instantiate, named
from runner.data.datasets import MixtureDataset
from runner.data.loading.fetch import is_collated
from runner.errors import UserError


def open_sources(config: Config, group: str = "sources", streams: bool = False) -> dict[str, Any]:
    """The datasets of `data.sources` or `data.eval_sources`, by name.

    Args:
        streams: iterable datasets are welcome as well.

    Raises:
        UserError: one cannot be instantiated, is not a map-style dataset, or has more tokens than the model.
    """
    datasets = {name: instantiate(f"data.{group}.{name}", node) for name, node in getattr(config.data, group).items()}
    vocabulary = config.model.get("vocab_size")
    for name, dataset in datasets.items():
        if isinstance(dataset, IterableDataset) and streams:
            continue
        if not hasattr(dataset, "__len__") or isinstance(dataset, IterableDataset):
            raise UserError(
                f"data.{group}.{name} is a {type(dataset).__name__}, not a map-style dataset with a length: "
                "use one, or read a stream with data.loader (docs/streaming.md)"
            )
        tokens = getattr(dataset, "vocab_size", None)
        if isinstance(vocabulary, int) and isinstance(tokens, int) and tokens > vocabulary:
            raise UserError(
                f"model.vocab_size={vocabulary} is too small for data.{group}.{name}, with tokens 0 to {tokens - 1}: "
                f"set data.vocab_size={tokens} (model.vocab_size follows it unless set)"
            )
    return datasets


def tokens_per_sample(datasets: dict[str, Any]) -> dict[str, int]:
    """Tokens in each sample, by source, for the datasets that say it by an attribute of this name."""
    said = {name: getattr(dataset, "tokens_per_sample", None) for name, dataset in datasets.items()}
    return {name: tokens for name, tokens in said.items() if isinstance(tokens, int) and not isinstance(tokens, bool)}


def join_sources(datasets: dict[str, Any], collate: Callable[[Any], Any] | None = None) -> Any:
    """One dataset of all of them, whose samples are what the datasets return; a single one is returned as it is.

    Args:
        collate: that of `data.collate`: a list of samples, not a finished batch, is what it takes.
    """
    whole = next(iter(datasets.values()))
    if len(datasets) == 1 and (collate is None or not is_collated(whole)):
        return whole
    return MixtureDataset(list(datasets.values()), list(datasets), tagged=False, gathers=collate is None)


def make_collate(config: Config) -> Callable[[Any], Any] | None:
    """What makes a batch from a list of samples: a function, or an instance of a class; None: torch's default.

    Raises:
        UserError: it cannot be called with a list of samples.
    """
    node = config.data.collate
    if not node:
        return None
    if inspect.isclass(named("data.collate", node)):
        instance = instantiate("data.collate", node)
        if not callable(instance):
            raise UserError(f"data.collate._target_={node['_target_']}: its instances need a method __call__(samples)")
        made = partial(instance)
    else:
        made = bind("data.collate", node)
    check_call(made, f"data.collate ({node['_target_']})", "collate(samples)", None)
    return made


def fingerprint(config: Config, datasets: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint and the run that loads it must have in common, each source by itself: a run may allow sources
    to be added and removed."""
    parts: dict[str, Any] = {"seed": config.seed, "sampler": config.sampler.kind.name}
    for name, dataset in datasets.items():
        own = dataset.fingerprint() if hasattr(dataset, "fingerprint") else {}
        parts[f"source {name}"] = {"samples": len(dataset), **own}
    return parts
