"""Callbacks change nothing of a run, survive every kill with their state, and a mistake in one is one line."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import hooks
import numpy as np
import pytest
import torch
import yaml
from composing import compose
from resume import assert_same
from runs import PACED, TINY, Run, assert_same_run
from torch import nn

from exactdata import generators
from runner.checkpoint import get_rng_state
from runner.config.schema import CallbackFailure, Config
from runner.errors import CallbackError, SupersededError, UserError
from runner.rundir.paths import RunDir
from runner.system import files
from runner.system.distributed import World
from runner.training.callbacks.callbacks import Callbacks
from runner.training.callbacks.hook import Failure
from runner.training.records.run_state import RunState

STEPS = 24
COMMON = [
    *TINY,
    PACED,
    f"train.steps={STEPS}",
    "eval.every_steps=10",
    "checkpoint.every_steps=7",
    "model.dropout=0.2",
    "train.batch_size=2",
]
CALLBACKS = ["+callbacks.drawing._target_=hooks.Drawing", "+callbacks.raises={_target_: hooks.RaisesAt, step: 9}"]
OWN = ("drawn", "calls", "eval_drawn", "steps")


# ---- A run with callbacks


def without_callbacks(run: Run) -> list[dict[str, Any]]:
    return [{key: value for key, value in record.items() if key not in OWN} for record in run.records()]


STEP_LR = ["scheduler=own", "scheduler._target_=torch.optim.lr_scheduler.StepLR", "scheduler.step_size=5"]
GROUPS = 'optimizer.groups=[{match: "blocks.*", lr: 1e-4}, {match: "positions*", freeze: true}]'
STREAM = "data.loader={_target_: custom.stream_loader, length: 50, sequence_length: 16, batch_size: 2}"
KILLED = {
    "float16, groups, an average and a schedule of torch's": (
        1,
        [*STEP_LR, GROUPS, "train.precision=float16", "train.ema_decay=0.8"],
    ),
    "two ranks with fsdp, on one of which a callback raises, and a user's loader": (
        2,
        ["strategy=fsdp", "+callbacks.raises.rank=1", STREAM],
    ),
}


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kind", KILLED)
def test_a_killed_run_with_callbacks_is_bit_identical(kind: str, tmp_path: Path) -> None:
    """Let callbacks draw from all generators, seed them, keep a state and log; one raises."""
    ranks, added = KILLED[kind]
    plain = Run(tmp_path / "plain", [*COMMON, *(word for word in added if "callbacks" not in word)], ranks=ranks)
    plain.finish()
    words = [*COMMON, *CALLBACKS, *added]
    whole = Run(tmp_path / "whole", words, ranks=ranks)
    output = whole.finish()
    assert output.count("callbacks.raises.on_step_end: ValueError: no luck (") == 1
    assert "Traceback" not in output
    assert without_callbacks(whole) == plain.records()
    killed = Run(tmp_path / "killed", words, ranks=ranks)
    killed.interrupt((11, signal.SIGKILL), (18, signal.SIGTERM))
    assert "callbacks.raises is left out: it raised in this run" in killed.finish()
    assert_same_run(killed, whole)
    assert [record["calls"] for record in whole.records() if "calls" in record][-1] == STEPS + 200
    assert [record.get("steps") for record in whole.records() if "loss" in record] == [*range(1, 10), *[None] * 15]
    assert (killed.path / "ended").read_text() == f"{STEPS} drop"
    assert "ValueError: no\nluck" in (killed.path / "callback_errors.txt").read_text()
    for name in ("artifacts/texts/drawn-00000020.txt", "artifacts/drawn-00000020.png"):
        assert (killed.path / name).read_bytes() == (whole.path / name).read_bytes()
    timings = [json.loads(line) for line in (whole.path / "timings.jsonl").read_text().splitlines()]
    assert [line["saved_at"] for line in timings if line.get("callback") == "on_save"] == [7, 14, 21, 24]


@pytest.mark.slow
def test_a_failing_callback_stops_the_run_on_request(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", [*COMMON, *CALLBACKS, "train.on_callback_error=stop"])
    run.start()
    status, output = run.wait()
    assert status == 1
    (line,) = [line for line in output.splitlines() if line.startswith("error:")]
    assert "callbacks.raises.on_step_end: ValueError: no luck" in line
    assert "Traceback" not in output
    assert run.records()[-1]["step"] == 8
    fixed = Run(run.path, [*COMMON, CALLBACKS[0], "train.on_callback_error=stop"])
    fixed.finish()
    assert fixed.records()[-1]["step"] == STEPS


# ---- Mistakes


@cache
def config_of_all() -> Config:
    return compose(TINY).config


def opened(path: Path, *nodes: str, saved: RunState | None = None, stop: bool = False) -> Callbacks:
    callbacks = {name: yaml.safe_load(node) for name, node in zip("ab", nodes, strict=False)}
    train = replace(config_of_all().train, on_callback_error=CallbackFailure.stop if stop else CallbackFailure.drop)
    config = replace(config_of_all(), callbacks=callbacks, train=train)
    return Callbacks.open(config, World(), RunDir(path), nn.Linear(2, 2), torch.device("cpu"), saved)


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ("{_target_: hooks.Nothing}", ["callbacks.a (hooks.Nothing) has none", "on_step_end"]),
        ("{_target_: hooks.Misspelt}", ["on_stepend", "did you mean 'on_step_end'?"]),
        ("{_target_: hooks.Abbreviated}", ["on_eval,", "did you mean 'on_evaluation'?"]),
        ("{_target_: hooks.NoContext}", ["on_end must take one argument", "too many positional"]),
        ("{_target_: hooks.Half}", ["has state_dict, but no load_state_dict"]),
        ("{_target_: hooks.Keeps}", ["callbacks.a.state_dict()['seen'][0] is a numpy.ndarray", "torch.from_numpy"]),
        ("{_target_: hooks.Unmade}", ["callbacks.a (hooks.Unmade): KeyError: 'nothing' (", "hooks.py, line "]),
        ("{_target_: hooks.RaisesAt, at: 3}", ["callbacks.a (hooks.RaisesAt)", "'at'"]),
    ],
)
def test_a_class_that_is_no_callback_is_one_line_at_the_start(node: str, words: list[str], tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        opened(tmp_path, node)
    assert error.value.status == 2
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"name": "loss"}, "log('loss', …): the record has 'loss' already"),
        ({"name": "eval_loss"}, "the record has 'eval_loss' already"),
        ({"name": 3}, "log(3, …): the name must be"),
        ({"value": "much"}, "log('x', …) is passed a str: pass a number"),
        ({"value": True}, "is passed a bool"),
        ({"value": float("inf")}, "is passed inf: pass a number that is finite or nan"),
        ({"value": 10**400}, "finite or nan"),
        ({"value": torch.zeros(2)}, "is passed a Tensor"),
        ({"how": "log_text", "value": 3}, "log_text('x', …) is passed a int"),
        ({"how": "log_text", "name": "../x", "value": "text"}, "the name '../x' must be letters"),
        ({"how": "log_image", "value": torch.zeros(3)}, "an image of shape torch.Size([3])"),
        ({"how": "log_image", "value": "image.png"}, "a str cannot be logged as an image"),
    ],
)
def test_a_value_that_cannot_be_logged_is_one_line(
    arguments: dict[str, Any], words: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callbacks = opened(tmp_path, "{_target_: hooks.Logs}")
    callbacks.hooks[0].callback.__init__(**arguments)
    record = {"step": 1, "loss": 1.0}
    with caplog.at_level(logging.WARNING, "runner"):
        assert callbacks.step_end(1, record) == {"step": 1, "loss": 1.0}
        assert callbacks.step_end(2, record) == {"step": 1, "loss": 1.0}
    (message,) = [entry.getMessage() for entry in caplog.records]
    assert message.startswith("callbacks.a.on_step_end: ")
    assert words in message
    assert f"{hooks.__file__}, line " in message
    assert "it is left out from here on" in message
    assert str(tmp_path / "callback_errors.txt") in message


def test_a_report_that_the_disk_refuses_stops_no_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A failed check of the lease does not stop it either; a newer attempt does."""
    callbacks = opened(tmp_path, "{_target_: hooks.Logs}")
    callbacks.hooks[0].callback.__init__(name="loss")

    def check(error: Exception) -> None:
        raise error

    superseded = SupersededError("a newer attempt holds the lease")
    for error in (OSError(errno.EIO, os.strerror(errno.EIO)), superseded):
        callbacks.run = RunDir(tmp_path, files.Guard("lease-00000001", partial(check, error)))
        with pytest.raises(SupersededError) if error is superseded else nullcontext():
            callbacks._drop(callbacks.hooks[0], Failure("it raised", "traceback"))
    assert [entry.getMessage().partition(";")[0] for entry in caplog.records] == ["it raised"]


def test_nan_and_numbers_of_numpy_and_torch_can_be_logged(tmp_path: Path) -> None:
    callbacks = opened(tmp_path, "{_target_: hooks.Logs}")
    for value in (float("nan"), np.float32(2.0), np.int64(2), torch.tensor(2), 2.0):
        callbacks.hooks[0].callback.value = value
        logged = callbacks.step_end(1, {"step": 1})["x"]
        assert type(logged) in (int, float)
        assert logged == 2 or np.isnan(logged)


def test_a_context_is_of_its_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(hooks.Logs, "on_step_end", lambda self, context: kept.append(context))
    callbacks = opened(tmp_path, "{_target_: hooks.Logs}")
    record = {"step": 1, "sources": {"code": 1}}
    callbacks.step_end(1, record)
    (context,) = kept
    context.metrics["sources"]["code"] = 2
    context.config["seed"] = 99
    assert record == {"step": 1, "sources": {"code": 1}}
    assert context.config["seed"] == 0
    with pytest.raises(TypeError):
        context.metrics["loss"] = 1
    with pytest.raises(UserError, match="log was called after"):
        context.log("x", 1)


# ---- State


def state(**changes: Any) -> RunState:
    return RunState({}, False, 1, (), {}, **changes)


def test_states_are_kept_added_and_forgotten(tmp_path: Path) -> None:
    first = opened(tmp_path, "{_target_: hooks.Drawing}")
    record: dict[str, Any] = {"step": 1, "loss": 1.0}
    first.step_end(1, record)
    kept = first.keep(state(callbacks={"gone": 1}))
    assert_same([kept.callbacks], [{"a": {"calls": 1, "tensor": torch.tensor([1])}}])
    second = opened(tmp_path, "{_target_: hooks.Drawing}", "{_target_: hooks.Drawing}", saved=kept)
    assert [hook.callback.calls for hook in second.hooks] == [1, 0]
    with pytest.raises(UserError, match=r"callbacks.a.load_state_dict: AssertionError \(.*another name"):
        opened(
            tmp_path,
            "{_target_: hooks.Drawing}",
            saved=state(callbacks={"a": {"calls": 1, "tensor": torch.ones(1) * 2}}),
        )


def test_a_failed_callback_is_left_out_until_it_changes(tmp_path: Path) -> None:
    callbacks = opened(tmp_path, "{_target_: hooks.RaisesAt, step: 1}")
    callbacks.step_end(1, {"step": 1})
    kept = callbacks.keep(state())
    same = opened(tmp_path, "{_target_: hooks.RaisesAt, step: 1}", saved=kept)
    assert same.step_end(2, {"step": 2}) == {"step": 2}
    assert same.keep(state()) == kept
    changed = opened(tmp_path, "{_target_: hooks.RaisesAt, step: 5}", saved=kept)
    assert changed.step_end(2, {"step": 2}) == {"step": 2, "steps": 2}
    assert changed.keep(state()).dropped_callbacks == {}


def test_a_state_that_turns_bad_is_the_callbacks_failure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callbacks = opened(tmp_path, "{_target_: hooks.Drawing}")
    callbacks.hooks[0].callback.calls = {1, 2}
    with caplog.at_level(logging.WARNING, "runner"):
        assert callbacks.keep(state()).callbacks["a"]["calls"] == 0
    assert "callbacks.a.state_dict" in caplog.text
    stopping = opened(tmp_path, "{_target_: hooks.RaisesAt, step: 1}", stop=True)
    with pytest.raises(CallbackError, match=r"no luck .*on_callback_error=stop"):
        stopping.step_end(1, {"step": 1})


# ---- Model and generators


def test_modes_are_put_back(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Dropout(), nn.Linear(1, 1))
    model[0].eval()
    callbacks = opened(tmp_path, "{_target_: hooks.RaisesAt, step: 1, moment: on_save}")
    callbacks.model, callbacks._modules = model, list(model.modules())
    callbacks.saved(1)
    assert [module.training for module in model.modules()] == [True, False, True]


@pytest.mark.parametrize("normals", [0, 1, 2])
@pytest.mark.parametrize("draws", [0, 623, 1000])
def test_lent_generators_come_back_as_they_were(draws: int, normals: int) -> None:
    """Include the second of a pair of normal draws, which is not in numpy's state."""
    np.random.seed(draws + normals)
    np.random.standard_normal(normals)
    np.random.random(draws)
    before = get_rng_state()
    with generators.lent():
        generators.seed(3)
        hooks.Drawing()._draw()
        np.random.set_bit_generator(np.random.PCG64(3))  # type: ignore[attr-defined]
        np.random.standard_normal(3)
    assert_same([get_rng_state()], [before])


def test_their_draws_depend_on_the_step_alone(tmp_path: Path) -> None:
    """Draws don't depend on training's generators, other callbacks or kills, and differ at every step."""
    first = opened(tmp_path, "{_target_: hooks.Drawing}")
    drawn = [first.step_end(step, {"step": step})["drawn"] for step in (1, 2, 3)]
    assert len(set(drawn)) == 3
    torch.rand(7)
    second = opened(tmp_path, "{_target_: hooks.Drawing}", "{_target_: hooks.Logs}")
    assert second.step_end(3, {"step": 3})["drawn"] == drawn[2]
