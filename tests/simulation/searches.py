"""Play the scenario of a search: slots on several machines decide, train and record, with strikes at any call."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from runner.cli.start.slot import Slot, Task
from runner.errors import ExitStatus, LockedError, RunDirError, SupersededError, UserError
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.search.decide import replay
from runner.search.directory import Record, SearchDir, Turn, read_journal, turn
from runner.search.journal import RUN, SETTINGS, Journal
from runner.search.points import Dimension, Space
from runner.search.rules import Algorithm, Rules
from runner.system import clock, files
from simulation.disk import ROOT
from simulation.engine import Host, Process
from simulation.scenario import COMMON, Scenario

SEARCH = SearchDir(Path(ROOT) / "search")
TRIALS, RUNGS = 5, (2, 4)
TIMEOUT_S = 6.0
KILLED = -9
JOB: Any = SimpleNamespace(
    auto_restarts=False, identity=dict, cause=lambda signum: "interrupted", requeue_if_needed=lambda cause: cause
)
RULES = Rules(Algorithm.asha, Space((Dimension("lr", low=0.1, high=1.0),)), "eval_loss", False, reduction=2)
RECORD = Record(RULES, {}, "", "", prune=False, lease_timeout_s=TIMEOUT_S)


class SimulatedSlot(Slot):
    """A slot whose attempts are processes of the simulated world."""

    story: Searches

    def prepared(self, task: Task) -> RunDir:
        run = RunDir(SEARCH.path.parent / f"run{task.trial}")
        files.make_dirs(run.path)
        if task.run is None:
            self._append(RUN, task, run=run.path.name)
        return run

    def trained(self, task: Task, run: RunDir) -> int:
        return self.story.attempt(task, run)


class Searches(Scenario):
    """Two or three slots that train five trials at two rungs. Some slots are started again."""

    name = "search"
    kinds = COMMON | {"again": "a slot is started once more"}
    horizon = 2500
    host_names = ("node1", "node2", "node3")

    def begin(self) -> None:
        """Start the command and its slots."""
        self._kept = ""  # entries whose commit was confirmed
        self._seen = ""  # the content at the last change
        self._children: dict[Process, list[Process]] = {}
        self._holders: dict[tuple[int, int], Process] = {}  # by number and fence of the slot
        self._disturbed: set[Process] = set()
        self.disk.watchers.append(self._watch)
        self.disk.make_dir(Path(ROOT) / "search")
        self.spawn(self.hosts[0], "command", self._command)
        for number in range(self.random.choice((2, 2, 3))):
            self._start(number, self.random.uniform(1.0, 4.0))

    def _start(self, number: int, delay_s: float) -> None:
        self.spawn(self.random.choice(self.hosts), f"slot {number}", partial(self._slot, number, delay_s))

    def strike(self, kind: str, choice: float) -> None:
        """Let a strike happen."""
        if kind == "again":
            self._start(int(choice * 3), 0.0)
            return
        befallen = self.choose(choice)
        for process in self.world.processes:
            if kind == "full" or process is befallen or (befallen and process.host is befallen.host):
                self._disturbed.add(process)
        super().strike(kind, choice)

    def power_loss(self, host: Host) -> None:
        """Cut the power of a machine. Check that no confirmed entry of the journal is lost."""
        super().power_loss(host)
        self._seen = self._journal()
        self.must(self._seen.startswith(self._kept), "an entry that was written durably is lost")

    def _command(self) -> None:
        with suppress(UserError, OSError), turn(SEARCH, RECORD) as mine:
            RECORD.write(SEARCH, mine.guard)
            if not mine.journal.entries:
                mine.append(SETTINGS, trials=TRIALS, rungs=list(RUNGS))

    def _slot(self, number: int, delay_s: float) -> None:
        clock.sleep(delay_s)
        process = self._own()
        try:
            record = Record.read(SEARCH)
            slot = SEARCH.slot(number)
            files.make_dirs(slot.path)
            with Lease.acquire(slot.lease, None, TIMEOUT_S) as lease:
                self._holders[number, lease.fence] = process
                made = SimulatedSlot(SEARCH, record, slot, JOB, lease)
                made.story = self
                self.world.tell(f"ends: {made.work().name}", process.name)
        except (UserError, OSError) as error:
            self.world.tell(f"gives up: {error}", process.name)

    def _own(self) -> Process:
        assert self.world.current is not None
        return self.world.current.process

    def attempt(self, task: Task, run: RunDir) -> int:
        """Train in a process that ends with the slot, and return its exit status."""
        slot, status = self._own(), list[int]()
        host: Host = slot.host
        child = self.spawn(host, f"{slot.name}, trial {task.trial}", partial(self._train, task, run, status))
        self._children.setdefault(slot, []).append(child)
        while child.alive:
            clock.sleep(0.3)
        return status[0] if status else KILLED

    def _train(self, task: Task, run: RunDir, status: list[int]) -> None:
        assert task.step is not None
        try:
            with Lease.acquire(run.lease, None, TIMEOUT_S) as lease:
                own = RunDir(run.path, lease.guard)
                for step in range(run.newest_step() + 1, task.step + 1):
                    clock.sleep(self.random.uniform(0.1, 1.0))
                    self._save(own, step)
                result = {"step": task.step, "eval_loss": _loss(task, task.step)}
                before = files.read_lines(run.metrics)
                lines = [line for line in before if line.get("step") != task.step] + [result]
                text = "".join(f"{json.dumps(line)}\n" for line in lines)
                files.write_atomic(run.metrics, text, guard=lease.guard)
                status.append(int(ExitStatus.FINISHED))
        except LockedError:
            status.append(int(ExitStatus.LOCKED))
        except SupersededError:
            status.append(int(ExitStatus.SUPERSEDED))
        except (UserError, OSError):
            status.append(KILLED)

    @staticmethod
    def _save(run: RunDir, step: int) -> None:
        run.make_dirs(run.checkpoint(step))
        files.write_json(run.checkpoint(step) / "manifest.json", {"step": step, "sha256": ""}, guard=run.guard)

    # Checks

    def _watch(self, what: str, path: str, to: str) -> None:
        """Check that the journal only grows, also when a process wakes up late."""
        if what != "rename" or to != str(SEARCH.journal):
            return
        text = self._journal()
        self.must(text.startswith(self._seen), f"an entry was lost: the journal ended {self._seen[-200:]}")
        for line in text[len(self._seen) :].splitlines():
            self._check(json.loads(line))
        self._seen = text

    def _check(self, entry: dict[str, Any]) -> None:
        if entry["entry"] != "take":
            return
        before = Journal.parse(self._seen, 1)
        claim = before.trials[entry["trial"]].claims.get(entry["repeat"])
        holder = claim and self._holders.get((claim.slot, claim.fence))
        taken = holder and holder.alive and holder not in self._disturbed and claim.slot != entry["slot"]
        self.must(not taken, f"trial {entry['trial']} was taken from a slot that trains it")

    def _journal(self) -> str:
        with self.world.outside():
            return files.read_regular(SEARCH.journal).decode() if files.exists(SEARCH.journal) else ""

    def committed(self, text: str) -> None:
        """Note that these entries were confirmed to be in the journal."""
        if len(text) > len(self._kept):
            self._kept = text

    def around(self) -> Any:
        """Note the entries that each commit confirms."""
        import pytest

        real, patch = Turn.commit, pytest.MonkeyPatch()

        def commit(turn: Turn) -> None:
            real(turn)
            self.committed(turn.journal.text())

        patch.setattr(Turn, "commit", commit)
        return _Undone(patch)

    def on_end(self, process: Process) -> None:
        """End the slot's training with the slot. Check that no process ends with a traceback."""
        self.must(not process.errors, f"{process.name} ended with a traceback:\n{''.join(process.errors)}")
        for child in getattr(self, "_children", {}).get(process, []):
            if child.alive:
                self.world.kill(child)

    def finish(self) -> None:
        """Check that one slot completes the search, whatever was left behind."""
        self.disk.full = False
        self.must(self._journal().startswith(self._kept), "an entry that was written durably is lost")
        self.spawn(self.hosts[0], "command again", self._command)
        self.world.run()
        self.spawn(self.hosts[0], "last slot", partial(self._slot, 0, 0.0))
        self.world.run()
        with self.world.outside():
            try:
                journal = read_journal(SEARCH, 1)
            except RunDirError as error:
                self.must(False, str(error))
        self.must(replay(RULES, journal.entries) == [], "a decision comes out differently")
        lost = [trial.number for trial in journal.trials if trial.lacks(1)]
        self.must(not lost, f"trials {lost} are lost")
        self.must(len(journal.trials) == TRIALS, f"{len(journal.trials)} trials were begun, of {TRIALS}")
        results = [(entry["trial"], entry["rung"]) for entry in journal.entries if entry["entry"] == "result"]
        self.must(len({*results}) == len(results), f"a result was recorded twice: {results}")
        for trial in journal.trials:
            for (_, rung), result in trial.results.items():
                expected = float(trial.values["lr"]) + 1 / RUNGS[rung]
                self.must(result.value == expected, f"trial {trial.number} has the result of something else")


class _Undone:
    def __init__(self, patch: Any) -> None:
        self._patch = patch

    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> None:
        self._patch.undo()


def _loss(task: Task, step: int) -> float:
    return float(task.values["lr"]) + 1 / step
