"""Every path of a run; no other module joins path strings."""

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
    """The directory of one run, which holds everything there is to know about it.

    Attributes:
        path: the directory.
        guard: the right to write to it, for the process that holds its lease; every write is given it.
    """

    path: Path
    guard: files.Guard | None = field(default=None, compare=False, repr=False)

    def make_dirs(self, folder: Path) -> None:
        """Create a directory of this run and its missing parents, durably; not the run's own, from where it was moved.

        Raises:
            SupersededError: a newer process holds the lease, or has moved or removed the run.
            OSError: the file system refused.
        """
        self.check_guard()
        files.make_dirs_in(self.path, folder)

    def check_guard(self) -> None:
        """Whether this process still has the right to write to the run, if it needs any.

        Raises:
            SupersededError: a newer process holds the lease, or has moved or removed the run.
        """
        if self.guard is not None:
            self.guard.check()

    @property
    def config(self) -> Path:
        """The resolved config, written by the last command that started the run; attempts read it."""
        return self.path / "config.yaml"

    @property
    def code(self) -> Path:
        """Commit, diff, package versions and overrides at submission."""
        return self.path / "code.json"

    @property
    def attempt(self) -> Path:
        """The current attempt, or one that was killed before it could record its end; `{}` after an end."""
        return self.path / "attempt.json"

    @property
    def attempts(self) -> Path:
        """One line per ended attempt."""
        return self.path / "attempts.jsonl"

    @property
    def metrics(self) -> Path:
        """One object per step and per evaluation: only what the run determines, nothing that is timed."""
        return self.path / "metrics.jsonl"

    @property
    def timings(self) -> Path:
        """What depends on the machine: speed, where the time goes, the cost of saves. Never compared between runs."""
        return self.path / "timings.jsonl"

    @property
    def status(self) -> Path:
        """State, step, last loss, last cause: what `runner status` shows."""
        return self.path / "status.json"

    @property
    def finished(self) -> Path:
        """The completion mark, written last: the number of steps at which the run finished."""
        return self.path / "finished.json"

    @property
    def evaluations(self) -> Path:
        """Results of `runner evaluate`, and submitted evaluations (see `runner.rundir.evaluations`)."""
        return self.path / "evaluations"

    @property
    def init(self) -> Path:
        """Which weights the run began with, if it had a warm start, and what became of them."""
        return self.path / "init.json"

    @property
    def job(self) -> Path:
        """The submitted job (its id and launcher), written by the launcher."""
        return self.path / "job.json"

    def submitting(self, name: str) -> Path:
        """That the submission `name` is under way; only as long as nobody knows whether a scheduler accepts its job.

        Each has a file of its own: a command that was superseded while it submitted removes no other command's.
        """
        return self.path / f"submitting-{name}.json"

    def submitting_names(self) -> list[str]:
        """The names of the submissions that are under way, as this machine lists them; see `files.look_anew`.

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
        """Which job or attempt `runner cancel` has ended (see `runner.rundir.withdrawal`)."""
        return self.path / "withdrawn.json"

    @property
    def lease(self) -> Path:
        """The lease of the process that trains: a file per fencing number, the highest is the holder's."""
        return self.path / "lease"

    @property
    def appender(self) -> Path:
        """The process that may append to metrics.jsonl and timings.jsonl (see `runner.rundir.appender`)."""
        return self.lease / "appender.json"

    @property
    def submission(self) -> Path:
        """The lease of the command that submits the run, so that two shells do not submit it twice."""
        return self.path / "submission"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint_steps(self) -> list[int]:
        """The steps of the committed checkpoints in ascending order, judged by name and manifest, not by content.

        A directory that was copied or renamed, or is not ours, does not count. One whose manifest cannot be read does:
        that is decided where it is loaded. Reads every manifest; `newest_step` seldom reads more than one.
        """
        return sorted(self._committed())

    def newest_step(self) -> int:
        """The last of `checkpoint_steps`; 0 if there is none."""
        return next(self._committed(), 0)

    def _committed(self) -> Iterator[int]:
        """The steps of the committed checkpoints, highest first; the manifests are read one by one."""
        try:
            names = files.list_dir(self.checkpoints)
        except (FileNotFoundError, NotADirectoryError):
            return
        steps = {int(match[1]) for name in names if (match := re.fullmatch(r"step_(\d{8,})", name))}
        yield from (step for step in sorted(steps, reverse=True) if self._holds(step))

    def checkpoint(self, step: int) -> Path:
        """The directory of the checkpoint of `step`."""
        return self.checkpoints / f"step_{step:08d}"

    def _holds(self, step: int) -> bool:
        """Whether the directory named after `step` has a manifest of that step."""
        try:
            manifest = files.read_object(self.checkpoint(step) / "manifest.json")
            return manifest.get("step") == step and "sha256" in manifest and not files.is_link(self.checkpoint(step))
        except OSError as error:
            return error.errno not in (errno.ENOTDIR, errno.EINVAL, errno.EFBIG)

    def newest_checkpoint(self) -> tuple[int, float] | None:
        """Step of the newest committed checkpoint and when it was written (seconds since 1970, file system's clock)."""
        for step in self._committed():
            with suppress(OSError):  # deleted meanwhile, to make room for a newer one
                return step, files.stat(self.checkpoint(step)).st_mtime
        return None

    @property
    def order(self) -> Path:
        """What the data order is computed from; `runner inspect` reads it."""
        return self.path / "order.json"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def logs(self) -> Path:
        """Standard output and error of submitted jobs."""
        return self.path / "logs"

    @property
    def local_log(self) -> Path:
        """Standard output and error of a run that a sweep started on this machine."""
        return self.logs / "local.out"

    def rank_log(self, rank: int) -> Path:
        """Standard output and error of another rank than 0 that the launcher started on this machine."""
        return self.logs / f"rank{rank}.out"

    @property
    def artifacts(self) -> Path:
        """Images and texts that callbacks logged, NAME-STEP.png and NAME-STEP.txt."""
        return self.path / "artifacts"

    @property
    def profile(self) -> Path:
        """Traces of `train.profile`: one file per attempt and rank."""
        return self.path / "profile"

    @property
    def hang(self) -> Path:
        """What the ranks of attempts that hung were doing."""
        return self.path / "hang"

    def stacks(self, attempt: int, rank: int | str) -> Path:
        """The stacks of one rank (`*`: of each) when an attempt was found to hang."""
        return self.hang / f"attempt{attempt}-rank{rank}.txt"

    @property
    def notes(self) -> Path:
        """Notes that people have added."""
        return self.path / "added_notes"

    @property
    def callback_errors(self) -> Path:
        """The tracebacks of callbacks that raised."""
        return self.path / "callback_errors.txt"

    @property
    def loggers(self) -> Path:
        """The ids of this run in W&B and MLflow."""
        return self.path / "loggers.json"
