"""Open the resolved config's datasets for training or evaluation, concatenate them, and compute their weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset

from exactdata.datasets import MixtureDataset
from exactdata.loading.fetch import is_collated
from exactdata.order.weights import shares
from runner.checkpoint.files.store import new_hash
from runner.config.identity import flatten
from runner.config.schedule import PhaseState
from runner.config.schema import Config, WeightsBy, phase_schedule, source_weights
from runner.config.targets import bind, check_call, instantiate, named
from runner.errors import UserError
from runner.system import files

WHOLE_FILE_BYTES = 1 << 26
"""A file up to this size is hashed completely. For a larger file, only this many bytes are hashed: half from its start,
and half from its end."""


def open_sources(config: Config, group: str = "sources", streams: bool = False) -> dict[str, Any]:
    """Open the datasets of `data.sources` or `data.eval_sources`. Return them by name.

    Args:
        config: config of the run.
        group: `sources` or `eval_sources`.
        streams: also accept iterable datasets.

    Raises:
        UserError: a dataset cannot be created, is not map-style, or has a larger vocabulary than the model.
    """
    datasets = {name: instantiate(f"data.{group}.{name}", node) for name, node in getattr(config.data, group).items()}
    vocabulary = config.model.get("vocab_size")
    for name, dataset in datasets.items():
        if isinstance(dataset, IterableDataset) and streams:
            continue
        if not hasattr(dataset, "__len__") or isinstance(dataset, IterableDataset):
            raise UserError(
                f"data.{group}.{name} is a {type(dataset).__name__}, not a map-style dataset with a length: "
                "use one, or read a stream with data.loader (docs/loader.md)"
            )
        tokens = getattr(dataset, "vocab_size", None)
        if isinstance(vocabulary, int) and isinstance(tokens, int) and tokens > vocabulary:
            raise UserError(
                f"model.vocab_size={vocabulary} is too small for data.{group}.{name}, with tokens 0 to {tokens - 1}: "
                f"set data.vocab_size={tokens} (model.vocab_size follows it unless set)"
            )
    return datasets


def tokens_per_sample(datasets: dict[str, Any]) -> dict[str, int]:
    """Return the number of tokens per sample, by source, for datasets that have an attribute of this name."""
    said = {name: getattr(dataset, "tokens_per_sample", None) for name, dataset in datasets.items()}
    return {name: tokens for name, tokens in said.items() if isinstance(tokens, int) and not isinstance(tokens, bool)}


def mean_tokens(datasets: dict[str, Any]) -> dict[str, float]:
    """Return the mean number of tokens per sample, by source, for datasets that state it.

    Datasets state it with `tokens_per_sample`, or with `total_tokens` if the number of tokens varies between samples.
    """
    totals = {name: getattr(dataset, "total_tokens", None) for name, dataset in datasets.items()}
    means = {name: total / len(datasets[name]) for name, total in totals.items() if total and isinstance(total, int)}
    return {**means, **tokens_per_sample(datasets)}


def measures(datasets: dict[str, Any]) -> dict[str, Callable[[Any], Any]]:
    """Return the function that counts tokens and documents, by source, for datasets that state only `total_tokens`."""
    return {
        name: part.measure
        for name, part in datasets.items()
        if hasattr(part, "total_tokens") and hasattr(part, "measure")
    }


def join_sources(datasets: dict[str, Any], collate: Callable[[Any], Any] | None = None) -> Any:
    """Concatenate the datasets. A single dataset is returned unchanged.

    Args:
        datasets: sources by name.
        collate: the function from `data.collate`, which takes a list of samples and not a finished batch.
    """
    whole = next(iter(datasets.values()))
    if len(datasets) == 1 and (collate is None or not is_collated(whole)):
        return whole
    return MixtureDataset(list(datasets.values()), list(datasets), tagged=False, gathers=collate is None)


def make_collate(config: Config) -> Callable[[Any], Any] | None:
    """Return the function or object that builds a batch from a list of samples, or None for torch's default.

    Raises:
        UserError: the object cannot be called with a list of samples.
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
    """Return the properties of the data that must be equal in a checkpoint and the run that loads it.

    Each source has separate entries, because a run may allow adding and removing sources. With `run.allow_data_change`,
    the content of a source may differ too.
    """
    parts: dict[str, Any] = {"seed": config.seed, "sampler": config.sampler.kind.name}
    for name, dataset in datasets.items():
        parts[f"size of source {name}"] = len(dataset)
        if config.run.allow_data_change:
            continue
        if hasattr(dataset, "fingerprint"):
            parts[f"content of source {name}"] = dataset.fingerprint()
        else:
            parts |= {f"file {key}": found for key, found in _files_of(name, config.data.sources[name]).items()}
    return parts


def _files_of(name: str, node: Any) -> dict[str, dict[str, Any]]:
    """Return the size and checksum of each file that a source's settings name."""
    found = {}
    for setting, value in flatten({f"data.sources.{name}": node}).items():
        several = {f"{setting}.{number}": each for number, each in enumerate(value)} if isinstance(value, list) else {}
        for key, text in (several or {setting: value}).items():
            with suppress(OSError):
                if _may_be_path(text):
                    found[f"{Path(text).name} ({key})"] = _identified(Path(text))
    return found


def _may_be_path(value: Any) -> bool:
    return isinstance(value, str) and ("/" in value or "." in value) and files.is_file(Path(value))


def _identified(path: Path) -> dict[str, Any]:
    digest = new_hash()
    with files.open_regular(path, follow=True) as file:
        size = files.size_of(file.fileno())
        half = WHOLE_FILE_BYTES // 2
        for begin in (0, max(half, size - half)):
            file.seek(begin)
            digest.update(file.read(half))
    return {"bytes": size, "xxh128": digest.hexdigest()}


def with_weights(config: Config, datasets: dict[str, Any]) -> Config:
    """Return `config` with a number for every weight that `sampler.weights_by` derives from the data.

    With `weights_by=tokens`, weights are token shares, but a sampler needs sample shares. See `_of_samples`.

    Args:
        config: config of the run.
        datasets: sources by name.

    Raises:
        UserError: a source does not state its tokens per sample, or all sources are empty.
    """
    by, weights = config.sampler.weights_by, source_weights(config)
    means = mean_tokens(datasets)
    in_tokens = by is WeightsBy.tokens and len(datasets) > 1
    converts = in_tokens and len(set(means.values())) > 1
    _check_unit(config, len(set(means.values())) > 1)
    if not in_tokens and not any(isinstance(weight, WeightsBy) for weight in weights.values()):
        return config
    missing = [name for name in datasets if name not in means and len(datasets[name])]
    if by is WeightsBy.tokens and missing:
        raise UserError(
            f"sampler.weights_by=tokens: data.sources.{missing[0]} does not say how many tokens a sample has (its "
            "class needs an attribute tokens_per_sample): set sampler.weights_by=sizes, or leave it out"
        )

    def number(name: str, weight: Any) -> Any:
        if not isinstance(weight, WeightsBy):
            return weight
        size = len(datasets[name])
        return float(round(size * means.get(name, 1)) if weight is WeightsBy.tokens else size)

    sampler = replace(
        config.sampler, weights={name: number(name, weight) for name, weight in weights.items()}, weights_by=None
    )
    sampler.options.update(config.sampler.options)
    if not any(sampler.weights.values()):
        raise UserError("sampler.weights_by: the sources are empty, and so have no weight; add data")
    phases = {
        name: replace(phase, weights={source: number(source, weight) for source, weight in phase.weights.items()})
        for name, phase in config.phases.items()
    }
    config = replace(config, sampler=sampler, phases=phases)
    return _of_samples(config, means) if converts else config


def _check_unit(config: Config, differ: bool) -> None:
    """Check that weights have the same unit in a branch and its trunk, if token shares and sample shares `differ`.

    Raises:
        UserError: the units differ.
    """
    if "sampler.weights_by" not in config.fork.was or not differ:
        return
    by, before = config.sampler.weights_by, config.fork.was["sampler.weights_by"]
    if WeightsBy.tokens.value in (before, by and by.value):
        raise UserError(
            f"sampler.weights_by={by.value if by else 'null'}: it is {before or 'null'} in the trunk, and weights of "
            "tokens do not mix with others where the samples of the sources hold different numbers of them: leave it "
            "as it is, and set sampler.weights"
        )


def _of_samples(config: Config, means: dict[str, float]) -> Config:
    """Convert token shares to sample shares by dividing by the mean number of tokens per sample.

    A temperature applies to token shares, so it is applied here, and the sampler's temperature is set to 1.
    """
    schedule = phase_schedule(config)

    def converted(state: PhaseState) -> dict[str, float]:
        wanted = state.weight_list if state.temperature == 1 else shares(state.weight_list, state.temperature)
        return {name: weight / means.get(name, 1) for name, weight in zip(state.weights, wanted, strict=True)}

    base = phase_schedule(replace(config, phases={})).at(0)
    sampler = replace(config.sampler, weights=converted(base), temperature=1.0)
    sampler.options.update(config.sampler.options)
    phases = {
        name: replace(phase, weights=converted(schedule.at(phase.start_step)), temperature=None)
        for name, phase in config.phases.items()
    }
    return replace(config, sampler=sampler, phases=phases)
