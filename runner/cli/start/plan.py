"""Plan how to handle each run of a command, based on its state. Nothing is written."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from runner.cli.base.console import PROGRAM, counted, shown
from runner.cli.start.edits import Changes
from runner.config.composition import Composed
from runner.config.finished import has_finished
from runner.config.frozen import load_plain, trained
from runner.contracts import JobInfo, Launcher
from runner.errors import LockedError, RunDirError, UserError, refuse
from runner.rundir import submitted_jobs
from runner.rundir.attempt_log import Finish, incomplete_records
from runner.rundir.paths import RunDir
from runner.rundir.provenance import check_config
from runner.rundir.state import State, entry, look
from runner.rundir.trunk import find, missing, remedy
from runner.rundir.trust import RECORDS, check_trusted, reading
from runner.system import clock, files
from runner.system.signals import STOP

# How long to wait for jobs that are releasing their nodes, e.g. while they save, are killed, or the node cleans up.
ENDING_WAIT_S, ENDING_POLL_S = 180.0, 1.0
MAX_REASON = 1000  # in characters; the messages of this package are all shorter


@dataclass(frozen=True)
class PlannedRun:
    """A run of a command, and how to handle it."""

    job: Composed
    state: str  # one of: new, unfinished, finished, edited, live, failed, withdrawn, unusable
    summary: str  # shown to the user
    notes: list[str] = field(default_factory=list)
    """Changes that this command makes, or cannot make while the run is live, one line each."""
    refused: bool = False
    """Whether the run does not do what the command asks for."""

    @property
    def starts(self) -> bool:
        return self.state in ("new", "unfinished")


def plan_runs(jobs: Sequence[Composed], launcher: Launcher, single: bool) -> list[PlannedRun]:
    """Plan how to handle each job.

    Args:
        jobs: the runs of the command.
        launcher: the launcher for all runs.
        single: whether there is one run on this machine. If it is already live, that is an error.

    Raises:
        LockedError: the single run is live.
        RunDirError: the only run is unusable. If there are several runs, such a run is planned as `unusable` and does
            not affect the others.
        UserError: a config does not fit its run directory, or a scheduler that may have a job for a run does not
            respond.
    """
    # Schedulers are not asked about finished runs, because a job may take long to end, or its scheduler may be down.
    unfinished: list[RunDir] = []
    finished: dict[Path, State] = {}
    broken: dict[Path, RunDirError] = {}
    retry_failed = launcher.retry_failed or len(jobs) == 1
    for job in jobs:
        run = RunDir(job.run_dir)
        try:
            with reading(run):
                files.read_object(run.job)  # check it here, because launchers read it for all runs at once
                first = look(run)
                if _is_finished(first, job):
                    finished[run.path] = first
                else:
                    unfinished.append(run)
        except RunDirError as error:
            broken[job.run_dir] = error
    queued = _queued(unfinished, launcher)
    planned, errors = [], []
    for job in counted(jobs, "looking at runs"):
        try:
            if job.run_dir in broken:
                raise broken[job.run_dir]
            with reading(RunDir(job.run_dir)):
                state = finished.get(job.run_dir)
                planned.append(plan_run(job, queued.get(job.run_dir), retry_failed, state=state))
        except RunDirError as error:
            if len(jobs) == 1:
                raise
            planned.append(PlannedRun(job, "unusable", str(error)))
        except UserError as error:
            errors.append(str(error))
    refuse(dict.fromkeys(errors))
    if single and planned[0].state == "live":
        lines = [f"{jobs[0].run_dir} is in use: {planned[0].summary}; wait for it, or stop it first"]
        raise LockedError("\n".join([*lines, *planned[0].notes]))
    return planned


def plan_run(
    job: Composed, queued: JobInfo | None, retry_failed: bool, held: bool = False, state: State | None = None
) -> PlannedRun:
    """Plan how to handle one run.

    Args:
        job: the run.
        queued: the live job of the run, if any.
        retry_failed: whether to restart a run that has failed.
        held: whether this command holds the lease of the run.
        state: the state of a run that was found finished. If None, the state is read now.

    Raises:
        RunDirError: the run would start but its directory is not trusted, or it should be resumed but no longer exists.
        UserError: the config does not fit the run directory.
        OSError: the run directory cannot be read.
    """
    run = RunDir(job.run_dir)
    state, exists = state or look(run, queued), files.exists(run.config)
    finished = _is_finished(state, job)  # if finished, its job and process no longer matter
    if queued is not None and not finished:
        return _live(job, f"{queued.state}, job {queued.job_id}", f"cancel job {queued.job_id}")
    if not held and not finished and state.holder:
        return _live(job, f"running, {state.holder}", "stop it")
    if not exists:
        if job.resumed:  # moved or removed in the meantime; a resume must not create a new run
            raise RunDirError(f"{shown(run.path)} was moved or removed meanwhile")
        _check_place(run, is_branch=job.config.fork.run is not None)
        check_trusted(run)
        return _new(job)
    check_config(run)
    changes = Changes.of(job)
    if (edited := changes.edited()) is not None:
        return PlannedRun(job, "edited", edited[0], refused=not edited[1])
    changes.check()
    notes = changes.notes(run.newest_step())
    if finished:
        lack = incomplete_records(run, state.finish.steps)
        return PlannedRun(job, "finished", _finished(state.finish, job) + (f", but {lack}" if lack else ""), notes)
    recorded = state.status.get("state")
    if recorded in ("failed", "crash loop") and not retry_failed:
        reason = _one_line(state.status.get("reason") or state.status.get("cause") or "see its logs")
        return PlannedRun(job, "failed", f"{recorded} ({reason}); launcher.retry_failed=true restarts it", notes)
    if state.word == "withdrawn" and not retry_failed:
        how = f"`{PROGRAM} resume {shown(run.path)}` continues it, and launcher.retry_failed=true all such runs"
        return PlannedRun(job, "withdrawn", f"withdrawn by cancel: {how}", notes)
    check_trusted(run)
    if not run.newest_step():
        _trunk_of(job)
    return PlannedRun(job, "unfinished", _resuming(state, job), notes)


def _finished(finish: Finish, job: Composed) -> str:
    """Describe the step at which a run finished. If it ended before its last step, describe how to continue it."""
    early = finish.early
    if early is None or finish.covers(job.config.known_steps, job.config.train.epochs):
        return f"finished, all {finish.steps} steps"
    to_continue = "another early_stopping.patience, for example, or early_stopping=none continues"
    if (name := early.get("callback")) is not None:
        to_continue = f"callbacks.{name}=null, or other options of it, continues"
    return f"finished at step {finish.steps}, before its last step: {_one_line(early.get('reason'))}; {to_continue}"


def _live(job: Composed, summary: str, ending: str) -> PlannedRun:
    """Plan nothing for a run that trains or is queued. Its settings stay as they are.

    `ending` describes how to stop it.
    """
    if not files.exists(RunDir(job.run_dir).config):  # another command is about to freeze its config
        return PlannedRun(job, "live", summary)
    notes = Changes.of(job).not_taken_over(ending)
    return PlannedRun(job, "live", summary, notes, refused=bool(notes))


def _resuming(state: State, job: Composed) -> str:
    """Explain in one line why an unfinished run is resumed."""
    run, status, ended = state.run, state.status, state.attempts
    first, total = job.config.fork.step or 0, job.config.known_steps  # a branch starts with a checkpoint
    step, last = max(run.newest_step(), first), entry(state.newest, "step", int) or 0
    doing = f"resuming at step {step}" + (f" of {total}" if total else "")
    if step == first:
        doing = f"starting at step {step}"
    if not status and not ended:
        return f"{doing}: it was never started" if not files.exists(run.job) else f"{doing}: it left the queue"
    if total and step >= total:
        return f"it is at step {step}, beyond the {total} steps of this command, and ends there"
    if state.finish.early is not None and state.finish.steps == last:
        return f"{doing}: it had ended early, and its settings no longer do that"
    if state.finish.steps == last > 0:
        return f"{doing}: it had finished at step {last}, and is longer now"
    reached = max(last, step)
    again = f", {reached - step} of its steps were not saved" if reached > step else ""
    known = ended and ended[-1].get("attempt") == status.get("attempt", ended[-1].get("attempt"))
    cause = ended[-1]["cause"] if known else "killed"
    number = len(ended) if known else len(ended) + 1
    reason = _one_line(status.get("reason") or "") if known and cause in ("failed", "crash", "hang") else ""
    return f"{doing}: attempt {number} ended at step {reached} ({cause}{f': {reason}' if reason else ''}){again}"


def _one_line(reason: object) -> str:
    """Shorten an error message to one line, because the exception of a user's class may print all its data."""
    return textwrap.shorten(str(reason), MAX_REASON, placeholder=" …")


def _new(job: Composed) -> PlannedRun:
    """Plan a run that does not exist yet.

    Raises:
        UserError: the run is a branch, and its trunk does not have the checkpoint, or is not trusted.
    """
    trunk = _trunk_of(job)
    if trunk is None:
        return PlannedRun(job, "new", "new: there is no run with these settings yet")
    change = "" if job.config.fork.was else "; no setting differs, so it repeats its trunk: add key=value to change one"
    return PlannedRun(job, "new", f"new, a branch of {shown(trunk.path)} at step {job.config.fork.step}{change}")


def _trunk_of(job: Composed) -> RunDir | None:
    """Return the trunk with the checkpoint that a branch starts from, or None if the run is not a branch.

    Raises:
        UserError: the trunk does not have the checkpoint, or is not trusted.
    """
    fork = job.config.fork
    if fork.run is None or fork.step is None:
        return None
    trunk = find(fork.run, job.run_dir)
    check_trusted(trunk)
    with reading(trunk):
        if fork.step not in trunk.checkpoint_steps():
            of = trained(load_plain(trunk.path))
            what = remedy(trunk, fork.step, of.known_steps, of.checkpoint.every_steps)
            raise UserError(f"{missing(trunk, fork.step)}; {what}")
    return trunk


def _is_finished(state: State, job: Composed) -> bool:
    """Return whether a run has a config and is finished under the config of `job`.

    Raises:
        OSError: the run directory cannot be read.
    """
    return has_finished(state.run, job.config, state.finish) and files.exists(state.run.config)


def unusable(path: Path, verb: str, error: OSError) -> str:
    """Return an error line for a run directory that cannot be read or written. `verb` is `read` or `written`."""
    reason = error.strerror or error
    return f"the run directory {path} cannot be {verb} ({reason}): fix that, or choose another with run.root or run.dir"


def _queued(runs: Sequence[RunDir], launcher: Launcher) -> dict[Path, JobInfo]:
    """Return the live job of each run that has one, after waiting for jobs that are ending.

    A job that is releasing its node may end for good or be requeued.

    Raises:
        UserError: a scheduler does not respond.
    """
    deadline, reported = clock.monotonic() + ENDING_WAIT_S, False
    while True:
        queued = _live_jobs(runs, launcher)
        ending = [info.job_id for info in queued.values() if info.state == "ending"]
        if not ending or STOP or clock.monotonic() > deadline:
            return queued
        if not reported:
            which = f"job {ending[0]} is" if len(ending) == 1 else f"{len(ending)} jobs are"
            print(f"{which} ending: waiting up to {ENDING_WAIT_S:.0f} s", file=sys.stderr, flush=True)
            reported = True
        clock.sleep(ENDING_POLL_S)


def _live_jobs(runs: Sequence[RunDir], launcher: Launcher) -> dict[Path, JobInfo]:
    """Return the jobs of the runs, from the schedulers of this launcher and of those that submitted the runs."""
    mine = f"{type(launcher).__module__}.{type(launcher).__qualname__}"
    try:
        queued = launcher.jobs([run.path for run in runs]) if runs else {}
        elsewhere = [run for run in runs if submitted_jobs.launcher_of(run) not in (None, mine)]
    except OSError as error:
        raise UserError(f"cannot tell which runs are queued already ({error}): nothing was started") from None
    others, unanswered = submitted_jobs.jobs(elsewhere)
    if unanswered:
        raise UserError(
            f"cannot tell which runs are queued already ({'; '.join(dict.fromkeys(unanswered.values()))}): rerun the "
            "command where the scheduler answers, or remove job.json from the runs whose jobs are gone"
        )
    return {path: info for path, info in {**others, **queued}.items() if info.live}


def _check_place(run: RunDir, is_branch: bool) -> None:
    """Raise an error if a new run would hide other runs in its directory, or replace records there.

    Some files are allowed, because a command that was killed before it froze the config may have left them. These are
    the leases, `code.json`, and for a branch the records of its trunk.

    Raises:
        UserError: the directory contains a run or a record.
    """
    names = sorted(files.list_dir(run.path)) if files.is_dir(run.path) else []
    inside = [
        name for name in names if files.exists((child := RunDir(run.path / name)).config) and files.exists(child.code)
    ]
    if inside:
        raise UserError(
            f"{run.path} holds runs ({inside[0]}): set run.root={shown(run.path)} to create another run in it, "
            "or choose another run.dir"
        )
    begun = [run.lease, run.submission]
    if run.submission.name in names:
        begun += [run.code, *([run.metrics, run.timings, run.checkpoints] if is_branch else [])]
    if records := [name for name in names if name in RECORDS and run.path / name not in begun]:
        raise UserError(
            f"{run.path} has {', '.join(records)} but no {run.config.name}, so a new run would replace what is not "
            "known to be its own: choose another run.dir, or restore the config of that run"
        )
