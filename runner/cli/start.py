"""From a command to runs that are under way: which runs it means, freezing their configs, launching them.

Nothing is written before every job of the command has been composed, checked and compared with what is in its run
directory.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from runner.checkpoint.pins import confirm, is_missed, reserve
from runner.cli.arguments import dirs, parse
from runner.cli.console import counted, say, shown
from runner.cli.edits import Changes
from runner.cli.housekeeping import hidden
from runner.cli.launcher import common_launcher, idle_ranks
from runner.cli.plan import PlannedRun, plan_run, plan_runs, unusable
from runner.config.composition import Composed, Composer
from runner.contracts import Launcher
from runner.errors import ExitStatus, FileError, RunDirError, SupersededError, UserError
from runner.rundir import provenance
from runner.rundir.attempt_log import is_finished, last_step
from runner.rundir.lease import Heart, Lease, read_holder
from runner.rundir.paths import RunDir
from runner.rundir.sources import Sources
from runner.rundir.trunk import find
from runner.system import clock, files, processes
from runner.system.signals import STOP
from runner.system.terminal import printable
from runner.training.effects import same_results, without_effect
from runner.training.job import LocalJob

ATTEMPT = "runner.training.attempt:attempt"
# How long the other ranks wait for rank 0 to freeze the config of this launch.
RANK_TIMEOUT_S, RANK_POLL_S = 120.0, 0.05
# How long a command waits for another one that submits the same runs.
SUBMISSION_WAIT_S = 120.0
# What was refused, as long as it is not known whether somebody uses it: see `_set_aside`.
_REFUSED = re.compile(rf"\.(?P<name>.+)\.refused-{processes.TAG}")


def start(arguments: Sequence[str]) -> int:
    """Start, resume or skip the runs that the overrides describe; the exit status."""
    options = parse(arguments)
    composer = Composer(dirs(options), options.config_name)
    if options.multirun:
        jobs = composer.jobs(options.overrides, lambda each: counted(each, "composing jobs"))
    else:
        jobs = [composer.compose(options.overrides)]
        if swept := composer.swept(options.overrides):
            _report(f"warning: {', '.join(swept)} in a config file: a sweep needs -m, so one run is started without it")
    return start_runs(jobs, options.dry_run)


def start_runs(jobs: Sequence[Composed], dry_run: bool = False) -> int:
    """Start, resume or skip `jobs`, as the state of each run requires; the exit status.

    Args:
        jobs: the runs of the command.
        dry_run: only print what would be done about each.

    Raises:
        UserError: something keeps one of them from starting; then none was started and nothing was written.
    """
    launcher = common_launcher(jobs)
    dry_run = dry_run or launcher.dry_run
    if int(processes.environment.get("WORLD_SIZE", "1")) > 1 and not launcher.in_process:
        raise UserError("torchrun requires launcher=local")
    if int(processes.environment.get("RANK", "0")) > 0:
        _refuse(launcher.check([job.run_dir for job in jobs]))
        return _follow_rank_0(jobs[0])
    single = len(jobs) == 1 and launcher.in_process
    if not dry_run:
        put_back([job.run_dir for job in jobs])
    planned = plan_runs(jobs, launcher, single)
    waiting = _waiting(planned, launcher)
    # After the look at the runs: what is finished or queued already needs neither a scheduler nor this machine.
    starting = [run.job.run_dir for run in planned if run.starts]
    _refuse(launcher.check(starting) if starting else [])
    _warn_of_idle_ranks(planned, launcher)
    _warn_without_effect([run.job for run in planned if run.starts])
    if single and planned[0].starts and not dry_run and list(launcher.rank_counts().counts) == [1]:
        return run_here(planned[0])
    if dry_run or not starting:
        _show(planned)
        _show_code_changes([run.job for run in planned if run.starts])
        for each, together in _grouped(planned, launcher, waiting):
            print(each.preview(together))
        return _status(planned)
    return _start_all(planned, launcher, single)


def put_back(run_dirs: Iterable[Path]) -> None:
    """Give runs their names back that a command was killed in refusing: nobody knows whether they are used."""
    wanted = set(run_dirs)
    for parent in sorted({run_dir.parent for run_dir in wanted}):
        with suppress(OSError):  # there is none yet, or the look at the runs tells what is wrong
            for name in sorted(files.list_dir(parent)):
                found = _REFUSED.fullmatch(name)
                if found and parent / found["name"] in wanted:
                    _rename_back(parent / name, parent / found["name"])


def _rename_back(aside: Path, run_dir: Path) -> None:
    """Give a run its name back; where that was taken meanwhile, a warning names it."""
    try:
        files.rename(aside, run_dir)
    except FileNotFoundError:  # another command was faster
        pass
    except OSError as error:
        why = error.strerror or error
        _report(f"warning: {shown(aside)} cannot be given its name {shown(run_dir)} back ({why}): rename it")


def _warn_of_idle_ranks(planned: Sequence[PlannedRun], launcher: Launcher) -> None:
    counts = launcher.rank_counts()
    warnings = [warning for run in planned if run.starts for warning in idle_ranks(counts, run.job.config)]
    for warning in dict.fromkeys(warnings):
        _report(f"warning: {warning.text}: {warning.remedy}")


def _warn_without_effect(jobs: Sequence[Composed]) -> None:
    """Name the settings that change nothing, and jobs that will give the same results as another one."""
    lines = [line for job in jobs for line in without_effect(job.config)]
    named = [(" ".join(job.overrides) or job.run_dir.name, job.config, job.plain) for job in jobs]
    for line in dict.fromkeys([*lines, *same_results(named)]):
        _report(f"warning: {line}")


def _waiting(planned: Sequence[PlannedRun], launcher: Launcher) -> dict[Path, Launcher]:
    """For each trunk that branches have to wait for, the launcher that does so.

    Raises:
        UserError: the launcher cannot, or the trunk is not on its way.
    """
    found = {}
    for run in planned:
        if run.after is None or run.after in found:
            continue
        try:
            made = launcher.after(run.after)
        except OSError as error:
            raise UserError(f"cannot tell whether {run.after} is queued ({error}): nothing was started") from None
        if made is None:
            raise UserError(
                f"{shown(run.after)} has not saved step {run.job.config.fork.step} yet: fork it once it has. A branch "
                "waits by itself only where both are jobs of one cluster (launcher=slurm)"
            )
        found[run.after] = made
    return found


def _grouped(
    planned: Sequence[PlannedRun], launcher: Launcher, waiting: Mapping[Path, Launcher]
) -> Iterator[tuple[Launcher, list[Path]]]:
    """The runs that are to be started, by what starts them: those that wait for the same trunk together."""
    starting = [run for run in planned if run.starts]
    for trunk in dict.fromkeys(run.after for run in starting):
        yield waiting[trunk] if trunk else launcher, [run.job.run_dir for run in starting if run.after == trunk]


def _refuse(errors: Sequence[str]) -> None:
    if errors:
        raise UserError("\n".join(errors))


def run_here(planned: PlannedRun) -> int:
    """Make an attempt at a run in this process; its exit status.

    The run is looked at once more under its lease, since another command may have changed it meanwhile.

    Raises:
        LockedError: another process holds the lease.
        StoppedError: a signal came while it was not known whether another one does.
        UserError: the run directory cannot be used, or the config does not fit it.
    """
    job, run = planned.job, RunDir(planned.job.run_dir)
    missing, status = _missing([run.lease, run.submission]), int(ExitStatus.USAGE)
    holder, timeout_s = LocalJob().identity(), job.config.run.lease_timeout_s
    try:
        if planned.state == "new":
            _make(run.path)
        with Lease.acquire(
            run.lease, holder, timeout_s, asked_to_stop=lambda: STOP, report=_report, within=run.path
        ) as lease:
            try:
                status = _run_under(lease, planned)
            finally:
                if status == ExitStatus.USAGE and run.path in missing:
                    _discard([job], {run.path: lease.guard}, lease)
    finally:
        if status == ExitStatus.USAGE:
            _remove_empty(missing)
    return status


def _make(run_dir: Path) -> None:
    """Create the directory of a new run, which may be there already.

    Raises:
        UserError: the file system refuses.
    """
    try:
        files.make_dirs(run_dir, files.OWNED)
    except OSError as error:
        raise UserError(unusable(run_dir, "written", error)) from None


def _run_under(lease: Lease, before: PlannedRun) -> int:
    """`run_here` once this process holds the lease of the run, which was seen `before`."""
    job, run = before.job, RunDir(before.job.run_dir)
    try:
        planned = plan_run(job, None, retry_failed=True, held=True)
    except OSError as error:
        raise UserError(unusable(run.path, "read", error)) from None
    _refuse_gone([before], [planned])
    lease.check_fence()  # after the look: what it found may be a newer attempt's
    if planned.notes or not planned.starts:
        _show([planned])
    if not planned.starts:
        return _status([planned])
    guards: dict[Path, files.Guard] = {}
    with _submitting([job], guards):
        _freeze([job], {job.run_dir: lease.guard.and_also(guards[job.run_dir])})
    from runner.training.attempt import attempt

    return attempt(run.path, lease=lease)


def _refuse_gone(before: Sequence[PlannedRun], now: Sequence[PlannedRun]) -> None:
    """Refuse to begin a run anew that was there when this command looked first.

    Raises:
        UserError: `runner mv` or `rm` was faster.
    """
    gone = [new.job.run_dir for old, new in zip(before, now, strict=True) if old.state != "new" and new.state == "new"]
    _refuse([f"{shown(path)} was moved or removed meanwhile: rerun the command to begin it anew" for path in gone])


def _start_all(planned: Sequence[PlannedRun], launcher: Launcher, single: bool) -> int:
    """Start what is to be started in other processes, and follow it if the launcher is set to wait; the exit status.

    Args:
        planned: what to do about each run.
        launcher: of all of them.
        single: it is one run on this machine.
    """
    new, jobs = [run.job for run in planned if run.state == "new"], [run.job for run in planned if run.starts]
    missing = _missing(RunDir(job.run_dir).submission for job in new)
    started, pins, guards = int(ExitStatus.USAGE), list[tuple[Path, Path]](), dict[Path, files.Guard]()
    with ExitStack() as held:
        try:
            for job in new:
                _make(job.run_dir)
            held.enter_context(_submitting(jobs, guards))
            # Another shell may have submitted them while this one waited.
            again = {run.job.run_dir: run for run in plan_runs(jobs, launcher, single)}
            before, planned = planned, [again.get(run.job.run_dir, run) for run in planned]
            new = [run.job for run in planned if run.state == "new"]
            _refuse_gone(before, planned)
            waiting = _waiting(planned, launcher)
            _show(planned)
            _reserve(planned, pins)
            _freeze([run.job for run in planned if run.starts], guards, {run_dir for run_dir, _ in pins})
            if launcher.in_process:
                held.close()  # it takes until the runs are over, and each of them acquires its own lease
            started = int(ExitStatus.FINISHED)
            for each, together in _grouped(planned, launcher, waiting):
                started = _launch(each, together, guards) or started
        finally:
            if started == ExitStatus.USAGE:
                _discard([job for job in new if job.run_dir in guards], guards)
                _remove_empty(missing)
            for run_dir, pin in pins:
                _settle(pin, RunDir(run_dir), started)
    status, run_dirs = started or _status(planned), [run.job.run_dir for run in planned if run.starts]
    return launcher.follow(run_dirs) if status == 0 and run_dirs and launcher.wait else status


def _settle(pin: Path, branch: RunDir, status: int) -> None:
    """Keep the pin of a branch, or remove it if the branch was certainly not submitted."""
    try:
        keep = status != ExitStatus.USAGE or _is_submitted(branch)
    except OSError:  # the file system does not tell, and must not hide why nothing was started
        keep = True
    with suppress(OSError):
        if keep:
            confirm(pin)
        else:
            files.remove(pin)


def _missing(folders: Iterable[Path]) -> set[Path]:
    """Which of these directories, and of those above them, are not there."""
    return {each for folder in folders for each in (folder, *folder.parents) if not files.exists(each)}


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in sorted(folders, reverse=True):
        with suppress(OSError):  # it is gone, or not empty
            files.remove_dir(folder)


def _discard(jobs: Sequence[Composed], guards: Mapping[Path, files.Guard], lease: Lease | None = None) -> None:
    """Remove the directories of new runs that were refused, unless something has come of them.

    Args:
        jobs: runs that did not exist before this command.
        guards: the right to change each.
        lease: that of the run, if this process holds it.
    """
    for job in jobs:
        run, begin = RunDir(job.run_dir), job.config.fork.step or 0
        with suppress(OSError, SupersededError):
            guards[run.path].check()
            if not _is_used(run, lease, begin):
                _set_aside(run, begin, lease)


def _set_aside(run: RunDir, begin: int, lease: Lease | None) -> None:
    """Remove the directory of a run, which is looked at once more under another name: a shell may be about to use it.

    Until that is known the name is none that `rm` takes for something to delete, and that `put_back` undoes.

    Raises:
        OSError: the file system refused; the directory is where it was, or a warning names it.
    """
    aside, rest = RunDir(hidden(run.path, "refused")), hidden(run.path, "removed")
    files.rename(run.path, aside.path)
    try:
        used = _is_used(aside, lease, begin)
        if not used:
            files.rename(aside.path, rest)
    except OSError:
        used = True
    if used:
        _rename_back(aside.path, run.path)
        return
    with suppress(OSError):  # or a power loss might bring the name back that `rm` does not find
        files.fsync_dir(rest.parent)
    if lease is not None:
        lease.end_heartbeat()  # whose open file a network file system would keep, and so the directory
    try:
        files.remove_tree(rest)
    except OSError as error:
        why = error.strerror or error
        _report(f"warning: {shown(rest)} of the refused run cannot be removed ({why}): remove it by hand")


def _is_used(run: RunDir, lease: Lease | None, begin: int) -> bool:
    """Whether a run is or was submitted, has trained beyond step `begin`, or has had a holder after `lease`.

    Raises:
        OSError: the run directory cannot be read.
    """
    holder, submitting = read_holder(run.lease), read_holder(run.submission)
    newer = holder is not None and holder[0] > (lease.fence if lease else 0)
    # Who has released the lease, and not submitted the run, is done with it.
    newer |= submitting is not None and not submitting[1].get("released") and not _is_own(submitting[1])
    return newer or _is_submitted(run) or last_step(run) > begin or run.newest_step() > begin


def _is_own(holder: Mapping[str, Any]) -> bool:
    """Whether this process holds a lease, or held it."""
    return all(holder.get(key) == value for key, value in processes.this_process().items())


def _is_submitted(run: RunDir) -> bool:
    """Whether the run has a job, or may have one that is not recorded.

    Raises:
        OSError: the run directory cannot be read.
    """
    with suppress(FileNotFoundError):
        files.look_anew(run.path)
    return files.exists(run.job) or bool(run.submitting_names())


@contextmanager
def _submitting(jobs: Sequence[Composed], guards: dict[Path, files.Guard]) -> Iterator[None]:
    """Be the only command that freezes and submits these runs, until their job ids are recorded.

    Args:
        jobs: the runs.
        guards: receives the right to write config.yaml, code.json and job.json, by run directory.

    Raises:
        LockedError: another command is submitting one of them, and does not finish.
        RunDirError: one of them was moved or removed.
        UserError: a run directory cannot be written.
    """
    with Heart() as heart, ExitStack() as held:
        # Sorted, so that two sweeps that share runs cannot wait for each other.
        for job in counted(sorted(jobs, key=lambda job: job.run_dir), "creating run directories"):
            lease = held.enter_context(
                Lease.acquire(
                    RunDir(job.run_dir).submission,
                    None,
                    job.config.run.lease_timeout_s,
                    wait_s=SUBMISSION_WAIT_S,
                    asked_to_stop=lambda: STOP,
                    report=_report,
                    heart=heart,
                    within=job.run_dir,
                )
            )
            guards[job.run_dir] = lease.guard
        yield


def _report(message: str) -> None:
    print(printable(message), file=sys.stderr, flush=True)


def _show(planned: Sequence[PlannedRun]) -> None:
    """Print what is done about each run."""
    for run in planned:
        say(f"{shown(run.job.run_dir)}: {run.summary}")
        for note in run.notes if run.starts or run.state == "live" else []:
            say(f"  {note}")


def _status(planned: Sequence[PlannedRun]) -> int:
    """The exit status if everything that is to be started is."""
    if any(run.state in ("failed", "unusable") for run in planned):
        return int(ExitStatus.FAILED)
    return int(ExitStatus.USAGE if any(run.refused for run in planned) else ExitStatus.FINISHED)


def _freeze(jobs: Sequence[Composed], guards: Mapping[Path, files.Guard], waiting: Collection[Path] = ()) -> None:
    """Write config.yaml and code.json of every job.

    Args:
        jobs: the runs.
        guards: the right to change each.
        waiting: the branches among them whose trunk has not saved yet what they begin with.

    Raises:
        UserError: the file system refuses, or what a branch begins with was deleted.
        SupersededError: another process has taken over one of the runs.
    """
    code, sources = provenance.describe_code(), Sources()
    for job in counted(jobs, "writing configs"):
        run = RunDir(job.run_dir)
        try:
            guard = guards[job.run_dir]
            guard.check()  # nothing is written where the run was moved or removed meanwhile
            changes = provenance.code_changes(run.path, code, sources)
            for change in changes:
                say(f"  the code has changed since this run last started: {change}")
            _take_over(job, run, guard, waits=run.path in waiting)
            edit = Changes.of(job).edit(run.newest_step()) if files.exists(run.config) else None
            described = {**code, **provenance.describe_sources(job.plain, sources), "changes": changes}
            provenance.write_code(run.code, described, job.overrides, guard, edit)
            # Last: a directory with a config is a run.
            files.write_atomic(run.config, job.text, guard=guard)
        except OSError as error:
            raise UserError(unusable(run.path, "written", error)) from None


def _show_code_changes(jobs: Sequence[Composed]) -> None:
    """Print how the code differs from the code that existing runs last started with."""
    code, sources = provenance.describe_code() if jobs else {}, Sources()
    for job in jobs:
        for change in provenance.code_changes(job.run_dir, code, sources):
            say(f"  the code has changed since {shown(job.run_dir)} last started: {change}")


def _take_over(job: Composed, run: RunDir, guard: files.Guard, waits: bool) -> None:
    """Take what a branch needs over from its trunk, before anybody deletes it there; later if the branch waits."""
    fork = job.config.fork
    if fork.run is None or fork.step is None or run.newest_step():
        return
    trunk = find(fork.run, run.path)
    if not waits or files.is_dir(trunk.checkpoint(fork.step)):
        from runner.checkpoint.directory import Fence
        from runner.training.branch import take_over

        take_over(RunDir(run.path, guard), trunk, fork.step, Fence(0, guard.check))


def _expected(planned: Sequence[PlannedRun]) -> Iterator[tuple[Path, Path]]:
    """(run directory, checkpoint that it waits for) of the branches that wait."""
    for run in planned:
        if run.starts and run.after is not None and run.job.config.fork.step is not None:
            yield run.job.run_dir, RunDir(run.after).checkpoint(run.job.config.fork.step)


def _reserve(planned: Sequence[PlannedRun], pins: list[tuple[Path, Path]]) -> None:
    """Pin the checkpoints that branches wait for: the trunk may have deleted them by the time it ends.

    Args:
        planned: what to do about each run.
        pins: receives (run directory of the branch, its pin), which stays in the trunk only if the branch is submitted.

    Raises:
        RunDirError: a trunk was moved or removed.
        FileError: the directory of a trunk cannot be written.
    """
    for run_dir, checkpoint in _expected(planned):
        try:
            pins.append((run_dir, reserve(checkpoint)))
            missed = is_missed(checkpoint)
        except FileNotFoundError:
            raise RunDirError(f"{shown(checkpoint.parent.parent)} was moved or removed meanwhile") from None
        except OSError as error:
            reason = f"{shown(checkpoint)} cannot be pinned ({error.strerror or error})"
            raise FileError(f"{reason}: fork that step once it is saved") from None
        if missed:
            raise RunDirError(f"{shown(checkpoint)} was saved and deleted meanwhile: fork another step")


def _launch(launcher: Launcher, run_dirs: list[Path], guards: Mapping[Path, files.Guard]) -> int:
    if not run_dirs:
        return int(ExitStatus.FINISHED)
    if STOP:
        print(f"interrupted ({STOP.name}): nothing was started", file=sys.stderr)
        return int(ExitStatus.INTERRUPTED)
    STOP.uninstall()  # the runs are in other processes: from here on a signal is meant for this command
    return launcher.launch(run_dirs, ATTEMPT, [guards[run_dir] for run_dir in run_dirs])


def _follow_rank_0(job: Composed) -> int:
    """Under torchrun rank 0 alone decides and writes; the others start once it has frozen this very config."""
    run = RunDir(job.run_dir)
    deadline = clock.monotonic() + RANK_TIMEOUT_S
    if is_finished(run, job.config.known_steps, job.config.train.epochs):
        return int(ExitStatus.FINISHED)
    text = job.text.encode()
    while not (files.exists(run.config) and files.read_regular(run.config) == text):
        if STOP:  # rank 0 has ended, with its reason: torchrun stops the others then
            return int(ExitStatus.INTERRUPTED)
        if clock.monotonic() > deadline:
            raise UserError(f"rank 0 did not freeze {run.config} within {RANK_TIMEOUT_S:g} s: see the output of rank 0")
        clock.sleep(RANK_POLL_S)
    from runner.training.attempt import attempt

    return attempt(job.run_dir)
