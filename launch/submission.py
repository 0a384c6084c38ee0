"""Record each submission before calling sbatch, so that no job that Slurm has accepted is lost.

After Slurm has accepted a job, and before its id is in job.json, the command may be killed, the disk may be full, or
sbatch's answer may be lost. The note in each run directory names the batch script, and Slurm reports which jobs have
that script. The next command that submits the run cancels any job that was not recorded. It may not see such a job yet,
if the earlier command was suspended before it called sbatch. That job finds out when it starts that the run has a
different job (see `is_named`). If a command was killed while it called sbatch, the job lacks the files that it needs to
start.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from launch import scheduler
from launch.batch import RefusedError
from runner.rundir.paths import RunDir
from runner.system import clock, files, processes

# Messages of sbatch when it does not know whether the controller has accepted the job, see slurm_errno.c.
LOST_ANSWER = re.compile(
    r"timed out|zero bytes|unexpected message|(send|receive|shutdown|communication connection) failure|reset by peer",
    re.IGNORECASE,
)


class UncertainError(OSError):
    """Slurm may have accepted a job. The submission's note is kept, and rerunning the command finds out."""


def new_name() -> str:
    """Return a unique name for a submission and its files."""
    return uuid.uuid4().hex


def begin(runs: Sequence[RunDir], name: str) -> None:
    """Note durably that these runs are about to be submitted as one job, or as one array in this order.

    Args:
        runs: the run directories, each with its guard (the right to write to it).
        name: name of the submission, which is part of the batch script's name.

    Raises:
        OSError: a run directory cannot be written; the notes were removed.
        SupersededError: another command has taken over.
    """
    user, written = str(processes.user_id()), clock.wall()
    try:
        for index, run in enumerate(runs):
            task = index if len(runs) > 1 else None
            note = {"task": task, "user": user, "written": written}
            files.write_json(run.submitting(name), note, guard=run.guard)
    except BaseException:
        end(runs, name)
        raise


def end(runs: Sequence[RunDir], name: str) -> None:
    """Remove the notes of a submission whose job is recorded or does not exist.

    Errors are ignored, because the next submission removes leftover notes.
    """
    for run in runs:
        with suppress(OSError):
            files.remove(run.submitting(name))


def is_named(run: RunDir, name: str) -> bool:
    """Return whether a job of submission `name` may train the run.

    It may not if the run has a different submission's job.

    The note is read first, because it is removed after job.json was written. The job that trained last may continue
    even if job.json names a later job, which was submitted because Slurm did not list the earlier one.

    Raises:
        OSError: the run directory cannot be read.
    """
    if files.exists(run.submitting(name)) or files.read_object(run.job).get("submission") in (None, name):
        return True
    return _trained_last(run) == name


def _trained_last(run: RunDir) -> str | None:
    """Return the submission of the job that trained last. Attempts that were started by hand have none."""
    attempts = (*files.read_lines(run.attempts), files.read_object(run.attempt))
    names = [attempt.get("submission") for attempt in attempts if isinstance(attempt, dict)]
    return next((name for name in reversed(names) if name is not None), None)


def settle(runs: Sequence[RunDir]) -> list[str]:
    """Cancel the unrecorded jobs of earlier submissions of these runs, and return their ids.

    Slurm is asked only if there are notes.

    Raises:
        SchedulerError: Slurm does not answer, so an unrecorded job may exist, or Slurm refuses to cancel one.
        OSError: a note cannot be read.
        SupersededError: another command has taken over.
    """
    noted = [(run, name, _note(run, name)) for run in runs for name in run.submitting_names()]
    for run, *_ in noted:
        run.check_guard()  # checked after reading: a command that has taken over may have written the note
    found = []
    try:
        live = {user: _by_name(user) for user in {note["user"] for *_, note in noted if note}}
        for run, name, note in noted:
            job_id = live[note["user"]].get((name, note["task"])) if note else None
            if note is None or job_id is None or files.read_object(run.job).get("submission") == name:
                continue  # the job is recorded; only the note is left
            if note["user"] != str(processes.user_id()):
                raise scheduler.SchedulerError(f"job {job_id} is of user {note['user']}, who has to cancel it")
            found.append(job_id)
        for run, *_ in noted:
            run.check_guard()  # checked again: a command that has taken over may have kept that job
        if found:
            scheduler.ask("scancel", *found)
    except scheduler.SchedulerError as error:
        raise scheduler.SchedulerError(
            "an earlier submission may have left a job that nobody recorded, and Slurm does not tell, or does not "
            f"cancel it ({error}): rerun the command later"
        ) from None
    for run, name, _ in noted:
        end([run], name)
    return found


def cancel(name: str) -> None:
    """Cancel the job of a submission, but no different job with the same id.

    Raises:
        SchedulerError: Slurm does not answer, or refuses.
    """
    live = _by_name(str(processes.user_id()))
    if found := sorted({job_id.partition("_")[0] for (named, _), job_id in live.items() if named == name}):
        scheduler.ask("scancel", *found)


def abandon(runs: Sequence[RunDir], name: str, error: BaseException) -> None:
    """Clean up a submission that failed with `error`. Return only if neither a job nor a note is left.

    Raises:
        UncertainError: a job may be left, or may still be accepted; the notes are kept.
        BaseException: `error` if it is an interruption, which must not wait for Slurm; the notes are kept.
    """
    if not isinstance(error, Exception):
        raise error
    if isinstance(error, RefusedError):
        if error.status < 0 or LOST_ANSWER.search(str(error)):
            raise UncertainError(str(error)) from error
    else:
        try:
            cancel(name)
        except scheduler.SchedulerError as silent:
            raise UncertainError(f"{error}; {silent}") from error
    end(runs, name)


def _note(run: RunDir, name: str) -> dict[str, Any] | None:
    """Return the note of a submission in a run directory, or None if `begin` cannot have written it."""
    note = files.read_object(run.submitting(name))
    task, user = note.get("task"), note.get("user")
    valid = isinstance(user, str) and user.isdecimal() and (task is None or type(task) is int)
    return note if valid else None


def _by_name(user: str) -> dict[tuple[str, int | None], str]:
    """Return the ids of a user's live jobs by submission name and array index."""
    found = {}
    for job_id, script in scheduler.live_scripts(user).items():
        task = job_id.partition("_")[2]
        if name := scheduler.submission_in(script):
            found[name, int(task) if task else None] = job_id
    return found
