"""Make one attempt at a run: acquire the lease, open the session, train, and record how the attempt ended.

`python -m runner.training.attempt RUN_DIR` makes an attempt at an existing run. Launchers call the function `attempt`.
Torch is imported only if there are steps left to train.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from exactdata import interrupts
from runner.config.finished import has_finished
from runner.contracts import Job
from runner.data.messages import words_of_config
from runner.errors import (
    CrashLoopError,
    DivergedError,
    ExitStatus,
    FileError,
    PeerError,
    SupersededError,
    TimeoutsError,
    UnsavedError,
    UserError,
    line_of_user,
)
from runner.rundir.attempt_log import (
    DIVERGED,
    EARLY,
    PAUSED,
    TIME_LIMIT,
    TIMEOUTS,
    UNSAVED,
    AttemptLog,
    Finish,
    check_latest,
    incomplete_records,
    insist,
)
from runner.rundir.lease import Lease, acquire_for_job, is_continued
from runner.rundir.origin import search_modules, working_in
from runner.rundir.paths import RunDir
from runner.rundir.provenance import changes_at_start, check_config, code_changes
from runner.rundir.time_account import TimeAccount
from runner.rundir.trust import check_trusted
from runner.system import files, processes
from runner.system.distributed import World
from runner.system.signals import STOP
from runner.system.terminal import flush_output, outlive_terminal, printable_lines
from runner.training import signalled
from runner.training.job import LocalJob
from runner.training.ranks.hang_watch import Hang, HangWatch
from runner.training.ranks.peer_watch import LOOKS, MAX_INTERVAL_S, PeerWatch
from runner.training.ranks.peers import LEAVE_S, STOPPED, leave_ranks, report_failure, report_stop, reported_failure

if TYPE_CHECKING:
    from runner.config.schema import Config
    from runner.training.session import Session


# The cause of an attempt's end, by type of error. For any other UserError, the cause is "failed".
CAUSES = {CrashLoopError: "crash loop", TimeoutsError: TIMEOUTS, DivergedError: DIVERGED, UnsavedError: UNSAVED}


@dataclass(frozen=True)
class Pause:
    """Options of a search for an attempt.

    Attributes:
        step: step at which the attempt ends. If None, it ends at the end of the run.
        keep: number of checkpoints to keep until the run resumes. If None, the config's number is kept.
        metric: name of the result that the search compares. If it is an evaluation's result, its existence is checked
            before the first step.
    """

    step: int | None = None
    keep: int | None = None
    metric: str | None = None


def attempt(
    run_dir: str | os.PathLike[str], job: Job | None = None, lease: Lease | None = None, pause: Pause | None = None
) -> int:
    """Resume the run in `run_dir` until it finishes or is asked to stop. Return the exit status.

    Errors are printed and recorded, not raised. The exit status reports their kind (see `ExitStatus`).

    Args:
        run_dir: a run directory with a frozen config.
        job: the job that this process runs in, or None for a process started by hand.
        lease: lease of the run directory, if the caller holds it. It is released at the end.
        pause: options of a search, such as the step at which to evaluate and end. If None, the run trains to its end.
    """
    STOP.install()
    job, run = job or LocalJob(), RunDir(Path(run_dir).absolute())
    return carry_out(run.path, job, lambda world: _attempt(run, job, world, lease, pause))


def carry_out(run_dir: Path, job: Job, make: Callable[[World], ExitStatus]) -> int:
    """Call `make` on this rank of a job, print any error, and return the exit status.

    Install the signal handlers before calling this.
    """
    interrupts.requested = lambda: bool(STOP)
    if job.early_signal is not None and STOP.signum is None:
        STOP.signum = job.early_signal
    status = _status_of(run_dir, job, make)
    job.record_verdict()  # before `leave_ranks`, which may end this process
    leave_ranks(status)  # call this here, where no object refers to the model any more
    return status


def _status_of(run_dir: Path, job: Job, make: Callable[[World], ExitStatus]) -> int:
    world = World()
    try:
        world = World.from_environment()
        return int(make(world))
    except UserError as error:
        if world.is_main:
            print_error("\n".join(f"error: {line}" for line in str(error).splitlines()))
        elif not error.everywhere:
            print_error(f"error (rank {world.rank}): {error}")
        if (isinstance(error, PeerError) and not error.reported) or (error.everywhere and not world.is_main):
            job.yield_verdict()
        return int(error.status)
    except OSError as error:
        where = f" {error.filename}" if error.filename else ""
        print_error(f"error: {error.strerror or error}:{where} (run directory {run_dir})")
        return int(ExitStatus.FAILED)
    except Exception as error:  # noqa: BLE001 a bug before the attempt log opens or after it closes
        _print_traceback(error)
        return int(ExitStatus.FAILED)


def _attempt(run: RunDir, job: Job, world: World, held: Lease | None, pause: Pause | None) -> ExitStatus:
    with beginning(job):
        from runner.config.frozen import load

        check_trusted(run)
        check_config(run)
        config = load(run.path)
        search_modules(run, config.run.directory)
    with working_in(config.run.directory):
        return _Attempt(run, job, world, config, pause).make(held)


@contextmanager
def beginning(job: Job) -> Iterator[None]:
    """Let the job restart if the `with` block fails for a transient reason before the attempt log is open.

    Examples are a full disk, or a module that cannot be imported from it. Such a failure cannot be recorded in the run
    directory. Instead, this calls `job.yield_verdict`, and the job restarts, up to its limit of failed starts.
    """
    try:
        yield
    except (UserError, OSError, ImportError) as error:
        _yield_if_passing(job, error)
        raise


def _yield_if_passing(job: Job, error: UserError | OSError | ImportError) -> bool:
    """Yield the job's verdict if `error` may be a transient file system failure. Return True if the job restarts.

    The Python environment may be on the same file system. So an import that fails now may succeed at the next start.
    """
    if isinstance(error, ImportError):
        return job.yield_verdict(f"{type(error).__name__}: {error}")
    cause = error if isinstance(error, OSError) else error.__cause__
    if not isinstance(cause, OSError) or cause.errno not in files.PASSING:
        return False
    where = f": {cause.filename}" if cause.filename else ""
    return job.yield_verdict(str(error) if isinstance(error, UserError) else f"{cause.strerror}{where}")


def _leased(
    run: RunDir, job: Job, world: World, config: Config, held: Lease | None
) -> AbstractContextManager[Lease | None]:
    """Return the lease of the run directory on rank 0, and a null context on the other ranks.

    A lease that is acquired here is released at the end of the context.
    """
    lease = held

    def acquire() -> None:
        nonlocal lease
        lease = lease or acquire_for_job(run, job, config.run.lease_timeout_s, print_error)
        try:
            check_latest(run, job.identity())
        except BaseException:
            lease.release()
            raise

    with beginning(job):
        world.run_on_main(acquire)
    return lease if lease and not held else nullcontext(held)


@dataclass
class _Attempt:
    """One attempt under its lease. Only rank 0 has `lease` and `log`."""

    run: RunDir
    job: Job
    world: World
    config: Config
    pause: Pause | None = None
    lease: Lease | None = None
    log: AttemptLog | None = None
    session: Session | None = None
    requeued: bool = False
    """True if the session could not be opened for a transient reason, so that the job restarts."""

    def __post_init__(self) -> None:
        self._ends = threading.Lock()  # held by the watch thread that ends this process
        self.account = TimeAccount(self.job.began())
        train, checkpoint = self.config.train, self.config.checkpoint
        if self.pause is not None and self.pause.keep is not None:
            kept = replace(checkpoint, keep_last=min(checkpoint.keep_last, self.pause.keep))
            self.config = replace(self.config, checkpoint=kept)
        self.watch = PeerWatch(
            self.world,
            train.peer_timeout_s,
            lambda: self.session.step if self.session else None,
            self._end_from_watch,
            MAX_INTERVAL_S if train.hang_timeout_s is None else train.hang_timeout_s / LOOKS,
        )

    def make(self, held: Lease | None) -> ExitStatus:
        """Join the other ranks, acquire the lease unless it is `held`, train, and record how the attempt ended."""
        self.watch.start()
        try:
            self._join_ranks()
            with _leased(self.run, self.job, self.world, self.config, held) as lease:
                if lease:
                    self.run, self.lease = replace(self.run, guard=lease.guard), lease
                return self._make()
        except SupersededError:
            if self.lease and not is_continued(self.run.lease, self.job.identity()):
                self.job.yield_verdict("its lease was taken by a process that does not continue the run")
            raise
        finally:
            self.watch.stop()

    def _join_ranks(self) -> None:
        """Join the process group, if there are several ranks.

        Raises:
            PeerError: another rank did not join or does not respond.
        """
        if self.world.size == 1:
            return
        with beginning(self.job):
            from runner.training.model.build import choose_device

        try:
            self.world.start(choose_device(self.config.train.device, self.world))
        except PeerError as error:
            raise PeerError(self.watch.silent() or self.watch.absent() or str(error)) from error

    def _make(self) -> ExitStatus:
        """Train, and record how the attempt ended, even after an error."""
        with beginning(self.job):
            finished = self.world.run_on_main(self._begin)
        if finished:
            return ExitStatus.FINISHED
        try:
            try:
                with words_of_config():
                    return self._train()
            finally:
                self.watch.stop()  # from here on, this thread decides how the attempt ends
        except SupersededError:
            raise  # the records belong to the newer attempt
        except PeerError as error:
            reported = self.watch.reported or reported_failure(self.world)
            if reported == STOPPED:
                return self._break_off()
            failure = PeerError(reported or self.watch.silent() or str(error))
            failure.reported = reported is not None
            requeued = reported is None and self.job.yield_verdict()
            self._end("crash", ExitStatus.FAILED, str(failure), requeued)
            raise failure from error
        except UserError as error:
            self._tell_ranks(error, str(error))
            self._end(CAUSES.get(type(error), "failed"), ExitStatus(error.status), str(error), self.requeued)
            raise
        except Exception as error:  # noqa: BLE001 e.g. a bug in a user's model
            with suppress(OSError):
                if self.lease:
                    self.lease.check_fence()  # a newer attempt may have deleted this attempt's files
            if signalled.is_stop(error):
                print_error(f"warning: {signalled.line(error)}")
                report_stop(self.world)
                return self._break_off()
            _print_traceback(error)
            reason = f"{type(error).__name__}: {error}{line_of_user(error)}"
            print_error(f"error: {reason}")
            self._tell_ranks(error, reason)
            self._end("crash", ExitStatus.FAILED, reason, self.requeued)
            return ExitStatus.FAILED

    def _tell_ranks(self, error: Exception, reason: str) -> None:
        """Report the failure to the other ranks if this rank decides how the job ends."""
        everywhere = isinstance(error, UserError) and error.everywhere
        if not everywhere and not self.requeued:
            report_failure(self.world, reason)

    def _begin(self) -> bool:
        """Open the attempt log. Return True if the run is already finished."""
        steps, finish = self.config.known_steps, Finish.of(self.run)
        if has_finished(self.run, self.config, finish):
            done = finish.steps
            if self.lease:
                self.lease.check_fence()  # after has_finished: a newer attempt may have finished the run
            self.job.on_started()
            what = f"ended early at step {done}" if finish.early else f"has all its {done} steps"
            _print(f"finished: {self.run.path} {what}")
            if lack := incomplete_records(self.run, done):
                print_error(f"warning: {lack}")
            return True
        if finish.early is not None:
            self.run.check_guard()
            files.remove(self.run.finished)  # with the current settings, the run does not end early
        identity = {**self.job.identity(), "ranks": self.world.size}
        left = self.lease.carried() if self.lease else {}
        log = AttemptLog.begin(self.run, identity, steps, self.job.cause_of_loss, self.account, left)
        if self.lease:
            self.lease.carried = log.sign
        log.auto_restarts = self.job.auto_restarts
        self.log = log
        if log.earlier or self.job.auto_restarts:
            _print(log.title)
        self.job.on_started()
        if self.job.auto_restarts:  # in a thread, because the scheduler may be slow to answer
            threading.Thread(target=self._note_wait, args=(log,), name="queue", daemon=True).start()
        if log.earlier or self.job.auto_restarts:  # a job may wait in the queue for days
            self._compare_code(log)
        return False

    def _note_wait(self, log: AttemptLog) -> None:
        """Record how long the job waited for this start."""
        with suppress(SupersededError):
            log.note(**self.job.waited())

    def _compare_code(self, log: AttemptLog) -> None:
        """Report and record code changes since the submission. Also record the changes that the command reported."""
        try:
            changes = code_changes(self.run.path)
            told = changes_at_start(self.run.path, log.earlier[-1].get("started") or 0) if log.earlier else []
        except OSError as error:  # nothing depends on this warning
            print_error(f"warning: the code cannot be compared with that of the submission: {error}")
            return
        if told or changes:
            log.note(code_changed=list(dict.fromkeys([*told, *changes])))
        if changes:
            print_error("\n".join(f"warning: the code changed since the submission: {change}" for change in changes))

    def _train(self) -> ExitStatus:
        job, world, log = self.job, self.world, self.log
        if job.auto_restarts:
            world.run_on_main(lambda: log.check_budgets(job.max_timeouts) if log else None)
            if log:
                # Record the cause immediately, because the job may be killed before the save is done.
                STOP.listen(self._note_cause, later=job.cause)  # later signals may leave less time
        if any(world.gather(bool(STOP))):  # do not spend time on a session that would not be used
            return self._interrupt(self._saved() or 0)
        self.session = session = self._open_session()
        self.watch.show_open()
        with self._hang_watch(session):
            pause = () if self.pause is None else (self.pause.step, self.pause.metric)
            finished = session.train(self.config.known_steps, *pause)
        if finished and pause and session.paused:
            STOP.wait_for_listener()
            if log:
                log.end(PAUSED, 0, f"paused by a search at step {session.step}")
            _print(f"paused at step {session.step} of {session.steps}")
            return ExitStatus.FINISHED
        if finished:
            STOP.wait_for_listener()  # a signal after this has no effect
            if world.is_main:
                self._record_finish()
            return ExitStatus.FINISHED
        return self._interrupt(session.step)

    def _hang_watch(self, session: Session) -> HangWatch:
        def end(hang: Hang) -> None:
            self._end_from_watch(hang.reason, "hang", hang.stacks)

        timeout_s = self.config.train.hang_timeout_s
        return HangWatch(self.world, timeout_s, session.account, lambda: session.step, self.watch, end)

    def _open_session(self) -> Session:
        try:
            from runner.training.session import Session

            return Session.open(self.run, self.config, self.world, self.log, self.lease)
        except (UserError, OSError, ImportError) as error:  # the disk may have filled since the attempt log was opened
            self.requeued = _yield_if_passing(self.job, error)
            raise

    def _note_cause(self, signum: int) -> None:
        assert self.log is not None
        with suppress(SupersededError):
            self.log.note(cause=self.job.cause(signum))

    def _record_finish(self) -> None:
        """Record the end of the run. The completion mark is written last.

        Raises:
            FileError: the mark could not be written after several tries, or metrics were lost.
        """
        assert self.log is not None
        assert self.session is not None
        self.watch.stop()
        if self.log.lost_records:
            raise FileError(self.log.lost_records)
        # `steps` exceeds train.steps if you have lowered train.steps below the step that the run had reached.
        steps, epochs, guard = self.session.step, self.config.train.epochs, self.run.guard
        early = self.session.early_end
        mark: dict[str, Any] = {"steps": steps}
        if early is not None:
            mark |= {EARLY: early.to_json()}
        elif epochs is not None:
            mark |= {"epochs": epochs}
        # The last save may have been renamed without a successful sync of its directory.
        insist(lambda: files.fsync_dir(self.run.checkpoints), self.run.checkpoints)
        self.log.end("finished", 0, early.reason if early else None)
        try:
            insist(lambda: files.write_json(self.run.finished, mark, guard=guard), self.run.finished)
        except FileError as error:
            if not self._is_marked(mark):
                raise
            # Only the sync of the directory failed. Other processes see a finished run and do not restart it, so the
            # run's records must not report a failure. If a power loss removes the mark, a rerun writes it again.
            message = f"{self.run.finished} may be lost at a power failure ({error.__cause__})"
            print_error(f"warning: {message}")
            self.log.warn(message)
        what = f"finished: {steps} steps,"
        if early:
            what = f"finished early, at step {steps} of {self.session.steps}: {early.reason};"
        _print(f"{what} results in {self.run.path}")

    def _is_marked(self, mark: dict[str, Any]) -> bool:
        """Check whether the completion mark exists with this content."""
        try:
            return bool(insist(lambda: files.read_object(self.run.finished), self.run.finished) == mark)
        except FileError:
            return False

    def _interrupt(self, step: int) -> ExitStatus:
        """Record the cause of the signal after the save at `step`, and requeue the job if needed."""
        if not self.world.is_main:
            self.job.yield_verdict()
        return self.world.run_on_main(lambda: self._record_interrupt(step))

    def _break_off(self) -> ExitStatus:
        """End after a signal during a step that cannot be completed. The run resumes from the last saved state.

        The ranks may be at different points of the step, so they communicate no more. Each rank exits independently.
        """
        if not self.world.is_main:
            self.job.yield_verdict()
            return ExitStatus.INTERRUPTED
        return self._record_interrupt(self.session.step if self.session else self._saved() or 0)

    def _record_interrupt(self, step: int) -> ExitStatus:
        log, job = self.log, self.job
        assert log is not None
        self.watch.stop()
        STOP.wait_for_listener()
        cause = log.record.get("cause") or job.cause(STOP.signum or 0)
        if cause == TIME_LIMIT:
            with suppress(FileError):  # unreadable disk: the next start of the job checks again
                log.check_timeouts(job.max_timeouts)
        log.announce_end(cause)
        cause = job.requeue_if_needed(cause)
        self._end(cause, ExitStatus.INTERRUPTED)
        saved = self._saved()
        if saved is None:
            where = f"stopped at step {step}"
        elif saved != step:
            where = f"stopped at step {step}, last saved at step {saved}"
        else:
            where = f"saved at step {saved}" if step else "stopped before the first step"
        signal = STOP.name or "a signal to another rank"
        restarts = job.auto_restarts and log.status.get("state") == "requeued"
        then = "the requeued job resumes it" if restarts else "rerun the command to resume"
        _print(f"{cause} ({signal}): {where}; {then}")
        return ExitStatus.INTERRUPTED

    def _saved(self) -> int | None:
        """Return the step of the newest checkpoint, 0 if there is none, or None if the disk fails repeatedly."""
        try:
            return insist(self.run.newest_step, self.run.checkpoints)
        except FileError:
            return None

    def _end_from_watch(
        self, reason: str, cause: str = "crash", stacks: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        """Close the records of an attempt in which a rank hangs, and end this process.

        The watch thread calls this, because the main thread may be blocked forever. The job handles the failure like a
        lost rank.
        """
        self._ends.acquire()  # if another watch thread holds it, that thread ends this process
        status = ExitStatus.FAILED
        try:
            with suppress(OSError):
                processes.end_after(LEAVE_S, int(status))  # a disk may hang too
            if stacks:
                assert self.log is not None
                number = self.log.record["attempt"]
                reason = f"{reason}; stacks of all threads: {self.run.stacks(number, '*')}"
            print_error(f"error: {reason}" if self.world.is_main else f"error (rank {self.world.rank}): {reason}")
            requeued = self.job.yield_verdict()
            try:
                self._write_stacks(stacks)
                self._end(cause, status, reason, requeued)  # before closing the recorder, because a logger may hang too
                if self.session:
                    self.session.recorder.close()
            except SupersededError as error:  # the records belong to the newer attempt
                print_error(f"error: {error}")
                status = error.status
            if self.lease:
                self.lease.release()
        finally:
            processes.end_now(int(status))

    def _write_stacks(self, stacks: Mapping[int, str]) -> None:
        """Write the stack traces of hanging ranks to the files that `reason` names, or print them if that fails."""
        for rank, text in stacks.items():
            assert self.log is not None
            path = self.run.stacks(self.log.record["attempt"], rank)
            try:
                self.run.make_dirs(path.parent)
                files.write_atomic(path, text, guard=self.run.guard)
            except OSError as error:
                print_error(f"warning: {path} cannot be written ({error.strerror or error}):\n{text}")

    def _end(self, cause: str, status: ExitStatus, reason: str | None = None, requeued: bool = False) -> None:
        """Record the end of the attempt. `requeued` marks a failed attempt whose job restarts."""
        if self.log:
            try:
                self.log.end(cause, int(status), reason)
                if requeued:
                    self.log.update(state="requeued", force=True)
            except (OSError, FileError) as error:  # a full disk must not hide the reason why the attempt ended
                print_error(f"warning: the end of this attempt could not be recorded: {error}")


def _print(message: str) -> None:
    with suppress(OSError):  # a job's log may be on the disk that is full
        print(message, flush=True)


def print_error(message: str) -> None:
    with suppress(OSError):
        print(printable_lines(message), file=sys.stderr, flush=True)


def _print_traceback(error: Exception) -> None:
    with suppress(OSError):
        traceback.print_exception(error)


def main(arguments: list[str]) -> int:
    """Make an attempt from the command line. A search passes the options of `Pause`."""
    STOP.quiet = processes.end_with_parent()
    outlive_terminal()
    parser = argparse.ArgumentParser(prog="runner.training.attempt")
    parser.add_argument("run", nargs="*")
    for name, kind in (("step", int), ("keep", int), ("metric", str)):
        parser.add_argument(f"--{name}", type=kind)
    options = parser.parse_args(arguments)
    if len(options.run) != 1 or not files.is_file(RunDir(Path(options.run[0])).config):
        found = " ".join(options.run) or "nothing"
        print_error(f"error: expected one run directory with a config.yaml, got {found}")
        return int(ExitStatus.USAGE)
    asked = Pause(options.step, options.keep, options.metric)
    status = attempt(options.run[0], pause=None if asked == Pause() else asked)
    flush_output()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
