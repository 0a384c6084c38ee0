"""Define every path in a run directory. No other module builds these paths."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from runner.system import files


@dataclass(frozen=True)
class RunDir:
    """The directory of one run, which holds all of its records.

    Attributes:
        path: the directory.
        guard: the right to write to the directory, set in the process that holds the run's lease and passed to every
            write.
    """

    path: Path
    guard: files.Guard | None = field(default=None, compare=False, repr=False)

    def make_dirs(self, folder: Path) -> None:
        """Create a subdirectory and its parents durably. Never create the run directory, which may have been moved.

        Raises:
            SupersededError: a newer process holds the lease, or has moved or removed the run.
            OSError: the file system refused.
        """
        self.check_guard()
        files.make_dirs_in(self.path, folder)

    def check_guard(self) -> None:
        """Check that this process may still write to the run. Without a guard, do nothing.

        Raises:
            SupersededError: a newer process holds the lease, or has moved or removed the run.
        """
        if self.guard is not None:
            self.guard.check()

    @property
    def config(self) -> Path:
        """Return the path of the resolved config. The last command that started the run wrote it; attempts read it."""
        return self.path / "config.yaml"

    @property
    def code(self) -> Path:
        """Return the path of the record of the submission: commit, diff, package versions and overrides."""
        return self.path / "code.json"

    @property
    def attempt(self) -> Path:
        """Return the path of the record of the attempt that runs or was killed.

        It contains `{}` once the end is recorded.
        """
        return self.path / "attempt.json"

    @property
    def attempts(self) -> Path:
        """Return the path of the log with one line per ended attempt."""
        return self.path / "attempts.jsonl"

    @property
    def metrics(self) -> Path:
        """Return the path of the records of steps and evaluations. They contain no times, only reproducible values."""
        return self.path / "metrics.jsonl"

    @property
    def timings(self) -> Path:
        """Return the path of machine-dependent values such as speed, which are never compared between runs."""
        return self.path / "timings.jsonl"

    @property
    def status(self) -> Path:
        """Return the path of the status that `runner status` shows: state, step, last loss and last cause."""
        return self.path / "status.json"

    @property
    def finished(self) -> Path:
        """Return the path of the completion mark. It is written last and contains the number of steps."""
        return self.path / "finished.json"

    @property
    def evaluations(self) -> Path:
        """Return the directory of evaluation results and submitted evaluations; see `runner.rundir.evaluations`."""
        return self.path / "evaluations"

    @property
    def init(self) -> Path:
        """Return the path of the record of a warm start, which lists the weights that were read and used."""
        return self.path / "init.json"

    @property
    def job(self) -> Path:
        """Return the path of the submitted job's record (id and launcher), written by the launcher."""
        return self.path / "job.json"

    def submitting(self, name: str) -> Path:
        """Return the path of the file that marks submission `name` as in progress until its outcome is known.

        The outcome is whether a scheduler accepted the job. Each submission has its own file, so that a superseded
        command does not remove a newer command's file.
        """
        return self.path / f"submitting-{name}.json"

    def submitting_names(self) -> list[str]:
        """Return the names of the submissions in progress. The listing may be outdated, see `files.look_anew`.

        Raises:
            OSError: the run directory cannot be read.
        """
        try:
            found = files.list_dir(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [match[1] for each in sorted(found) if (match := re.fullmatch(r"submitting-([0-9a-f]{32})\.json", each))]

    @property
    def withdrawn(self) -> Path:
        """Return the path of the record of which job or attempt `runner cancel` ended."""
        return self.path / "withdrawn.json"

    @property
    def lease(self) -> Path:
        """Return the directory of the training lease. It has a file per fencing number; the highest is the holder's."""
        return self.path / "lease"

    @property
    def appender(self) -> Path:
        """Return the path that names the process which may append to metrics.jsonl; see `runner.rundir.appender`."""
        return self.lease / "appender.json"

    @property
    def submission(self) -> Path:
        """Return the directory of the submission lease, which keeps two shells from submitting the run twice."""
        return self.path / "submission"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint_steps(self) -> list[int]:
        """Return the steps of the committed checkpoints in ascending order, based only on names and manifests.

        Directories that were copied or renamed, or are not checkpoints, are skipped. A checkpoint with an unreadable
        manifest is included, because only loading shows whether it is intact. This reads every manifest; `newest_step`
        seldom reads more than one.
        """
        return sorted(self._committed())

    def newest_step(self) -> int:
        """Return the last of `checkpoint_steps`, or 0 if there is none."""
        return next(self._committed(), 0)

    def _committed(self) -> Iterator[int]:
        """Yield the steps of the committed checkpoints, highest first, reading their manifests one by one."""
        try:
            names = files.list_dir(self.checkpoints)
        except (FileNotFoundError, NotADirectoryError):
            return
        steps = {int(match[1]) for name in names if (match := re.fullmatch(r"step_(\d{8,})", name))}
        yield from (step for step in sorted(steps, reverse=True) if self._holds(step))

    def checkpoint(self, step: int) -> Path:
        """Return the directory of the checkpoint of `step`."""
        return self.checkpoints / f"step_{step:08d}"

    def _holds(self, step: int) -> bool:
        """Check that the directory for `step` has a manifest for that step."""
        try:
            manifest = files.read_object(self.checkpoint(step) / "manifest.json")
            return manifest.get("step") == step and "sha256" in manifest and not files.is_link(self.checkpoint(step))
        except OSError as error:
            return error.errno not in (errno.ENOTDIR, errno.EINVAL, errno.EFBIG)

    def newest_checkpoint(self) -> tuple[int, float] | None:
        """Return the newest committed checkpoint's step and modification time (Unix time, file system's clock)."""
        for step in self._committed():
            with suppress(OSError):  # retention has just deleted it in favor of a newer one
                return step, files.stat(self.checkpoint(step)).st_mtime
        return None

    @property
    def order(self) -> Path:
        """Return the path of the file that determines the sample order, for `runner inspect`."""
        return self.path / "order.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def logs(self) -> Path:
        """Return the directory of the output (standard output and error) of submitted jobs."""
        return self.path / "logs"

    @property
    def local_log(self) -> Path:
        """Return the path of the output of a run that was started by a sweep on this machine."""
        return self.logs / "local.out"

    def rank_log(self, rank: int) -> Path:
        """Return the path of the output of a rank (not 0) that was started by the launcher on this machine."""
        return self.logs / f"rank{rank}.out"

    @property
    def artifacts(self) -> Path:
        """Return the directory of images and texts logged by callbacks: NAME-STEP.png and NAME-STEP.txt."""
        return self.path / "artifacts"

    @property
    def profile(self) -> Path:
        """Return the directory of the traces from `train.profile`, with one file per attempt and rank."""
        return self.path / "profile"

    @property
    def hang(self) -> Path:
        """Return the directory of the stacks that ranks wrote when an attempt hung."""
        return self.path / "hang"

    def stacks(self, attempt: int, rank: int | str) -> Path:
        """Return the path of a rank's stacks from an attempt that hung.

        Pass rank `*` for a pattern that matches all ranks.
        """
        return self.hang / f"attempt{attempt}-rank{rank}.txt"

    @property
    def notes(self) -> Path:
        """Return the directory of the notes added by users."""
        return self.path / "added_notes"

    @property
    def callback_errors(self) -> Path:
        """Return the path of the tracebacks of callbacks that raised."""
        return self.path / "callback_errors.txt"

    @property
    def loggers(self) -> Path:
        """Return the path of the file with this run's ids in W&B and MLflow."""
        return self.path / "loggers.json"
