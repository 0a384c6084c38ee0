"""From a command to runs that are under way: which runs it means, freezing their configs, launching them.

Nothing is written before every job of the command has been composed, checked and compared with what is in its run
directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from runner.cli.arguments import dirs, parse
from runner.cli.console import say, shown
from runner.cli.launcher import common_launcher
from runner.cli.plan import PlannedRun, plan_run, plan_runs, unusable
from runner.config.composition import Composed, Composer
from runner.contracts import Launcher
from runner.errors import ExitStatus, SupersededError, UserError
from runner.rundir import provenance
from runner.rundir.attempt_log import is_finished, last_step
from runner.rundir.lease import Lease, read_holder
from runner.rundir.paths import RunDir
from runner.system import clock, files
from runner.system.signals import STOP
from runner.system.terminal import printable
from runner.training.job import LocalJob

ATTEMPT = "runner.training.attempt:attempt"
# How long the other ranks wait for rank 0 to freeze the config of this launch.
RANK_TIMEOUT_S, RANK_POLL_S = 120.0, 0.05
# How long a command waits for another one that submits the same runs.
SUBMISSION_WAIT_S = 120.0


def start(arguments: Sequence[str]) -> int:
    """Start, resume or skip the runs that the overrides describe; the exit status."""
    options = parse(arguments)
    composer = Composer(dirs(options), options.config_name)
    jobs = composer.jobs(options.overrides) if options.multirun else [composer.compose(options.overrides)]
    return start_runs(jobs)


def start_runs(jobs: Sequence[Composed]) -> int:
    """Start, resume or skip `jobs`, as the state of each run requires; the exit status.

    Raises:
        UserError: something keeps one of them from starting; then none was started and nothing was written.
    """
    launcher = common_launcher(jobs)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not launcher.in_process:
        raise UserError("torchrun requires launcher=local")
    if int(os.environ.get("RANK", "0")) > 0:
        _refuse(launcher.check([job.run_dir for job in jobs]))
        return _follow_rank_0(jobs[0])
    single = len(jobs) == 1 and launcher.in_process
    planned = plan_runs(jobs, launcher, single)
    # After the look at the runs: what is finished or queued already needs neither a scheduler nor this machine.
    starting = [run.job.run_dir for run in planned if run.starts]
    _refuse(launcher.check(starting) if starting else [])
    if single and planned[0].starts and not launcher.dry_run:
        return run_here(jobs[0], launcher)
    if launcher.dry_run or not starting:
        _show(planned)
        if starting:
            print(launcher.preview(starting))
        return _status(planned)
    return _start_all(planned, launcher)


def _refuse(errors: Sequence[str]) -> None:
    if errors:
        raise UserError("\n".join(errors))


def run_here(job: Composed, launcher: Launcher) -> int:
    """Make an attempt at a run in this process; its exit status.

    The run is looked at once more under its lease, since another command may have changed it meanwhile.

    Raises:
        LockedError: another process holds the lease.
        UserError: the run directory cannot be used, or the config does not fit it.
    """
    run = RunDir(job.run_dir)
    missing = {parent for parent in (run.path, *run.path.parents) if not parent.exists()}
    try:
        files.make_dirs(run.path, files.OWNED)
    except OSError as error:
        raise UserError(unusable(run.path, "written", error)) from None
    with Lease.acquire(run.lease, LocalJob().identity(), job.config.run.lease_timeout_s, report=_report) as lease:
        refused = True
        try:
            status = _run_under(lease, job)
            refused = status == ExitStatus.USAGE
        finally:
            if refused and run.path in missing:
                _discard([run.path], {run.path: lease.guard}, lease.fence)
                _remove_empty(missing)
    return status


def _run_under(lease: Lease, job: Composed) -> int:
    """`run_here` once this process holds the lease of the run."""
    run = RunDir(job.run_dir)
    try:
        planned = plan_run(job, None, retry_failed=True, held=True)
    except OSError as error:
        raise UserError(unusable(run.path, "read", error)) from None
    lease.check_fence()  # after the look: what it found may be a newer attempt's
    if planned.changes or not planned.starts:
        _show([planned])
    if not planned.starts:
        return _status([planned])
    with _submitting([job]) as guards:
        _freeze([job], {job.run_dir: lease.guard.and_also(guards[job.run_dir])})
    from runner.training.attempt import attempt

    return attempt(run.path, lease=lease)


def _start_all(planned: Sequence[PlannedRun], launcher: Launcher) -> int:
    """Start what is to be started elsewhere, and follow it if the launcher is set to wait; the exit status."""
    new = [run.job.run_dir for run in planned if run.state == "new"]
    missing = {parent for path in new for parent in path.parents if not parent.exists()}
    with ExitStack() as held:
        jobs = [run.job for run in planned if run.starts]
        guards = held.enter_context(_submitting(jobs))
        # Another shell may have submitted them while this one waited.
        again = {run.job.run_dir: run for run in plan_runs(jobs, launcher, single=False)}
        planned = [again.get(run.job.run_dir, run) for run in planned]
        _show(planned)
        jobs = [run.job for run in planned if run.starts]
        _freeze(jobs, guards)
        if launcher.in_process:
            held.close()  # it takes until the runs are over, and each of them acquires its own lease
        status = _launch(launcher, [job.run_dir for job in jobs], guards) or _status(planned)
        if status == ExitStatus.USAGE:
            _discard(new, guards)
    if status == ExitStatus.USAGE:
        _remove_empty(missing)
    started = [run.job.run_dir for run in planned if run.starts]
    return launcher.follow(started) if status == 0 and started and launcher.wait else status


def _remove_empty(parents: Iterable[Path]) -> None:
    for parent in sorted(parents, reverse=True):
        with suppress(OSError):  # it is gone, or not empty
            files.remove_dir(parent)


def _discard(run_dirs: Sequence[Path], guards: Mapping[Path, files.Guard], fence: int = 0) -> None:
    """Remove the directories of new runs that were refused, unless something has come of them.

    Args:
        run_dirs: of runs that did not exist before this command.
        guards: the right to change each.
        fence: number of this process's lease, if it holds that of the run.
    """
    for path in run_dirs:
        aside = RunDir(path.with_name(f".{path.name}.refused-{os.getpid()}"))
        with suppress(OSError, SupersededError):
            guards[path].check()
            if _is_used(RunDir(path), fence):
                continue
            files.rename(path, aside.path)  # first, since another shell may be about to use it
            if _is_used(aside, fence):
                files.rename(aside.path, path)
            else:
                files.remove_tree(aside.path)


def _is_used(run: RunDir, fence: int) -> bool:
    """Whether a run was submitted, has trained, or has had a holder after number `fence`.

    Raises:
        OSError: the run directory cannot be read.
    """
    holder = read_holder(run.lease)
    newer = holder is not None and holder[0] > fence
    return newer or run.job.exists() or last_step(run) > 0 or bool(run.checkpoint_steps())


@contextmanager
def _submitting(jobs: Sequence[Composed]) -> Iterator[dict[Path, files.Guard]]:
    """Be the only command that freezes and submits these runs, until their job ids are recorded.

    Yields the right to write config.yaml, code.json and job.json, by run directory.

    Raises:
        LockedError: another command is submitting one of them, and does not finish.
        UserError: a run directory cannot be written.
    """
    guards = {}
    with ExitStack() as held:
        # Sorted, so that two sweeps that share runs cannot wait for each other.
        for job in sorted(jobs, key=lambda job: job.run_dir):
            try:
                files.make_dirs(job.run_dir, files.OWNED)
            except OSError as error:
                raise UserError(unusable(job.run_dir, "written", error)) from None
            lease = held.enter_context(
                Lease.acquire(
                    RunDir(job.run_dir).submission,
                    None,
                    job.config.run.lease_timeout_s,
                    wait_s=SUBMISSION_WAIT_S,
                    asked_to_stop=lambda: STOP,
                    report=_report,
                )
            )
            guards[job.run_dir] = lease.guard
        yield guards


def _report(message: str) -> None:
    print(printable(message), file=sys.stderr, flush=True)


def _show(planned: Sequence[PlannedRun]) -> None:
    """Print what is done about each run."""
    for run in planned:
        say(f"{shown(run.job.run_dir)}: {run.summary}")
        for change in run.changes if run.starts else []:
            if change.kind != "free" or change.key in ("train.steps", "train.epochs"):
                say(f"  {change}")


def _status(planned: Sequence[PlannedRun]) -> int:
    """The exit status if everything that is to be started is."""
    left = any(run.state in ("failed", "unusable") for run in planned)
    return int(ExitStatus.FAILED if left else ExitStatus.FINISHED)


def _freeze(jobs: Sequence[Composed], guards: Mapping[Path, files.Guard]) -> None:
    """Write config.yaml and code.json of every job.

    Raises:
        UserError: the file system refuses.
        SupersededError: another process has taken over one of the runs.
    """
    code = provenance.describe_code()
    for job in jobs:
        run = RunDir(job.run_dir)
        try:
            files.make_dirs(run.path, files.OWNED)
            for change in provenance.code_changes(run.path):
                say(f"  the code has changed since this run last started: {change}")
            guard = guards[job.run_dir]
            provenance.write_code(run.code, code, job.overrides, guard)
            # Last: a directory with a config is a run.
            files.write_atomic(run.config, job.text, guard=guard)
        except OSError as error:
            raise UserError(unusable(run.path, "written", error)) from None


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
    while not (run.config.exists() and files.read_regular(run.config) == text):
        if clock.monotonic() > deadline:
            raise UserError(f"rank 0 did not freeze {run.config} within {RANK_TIMEOUT_S:g} s: see the output of rank 0")
        clock.sleep(RANK_POLL_S)
    from runner.training.attempt import attempt

    return attempt(job.run_dir)
