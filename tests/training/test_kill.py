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
from here import command
from new_seeds import new_seed
from references import Reference
from runs import PACED, TINY, Run, assert_same_run, reached
from tiny_attempts import contents

from runner.rundir import custody

# Many attempts in sequence: a busy machine may take long. One worker makes the reference runs.
pytestmark = [pytest.mark.timeout(1800), pytest.mark.xdist_group("kill")]

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
MIXTURE = [*COMMON, "data=mixture", f"+phases.late={{start_step: {PHASE}, weights: {{prose: 4.0}}, lr_scale: 0.5}}"]
ELASTIC = [*MIXTURE, "sampler=elastic"]
# A user's dataset with random augmentation, and several epochs.
AUGMENTED = [*COMMON, "data.sources.code._target_=augmented.Noisy"]

Trigger = Callable[[Run], bool]


@pytest.mark.promise("SIGKILL at a random step, later SIGTERM: it ends bit for bit the same")
def test_killed_and_preempted_a_run_ends_bit_for_bit_the_same(reference: Reference, tmp_path: Path) -> None:
    """Use the elastic sampler and a phase. After SIGTERM no step is lost."""
    draw = random.Random(new_seed())
    killed = draw.randrange(2, 70)
    preempted = draw.randrange(killed + 3, STEPS - 3)
    print(f"SIGKILL after step {killed}, SIGTERM after step {preempted}")
    run = Run(tmp_path / "run", ELASTIC)
    statuses = run.interrupt((killed, signal.SIGKILL), (preempted, signal.SIGTERM), calls=ACCUMULATION)
    assert statuses == [-signal.SIGKILL, 75]
    run.finish()
    assert_same_run(run, reference(ELASTIC))
    _, stopped, last = run.attempts()
    assert [attempt["cause"] for attempt in run.attempts()] == ["killed", "interrupted", "finished"]
    assert (stopped["steps_lost"], stopped["end_step"]) == (0, last["start_step"])


@pytest.mark.promise("a process superseded while stopped changes not one byte when it wakes")
def test_stopped_process_changes_nothing_when_it_wakes(tmp_path: Path) -> None:
    """Send SIGSTOP, let a rerun take over and finish, send SIGCONT: exit status 74.

    The older process has resumed: it writes to the file that the attempt before it closed, and its successor must not.
    tests/rundir/test_superseded.py stops an attempt at each of its changes to the file system.
    """
    overrides = [*COMMON, "scheduler.total_steps=24", "eval.every_steps=5", "train.steps=24", "run.lease_timeout_s=1"]
    older, newer = Run(tmp_path / "run", overrides), Run(tmp_path / "run", overrides)
    metrics = older.path / "metrics.jsonl"
    Run(older.path, [*overrides, "train.steps=7"]).finish()
    file = metrics.stat().st_ino
    older.hold_at(20, ACCUMULATION)
    wanted = random.Random(new_seed()).randrange(8, 20)
    stopped = older.start()
    assert older.kill_when(reached(wanted), signal.SIGSTOP), older.wait()[1]
    assert metrics.stat().st_ino == file
    newer.finish()
    assert metrics.stat().st_ino != file
    before = contents(older.path)
    stopped.send_signal(signal.SIGCONT)
    status, output = older.wait()
    assert status == 74, output
    assert "Traceback" not in output
    assert contents(older.path) == before
    assert newer.attempts()[-1]["cause"] == "finished"


@pytest.mark.slow
@pytest.mark.parametrize("doing", [["mv", "{run}", "{other}"], ["rm", "{run}", "--yes"]], ids=lambda words: words[0])
def test_a_waking_process_does_not_restore_a_moved_run(
    doing: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Send SIGSTOP within a step, while the logger opens its files; after SIGCONT the exit status is 74."""
    overrides = [*COMMON, "logger=default", "scheduler.total_steps=24", "train.steps=24", "run.lease_timeout_s=1"]
    older, other = Run(tmp_path / "run", overrides), tmp_path / "other"
    older.hold_at(2, ACCUMULATION)
    stopped = older.start()
    assert older.kill_when(Run.idles, signal.SIGSTOP), older.wait()[1]
    monkeypatch.setattr(custody, "TIMEOUT_S", 1.0)
    assert command(*(word.format(run=older.path, other=other) for word in doing)) == 0
    before = contents(other) if other.exists() else {}
    older.release()
    stopped.send_signal(signal.SIGCONT)
    status, output = older.wait()
    assert status == 74, output
    assert "Traceback" not in output
    assert (contents(other) if other.exists() else {}) == before
    assert [path for path in tmp_path.iterdir() if path not in (other, older.reached_file)] == []


# ---- Killed at any moment


def hold_at(run: Run, step: int, **env: str) -> None:
    """Keep the next attempt alive until it can be killed at `step`, even if the test is slow to look."""
    run.hold_at(min(step + 3, STEPS - 1), calls=ACCUMULATION, **env)


def after(seconds: float) -> Trigger:
    start = time.monotonic()
    return lambda run: time.monotonic() - start >= seconds


def at_step(run: Run, wanted: int) -> Trigger:
    """Return a trigger for a step of the next attempt: not one of the attempt before, which is still in the file."""
    before = metrics_state(run)
    return lambda run: metrics_state(run) != before and run.step() >= wanted


def in_an_evaluation(run: Run) -> Trigger:
    before = metrics_state(run)
    return lambda run: metrics_state(run) != before and evaluates(run)


def appears(run: Run, pattern: str) -> Trigger:
    """Return a trigger for an entry in the checkpoints that no earlier attempt left behind."""
    folder = run.path / "checkpoints"
    before = set(folder.glob(pattern))
    return lambda run: any(path not in before for path in folder.glob(pattern))


def metrics_state(run: Run) -> tuple[int, int]:
    """Return a value that changes when an attempt truncates, replaces or appends to the metrics."""
    path = run.path / "metrics.jsonl"
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else (0, 0)


def evaluates(run: Run) -> bool:
    records = run.records()
    return bool(records) and records[-1]["step"] % EVAL == 0 and "loss" in records[-1]


def moments(draw: random.Random) -> list[tuple[str, int]]:
    """Return kinds in random order and their steps: random ones and those of the phase, ascending.

    Rare moments, such as a save, come while enough of the run is left to wait for them.
    """
    steps = sorted([PHASE, PHASE + 1, *(draw.randrange(2, STEPS) for _ in range(3))])
    kinds = ["import", "start", "save", "rename", "evaluation", "step", "step", "step"]
    draw.shuffle(kinds)
    kinds += ["step"] * 2
    return [(kind, steps.pop(0) if kind == "step" else 0) for kind in kinds]


def moment_of(kind: str, wanted: int, run: Run, draw: random.Random) -> Trigger:
    """Return when to kill the next attempt, which is held where it would otherwise finish first."""
    if kind == "step":
        hold_at(run, wanted)
        return at_step(run, wanted)
    if kind in ("import", "start"):
        hold_at(run, run.step())
        return after(draw.uniform(0.05, 1.0) if kind == "import" else draw.uniform(1.0, 2.0))
    hold_at(run, run.step() + 30, FSYNC_SLEEP_S="0.05", EVALUATION_SLEEP_S="0.1")
    if kind == "evaluation":
        return in_an_evaluation(run)
    return appears(run, "*.tmp-*" if kind == "save" else "*.tmp-*/manifest.json")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "workers"), [(MIXTURE, 0), (ELASTIC, 2), (AUGMENTED, 2)], ids=["mixture", "elastic", "augmented"]
)
def test_a_run_killed_anywhere_is_bit_identical(
    overrides: list[str], workers: int, reference: Reference, tmp_path: Path
) -> None:
    """Send SIGKILL during imports, steps, evaluations, saves and renames, and at the phase boundary."""
    run = Run(tmp_path / "run", [*overrides, f"data.num_workers={workers}"])
    draw = random.Random(f"{overrides} {workers}")
    for kind, wanted in moments(draw):
        moment = moment_of(kind, wanted, run, draw)
        run.start()
        assert run.kill_when(moment), f"it ended before it was killed: {kind} {wanted}\n{run.wait()[1]}"
        run.wait()
        run.env = {}
    run.finish()
    assert_same_run(run, reference(overrides))
    causes = [attempt["cause"] for attempt in run.attempts()]
    assert causes[-1] == "finished"
    assert set(causes[:-1]) <= {"killed"}
