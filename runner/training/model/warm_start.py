"""Warm-start a new run's model with weights from a different run or a file (`init_from`)."""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.checkpoint.files import choice
from runner.checkpoint.files.directory import store_of
from runner.checkpoint.files.reading import newest_step
from runner.checkpoint.tensors import reader
from runner.checkpoint.tensors.staging import AVERAGE, MODEL, model_state
from runner.config.schema import Config, InitConfig
from runner.errors import UserError
from runner.rundir.attempt_log import insist
from runner.rundir.paths import RunDir
from runner.rundir.trunk import find
from runner.system import files
from runner.system.distributed import World

SHOWN = 8  # maximum number of names listed per table entry
ABSENT = "not in the model"


@dataclass(frozen=True)
class Source:
    """Weights by name, with a description of their source.

    Attributes:
        text: description of the source, for messages.
        digest: SHA-256 of the file, or of the checkpoint's manifest.
        step: step of the checkpoint, or None for a file.
    """

    text: str
    digest: str
    step: int | None
    weights: Mapping[str, torch.Tensor]

    def record(self) -> dict[str, Any]:
        """Return the record that lets a later attempt check that it uses the same weights."""
        return {"source": self.text, "digest": self.digest, "step": self.step}


def starts_warm(config: Config) -> bool:
    """Check whether a new run begins with weights from `init_from`. A branch begins with its trunk's weights."""
    return config.fork.run is None and (config.init_from.path is not None or config.init_from.run is not None)


def start_warm(model: nn.Module, config: Config, run: RunDir, world: World) -> None:
    """Load the initial weights of a new run into its model. After a kill, load the same weights again."""
    if not starts_warm(config) or newest_step(run):
        return
    options, opened = config.init_from, list[Source]()

    def choose() -> dict[str, Any]:
        opened.append(open_source(options, run, files.read_object(run.init)))
        return opened[0].record()

    # Rank 0 chooses for all ranks, because the newest or best checkpoint may change before the other ranks choose.
    chosen = world.run_on_main(choose)

    def load() -> Table:
        return fill_model(model, opened[0] if opened else open_source(options, run, chosen), options)

    table = world.run_on_all(load)
    if world.is_main:
        record = {**chosen, **asdict(table)}
        insist(lambda: files.write_json(run.init, record, guard=run.guard), run.init)
        lines = [f"initial weights from {chosen['source']}:", *(f"  {each}" for each in table.lines())]
        print("\n".join(lines), flush=True)


def open_source(options: InitConfig, run: RunDir, recorded: Mapping[str, Any]) -> Source:
    """Open the weights that `init_from` names. If the source run has averaged weights, they are used.

    Args:
        options: the path of a file, or a run and the checkpoint to choose.
        run: the run that begins with the weights.
        recorded: `Source.record` of an earlier attempt; empty for the first attempt.

    Raises:
        UserError: the weights do not exist, or they differ from the weights of the earlier attempt.
        CheckpointError: the checkpoint is corrupt.
    """
    if options.run is None:
        source = _of_file(Path(str(options.path)))
    else:
        source = _of_run(find(options.run, run.path), str(options.at), recorded)
    if recorded and recorded.get("digest") != source.digest:
        raise UserError(
            f"init_from: {source.text} is not what this run began with ({recorded.get('source')}, SHA-256 "
            f"{recorded.get('digest')!s:.12}): put that back, or begin anew in another directory (run.dir)"
        )
    return source


def _of_run(run: RunDir, at: str, recorded: Mapping[str, Any]) -> Source:
    if not files.is_dir(run.path):
        raise UserError(f"init_from: the run {run.path} is gone: put it back, beside this run for example")
    step = recorded.get("step")
    try:
        # A different checkpoint may be the best by now.
        chosen = choice.choose(store_of(run), at if step is None else str(step))
    except UserError as error:
        began = "" if step is None else f"this run began with step {step}, whose checkpoint is needed again: "
        raise type(error)(f"init_from={run.path}@{at}: {began}{error}") from error
    digest = hashlib.sha256(chosen.manifest.encode()).hexdigest()
    averaged = dict(reader.tensors(chosen.at, chosen.manifest, AVERAGE))
    weights = averaged or dict(reader.tensors(chosen.at, chosen.manifest, MODEL))
    return Source(f"{run.path} at step {chosen.step}", digest, chosen.step, weights)


def _of_file(path: Path) -> Source:
    """Map the file into memory, so that the ranks of a machine share one copy in the kernel's cache."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        with files.open_regular(path, follow=True) as file:  # models downloaded from a hub are links into a cache
            digest = hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]
            weights = load_file(path)  # opens the file again
            read, mapped = files.stat_fd(file.fileno()), files.stat(path)
        if (read.st_dev, read.st_ino, read.st_mtime_ns) != (mapped.st_dev, mapped.st_ino, mapped.st_mtime_ns):
            raise UserError(f"init_from={path} was replaced while it was read: rerun the command")
        return Source(str(path), digest, None, weights)
    except OSError as error:
        raise UserError(f"init_from={path} cannot be read ({error.strerror or error})") from error
    except (SafetensorError, KeyError, ValueError) as error:  # KeyError: torch does not have the dtype
        raise UserError(f"init_from={path} is not a safetensors file ({error}): write one with safetensors") from None


@dataclass(frozen=True)
class Table:
    """The result of a warm start for each weight, by name.

    Attributes:
        loaded: copied weights.
        converted: copied weights whose dtype was converted, as (before, now).
        reshaped: copied weights whose shape was changed, with the same number of values, as (before, now).
        initial: weights that keep their initial values, with the reason: the source does not have them or has a
            different shape.
        left_out: weights of the source that were not used, with the reason.
    """

    loaded: list[str] = field(default_factory=list)
    converted: dict[str, tuple[str, str]] = field(default_factory=dict)
    reshaped: dict[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    initial: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return the table as lines of text."""
        found = [f"loaded {len(self.loaded)} tensors"]
        changes = {title: {n: f"{a} -> {b}" for n, (a, b) in getattr(self, title).items()} for title in CHANGES}
        for title, entries in {**changes, "initial": self.initial, "left out": self.left_out}.items():
            found += [f"{title} {name}: {why}" for name, why in list(entries.items())[:SHOWN]]
            if len(entries) > SHOWN:
                found.append(f"{title}: {len(entries) - SHOWN} more")
        return found


CHANGES = ("converted", "reshaped")


def fill_model(module: nn.Module, source: Source, options: InitConfig) -> Table:
    """Copy the weights of `source` into a model that is not wrapped.

    Args:
        module: the model.
        source: the weights.
        options: which weights to copy, and whether all of them must match.

    Raises:
        UserError: no weight matches, or some do not match and `init_from.strict` is true.
    """
    target = model_state(module)[0]
    matched = {name for name in source.weights if _matches(name, options.match)}
    if not matched:
        raise UserError(
            f"init_from.match={options.match} matches nothing in {source.text}; it has {_some(source.weights)}"
            if source.weights
            else f"init_from: {source.text} has no weights"
        )
    table = Table(left_out={name: "not in init_from.match" for name in sorted(source.weights) if name not in matched})
    table.left_out.update(dict.fromkeys(sorted(matched - target.keys()), ABSENT))
    with torch.no_grad():
        for name, tensor in target.items():
            if name in matched:
                _copy_weight(name, source, tensor, options.strict, table)
            elif _matches(name, options.match):
                table.initial[name] = f"not in {source.text}"
    _count_tied(target, table)
    _check(table, source, options)
    return table


def _copy_weight(name: str, source: Source, tensor: torch.Tensor, strict: bool, table: Table) -> None:
    given = source.weights[name]
    shapes = list(given.shape), list(tensor.shape)
    if shapes[0] != shapes[1] and (strict or given.numel() != tensor.numel()):
        table.initial[name] = f"it has shape {shapes[0]} in {source.text}, and {shapes[1]} in the model"
        return
    tensor.copy_(given.reshape(tensor.shape))
    if shapes[0] == shapes[1]:
        table.loaded.append(name)
    else:
        table.reshaped[name] = shapes
    if given.dtype != tensor.dtype:
        table.converted[name] = str(given.dtype), str(tensor.dtype)


def _count_tied(target: Mapping[str, torch.Tensor], table: Table) -> None:
    """Mark a weight with several names as loaded if one of the names was loaded, because files store it once."""
    loaded = {_place(target[name]) for name in (*table.loaded, *table.reshaped)}
    for name in [name for name in table.initial if target[name].numel() and _place(target[name]) in loaded]:
        del table.initial[name]
        table.loaded.append(name)


def _place(tensor: torch.Tensor) -> tuple[int, torch.Size]:
    return tensor.data_ptr(), tensor.shape


def _check(table: Table, source: Source, options: InitConfig) -> None:
    wrong = {**table.initial, **{name: why for name, why in table.left_out.items() if why == ABSENT}}
    named = "; ".join(f"{name}: {why}" for name, why in list(wrong.items())[:3])
    more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
    if not table.loaded and not table.reshaped:
        raise UserError(f"init_from: no weight of {source.text} fits the model ({named}{more})")
    if options.strict and wrong:
        raise UserError(
            f"init_from: {len(wrong)} weights of {source.text} do not fit ({named}{more}): choose those that do with "
            "init_from.match, or set init_from.strict=false, and the others keep their initial values"
        )


def _matches(name: str, patterns: list[str]) -> bool:
    return not patterns or any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _some(weights: Mapping[str, Any]) -> str:
    names = list(weights)[:3]
    return ", ".join(names) + (" and others" if len(weights) > 3 else "")
