"""From a command to runs that are under way: which runs it means, freezing their configs, launching them.

Nothing is written before every job of the command has been composed, checked and compared with what is in its run
directory.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from runner.cli.arguments import dirs, parse
from runner.cli.console import say, shown
from runner.cli.launcher import common_launcher
from runner.cli.plan import PlannedRun, plan_run, plan_runs, unusable
from runner.config.composition import Composed, Composer
from runner.contracts import Launcher
from runner.errors import ExitStatus, UserError
from runner.rundir import provenance
from runner.rundir.attempt_log import finished_at
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.system import clock, files
from runner.system.signals import STOP
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
    if errors := launcher.check([job.run_dir for job in jobs]):
        raise UserError("\n".join(errors))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not launcher.in_process:
        raise UserError("torchrun requires launcher=local")
    if int(os.environ.get("RANK", "0")) > 0:
        return _follow_rank_0(jobs[0])
    single = len(jobs) == 1 and launcher.in_process
    planned = plan_runs(jobs, launcher, single)
    if single and planned[0].starts and not launcher.dry_run:
        return run_here(jobs[0], launcher)
    if launcher.in_process or launcher.dry_run:
        return _carry_out(planned, launcher)
    return _submit(planned, launcher)


def run_here(job: Composed, launcher: Launcher) -> int:
    """Make an attempt at a run in this process; its exit status.

    The run is looked at once more under its lease, since another command may have changed it meanwhile.

    Raises:
        LockedError: another process holds the lease.
        UserError: the run directory cannot be used, or the config does not fit it.
    """
    run = RunDir(job.run_dir)
    try:
        files.make_dirs(run.path)
    except OSError as error:
        raise UserError(unusable(run.path, "written", error)) from None
    with Lease.acquire(run.lease, LocalJob().identity(), job.config.run.lease_timeout_s, report=_report) as lease:
        try:
            planned = plan_run(job, None, retry_failed=True, held=True)
        except OSError as error:
            raise UserError(unusable(run.path, "read", error)) from None
        return _carry_out([planned], launcher, lease)


def _submit(planned: Sequence[PlannedRun], launcher: Launcher) -> int:
    """Submit what is to be started, and follow it if the launcher is set to wait; the exit status."""
    with _submitting([run.job for run in planned if run.starts]) as jobs:
        # Another shell may have submitted them while this one waited.
        again = {run.job.run_dir: run for run in plan_runs(jobs, launcher, single=False)} if jobs else {}
        planned = [again.get(run.job.run_dir, run) for run in planned]
        status = _carry_out(planned, launcher)
    started = [run.job.run_dir for run in planned if run.starts]
    return launcher.follow(started) if status == 0 and started and launcher.wait else status


@contextmanager
def _submitting(jobs: Sequence[Composed]) -> Iterator[Sequence[Composed]]:
    """Be the only command that submits these runs, until their job ids are recorded.

    Raises:
        LockedError: another command is submitting one of them, and does not finish.
        UserError: a run directory cannot be written.
    """
    with ExitStack() as held:
        # Sorted, so that two sweeps that share runs cannot wait for each other.
        for job in sorted(jobs, key=lambda job: job.run_dir):
            held.enter_context(
                Lease.acquire(
                    RunDir(job.run_dir).submission,
                    None,
                    job.config.run.lease_timeout_s,
                    wait_s=SUBMISSION_WAIT_S,
                    asked_to_stop=lambda: STOP,
                    report=_report,
                )
            )
        yield jobs


def _report(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _carry_out(planned: Sequence[PlannedRun], launcher: Launcher, lease: Lease | None = None) -> int:
    """Freeze the configs and launch; the exit status. With `lease`, the one run is an attempt in this process."""
    for run in planned:
        if not (lease and run.starts) or run.changes:
            say(f"{shown(run.job.run_dir)}: {run.summary}")
        for change in run.changes if run.starts else []:
            if change.kind != "free" or change.key == "train.steps":
                say(f"  {change}")
    skipped = ExitStatus.FAILED if any(run.state == "failed" for run in planned) else ExitStatus.FINISHED
    starting = [run.job for run in planned if run.starts]
    if not starting:
        return int(skipped)
    run_dirs = [job.run_dir for job in starting]
    if launcher.dry_run:
        print(launcher.preview(run_dirs))
        return int(ExitStatus.FINISHED)
    _freeze(starting)
    if lease is not None:
        from runner.training.attempt import attempt

        return attempt(run_dirs[0], lease=lease)
    return _launch(launcher, run_dirs) or int(skipped)


def _freeze(jobs: Sequence[Composed]) -> None:
    """Write config.yaml and code.json of every job.

    Raises:
        UserError: the file system refuses.
    """
    code = provenance.describe_code()
    for job in jobs:
        run = RunDir(job.run_dir)
        try:
            files.make_dirs(run.path)
            for change in provenance.code_changes(run.path):
                say(f"  the code has changed since this run last started: {change}")
            provenance.write_code(run.code, code, job.overrides)
            # Last: a directory with a config is a run.
            files.write_atomic(run.config, job.text)
        except OSError as error:
            raise UserError(unusable(run.path, "written", error)) from None


def _launch(launcher: Launcher, run_dirs: list[Path]) -> int:
    if STOP:
        print(f"interrupted ({STOP.name}): nothing was started", file=sys.stderr)
        return int(ExitStatus.INTERRUPTED)
    STOP.uninstall()  # the runs are in other processes: from here on a signal is meant for this command
    return launcher.launch(run_dirs, ATTEMPT)


def _follow_rank_0(job: Composed) -> int:
    """Under torchrun rank 0 alone decides and writes; the others start once it has frozen this very config."""
    run = RunDir(job.run_dir)
    deadline = clock.monotonic() + RANK_TIMEOUT_S
    if finished_at(run) >= job.config.train.steps:
        return int(ExitStatus.FINISHED)
    while not (run.config.exists() and files.read_text(run.config) == job.text):
        if clock.monotonic() > deadline:
            raise UserError(f"rank 0 did not freeze {run.config} within {RANK_TIMEOUT_S:g} s: see the output of rank 0")
        clock.sleep(RANK_POLL_S)
    from runner.training.attempt import attempt

    return attempt(job.run_dir)
