"""What `runner` and `launch` both rely on: the shapes of a launcher and of a job, and Slurm's job states.

`runner` never imports `launch`: a config's `launcher._target_` joins them. `launch` imports of `runner` this module,
`runner.errors`, `runner.rundir.paths` and `runner.system`, and nothing else. Only the standard library is
imported here.
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
    """What a scheduler reports about a run's job, as long as it remembers the job."""

    job_id: str
    # pending | running | suspended | requeued (waiting again after it ran) | ending (releasing its node; whether it
    # will wait again is not known yet); over: completed | failed | cancelled
    state: str
    node: str | None = None  # the first node, once the job runs
    reason: str | None = None  # why the job waits, or why it failed before an attempt could begin
    restarts: int = 0
    waited_s: float | None = None  # how long a waiting job has waited
    starts: float | None = None  # when the scheduler expects it to start, seconds since 1970

    @property
    def live(self) -> bool:
        """Whether the job is queued or running."""
        return self.state not in ("completed", "failed", "cancelled")


@dataclass(frozen=True)
class Finding:
    """One result of a check that is made before anything runs."""

    level: str  # ok | warning | error
    text: str
    remedy: str | None = None


@dataclass(frozen=True)
class RankCounts:
    """The numbers of ranks that an attempt at a run may have."""

    counts: range = range(1, 2)
    option: str = ""  # what allows several, as it was given: launcher.ranks=1-4
    per_node: int | None = None  # ranks on each node, where there are several nodes or may be

    @property
    def vary(self) -> bool:
        """Whether one attempt may have another number of ranks than the one before."""
        return len(self.counts) > 1


@runtime_checkable
class Launcher(Protocol):
    """Starts runs. Everything about a run is in its directory; a launcher is passed nothing else.

    A launcher never raises for a user's mistake: `check` returns it, and `launch` prints one line to standard error
    that names what was not started and why, and returns a nonzero status.
    """

    @property
    def in_process(self) -> bool:
        """Whether runs run on this machine: the command then makes the attempt at a single run of one rank itself.

        `launch` starts all others and waits for them.
        """

    def rank_counts(self) -> RankCounts:
        """How many ranks it may start for each run; the command checks that the config allows for all of them.

        Raises:
            UserError: the options do not tell.
        """

    @property
    def dry_run(self) -> bool:
        """The command prints `preview` and does not call `launch`."""

    @property
    def wait(self) -> bool:
        """The command calls `follow` after a successful `launch`."""

    @property
    def retry_failed(self) -> bool:
        """The command restarts runs that have failed."""

    def check(self, run_dirs: list[Path]) -> list[str]:
        """The config errors that would keep `run_dirs` from running, one per line; writes and starts nothing.

        Called only with runs that are to be started: a scheduler may be asked.
        """

    def examine(self, save_s: float | None) -> list[Finding]:
        """What `runner doctor` reports about the place where the runs would run.

        Args:
            save_s: how long a checkpoint takes, in seconds, if known.
        """

    def preview(self, run_dirs: list[Path]) -> str:
        """What `launch` would start, as text."""

    def launch(self, run_dirs: list[Path], attempt: str, guards: Sequence[files.Guard] = ()) -> int:
        """Start the runs; the exit status.

        What was started before an error stays started, and is recorded in the run directories.

        Args:
            run_dirs: existing directories that hold all that `attempt` needs, such as runs; one or more.
            attempt: `module:function`; inside a scheduler's job the function is called as `function(run_dir, job=job)`
                with a `Job`, and returns an exit status.
            guards: the right to submit each run and to write its job.json, as long as the call lasts; empty: nobody
                else submits them.

        Raises:
            SupersededError: another command has taken over.
        """

    def follow(self, run_dirs: list[Path]) -> int:
        """Show the launched runs until all have ended; the exit status. Called only if `wait` is set."""

    def cancel(self, run_dirs: list[Path]) -> dict[Path, str]:
        """End the live jobs of these runs for good. Return what was ended of each that had one, such as `job 12_3`.

        Raises:
            OSError: the scheduler does not answer, or refuses.
        """

    def jobs(self, run_dirs: list[Path]) -> dict[Path, JobInfo]:
        """The runs with a job that the scheduler remembers; jobs that are over may be left out.

        Raises:
            OSError: there is a scheduler and it does not answer, so the state is unknown.
        """


class Job(Protocol):
    """The job that one attempt runs in: who it is, why it was asked to stop, how it is requeued."""

    auto_restarts: bool
    """Whether the attempt is restarted without anybody asking, so that crash loops must be stopped."""

    max_timeouts: int | None
    """Time limits in a row without a new checkpoint after which the run stops; None: they count as failures."""

    early_signal: int | None
    """A signal that came before the attempt's handlers were installed."""

    def identity(self) -> dict[str, Any]:
        """job_id, restart_count, host and node; more than one node as `nodes`.

        A scheduler's job adds its `launcher` (`module.Class`) and its `job_name`, and `submission`, which tells it
        from a later job with the same id.
        """

    def began(self) -> float:
        """When this start of the job began to hold its nodes, on `clock.monotonic`, or when this process began."""

    def waited(self) -> dict[str, float]:
        """Seconds before this start by the scheduler's clock: `hold_s` held back, `queue_s` queued; or nothing."""

    def cause(self, signum: int) -> str:
        """Why `signum` came: preempted, time limit, cancelled, requeued, node failure or interrupted."""

    def cause_of_loss(self, record: dict[str, Any]) -> str:
        """The likely cause of the end of an earlier attempt that left no record of it.

        Args:
            record: that attempt's entry in attempt.json.
        """

    def on_started(self) -> None:
        """The attempt is in the attempt log."""

    def yield_verdict(self, reason: str | None = None) -> bool:
        """Called when this rank must not decide how the job ends; whether the job is then restarted.

        Args:
            reason: why the attempt could not begin; None: this rank only reacts to another rank's failure.
        """

    def record_verdict(self) -> None:
        """Record that this rank decides how the job ends, unless it yielded that; may be called again."""

    def requeue_if_needed(self, cause: str) -> str:
        """After the save, on rank 0 alone: requeue the job if `cause` requires it.

        Returns the final cause (a job may be cancelled while it saves).
        """


def is_same_job(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two records, of holders or of attempts, are of one job. Slurm reuses ids: its submission counts, too."""
    return all(one.get(key) == other.get(key) for key in ("job_id", "submission"))


# Job states as in squeue(1), JOB STATE CODES. A job has one state at a time, and a running one many besides RUNNING:
# SUSPENDED, SIGNALING until every node has acknowledged a signal, STOPPED, RESIZING, and those of later versions. So
# the states of jobs that do not run are listed, and every other state runs.
SLURM_WAITING = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"})
SLURM_SUSPENDED = frozenset({"SUSPENDED", "STOPPED"})  # run, but make no steps
SLURM_ENDING = frozenset({"COMPLETING", "STAGE_OUT"})
# The job is over; Slurm remembers it for some minutes (MinJobAge). The value is ours, see `JobInfo.state`.
SLURM_OVER = {
    "COMPLETED": "completed",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "PREEMPTED": "cancelled",
    **dict.fromkeys(("FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE"), "failed"),
}
SLURM_NOT_RUNNING = SLURM_WAITING | SLURM_ENDING | SLURM_OVER.keys()
