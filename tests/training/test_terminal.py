"""A run in a terminal that is closed, or in which Ctrl-C is pressed."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import PACED, ROOT, TINY, Run, reached
from window import Window

LONG = [*TINY, PACED, "train.steps=100000", "scheduler.total_steps=100000"]
LONG += ["eval.every_steps=0", "checkpoint.every_steps=100000"]
COMMAND = [sys.executable, "-m", "runner"]


@pytest.fixture
def window() -> Iterator[Callable[..., Window]]:
    """Yield a function that opens a terminal with a run in it; kill the rest at the end."""
    made: list[Window] = []

    def make(run: Run, hangup_ignored: bool = False) -> Window:
        env = {**run.environment(), **run.env, "PYTHONPATH": f"{ROOT / 'tests' / 'support'}:{ROOT}", "TERM": "xterm"}
        made.append(Window([*COMMAND, *run.words()], ROOT, env, hangup_ignored))
        return made[-1]

    yield make
    for each in made:
        each.end()


def saved_at_its_step(run: Run, steps: int = 5) -> int:
    """Return the step at which the attempt was interrupted and saved."""
    ended = run.attempts()[-1]
    assert (ended["cause"], ended["exit"], ended["steps_lost"]) == ("interrupted", 75, 0)
    assert ended["checkpoint_step"] == ended["end_step"] == run.step() >= steps
    return run.step()


@pytest.mark.promise("the terminal is closed: the run saves at its step, and a rerun continues there")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_whose_terminal_is_closed_loses_no_step(
    ranks: int, tmp_path: Path, window: Callable[..., Window]
) -> None:
    several = ["launcher.ranks=2", "train.device=cpu"] if ranks > 1 else ["data.num_workers=1"]
    run = Run(tmp_path / "run", [*LONG, *several], {"STEP_SLEEP_S": "0.01"})
    opened = window(run)
    opened.wait_until(lambda: reached(5)(run))
    opened.close()
    assert opened.status() == 75
    step = saved_at_its_step(run)
    assert run.status()["state"] == "interrupted"
    run.overrides += [f"train.steps={step + 3}"]
    run.env = {}
    assert f"resuming at step {step} of {step + 3}" in run.finish()


@pytest.mark.slow
def test_a_run_under_nohup_trains_on_without_its_terminal(tmp_path: Path, window: Callable[..., Window]) -> None:
    """Its prints then fail, which changes neither the run nor its exit status."""
    run = Run(tmp_path / "run", [*LONG, "train.steps=40", "data.num_workers=1"], {"STEP_SLEEP_S": "0.01"})
    run.env |= run.hold(8)
    opened = window(run, hangup_ignored=True)
    opened.wait_until(run.idles)
    opened.close()
    run.release()
    assert opened.status() == 0
    assert [(attempt["cause"], attempt["end_step"]) for attempt in run.attempts()] == [("finished", 40)]


@pytest.mark.slow
def test_reader_that_ends_with_the_terminal_changes_no_status(tmp_path: Path) -> None:
    """Pipe the output, as in `2>&1 | tee log`."""
    run = Run(tmp_path / "run", LONG, {"STEP_SLEEP_S": "0.01"})
    env = {**run.environment(), **run.env, "PYTHONPATH": f"{ROOT / 'tests' / 'support'}:{ROOT}"}
    with subprocess.Popen(
        [*COMMAND, *run.words()], cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        while "step 1/" not in process.stdout.readline():
            assert process.poll() is None
        process.stdout.close()
        process.send_signal(signal.SIGHUP)
        assert process.wait(400) == 75
    saved_at_its_step(run, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["one", "ranks", "sweep"])
def test_ctrl_c_reports_its_effect_at_once(kind: str, tmp_path: Path, window: Callable[..., Window]) -> None:
    """Print it once, for any number of processes, while the step is still in progress."""
    options = {"one": [], "ranks": ["launcher.ranks=2"], "sweep": ["-m", "seed=1,2", "launcher.slots=2"]}[kind]
    run = Run(tmp_path / "run", [*LONG, *options, "train.device=cpu", f"run.root={tmp_path}"], {"HELD_S": "1000"})
    run.env |= run.hold(2)
    if kind == "sweep":
        run.words = lambda: run.overrides  # type: ignore[method-assign] # each run has a directory of its own
    opened = window(run)
    opened.wait_until(run.idles)
    opened.type(b"\x03")
    opened.wait_until(lambda: "Press Ctrl-C again to exit at once" in opened.shown)
    assert opened.process.poll() is None
    for _ in range(20):
        opened.read(0.05)
    opened.type(b"\x03")
    assert opened.status() in (130, 137)
    while "second Ctrl-C" not in opened.shown:
        opened.read(1.0)
    assert opened.shown.count("Ctrl-C: stopping") == 1
    assert opened.shown.count("second Ctrl-C: exiting at once") == 1
