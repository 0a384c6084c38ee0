"""Runs as processes of this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from rich.console import Console

from launch import display
from runner.contracts import Finding, JobInfo
from runner.errors import ExitStatus
from runner.rundir.paths import RunDir
from runner.system import files, processes, signals

POLL_S = 0.2


@dataclass
class LocalLauncher:
    """Runs runs here (a `runner.contracts.Launcher`). The options are explained in conf/launcher/local.yaml."""

    in_process: ClassVar[bool] = True
    wait: ClassVar[bool] = False  # `launch` itself waits

    slots: int = 1
    gpus: Any = None  # a list of numbers or names; None: all that are visible
    command: list[str] = field(default_factory=lambda: [sys.executable, "-m", "runner.training.attempt"])
    dry_run: bool = False
    retry_failed: bool = False

    def check(self, run_dirs: list[Path]) -> list[str]:
        """The errors of the options."""
        errors = []
        if not isinstance(self.slots, int) or self.slots < 1:
            errors.append(f"launcher.slots={self.slots!r} must be a whole number, 1 or more")
        if self.gpus is not None and not isinstance(self.gpus, list):
            errors.append(f"launcher.gpus={self.gpus!r} must be a list, for example launcher.gpus=[0,1]")
        if len(run_dirs) > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            errors.append("torchrun cannot start a sweep: start a single run, or the sweep without torchrun")
        return errors

    def examine(self, save_s: float | None) -> list[Finding]:
        """Whether the runs of a sweep would share GPUs."""
        gpus = visible_gpus() if self.gpus is None else self.gpus
        if gpus and self.slots > len(gpus):
            text = f"{self.slots} slots share {len(gpus)} GPUs"
            return [Finding("warning", text, f"launcher.slots={len(gpus)} for one GPU per run")]
        return [Finding("ok", f"runs on this machine, {self.slots} at a time, {len(gpus) or 'no'} GPUs")]

    def preview(self, run_dirs: list[Path]) -> str:
        """The commands, one per run."""
        return "\n".join(shlex.join([*self.command, str(run_dir)]) for run_dir in run_dirs)

    def jobs(self, run_dirs: list[Path]) -> dict[Path, JobInfo]:
        """None: there is no scheduler. A live run holds the lease of its directory."""
        return {}

    def after(self, run_dir: Path) -> None:
        """Nothing here outlives the command, so nothing can wait."""

    def launch(self, run_dirs: list[Path], attempt: str, guards: Sequence[files.Guard] = ()) -> int:
        """Run the runs as processes, `slots` at a time; the first exit status that is not 0, else 0.

        A run that fails does not affect the others. Ctrl-C and SIGTERM are forwarded: the runs save and exit, and no
        further one starts. `attempt` is not used: `command` makes the attempts, each of which acquires its own lease.
        """
        if self.dry_run:
            print(self.preview(run_dirs))
            return 0
        statuses = Sweep(self, run_dirs).run()
        for run_dir, status in zip(run_dirs, statuses, strict=True):
            if status not in (ExitStatus.FINISHED, ExitStatus.INTERRUPTED):
                run = RunDir(run_dir)
                reason = display.read_status(run_dir).get("reason") or f"exited with status {status}"
                print(f"error: {run_dir.name}: {reason} (its log: {run.local_log})", file=sys.stderr)
        return next((status for status in statuses if status), 0)

    def follow(self, run_dirs: list[Path]) -> int:
        """Nothing to do: `launch` returns once the runs are over."""
        return 0


class Sweep:
    """Runs as processes of this machine."""

    def __init__(self, launcher: LocalLauncher, run_dirs: list[Path]) -> None:
        self._command = launcher.command
        self._run_dirs = run_dirs
        self._slots = min(launcher.slots, len(run_dirs))
        self._gpus = visible_gpus() if launcher.gpus is None else [str(gpu) for gpu in launcher.gpus]
        self._waiting = list(run_dirs)
        self._running: dict[int, tuple[Path, subprocess.Popen[bytes]]] = {}  # by slot
        self._statuses: dict[Path, int] = {}
        self._stopping = False
        self._received: list[int] = []  # signals that are not forwarded yet

    def run(self) -> list[int]:
        """The exit status of every run, in their order; INTERRUPTED for one that was not started any more."""
        with self._signals():
            try:
                display.follow(self._run_dirs, self._step, _console(), POLL_S)
            finally:
                for _, process in self._running.values():
                    process.wait()
        return [self._statuses.get(run_dir, int(ExitStatus.INTERRUPTED)) for run_dir in self._run_dirs]

    def _step(self) -> dict[Path, str]:
        """Forward signals, note which runs have ended, fill the free slots; the state of every run."""
        self._forward_signals()
        for slot, (run_dir, process) in list(self._running.items()):
            if process.poll() is not None:
                status = process.returncode
                self._statuses[run_dir] = status if status >= 0 else 128 - status  # as a shell reports it
                del self._running[slot]
        for slot in sorted(set(range(self._slots)) - set(self._running)):
            if self._waiting and not self._stopping:
                run_dir = self._waiting.pop(0)
                self._running[slot] = run_dir, self._start(run_dir, slot)
        return {run_dir: self._state(run_dir) for run_dir in self._run_dirs}

    def _state(self, run_dir: Path) -> str:
        if run_dir in self._statuses:
            status = self._statuses[run_dir]
            return "finished" if status == 0 else f"exited with status {status}"
        if run_dir in self._waiting:
            return "not started" if self._stopping else "waiting"
        return "running"

    def _start(self, run_dir: Path, slot: int) -> subprocess.Popen[bytes]:
        log_file = RunDir(run_dir).local_log
        files.make_dirs(log_file.parent, files.OWNED)
        with files.open_append(log_file) as log:
            # A session of its own: a Ctrl-C at the terminal reaches a run through `_forward_signals` alone, once.
            return processes.start(
                [*self._command, str(run_dir)],
                env=self._environment(slot),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _environment(self, slot: int) -> dict[str, str]:
        """One GPU per slot (shared if there are more slots than GPUs), and an equal part of the cores."""
        environment = dict(os.environ)
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[slot % len(self._gpus)]
        threads = max(1, len(os.sched_getaffinity(0)) // self._slots)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        return environment

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Receive SIGINT and SIGTERM for the runs, which save and exit at the first, and exit at once at a second."""
        watched = (signal.SIGINT, signal.SIGTERM)
        before = {signum: signals.set_handler(signum, self._receive) for signum in watched}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signals.set_handler(signum, handler)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        """Only note the signal: it may come while a run is being started."""
        self._stopping = True
        self._received.append(signum)

    def _forward_signals(self) -> None:
        while self._received:
            signum = self._received.pop(0)
            for _, process in self._running.values():
                process.send_signal(signum)


def _console() -> Console:
    """As wide as the terminal; whole names where there is none."""
    return Console() if sys.stdout.isatty() else Console(width=1000)


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES would name them. Imports no torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu for gpu in visible.split(",") if gpu.strip()]
    if shutil.which("nvidia-smi") is None:
        return []
    done = processes.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return [str(index) for index, line in enumerate(done.stdout.splitlines()) if line.startswith("GPU ")]
