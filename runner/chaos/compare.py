"""Compare two run directories bit for bit: all metrics records, tensors and random generators."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from runner.checkpoint.files import manifest as manifests
from runner.checkpoint.files.directory import Folder
from runner.checkpoint.tensors.compare import MISSING, compare_checkpoints, nested_differences, shown
from runner.errors import CheckpointError
from runner.rundir.paths import RunDir
from runner.system import files

# These entries depend on whether a step's checkpoint was saved before or after its evaluation.
IGNORED = ("evaluated",)
# State of each rank: its random generators, which rank-invariant training seeds for every micro-batch, and the number
# of batches it has loaded. The data position and the digest of the consumed samples are in other entries.
OF_RANKS = ("rng_by_rank", "dataloader", "dataloader_by_rank", "batch_shapes")


@dataclass(frozen=True)
class RunDifference:
    """A value that differs between two runs, with its step, its name, and the value in each run."""

    step: int | None
    key: str
    reference: str
    other: str

    def __str__(self) -> str:
        where = f"step {self.step}, " if self.step is not None else ""
        return f"{where}{self.key}: {self.reference} in the reference, {self.other} under faults"


@dataclass
class Comparison:
    """The number of items compared, and the first difference of each kind."""

    records: int = 0
    checkpoints: list[int] = field(default_factory=list)
    tensors: int = 0
    values: int = 0
    ranks: list[int] = field(default_factory=list)  # the numbers of ranks of all attempts of both runs
    differences: list[RunDifference] = field(default_factory=list)

    @property
    def identical(self) -> bool:
        return not self.differences

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as plain values, for a report."""
        return {**asdict(self), "identical": self.identical}


def compare(reference: RunDir, other: RunDir) -> Comparison:
    """Compare all metrics and every checkpoint that both runs have. Both must have the same last checkpoint.

    If the number of ranks changed, per-rank state is skipped in the comparison of train states.
    """
    found = Comparison(ranks=sorted({*_ranks(reference), *_ranks(other)}))
    compare_metrics(list(files.read_lines(reference.metrics)), list(files.read_lines(other.metrics)), found)
    mine, theirs = reference.checkpoint_steps(), other.checkpoint_steps()
    if not mine or mine[-1:] != theirs[-1:]:
        last = ["none" if not steps else str(steps[-1]) for steps in (mine, theirs)]
        found.differences.append(RunDifference(None, "step of the last checkpoint", *last))
    for step in sorted(set(mine) & set(theirs)):
        _compare_checkpoint(step, reference, other, found)
    return found


def _ranks(run: RunDir) -> set[int]:
    counts = (line.get("ranks") for line in files.read_lines(run.attempts))
    return {count for count in counts if isinstance(count, int)}


def compare_metrics(reference: list[Any], other: list[Any], found: Comparison) -> None:
    """Compare two lists of records in order, and add the first difference to `found`."""
    for mine, theirs in itertools.zip_longest(reference, other):
        difference = _record_difference(mine, theirs)
        if difference is not None:
            found.differences.append(difference)
            return
        found.records += 1


def _record_difference(mine: Any, theirs: Any) -> RunDifference | None:
    """Return the first difference between two records, or None if they are equal."""
    if mine is None or theirs is None or _label(mine) != _label(theirs):
        labels = ["no record" if record is None else _label(record) for record in (mine, theirs)]
        steps = [record["step"] for record in (mine, theirs) if record is not None]
        return RunDifference(min(steps), "record", *labels)
    for key in dict.fromkeys([*mine, *theirs]):
        for name, one, two in nested_differences(mine.get(key, MISSING), theirs.get(key, MISSING), key):
            return RunDifference(mine["step"], name, shown(one), shown(two))
    return None


def _label(record: Mapping[str, Any]) -> str:
    return f"the {'training' if 'loss' in record else 'evaluation'} of step {record.get('step')}"


def _compare_checkpoint(step: int, reference: RunDir, other: RunDir, found: Comparison) -> None:
    one, two = (Folder(run.checkpoint(step)) for run in (reference, other))
    try:
        read = manifests.read(one), manifests.read(two)
        manifests.verify(one, read[0])
        manifests.verify(two, read[1])
        ignored = (*IGNORED, *(OF_RANKS if len(found.ranks) > 1 else ()))
        compared = compare_checkpoints(one, two, read, ignore=ignored)
    except (manifests.CorruptionError, CheckpointError) as error:
        found.differences.append(RunDifference(step, "checkpoint", "intact", str(error)))
        return
    found.tensors += compared.tensors
    found.values += compared.values
    if compared.differences:
        first = compared.differences[0]
        found.differences.append(RunDifference(step, first.name, first.one, first.two))
    else:
        found.checkpoints.append(step)
