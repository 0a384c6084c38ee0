"""What is struck when `launcher=slurm`: the job of a run, through the queue."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runner.chaos.victim import STOPPING_S, TAIL_LINES, LocalVictim
from runner.errors import ExitStatus, UserError
from runner.files import read_json, read_lines
from runner.run_dir import RunDir

ENDING_S = 4.0
ASK_EVERY_S = 0.3  # the controller is not to be flooded
WAITING = {"PENDING", "REQUEUED", "REQUEUE_HOLD"}
# A job that is neither waiting nor over has many words (RUNNING, SIGNALING, COMPLETING, ...).
OVER = {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "DEADLINE"}
OVER |= {"OUT_OF_MEMORY", "REVOKED"}


class SlurmVictim:
    """The jobs of one run: submitted with the user's own command, brought back by Slurm.

    Slurm holds a requeued job back for two minutes; the drill has no time for that and lets it start at once.

    Args:
        command: what submits the run.
        run_dir: where the run is.
        log: file for what the command prints.
    """

    def __init__(self, command: Sequence[str], run_dir: Path, log: Path) -> None:
        self.command = list(command)
        self.run = RunDir(run_dir)
        self.log = log
        self._restarts = 0
        self._waiting_since: float | None = None
        self._asked = float("-inf")
        self._answer: dict[str, str] = {}

    @property
    def job_id(self) -> str | None:
        """Id of the job that was submitted last."""
        return (read_json(self.run.job) or {}).get("job_id")

    # With the job in the queue or running, the same command says so and submits nothing.
    refusals: tuple[int, ...] = (int(ExitStatus.FINISHED), int(ExitStatus.LOCKED))

    def begin(self) -> None:
        state = self._show(fresh=True)
        if _is_over(state):
            self._submit()
            state = self._show(fresh=True)
        self._restarts = int(state.get("Restarts", "0"))
        self._nudge(state)

    def _submit(self) -> None:
        submitting = LocalVictim(self.command, self.log)
        submitting.begin()
        if submitting.wait(2 * STOPPING_S) != 0:
            raise UserError(f"the run could not be submitted: {submitting.tail()}")

    def _nudge(self, state: Mapping[str, str]) -> None:
        """Let a job that is held back start at once.

        But not before the batch script of its last attempt is surely over: Slurm would take the end of that
        one for the end of the next.
        """
        if state.get("JobState") not in WAITING:
            self._waiting_since = None
            return
        self._waiting_since = self._waiting_since or time.monotonic()
        if state.get("Reason") == "BeginTime" and time.monotonic() - self._waiting_since > ENDING_S:
            _ask("scontrol", "update", f"jobid={self.job_id}", "starttime=now")

    def ended(self) -> int | None:
        state = self._show()
        if int(state.get("Restarts", self._restarts)) > self._restarts:
            # It is out of the old attempt for good only when it waits again.
            return self._status() if state.get("JobState") != "COMPLETING" else None
        if _is_over(state):
            return self._status()
        self._nudge(state)
        return None

    def _status(self) -> int:
        if self.run.finished.exists():
            return int(ExitStatus.FINISHED)
        for line in reversed(list(read_lines(self.run.attempts))):
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
        """SIGKILL to the process itself, on its node: `scancel --signal=KILL` would ask it to leave first."""
        attempt = read_json(self.run.attempt) or {}
        where = [f"--nodelist={attempt['node']}"] if attempt.get("node") else []
        step = ["srun", f"--jobid={self.job_id}", "--overlap", "--nodes=1", "--ntasks=1", *where]
        _ask(*step, "kill", "-KILL", str(attempt.get("pid")))

    def requeue(self) -> None:
        """As an administrator would, or Slurm itself without a grace time."""
        _ask("scontrol", "requeue", str(self.job_id))

    def cancel(self) -> None:
        """As its user would."""
        _ask("scancel", str(self.job_id))

    def freeze(self) -> bool:
        return self.ended() is None

    def resume(self) -> None:
        """Nothing to do: a job is not frozen."""

    def limit_files(self, size: int | None) -> None:
        raise UserError("the files of a job on another machine cannot be limited: leave disk-full out of --faults")

    def another(self) -> LocalVictim:
        """The same command again, which must be refused before it submits anything."""
        return LocalVictim(self.command, self.log)

    def wait(self, timeout_s: float) -> int | None:
        end = time.monotonic() + timeout_s
        while (status := self.ended()) is None and time.monotonic() < end:
            time.sleep(ASK_EVERY_S)
        return status

    def stop(self) -> None:
        if not _is_over(self._show(fresh=True)):
            self.cancel()
            end = time.monotonic() + STOPPING_S
            while not _is_over(self._show()) and time.monotonic() < end:
                time.sleep(ASK_EVERY_S)

    def tail(self) -> str:
        logs = sorted(self.run.logs.glob("*_log.out"), key=lambda path: path.stat().st_mtime)
        text = logs[-1].read_text(errors="replace") if logs else ""
        return "\n".join(text.splitlines()[-TAIL_LINES:])

    def _show(self, fresh: bool = False) -> dict[str, str]:
        """What Slurm says of the job; empty if there is none."""
        now = time.monotonic()
        if fresh or now - self._asked >= ASK_EVERY_S:
            self._asked = now
            job_id = self.job_id
            text = _ask("scontrol", "show", "job", "-o", job_id) if job_id else ""
            if text is not None:  # else the controller is busy: what it said last still holds
                self._answer = dict(word.split("=", 1) for word in text.split() if "=" in word)
        return self._answer


def _is_over(state: Mapping[str, str]) -> bool:
    """Whether there is no job, or no longer."""
    return state.get("JobState", "COMPLETED") in OVER


def _ask(*command: str) -> str | None:
    """What a command of Slurm prints; nothing if there is no such job, None if it fails otherwise."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=STOPPING_S, check=False)
    except subprocess.TimeoutExpired:
        print(f"warning: {' '.join(command)}: no answer in {STOPPING_S:.0f} s", file=sys.stderr)
        return None
    if done.returncode and "nvalid job id" not in done.stderr:
        print(f"warning: {' '.join(command)}: {done.stderr.strip()}", file=sys.stderr)
        return None
    return done.stdout
