"""Define the runner's entries in the train state, in addition to those of `runner.checkpoint.build_train_state`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from exactdata.order.batch_shape import BatchShape
from runner.checkpoint.tensors.compare import EVERY
from runner.checkpoint.tensors.state import check_like
from runner.errors import CheckpointError


@dataclass(frozen=True)
class RunState:
    """State that a resume needs in addition to weights, optimizer, random generators, scheduler and loader.

    Attributes:
        order: state of the consumption (see `runner.training.data.consumption`). Empty for a loader that is not
            tracked.
        evaluated: True if the metrics already contain the evaluation of this step.
        threads: number of torch's CPU threads, which determines how sums are split.
        batch_shapes: how the steps so far were split over ranks and micro-batches.
        task: state of the task on each rank. Empty if the task has no state.
        data_plan: the part of the config that determines the data order (see `runner.training.data.order.data_plan`).
        callbacks: state of each callback that has one, by name.
        dropped_callbacks: digest of the code and options of each callback that was dropped because it raised, by name.
        samples_seen: samples trained on so far, over all ranks.
        stop_asked: a callback's request to end the run at this step (see `runner.training.ending`). Usually empty.
        seed: seed of rank-invariant steps. It is the run's seed, unless a branch has changed it.
    """

    order: dict[str, Any]
    evaluated: bool
    threads: int
    batch_shapes: tuple[BatchShape, ...]
    data_plan: dict[str, Any]
    task: list[dict[str, Any]] = field(default_factory=list)
    callbacks: dict[str, Any] = field(default_factory=dict)
    dropped_callbacks: dict[str, str] = field(default_factory=dict)
    samples_seen: int = 0
    stop_asked: dict[str, str] = field(default_factory=dict)
    seed: int = 0

    def to_extra(self) -> dict[str, Any]:
        """Return the entries for `build_train_state(extra=...)`: only numbers, strings, lists and dicts."""
        return {**vars(self), "batch_shapes": [asdict(shape) for shape in self.batch_shapes]}

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> RunState:
        """Read the entries from a train state or its extra part, which may contain further entries.

        Raises:
            CheckpointError: an entry is missing, or a batch shape is invalid.
        """
        missing = [name for name in cls.__dataclass_fields__ if name not in extra]
        if missing:
            raise CheckpointError(
                f"the train state has no {', '.join(map(repr, missing))}, which every run saves: "
                "resume from a checkpoint that this version of the runner wrote"
            )
        check_like(extra, _EXAMPLE, "the train state")
        try:
            shapes = tuple(BatchShape(**shape) for shape in extra["batch_shapes"])
        except TypeError as error:
            raise CheckpointError(f"batch_shapes in the train state: {error}; use another checkpoint") from error
        return cls(**{name: extra[name] for name in cls.__dataclass_fields__} | {"batch_shapes": shapes})


_EXAMPLE: dict[str, Any] = {
    **vars(RunState({}, evaluated=False, threads=0, batch_shapes=(), data_plan={})),
    "batch_shapes": [asdict(BatchShape(0, 0, 0))],
    "task": [{}],
    "dropped_callbacks": {EVERY: ""},
    "stop_asked": {EVERY: ""},
}
