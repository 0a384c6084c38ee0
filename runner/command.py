"""What a command does: which runs it means, what state they are in, which of them are started.

Nothing is written before every job of the command has been composed, checked and compared with what is
in its run directory.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner import capsule, queue, turn
from runner.attempts import finished_at, status_of
from runner.conf_tree import conf_dir
from runner.config import Composed, Composer, differences, load_plain
from runner.config.composition import CONFIG_NAME, opened
from runner.config.identity import Difference
from runner.errors import ExitStatus, LockedError, UserError
from runner.files import write_atomic
from runner.lease import Lease, current, judge, name_of, this_process
from runner.run_dir import RunDir
from runner.signals import STOP, STOP_SIGNALS

ATTEMPT = "runner.train:attempt"
# How long the other ranks wait for rank 0 to freeze the config of this launch.
RANK_TIMEOUT_S = 120.0
# How long a command waits for jobs that give their nodes back (they save, are killed, the nodes are cleaned up).
ENDING_WAIT_S, ENDING_POLL_S = 180.0, 1.0
# How long a command waits for another one that submits the same runs.
SUBMISSION_WAIT_S = 120.0


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise UserError(f"{message}; see python -m runner --help")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Hydra's arguments; flags and overrides may stand in any order.

    Raises:
        UserError: an unknown flag.
    """
    from hydra._internal.utils import get_args_parser

    parser = get_args_parser()
    parser.__class__ = _Parser
    parser.prog = "python -m runner"
    for action in parser._actions:
        if "--version" in action.option_strings:
            action.version = _version()  # type: ignore[attr-defined]
    return parser.parse_intermixed_args(list(arguments))


def _version() -> str:
    from runner import __version__

    return f"runner {__version__}"


def _config_dirs(arguments: argparse.Namespace) -> list[str]:
    """Further config directories; refuses those of Hydra's flags that have no meaning here."""
    if arguments.config_path:
        raise UserError(f"--config-path {arguments.config_path}: give further config groups with --config-dir")
    if arguments.experimental_rerun:
        raise UserError("--experimental-rerun: there is no such file here; the same command goes on with its run")
    return [arguments.config_dir] if arguments.config_dir else []


def show(arguments: argparse.Namespace) -> int:
    """`--cfg`, `--info`, completion: Hydra's own, with our message where a composition fails."""
    from hydra._internal.utils import _run_hydra, get_args_parser
    from hydra.errors import HydraException

    dirs = _config_dirs(arguments)
    arguments.overrides = [opened(override) for override in arguments.overrides]
    full_error = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise, so that it can be said in one line
    try:
        _run_hydra(arguments, get_args_parser(), lambda _: None, str(conf_dir()), CONFIG_NAME)
    except (HydraException, ValueError) as error:
        name = arguments.config_name or CONFIG_NAME
        Composer(dirs, name).compose(arguments.overrides)
        raise UserError(" ".join(str(error).split())) from None
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
    return 0


def start(arguments: argparse.Namespace) -> int:
    """Start, continue or skip the runs of a command; the exit status."""
    composer = Composer(_config_dirs(arguments), arguments.config_name or CONFIG_NAME)
    overrides = arguments.overrides
    jobs = composer.jobs(overrides) if arguments.multirun else [composer.compose(overrides)]
    launcher = _launcher(jobs)
    run_dirs = [job.run_dir for job in jobs]
    if found := launcher.check(run_dirs):
        raise UserError("\n".join(found))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not getattr(launcher, "in_process", False):
        raise UserError("under torchrun the run is here already: leave launcher at local")
    if int(os.environ.get("RANK", "0")) > 0:
        return _follow_rank_0(jobs[0], launcher)
    single = len(jobs) == 1 and getattr(launcher, "in_process", False)
    plans = _plans(jobs, launcher, single)
    if single and plans[0].starts and not launcher.dry_run:
        return _here(jobs[0], launcher)
    if getattr(launcher, "in_process", False) or launcher.dry_run:
        return _carry_out(plans, launcher, single)
    with _submitting([plan.job for plan in plans if plan.starts]) as mine:
        # Another shell may have submitted them while this one waited for its turn.
        again = {plan.job.run_dir: plan for plan in _plans(mine, launcher, single)} if mine else {}
        plans = [again.get(plan.job.run_dir, plan) for plan in plans]
        status = _carry_out(plans, launcher, single)
    started = [plan.job.run_dir for plan in plans if plan.starts]
    follows = status == 0 and started and getattr(launcher, "wait", False)
    return int(launcher.follow(started)) if follows else status


def _here(job: Composed, launcher: Any) -> int:
    """Take a run for this process, look at it again, since another command may have been here, and carry it out."""
    run = RunDir(job.run_dir)
    try:
        run.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(_unusable(run.path, "written", error)) from None
    with turn.reserved(run, job.config.run.lease_timeout_s, _tell):
        try:
            plan = _plan(job, None, retry_failed=True, held=True)
        except OSError as error:
            raise UserError(_unusable(run.path, "read", error)) from None
        return _carry_out([plan], launcher, single=True)


def _launcher(jobs: Sequence[Composed]) -> Any:
    """The launcher of all `jobs`.

    Raises:
        UserError: they do not agree on it, or it cannot be made.
    """
    from hydra.errors import HydraException
    from hydra.utils import instantiate

    node = jobs[0].plain["launcher"]
    for job in jobs[1:]:
        if changed := differences({"launcher": node}, {"launcher": job.plain["launcher"]}):
            raise UserError(f"{changed[0].key} differs between the jobs of a sweep: start a sweep for each value")
    if "_target_" not in node:
        raise UserError("launcher has no _target_: choose launcher=local or launcher=slurm")
    try:
        launcher = instantiate(node, _convert_="all")
    except HydraException as error:
        raise UserError(f"launcher: {' '.join(str(error.__cause__ or error).split())}") from None
    needs = ["check", "preview", "launch", "jobs", "dry_run", "retry_failed"]
    if getattr(launcher, "wait", False) and not getattr(launcher, "in_process", False):
        needs.append("follow")
    lacks = [name for name in needs if not hasattr(launcher, name)]
    if lacks:
        raise UserError(f"launcher._target_={node['_target_']} is no launcher: it has no {', '.join(lacks)}")
    return launcher


@dataclass
class Plan:
    """One run of a command and what is to be done about it."""

    job: Composed
    state: str  # new, unfinished, finished, live or failed
    words: str  # for the user
    changes: list[Difference]

    @property
    def starts(self) -> bool:
        return self.state in ("new", "unfinished")


def _plans(jobs: Sequence[Composed], launcher: Any, single: bool) -> list[Plan]:
    """What to do about each job; reads run directories only.

    Raises:
        UserError: a job does not fit what its run directory holds, or nobody knows whether it is live.
    """
    queued = _queued(jobs, launcher)
    plans, wrong = [], []
    for job in jobs:
        try:
            plans.append(_plan(job, queued.get(job.run_dir), launcher.retry_failed or single))
        except UserError as error:
            wrong.append(str(error))
        except OSError as error:
            wrong.append(_unusable(job.run_dir, "read", error))
    if wrong:
        raise UserError("\n".join(wrong))
    if single and plans[0].state == "live":
        raise LockedError(f"{plans[0].job.run_dir} is in use: {plans[0].words}; wait for it, or stop it first")
    return plans


def _queued(jobs: Sequence[Composed], launcher: Any) -> dict[Path, Any]:
    """The schedulers' word on the runs; a job that is on its way out of a queue is waited for.

    While it gives its node back, it may be gone for good or about to wait in the queue again.

    Raises:
        UserError: a scheduler does not answer.
    """
    deadline, told = time.monotonic() + ENDING_WAIT_S, False
    while True:
        queued = _in_queues(jobs, launcher)
        ending = [info.job_id for info in queued.values() if info.state == "ending"]
        if not ending or STOP or time.monotonic() > deadline:
            return queued
        if not told:
            _tell(f"{_jobs(ending)} on the way out of the queue: waiting up to {ENDING_WAIT_S:.0f} s for the end")
            told = True
        time.sleep(ENDING_POLL_S)


def _in_queues(jobs: Sequence[Composed], launcher: Any) -> dict[Path, Any]:
    """What this launcher's scheduler says, and for a run that was submitted by another launcher, that one's."""
    try:
        queued: dict[Path, Any] = launcher.jobs([job.run_dir for job in jobs])
    except OSError as error:
        raise UserError(f"cannot tell which runs are queued already ({error}): nothing was started") from None
    mine = f"{type(launcher).__module__}.{type(launcher).__qualname__}"
    runs = [RunDir(job.run_dir) for job in jobs if finished_at(RunDir(job.run_dir)) < job.config.train.steps]
    others, silent = queue.jobs([run for run in runs if queue.launcher_of(run) not in (None, mine)])
    if silent:
        raise UserError(
            f"cannot tell which runs are queued already ({'; '.join(silent)}): give the command where the scheduler "
            f"answers, or remove job.json from the runs whose jobs are gone"
        )
    return {path: info for path, info in {**others, **queued}.items() if info.live}


def _jobs(ids: Sequence[str]) -> str:
    return f"job {ids[0]} is" if len(ids) == 1 else f"{len(ids)} jobs are"


def _plan(job: Composed, queued: Any, retry_failed: bool, held: bool = False) -> Plan:
    """What is to be done about a run; `held`: by this command."""
    run = RunDir(job.run_dir)
    if queued is not None:
        return Plan(job, "live", f"{queued.state}, job {queued.job_id}", [])
    if not held and (holder := _holder(run)):
        return Plan(job, "live", f"running, {holder}", [])
    if not run.config.exists():
        _check_place(run)
        return Plan(job, "new", "new", [])
    changes = differences(load_plain(run.path), job.plain)
    _check_changes(job, changes)
    done = finished_at(run)
    if done >= job.config.train.steps:
        return Plan(job, "finished", f"finished, all {done} steps", changes)
    status = status_of(run)
    state = status.get("state")
    if state in ("failed", "crash loop") and not retry_failed:
        reason = status.get("reason") or status.get("cause") or "see its logs"
        return Plan(job, "failed", f"{state} ({reason}); launcher.retry_failed=true starts it again", changes)
    return Plan(job, "unfinished", f"goes on from step {max(run.checkpoint_steps(), default=0)}", changes)


def _check_place(run: RunDir) -> None:
    """Refuse a directory that others' runs are made in: as a run it would hide them.

    Raises:
        UserError: it has a run in it.
    """
    children = [RunDir(child) for child in run.path.iterdir()] if run.path.is_dir() else []
    inside = [child.path.name for child in children if child.config.exists() and child.code.exists()]
    if inside:
        raise UserError(
            f"{run.path} holds runs ({inside[0]}): give run.root={_shown(run.path)} to make one more in it, "
            "or another run.dir"
        )


def _holder(run: RunDir) -> str | None:
    """Who holds the lease of the run, if it certainly lives; in doubt the attempt itself waits and sees."""
    found = current(run.lease)
    if found is None or "pid" not in found[1]:
        return None
    return name_of(found[1]) if judge(found[1], this_process()) == "alive" else None


def _check_changes(job: Composed, changes: Sequence[Difference]) -> None:
    """Refuse what cannot be changed in a run that exists.

    Raises:
        UserError: all such changes, one a line.
    """
    fixed = [change for change in changes if change.kind == "fixed"]
    data = [change for change in changes if change.kind == "data" and not job.config.run.allow_data_change]
    lines = [
        f"{change} cannot be changed in the run {job.run_dir}: keep the old value, or choose another run.dir"
        for change in fixed
    ] + [
        f"{change} changes which data comes next in the run {job.run_dir}: keep the old value, "
        "add run.allow_data_change=true, or choose another run.dir"
        for change in data
    ]
    if lines:
        raise UserError("\n".join(lines))


@contextmanager
def _submitting(jobs: Sequence[Composed]) -> Iterator[Sequence[Composed]]:
    """Be the only command that submits these runs, from the second look at them until their job ids are noted.

    Raises:
        LockedError: another command submits one of them, and does not come to an end.
        UserError: a run directory cannot be written.
    """
    with ExitStack() as held:
        # In the order of their names: two sweeps that share runs must not wait for each other.
        for job in sorted(jobs, key=lambda job: job.run_dir):
            held.enter_context(
                Lease.await_turn(
                    RunDir(job.run_dir).submission,
                    None,
                    job.config.run.lease_timeout_s,
                    SUBMISSION_WAIT_S,
                    asked_to_stop=lambda: STOP,
                    report=_tell,
                )
            )
        yield jobs


def _tell(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _carry_out(plans: Sequence[Plan], launcher: Any, single: bool) -> int:
    """Freeze the configs and launch; the exit status."""
    for plan in plans:
        if not (single and plan.starts) or plan.changes:
            print(f"{_shown(plan.job.run_dir)}: {plan.words}", flush=True)
        for change in plan.changes if plan.starts else []:
            if change.kind != "free" or change.key == "train.steps":
                print(f"  {change}", flush=True)
    left = ExitStatus.FAILED if any(plan.state == "failed" for plan in plans) else ExitStatus.FINISHED
    starting = [plan.job for plan in plans if plan.starts]
    if not starting:
        return int(left)
    run_dirs = [job.run_dir for job in starting]
    if launcher.dry_run:
        print(launcher.preview(run_dirs))
        return 0
    _freeze(starting)
    return _launch(launcher, run_dirs, single) or int(left)


def _shown(path: Path) -> str:
    """`path` as one would type it here."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _freeze(jobs: Sequence[Composed]) -> None:
    """Write config.yaml and code.json of every job.

    Raises:
        UserError: the file system refuses.
    """
    code = capsule.record()
    for job in jobs:
        run = RunDir(job.run_dir)
        try:
            run.path.mkdir(parents=True, exist_ok=True)
            for change in capsule.changed_since(run.path):
                print(f"  the code is not what this run had last: {change}", flush=True)
            capsule.write(run.code, code, job.overrides)
            # Last: a directory with a config is a run.
            write_atomic(run.config, job.text)
        except OSError as error:
            raise UserError(_unusable(run.path, "written", error)) from None


def _unusable(path: Path, verb: str, error: OSError) -> str:
    reason = error.strerror or error
    return f"the run directory {path} cannot be {verb} ({reason}): mend that, or choose another by run.root or run.dir"


def _launch(launcher: Any, run_dirs: list[Path], single: bool) -> int:
    if STOP and not single:
        print(f"interrupted ({STOP.name}): nothing was started", file=sys.stderr)
        return int(ExitStatus.INTERRUPTED)
    if not single:
        # The runs are elsewhere: a signal is meant for this command.
        for signum in STOP_SIGNALS:
            signal.signal(signum, signal.default_int_handler if signum == signal.SIGINT else signal.SIG_DFL)
    try:
        return int(launcher.launch(run_dirs, ATTEMPT))
    except KeyboardInterrupt:
        return 128 + int(signal.SIGINT)


def _pause() -> None:
    time.sleep(0.05)


def _follow_rank_0(job: Composed, launcher: Any) -> int:
    """Under torchrun: rank 0 alone decides and writes. A stale config of an earlier launch is not taken."""
    run = RunDir(job.run_dir)
    deadline = time.monotonic() + RANK_TIMEOUT_S
    if finished_at(run) >= job.config.train.steps:
        return int(ExitStatus.FINISHED)
    while not (run.config.exists() and run.config.read_text() == job.text):
        if time.monotonic() > deadline:
            raise UserError(f"rank 0 did not freeze {run.config} within {RANK_TIMEOUT_S:g} s: see what it said")
        _pause()
    return int(launcher.launch([job.run_dir], ATTEMPT))
