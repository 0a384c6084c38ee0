"""A run that stops making steps is found and the hang described. A slow, saving or suspended run is no hang."""

from __future__ import annotations

import bdb
import errno
import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from references import Reference
from runs import PACED, ROOT, TINY, Run, assert_same_run

from runner.rundir.time_account import TimeAccount
from runner.system import clock, files, processes, stacks
from runner.system.distributed import World
from runner.training.ranks.hang_watch import TIMES_MEDIAN, HangWatch
from runner.training.ranks.peer_watch import MAX_INTERVAL_S, MISSED, PeerWatch

TIMEOUT_S = 60.0
DRILLS, FEW = 400, 20
HANG_S = 5  # no step takes so long, also where a step takes ten times as long as usual


class Others(PeerWatch):
    """The phase that another rank reports, or None while nothing is heard from it."""

    def __init__(self) -> None:
        self.phase: str | None = "steps"

    def signs(self) -> dict[int, dict[str, Any]] | None:
        return None if self.phase is None else {1: {"phase": self.phase}}


class Life:
    """An attempt on a clock that a test moves, with a watch that looks at every interval.

    Only the clock is faked. The process may be suspended: then time passes in which nothing runs.
    """

    def __init__(self, patch: pytest.MonkeyPatch, draw: random.Random) -> None:
        self.now, self._draw = draw.uniform(0, 1e6), draw
        patch.setattr(clock, "monotonic", lambda: self.now)
        patch.setattr(clock, "wall", lambda: draw.uniform(0, 2e9))  # jumps all the time: nothing may depend on it
        self.account, self.others = TimeAccount(), Others()
        self.watch = HangWatch(World(0, 2), TIMEOUT_S, self.account, lambda: 0, self.others, lambda hang: None)
        self.ran_s = 0.0
        """How long the process was not suspended."""
        self.found: list[float] = []
        """`ran_s` when a look found a hang."""
        self._look_at = self.now + self.watch.interval_s

    def passes(self, seconds: float, suspensions: int = 0) -> None:
        """Let the process run this long, with suspensions."""
        began = self.ran_s
        for stop in sorted(began + self._draw.uniform(0, seconds) for _ in range(suspensions)):
            self._run_until(stop)
            self.now += self._draw.choice([self._draw.uniform(0.1, 5), self._draw.uniform(5, 1e5)])
        self._run_until(began + seconds)

    def _run_until(self, end: float) -> None:
        while self.ran_s < end:
            due = self._look_at - self.now
            runs = min(max(due, 0.0), end - self.ran_s)
            self.ran_s += runs
            self.now += runs
            if runs >= due:
                self._look_at = self.now + self.watch.interval_s
                if self.watch.look():
                    self.found.append(self.ran_s)

    @property
    def limit_s(self) -> float:
        """Return how long a step may take now."""
        return max(TIMEOUT_S, TIMES_MEDIAN * statistics.median(self.account.laps.seconds or (0.0,)))

    def step(self, seconds: float, suspensions: int = 0) -> None:
        """Make a step, part of which is the wait for its data."""
        waits = seconds * self._draw.random()
        with self.account.doing("data_wait"):
            self.passes(waits, suspensions)
        self.passes(seconds - waits)
        self.account.stepped()

    def waits_for_another_rank(self) -> None:
        """Wait in a step while another rank is in a callback at a save, or suspended, which is seen late."""
        phase, late_s = self._draw.choice([("save", 2 * MAX_INTERVAL_S), (None, (MISSED + 1) * MAX_INTERVAL_S)])
        self.passes(self._draw.uniform(0, late_s))
        self.others.phase = phase
        self.passes(self._draw.uniform(0, 200))
        self.others.phase = "steps"

    def trains(self) -> None:
        """Train from the start of the process on: a first step, then others, some of them slow; saves, evaluations."""
        draw = self._draw
        self.passes(draw.uniform(0, 100))  # it opens
        self.account.switch("steps")
        self.step(draw.uniform(0, 200), draw.randrange(3))
        usual = draw.choice([0.01, 0.3, 2.5, 3.0, 4.0, 8.0])
        for _ in range(draw.randrange(10, 40)):
            slow = draw.random() < 0.05
            longest = 19 / 20 * self.limit_s
            seconds = min(draw.uniform(0.5, 1) * longest if slow else usual * draw.uniform(0.5, 2), longest)
            self.step(seconds, 2 * (draw.random() < 0.05))
            if draw.random() < 0.1:
                with self.account.doing(draw.choice(["save", "evaluation"])):
                    self.passes(draw.uniform(0, 200), draw.randrange(3))
            if draw.random() < 0.05:
                self.waits_for_another_rank()

    def ends(self) -> None:
        self.account.switch("end")
        self.passes(self._draw.uniform(0, 200))


@pytest.mark.parametrize(
    ("first", "drills"), [(0, FEW), pytest.param(FEW, DRILLS - FEW, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_no_drill_is_a_false_alarm_and_every_hang_is_found(
    first: int, drills: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of up to 19 times the median, saves, evaluations and suspensions, also of other ranks, raise no alarm.

    A hang after them is found within two looks after the limit, plus one for each suspension.
    """
    for seed in range(first, first + drills):
        draw = random.Random(seed)
        life = Life(monkeypatch, draw)
        life.trains()
        if seed % 2:
            life.ends()
            assert not life.found, seed
            continue
        life.step(1.0)
        assert not life.found, seed
        began, limit_s, suspensions = life.ran_s, life.limit_s, draw.randrange(3)
        with life.account.doing(draw.choice(["steps", "data_wait"])):
            life.passes(limit_s + (2 + suspensions) * life.watch.interval_s + 1e-3, suspensions)
        assert life.found, seed
        early_s = suspensions * life.watch.interval_s
        assert began + limit_s - early_s - 1e-3 <= life.found[0], seed


@pytest.mark.parametrize("phase", ["compilation", "debugger"])
def test_a_compilation_and_a_debugger_take_their_time(phase: str) -> None:
    """Begin them anywhere in a step: a graph may be recompiled when a shape changes."""
    account = TimeAccount()
    account.switch("steps")
    account.stepped()
    watch = HangWatch(World(), TIMEOUT_S, account, lambda: 1, Others(), lambda hang: None)
    seen: list[str] = [watch._phase()]

    def compile_slowly(graph: Any, inputs: Any) -> Any:
        seen.append(watch._phase())
        return graph.forward

    class Debugger(bdb.Bdb):
        def user_line(self, frame: Any) -> None:
            seen.append(watch._phase())
            self.set_continue()

    if phase == "compilation":
        torch.compile(lambda x: x + 1, backend=compile_slowly)(torch.zeros(2))
    else:
        tracing = sys.gettrace()
        Debugger().runcall(watch._phase)
        sys.settrace(tracing)
    assert seen == ["steps", phase]
    assert watch._phase() == "steps"


@contextmanager
def fifo(path: Path) -> Iterator[Path]:
    """Make a FIFO, which blocks whoever opens it."""
    os.mkfifo(path)
    yield path
    path.unlink(missing_ok=True)


COMMON = [
    *TINY,
    "data=own",
    "+data.sources={rows: {_target_: hanging.Blocked, length: 80}}",
    "train.loss._target_=hanging.loss",
    "+callbacks.upload._target_=hanging.Uploading",
    "train.batch_size=4",
    "train.steps=9",
    "eval.every_steps=0",
    "checkpoint.every_steps=3",
    f"train.hang_timeout_s={HANG_S}",
]
NAMES = {
    "data": "read_block",
    "worker": "read_block",
    "loop": "endless_loop",
    "collective": "receive_what_nobody_sends",
    "callback": "Uploading.upload",
}


@pytest.mark.slow
@pytest.mark.xdist_group("hang")
@pytest.mark.parametrize(
    ("where", "ranks", "rank"),
    [("data", 1, 0), ("worker", 1, 0), ("callback", 2, 0), ("loop", 2, 1), ("collective", 2, 1)],
)
def test_a_hang_is_found_and_explained_and_the_run_continues(
    where: str, ranks: int, rank: int, tmp_path: Path, reference: Reference
) -> None:
    workers = ["data.num_workers=1"] if where == "worker" else []
    run = Run(tmp_path / "run", [*COMMON, *workers], ranks=ranks)
    with fifo(tmp_path / "fifo") as file:
        run.env = {"HANG_FILE": str(file), "HANG_IN": where, "HANG_RANK": str(rank)}
        run.start()
        status, output = run.wait()
    assert status == 1, output
    (attempt,) = run.attempts()
    assert (attempt["cause"], attempt["exit"], run.status()["state"]) == ("hang", 1, "stuck")
    step = 7 if where == "callback" else 6
    phase = {"data": "waiting for data", "worker": "waiting for data", "collective": "waiting for other ranks"}
    assert f"no step for {HANG_S} s after step {step}" in attempt["reason"]
    assert f"rank {rank} is {phase.get(where, 'in a step')}, in " in attempt["reason"]
    assert (NAMES[where] in attempt["reason"]) == (where != "worker")
    assert attempt["reason"] in output
    stacks_of = sorted((run.path / "hang").iterdir())
    assert [path.name for path in stacks_of] == [f"attempt1-rank{number}.txt" for number in range(ranks)]
    texts = [path.read_text() for path in stacks_of]
    assert [NAMES[where] in text for text in texts] == [number == rank for number in range(ranks)]
    assert all("Trainer._run" in text for text in texts)
    run.finish()
    assert_same_run(run, reference(COMMON, ranks))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_that_is_suspended_does_not_hang(ranks: int, tmp_path: Path) -> None:
    """Stop all its processes for any time; they continue."""
    steps = [*TINY, PACED, "train.steps=12", "train.hang_timeout_s=2", "train.peer_timeout_s=4"]
    run = Run(tmp_path / "run", steps, ranks=ranks)
    run.env = {"STEP_SLEEP_S": "0.3"}
    run.start()
    assert run.kill_when(lambda run: len(run.lines()) >= 4, signal.SIGSTOP)
    time.sleep(6)
    run.send(signal.SIGCONT)
    status, output = run.wait()
    assert status == 0, output
    assert not (run.path / "hang").exists()


@pytest.mark.slow
def test_a_disk_that_hangs_keeps_no_process_alive(tmp_path: Path) -> None:
    """The records cannot be written. The next attempt finds that the process was killed."""
    run = Run(tmp_path / "run", COMMON)
    with fifo(tmp_path / "fifo") as file:
        run.env = {"HANG_FILE": str(file), "HANG_IN": "data", "HANG_WRITES": "1"}
        run.start()
        status, output = run.wait()
    assert status == 1, output
    assert "rank 0 is waiting for data, in Blocked.read_block" in output
    run.finish()
    assert [attempt["cause"] for attempt in run.attempts()] == ["killed", "finished"]


SHOWING = """
import sys
from runner.system import stacks
stacks.show_to_parent()
def stuck():
    print("ready", flush=True)
    sys.stdin.read()
stuck()
"""


def test_a_hang_is_described_where_no_file_can_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many open files, for example, may cause the hang."""

    def refuse(path: object) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    account = TimeAccount()
    account.switch("steps")
    watch = HangWatch(World(), TIMEOUT_S, account, lambda: 7, Others(), lambda hang: None)
    with watch:
        monkeypatch.setattr(files, "read_if_there", refuse)
        monkeypatch.setattr(processes, "end_after", lambda seconds, status: None)
        assert f"Rank 0, process {os.getpid()} on " in watch._examine().stacks[0]


def test_stacks_have_every_thread_and_child_process() -> None:
    done = threading.Event()

    def waits_for_ever() -> None:
        done.wait()

    thread = threading.Thread(target=waits_for_ever, name="waiting", daemon=True)
    thread.start()
    options: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with (
        subprocess.Popen([sys.executable, "-c", SHOWING], cwd=ROOT, **options) as showing,
        subprocess.Popen(["cat"], **options) as other,  # it shows nothing, and is not disturbed
    ):
        assert showing.stdout is not None
        assert showing.stdout.readline() == "ready\n"
        text = stacks.text(threading.get_ident())
        again = stacks.text(threading.get_ident())
        assert other.poll() is None
        for process in (showing, other):
            assert process.stdin is not None
            process.stdin.close()
    done.set()
    assert text.startswith("Thread MainThread:\n")
    assert "Thread waiting:" in text
    assert "waits_for_ever" in text
    assert f"Process {showing.pid} (state S" in text
    assert "in stuck" in text
    assert f"Process {other.pid} (state S" in text
    assert again.count("in stuck") == 2  # its memory holds what was written before
