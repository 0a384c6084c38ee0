"""The end of a run: it is finished only when its last evaluation is made and its last state is saved."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from runner.checkpoint.cadence import Cadence
from runner.distributed import World
from runner.errors import TrainingError
from runner.loop import Evaluation, Trainer
from runner.order import NoOrder

BATCH = (torch.ones(2, 3), torch.ones(2, 1))


class Recorder:
    """Keeps what it is given; `full` refuses to be made durable."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.full = False

    def step(self, record: dict[str, Any], seconds: float, tokens: int) -> None:
        self.records.append(record)

    def evaluation(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def before_save(self) -> bool:
        return not self.full

    def cadence(self, explanation: str) -> None:
        pass


class Manager:
    """Says of each save whether it is committed."""

    last_error: str | None = None

    def __init__(self) -> None:
        self.saved: list[tuple[int, bool]] = []

    def save(self, step: int, *state: Any, metric: float | None, wait: bool) -> bool:
        if self.last_error is None:
            self.saved.append((step, wait))
        return self.last_error is None

    def newest(self) -> None:
        return None


class Stopping(list[Any]):
    """Batches of an evaluation; a signal comes while they are read."""

    stop = False

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            self.stop = True
            yield batch


class Loader(list[Any]):
    def state_dict(self) -> dict[str, int]:
        return {}


def trainer(batches: Stopping) -> Trainer:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return Trainer(
        world=World(),
        device=torch.device("cpu"),
        model=model,
        optimizer=optimizer,
        scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0),
        loss=lambda model, batch: (model(batch[0]) - batch[1]).square().mean(dim=1),
        loader=Loader([BATCH] * 8),
        order=NoOrder(),
        evaluation=Evaluation(batches, batches=4, every_steps=4),
        manager=Manager(),
        cadence=Cadence(100, None, start_step=0, now=0.0),
        recorder=Recorder(),
        autocast=nullcontext,
        stop=lambda: batches.stop,
        check_owner=lambda: None,
    )


def test_a_signal_in_the_last_evaluation_leaves_the_run_unfinished() -> None:
    """All steps are made and saved, but the evaluation is missing: the next attempt makes it."""
    interrupted = trainer(Stopping([BATCH] * 4))
    assert interrupted.run(4) is False
    assert interrupted.manager.saved == [(4, True)]
    assert not any("eval_loss" in record for record in interrupted.recorder.records)  # type: ignore[attr-defined]
    again = trainer(Stopping([]))
    again.step, again.evaluation = 4, Evaluation([BATCH], batches=1, every_steps=4)
    assert again.run(4) is True
    assert [sorted(record) for record in again.recorder.records] == [["eval_loss", "step"]]  # type: ignore[attr-defined]


@pytest.mark.parametrize("what", ["metrics", "checkpoint"])
def test_a_run_whose_last_state_is_not_saved_is_not_finished(what: str) -> None:
    """A full disk at the very end: an error that says so, not a completion mark without a checkpoint."""
    last = trainer(Stopping([]))
    last.evaluation = None
    if what == "metrics":
        last.recorder.full = True  # type: ignore[attr-defined]
    else:
        last.manager.last_error = "No space left on device"
    with pytest.raises(TrainingError, match="last save, at step 4, failed"):
        last.run(4)
