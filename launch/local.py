"""Start runs as processes on this machine."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from launch import display, ranges
from launch.rank_processes import RankProcesses
from runner.contracts import Finding, JobInfo, RankCounts
from runner.errors import ExitStatus, UserError
from runner.rundir.paths import RunDir
from runner.system import clock, files, processes, signals

POLL_S = 0.2
TRAINING = "runner.training.attempt:attempt"
TAIL = 4096
"""How many bytes at the end of a log are read."""
SLOT = "runner.cli.start.slot:slot"  # a search prints its table itself


@dataclass
class LocalLauncher:
    """Start runs on this machine (a `runner.contracts.Launcher`); see conf/launcher/local.yaml for the options."""

    in_process: ClassVar[bool] = True
    wait: ClassVar[bool] = False  # `launch` itself waits

    ranks: Any = 1  # a number, or a range such as "1-4"
    slots: int = 1
    gpus: Any = None  # a list of numbers or names, or None for all visible GPUs
    command: list[str] | None = None  # if None, Python with the attempt's module
    dry_run: bool = False
    retry_failed: bool = False

    @property
    def parallel(self) -> int:
        """Return launcher.slots."""
        return self.slots

    def command_for(self, attempt: str = TRAINING) -> list[str]:
        """Return the command that starts an attempt, to which the run directory is appended."""
        return self.command or [sys.executable, "-m", attempt.partition(":")[0]]

    def rank_counts(self) -> RankCounts:
        """Return the numbers of ranks that launcher.ranks allows."""
        return RankCounts(ranges.parse("launcher.ranks", self.ranks), f"launcher.ranks={self.ranks}")

    def check(self, run_dirs: list[Path]) -> list[str]:
        """Return errors in the options."""
        errors = []
        if not isinstance(self.slots, int) or self.slots < 1:
            errors.append(f"launcher.slots={self.slots!r} must be a whole number, 1 or more")
        if self.gpus is not None and not isinstance(self.gpus, list):
            errors.append(f"launcher.gpus={self.gpus!r} must be a list, for example launcher.gpus=[0,1]")
        if len(run_dirs) > 1 and int(processes.environment.get("WORLD_SIZE", "1")) > 1:
            errors.append("torchrun cannot start a sweep: start a single run, or the sweep without torchrun")
        return errors or self._rank_errors()

    def _rank_errors(self) -> list[str]:
        try:
            counts = self.rank_counts().counts
        except UserError as error:
            return [str(error)]
        if list(counts) == [1]:
            return []
        if "TORCHELASTIC_RUN_ID" in processes.environment or int(processes.environment.get("WORLD_SIZE", "1")) > 1:
            return [f"launcher.ranks={self.ranks} starts the ranks itself: run the command without torchrun"]
        gpus = self.visible()
        if gpus and len(gpus) < counts[0]:
            return [
                f"launcher.ranks={self.ranks}: {counts[0]} ranks need a GPU each and {len(gpus)} are visible: set "
                f"launcher.ranks={len(gpus)}, or launcher.gpus=[] for ranks on the CPU"
            ]
        return []

    def visible(self) -> list[str]:
        """Return the GPUs to use."""
        return visible_gpus() if self.gpus is None else [str(gpu) for gpu in self.gpus]

    def ranks_for(self, slots: int) -> int:
        """Return the number of ranks per run if `slots` runs share the free GPUs, within launcher.ranks."""
        counts = self.rank_counts().counts
        free = (len(self.visible()) or processes.cores()) // slots
        return min(max(free, counts[0]), counts[-1])

    def examine(self, save_s: float | None) -> list[Finding]:
        """Report whether ranks or runs of a sweep would share GPUs."""
        gpus, ranks = self.visible(), self.ranks_for(self.slots)
        used = self.slots * ranks
        if gpus and used > len(gpus):
            each = f" of {ranks} ranks" if ranks > 1 else ""
            remedy = f"launcher.slots={max(1, len(gpus) // ranks)} for one GPU per {'rank' if ranks > 1 else 'run'}"
            return [Finding("warning", f"{self.slots} slots{each} share {len(gpus)} GPUs", remedy)]
        each = f", {ranks} ranks each" if list(self.rank_counts().counts) != [1] else ""
        return [Finding("ok", f"runs on this machine, {self.slots} at a time{each}, {len(gpus) or 'no'} GPUs")]

    def preview(self, run_dirs: list[Path]) -> str:
        """Return each run's command. For several ranks, return the equivalent torchrun command."""
        python, *rest = self.command_for()
        ranks = self.ranks_for(min(self.slots, len(run_dirs)))
        several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        return "\n".join(shlex.join([python, *several, *rest, str(run_dir)]) for run_dir in run_dirs)

    def cancel(self, run_dirs: list[Path]) -> dict[Path, str]:
        """Return {}, because there is no scheduler. `runner cancel` sends a signal to the training process instead."""
        return {}

    def jobs(self, run_dirs: list[Path]) -> dict[Path, JobInfo]:
        """Return {}, because there is no scheduler. A live run holds the lease of its directory."""
        return {}

    def launch(self, run_dirs: list[Path], attempt: str, guards: Sequence[files.Guard] = ()) -> int:
        """Run the runs as processes, `slots` at a time. Return the first nonzero exit status, else 0.

        A run that fails does not affect the others. Ctrl-C, SIGTERM and SIGHUP are forwarded, so that the runs save and
        exit; no further run starts. Each attempt acquires its run's lease. A single run with launcher.ranks writes to
        this terminal, as a run in this process does.
        """
        if self.dry_run:
            print(self.preview(run_dirs))
            return 0
        alone = len(run_dirs) == 1 and list(self.rank_counts().counts) != [1]
        sweep = Sweep(self, run_dirs, alone, self.command_for(attempt), brief=attempt == SLOT)
        statuses = sweep.run()
        for run_dir, status in zip(run_dirs, statuses, strict=True):
            errors = sweep.losses.get(run_dir, [])
            if not alone and status not in (ExitStatus.FINISHED, ExitStatus.INTERRUPTED):
                reason = display.read_status(run_dir).get("reason") or _last_error(RunDir(run_dir).local_log)
                reason = reason or f"exited with status {status}"
                lines = [f"{reason} (its log: {RunDir(run_dir).local_log})", *errors]
                errors = [f"{run_dir.name}: {line}" for line in lines]
            for error in errors:
                print(f"error: {error}", file=sys.stderr)
        if not alone and ExitStatus.INTERRUPTED in statuses:
            print("interrupted: rerun the command, which resumes what has not finished", file=sys.stderr)
        elif not alone and attempt != SLOT:
            print(f"compare the runs: python -m runner report {shlex.quote(os.path.relpath(run_dirs[0].parent))}")
        return next((status for status in statuses if status), 0)

    def follow(self, run_dirs: list[Path]) -> int:
        """Do nothing, because `launch` returns only when the runs have ended."""
        return 0


def _last_error(log: Path) -> str | None:
    """Return the error in the last line of a log, to explain a process that failed before it could record why."""
    with suppress(OSError), files.open_regular(log) as file:
        file.seek(max(0, files.size_of(file.fileno()) - TAIL))
        *_, last = ["", *file.read().decode(errors="replace").splitlines()]
        return last.removeprefix("error: ") if last.startswith("error: ") else None
    return None


class Sweep:
    """Run several runs as processes on this machine.

    Args:
        launcher: the launcher whose options apply.
        run_dirs: directories of the runs.
        command: command that starts an attempt, to which the run directory is appended. If None, the attempt trains.
        alone: whether this is a single run, whose rank 0 writes to this terminal. Otherwise each run writes to a log,
            and a table is shown.
        brief: show the table only on a terminal, and remove it at the end.
    """

    def __init__(
        self,
        launcher: LocalLauncher,
        run_dirs: list[Path],
        alone: bool = False,
        command: Sequence[str] | None = None,
        brief: bool = False,
    ) -> None:
        self._command = command or launcher.command_for()
        self._run_dirs = run_dirs
        self._alone = alone
        self._brief = brief
        self._slots = min(launcher.slots, len(run_dirs))
        self._ranks = launcher.ranks_for(self._slots)
        self._gpus = launcher.visible()
        self._chosen = launcher.gpus is not None
        self._waiting = list(run_dirs)
        self._running: dict[int, tuple[Path, RankProcesses]] = {}  # by slot
        self._statuses: dict[Path, int] = {}
        self._stopping = False
        self._received: list[int] = []  # signals that are not forwarded yet
        self._interrupts = 0
        self.losses: dict[Path, list[str]] = {}  # a sentence for each rank that a signal killed

    def run(self) -> list[int]:
        """Run all, and return their exit statuses in order: INTERRUPTED for a run that was not started."""
        # At the first signal the runs save and exit. At a second Ctrl-C they exit immediately.
        with signals.received_by(self._receive):
            try:
                console = display.console()
                if self._alone or (self._brief and not console.is_terminal):
                    while not all(map(display.is_over, self._step().values())):
                        clock.sleep(POLL_S)
                else:
                    display.follow(self._run_dirs, self._step, console, POLL_S, transient=self._brief)
            finally:
                for _, attempt in self._running.values():
                    attempt.wait()
        return [self._statuses.get(run_dir, int(ExitStatus.INTERRUPTED)) for run_dir in self._run_dirs]

    def _step(self) -> dict[Path, str]:
        """Forward signals, record ended runs, start runs in free slots, and return the state of every run."""
        self._forward_signals()
        for slot, (run_dir, attempt) in list(self._running.items()):
            status = attempt.poll()
            if status is not None:
                self._statuses[run_dir] = status
                self.losses[run_dir] = attempt.losses()
                del self._running[slot]
        for slot in sorted(set(range(self._slots)) - set(self._running)):
            if self._waiting and not self._stopping:
                run_dir = self._waiting.pop(0)
                self._running[slot] = run_dir, self._start(run_dir, slot)
        return {run_dir: self._state(run_dir) for run_dir in self._run_dirs}

    def _state(self, run_dir: Path) -> str:
        if run_dir in self._statuses:
            status = self._statuses[run_dir]
            words = {ExitStatus.FINISHED: "finished", ExitStatus.INTERRUPTED: "interrupted"}
            return next((word for known, word in words.items() if known == status), f"exited with status {status}")
        if run_dir in self._waiting:
            return "not started" if self._stopping else "waiting"
        return "running"

    def _start(self, run_dir: Path, slot: int) -> RankProcesses:
        run = RunDir(run_dir)
        log = None if self._alone else run.local_log
        return RankProcesses(self._command, run, self._ranks, self._environment(slot), log)

    def _environment(self, slot: int) -> dict[str, str]:
        """Return a slot's environment: one GPU per rank (shared if too few) and an equal share of the cores."""
        environment = dict(processes.environment)
        if self._gpus or self._chosen:
            first, count = slot * self._ranks, min(self._ranks, len(self._gpus))
            mine = [self._gpus[(first + rank) % len(self._gpus)] for rank in range(count)]
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        threads = max(1, processes.cores() // (self._slots * self._ranks))
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        return environment

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        """Only record the signal, because it may arrive while a run is being started."""
        if signum == signal.SIGINT:
            self._interrupts += 1
            signals.announce(self._interrupts)  # one announcement for all runs
        self._stopping = True
        self._received.append(signum)

    def _forward_signals(self) -> None:
        while self._received:
            signum = self._received.pop(0)
            for _, attempt in self._running.values():
                attempt.send(signum)


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as in CUDA_VISIBLE_DEVICES, without importing torch."""
    visible = processes.environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [gpu for gpu in visible.split(",") if gpu.strip()]
    if processes.find_command("nvidia-smi") is None:
        return []
    done = processes.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return [str(index) for index, line in enumerate(done.stdout.splitlines()) if line.startswith("GPU ")]
