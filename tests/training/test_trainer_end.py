"""The end of a run: it is finished only with the last evaluation recorded and the last checkpoint saved."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from runner.checkpoint.cadence import Cadence
from runner.errors import TrainingError
from runner.system import clock
from runner.system.distributed import World
from runner.training.callbacks.callbacks import Callbacks
from runner.training.data.consumption import Consumption
from runner.training.evaluation.evaluation import Evaluation
from runner.training.evaluation.held_out import EvaluationSet, HeldOut, MapSource
from runner.training.model.optimizers import Optimizers
from runner.training.records.recorder import Recorder
from runner.training.records.run_state import RunState
from runner.training.step.step import Forward, TrainStep
from runner.training.step.tasks import Task
from runner.training.trainer import Trainer

BATCH = (torch.ones(2, 3), torch.ones(2, 1))


class KeepingRecorder(Recorder):
    """A recorder that keeps its records; with `full`, they cannot be made durable."""

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.full = False

    def step(self, record: dict[str, Any], seconds: float, samples: int, tokens: int | None = None) -> None:
        self.records.append(record)

    def last_evaluation(self, record: dict[str, Any]) -> None:
        raise AssertionError

    def evaluation(self, record: dict[str, Any]) -> None:
        self.records.append(record)

    def before_save(self) -> bool:
        return not self.full


class Manager:
    """A manager that commits every save, unless `last_error` is set."""

    last_error: str | None = None
    copying = False

    def __init__(self) -> None:
        self.saved: list[tuple[int, bool]] = []

    def save(self, step: int, *state: Any, copy_later: bool, wait: bool, **options: Any) -> bool:
        if self.last_error is None:
            self.saved.append((step, wait))
        return self.last_error is None

    def newest(self) -> None:
        return None


class Stopping(list[Any]):
    """Batches of an evaluation, during which a signal comes."""

    stop = False

    def __iter__(self) -> Any:
        for batch in super().__iter__():
            self.stop = True
            yield batch


class Loader(list[Any]):
    def state_dict(self) -> dict[str, int]:
        return {}


def trainer(batches: list[Any], eval_batches: int = 4, manager: Any = None) -> Trainer:
    manager = manager or Manager()
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    forward = Forward(
        World(),
        torch.device("cpu"),
        model,
        Task.of(lambda model, batch: (model(batch[0]) - batch[1]).square().mean(1)),
        nullcontext,
    )
    held_out = MapSource(HeldOut(2 * eval_batches, 2, eval_batches), batches)
    loader = Loader([BATCH] * 8)
    return Trainer(
        train_step=TrainStep(forward, Optimizers.of_one(model, optimizer, scheduler), sources=[]),
        consumption=Consumption(loader),
        evaluation=Evaluation(forward, [EvaluationSet("", {"a": held_out}, every_steps=4)]),
        manager=manager,
        cadence=Cadence(100, None, start_step=0, now=0.0),
        recorder=KeepingRecorder(),
        run_state=RunState({}, False, 1, (), {}),
        stop=lambda: getattr(batches, "stop", False),
        check_fence=lambda: None,
    )


class Copying(Manager):
    """A save that copies only when it is awaited: nothing passed to `save` may have changed by then."""

    def __init__(self) -> None:
        super().__init__()
        self.lent: list[bool] = []
        self.checked = 0

    def save(self, step: int, *state: Any, copy_later: bool, wait: bool, **options: Any) -> bool:
        self.lent.append(copy_later)
        self.copying = copy_later
        self.model = state[0]
        self.before = copy.deepcopy(state[0].state_dict())
        return super().save(step, *state, wait=wait, copy_later=copy_later, **options)

    def finish_copy(self) -> None:
        now = self.model.state_dict()
        assert all(torch.equal(now[name], value) for name, value in self.before.items())
        self.checked += 1
        self.copying = False


def test_an_update_waits_for_the_copies_of_a_save() -> None:
    manager = Copying()
    lending = trainer([BATCH], manager=manager)
    lending.evaluation, lending.cadence = None, Cadence(1, None)
    before = lending.train_step.forward.model.state_dict()["weight"].clone()
    assert lending.run(4)
    assert not torch.equal(before, lending.train_step.forward.model.state_dict()["weight"])
    assert manager.lent == [True] * 4
    assert manager.checked == 3


def test_user_loader_is_read_to_its_end_before_the_next_pass() -> None:
    made, seen = trainer([BATCH]), list[float]()
    made.evaluation = None
    made.consumption.loader[:] = [(torch.full((2, 3), float(number)), torch.ones(2, 1)) for number in range(3)]
    made.train_step.forward.model.register_forward_hook(lambda model, inputs, _: seen.append(inputs[0][0, 0].item()))
    assert made.run(5)
    assert seen == [0, 1, 2, 0, 1]


class Taking:
    """A task with whole steps that changes weights first."""

    def take_step(self, step: Any) -> None:
        with torch.no_grad():
            step.model.weight.mul_(0.5)
        for batch in step.batches:
            step.backward((step.model(batch[0]) - batch[1]).square().mean(1))
        step.update()


class Meddling(Callbacks):
    """A callback that changes weights after a save."""

    def __init__(self, model: nn.Module) -> None:
        self.__dict__.update(vars(Callbacks.none()))
        self.model = model

    def has(self, method: str) -> bool:
        return method == "on_save"

    def saved(self, step: int) -> None:
        with torch.no_grad():
            self.model.weight.mul_(0.5)  # type: ignore[operator]


@pytest.mark.parametrize("who", ["task", "callback"])
def test_user_step_or_callback_may_change_weights(who: str) -> None:
    """So no tensor may be left to copy then."""
    manager = Copying()
    taken = trainer([BATCH], manager=manager)
    taken.evaluation, taken.cadence = None, Cadence(1, None)
    if who == "task":
        step = taken.train_step
        taken.train_step = TrainStep(
            replace(step.forward, task=Task("Taking", None, None, Taking().take_step)),
            step.optimizers,
            sources=[],
        )
    else:
        taken.callbacks = Meddling(taken.train_step.forward.model)
    assert taken.run(3)
    assert manager.lent == [False] * 3


def test_signal_in_the_last_evaluation_leaves_the_run_open() -> None:
    """All steps are made and saved, but the evaluation is missing: the next attempt makes it."""
    manager = Manager()
    interrupted = trainer(Stopping([BATCH] * 4), manager=manager)
    assert interrupted.run(4) is False
    assert manager.saved == [(4, True)]
    assert not any("eval_loss" in record for record in interrupted.recorder.records)  # type: ignore[attr-defined]
    resumed = trainer([BATCH], eval_batches=1)
    resumed.step = 4
    assert resumed.run(4) is True
    assert [sorted(record) for record in resumed.recorder.records] == [["eval_loss", "step"]]  # type: ignore[attr-defined]


class SlowCallbacks(Callbacks):
    """Callbacks whose methods each take a different time."""

    def __init__(self, now: list[float]) -> None:
        self.__dict__.update(vars(Callbacks.none()))
        self.now = now

    def start(self, step: int) -> None:
        self.now[0] += 1000

    def step_end(self, step: int, record: dict[str, Any]) -> dict[str, Any]:
        self.now[0] += 1
        return record

    def evaluated(self, step: int, record: dict[str, Any]) -> dict[str, Any]:
        self.now[0] += 100
        return record

    def saved(self, step: int) -> None:
        self.now[0] += 10

    def end(self, step: int) -> None:
        self.now[0] += 5000


def test_time_of_callbacks_counts_where_they_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """A download in on_start or a text written after an evaluation is not time of steps."""
    now = [0.0]
    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    made = trainer([BATCH], eval_batches=1)
    made.callbacks = SlowCallbacks(now)
    assert made.run(8) is True
    spent = {"start": 1000, "steps": 8, "data_wait": 0, "evaluation": 200, "save": 10, "end": 5000}
    assert made.account.state()["seconds"] == spent


@pytest.mark.parametrize("what", ["metrics", "checkpoint"])
def test_a_run_whose_last_save_fails_is_not_finished(what: str) -> None:
    """A full disk at the very end is an error, not a completion mark without a checkpoint."""
    last = trainer([])
    last.evaluation = None
    if what == "metrics":
        last.recorder.full = True  # type: ignore[attr-defined]
    else:
        last.manager.last_error = "No space left on device"
    with pytest.raises(TrainingError, match="last save, at step 4, failed"):
        last.run(4)
