"""Start runs by the command that users type, and kill them at a chosen step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu import sizes
from runner.rundir.paths import RunDir
from runner.system import files, processes

ROOT = Path(__file__).resolve().parents[2]
SAVE = 10
"""Steps from one save to the next."""
PATIENCE_S = 600.0


class Hold:
    """A callback that holds the attempt at the step HOLD_AT until it is killed, or the process HOLDER has ended."""

    def on_step_end(self, context: Any) -> None:
        if str(context.step) != os.environ.get("HOLD_AT"):
            return
        Path(os.environ["HELD"]).touch()
        while processes.state_of(int(os.environ["HOLDER"])):
            time.sleep(0.05)
        os._exit(1)


@dataclass
class Run:
    """A run directory and the command that trains in it.

    Attributes:
        overrides: overrides of the command; `held_words` for a run to be killed.
        environment: variables in addition to those of this process.
    """

    path: Path
    overrides: list[str]
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, hold_at: int | None = None, *more: str) -> subprocess.Popen[bytes]:
        """Start an attempt and write its output to a file."""
        environment = {**os.environ, **self.environment}
        if hold_at is not None:
            self._held.unlink(missing_ok=True)
            environment |= {"HOLD_AT": str(hold_at), "HELD": str(self._held), "HOLDER": str(os.getpid())}
        command = [sys.executable, "-m", "runner", f"run.dir={self.path}", "logger=none", *self.overrides, *more]
        with open(self._output, "ab") as output:
            return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output)

    def finish(self, *more: str) -> None:
        """Start an attempt and wait until it has finished the run.

        Raises:
            RuntimeError: it does not.
        """
        if self.start(None, *more).wait(PATIENCE_S):
            raise RuntimeError(f"{self.path.name} failed: {self.tail()}")

    def kill_at(self, step: int, *more: str) -> None:
        """Start an attempt and kill all its ranks once `step` is complete and no save is in flight.

        Raises:
            RuntimeError: it ended before.
        """
        process = self.start(step, *more)
        try:
            self.wait_until_held(process)
            while self.saving() and process.poll() is None:
                time.sleep(0.01)
        finally:
            kill(process)

    def wait_until_held(self, process: subprocess.Popen[bytes]) -> None:
        """Wait until an attempt has completed the step at which it is held.

        Raises:
            RuntimeError: it ended before.
        """
        while not self._held.exists():
            if process.poll() is not None:
                raise RuntimeError(f"{self.path.name} ended before it was held: {self.tail()}")
            time.sleep(0.002)

    def saving(self) -> bool:
        """Return whether a checkpoint is being written."""
        folder = RunDir(self.path).checkpoints
        return folder.exists() and any(".tmp" in path.name for path in folder.iterdir())

    def resumed_at(self) -> list[int]:
        """Return the start step of each attempt in the log, which has an attempt once it ended or the next began."""
        return [attempt["start_step"] for attempt in files.read_lines(RunDir(self.path).attempts)]

    def tail(self) -> str:
        """Return the last lines of the output."""
        return self._output.read_text(errors="replace")[-1500:]

    @property
    def _held(self) -> Path:
        return self.path.with_name(f"{self.path.name}.held")

    @property
    def _output(self) -> Path:
        return self.path.with_name(f"{self.path.name}.log")


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its descendants."""
    for pid in [process.pid, *processes.descendants(process.pid)]:
        with suppress(ProcessLookupError):
            processes.send_signal(pid, signal.SIGKILL)
    process.wait()


def held_words(folder: Path, size: sizes.Size) -> list[str]:
    """Return the overrides of a run that is to be killed: it saves every `SAVE` steps and keeps the last save."""
    return [
        *sizes.data(folder, size),
        *(f"checkpoint.every_steps={SAVE}", "checkpoint.keep_last=1", "scheduler.warmup_steps=0"),
        *(f"train.batch_size={size.small_batch}", "train.hang_timeout_s=null"),
        "+callbacks.hold._target_=benchmarks.gpu.runs.Hold",
    ]
