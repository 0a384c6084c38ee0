"""Where a run runs: in this process, in several on this machine, or in jobs of a Slurm cluster.

The package knows nothing of training and nothing of Hydra: a launcher is made from the config group
`launcher` by its `_target_`, and what it starts is named by a dotted string. `Launcher` below is what a
launcher must give; another one plugs in by `launcher._target_` alone. An attempt inside a job is handed an
object like `launch.job.SlurmJob`, by which it learns why it was asked to stop and comes back.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

# Names inside a run directory that belong to the launchers.
JOB_FILE = "job.json"
STATUS_FILE = "status.json"
LOGS = "logs"


@dataclass(frozen=True)
class JobInfo:
    """What a scheduler says of a run's job, as long as it remembers the job."""

    job_id: str
    # pending | running | requeued (waiting again, after it ran) | ending (it gives its node back; whether it then
    # waits again is not known yet); over: completed | failed | cancelled
    state: str
    node: str | None = None  # the first node, once it runs
    reason: str | None = None  # why it waits, in the scheduler's words
    restarts: int = 0

    @property
    def live(self) -> bool:
        """Whether it is in the queue or running."""
        return self.state not in ("completed", "failed", "cancelled")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at before anything runs."""

    level: str  # ok | warning | fault
    text: str
    remedy: str | None = None


class Launcher(Protocol):
    """Starts runs. Everything about a run is in its directory; a launcher is handed nothing else.

    A launcher never raises for a mistake of its user: `check` returns it, and `launch` says in one line on
    standard error why nothing was started and returns a status other than 0.
    """

    in_process: bool  # a single run is an attempt in this very process
    dry_run: bool  # say what would be started, start nothing
    wait: bool  # `follow` the runs after `launch` (where they run in this process, `launch` itself stays)
    retry_failed: bool  # start runs again that have failed

    def check(self, run_dirs: list[Path]) -> list[str]:
        """The faults that would keep `run_dirs` from running, a line each; writes and starts nothing."""

    def examine(self, save_s: float | None) -> list[Finding]:
        """What `runner.doctor` should know of where the runs would run.

        Args:
            save_s: how long a checkpoint takes, in seconds, where that is known.
        """

    def preview(self, run_dirs: list[Path]) -> str:
        """What `launch` would start, as text."""

    def launch(self, run_dirs: list[Path], attempt: str) -> int:
        """Start every run, or none of them; the exit status.

        Args:
            run_dirs: existing run directories with their config frozen.
            attempt: `module:function`; the function is called as `function(run_dir, job=job)` and returns
                an exit status. `job` is an object like `launch.job.SlurmJob`, or None where no scheduler is involved.
        """

    def follow(self, run_dirs: list[Path]) -> int:
        """Show the runs that were launched until they have ended; the exit status. Asked for by `wait` alone."""

    def jobs(self, run_dirs: list[Path]) -> dict[Path, JobInfo]:
        """The runs with a job that the scheduler remembers; those that are over may be left out.

        Raises:
            OSError: there is a scheduler and it does not answer, so nobody can tell.
        """


def write_job(run_dir: Path, job: dict[str, Any]) -> None:
    """Replace the run's job file as a whole."""
    temporary = run_dir / f".{JOB_FILE}.{os.getpid()}"
    temporary.write_text(json.dumps(job, indent=2) + "\n")
    temporary.replace(run_dir / JOB_FILE)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`; empty where there is none, or not yet a whole one."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
