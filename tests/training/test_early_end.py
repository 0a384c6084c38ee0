"""A run that ends before its last step: by early stopping, or because a callback requests it."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from random import Random
from typing import Any

import pytest
from new_seeds import new_seed
from runs import PACED, TINY, Run, assert_same_run
from shapes import Part, Shapes, the_shapes

COMMON = [*TINY, "train.steps=12", "eval.every_steps=2", "checkpoint.every_steps=5"]
EARLY = ["early_stopping=default", "early_stopping.min_delta=100", "early_stopping.patience=2"]
STOPS = ["+callbacks.stops={_target_: hooks.Stops, step: 7}"]
RANKS = [
    *(*TINY, "data=mixture", "sampler=elastic", "train.batch_size=2", "train.global_batch_size=10", "train.steps=30"),
    *("task._target_=custom_tasks.Masked", "eval.every_steps=null", "eval.every_epochs=0.00005", "eval.at_start=true"),
    *("checkpoint.every_steps=null", "checkpoint.every_epochs=0.00004", "early_stopping=default"),
    "+callbacks.stops={_target_: hooks.Stops, step: 9, method: on_evaluation}",
]


@pytest.fixture(scope="module")
def shapes() -> Shapes:
    return the_shapes()


def mark(run: Run) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run.path / "finished.json").read_text())
    return found


@pytest.mark.slow
def test_more_patience_continues_a_run_that_ended_early(tmp_path: Path) -> None:
    """Reach the same end as without early stopping, bit for bit. The current value of the setting decides."""
    plain = Run(tmp_path / "plain", COMMON)
    plain.finish()
    other = "+callbacks.other={_target_: hooks.Stops, step: 99}"  # an unrelated setting
    run = Run(tmp_path / "run", [*COMMON, *EARLY, other])
    reason = "eval_loss has not improved on"
    assert "finished early, at step 6 of 12: eval_loss has not improved on" in run.finish()
    assert run.lines() == plain.lines()[: len(run.lines())]
    assert (run.status()["state"], run.status()["step"]) == ("finished", 6)
    assert run.status()["reason"].startswith(reason)
    assert run.attempts()[-1]["reason"] == run.status()["reason"]
    assert "finished at step 6, before its last step: eval_loss has not improved" in run.finish()
    assert len(run.attempts()) == 1
    more = Run(run.path, [*COMMON, *EARLY[:-1], "early_stopping.patience=4", other])
    assert "resuming at step 6 of 12" in more.finish()
    assert mark(run)["steps"] == 10
    Run(run.path, [*COMMON, other]).finish()
    assert mark(run) == {"steps": 12}
    assert "reason" not in run.status()
    assert_same_run(run, plain)
    assert "finished, all 12 steps" in Run(run.path, [*COMMON, *EARLY]).finish()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["on_step_end", "on_evaluation"])
def test_a_callback_ends_a_run_until_it_is_removed(method: str, tmp_path: Path) -> None:
    """Include an attempt that was killed after its last save, before it marked the run as finished."""
    plain = Run(tmp_path / "plain", COMMON)
    plain.finish()
    step = 7 if method == "on_step_end" else 8
    callback = [f"+callbacks.stops={{_target_: hooks.Stops, step: 7, method: {method}}}"]
    run = Run(tmp_path / "run", [*COMMON, *callback])
    assert f"finished early, at step {step} of 12: callbacks.stops: this is enough" in run.finish()
    wanted = run.lines()
    (run.path / "finished.json").unlink()
    assert f"finished early, at step {step} of 12: callbacks.stops: this is enough" in run.finish()
    assert run.lines() == wanted
    assert "callbacks.stops=null, or other options of it, continues" in run.finish()
    assert len(run.attempts()) == 2
    later = Run(run.path, [*COMMON, "+callbacks.stops={_target_: hooks.Stops, step: 10}"])
    assert "finished early, at step 10 of 12" in later.finish()
    Run(run.path, COMMON).finish()
    assert_same_run(run, plain)


@pytest.mark.slow
def test_signal_in_the_last_evaluation_loses_no_request(tmp_path: Path) -> None:
    """The callback is not called again for a complete step."""
    callback = f"+callbacks.stops={{_target_: hooks.Stops, step: 8, signaled: {tmp_path / 'signaled'}}}"
    run = Run(tmp_path / "run", [*COMMON, callback])
    run.start()
    status, output = run.wait()
    assert (status, run.step()) == (75, 8), output
    assert "finished early, at step 8 of 12: callbacks.stops: this is enough" in run.finish()
    assert [record["step"] for record in run.records()][-2:] == [8, 8]


@pytest.mark.slow
def test_methods_called_by_kills_cannot_end_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", [*COMMON, "+callbacks.stops={_target_: hooks.Stops, step: 0, method: on_start}"])
    output = run.finish()
    assert "stop is for on_step_end and on_evaluation" in output
    assert mark(run) == {"steps": 12}


@pytest.mark.slow
def test_killed_before_its_early_end_a_run_ends_at_the_same_step(tmp_path: Path) -> None:
    plain = Run(tmp_path / "plain", [*COMMON, *EARLY, PACED])
    plain.finish()
    run = Run(tmp_path / "run", [*COMMON, *EARLY, PACED])
    for step in (1, 4, 5):
        run.hold_at(step)
        run.start()
        assert run.kill_when(lambda run: run.idles())
        run.wait()
    run.finish()
    assert_same_run(run, plain)
    assert mark(run) == mark(plain)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.xdist_group("rank-invariant")
def test_ranks_and_kills_do_not_change_where_a_run_ends(shapes: Shapes, tmp_path: Path) -> None:
    """Use weighted losses, and evaluations and checkpoints by epochs; kill the run ten times on one to three ranks."""
    assert shapes.run(tmp_path / "plain", RANKS, [Part(1)]) == [0]
    plain, run = (Run(tmp_path / name, []) for name in ("plain", "run"))
    random = Random(new_seed())
    lines = len(plain.lines())
    parts = [
        Part(random.randint(1, 3), random.randrange(lines), random.choice([0, 1, 5, 20]), signal.SIGKILL)
        for _ in range(10)
    ]
    shapes.run(run.path, RANKS, [*parts, Part(random.randint(1, 3))])
    assert_same_run(run, plain)
    assert mark(run) == mark(plain)
    assert 9 <= mark(plain)["steps"] < 30
    assert mark(plain)["ended_early"]["callback"] == "stops"
    assert next(record["step"] for record in plain.records() if "eval_loss" in record) == 0
