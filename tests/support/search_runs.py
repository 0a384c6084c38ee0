"""Plans of small searches, and slots whose training is a function."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from runner.cli.start.search import Plan, plan_search
from runner.cli.start.slot import Slot, Task
from runner.config.template import TrialComposer
from runner.errors import ExitStatus
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.search.directory import Record, SearchDir, read_journal, turn
from runner.search.journal import RUN, Journal
from runner.search.points import Dimension, Space
from runner.search.rules import Algorithm, Rules
from runner.training.job import LocalJob

SMOKE = ("experiment=smoke",)
SPACE = Space((Dimension("optimizer.lr", low=1e-4, high=1e-2, log=True),))
STEPS = (10, 30, 90)

Train = Callable[[Task, RunDir], int]


@cache
def _composer() -> TrialComposer:
    return TrialComposer()


def plan(*overrides: str, search: str = "asha", trials: int = 9) -> Plan:
    """Return the plan of a command for a small search."""
    given = [] if any(text.startswith("search.trials") for text in overrides) else [f"search.trials={trials}"]
    return plan_search(_composer(), [*SMOKE, f"search={search}", *given, *overrides])


def begin(path: Path, trials: int = 9, rungs: tuple[int | None, ...] = STEPS, **options: Any) -> SearchDir:
    """Create the directory of a search by ASHA, or add trials or rungs to it, without the configs of its runs."""
    search = SearchDir(path)
    rules = Rules(Algorithm.asha, SPACE, "eval_loss", **{"maximize": False, **options})
    path.mkdir(exist_ok=True)
    record = Record(rules, {}, "12345678", str(path.parent), lease_timeout_s=1.0)
    with turn(search, record) as mine:
        record.write(search, mine.guard)
        mine.append("settings", trials=trials, rungs=list(rungs))
    return search


def journal_of(search: SearchDir) -> Journal:
    """Read the journal of a search."""
    return read_journal(search, Record.read(search).rules.repeats)


class FunctionSlot(Slot):
    """A slot whose runs have no config and whose training is a function."""

    train: Train

    def prepared(self, task: Task) -> RunDir:
        run = self.search.run(f"run{task.trial}-{task.repeat}")
        run.path.mkdir(exist_ok=True)
        if task.run is None:
            self._append(RUN, task, run=run.path.name)
        return run

    def trained(self, task: Task, run: RunDir) -> int:
        return self.train(task, run)


def work(search: SearchDir, train: Train, number: int = 0) -> ExitStatus:
    """Let a slot work until the search has ended."""
    slot = search.slot(number)
    slot.path.mkdir(parents=True, exist_ok=True)
    record = Record.read(search)
    with Lease.acquire(slot.lease, None, record.lease_timeout_s) as lease:
        made = FunctionSlot(search, record, slot, LocalJob(), lease)
        made.train = train
        return made.work()


def trains(task: Task, run: RunDir) -> int:
    """Train to the step of the rung. The result depends on the learning rate and the step only."""
    step = task.step or STEPS[-1]
    record(run, step, eval_loss=loss_of(task, step))
    checkpoint(run, step)
    if task.last:
        run.finished.write_text(json.dumps({"steps": step}))
    ended(run, "finished" if task.last else "paused", end_step=step)
    return int(ExitStatus.FINISHED)


def loss_of(task: Task, step: int) -> float:
    return abs(float(task.values["optimizer.lr"]) - 3e-3) + 1.0 / step + 0.001 * task.repeat


def record(run: RunDir, step: int, **values: float) -> None:
    """Add an evaluation to metrics.jsonl."""
    with run.metrics.open("a") as file:
        file.write(json.dumps({"step": step, **values}) + "\n")


def checkpoint(run: RunDir, step: int) -> None:
    """Create a directory that counts as a committed checkpoint by its name and manifest."""
    folder = run.checkpoint(step)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "manifest.json").write_text(json.dumps({"step": step, "sha256": ""}))


def ended(run: RunDir, cause: str, **entries: Any) -> None:
    """Record the end of an attempt."""
    number = len(run.attempts.read_text().splitlines()) + 1 if run.attempts.exists() else 1
    with run.attempts.open("a") as file:
        file.write(json.dumps({"attempt": number, "cause": cause, "exit": 1, **entries}) + "\n")
