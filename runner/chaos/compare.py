"""Two run directories, bit for bit: every record of the metrics, every tensor, every random generator."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.checkpoint import store
from runner.errors import CheckpointError
from runner.files import read_lines
from runner.run_dir import RunDir

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Difference:
    """Where two runs part: the step, the name of the value, and the value in each."""

    step: int | None
    key: str
    reference: str
    other: str

    def __str__(self) -> str:
        where = f"step {self.step}, " if self.step is not None else ""
        return f"{where}{self.key}: {self.reference} in the reference, {self.other} under faults"


@dataclass
class Comparison:
    """How much was compared, and the first difference of each kind."""

    records: int = 0
    checkpoints: list[int] = field(default_factory=list)
    tensors: int = 0
    values: int = 0
    differences: list[Difference] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        return not self.differences

    def as_json(self) -> dict[str, Any]:
        """Plain values for a report."""
        return {**asdict(self), "identical": self.identical}


def compare(reference: RunDir, other: RunDir) -> Comparison:
    """Metrics in full, and every checkpoint that both have; the last one both must have.

    Tensors are compared by their bytes, so that a changed sign of a zero counts and a nan equals itself.
    """
    found = Comparison()
    metrics(list(read_lines(reference.metrics)), list(read_lines(other.metrics)), found)
    mine, theirs = reference.checkpoint_steps(), other.checkpoint_steps()
    if not mine or mine[-1:] != theirs[-1:]:
        last = ["none" if not steps else str(steps[-1]) for steps in (mine, theirs)]
        found.differences.append(Difference(None, "step of the last checkpoint", *last))
    for step in sorted(set(mine) & set(theirs)):
        _checkpoints(step, reference, other, found)
    return found


def metrics(reference: list[Any], other: list[Any], found: Comparison) -> None:
    """Compare records in their order; the first difference is added to `found`."""
    for mine, theirs in itertools.zip_longest(reference, other):
        difference = _record(mine, theirs)
        if difference is not None:
            found.differences.append(difference)
            return
        found.records += 1


def _record(mine: Any, theirs: Any) -> Difference | None:
    """The first difference of two records; one that is missing is named by its step."""
    if mine is None or theirs is None or _label(mine) != _label(theirs):
        labels = ["no record" if record is None else _label(record) for record in (mine, theirs)]
        steps = [record["step"] for record in (mine, theirs) if record is not None]
        return Difference(min(steps), "record", *labels)
    for key in dict.fromkeys([*mine, *theirs]):
        for name, one, two in parts(mine.get(key), theirs.get(key), key):
            return Difference(mine["step"], name, _shown(one), _shown(two))
    return None


def _label(record: Mapping[str, Any]) -> str:
    return f"the {'training' if 'loss' in record else 'evaluation'} of step {record.get('step')}"


def parts(one: Any, two: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Where two nested values differ: the name of the part, and both parts."""
    if isinstance(one, dict) and isinstance(two, dict):
        for key in dict.fromkeys([*one, *two]):
            yield from parts(one.get(key), two.get(key), f"{name}.{key}")
    elif isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)) and len(one) == len(two):
        for index, (a, b) in enumerate(zip(one, two, strict=True)):
            yield from parts(a, b, f"{name}[{index}]")
    elif _is_tensor(one) and _is_tensor(two):
        if (described := tensor_difference(one, two)) is not None:
            yield name, *described
    elif type(one) is not type(two) or (one != two and not (_is_nan(one) and _is_nan(two))):
        yield name, one, two


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "untyped_storage")


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:79] + "…"


def _checkpoints(step: int, reference: RunDir, other: RunDir, found: Comparison) -> None:
    from runner.checkpoint import manifest as manifests
    from runner.checkpoint.archive import load_train_state

    paths = [run.checkpoints / store.step_name(step) for run in (reference, other)]
    try:
        read = [manifests.read(path) for path in paths]
        for path, manifest in zip(paths, read, strict=True):
            manifests.verify(path, manifest)
        before = len(found.differences)
        _tensors(step, paths, read, found)
        mine, theirs = (_determined(load_train_state(path)) for path in paths)
    except (manifests.DamagedError, CheckpointError) as error:
        found.differences.append(Difference(step, "checkpoint", "whole", str(error)))
        return
    for name, one, two in parts(mine, theirs, "train state"):
        found.differences.append(Difference(step, name, _shown(one), _shown(two)))
        break
    if len(found.differences) == before:
        found.checkpoints.append(step)


def _determined(state: dict[str, Any]) -> dict[str, Any]:
    """A train state without what depends on when it was saved: before the evaluation of its step, or after."""
    return {name: value for name, value in state.items() if name != "evaluated"}


def _tensors(step: int, paths: Iterable[Path], manifests: Iterable[Any], found: Comparison) -> None:
    from runner.checkpoint.archive import Archive

    one, two = (Archive(path, manifest) for path, manifest in zip(paths, manifests, strict=True))
    with one, two:
        for name in dict.fromkeys([*one.entries, *two.entries]):
            if name not in one.entries or name not in two.entries:
                there = ["there" if name in archive.entries else "missing" for archive in (one, two)]
                found.differences.append(Difference(step, name, *there))
                return
            mine = one.read(name)
            described = tensor_difference(mine, two.read(name))
            if described is not None:
                found.differences.append(Difference(step, name, *described))
                return
            found.tensors += 1
            found.values += mine.numel()


def tensor_difference(one: torch.Tensor, two: torch.Tensor) -> tuple[str, str] | None:
    """The first value in which two tensors differ, as words for each of them; None if their bytes are the same."""
    import torch

    if one.shape != two.shape or one.dtype != two.dtype:
        return tuple(f"{tuple(t.shape)} of {t.dtype}" for t in (one, two))  # type: ignore[return-value]
    flat = [tensor.detach().cpu().contiguous().reshape(-1) for tensor in (one, two)]
    if not flat[0].numel():
        return None
    raw = [tensor.view(torch.uint8).reshape(tensor.numel(), -1) for tensor in flat]
    places = (raw[0] != raw[1]).any(dim=1).nonzero()
    if not len(places):
        return None
    first = int(places[0])
    note = f" ({len(places)} of {len(raw[0])} values differ, the first at {first})"
    values = [_value(tensor[first].item()) for tensor in flat]
    return values[0], values[1] + note


def _value(number: Any) -> str:
    """A number such that different bits look different."""
    return f"{number!r} = {number.hex()}" if isinstance(number, float) else repr(number)
