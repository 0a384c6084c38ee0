"""Start the runs of a command: plan them, freeze their configs, and launch them.

Nothing is written until every job of the command has been composed, checked and compared with its run directory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from runner.cli.base import model
from runner.cli.base.arguments import dirs, parse
from runner.cli.base.console import console, counted, say, shown, tell
from runner.cli.base.launcher import common_launcher, idle_ranks
from runner.cli.runs.housekeeping import remove, remove_rest
from runner.cli.start.edits import Changes
from runner.cli.start.plan import PlannedRun, plan_run, plan_runs, unusable
from runner.cli.start.relatives import nearest
from runner.config.composition import Composed, Composer
from runner.config.early_stopping import against_its_name
from runner.config.finished import has_finished
from runner.config.frozen import holds
from runner.config.identity import canonical, flatten
from runner.config.schema import Config
from runner.config.tree import CONFIG_NAME
from runner.contracts import Launcher
from runner.errors import ExitStatus, FileError, LockedError, UserError, refuse
from runner.rundir import provenance
from runner.rundir.attempt_log import last_step
from runner.rundir.custody import custody
from runner.rundir.lease import Heart, Lease
from runner.rundir.origin import search_modules
from runner.rundir.paths import RunDir
from runner.rundir.sources import Sources
from runner.rundir.trunk import find
from runner.system import clock, files, processes
from runner.system.signals import STOP
from runner.training.effects import same_results, without_effect
from runner.training.job import LocalJob

ATTEMPT = "runner.training.attempt:attempt"
# How long the other ranks wait for rank 0 to freeze the config of this launch.
RANK_TIMEOUT_S, RANK_POLL_S = 120.0, 0.05
# How long to wait for another command that is submitting the same runs.
SUBMISSION_WAIT_S = 120.0
# A dry run shows one model for each combination of these sections, up to a maximum number.
DECIDES_MODEL, MOST_MODELS = ("model", "optimizer", "optimizers", "strategy", "train"), 8


def start(arguments: Sequence[str]) -> int:
    """Start, resume or skip the runs that the overrides describe, and return the exit status."""
    options = parse(arguments)
    composer = Composer(dirs(options), options.config_name)
    if options.multirun and _may_search(options, composer):
        from runner.cli.start.search import start_search
        from runner.config.template import TrialComposer

        searching = TrialComposer(dirs(options), options.config_name)
        if searching.is_search(options.overrides):
            return start_search(searching, options.overrides, options.dry_run)
    if options.multirun:
        jobs = composer.jobs(options.overrides, lambda each: counted(each, "composing jobs"))
    else:
        jobs = [composer.compose(options.overrides)]
        if swept := composer.swept(options.overrides):
            tell(f"warning: {', '.join(swept)} in a config file: a sweep needs -m, so one run is started without it")
    return start_runs(jobs, options.dry_run)


def _may_search(options: argparse.Namespace, composer: Composer) -> bool:
    """Return whether a command's options may select a search. If so, the caller must check."""
    named = [text.lstrip("+") for text in options.overrides]
    return composer.tree.config_name != CONFIG_NAME or any(text.startswith(("search", "experiment=")) for text in named)


def freeze_run(job: Composed) -> None:
    """Freeze the config of a run that this command trains in a different process, unless it is already frozen.

    Raises:
        LockedError: another process is training or submitting the run.
        UserError: the run directory cannot be used, or the run has different settings.
    """
    planned = plan_run(job, None, retry_failed=True)
    if planned.state == "live":
        raise LockedError(f"{job.run_dir} is in use: {planned.summary}")
    if planned.state == "new":
        _make(job.run_dir)
    elif not planned.starts or holds(job.run_dir, job.plain):
        if planned.refused:
            raise UserError(f"{job.run_dir}: {planned.summary}")
        return
    guards: dict[Path, files.Guard] = {}
    with _submitting([job], guards):
        if plan_run(job, None, retry_failed=True).starts:
            _freeze([job], guards)


def start_runs(jobs: Sequence[Composed], dry_run: bool = False) -> int:
    """Start, resume or skip each job, depending on the state of its run, and return the exit status.

    Args:
        jobs: the runs of the command.
        dry_run: whether to print the plan and start nothing.

    Raises:
        UserError: a run cannot start. Then no run was started and nothing was written.
    """
    launcher = common_launcher(jobs)
    dry_run = dry_run or launcher.dry_run
    if int(processes.environment.get("WORLD_SIZE", "1")) > 1 and not launcher.in_process:
        raise UserError("torchrun requires launcher=local")
    if int(processes.environment.get("RANK", "0")) > 0:
        refuse(launcher.check([job.run_dir for job in jobs]))
        return _follow_rank_0(jobs[0])
    single = len(jobs) == 1 and launcher.in_process
    planned = plan_runs(jobs, launcher, single)
    # This follows the planning, because finished and queued runs need neither a scheduler nor this machine.
    starting = [run.job.run_dir for run in planned if run.starts]
    refuse(launcher.check(starting) if starting else [])
    is_new = len(planned) == 1 and planned[0].state == "new" and planned[0].job.config.fork.run is None
    if is_new and (line := nearest(planned[0].job)):
        say(line)
    _warn_of_idle_ranks(planned, launcher)
    _warn_without_effect([run.job for run in planned if run.starts])
    if not launcher.in_process:
        _warn_of_missing_data([run.job for run in planned if run.starts])
    if single and planned[0].starts and not dry_run and list(launcher.rank_counts().counts) == [1]:
        return run_here(planned[0])
    if dry_run or not starting:
        _show(planned)
        _show_code_changes([run.job for run in planned if run.starts])
        if starting:
            print(launcher.preview(starting))
            _show_models([run.job for run in planned if run.starts], launcher)
        return _status(planned)
    return _start_all(planned, launcher, single)


def _warn_of_idle_ranks(planned: Sequence[PlannedRun], launcher: Launcher) -> None:
    counts = launcher.rank_counts()
    warnings = [warning for run in planned if run.starts for warning in idle_ranks(counts, run.job.config)]
    for warning in dict.fromkeys(warnings):
        tell(f"warning: {warning.text}: {warning.remedy}")


def _warn_without_effect(jobs: Sequence[Composed]) -> None:
    """Warn about settings that have no effect, and about jobs that will give the same results as another job."""
    lines = [line for job in jobs for line in (*without_effect(job.config), *_reversed(job.config))]
    named = [(" ".join(job.overrides) or job.run_dir.name, job.config, job.plain) for job in jobs]
    for line in dict.fromkeys([*lines, *same_results(named)]):
        tell(f"warning: {line}")


def _reversed(config: Config) -> Iterator[str]:
    """Yield a warning for each metric whose name suggests that its `mode` should be reversed."""
    best, stops = config.checkpoint.best, config.early_stopping
    if config.checkpoint.keep_best:
        yield from against_its_name("checkpoint.best", best.metric, best.mode)
    yield from against_its_name("early_stopping", stops.metric, stops.mode)


def _warn_of_missing_data(jobs: Sequence[Composed]) -> None:
    """Warn about source files that are missing on this machine.

    If they are missing on the jobs' machines too, all jobs will fail.
    """
    missing: dict[str, None] = {}
    for job in jobs:
        sources = {f"data.{group}": job.plain["data"][group] for group in ("sources", "eval_sources")}
        for key, value in flatten(sources).items():
            paths = (value if isinstance(value, list) else [value]) if key.endswith((".path", ".paths")) else []
            plain = [Path(path).expanduser() for path in paths if isinstance(path, str) and not set(path) & set("*?[")]
            missing |= {f"{key}={path}": None for path in plain if not files.exists(path)}
    for setting in missing:
        tell(f"warning: {setting} does not exist on this machine: jobs fail unless it exists on theirs")


def run_here(planned: PlannedRun) -> int:
    """Make an attempt of a run in this process, and return its exit status.

    The run is checked again after its lease is acquired, because another command may have changed it.

    Raises:
        LockedError: another process holds the lease.
        StoppedError: a signal arrived before it was known whether another process holds the lease.
        UserError: the run directory cannot be used, or the config does not fit it.
    """
    job, run = planned.job, RunDir(planned.job.run_dir)
    missing, status, attempts = _missing_dirs([run.lease, run.submission]), int(ExitStatus.USAGE), 0
    holder, timeout_s = LocalJob().identity(), job.config.run.lease_timeout_s
    try:
        if planned.state == "new":
            _make(run.path)
        with Lease.acquire(
            run.lease, holder, timeout_s, asked_to_stop=lambda: STOP, report=tell, within=run.path
        ) as lease:
            attempts = lease.fence
            status = _run_under(lease, planned)
    finally:
        if status == ExitStatus.USAGE:
            _discard([job], missing, attempts)
    return status


def _make(run_dir: Path) -> None:
    """Create the directory of a new run if it does not exist.

    Raises:
        UserError: the directory cannot be created.
    """
    try:
        files.make_dirs(run_dir, files.OWNED)
    except OSError as error:
        raise UserError(unusable(run_dir, "written", error)) from None


def _run_under(lease: Lease, before: PlannedRun) -> int:
    """Continue `run_here` after its lease is acquired. `before` is the plan made without the lease."""
    job, run = before.job, RunDir(before.job.run_dir)
    try:
        planned = plan_run(job, None, retry_failed=True, held=True)
    except OSError as error:
        raise UserError(unusable(run.path, "read", error)) from None
    _refuse_gone([before], [planned])
    lease.check_fence()  # checked after planning, because the plan may have used records of a newer attempt
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
    """Raise an error if a run existed when it was first planned but is gone now. It must not be started as a new run.

    Raises:
        UserError: `runner mv` or `rm` moved or removed the run.
    """
    gone = [new.job.run_dir for old, new in zip(before, now, strict=True) if old.state != "new" and new.state == "new"]
    refuse([f"{shown(path)} was moved or removed meanwhile: rerun the command to begin it anew" for path in gone])


def _start_all(planned: Sequence[PlannedRun], launcher: Launcher, single: bool) -> int:
    """Start the planned runs in other processes. If the launcher waits, follow them. Return the exit status.

    Args:
        planned: the plan for each run.
        launcher: the launcher for all runs.
        single: whether there is one run on this machine.
    """
    new, jobs = [run.job for run in planned if run.state == "new"], [run.job for run in planned if run.starts]
    missing = _missing_dirs(RunDir(job.run_dir).submission for job in new)
    started, guards = int(ExitStatus.USAGE), dict[Path, files.Guard]()
    try:
        for job in new:
            _make(job.run_dir)
        with ExitStack() as held:
            held.enter_context(_submitting(jobs, guards))
            # Another shell may have submitted the runs while this command waited.
            again = {run.job.run_dir: run for run in plan_runs(jobs, launcher, single)}
            before, planned = planned, [again.get(run.job.run_dir, run) for run in planned]
            _refuse_gone(before, planned)
            _show(planned)
            jobs = [run.job for run in planned if run.starts]
            _freeze(jobs, guards)
            if launcher.in_process:
                held.close()  # `launch` may last until the runs are over, and each run has to acquire its own lease
            started = int(ExitStatus.FINISHED)
            started = _launch(launcher, [job.run_dir for job in jobs], guards)
    finally:
        if started == ExitStatus.USAGE:
            _discard(new, missing)
    status, run_dirs = started or _status(planned), [job.run_dir for job in jobs]
    return launcher.follow(run_dirs) if status == 0 and run_dirs and launcher.wait else status


def _missing_dirs(folders: Iterable[Path]) -> set[Path]:
    """Return the directories in `folders`, and their parents, that do not exist."""
    return {each for folder in folders for each in (folder, *folder.parents) if not files.exists(each)}


def _discard(jobs: Iterable[Composed], missing: set[Path], attempts: int = 0) -> None:
    """Remove the directories of new runs that were rejected, unless another process has used them since.

    Args:
        jobs: the runs. This command no longer holds any of their leases.
        missing: the directories that did not exist before this command.
        attempts: how many times this command has held the lease of each run for training.
    """
    for job in jobs:
        begin = job.config.fork.step or 0
        if job.run_dir not in missing:
            continue
        try:
            with custody(RunDir(job.run_dir)) as held:
                others = held.lease.fence > attempts + 1  # acquiring `custody` adds one
                if others or files.exists(held.run.job) or max(last_step(held.run), held.run.newest_step()) > begin:
                    continue
                aside = remove(held)
        except (OSError, UserError):  # another process uses it, or the disk cannot be read
            continue
        try:
            remove_rest(aside)
        except FileError:
            tell(f"warning: {shown(aside)}, of the refused run, cannot be removed: remove it by hand")
    for folder in sorted(missing, reverse=True):
        with suppress(OSError):  # the directory is gone or not empty
            files.remove_dir(folder)


@contextmanager
def _submitting(jobs: Sequence[Composed], guards: dict[Path, files.Guard]) -> Iterator[None]:
    """Acquire the exclusive right to freeze and submit these runs, and hold it until their job ids are recorded.

    Args:
        jobs: the runs to submit.
        guards: an output. It receives a guard for writing config.yaml, code.json and job.json, by run directory.

    Raises:
        LockedError: another command is submitting one of the runs and does not finish.
        RunDirError: one of the runs was moved or removed.
        UserError: a run directory cannot be written.
    """
    with Heart() as heart, ExitStack() as held:
        # Sorted, so that two sweeps with common runs cannot deadlock.
        for job in counted(sorted(jobs, key=lambda job: job.run_dir), "creating run directories"):
            lease = held.enter_context(
                Lease.acquire(
                    RunDir(job.run_dir).submission,
                    None,
                    job.config.run.lease_timeout_s,
                    wait_s=SUBMISSION_WAIT_S,
                    asked_to_stop=lambda: STOP,
                    report=tell,
                    heart=heart,
                    within=job.run_dir,
                )
            )
            guards[job.run_dir] = lease.guard
        yield


def _show(planned: Sequence[PlannedRun]) -> None:
    """Print the plan for each run."""
    for run in planned:
        say(f"{shown(run.job.run_dir)}: {run.summary}")
        for note in run.notes if run.starts or run.state == "live" else []:
            say(f"  {note}")


def _status(planned: Sequence[PlannedRun]) -> int:
    """Return the exit status, assuming that every planned run starts successfully."""
    if any(run.state in ("failed", "unusable") for run in planned):
        return int(ExitStatus.FAILED)
    return int(ExitStatus.USAGE if any(run.refused for run in planned) else ExitStatus.FINISHED)


def _freeze(jobs: Sequence[Composed], guards: Mapping[Path, files.Guard]) -> None:
    """Write config.yaml and code.json for every job. A branch first gets its checkpoint and records from its trunk.

    Args:
        jobs: the runs to freeze.
        guards: the right to write to each run directory.

    Raises:
        UserError: a file cannot be written, or the checkpoint that a branch starts from was deleted.
        SupersededError: another process has taken over one of the runs.
    """
    code, sources = provenance.describe_code(), Sources()
    for job in counted(jobs, "writing configs"):
        run = RunDir(job.run_dir)
        try:
            guard = guards[job.run_dir]
            guard.check()  # nothing is written if the run was moved or removed
            changes = provenance.code_changes(run.path, code, sources)
            for change in changes:
                say(f"  the code has changed since this run last started: {change}")
            _begin_branch(job, run, guard)
            edit = Changes.of(job).edit(run.newest_step()) if files.exists(run.config) else None
            described = {**code, **provenance.describe_sources(job.plain, sources), "changes": changes}
            provenance.write_code(run.code, described, job.overrides, guard, edit, job.text)
            # Written last, because a directory with a config is a run.
            files.write_atomic(run.config, job.text, guard=guard)
        except OSError as error:
            raise UserError(unusable(run.path, "written", error)) from None


def _show_code_changes(jobs: Sequence[Composed]) -> None:
    """Print how the code has changed since each existing run was last started."""
    code, sources = provenance.describe_code() if jobs else {}, Sources()
    for job in jobs:
        for change in provenance.code_changes(job.run_dir, code, sources):
            say(f"  the code has changed since {shown(job.run_dir)} last started: {change}")


def _show_models(jobs: Sequence[Composed], launcher: Launcher) -> None:
    """Print the models of the first jobs. Most sweeps have only one model."""
    settings = {canonical([job.plain[key] for key in DECIDES_MODEL]): job for job in reversed(jobs)}
    several, seen = [*reversed(settings.values())], set()
    for job in several[:MOST_MODELS]:
        search_modules(RunDir(job.run_dir), job.config.run.directory)
        held, reason = model.held_by(job.config)
        listed = [] if held is None else [*model.listing(held, job.config, launcher.rank_counts().counts[0])]
        if held is None:
            listed = [f"the model is not shown: it cannot be created without its memory ({reason})"]
        if listed[-1] not in seen:
            for each in [f"model of {shown(job.run_dir)}", *listed] if len(several) > 1 else listed:
                console().print(each)
        seen.add(listed[-1])
    if len(several) > MOST_MODELS:
        say(f"further models are not shown: only {MOST_MODELS} are looked at")


def _begin_branch(job: Composed, run: RunDir, guard: files.Guard) -> None:
    """Copy the trunk's checkpoint and records to a branch that has no checkpoint yet."""
    fork = job.config.fork
    if fork.run is not None and fork.step is not None and not run.newest_step():
        from runner.checkpoint.files.store import Fence
        from runner.training.branch import take_over

        take_over(RunDir(run.path, guard), find(fork.run, run.path), fork.step, Fence(0, guard.check))


def _launch(launcher: Launcher, run_dirs: list[Path], guards: Mapping[Path, files.Guard]) -> int:
    if not run_dirs:
        return int(ExitStatus.FINISHED)
    if STOP:
        print(f"interrupted ({STOP.name}): nothing was started", file=sys.stderr)
        return int(ExitStatus.INTERRUPTED)
    STOP.uninstall()  # the runs are in other processes, so from now on a signal affects only this command
    return launcher.launch(run_dirs, ATTEMPT, [guards[run_dir] for run_dir in run_dirs])


def _follow_rank_0(job: Composed) -> int:
    """Wait until rank 0 has frozen exactly this config, and then make the attempt.

    Under torchrun, only rank 0 decides and writes.
    """
    run = RunDir(job.run_dir)
    deadline = clock.monotonic() + RANK_TIMEOUT_S
    if has_finished(run, job.config):
        return int(ExitStatus.FINISHED)
    text = job.text.encode()
    while not (files.exists(run.config) and files.read_regular(run.config) == text):
        if STOP:  # rank 0 has ended and reported why; torchrun then stops the other ranks
            return int(ExitStatus.INTERRUPTED)
        if clock.monotonic() > deadline:
            raise UserError(f"rank 0 did not freeze {run.config} within {RANK_TIMEOUT_S:g} s: see the output of rank 0")
        clock.sleep(RANK_POLL_S)
    from runner.training.attempt import attempt

    return attempt(job.run_dir)
