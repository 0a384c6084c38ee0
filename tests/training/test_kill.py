"""The first promise, by killing: a run killed anywhere ends bit-identical to an uninterrupted run.

Real `python -m runner` processes get SIGKILL at chosen and at random moments, many times in one run, and the command is
rerun until the run is finished. Then every metrics line and every tensor of the last checkpoint is compared with an
uninterrupted run.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import PACED, TINY, Run, assert_same_run
from tiny_attempts import contents

# Many attempts in sequence: a busy machine may take long.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS, EVAL, SAVE, PHASE, ACCUMULATION = 120, 15, 7, 40, 2
COMMON = [
    *TINY,
    PACED,
    f"train.steps={STEPS}",
    f"eval.every_steps={EVAL}",
    f"checkpoint.every_steps={SAVE}",
    "model.dropout=0.2",
    f"train.grad_accum_steps={ACCUMULATION}",
    "train.batch_size=3",
]
MIXTURE = ["data=mixture", f"+phases.late={{start_step: {PHASE}, weights: {{prose: 4.0}}, lr_scale: 0.5}}"]
CASES = {
    "distributed": [],
    "mixture": MIXTURE,
    "elastic": [*MIXTURE, "sampler=elastic"],
    # A user's dataset with random augmentation: worker processes, and several epochs.
    "augmented": ["data.sources.code._target_=augmented.Noisy"],
}

Trigger = Callable[[Run], bool]


def hold_at(run: Run, step: int, **env: str) -> None:
    """Keep the next attempt alive until it can be killed at `step`, even if the test is slow to look."""
    run.hold_at(min(step + 3, STEPS - 1), calls=ACCUMULATION, **env)


def after(seconds: float) -> Trigger:
    start = time.monotonic()
    return lambda run: time.monotonic() - start >= seconds


def at_step(run: Run, wanted: int) -> Trigger:
    """A step of the next attempt: not one that the attempt before has made, and that is still in the file."""
    before = metrics_state(run)
    return lambda run: metrics_state(run) != before and step(run) >= wanted


def in_an_evaluation(run: Run) -> Trigger:
    before = metrics_state(run)
    return lambda run: metrics_state(run) != before and evaluates(run)


def appears(run: Run, pattern: str) -> Trigger:
    """Something in the checkpoints that no earlier attempt left behind."""
    folder = run.path / "checkpoints"
    before = set(folder.glob(pattern))
    return lambda run: any(path not in before for path in folder.glob(pattern))


def metrics_state(run: Run) -> tuple[int, int]:
    """Changes when an attempt that has restored its state truncates the metrics, replaces them or adds to them."""
    path = run.path / "metrics.jsonl"
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else (0, 0)


def step(run: Run) -> int:
    return max((r["step"] for r in run.records() if "loss" in r), default=0)


def evaluates(run: Run) -> bool:
    records = run.records()
    return bool(records) and records[-1]["step"] % EVAL == 0 and "loss" in records[-1]


def moments(draw: random.Random) -> list[tuple[str, int]]:
    """Kinds in random order and their steps: random ones and those of the phase, in ascending order.

    What happens only now and then (a save, for example) comes while enough of the run is left to wait for it.
    """
    steps = sorted([PHASE, PHASE + 1, *(draw.randrange(2, STEPS) for _ in range(3))])
    kinds = ["import", "start", "save", "rename", "evaluation", "step", "step", "step"]
    draw.shuffle(kinds)
    kinds += ["step"] * 2
    return [(kind, steps.pop(0) if kind == "step" else 0) for kind in kinds]


def moment_of(kind: str, wanted: int, run: Run, draw: random.Random) -> Trigger:
    """When to kill the next attempt, which is held where it would otherwise finish first."""
    if kind == "step":
        hold_at(run, wanted)
        return at_step(run, wanted)
    if kind in ("import", "start"):
        hold_at(run, step(run))
        return after(draw.uniform(0.05, 1.0) if kind == "import" else draw.uniform(1.0, 2.0))
    hold_at(run, step(run) + 30, FSYNC_SLEEP_S="0.05", EVALUATION_SLEEP_S="0.1")
    if kind == "evaluation":
        return in_an_evaluation(run)
    return appears(run, "*.tmp-*" if kind == "save" else "*.tmp-*/manifest.json")


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """The uninterrupted runs, with no worker processes."""
    made = {}
    for name, overrides in CASES.items():
        made[name] = Run(tmp_path_factory.mktemp(name) / "run", [*COMMON, *overrides])
        made[name].finish()
    return made


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("case", CASES)
def test_a_run_killed_anywhere_is_bit_identical(
    case: str, workers: int, references: dict[str, Run], tmp_path: Path
) -> None:
    """SIGKILL during imports, steps, evaluations, saves and renames, and at the phase boundary."""
    run = Run(tmp_path / "run", [*COMMON, *CASES[case], f"data.num_workers={workers}"])
    draw = random.Random(f"{case} {workers}")
    for kind, wanted in moments(draw):
        moment = moment_of(kind, wanted, run, draw)
        run.start()
        assert run.kill_when(moment), f"it ended before it was killed: {kind} {wanted}\n{run.wait()[1]}"
        run.wait()
        run.env = {}
    run.finish()
    assert_same_run(run, references[case])
    causes = [attempt["cause"] for attempt in run.attempts()]
    assert causes[-1] == "finished"
    assert set(causes[:-1]) <= {"killed"}


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT])
def test_a_stop_signal_loses_no_step(signum: signal.Signals, references: dict[str, Run], tmp_path: Path) -> None:
    """After a signal the run completes its step, saves and exits with status 75; the rerun resumes at that step."""
    run = Run(tmp_path / "run", [*COMMON, *CASES["mixture"]])
    for wanted in (3, PHASE - 1, 70):
        hold_at(run, wanted)
        moment = at_step(run, wanted)
        run.start()
        assert run.kill_when(moment, signum)
        run.release()
        status, output = run.wait()
        assert status == 75, output
    run.finish()
    assert_same_run(run, references["mixture"])
    attempts = run.attempts()
    assert [a["cause"] for a in attempts] == ["interrupted"] * 3 + ["finished"]
    assert [a["steps_lost"] for a in attempts] == [0, 0, 0, 0]
    assert [a["end_step"] for a in attempts[:-1]] == [a["start_step"] for a in attempts[1:]]


def test_a_finished_run_does_nothing_and_a_longer_one_resumes(tmp_path: Path) -> None:
    """Finished: exit 0 at once, without an attempt. With more steps: as if they had been set from the start."""
    short = Run(tmp_path / "run", [*COMMON, "train.steps=20", "scheduler.total_steps=40"])
    short.finish()
    before = short.lines()
    assert "finished" in short.finish()
    assert short.lines() == before
    assert len(short.attempts()) == 1
    longer = Run(short.path, [*COMMON, "train.steps=40", "scheduler.total_steps=40"])
    longer.finish()
    whole = Run(tmp_path / "whole", [*COMMON, "train.steps=40", "scheduler.total_steps=40"])
    whole.finish()
    assert_same_run(longer, whole)


def test_a_second_process_is_refused(tmp_path: Path) -> None:
    """While one process holds the lease another is refused, and a kill leaves no lock behind."""
    run = Run(tmp_path / "run", COMMON)
    hold_at(run, 2)
    run.start()
    first = run.process
    assert first is not None
    assert run.wait_until(lambda run: step(run) >= 2)
    first.send_signal(signal.SIGSTOP)
    first.send_signal(signal.SIGCONT)
    second = Run(run.path, COMMON)
    second.start()
    status, output = second.wait()
    assert status == 73, output
    assert str(first.pid) in output
    first.kill()
    run.wait()
    run.finish()


def holds_the_lease(run: Run) -> bool:
    """It has just acquired it: nothing is open yet, the model is not built."""
    return (run.path / "lease" / "00000001.json").exists()


@pytest.mark.parametrize("kind", ["lease", "step", "resumed"])
def test_a_process_stopped_while_its_successor_finishes_changes_nothing_when_it_wakes(
    kind: str, tmp_path: Path
) -> None:
    """SIGSTOP, a rerun that takes over and finishes, SIGCONT: exit status 74, and not one byte is different.

    One that has resumed writes to the very file that the attempt before has closed, and its successor must not.
    """
    overrides = [*COMMON, "scheduler.total_steps=24", "eval.every_steps=5", "train.steps=24", "run.lease_timeout_s=1"]
    older, newer = Run(tmp_path / "run", overrides), Run(tmp_path / "run", overrides)
    metrics = older.path / "metrics.jsonl"
    if kind == "resumed":
        Run(older.path, [*overrides, "train.steps=7"]).finish()
        file = metrics.stat().st_ino
    hold_at(older, 20)
    wanted = random.Random(kind).randrange(8, 20)
    moments: dict[str, Trigger] = {
        "lease": holds_the_lease,
        "step": lambda run: holds_the_lease(run) and step(run) >= wanted,
        "resumed": lambda run: step(run) >= wanted,
    }
    stopped = older.start()
    assert older.kill_when(moments[kind], signal.SIGSTOP), older.wait()[1]
    assert kind != "resumed" or metrics.stat().st_ino == file
    newer.finish()
    assert kind != "resumed" or metrics.stat().st_ino != file
    before = contents(older.path)
    stopped.send_signal(signal.SIGCONT)
    status, output = older.wait()
    assert status == 74, output
    assert "Traceback" not in output
    assert contents(older.path) == before
    assert newer.attempts()[-1]["cause"] == "finished"
