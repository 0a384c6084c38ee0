"""Results of `runner evaluate` in a run directory: which checkpoint by which settings, each once; and its jobs.

    evaluations.jsonl                    the results, one line per checkpoint and settings
    evaluation/                          the lease of whoever adds a line
    evaluations/SETTINGS/                the lease of whoever evaluates by these settings
    evaluations/evaluate-STEP-SETTINGS/  a submitted evaluation: request.json, job.json, logs

Imports no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.errors import RunDirError
from runner.rundir.attempt_log import is_finished, status_of
from runner.rundir.lease import Lease, LeaseWatcher
from runner.rundir.paths import RunDir
from runner.rundir.submitted_jobs import jobs
from runner.system import clock, files

ALL = "all"
PREFIX = "evaluate-"  # of the directories of submitted evaluations
# How long another process may take to add its line.
ADDING_S = 60.0
# A run that was stopped or killed may be started again by a loop around its command.
RETURN_S = 30.0
FOR_GOOD = ("failed", "crash loop", "cancelled")


@dataclass(frozen=True)
class Request:
    """What to evaluate of a run, and how.

    Attributes:
        settings: digest of all settings that change a result.
        step: a step, `best`, `last` or `all`.
        follow: until the run is over.
        keep: with `follow`, how many checkpoints retention keeps for it that it has not evaluated yet.
        overrides: the settings that differ from the run's, as given; empty if these are its own.
        config: the run's frozen config with them, as plain values.
    """

    settings: str
    step: str = "last"
    follow: bool = False
    keep: int = 10
    overrides: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The name of its directory, and of its job."""
        return f"{PREFIX}{self.step}-{self.settings}"

    def directory(self, run: RunDir) -> Path:
        """Where a submitted evaluation has its request, job and logs."""
        return run.evaluation_work / self.name

    def write(self, directory: Path, guard: files.Guard) -> None:
        """Write request.json.

        Raises:
            OSError: the file system refused.
        """
        files.write_json(request_file(directory), asdict(self), guard=guard)

    @classmethod
    def read(cls, directory: Path) -> Request:
        """The request of a submitted evaluation.

        Raises:
            RunDirError: it is gone, or not what `write` writes.
        """
        found = files.read_object(request_file(directory))
        if not found:
            raise RunDirError(f"{request_file(directory)} is gone: the evaluation was given up (--forget)")
        try:
            made = cls(**{**found, "overrides": tuple(found["overrides"])})
        except (TypeError, KeyError):
            raise RunDirError(f"{request_file(directory)} is malformed: rerun the command, which writes it") from None
        return made


def leases_and_jobs(run: RunDir) -> tuple[list[Path], list[RunDir]]:
    """The leases of evaluations of a run, and the directories of those that were submitted.

    Raises:
        OSError: the run directory cannot be read.
    """
    try:
        names = files.list_dir(run.evaluation_work)
    except FileNotFoundError:
        return [], []
    submitted = [name for name in names if name.startswith(PREFIX)]
    leases = [run.evaluation_work / name for name in names if name not in submitted]
    return leases, [RunDir(run.evaluation_work / name) for name in submitted]


def request_file(directory: Path) -> Path:
    """Of a submitted evaluation; it is removed to give the evaluation up."""
    return directory / "request.json"


def given_up(directory: Path) -> bool:
    """Whether a submitted evaluation was given up: its request was removed."""
    return not files.is_taken(request_file(directory))


def work_lease(run: RunDir, settings: str) -> Path:
    """The lease of whoever evaluates by these settings, one checkpoint at a time."""
    return run.evaluation_work / settings


def make_work(run: RunDir, directory: Path, holder: Mapping[str, Any] | None, timeout_s: float) -> None:
    """Make the directory of a lease or of a submitted evaluation, unless it is there.

    Under the lease of whoever adds a result: who moves or removes the run holds that before looking which others there
    are, so that none is overlooked.

    Raises:
        RunDirError: the run was moved or removed.
        UserError: another process does not release that lease.
        OSError: the file system refused.
    """
    if not files.is_dir(directory):
        with Lease.acquire(run.evaluation_lease, holder, timeout_s, wait_s=ADDING_S, within=run.path):
            files.make_dirs_in(run.path, directory)


def evaluated(run: RunDir, settings: str) -> dict[int, dict[str, Any]]:
    """The results by these settings, by step.

    Raises:
        OSError: they cannot be read.
    """
    return {
        record["step"]: record
        for record in files.read_lines(run.evaluations)
        if isinstance(record, dict) and record.get("digest") == settings and isinstance(record.get("step"), int)
    }


def add(run: RunDir, record: Mapping[str, Any], holder: Mapping[str, Any] | None, timeout_s: float) -> bool:
    """Add a result; False, and nothing added, if there is one of that step by the same settings.

    The file is replaced as a whole, so that a process that was stopped for long adds nothing when it wakes.

    Args:
        run: the run directory.
        record: with `step` and `digest`.
        holder: describes this process, as for a lease.
        timeout_s: see `Lease.acquire`.

    Raises:
        UserError: another process does not finish adding its own.
        OSError: the file system refused.
    """
    with Lease.acquire(run.evaluation_lease, holder, timeout_s, wait_s=ADDING_S, within=run.path) as lease:
        if record["step"] in evaluated(run, str(record["digest"])):
            return False
        lines = [json.dumps(value) for value in (*files.read_lines(run.evaluations), dict(record))]
        files.write_atomic(run.evaluations, "\n".join(lines) + "\n", guard=lease.guard)
    return True


@dataclass
class Following:
    """Tells when a run is over, for a process that waits for its checkpoints.

    Attributes:
        steps: the length of the run, if it is known.
        epochs: the same in epochs.
    """

    run: RunDir
    steps: int | None
    epochs: float | None
    now: Callable[[], float] = lambda: clock.monotonic()  # noqa: PLW0108 looked up when it is called
    _watcher: LeaseWatcher = field(default_factory=LeaseWatcher)
    _gone_since: float | None = None

    def over(self) -> str | None:
        """`finished`, or the state in which the run has stopped; None while it trains, is queued or may come back.

        Raises:
            OSError: its records cannot be read.
        """
        if is_finished(self.run, self.steps, self.epochs):
            return "finished"
        state = str(status_of(self.run).get("state") or "not started")
        live = self._is_live()
        if state in FOR_GOOD and not live:  # also if the scheduler, which may have a later job of it, does not answer
            return state
        if live is not False:
            self._gone_since = None
            return None
        self._gone_since = self.now() if self._gone_since is None else self._gone_since
        if self.now() - self._gone_since < RETURN_S:
            return None
        return "killed" if state in ("running", "requeued") else state

    def _is_live(self) -> bool | None:
        """Whether a process trains it or a job of it is queued; None if the scheduler does not answer."""
        alive = self._watcher.is_alive(self.run.lease)
        if self._watcher.wait():  # nobody could tell at once
            alive = self._watcher.is_alive(self.run.lease)
        if alive:
            return True
        found, unanswered = jobs([self.run])
        job = found.get(self.run.path)
        return None if unanswered else job is not None and job.live
