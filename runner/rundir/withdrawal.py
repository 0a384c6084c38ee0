"""Record that `runner cancel` has withdrawn a run. Imports no torch.

The record applies to one job, or to one attempt on a machine without a scheduler. It is never removed, but a later job
or attempt makes it invalid.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from runner.rundir.paths import RunDir
from runner.system import clock, files, processes

STOPPED = ("cancelled", "interrupted", "killed", "paused")
"""States of a run that ended early. `withdrawn` is shown in their place."""


def record(run: RunDir, status: Mapping[str, Any]) -> None:
    """Record that a run's job, or its current attempt, is withdrawn.

    Args:
        run: the run. The caller does not need its lease.
        status: status of the run, from `attempt_log.status_of`.

    Raises:
        OSError: the file system refused.
    """
    of = {"submission": files.read_object(run.job).get("submission"), "attempt": status.get("attempt")}
    files.write_json(run.withdrawn, {**of, "time": clock.wall(), "user": processes.user_id()})


def is_withdrawn(run: RunDir, status: Mapping[str, Any]) -> bool:
    """Check whether the last job or attempt of a run was withdrawn.

    Raises:
        OSError: a record cannot be read.
    """
    found = files.read_object(run.withdrawn)
    if not found or found.get("submission") != files.read_object(run.job).get("submission"):
        return False
    submission, attempt = found.get("submission"), found.get("attempt")
    started_since = status.get("attempt") != attempt
    return not started_since or (submission is not None and status.get("submission") == submission)
