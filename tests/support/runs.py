"""Start, watch, kill, resume and compare real runs in separate processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest
import zygote

from runner.checkpoint.files.directory import Folder
from runner.metrics.records import read_records

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).parents[2]
TINY = [
    "experiment=smoke",
    "scheduler.total_steps=40",  # so that a run can be made longer
    "model.width=16",
    "model.layers=1",
    "run.threads=1",
    "data.sequence_length=16",
    "logger=none",
]
PACED = "train.loss._target_=paced.loss"  # lets a test hold a run or slow it down
PATIENCE_S = 400.0  # for what normally takes a second or two: a long timeout costs nothing unless a test fails


@dataclass
class Run:
    """A run directory and the command that works on it."""

    path: Path
    overrides: list[str]
    env: dict[str, str] = field(default_factory=dict)
    process: zygote.Forked | None = None
    ranks: int = 1

    def hold(self, steps: int) -> dict[str, str]:
        """Let every attempt idle after `steps` steps. Return the environment that it needs, with `paced.loss`.

        So a run cannot end before a test disturbs it, on a slow or fast machine.
        """
        self.hold_file.parent.mkdir(parents=True, exist_ok=True)
        self.reached_file.unlink(missing_ok=True)
        self.hold_file.write_text(str(steps))
        return {"HOLD_FILE": str(self.hold_file)}

    def hold_at(self, step: int, calls: int = 1, **env: str) -> None:
        """Let the next attempt idle once the run is at `step`. A step calls the loss `calls` times.

        The attempt idles until it is killed, or until it got a signal and is released.
        """
        saved = max((int(path.name.removeprefix("step_")) for path in self.checkpoints()), default=0)
        self.env = {**self.env, **self.hold(max(step - saved, 0) * calls), **env}

    def release(self) -> None:
        """Let the attempt continue at full speed."""
        self.hold_file.unlink(missing_ok=True)

    def idles(self) -> bool:
        """Return whether the attempt idles where it is held."""
        return self.reached_file.exists()

    @property
    def hold_file(self) -> Path:
        return self.path.with_name(f"{self.path.name}.hold")

    @property
    def reached_file(self) -> Path:
        return self.path.with_name(f"{self.path.name}.hold.reached")

    def start(self) -> zygote.Forked:
        """Start an attempt in the background."""
        self.process = zygote.start(self.words(), {**self.environment(), **self.env}, ROOT, self.ranks)
        return self.process

    def words(self) -> list[str]:
        """Return the arguments of the command."""
        return [*self.overrides, f"run.dir={self.path}"]

    @staticmethod
    def environment() -> dict[str, str]:
        """Return the environment of an attempt, which finds the modules of tests/support."""
        return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parent)}

    def wait(self, timeout: float = PATIENCE_S) -> tuple[int, str]:
        """Wait until the attempt has ended. Return its exit status and output."""
        assert self.process is not None
        output, _ = self.process.communicate(timeout=timeout)
        return self.process.wait(), output

    def finish(self, timeout: float = PATIENCE_S) -> str:
        """Run the command to its end, which must be a success. Return its output."""
        self.release()
        self.start()
        status, output = self.wait(timeout)
        assert status == 0, output
        return output

    def wait_until(self, moment: Callable[[Run], bool], timeout: float = PATIENCE_S) -> bool:
        """Return True as soon as `moment` holds, or False if the attempt finishes first."""
        assert self.process is not None
        deadline = time.monotonic() + timeout
        while self.process.poll() is None:
            if moment(self):
                return True
            if time.monotonic() > deadline:
                self.process.kill()
                pytest.fail(f"it never happened: {self.tail()}")
            time.sleep(0.0005)
        assert self.process.returncode == 0, self.wait()[1]
        return False

    def wait_for_end(self, timeout: float) -> bool:
        """Return whether the attempt ends within `timeout` seconds."""
        assert self.process is not None
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        return self.process.returncode is not None

    def kill_when(self, moment: Callable[[Run], bool], signum: int = signal.SIGKILL) -> bool:
        """Send `signum` as soon as `moment` holds. Return False if the attempt ended first."""
        if not self.wait_until(moment):
            return False
        self.send(signum)
        return True

    def interrupt(self, *moments: tuple[int, int], calls: int = 1) -> list[int]:
        """End attempts with signals, each somewhere in the step after the given one. Return their exit statuses.

        Args:
            moments: step and signal of each attempt, at least three steps apart.
            calls: how often a step calls the loss.
        """
        statuses = []
        for step, signum in moments:
            self.hold_at(step + 1, calls)
            self.start()
            assert self.kill_when(reached(step), signum), self.wait()[1]
            self.release()
            statuses.append(self.wait()[0])
        return statuses

    def send(self, signum: int) -> None:
        """Signal the process, or each of several ranks, as when a node is lost or a job is preempted."""
        assert self.process is not None
        launched = psutil.Process(self.process.pid)
        # torchrun starts each rank in a separate session.
        ranks = launched.children() if self.ranks > 1 else [launched]
        if signum == signal.SIGKILL and self.ranks > 1:
            # A node is lost at once: no rank may see another one die first.
            ranks = [launched, *ranks]
            self._stop(ranks)
        if signum == signal.SIGSTOP:
            self._stop(ranks)
        else:
            self._send_each(ranks, signum)

    def send_until_the_end(self, signum: int) -> tuple[int, str]:
        """Send a signal repeatedly, because two at the same time count as one. Return exit status and output."""
        for _ in range(200):
            self.send(signum)
            if self.wait_for_end(0.5):
                break
        return self.wait()

    def _stop(self, ranks: list[psutil.Process]) -> None:
        """Send SIGSTOP and return once all have stopped: on a busy machine that takes a moment."""
        self._send_each(ranks, signal.SIGSTOP)
        with suppress(psutil.NoSuchProcess):
            while any(rank.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE) for rank in ranks):
                time.sleep(0.001)

    @staticmethod
    def _send_each(processes: list[psutil.Process], signum: int) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):  # it may end because another rank was signaled
                process.send_signal(signum)

    def tail(self) -> str:
        """Return the last lines of the metrics, for messages."""
        return "".join(self.lines()[-3:])

    def lines(self) -> list[str]:
        path = self.path / "metrics.jsonl"
        return path.read_text().splitlines(keepends=True) if path.exists() else []

    def records(self) -> list[dict[str, Any]]:
        """Return the records of metrics.jsonl, each with all sources. Leave out an incomplete last line."""
        return list(read_records(self.path / "metrics.jsonl"))

    def step(self) -> int:
        """Return the last step in metrics.jsonl."""
        return max((record["step"] for record in self.records() if "loss" in record), default=0)

    def attempts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.path / "attempts.jsonl").read_text().splitlines()]

    def status(self) -> dict[str, Any]:
        return dict(json.loads((self.path / "status.json").read_text()))

    def checkpoints(self) -> list[Path]:
        return sorted((self.path / "checkpoints").glob("step_" + "[0-9]" * 8))

    def weights(self) -> dict[str, torch.Tensor]:
        """Return every tensor of the newest checkpoint: parameters and optimizer state."""
        from runner.checkpoint.files import manifest
        from runner.checkpoint.tensors.reader import tensors

        newest = self.checkpoints()[-1]
        return dict(tensors(Folder(newest), manifest.read(Folder(newest))))


def reached(step: int) -> Callable[[Run], bool]:
    """Return a function that checks whether a run has reached `step`."""
    return lambda run: run.step() >= step


def assert_same_run(one: Run, other: Run) -> None:
    """Check that the metrics file and the final weights are bit-identical."""
    assert one.lines() == other.lines()
    mine, theirs = one.weights(), other.weights()
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        assert tensor.equal(theirs[name]), name
