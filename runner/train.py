"""One attempt at a run: take the lease, build, restore, loop, leave.

`python -m runner.train RUN_DIR` makes an attempt at an existing run; the launchers call `attempt`.
Torch is imported only once it is clear that there is something to train.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner import turn
from runner.attempts import TIME_LIMIT, AttemptLog, finished_at
from runner.capsule import changed_since
from runner.distributed import World
from runner.errors import ExitStatus, SupersededError, UserError
from runner.files import write_json
from runner.job import Job, LocalJob
from runner.lease import Lease
from runner.run_dir import RunDir
from runner.signals import STOP

if TYPE_CHECKING:
    from runner.schema import Config


def attempt(run_dir: str | os.PathLike[str], job: Job | None = None) -> int:
    """Go on with the run in `run_dir` until it is finished or asked to stop; its exit status.

    Faults are printed and recorded, not raised: the status says which kind it was (`ExitStatus`).
    """
    STOP.install()
    job = job or LocalJob()
    if job.early_signal is not None and STOP.signum is None:
        STOP.signum = job.early_signal
    run = RunDir(Path(run_dir).absolute())
    world = World()
    try:
        world = World.from_environment()
        return int(_attempt(run, job, world))
    except UserError as error:
        if world.is_main:
            _say("\n".join(f"error: {line}" for line in str(error).splitlines()))
        elif error.everywhere:
            job.defer()
        else:
            _say(f"error (rank {world.rank}): {error}")
        return int(error.status)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        _say(f"error: {error.strerror or error}:{where} (run directory {run.path})")
        return int(ExitStatus.FAILED)
    except Exception as error:  # noqa: BLE001 before the attempt is in the books, or after: a rank that did not come
        _crashed(error, job, world)
        return int(ExitStatus.FAILED)


def _attempt(run: RunDir, job: Job, world: World) -> ExitStatus:
    from runner.config import load

    config = load(run.path)
    if world.size > 1:
        from runner.build import choose_device

        world.start(choose_device(config.train.device, world))
    try:
        with _leased(run, job, world, config) as lease:
            return _recorded(run, job, world, config, lease)
    finally:
        world.stop()


def _leased(run: RunDir, job: Job, world: World, config: Config) -> AbstractContextManager[Lease | None]:
    """The lease of the run directory on rank 0, nothing on the others; released at the end."""

    held: list[Lease] = []

    def acquire() -> None:
        held.append(turn.take(run, job, config.run.lease_timeout_s, _say))

    world.on_main(acquire)
    return held[0] if held else nullcontext()


def _say(message: str) -> None:
    with suppress(OSError):  # the log of a job may lie on the disk that is full
        print(message, file=sys.stderr, flush=True)


def _tell(message: str) -> None:
    with suppress(OSError):
        print(message, flush=True)


def _recorded(run: RunDir, job: Job, world: World, config: Config, lease: Lease | None) -> ExitStatus:
    """Run the attempt and write into the books how it ended, whatever happens."""
    log: AttemptLog | None = None

    def begin() -> bool:
        nonlocal log
        log = AttemptLog.begin(run, job.identity(), config.train.steps, lambda record: _explain_loss(job, record))
        log.comes_back = job.auto_restarts
        job.begun()
        if log.earlier or job.auto_restarts:  # a job may wait in the queue for days
            _compare_code(run, log)
        return finished_at(run) >= config.train.steps

    if world.on_main(begin):
        return _finish(run, config, log)
    try:
        if job.auto_restarts:
            world.on_main(lambda: log.check_crash_loop(job.max_timeouts) if log else None)
        if job.auto_restarts and log:
            # At once, and not after the save: the job may be killed before that is done.
            STOP.at_signal(partial(_note_cause, job, log))
        if any(world.gather(bool(STOP))):  # no time for building what would only be left again
            return _leave(run, job, world, log, max(run.checkpoint_steps(), default=0))
        from runner.session import Session

        session = Session.open(run, config, world, log, lease)
        done = session.train(config.train.steps)
        world.on_main(lambda: _check_held(lease))
        if done:
            STOP.settle()  # a signal at the last moment changes nothing any more
            return _finish(run, config, log)
        return _leave(run, job, world, log, session.step)
    except SupersededError:
        raise  # the newer incarnation keeps the books now
    except UserError as error:
        _check_held(lease)
        _end(log, "crash loop" if error.status == ExitStatus.CRASH_LOOP else "failed", error.status, str(error))
        raise
    except Exception as error:  # noqa: BLE001 a bug in a user's model, say: its traceback is shown
        reason = _crashed(error, job, world)
        _check_held(lease)
        _end(log, "crash", ExitStatus.FAILED, reason)
        return ExitStatus.FAILED


def _check_held(lease: Lease | None) -> None:
    """Leave the books to the newer incarnation where there is one.

    Raises:
        SupersededError: there is.
    """
    if lease is not None:
        lease.check()


def _crashed(error: Exception, job: Job, world: World) -> str:
    """Show an error nobody foresaw; what the status says of it.

    A rank that died, or that was stopped for long, shows as a broken connection on the others.
    """
    with suppress(OSError):  # the terminal may be gone
        traceback.print_exception(error)
    text = f"{type(error).__name__}: {error}"
    if world.size > 1 and re.search(r"gloo|NCCL|Dist(Backend|Network|Store)Error|by peer", text):
        job.defer()
        return f"another rank of this job ended, was killed or does not answer: see what it said ({text})"
    return text


def _compare_code(run: RunDir, log: AttemptLog) -> None:
    """Say and record that the code is not the one that the run was submitted with."""
    changes = changed_since(run.path)
    if changes:
        log.note(code_changed=changes)
        _say("\n".join(f"warning: other code than at submission: {change}" for change in changes))


def _note_cause(job: Job, log: AttemptLog, signum: int) -> None:
    log.note(cause=job.cause(signum))


def _explain_loss(job: Job, record: dict[str, Any]) -> str:
    explain = getattr(job, "lost", None)
    return str(explain(record)) if explain else "killed"


def _end(log: AttemptLog | None, cause: str, status: ExitStatus, reason: str | None = None) -> None:
    if log:
        try:
            log.end(cause, int(status), reason)
        except OSError as error:  # a full disk must not hide the reason of the end
            _say(f"warning: the end of this attempt could not be recorded: {error}")


def _finish(run: RunDir, config: Config, log: AttemptLog | None) -> ExitStatus:
    """Write the completion mark last of all."""
    if log is None:
        return ExitStatus.FINISHED
    steps = max(finished_at(run), config.train.steps)
    if finished_at(run) >= steps:
        log.drop()
        _tell(f"finished: {run.path} has all its {finished_at(run)} steps")
        return ExitStatus.FINISHED
    log.end("finished", 0)
    write_json(run.finished, {"steps": steps})
    _tell(f"finished: {steps} steps, results in {run.path}")
    return ExitStatus.FINISHED


def _leave(run: RunDir, job: Job, world: World, log: AttemptLog | None, step: int) -> ExitStatus:
    """After a signal and the save: record the cause and let the job decide whether it comes back."""

    def leave() -> ExitStatus:
        assert log is not None
        STOP.settle()
        cause = log.record.get("cause") or job.cause(STOP.signum or 0)
        if cause == TIME_LIMIT and job.max_timeouts is not None and log.timeouts() >= job.max_timeouts:
            reason = (
                f"{log.timeouts()} time limits in a row without a new checkpoint (launcher.max_timeouts="
                f"{job.max_timeouts}): give more launcher.time, or save more often (checkpoint.every_steps)"
            )
            _end(log, "timeouts", ExitStatus.FAILED, reason)
            _say(f"error: {reason}")
            return ExitStatus.FAILED
        log.leaving(cause)
        cause = job.leave(cause)
        _end(log, cause, ExitStatus.INTERRUPTED)
        saved = max(run.checkpoint_steps(), default=0)
        where = f"saved at step {saved}" if step else "nothing to save yet"
        if saved != step:
            where = f"at step {step}, but the last save is of step {saved}"
        _tell(f"{cause} ({STOP.name or 'a signal to another rank'}): {where}; the same command goes on")
        return ExitStatus.INTERRUPTED

    if not world.is_main:
        job.defer()
    return world.on_main(leave)


def main(arguments: list[str]) -> int:
    """`python -m runner.train RUN_DIR`."""
    if len(arguments) != 1 or not RunDir(Path(arguments[0])).config.is_file():
        _say(f"error: give one run directory with a config.yaml, not {' '.join(arguments) or 'nothing'}")
        return int(ExitStatus.USAGE)
    return attempt(arguments[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
