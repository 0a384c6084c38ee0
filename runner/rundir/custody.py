"""The right to move, remove or pack a whole run: nobody trains it, submits it or waits for it in a queue."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from runner.errors import LockedError, RunDirError, SupersededError, UserError
from runner.rundir import submitted_jobs
from runner.rundir.appender import detach
from runner.rundir.evaluations import submitted
from runner.rundir.find import what_to_pass
from runner.rundir.lease import Lease, describe_holder, read_holder
from runner.rundir.paths import RunDir
from runner.rundir.state import holder_of
from runner.rundir.trust import reading
from runner.system import files

TIMEOUT_S = 30.0


@dataclass
class Custody:
    """Both leases of a run, held: that of the command that submits it, and that of the process that trains it."""

    run: RunDir
    submission: Lease
    lease: Lease

    def check(self) -> None:
        """Check that nobody has taken the run over while this process was suspended, say.

        Raises:
            SupersededError: somebody has.
            OSError: a lease cannot be read.
        """
        self.submission.check_fence()
        self.lease.check_fence()

    @property
    def numbers(self) -> tuple[int, int]:
        """Return the fencing numbers of both leases."""
        return self.submission.fence, self.lease.fence

    def move(self, target: Path) -> None:
        """Rename the run directory, which is at one of the two places at every moment, and durably so afterwards.

        Raises:
            SupersededError: somebody has taken the run over; nothing was changed, or the message states where it is.
            OSError: the file system refused; the run is where it was, or the message states where it is.
        """
        source = self.run.path
        self._rename(target)
        try:
            give_back_if_taken_over(RunDir(target), source, self.numbers)
            for parent in {source.parent, target.parent}:
                files.fsync_dir(parent)
        except OSError as error:
            try:
                self._rename(source)
            except (OSError, SupersededError):
                raise OSError(error.errno, f"{error.strerror}; it is {target} now", str(source)) from error
            raise

    def _rename(self, target: Path) -> None:
        self.check()
        files.rename(self.run.path, target)
        self.run = RunDir(target)
        self.submission.moved(self.run.submission)
        self.lease.moved(self.run.lease)


def give_back_if_taken_over(renamed: RunDir, name: Path, numbers: tuple[int, int]) -> None:
    """Give a run that was renamed its name back if somebody took it over before: after a rename nobody can any more.

    Whoever renames a run may be suspended between the last look at its leases and the rename.

    Args:
        renamed: the run; it may be gone, since another `rm` deletes what the first has renamed.
        name: its path before.
        numbers: the fencing numbers by which it was renamed, see `Custody.numbers`.

    Raises:
        SupersededError: somebody took it over; it has its name back, or the message states where it is.
        OSError: a lease cannot be read.
    """
    for directory, number in zip((renamed.submission, renamed.lease), numbers, strict=True):
        with suppress(FileNotFoundError):
            files.look_anew(directory)
        found = read_holder(directory)
        if found is None or found[0] <= number:
            continue
        where = "nothing was changed"
        try:
            if files.is_taken(name):
                raise FileExistsError(errno.EEXIST, f"there is another {name.name}")
            files.rename(renamed.path, name)
            files.fsync_dir(name.parent)
        except OSError as error:
            where = f"it is {renamed.path} now, and cannot get its name back ({error.strerror or error})"
        raise SupersededError(f"{name} was taken over by {describe_holder(found[1])} before it was renamed: {where}")


@contextmanager
def custody(run: RunDir, report: Callable[[str], None] | None = None) -> Iterator[Custody]:
    """Hold both leases of a run, which has no job in a queue, for as long as the block lasts.

    Args:
        run: its directory; see `run_at`.
        report: receives a message when there is something to wait for.

    Raises:
        RunDirError: the run was moved or removed meanwhile.
        LockedError: the run is live, or has a job in a queue.
        UserError: a scheduler that may have a job of it does not answer, or the directory cannot be written.
    """
    expected = is_run(run)
    with ExitStack() as held:
        # The submission's first: a command that submits the run at this moment waits for it, or is waited for.
        leases = [
            held.enter_context(Lease.acquire(lease, None, TIMEOUT_S, report=report, within=run.path))
            for lease in (run.submission, run.lease)
        ]
        for directory in (run.path, run.checkpoints, run.evaluations):  # what others did before counts from here on
            with suppress(FileNotFoundError, PermissionError):  # there is none, or it is somebody else's
                files.look_anew(directory)
        if expected and not is_run(run):
            raise RunDirError(f"{run.path} was moved or removed meanwhile: rerun the command")
        _check_queue(run)
        detach(RunDir(run.path, leases[1].guard))
        yield Custody(run, *leases)


def check_idle(run: RunDir) -> None:
    """Refuse a run that is certainly live, without writing anything: custody alone can tell for certain that it is not.

    Raises:
        LockedError: the run is live, or has a job in a queue.
        UserError: a scheduler that may have a job of it does not answer.
    """
    with reading(run):
        for lease in (run.lease, run.submission):
            if holder := holder_of(lease):
                raise LockedError(f"{run.path} is in use by {holder}; wait for it, or stop it")
    _check_queue(run)


def _check_queue(run: RunDir) -> None:
    with reading(run):
        ours = [run, *submitted(run)]
        for each in ours:
            # Of a job that has trained the scheduler is asked below.
            known = [files.read_object(record).get("submission") for record in (each.job, each.status)]
            for name in each.submitting_names():
                if name not in known:
                    note = each.submitting(name)
                    raise LockedError(
                        f"{run.path} may have a job in the queue that nobody recorded, as a submission was "
                        f"interrupted: rerun its command, which finds out, or remove {note} if there is no such job"
                    )
        jobs, unanswered = submitted_jobs.jobs(ours)
    if unanswered:
        raise UserError(
            f"cannot tell whether {run.path} is queued ({'; '.join(unanswered.values())}): rerun the command where the "
            f"scheduler answers, or remove {run.job.name} from the run if its job is gone"
        )
    for job in jobs.values():
        if job.live:
            raise LockedError(
                f"{run.path} has job {job.job_id} in the queue ({job.state}): cancel that first (runner cancel)"
            )


def run_at(path: Path) -> RunDir:
    """The run at `path`.

    Raises:
        RunDirError: it is something else: a config directory has a config.yaml, too. Or it is a link, which would be
            moved or removed instead of the run; or other runs are in it.
    """
    run = RunDir(Path(os.path.abspath(path)))
    if files.is_link(run.path):
        raise RunDirError(f"{path} is a link: pass the run directory itself, {files.resolve(run.path)}")
    if not is_run(run):
        raise RunDirError(
            f"{path} is not a run directory, which has a config.yaml and a code.json: {what_to_pass(path)}"
        )
    own = {run.checkpoints.name, run.lease.name, run.submission.name, run.evaluations.name}
    for folder, folders, _ in files.walk(run.path):
        if Path(folder) == run.path:
            folders[:] = [name for name in folders if name not in own]
        inside = next((Path(folder) / name for name in sorted(folders) if is_run(RunDir(Path(folder) / name))), None)
        if inside is not None:
            raise RunDirError(f"{path} has another run in it ({inside}): move that one elsewhere first")
    return run


def is_run(run: RunDir) -> bool:
    """Whether there is a run in this directory: its config, and the code that it was started with."""
    return files.is_file(run.config) and files.is_file(run.code)
