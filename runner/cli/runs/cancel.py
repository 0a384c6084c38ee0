"""Stop runs and their jobs, and record that they were withdrawn: `runner cancel RUN...`."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from runner.cli.base.console import PROGRAM, Parser, say, shown, tell
from runner.contracts import JobInfo
from runner.errors import ExitStatus, FileError, LockedError, UserError
from runner.rundir import submitted_jobs, withdrawal
from runner.rundir.find import find_runs, run_dir
from runner.rundir.lease import describe_holder, liveness, read_holder
from runner.rundir.paths import RunDir
from runner.rundir.state import State, look, sweep_of
from runner.rundir.trust import check_trusted, reading
from runner.search.directory import SearchDir, is_search
from runner.system import files, processes


def parser() -> Parser:
    """Return the command's argument parser."""
    made = Parser(
        prog=f"{PROGRAM} cancel",
        description="Ends the job of each run, whether it waits or trains, or the process that trains it on this "
        "machine. A run that trains saves first if there is time. `runner status` shows it as withdrawn; "
        "`runner resume` continues it, and a rerun of its sweep leaves it alone.",
    )
    made.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    made.add_argument(
        "--sweep", action="store_true", help="also all runs that were submitted together with one of them"
    )
    made.add_argument("-n", "--dry-run", action="store_true", help="only print what would be ended")
    return made


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status, which is 1 if a run could not be withdrawn.

    Raises:
        UserError: a RUN is not a run directory, or a scheduler does not respond or refuses.
    """
    options = parser().parse_args(arguments)
    runs = [run for path in options.runs for run in _runs_of(Path(path))]
    if options.sweep:
        runs += [other for run in runs for other in _submitted_with(run)]
    runs = list({run.path: run for run in runs}.values())
    jobs, unanswered = submitted_jobs.jobs(runs)
    if unanswered:
        raise UserError("\n".join(dict.fromkeys(unanswered.values())))
    states = [_state(run, jobs.get(run.path)) for run in runs]
    if options.dry_run:
        for state in states:
            job = f", job {state.job.job_id}" if state.job and state.job.live else ""
            say(f"{shown(state.run.path)}: {state.word}{job}")
        return int(ExitStatus.FINISHED)
    ended = submitted_jobs.cancel(state.run for state in states if state.job is not None and state.job.live)
    return max(_withdraw(state, ended.get(state.run.path)) for state in states)


def _runs_of(path: Path) -> list[RunDir]:
    """Return the run at `path`, or the slots of a search. Stopping a slot stops the run that it trains.

    Raises:
        RunDirError: `path` is neither a run nor a search.
    """
    return SearchDir(path.absolute()).slots() if is_search(path) else [run_dir(path)]


def _state(run: RunDir, job: JobInfo | None) -> State:
    """Return the state of a run, after checking that no other user can write to it.

    The run's records name the job and the process to stop, so they must be trusted.

    Raises:
        RunDirError: other users can write to the run, or a record is malformed.
    """
    with reading(run):
        check_trusted(run)
        return look(run, job)


def _submitted_with(run: RunDir) -> list[RunDir]:
    """List the runs in the same directory that the same command submitted.

    Raises:
        UserError: no command has submitted the run.
    """
    name = sweep_of(run)
    if name is None:
        raise UserError(f"{shown(run.path)} was not submitted to a scheduler, so no sweep is known: name all its runs")
    return [other for other in find_runs(run.path.parent) if sweep_of(other) == name]


def _withdraw(state: State, job: str | None) -> int:
    """Stop a run and its job, record and print this, and return the exit status."""
    run, name = state.run, shown(state.run.path)
    try:
        ended = job or _stopped(run)
        if ended is None and state.word not in withdrawal.STOPPED:
            say(f"{name}: {state.word}, nothing to cancel")
            return int(ExitStatus.FINISHED)
        withdrawal.record(run, state.status)
    except LockedError as error:
        tell(f"error: {name}: {error}")
        return int(ExitStatus.FAILED)
    except OSError as error:
        raise FileError(f"{name}: {error.filename or run.path}: {error.strerror or error}") from error
    done = f"withdrawn: cancelled {ended}" if ended else f"withdrawn, after it was {state.word}"
    how = f"{PROGRAM} resume {name}" if files.exists(run.config) else "rerun the command of the search"
    say(f"{name}: {done}; to continue it: {how}")
    return int(ExitStatus.FINISHED)


def _stopped(run: RunDir) -> str | None:
    """Ask the process that trains a run to save and exit. Return a description of it, or None if there is no process.

    Raises:
        LockedError: the process is on a different machine, belongs to a different user, or its state is not known.
        OSError: a record cannot be read.
    """
    _, holder = read_holder(run.lease) or (0, {})
    alive = liveness(holder, processes.this_process()) if "pid" in holder else "gone"
    if alive == "gone":
        return None
    process = describe_holder(holder)
    if alive != "alive":
        raise LockedError(f"{process} may train it, which cannot be told here: rerun the command on that machine")
    try:
        processes.send_signal(int(holder["pid"]), signal.SIGTERM)
    except PermissionError:
        raise LockedError(f"{process} trains it, which is another user's") from None
    except ProcessLookupError:
        return None
    return process
