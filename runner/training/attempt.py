"""One attempt at a run: acquire the lease, open the session, train, record how it ended.

`python -m runner.training.attempt RUN_DIR` makes an attempt at an existing run; the launchers call `attempt`. Torch is
imported only once it is clear that there is something to train.
"""

from __future__ import annotations

import os
import sys
import traceback
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from runner.contracts import Job
from runner.errors import ExitStatus, PeerError, SupersededError, UserError
from runner.rundir.attempt_log import TIME_LIMIT, AttemptLog, finished_at
from runner.rundir.lease import Lease, acquire_for_job
from runner.rundir.paths import RunDir
from runner.rundir.provenance import code_changes
from runner.system import files
from runner.system.distributed import World
from runner.system.signals import STOP
from runner.training.job import LocalJob
from runner.training.peers import report_failure, reported_failure

if TYPE_CHECKING:
    from runner.config.schema import Config


def attempt(run_dir: str | os.PathLike[str], job: Job | None = None, lease: Lease | None = None) -> int:
    """Resume the run in `run_dir` until it is finished or asked to stop; the exit status.

    Errors are printed and recorded, not raised: the status says which kind it was (`ExitStatus`).

    Args:
        run_dir: a run directory with a frozen config.
        job: the job that this process runs in; None: a process started by hand.
        lease: that of the run directory if the caller holds it; released at the end.
    """
    STOP.install()
    job = job or LocalJob()
    if job.early_signal is not None and STOP.signum is None:
        STOP.signum = job.early_signal
    run = RunDir(Path(run_dir).absolute())
    world = World()
    try:
        world = World.from_environment()
        return int(_attempt(run, job, world, lease))
    except UserError as error:
        if world.is_main:
            _print_error("\n".join(f"error: {line}" for line in str(error).splitlines()))
        elif not error.everywhere:
            _print_error(f"error (rank {world.rank}): {error}")
        if (isinstance(error, PeerError) and not error.reported) or (error.everywhere and not world.is_main):
            job.yield_verdict()
        return int(error.status)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        _print_error(f"error: {error.strerror or error}:{where} (run directory {run.path})")
        return int(ExitStatus.FAILED)
    except Exception as error:  # noqa: BLE001 a bug, before or after the attempt was in the attempt log
        _print_traceback(error)
        return int(ExitStatus.FAILED)


def _attempt(run: RunDir, job: Job, world: World, held: Lease | None) -> ExitStatus:
    from runner.config.frozen import load

    config = load(run.path)
    if world.size > 1:
        from runner.training.build import choose_device

        world.start(choose_device(config.train.device, world))
    try:
        with _leased(run, job, world, config, held) as lease:
            return _Attempt(run, job, world, config, lease).make()
    finally:
        with suppress(RuntimeError):  # of a group that has lost a rank; how this attempt ended is settled
            world.stop()


def _leased(
    run: RunDir, job: Job, world: World, config: Config, held: Lease | None
) -> AbstractContextManager[Lease | None]:
    """The lease of the run directory on rank 0, nothing on the others; released at the end."""
    lease = held

    def acquire() -> None:
        nonlocal lease
        lease = lease or acquire_for_job(run, job, config.run.lease_timeout_s, _print_error)

    world.run_on_main(acquire)
    return lease or nullcontext()


@dataclass
class _Attempt:
    """An attempt under its lease; `lease` and `log` are on rank 0 only."""

    run: RunDir
    job: Job
    world: World
    config: Config
    lease: Lease | None
    log: AttemptLog | None = None

    def make(self) -> ExitStatus:
        """Train, and record how it ended, whatever happens."""
        if self.world.run_on_main(self._begin):
            return ExitStatus.FINISHED
        try:
            return self._train()
        except SupersededError:
            raise  # the records belong to the newer attempt
        except PeerError as error:
            reported = reported_failure(self.world)
            failure = PeerError(reported or str(error))
            failure.reported = reported is not None
            self._end("crash", ExitStatus.FAILED, str(failure))
            raise failure from error
        except UserError as error:
            if not error.everywhere:
                report_failure(self.world, str(error))
            self._end("crash loop" if error.status == ExitStatus.CRASH_LOOP else "failed", error.status, str(error))
            raise
        except Exception as error:  # noqa: BLE001 a bug in a user's model, say
            _print_traceback(error)
            reason = f"{type(error).__name__}: {error}"
            report_failure(self.world, reason)
            self._end("crash", ExitStatus.FAILED, reason)
            return ExitStatus.FAILED

    def _begin(self) -> bool:
        """Open the attempt log, unless the run is finished already; whether it is."""
        steps = self.config.train.steps
        done = finished_at(self.run)
        if done >= steps:
            self.job.on_started()
            _print(f"finished: {self.run.path} has all its {done} steps")
            return True
        check_fence = self.lease.check_fence if self.lease else None
        log = AttemptLog.begin(self.run, self.job.identity(), steps, self.job.cause_of_loss, check_fence)
        log.auto_restarts = self.job.auto_restarts
        self.log = log
        self.job.on_started()
        if log.earlier or self.job.auto_restarts:  # a job may wait in the queue for days
            self._compare_code(log)
        return False

    def _compare_code(self, log: AttemptLog) -> None:
        """Report and record changes of the code since the run was submitted."""
        changes = code_changes(self.run.path)
        if changes:
            log.note(code_changed=changes)
            _print_error("\n".join(f"warning: the code changed since the submission: {change}" for change in changes))

    def _train(self) -> ExitStatus:
        job, world, log = self.job, self.world, self.log
        if job.auto_restarts:
            world.run_on_main(lambda: log.check_crash_loop(job.max_timeouts) if log else None)
            if log:
                # At once, and not after the save: the job may be killed before that is done.
                STOP.on_first_signal(self._note_cause)
        if any(world.gather(bool(STOP))):  # no time to build what would not be used
            return self._interrupt(max(self.run.checkpoint_steps(), default=0))
        from runner.training.session import Session

        session = Session.open(self.run, self.config, world, log, self.lease)
        if session.train(self.config.train.steps):
            STOP.wait_for_listener()  # a signal at the last moment changes nothing any more
            if world.is_main:
                self._record_finish()
            return ExitStatus.FINISHED
        return self._interrupt(session.step)

    def _note_cause(self, signum: int) -> None:
        assert self.log is not None
        with suppress(SupersededError):
            self.log.note(cause=self.job.cause(signum))

    def _record_finish(self) -> None:
        """Write the completion mark last of all."""
        assert self.log is not None
        steps = self.config.train.steps
        self.log.end("finished", 0)
        files.write_json(self.run.finished, {"steps": steps}, check=self.log.check_fence)
        _print(f"finished: {steps} steps, results in {self.run.path}")

    def _interrupt(self, step: int) -> ExitStatus:
        """After a signal and the save at `step`: record the cause and requeue the job if needed."""
        if not self.world.is_main:
            self.job.yield_verdict()
        return self.world.run_on_main(lambda: self._record_interrupt(step))

    def _record_interrupt(self, step: int) -> ExitStatus:
        log, job = self.log, self.job
        assert log is not None
        STOP.wait_for_listener()
        cause = log.record.get("cause") or job.cause(STOP.signum or 0)
        if cause == TIME_LIMIT and job.max_timeouts is not None and log.timeouts() >= job.max_timeouts:
            reason = (
                f"{log.timeouts()} time limits in a row without a new checkpoint (launcher.max_timeouts="
                f"{job.max_timeouts}): raise launcher.time, or save more often (checkpoint.every_steps)"
            )
            self._end("timeouts", ExitStatus.FAILED, reason)
            _print_error(f"error: {reason}")
            return ExitStatus.FAILED
        log.announce_end(cause)
        cause = job.requeue_if_needed(cause)
        self._end(cause, ExitStatus.INTERRUPTED)
        saved = max(self.run.checkpoint_steps(), default=0)
        where = f"saved at step {saved}" if step else "stopped before the first step"
        if saved != step:
            where = f"stopped at step {step}, last saved at step {saved}"
        signal = STOP.name or "a signal to another rank"
        _print(f"{cause} ({signal}): {where}; rerun the command to resume")
        return ExitStatus.INTERRUPTED

    def _end(self, cause: str, status: ExitStatus, reason: str | None = None) -> None:
        if self.log:
            try:
                self.log.end(cause, int(status), reason)
            except OSError as error:  # a full disk must not hide the reason of the end
                _print_error(f"warning: the end of this attempt could not be recorded: {error}")


def _print(message: str) -> None:
    with suppress(OSError):  # a job's log may be on the disk that is full
        print(message, flush=True)


def _print_error(message: str) -> None:
    with suppress(OSError):
        print(message, file=sys.stderr, flush=True)


def _print_traceback(error: Exception) -> None:
    with suppress(OSError):
        traceback.print_exception(error)


def main(arguments: list[str]) -> int:
    """`python -m runner.training.attempt RUN_DIR`."""
    if len(arguments) != 1 or not RunDir(Path(arguments[0])).config.is_file():
        found = " ".join(arguments) or "nothing"
        _print_error(f"error: expected one run directory with a config.yaml, got {found}")
        return int(ExitStatus.USAGE)
    return attempt(arguments[0])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
