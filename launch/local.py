"""Runs on this machine: one in this process, several as processes of their own."""

from __future__ import annotations

import importlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from rich.console import Console

from launch import LOGS, STATUS_FILE, Finding, JobInfo, display, read_object

LOG = f"{LOGS}/local.out"
POLL_S = 0.2
NOT_STARTED = 75  # the status of a run that was asked to stop


@dataclass
class LocalLauncher:
    """Runs here (a `launch.Launcher`). The options are explained in conf/launcher/local.yaml."""

    in_process: ClassVar[bool] = True  # a single run is an attempt in this very process

    slots: int = 1
    gpus: Any = None  # a list of numbers or names; None: all that are visible
    command: list[str] = field(default_factory=lambda: [sys.executable, "-m", "runner.train"])
    wait: bool = True
    dry_run: bool = False
    retry_failed: bool = False

    def check(self, run_dirs: list[Path]) -> list[str]:
        """The faults of the options."""
        faults = []
        if not isinstance(self.slots, int) or self.slots < 1:
            faults.append(f"launcher.slots={self.slots!r} must be a whole number from 1")
        if self.gpus is not None and not isinstance(self.gpus, list):
            faults.append(f"launcher.gpus={self.gpus!r} must be a list, for example launcher.gpus=[0,1]")
        if len(run_dirs) > 1 and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            faults.append("a sweep cannot run under torchrun: give one run, or start the sweep without torchrun")
        return faults

    def examine(self, save_s: float | None) -> list[Finding]:
        """The GPUs that a sweep would share."""
        gpus = visible_gpus() if self.gpus is None else self.gpus
        if gpus and self.slots > len(gpus):
            text = f"{self.slots} slots share {len(gpus)} GPUs"
            return [Finding("warning", text, f"launcher.slots={len(gpus)} gives each run a GPU of its own")]
        return [Finding("ok", f"runs on this machine, {self.slots} at a time, {len(gpus) or 'no'} GPUs")]

    def preview(self, run_dirs: list[Path]) -> str:
        """The commands, one a run."""
        return "\n".join(" ".join([*self.command, str(run_dir)]) for run_dir in run_dirs)

    def jobs(self, run_dirs: list[Path]) -> dict[Path, JobInfo]:
        """None that were started here: no scheduler has them. A run that is alive holds the lease of its directory."""
        return {}

    def launch(self, run_dirs: list[Path], attempt: str) -> int:
        """Run them all; the exit status of the one, or of several the first that is not 0.

        One run runs in this process. Several run as processes, `slots` at a time, and one that fails leaves
        the others alone. Ctrl-C and SIGTERM are handed on: the runs save and leave, no further one starts.
        """
        if self.dry_run:
            print(self.preview(run_dirs))
            return 0
        if len(run_dirs) == 1:
            module, _, name = attempt.partition(":")
            return int(getattr(importlib.import_module(module), name)(run_dirs[0], job=None))
        statuses = Sweep(self, run_dirs).run()
        for run_dir, status in zip(run_dirs, statuses, strict=True):
            if status not in (0, NOT_STARTED):
                reason = read_object(run_dir / STATUS_FILE).get("reason") or f"ended with status {status}"
                print(f"error: {run_dir.name}: {reason} (its log: {run_dir / LOG})", file=sys.stderr)
        return next((status for status in statuses if status), 0)


class Sweep:
    """Several runs as processes on this machine."""

    def __init__(self, launcher: LocalLauncher, run_dirs: list[Path]) -> None:
        self._command = launcher.command
        self._run_dirs = run_dirs
        self._slots = min(launcher.slots, len(run_dirs))
        self._gpus = visible_gpus() if launcher.gpus is None else [str(gpu) for gpu in launcher.gpus]
        self._waiting = list(run_dirs)
        self._running: dict[int, tuple[Path, subprocess.Popen[bytes]]] = {}  # by slot
        self._statuses: dict[Path, int] = {}
        self._stopped: int | None = None  # the signal that asked the sweep to end
        self._received: list[int] = []  # signals that the runs have not been told of yet

    def run(self) -> list[int]:
        """The exit status of every run, in their order; one that was not started any more has 75."""
        with self._signals():
            try:
                display.follow(self._run_dirs, self._step, _console(), POLL_S)
            finally:
                for _, process in self._running.values():
                    process.wait()
        return [self._statuses.get(run_dir, NOT_STARTED) for run_dir in self._run_dirs]

    def _step(self) -> dict[Path, str]:
        """Hand signals on, note which runs have ended, fill the free slots; the state of every run."""
        self._hand_on()
        for slot, (run_dir, process) in list(self._running.items()):
            if process.poll() is not None:
                status = process.returncode
                self._statuses[run_dir] = status if status >= 0 else 128 - status  # as a shell says it
                del self._running[slot]
        for slot in sorted(set(range(self._slots)) - set(self._running)):
            if self._waiting and self._stopped is None:
                run_dir = self._waiting.pop(0)
                self._running[slot] = run_dir, self._start(run_dir, slot)
        return {run_dir: self._state(run_dir) for run_dir in self._run_dirs}

    def _state(self, run_dir: Path) -> str:
        if run_dir in self._statuses:
            status = self._statuses[run_dir]
            return "finished" if status == 0 else f"ended with status {status}"
        if run_dir in self._waiting:
            return "waiting" if self._stopped is None else "not started"
        return "running"

    def _start(self, run_dir: Path, slot: int) -> subprocess.Popen[bytes]:
        (run_dir / LOG).parent.mkdir(exist_ok=True)
        with open(run_dir / LOG, "ab") as log:
            # A session of its own: a Ctrl-C at the terminal reaches the runs through us alone, once.
            return subprocess.Popen(
                [*self._command, str(run_dir)],
                env=self._environment(slot),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _environment(self, slot: int) -> dict[str, str]:
        """One GPU a slot (shared when there are more slots than GPUs), and a fair part of the cores."""
        environment = dict(os.environ)
        if self._gpus:
            environment["CUDA_VISIBLE_DEVICES"] = self._gpus[slot % len(self._gpus)]
        threads = max(1, len(os.sched_getaffinity(0)) // self._slots)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        return environment

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Hand SIGINT and SIGTERM on to the runs; the second one as well, at which they leave at once."""
        watched = (signal.SIGINT, signal.SIGTERM)
        before = {signum: signal.signal(signum, self._receive) for signum in watched}
        try:
            yield
        finally:
            for signum, handler in before.items():
                signal.signal(signum, handler)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        """Only note it: it may come while a run is being started that nobody could tell yet."""
        self._stopped = signum
        self._received.append(signum)

    def _hand_on(self) -> None:
        while self._received:
            signum = self._received.pop(0)
            for _, process in self._running.values():
                process.send_signal(signum)


def _console() -> Console:
    """As wide as the terminal; whole names where nobody looks."""
    return Console() if sys.stdout.isatty() else Console(width=1000)


def visible_gpus() -> list[str]:
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES would name them. Imports no torch."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [gpu for gpu in given.split(",") if gpu.strip()]
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return [str(index) for index, line in enumerate(done.stdout.splitlines()) if line.startswith("GPU ")]
