"""Define what `runner` and `launch` both rely on: the interfaces of a launcher and a job, and Slurm's job states.

`runner` never imports `launch`; a config's `launcher._target_` connects them. `launch` imports only this module,
`runner.errors`, `runner.rundir.paths` and `runner.system` from `runner`. This module imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from runner.system import files


@dataclass(frozen=True)
class JobInfo:
    """What a scheduler reports about a run's job, as long as it remembers the job.

    Example:
        >>> from runner.contracts import JobInfo
        >>> job = JobInfo("4711_3", "pending", reason="Priority", waited_s=120.0)
        >>> job.live
        True
        >>> JobInfo("4711_2", "failed", node="gpu-07", reason="OutOfMemory").live
        False
    """

    job_id: str
    # A live job is pending, running, suspended, requeued (waiting again after it ran) or ending (releasing its node;
    # whether it will wait again is not known yet). A job that is over is completed, failed or cancelled.
    state: str
    node: str | None = None  # the first node, once the job is running
    reason: str | None = None  # why the job waits, or why it failed before an attempt could begin
    restarts: int = 0
    waited_s: float | None = None  # how long a waiting job has waited
    starts: float | None = None  # when the scheduler expects it to start, seconds since 1970

    @property
    def live(self) -> bool:
        """Return whether the job is queued or running."""
        return self.state not in ("completed", "failed", "cancelled")


@dataclass(frozen=True)
class Finding:
    """The result of one check that is made before anything runs; `runner doctor` prints it.

    Example:
        >>> import shutil
        >>> from runner.contracts import Finding
        >>> free_gb = shutil.disk_usage(".").free / 1e9
        >>> if free_gb < 100:
        ...     finding = Finding("warning", f"{free_gb:.0f} GB are free", remedy="lower checkpoint.keep_last")
        ... else:
        ...     finding = Finding("ok", f"{free_gb:.0f} GB are free")
    """

    level: str  # ok | warning | error
    text: str
    remedy: str | None = None


@dataclass(frozen=True)
class RankCounts:
    """The numbers of ranks that an attempt of a run may have."""

    counts: range = range(1, 2)
    option: str = ""  # the setting that allows them, as the user wrote it: launcher.ranks=1-4
    per_node: int | None = None  # ranks on each node, if there are or may be several nodes

    @property
    def vary(self) -> bool:
        """Return whether two attempts of a run may have different numbers of ranks."""
        return len(self.counts) > 1


@runtime_checkable
class Launcher(Protocol):
    """Start runs on this machine or a cluster.

    Everything about a run is in its directory; a launcher gets nothing else.

    A launcher never raises for a user's mistake. `check` returns it. `launch` prints one line to standard error that
    names what was not started and why, and returns a nonzero status.

    Example:
        A launcher of your own, in my_launcher.py of the current directory; use it with
        `runner experiment=smoke launcher._target_=my_launcher.NiceLauncher`.

        >>> from launch.local import TRAINING, LocalLauncher
        >>> class NiceLauncher(LocalLauncher):
        ...     in_process = False  # `launch` starts single runs too
        ...     def command_for(self, attempt: str = TRAINING) -> list[str]:
        ...         return ["nice", "-n", "10", *super().command_for(attempt)]
    """

    @property
    def in_process(self) -> bool:
        """Return whether the runs run on this machine.

        If so, the command trains a single run of one rank itself. It calls `launch` for all others and waits for them.
        """

    def rank_counts(self) -> RankCounts:
        """Return how many ranks the launcher may start for each run.

        The command checks that the config allows them all.

        Raises:
            UserError: the options do not determine them.
        """

    @property
    def dry_run(self) -> bool:
        """Return whether the command prints `preview` instead of calling `launch`."""

    @property
    def wait(self) -> bool:
        """Return whether the command calls `follow` after a successful `launch`."""

    @property
    def retry_failed(self) -> bool:
        """Return whether the command restarts failed runs."""

    def check(self, run_dirs: list[Path]) -> list[str]:
        """Return the config errors that would keep `run_dirs` from running, one per line. Write and start nothing.

        The command passes only the runs that it is about to start, so `check` may query a scheduler.
        """

    def examine(self, save_s: float | None) -> list[Finding]:
        """Check the place where the runs would run, for `runner doctor`.

        Args:
            save_s: how long a checkpoint takes, in seconds, if known.
        """

    def preview(self, run_dirs: list[Path]) -> str:
        """Describe what `launch` would start."""

    def launch(self, run_dirs: list[Path], attempt: str, guards: Sequence[files.Guard] = ()) -> int:
        """Start the runs and return the exit status.

        After an error, the runs that were already started keep running and are recorded in their run directories.

        Args:
            run_dirs: one or more existing directories with everything that `attempt` needs, such as run directories.
            attempt: `module:function`. Inside a scheduler's job the function is called as `function(run_dir, job=job)`
                with a `Job`, and returns an exit status.
            guards: the right to submit each run and to write its job.json for the duration of the call; empty: no other
                process submits them.

        Raises:
            SupersededError: another command has taken over.
        """

    def follow(self, run_dirs: list[Path]) -> int:
        """Show the launched runs until all have ended, and return the exit status. Called only if `wait` is set."""

    def cancel(self, run_dirs: list[Path]) -> dict[Path, str]:
        """End the live jobs of these runs for good, and return what was ended for each run, such as `job 12_3`.

        Runs without a live job are not in the result.

        Raises:
            OSError: the scheduler does not respond, or refuses.
        """

    def jobs(self, run_dirs: list[Path]) -> dict[Path, JobInfo]:
        """Return the jobs that the scheduler remembers, by run. Jobs that are over may be missing.

        Raises:
            OSError: there is a scheduler and it does not respond, so the state is unknown.
        """


class Job(Protocol):
    """The job in which an attempt runs: its identity, why it was asked to stop, and how it is requeued.

    The runner passes it to `module:function` of `Launcher.launch`.

    Example:
        >>> from pathlib import Path
        >>> from runner.contracts import Job
        >>> def attempt(run_dir: str | Path, job: Job) -> int:
        ...     facts = job.identity()
        ...     print(f"job {facts['job_id']} on {facts['node']} waited {job.waited().get('queue_s', 0):.0f} s")
        ...     job.on_started()
        ...     return 0
    """

    auto_restarts: bool
    """Whether the attempt is restarted automatically, so that crash loops must be stopped."""

    max_timeouts: int | None
    """How many time limits in a row without a new checkpoint stop the run; None: each counts as a failure."""

    early_signal: int | None
    """A signal that arrived before the attempt installed its handlers."""

    def identity(self) -> dict[str, Any]:
        """Return job_id, restart_count, host and node; several nodes as `nodes`.

        A scheduler's job adds its `launcher` (`module.Class`), its `job_name`, and `submission`, which distinguishes it
        from a later job with the same id.
        """

    def began(self) -> float:
        """Return when this start of the job got its nodes, or else when this process began (`clock.monotonic`)."""

    def waited(self) -> dict[str, float]:
        """Return the seconds before this start by the scheduler's clock: `hold_s` held back, `queue_s` queued.

        Empty if they are not known.
        """

    def cause(self, signum: int) -> str:
        """Return why `signum` was sent: preempted, time limit, cancelled, requeued, node failure or interrupted."""

    def cause_of_loss(self, record: dict[str, Any]) -> str:
        """Return the likely cause of the end of an earlier attempt that did not record its end.

        Args:
            record: that attempt's entry in attempt.json.
        """

    def on_started(self) -> None:
        """React to the start of the attempt, which is now in the attempt log."""

    def yield_verdict(self, reason: str | None = None) -> bool:
        """Leave the decision how the job ends to another rank, and return whether the job is then restarted.

        Args:
            reason: why the attempt could not begin; None: this rank only reacts to another rank's failure.
        """

    def record_verdict(self) -> None:
        """Record that this rank decides how the job ends, unless it has yielded that. May be called repeatedly."""

    def requeue_if_needed(self, cause: str) -> str:
        """Requeue the job if `cause` requires it, after the save and on rank 0 alone.

        Returns:
            The final cause, because a job may be cancelled while it saves.
        """


def is_same_job(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two records, of holders or of attempts, belong to the same job.

    Slurm reuses job ids, so their submissions are compared too.
    """
    return all(one.get(key) == other.get(key) for key in ("job_id", "submission"))


# Job states as in squeue(1), JOB STATE CODES. The state of a running job may be RUNNING, SUSPENDED, SIGNALING (until
# every node has acknowledged a signal), STOPPED, RESIZING, or one of a later version. So the states of jobs that do
# not run are listed, and every other state counts as running.
SLURM_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
SLURM_SUSPENDED = frozenset({"SUSPENDED", "STOPPED"})  # hold their nodes, but make no steps
SLURM_ENDING = frozenset({"COMPLETING", "STAGE_OUT"})
# The job is over; Slurm remembers it for some minutes (MinJobAge). The values are those of `JobInfo.state`.
SLURM_OVER = {
    "COMPLETED": "completed",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "PREEMPTED": "cancelled",
    **dict.fromkeys(("FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE"), "failed"),
}
SLURM_NOT_RUNNING = SLURM_WAITING | SLURM_ENDING | SLURM_OVER.keys()
