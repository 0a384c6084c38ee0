"""Inject faults into a run's Slurm job. This is the target for `launcher=slurm`."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.chaos.target import STOPPING_S, TAIL_LINES, LocalTarget
from runner.contracts import SLURM_OVER, SLURM_WAITING
from runner.errors import ExitStatus, UserError
from runner.rundir.paths import RunDir
from runner.system import clock, files, processes

ENDING_S = 4.0  # after this time the batch script of the last attempt has ended
ASK_EVERY_S = 0.3  # limits the load on the Slurm controller


class SlurmTarget:
    """The Slurm jobs of one run. The user's own command submits them, and Slurm requeues them.

    Slurm delays a requeued job by two minutes. The drill releases it immediately.

    Args:
        command: the command that submits the run.
        run_dir: the run directory.
        log: the file for the command's output.
    """

    def __init__(self, command: Sequence[str], run_dir: Path, log: Path) -> None:
        self.command = list(command)
        self.run = RunDir(run_dir)
        self.log = log
        self.ranks: int | None = None
        self._restarts = 0
        self._waiting_since: float | None = None
        self._nudged = float("-inf")
        self._asked = float("-inf")
        self._answer: dict[str, str] = {}

    @property
    def job_id(self) -> str | None:
        """Return the id of the last submitted job."""
        return files.read_object(self.run.job).get("job_id")

    # While the job is queued or running, the command reports this and submits nothing.
    refusals: tuple[int, ...] = (int(ExitStatus.FINISHED), int(ExitStatus.LOCKED))

    def begin(self) -> None:
        state = self._show(fresh=True)
        if _is_over(state):
            self._submit()
            state = self._show(fresh=True)
        self._restarts = int(state.get("Restarts", "0"))
        self._nudge(state)

    def _submit(self) -> None:
        submitting = LocalTarget(self.command, self.log)
        submitting.begin()
        if submitting.wait(2 * STOPPING_S) != 0:
            raise UserError(f"the run could not be submitted: {submitting.tail()}")

    def _nudge(self, state: Mapping[str, str]) -> None:
        """Release a delayed job immediately, but only after the batch script of its last attempt has ended.

        If released earlier, Slurm would mistake the end of that script for the end of the next attempt.
        """
        if state.get("JobState") not in SLURM_WAITING:
            self._waiting_since = None
            return
        self._waiting_since = self._waiting_since or clock.monotonic()
        now = clock.monotonic()
        if state.get("Reason") == "BeginTime" and now > max(self._waiting_since + ENDING_S, self._nudged + ASK_EVERY_S):
            self._nudged = now
            _ask("scontrol", "update", f"jobid={self.job_id}", "starttime=now")

    def ended(self) -> int | None:
        state = self._show()
        if int(state.get("Restarts", self._restarts)) > self._restarts:
            # The old attempt is over only once the job is pending again.
            return self._status() if state.get("JobState") != "COMPLETING" else None
        if _is_over(state):
            return self._status()
        self._nudge(state)
        return None

    def _status(self) -> int:
        if self.run.finished.exists():
            return int(ExitStatus.FINISHED)
        for line in reversed(list(files.read_lines(self.run.attempts))):
            if self.owns(line) and line.get("exit") is not None:
                return int(line["exit"])
        return -int(signal.SIGKILL)

    def owns(self, holder: Mapping[str, Any]) -> bool:
        job_id = holder.get("job_id")
        return job_id is not None and job_id == self.job_id and holder.get("restart_count") == self._restarts

    def send(self, signum: int) -> None:
        if signum == signal.SIGKILL:
            self._kill()
            return
        _ask("scancel", f"--signal={signal.Signals(signum).name.removeprefix('SIG')}", str(self.job_id))

    def _kill(self) -> None:
        """Send SIGKILL to the process on its node, because `scancel --signal=KILL` would ask it to stop first."""
        attempt = files.read_object(self.run.attempt)
        where = [f"--nodelist={attempt['node']}"] if attempt.get("node") else []
        step = ["srun", f"--jobid={self.job_id}", "--overlap", "--nodes=1", "--ntasks=1", *where]
        _ask(*step, "kill", "-KILL", str(attempt.get("pid")))

    def requeue(self) -> None:
        """Requeue the job, as an administrator would, or as Slurm does for a preemption without grace time."""
        _ask("scontrol", "requeue", str(self.job_id))

    def cancel(self) -> None:
        """Cancel the job, as its user would."""
        _ask("scancel", str(self.job_id))

    def freeze(self) -> bool:
        return self.ended() is None

    def unfreeze(self) -> None:
        """Do nothing, because a job is never frozen."""

    def limit_files(self, size: int | None) -> None:
        raise UserError("writes of a job on another machine cannot be limited: remove disk-full from --faults")

    def another(self) -> LocalTarget:
        """Return a rerun of the command. It must be refused before it submits anything."""
        return LocalTarget(self.command, self.log)

    def wait(self, timeout_s: float) -> int | None:
        end = clock.monotonic() + timeout_s
        while (status := self.ended()) is None and clock.monotonic() < end:
            clock.sleep(ASK_EVERY_S)
        return status

    def stop(self) -> None:
        if not _is_over(self._show(fresh=True)):
            self.cancel()
            end = clock.monotonic() + STOPPING_S
            while not _is_over(self._show()) and clock.monotonic() < end:
                clock.sleep(ASK_EVERY_S)

    def tail(self) -> str:
        logs = sorted(self.run.logs.glob("*_log.out"), key=lambda path: path.stat().st_mtime)
        text = logs[-1].read_text(errors="replace") if logs else ""
        return "\n".join(text.splitlines()[-TAIL_LINES:])

    def _show(self, fresh: bool = False) -> dict[str, str]:
        """Return the fields that Slurm reports for the job, or an empty dictionary if there is no job."""
        now = clock.monotonic()
        if fresh or now - self._asked >= ASK_EVERY_S:
            self._asked = now
            job_id = self.job_id
            text = _ask("scontrol", "show", "job", "-o", job_id) if job_id else ""
            if text is not None:  # if None, the controller is busy, and its last answer is kept
                self._answer = dict(word.split("=", 1) for word in text.split() if "=" in word)
        return self._answer


def _is_over(state: Mapping[str, str]) -> bool:
    """Return whether the job has ended or does not exist."""
    return state.get("JobState", "COMPLETED") in SLURM_OVER


def _ask(*command: str) -> str | None:
    """Return the output of a Slurm command: empty if the job does not exist, None after other errors."""
    try:
        done = processes.run(command, capture_output=True, text=True, timeout=STOPPING_S, check=False)
    except subprocess.TimeoutExpired:
        print(f"warning: {' '.join(command)}: no answer in {STOPPING_S:.0f} s", file=sys.stderr)
        return None
    if done.returncode and "nvalid job id" not in done.stderr:
        print(f"warning: {' '.join(command)}: {done.stderr.strip()}", file=sys.stderr)
        return None
    return done.stdout
