"""Hold a run exclusively to move, remove or pack it, while nothing trains or submits it and no job of it is queued."""

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
    """The submission lease and the training lease of a run, both held."""

    run: RunDir
    submission: Lease
    lease: Lease

    def check(self) -> None:
        """Check that this process still holds both leases. It may have lost them while it was suspended.

        Raises:
            SupersededError: another process has taken the run over.
            OSError: a lease cannot be read.
        """
        self.submission.check_fence()
        self.lease.check_fence()

    @property
    def numbers(self) -> tuple[int, int]:
        """Return the fencing numbers of both leases."""
        return self.submission.fence, self.lease.fence

    def move(self, target: Path) -> None:
        """Rename the run directory atomically, then sync both parent directories.

        Raises:
            SupersededError: another process has taken the run over. Nothing was changed, or the message states where
                the run is.
            OSError: the file system refused. The run was not moved, or the message states where it is.
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
    """Undo the rename of a run if another process took it over before the rename. After a rename, no process can.

    The renaming process may have been suspended between its last check of the leases and the rename.

    Args:
        renamed: the renamed run. It may be gone, because a second `rm` may delete what the first one renamed.
        name: the run's previous path.
        numbers: the fencing numbers held at the rename, see `Custody.numbers`.

    Raises:
        SupersededError: another process took the run over. The run has its old name again, or the message states where
            it is.
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
    """Hold both leases of a run that has no job in a queue, for the duration of the block.

    Args:
        run: its directory; see `run_at`.
        report: called with a message when this process has to wait.

    Raises:
        RunDirError: the run has been moved or removed.
        LockedError: the run is live, or has a job in a queue.
        UserError: a scheduler that may have a job of the run does not answer, or the directory cannot be written to.
    """
    expected = is_run(run)
    with ExitStack() as held:
        # Acquire the submission lease first. This process then waits for a command that is submitting the run, or that
        # command waits for this process.
        leases = [
            held.enter_context(Lease.acquire(lease, None, TIMEOUT_S, report=report, within=run.path))
            for lease in (run.submission, run.lease)
        ]
        for directory in (run.path, run.checkpoints, run.evaluations):  # show what other machines have changed
            with suppress(FileNotFoundError, PermissionError):  # missing, or another user's
                files.look_anew(directory)
        if expected and not is_run(run):
            raise RunDirError(f"{run.path} was moved or removed meanwhile: rerun the command")
        _check_queue(run)
        detach(RunDir(run.path, leases[1].guard))
        yield Custody(run, *leases)


def check_idle(run: RunDir) -> None:
    """Refuse a run that is certainly live, without writing anything. Only `custody` can establish that it is not live.

    Raises:
        LockedError: the run is live, or has a job in a queue.
        UserError: a scheduler that may have a job of the run does not answer.
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
            # The scheduler is asked below about a submission whose job is recorded.
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
    """Return the run at `path`, for a command that moves, removes or packs it.

    Raises:
        RunDirError: `path` is not a run (a config directory has a config.yaml too). Or it is a link, which would be
            moved or removed instead of the run. Or it contains other runs.
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
    """Check whether a directory has the config and the code record of a run."""
    return files.is_file(run.config) and files.is_file(run.code)
