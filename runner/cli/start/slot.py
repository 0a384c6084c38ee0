"""Run a slot of a search, which trains one trial after the other, as recorded in the search's journal.

    decide     choose an abandoned task, a promotion, a new trial, or nothing, under the lease of the search
    prepare    compose and freeze the run of the trial
    train      make an attempt in a separate process, up to the step of the rung
    record     copy the result from the run's records to the journal

If a slot is killed, its claim stays in the journal without a result. The lease of the killed slot shows when it has
ended. Then the next slot that decides takes over the task.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from runner.cli.runs.pruning import prune
from runner.cli.start.start import freeze_run
from runner.config.composition import Composed
from runner.config.frozen import load_plain
from runner.config.identity import as_text, differences, result_values
from runner.config.template import TrialComposer
from runner.contracts import Job
from runner.errors import (
    ExitStatus,
    FileError,
    LockedError,
    RunDirError,
    StoppedError,
    SupersededError,
    UserError,
    nearest,
)
from runner.rundir import provenance
from runner.rundir.attempt_log import DIVERGED, PAUSED, UNSAVED, Finish, ended_attempts
from runner.rundir.evaluations import known_values
from runner.rundir.lease import Lease, LeaseWatcher, liveness, read_holder
from runner.rundir.origin import search_modules, working_in
from runner.rundir.paths import RunDir
from runner.rundir.state import look, modified
from runner.rundir.trust import check_trusted
from runner.search.decide import Points, decide
from runner.search.directory import Record, SearchDir, Turn, read_journal, turn
from runner.search.journal import (
    DONE,
    FAILED,
    PROMOTE,
    RESULT,
    RUN,
    START,
    TAKE,
    WAIT,
    WITHDRAWN,
    Claim,
    Journal,
    Trial,
)
from runner.system import clock, files, processes, signals
from runner.system.signals import STOP
from runner.system.terminal import flush_output, outlive_terminal
from runner.training.job import LocalJob

POLL_S, WAIT_S, SHOW_S = 0.05, 0.5, 2.0
"""Seconds between checks of the training process, of a journal without tasks, and between status updates."""
LOOK_S = 15.0
"""Seconds between checks whether other slots are alive."""
BUSY_S = 2.0
"""Seconds to wait after finding that another process trains the run."""
TRIES, RETRY_S = 60, 2.0
"""The number of tries, and the seconds between them, if the disk or the lease of the search is not available."""
TRIES_AT_END = 5
"""The number of tries after the slot has been asked to stop."""


@dataclass(frozen=True)
class Task:
    """The task of a slot: train one repeat of a trial up to a rung."""

    trial: int
    repeat: int
    rung: int
    step: int | None  # None means the end of the run
    last: bool
    values: dict[str, str]
    run: str | None  # the run's name, if the journal contains it
    retried: bool = False  # a user withdrew it and then requested it again

    @property
    def title(self) -> str:
        """Return a short description of the task."""
        return f"trial {self.trial}, to {'its end' if self.step is None else f'step {self.step}'}"


def slot(slot_dir: Path, job: Job | None = None) -> int:
    """Train trials until the search is over or this process is asked to stop, and return the exit status.

    Args:
        slot_dir: the directory of the slot, inside the directory of the search.
        job: the job that contains this process.
    """
    STOP.install()
    job = job or LocalJob()
    if job.early_signal is not None and STOP.signum is None:
        STOP.signum = job.early_signal
    here = RunDir(Path(slot_dir).absolute())
    search = SearchDir(here.path.parent.parent)
    try:
        check_trusted(RunDir(search.path))
        record = Record.read(search)
        search_modules(RunDir(search.path), record.directory)
        with (
            working_in(record.directory),
            Lease.acquire(here.lease, job.identity(), record.lease_timeout_s, asked_to_stop=lambda: STOP) as lease,
        ):
            job.on_started()
            return int(Slot(search, record, here, job, lease).work())
    except UserError as error:
        _say(f"error: {error}")
        return int(error.status)
    except OSError as error:
        _say(f"error: {error.filename or search.path}: {error.strerror or error}")
        return int(ExitStatus.FAILED)


def _say(line: str) -> None:
    with suppress(OSError):
        print(line, flush=True)


@dataclass
class Slot:
    """A slot whose lease this process holds."""

    search: SearchDir
    record: Record
    here: RunDir
    job: Job
    lease: Lease
    gone: set[Claim] = field(default_factory=set)
    """The claims of slots on other machines whose heartbeats have stopped."""

    def __post_init__(self) -> None:
        self.number = self.search.number_of(self.here)
        self.points = Points(self.record.rules)
        self._looked = float("-inf")

    @cached_property
    def _cause(self) -> str:
        """Return why this slot was asked to stop."""
        return self.job.cause(STOP.signum or 0)

    @cached_property
    def composer(self) -> TrialComposer:
        return TrialComposer()

    def work(self) -> ExitStatus:
        """Train one trial after the other, and return the exit status."""
        self._show("running", "waiting")
        with suppress(OSError):
            for change in provenance.code_changes(self.search.path):
                _say(f"warning: the code changed since the command: {change}")
        while not STOP:
            task = self._next()
            if task is None:
                self._show("finished", "no trial is left")
                return ExitStatus.FINISHED
            if isinstance(task, str):
                self._show("running", "waiting for results of others")
                self._wait()
                continue
            _say(f"{task.title}: {' '.join(f'{key}={value}' for key, value in task.values.items())}")
            self._do(task)
        cause = self.job.requeue_if_needed(self._cause)
        self._show("requeued" if self.job.auto_restarts else "interrupted", f"{cause} ({STOP.name})")
        return ExitStatus.INTERRUPTED

    def _wait(self) -> None:
        """Wait until the journal changes, but at most `LOOK_S`, because a slot may die without adding an entry."""
        before, until = modified(self.search.journal), clock.monotonic() + LOOK_S
        while not STOP and clock.monotonic() < until and modified(self.search.journal) == before:
            clock.sleep(WAIT_S)

    # Decide

    def _turn(self, do: Callable[[Turn], Task | str | None]) -> Task | str | None:
        """Call `do` under the lease of the search. Retry if other processes or the disk prevent that.

        Raises:
            UserError: the lease could not be acquired, or the search is malformed.
            OSError: the disk failed too many times.
        """
        tries = 0
        while True:
            try:
                with turn(self.search, self.record, self.job.identity()) as mine:
                    return do(mine)
            except RunDirError:
                raise
            except (LockedError, StoppedError, SupersededError, OSError):
                tries += 1
                if tries >= (TRIES_AT_END if STOP else TRIES):
                    raise
                clock.sleep(RETRY_S)

    def _next(self) -> Task | str | None:
        """Return the next task, a message if there is nothing to train for now, or None if there never will be."""
        self._look_at_others()
        return self._turn(self._decide)

    def _decide(self, mine: Turn) -> Task | str | None:
        journal, self.record = mine.journal, Record.read(self.search)  # a command may have added a rung
        if not journal.entries:
            return None  # its command was killed and must be rerun
        claim = {"repeat": 0, "slot": self.number, "fence": self.lease.fence}
        if (left := self._left(journal)) is not None:
            trial, repeat = left
            if trial.claims.get(repeat) != Claim(self.number, self.lease.fence):
                step = self.search.run(trial.runs[repeat]).newest_step() if repeat in trial.runs else 0
                mine.append(TAKE, trial=trial.number, **{**claim, "repeat": repeat, "step": step})
            return self._decide(mine) if trial.over else self._task(journal, trial, repeat)
        decision = decide(self.record.rules, journal)
        if decision.what == START:
            number = len(journal.trials)
            mine.append(START, trial=number, values=self.points.point(journal, number), **claim)
        elif decision.what == PROMOTE:
            mine.append(PROMOTE, trial=decision.trial, rung=decision.rung, **claim)
        elif journal.entries[-1]["entry"] != decision.what:
            mine.append(decision.what, slot=self.number, fence=self.lease.fence)
        if decision.what in (WAIT, DONE):
            if decision.what == DONE:
                prune(self.search, self.record, journal)
            return WAIT if decision.what == WAIT and self._is_needed(journal) else None
        assert decision.trial is not None
        return self._task(journal, journal.trials[decision.trial], 0)

    def _is_needed(self, journal: Journal) -> bool:
        """Return whether the tasks of other slots may lead to a task for this slot.

        Each result lets at most one trial continue, and the slot that produced it can train that trial. On this machine
        a waiting slot costs nothing.
        """
        claims = sum(len(trial.claims) for trial in journal.outstanding)
        return not self.job.auto_restarts or len(journal.outstanding) * journal.repeats > claims

    def _left(self, journal: Journal) -> tuple[Trial, int] | None:
        """Return a repeat of a trial that lacks a result and that no slot trains."""
        for trial in journal.outstanding:
            for repeat in trial.lacks(journal.repeats):
                if self._is_free(trial.claims.get(repeat)):
                    return trial, repeat
        return None

    def _is_free(self, claim: Claim | None) -> bool:
        if claim is None or claim.slot == self.number:  # only one slot with this number runs at a time
            return True
        try:
            fence, holder = read_holder(self.search.slot(claim.slot).lease) or (claim.fence + 1, {})
            over = fence > claim.fence or claim in self.gone
            return over or liveness(holder, processes.this_process()) == "gone"
        except OSError:
            return False

    def _look_at_others(self) -> None:
        """Check occasionally for slots whose heartbeat is the only evidence that they are alive."""
        if clock.monotonic() - self._looked < LOOK_S:
            return
        watcher = LeaseWatcher(self.record.lease_timeout_s)  # a new watcher, because old observations prove nothing
        with suppress(OSError, RunDirError):
            journal = read_journal(self.search, self.record.rules.repeats)
            claims = {claim for trial in journal.outstanding for claim in trial.claims.values()} - self.gone
            leases = {claim: self.search.slot(claim.slot).lease for claim in claims if claim.slot != self.number}
            for lease in leases.values():
                watcher.is_alive(lease)
            watcher.wait()
            self.gone |= {claim for claim, lease in leases.items() if not watcher.is_alive(lease)}
        self._looked = clock.monotonic()

    def _task(self, journal: Journal, trial: Trial, repeat: int) -> Task:
        last, step = trial.rung == len(journal.rungs) - 1, journal.rungs[trial.rung]
        run = trial.runs.get(repeat)
        return Task(trial.number, repeat, trial.rung, step, last, trial.values, run, trial.retried)

    # Prepare, train, record

    def _do(self, task: Task) -> None:
        """Train the run of a task, and record the outcome."""
        try:
            run = self.prepared(task)
        except (LockedError, StoppedError, SupersededError):
            self._pause(BUSY_S)
            return
        except UserError as error:
            if not STOP:
                self._append(FAILED, task, how="error", reason=str(error))
            return
        if self._recorded(task, run):
            return
        if not task.retried and look(run).word == "withdrawn":  # it was withdrawn while it was paused
            self._append(WITHDRAWN, task)
            return
        if task.step is not None and run.newest_step() > task.step:
            metric = self.record.rules.metric
            reason = f"{run.path} is at step {run.newest_step()} already, and has no {metric} of step {task.step}"
            self._failed(task, run, how="error", reason=f"{reason}: search in another run.root")
            return
        attempts = len(ended_attempts(run))
        status = self.trained(task, run)
        self._judge(task, run, status, attempts)

    def prepared(self, task: Task) -> RunDir:
        """Compose and freeze the run of a task.

        Raises:
            LockedError: another process trains the run.
            UserError: the run cannot be trained.
        """
        where, search = Path(self.record.directory), self.search.path.name
        job: Composed = self.composer.compose_point(self.record.config, task.values, where, task.repeat, search)
        name = self.search.name_of(job.run_dir)
        if task.run is None:
            self._append(RUN, task, run=name)
        elif task.run != name:
            was = self.search.run(task.run).path
            raise UserError(f"the run of this trial was {was}, and would be {job.run_dir} now: move it there")
        check_results(job, self.record.rules.metric)
        freeze_run(job)
        return RunDir(job.run_dir)

    def _recorded(self, task: Task, run: RunDir, ended: bool = False) -> bool:
        """Record the result of a task if its run has one. Return whether it has.

        Args:
            task: the task to record.
            run: the run of the task.
            ended: whether an attempt has just ended as planned. It may be before the rung if the run is shorter.
        """
        finish, step = Finish.of(run), task.step
        if ended and finish.steps and (step is None or (finish.steps < step and finish.early is not None)):
            step = finish.steps
        if step is None or (not ended and _reached(run) < step):
            return False
        value = known_values(run, step).get(self.record.rules.metric)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        self._append(RESULT, task, rung=task.rung, step=step, value=_finite(float(value)))
        return True

    def trained(self, task: Task, run: RunDir) -> int:
        """Make an attempt in a separate process, and return its exit status."""
        command = [sys.executable, "-m", "runner.training.attempt", str(run.path)]
        command.append(f"--metric={self.record.rules.metric}")
        command += [] if task.step is None else [f"--step={task.step}"]
        command += [] if task.step is None or task.last else [f"--keep={self.record.keep}"]
        with files.owned():
            files.make_dirs_in(run.path, run.logs)
        with files.open_append(run.local_log) as output, signals.blocked():
            # The process gets its own session, so that Ctrl-C at the terminal reaches it only once, through this
            # process.
            process = processes.start(
                command,
                env=processes.bound(processes.environment),
                stdin=processes.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        told, shown = False, -SHOW_S
        while (status := process.poll()) is None:
            if STOP and not told:
                process.send_signal(STOP.signum or 0)
                told = True
                if self._cause == "cancelled":  # recorded now, because there may be no time after the save
                    self._append(WITHDRAWN, task)
            if clock.monotonic() - shown >= SHOW_S:
                shown = clock.monotonic()
                self._show("running", task.title, run)
            clock.sleep(POLL_S)
        return int(status)

    def _judge(self, task: Task, run: RunDir, status: int, attempts: int) -> None:
        """Record the outcome of an attempt."""
        ended = ended_attempts(run)[attempts:]
        cause, reason = (ended[-1]["cause"], ended[-1].get("reason")) if ended else (None, None)
        if status == ExitStatus.FINISHED:
            if not self._recorded(task, run, ended=True):
                known = sorted(known_values(run, task.step or Finish.of(run).steps))
                lacks = f"it has no {(metric := self.record.rules.metric)}{nearest(metric, known)}"
                lacks += f", but {', '.join(known) or 'nothing'}: set search.metric"
                self._failed(task, run, how="metric", reason=lacks)
        elif cause == DIVERGED:
            self._append(RESULT, task, rung=task.rung, step=ended[-1].get("end_step") or 0, value=None)
        elif cause == UNSAVED:  # no trial can be saved at present; the next command resumes this one
            raise FileError(f"{run.path}: {reason}")
        elif status == ExitStatus.INTERRUPTED:
            if look(run).word == "withdrawn":
                self._append(WITHDRAWN, task)
        elif status in (ExitStatus.LOCKED, ExitStatus.SUPERSEDED):
            self._pause(BUSY_S)
        elif status in (-9, 137):
            self._failed(task, run, how="killed", reason="its process was killed by SIGKILL")
        elif cause in ("crash", "hang", None) or status < 0:
            ended_so = f"its process ended with status {status}"
            self._failed(task, run, how="crash", reason=reason or f"{ended_so} (see {run.local_log})")
        else:
            how = "metric" if reason and reason.startswith("search.metric=") else "error"
            self._failed(task, run, how=how, reason=reason or f"exit status {status} (see {run.local_log})")

    def _failed(self, task: Task, run: RunDir, how: str, reason: str) -> None:
        self._append(FAILED, task, step=run.newest_step(), how=how, reason=reason)

    def _append(self, entry: str, task: Task, **values: object) -> None:
        def do(mine: Turn) -> None:
            trial = mine.journal.trials[task.trial]
            if entry in (RESULT, FAILED) and (task.repeat, task.rung) in trial.results:
                return  # another slot has already taken it over
            mine.append(entry, trial=task.trial, repeat=task.repeat, **values)

        self._turn(do)

    def _pause(self, seconds: float) -> None:
        until = clock.monotonic() + seconds
        while not STOP and clock.monotonic() < until:
            clock.sleep(POLL_S)

    def _show(self, state: str, doing: str, run: RunDir | None = None) -> None:
        """Update the status of the slot. Disk errors are ignored, because the next update follows soon."""
        status = {}
        with suppress(OSError):
            found = files.read_object(run.status) if run else {}
            status = {key: found.get(key) for key in ("step", "total", "loss")}
        with suppress(OSError):
            now = {**self.job.identity(), "state": state, "doing": doing, **status, "updated": clock.wall()}
            files.write_json(self.here.status, now, durable=False, guard=self.lease.guard)


def check_results(job: Composed, metric: str) -> None:
    """Raise an error if a run was trained with different evaluation or stopping settings.

    Its results could not be compared with those of the other runs.

    Raises:
        UserError: the message names the settings.
    """
    run = RunDir(job.run_dir)
    if not run.newest_step():
        return
    old, new = result_values(load_plain(run.path)), result_values(job.plain)
    changes = [
        f"{change.key} ({as_text(change.old)} → {as_text(change.new)})"
        for change in differences(old, new)
        if metric.startswith("eval_") or change.key.startswith("early_stopping.")
    ]
    if changes:
        raise UserError(f"{run.path} was trained with other settings: {', '.join(changes)}; search in another run.root")


def _reached(run: RunDir) -> int:
    """Return the last step that was saved, even if its checkpoint has since been deleted."""
    saved = [int(line.get("end_step") or 0) for line in ended_attempts(run) if line["cause"] in (PAUSED, "finished")]
    return max(run.newest_step(), *saved, 0)


def _finite(value: float) -> float | None:
    return value if abs(value) < float("inf") else None


def main(arguments: list[str]) -> int:
    """Run `python -m runner.cli.start.slot DIR`."""
    STOP.quiet = processes.end_with_parent()
    outlive_terminal()
    status = slot(Path(arguments[0]))
    flush_output()
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
