"""Define the interfaces that `runner` and `launch` share: the launcher, the job, and Slurm's job states.

`runner` never imports `launch`. The setting `launcher._target_` connects them. From `runner`, `launch` imports only
this module, `runner.errors`, `runner.rundir.paths` and `runner.system`. This module imports only the standard library.
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
    """The scheduler's report on a run's job. Schedulers forget jobs some time after they end.

    Example:
        >>> from runner.contracts import JobInfo
        >>> job = JobInfo("4711_3", "pending", reason="Priority", waited_s=120.0)
        >>> job.live
        True
        >>> JobInfo("4711_2", "failed", node="gpu-07", reason="OutOfMemory").live
        False
    """

    job_id: str
    # A live job is pending, running, suspended, requeued (waiting again after it ran) or ending (releasing its node,
    # and possibly about to be requeued). A job that is over is completed, failed or cancelled.
    state: str
    node: str | None = None  # the first node, if the job is running
    reason: str | None = None  # why the job waits, or why it failed before an attempt could start
    restarts: int = 0
    waited_s: float | None = None  # seconds that a pending job has waited
    starts: float | None = None  # expected start time from the scheduler, in seconds since 1970

    @property
    def live(self) -> bool:
        """Return whether the job is not over, e.g. pending or running."""
        return self.state not in ("completed", "failed", "cancelled")


@dataclass(frozen=True)
class Finding:
    """The result of one check before a run starts, as printed by `runner doctor`.

    Example:
        >>> import shutil
        >>> from runner.contracts import Finding
        >>> free_gb = shutil.disk_usage(".").free / 1e9
        >>> if free_gb < 100:
        ...     finding = Finding("warning", f"{free_gb:.0f} GB are free", remedy="lower checkpoint.keep_last")
        ... else:
        ...     finding = Finding("ok", f"{free_gb:.0f} GB are free")
    """

    level: str  # ok, warning or error
    text: str
    remedy: str | None = None


@dataclass(frozen=True)
class RankCounts:
    """The possible numbers of ranks of an attempt."""

    counts: range = range(1, 2)
    option: str = ""  # the setting that allows these numbers, as the user typed it, e.g. launcher.ranks=1-4
    per_node: int | None = None  # ranks per node, if the launcher may use several nodes

    @property
    def vary(self) -> bool:
        """Return whether attempts of the same run may have different numbers of ranks."""
        return len(self.counts) > 1


@runtime_checkable
class Launcher(Protocol):
    """Start runs on this machine or a cluster.

    The launcher gets a run directory, which contains everything about the run, and no other information about it.

    A launcher never raises for a user error. `check` returns such errors. `launch` prints one line to standard error
    with the run that was not started and the reason, and returns a nonzero status.

    Example:
        To use your own launcher, put it into my_launcher.py in the current directory and run `runner experiment=smoke
        launcher._target_=my_launcher.NiceLauncher`.

        >>> from launch.local import TRAINING, LocalLauncher
        >>> class NiceLauncher(LocalLauncher):
        ...     in_process = False  # `launch` starts single runs too
        ...     def command_for(self, attempt: str = TRAINING) -> list[str]:
        ...         return ["nice", "-n", "10", *super().command_for(attempt)]
    """

    @property
    def in_process(self) -> bool:
        """Return whether the runs are trained on this machine.

        If so, the command itself trains a single run with one rank. In all other cases it calls `launch` and waits.
        """

    def rank_counts(self) -> RankCounts:
        """Return the numbers of ranks with which the launcher may start each run.

        The command checks that the config allows all of them.

        Raises:
            UserError: the number of ranks cannot be determined from the options.
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
        """Return the config errors that prevent `run_dirs` from running, one per line. Write and start nothing.

        The command passes only runs that it is about to start, so `check` may query a scheduler.
        """

    def examine(self, save_s: float | None) -> list[Finding]:
        """Check the machine or cluster where the runs would train, for `runner doctor`.

        Args:
            save_s: the seconds that a checkpoint takes to save, if known.
        """

    def preview(self, run_dirs: list[Path]) -> str:
        """Describe what `launch` would start."""

    def launch(self, run_dirs: list[Path], attempt: str, guards: Sequence[files.Guard] = ()) -> int:
        """Start the runs and return an exit status.

        If an error occurs, runs that were already started keep running and are recorded in their run directories.

        Args:
            run_dirs: existing directories, at least one, with everything that `attempt` needs. Usually run directories.
            attempt: the function to call, as `module:function`. In a scheduler's job it is called as `function(run_dir,
                job=job)` with a `Job`, and returns an exit status.
            guards: the exclusive right to submit each run and to write its job.json during the call. If empty, no other
                process submits these runs.

        Raises:
            SupersededError: another command has taken over a run.
        """

    def follow(self, run_dirs: list[Path]) -> int:
        """Show the launched runs until all have ended, and return an exit status. Called only if `wait` is true."""

    def cancel(self, run_dirs: list[Path]) -> dict[Path, str]:
        """Cancel the live jobs of these runs permanently. Return what was cancelled for each run, e.g. `job 12_3`.

        Runs without a live job are omitted from the result.

        Raises:
            OSError: the scheduler does not respond or refuses.
        """

    def jobs(self, run_dirs: list[Path]) -> dict[Path, JobInfo]:
        """Return the jobs that the scheduler knows, by run directory. Jobs that are over may be missing.

        Raises:
            OSError: the scheduler does not respond, so the state of the jobs is unknown.
        """


class Job(Protocol):
    """The job that an attempt runs in: its identity, why it was asked to stop, and how to requeue it.

    The runner passes it to the `module:function` that was passed to `Launcher.launch`.

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
    """Whether the attempt is restarted automatically. If so, crash loops have to be stopped."""

    max_timeouts: int | None
    """The number of time limits in a row without a new checkpoint that stop the run. If None, each is a failure."""

    early_signal: int | None
    """A signal that arrived before the attempt had installed its handlers."""

    def identity(self) -> dict[str, Any]:
        """Return `job_id`, `restart_count`, `host` and `node`, or `nodes` if there are several.

        A scheduler's job adds `launcher` (`module.Class`), `job_name` and `submission`. The submission distinguishes
        jobs with the same id.
        """

    def began(self) -> float:
        """Return when this start of the job got its nodes, or else when this process began, by `clock.monotonic`."""

    def waited(self) -> dict[str, float]:
        """Return the seconds that the job was held (`hold_s`) and queued (`queue_s`) before this start.

        The scheduler's clock measures them. Return an empty dictionary if they are not known.
        """

    def cause(self, signum: int) -> str:
        """Return why `signum` was sent: preempted, time limit, cancelled, requeued, node failure or interrupted."""

    def cause_of_loss(self, record: dict[str, Any]) -> str:
        """Return why an earlier attempt probably ended, if it did not record the cause.

        Args:
            record: the entry of that attempt in attempt.json.
        """

    def on_started(self) -> None:
        """React to the start of the attempt, after it has been recorded in the attempt log."""

    def yield_verdict(self, reason: str | None = None) -> bool:
        """Let another rank decide how the job ends. Return whether the job is restarted afterwards.

        Args:
            reason: why the attempt could not start. If None, this rank only reacts to another rank's failure.
        """

    def record_verdict(self) -> None:
        """Record that this rank decides how the job ends, unless it called `yield_verdict`. May be called again."""

    def requeue_if_needed(self, cause: str) -> str:
        """Requeue the job if `cause` requires it. Called on rank 0 only, after the last save.

        Returns:
            The final cause. It may differ from `cause`, because a job can be cancelled while it saves.
        """


def is_same_job(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two records, of lease holders or of attempts, belong to the same job.

    Slurm reuses job ids, so the submissions are compared too.
    """
    return all(one.get(key) == other.get(key) for key in ("job_id", "submission"))


# Job states as in squeue(1), JOB STATE CODES. A running job may be RUNNING, SUSPENDED, SIGNALING (until every node has
# acknowledged a signal), STOPPED, RESIZING, or in a state that a later version adds. Therefore the states of jobs that
# do not run are listed, and every other state is treated as running.
SLURM_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
SLURM_SUSPENDED = frozenset({"SUSPENDED", "STOPPED"})  # these jobs hold their nodes but do not train
SLURM_ENDING = frozenset({"COMPLETING", "STAGE_OUT"})
# The job is over. Slurm remembers it for some minutes (MinJobAge). The values are states of `JobInfo`.
SLURM_OVER = {
    "COMPLETED": "completed",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "PREEMPTED": "cancelled",
    **dict.fromkeys(("FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE"), "failed"),
}
SLURM_NOT_RUNNING = SLURM_WAITING | SLURM_ENDING | SLURM_OVER.keys()
