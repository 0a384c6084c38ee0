"""Play the scenario of training: attempts at one run, in sequence and concurrent, that may end at any moment.

An attempt is real from its lease to its last record: `runner.training.attempt.attempt` runs in a simulated process and
trains a linear model on a few points. The result is compared, bit for bit, with the same run without strikes.
"""

from __future__ import annotations

import io
import json
import logging
import random
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from runner.checkpoint.files.choice import Retention
from runner.checkpoint.files.manifest import NAME as MANIFEST
from runner.checkpoint.files.manifest import TRAIN_STATE, Manifest
from runner.checkpoint.manager import TrainStateManager
from runner.checkpoint.saver import PendingSave, Saver
from runner.cli.runs import checkpoints as checkpoints_command
from runner.config import targets
from runner.config.composition import Composer
from runner.config.frozen import to_yaml
from runner.errors import CheckpointError, ExitStatus
from runner.rundir import lease
from runner.rundir.paths import RunDir
from runner.system import clock, files
from runner.training.attempt import attempt
from runner.training.job import LocalJob
from simulation.disk import ROOT
from simulation.doors import replace
from simulation.engine import Host, Process, Task, World
from simulation.scenario import COMMON, ERRORS, Scenario, play
from simulation.schedule import Schedule
from simulation.tiny import FETCH_S

RUN = RunDir(Path(ROOT) / "run")
COMMITTED = re.compile(rf"{re.escape(str(RUN.checkpoints))}/step_(\d{{8}})")
TEMPORARY = re.compile(rf"{re.escape(str(RUN.checkpoints))}/step_\d+(?:\.[a-z]+(?:-\d+)?)?\.tmp-(\d+)-\d+.*")
STEPS = 5
ATTEMPTS = 7
"""Maximum number of attempts before the final, undisturbed ones."""
TAKES_OVER_S = (1.0, 4.0)
"""Maximum seconds for which an attempt is frozen while another one begins, at once or after a heartbeat timeout."""
SOON = 200
"""Approximate number of calls for a step and its save."""
TENSORS = 24
"""Bytes at the end of a file that hold tensors."""
LAST_ATTEMPTS = 4
"""Undisturbed attempts that may be needed: two wait for leftovers of earlier ones, and one finishes."""
FIXED = [
    f"train.steps={STEPS}",
    "train.batch_size=2",
    "train.device=cpu",
    "run.lease_timeout_s=1.5",
    "logger=none",
    "data=own",
    "+data.sources.a={_target_: simulation.tiny.Points, number: 1}",
    "task=own",
    "task._target_=simulation.tiny.loss",
    "model=own",
    "model._target_=torch.nn.Linear",
    "+model.in_features=2",
    "+model.out_features=1",
    "optimizer=sgd",
    "optimizer.lr=0.02",
    "scheduler.warmup_steps=0",
]
SECOND = "+data.sources.b={_target_: simulation.tiny.Points, number: 2}"
HELD_OUT = "+data.eval_sources.a={_target_: simulation.tiny.Points, number: 3, fetch_s: 0}"
KINDS: tuple[tuple[str, ...], ...] = (
    ("sampler=elastic", "eval.every_steps=0"),
    ("sampler=elastic", SECOND, "sampler.weights.b=2", HELD_OUT, "eval.every_steps=2", "eval.batches=1"),
    ("sampler=distributed", HELD_OUT, "eval.every_steps=3", "eval.batches=1"),
    ("sampler=mixture", SECOND, "sampler.weights.b=3", "eval.every_steps=0"),
    ("sampler=elastic", HELD_OUT, f"eval.every_steps={STEPS}", "eval.batches=1"),
)
"""Kinds of runs: data, order and evaluations."""

CHEAPER: tuple[tuple[Any, dict[str, Any]], ...] = (
    # Seed the CPU's generator only: torch keeps a stack trace of each call for a GPU that never comes.
    (torch, {"manual_seed": torch.default_generator.manual_seed}),
    # Hydra looks up the same few classes every time.
    (targets, {"_looked_up": cache(targets._looked_up)}),
    # The scenario of the lease covers the early heartbeats, which would be a third of all calls here.
    (lease, {"MIN_INTERVAL_S": 0.2}),
)
"""Replacements for slow code that explores nothing: modules, and the new values of their names."""


_composer = cache(Composer)


@cache
def _plain(kind: int) -> dict[str, Any]:
    """Return the config of a kind of run."""
    return _composer().compose([*FIXED, *KINDS[kind]]).plain


def _text(kind: int, checkpoint: dict[str, Any], fetch_s: float = FETCH_S) -> str:
    """Return the config of a run with this checkpoint section and this wait for a batch."""
    plain = _plain(kind)
    sources = {name: {**source, "fetch_s": fetch_s} for name, source in plain["data"]["sources"].items()}
    changed = {"checkpoint": {**plain["checkpoint"], **checkpoint}, "data": {**plain["data"], "sources": sources}}
    return to_yaml({**plain, **changed})


class Undisturbed:
    """The expected result of a run of some kind: the same run without strikes.

    Args:
        tree: content of the files by path, with a checkpoint of every step.
    """

    def __init__(self, tree: dict[str, bytes]) -> None:
        self.metrics = tree[str(RUN.metrics)]
        self._tree = {path: content for path, content in tree.items() if path.startswith(str(RUN.checkpoints))}

    def differing(self, step: int, found: dict[str, bytes]) -> list[str]:
        """Return the names of files of a checkpoint that are not bit-identical to the expected ones."""
        folder = str(RUN.checkpoint(step))
        mine = {path.removeprefix(f"{folder}/"): data for path, data in self._tree.items() if path.startswith(folder)}
        wrong = [name for name in sorted(mine.keys() | found.keys()) if mine.get(name) != found.get(name)]
        return [name for name in wrong if name != MANIFEST and not _same_but_evaluated(mine, found, name)]


def _same_but_evaluated(mine: dict[str, bytes], found: dict[str, bytes], name: str) -> bool:
    """Return whether two train states differ only in `evaluated`: a signal may come before the evaluation."""
    if name != TRAIN_STATE or name not in mine or name not in found:
        return False
    one, other = (_loaded(each[name]) for each in (mine, found))
    return {**one, "evaluated": 0} == {**other, "evaluated": 0}


def _loaded(raw: bytes) -> dict[str, Any]:
    return dict(_plain_values(torch.load(io.BytesIO(raw), weights_only=True)))


def _plain_values(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: _plain_values(item) for key, item in value.items()}
    return [_plain_values(item) for item in value] if isinstance(value, (list, tuple)) else value


class _Job(LocalJob):
    """A job that its queue restarts. Starts with lower numbers are known to be gone, now or soon."""

    auto_restarts = True

    def __init__(self, number: int) -> None:
        self._number = number

    def identity(self) -> dict[str, Any]:
        return {"job_id": "7", "restart_count": self._number, "host": "cluster", "node": "node"}

    def began(self) -> float:
        return clock.monotonic()

    def cause_of_loss(self, record: dict[str, Any]) -> str:
        return "node failure"

    def yield_verdict(self, reason: str | None = None) -> bool:
        return True

    def cause(self, signum: int) -> str:
        return "preempted"


class Training(Scenario):
    """Attempts at one run, each started after the end of the last one or while it still runs."""

    name = "training"
    kinds = COMMON | {
        "stop": "an attempt is asked to stop",
        "another": "one more attempt begins, whether the last one has ended or not",
        "supersede": "an attempt is frozen for a moment in which another one begins",
        "refuse": "a record of metrics cannot be written",
        "rot": "a bit of a committed checkpoint changes, at once or when an attempt has ended",
        "settings": "the run resumes with another cadence, and keeps others of its checkpoints",
    }
    horizon = 400

    def __init__(self, world: World, seed: str) -> None:
        super().__init__(world, seed)
        self.kind = self.random.randrange(len(KINDS))
        self.undisturbed = undisturbed(self.kind)
        self.queued = self.random.random() < 0.5
        self.count = 0
        self.reported: dict[int, int] = {}
        """Steps whose commit was confirmed to an attempt -> its fence."""
        self.rotten: set[int] = set()
        self.damaged: set[int] = set()
        """The rotten checkpoints whose manifest has changed."""
        self._rots: list[float] = []  # rot at the end of the next attempt
        self._spoiled: list[tuple[int, str, bytes]] = []  # step, name and content of all files that have lost a bit
        self._keeps: dict[Process | None, tuple[Retention, int, frozenset[int]]] = {}
        self.loaded = 0  # the highest fence under which an attempt loaded a checkpoint, or began without one
        self.frozen: dict[str, bytes] | None = None  # the records of the run when it was finished
        self._begun: dict[str, int] = {}  # number of events before each attempt
        self._finisher: str | None = None  # the attempt that finished the run
        self._deleting: Process | None = None  # has committed and not yet deleted old checkpoints
        self._owner: Process | None = None
        self._generators: dict[Process, Any] = {}
        self._gradients: dict[Task, bool] = {}
        self._task: Task | None = None
        self.final = False

    # ---- state that the interpreter has only once

    @contextmanager
    def around(self) -> Iterator[None]:
        """Observe loads and commits, and restore changes of attempts to the interpreter."""
        handlers, threads, generators = logging.getLogger("runner").handlers[:], torch.get_num_threads(), _generators()
        load, commit, delete_old = TrainStateManager.load, Saver.commit, Saver.delete_old
        scenario = self

        def observed_load(self: TrainStateManager, *arguments: Any, **options: Any) -> Any:
            whole = scenario._whole()
            try:
                state = load(self, *arguments, **options)
            except CheckpointError as error:
                scenario._cannot_load(str(error), whole)
                raise
            scenario._has_loaded(self._fence.number, 0 if state is None else int(state["step"]))
            return state

        def observed_commit(self: Saver, pending: PendingSave) -> Manifest | None:
            manifest = commit(self, pending)
            scenario._has_committed(pending.step, self._fence.number)
            return manifest

        def observed_delete_old(self: Saver, step: int) -> None:
            scenario._begins_to_delete(self._retention, step)
            try:
                delete_old(self, step)
            finally:
                scenario._deleting = None

        with ExitStack() as restored:
            replace(restored, TrainStateManager, load=observed_load)
            replace(restored, Saver, commit=observed_commit, delete_old=observed_delete_old)
            for owner, names in CHEAPER:
                replace(restored, owner, **names)
            self.world.switched = self._switched
            torch.set_num_threads(1)
            try:
                yield
            finally:
                logging.getLogger("runner").handlers[:] = handlers
                torch.set_grad_enabled(True)
                torch.set_num_threads(threads)
                _set_generators(generators)

    def _switched(self, task: Task) -> None:
        """Switch random generators with the process, and torch's grad mode with the thread."""
        if task is self._task:
            return
        if self._task is not None:
            self._gradients[self._task] = torch.is_grad_enabled()
        self._task = task
        torch.set_grad_enabled(self._gradients.get(task, True))
        if task.process is not self._owner:
            if self._owner is not None and self._owner.alive:
                self._generators[self._owner] = _generators()
            self._owner = task.process
            if (found := self._generators.pop(task.process, None)) is not None:
                _set_generators(found)

    # ---- events

    def begin(self) -> None:
        """Start the first attempt at a new run."""
        self.disk.watchers.append(self._watch)
        self.disk.make_dir(RUN.path)
        self._configure(self.random)
        self._another()

    def _configure(self, chosen: random.Random) -> None:
        evaluates = KINDS[self.kind][-1] != "eval.every_steps=0"
        checkpoint = {
            "mode": chosen.choice(("sync", "async", "async")),
            "every_steps": chosen.choice((1, 1, 2, 3)),
            "keep_last": chosen.choice((1, 2, 3)),
            "keep_every_steps": chosen.choice((None, None, 3)),
            "keep_best": chosen.choice((0, 1)) if evaluates else 0,
        }
        self.kept = checkpoint["keep_last"]
        # Without a wait for the batch, a saving thread may still work when the next step changes the weights.
        files.write_atomic(RUN.config, _text(self.kind, checkpoint, chosen.choice((0.0, FETCH_S, FETCH_S))))
        self.world.tell(
            f"saves every {checkpoint['every_steps']} steps ({checkpoint['mode']}), keeps the last {self.kept}", "run"
        )

    def _another(self) -> None:
        if self.count < ATTEMPTS:
            self._start(self.random.choice(self.hosts))

    def _start(self, host: Any, by_hand: bool = False) -> Process:
        self.count += 1
        job = LocalJob() if by_hand or not self.queued else _Job(self.count)
        name = f"attempt {self.count}"
        self._begun[name] = len(self.world.events)
        return self.spawn(host, name, partial(self._attempt, job))

    def _attempt(self, job: Any) -> None:
        raise SystemExit(attempt(RUN.path, job))

    def strike(self, kind: str, choice: float) -> None:
        """Let a strike happen."""
        if kind == "another":
            self._another()
        elif kind == "stop":
            process = self.choose(choice)
            if process is not None:
                self.world.signal(process, 15)
        elif kind == "supersede":
            self._supersede(choice)
        elif kind == "refuse":
            self._refuse(choice)
        elif kind == "rot":
            if choice < 0.5:
                self._rot(choice)
            else:
                self._rots.append(choice)
        elif kind == "settings":
            self._configure(random.Random(f"settings {choice}"))
        else:
            super().strike(kind, choice)

    def power_loss(self, host: Host) -> None:
        """Cut the power. An unsynced completion mark may be lost, and then the run is not finished."""
        super().power_loss(host)
        if str(RUN.finished) not in self.disk.tree():
            self.frozen = self._finisher = None
        there = self._checkpoints()
        for step, name, content in self._spoiled:  # a checkpoint that was set aside may be back
            if there.get(step, {}).get(name) == content:
                self._note_rotten(step, name)

    def _supersede(self, choice: float) -> None:
        """Freeze an attempt while another one begins, which may take over before the first continues."""
        process, chosen = self.choose(choice), random.Random(f"supersede {choice}")
        if process is not None:
            self.world.freeze(process)
            self._another()
            self.world.at(chosen.choice(TAKES_OVER_S) * chosen.random(), partial(self.world.thaw, process))

    def _refuse(self, choice: float) -> None:
        """Refuse the next records of an attempt, which it then has in memory only. It may be killed soon.

        A full disk also refuses all later writes, so nothing is saved without these records.
        """
        process, chosen = self.choose(choice), random.Random(f"refuse {choice}")
        if process is None:
            return
        process.fails += [(frozenset({"append"}), chosen.choice(ERRORS))] * chosen.choice((1, 1, 2))
        if chosen.random() < 0.5:
            self.world.strike_at(self.world.steps + chosen.randrange(SOON), partial(self.world.kill, process))

    def _rot(self, choice: float, newest: bool = False) -> None:
        """Change a bit of a checkpoint, but not of the last intact one, without which nothing could be promised.

        Nor of the newest one while older ones are deleted after its commit. Written and synced data is not read again
        before that, so the newest one counts as the last one.
        """
        there = sorted(self._checkpoints())
        whole = [step for step in there if step not in self.rotten]
        if len(whole) < 2:
            return
        if self._deleting is not None and self._deleting.alive and whole[-1] == there[-1]:
            whole.pop()
        chosen = random.Random(f"rot {choice}")
        step = whole[-1] if newest else chosen.choice((whole[-1], chosen.choice(whole)))
        node = self.disk._find(list(RUN.checkpoint(step).parts[2:]), "")
        name = chosen.choice([*sorted(node.entries), MANIFEST])  # only the manifest is read before a deletion
        file = node.entries[name]
        if not file.data:
            return
        # The header before the tensors is much larger here.
        at = chosen.choice((chosen.randrange(len(file.data)), -1 - chosen.randrange(min(len(file.data), TENSORS))))
        file.data[at] ^= 1 << chosen.randrange(8)
        file.synced = bytes(file.data)
        self._spoiled.append((step, name, file.synced))
        self._note_rotten(step, name)
        if self.frozen is not None:
            self.frozen[f"{RUN.checkpoint(step)}/{name}"] = file.synced
        self.world.tell(f"loses a bit of {name}", f"checkpoint {step}")

    def _note_rotten(self, step: int, name: str) -> None:
        self.rotten.add(step)
        if name == MANIFEST:
            self.damaged.add(step)

    def on_end(self, process: Process) -> None:
        """Check that an attempt ends with a known status and a reason. Start the next one a while later."""
        said = "\n".join(process.output)
        self.must(
            not process.errors and "Traceback" not in said,
            f"{process.name} ended with a traceback:\n{''.join(process.errors) or said}",
        )
        if process.killed_by is None:
            known = process.status in set(ExitStatus)
            self.must(known, f"{process.name} ended with status {process.status}")
            self.must(said, f"{process.name} ended with status {process.status} and does not say why")
        while self._rots:
            self._rot(self._rots.pop(), newest=True)
        if self.frozen is None and not self.final:
            self.world.at(self.random.choice((0.5, 5.0, 40.0)) * self.random.random(), self._another)

    # ---- checks

    def _checkpoints(self) -> dict[int, dict[str, bytes]]:
        """Return the files of the committed checkpoints, by step."""
        found: dict[int, dict[str, bytes]] = {}
        for path, content in self.disk.tree().items():
            folder, _, name = path.rpartition("/")
            if match := COMMITTED.fullmatch(folder):
                found.setdefault(int(match[1]), {})[name] = content
        return found

    def _watch(self, what: str, path: str, to: str) -> None:
        if what != "rename":
            return
        if match := COMMITTED.fullmatch(to):
            self._appears(int(match[1]), path)
        elif match := COMMITTED.fullmatch(path):
            self._goes(int(match[1]), to)
        elif to == str(RUN.finished):
            self._finished()

    def _appears(self, step: int, path: str) -> None:
        """Check a checkpoint when it gets its name."""
        found = TEMPORARY.fullmatch(path)
        self.must(found, f"checkpoint {step} comes from {path}")
        fence = int(found[1])  # type: ignore[index]
        self.must(fence >= self.loaded, f"number {fence} committed step {step} although {self.loaded} had resumed")
        self._forget(step)
        self._deleting = self._process()
        wrong = self.undisturbed.differing(step, self._checkpoints()[step])
        self.must(not wrong, f"checkpoint {step} is not what it is without any strike: {', '.join(wrong)}")

    def _goes(self, step: int, to: str) -> None:
        """Check the deletion of a checkpoint, or its rename because it is corrupt."""
        found = TEMPORARY.fullmatch(to.rpartition("/")[0])
        self.must(found, f"checkpoint {step} becomes {to}")
        fence = int(found[1])  # type: ignore[index]
        self.must(fence >= self.loaded, f"number {fence} removed step {step} although {self.loaded} had resumed")
        if step not in self.rotten:
            self.must(self._whole(), f"checkpoint {step} is removed although no other one is whole")
            self.must(not to.endswith("corrupt"), f"checkpoint {step} is set aside although it is whole")
        if to.endswith("taken") and self._process() in self._keeps:  # not the command that prunes
            self._is_deleted(step)
        self._forget(step)
        self.reported.pop(step, None)

    def _is_deleted(self, step: int) -> None:
        """Check that enough newer checkpoints are kept, without those whose damage was visible."""
        retention, saved, damaged = self._keeps[self._process()]
        newer = [each for each in self._checkpoints() if step < each <= saved and each not in damaged]
        self.must(len(newer) >= retention.keep_last, f"checkpoint {step} is deleted, and only {newer} are kept")
        every = retention.keep_every_steps
        self.must(not every or step % every, f"checkpoint {step} is deleted, and every {every} steps one is to be kept")

    def _forget(self, step: int) -> None:
        self.rotten.discard(step)
        self.damaged.discard(step)

    def _process(self) -> Process | None:
        return self.world.current.process if self.world.current is not None else None

    def _whole(self) -> set[int]:
        """Return the steps of committed checkpoints without a changed bit."""
        return self._checkpoints().keys() - self.rotten

    def _cannot_load(self, error: str, before: set[int]) -> None:
        """Check that no checkpoint was intact `before` and still is, when an attempt cannot resume."""
        whole = sorted(before & self._whole())
        self.must(not whole or "is valid" not in error, f"checkpoint {whole[-1:]} is whole, but: {error}")

    def _has_committed(self, step: int, fence: int) -> None:
        self.reported[step] = fence

    def _begins_to_delete(self, retention: Retention, step: int) -> None:
        self._keeps[self._process()] = retention, step, frozenset(self.damaged)

    def _has_loaded(self, fence: int, step: int) -> None:
        """Check that an attempt resumes from the newest confirmed checkpoint, unless a newer attempt has resumed."""
        whole = max((each for each in self.reported if each not in self.rotten), default=0)
        self.must(step >= whole or fence < self.loaded, f"resumes at step {step}, but {whole} was committed")
        self.loaded = max(self.loaded, fence)

    def _records(self) -> dict[str, bytes]:
        """Return the files that must never change once a run is finished, without temporary files of other attempts."""
        kept = tuple(str(each) for each in (RUN.metrics, RUN.attempts, RUN.finished, RUN.checkpoints))
        tree = self.disk.tree().items()
        return {path: content for path, content in tree if path.startswith(kept) and ".tmp-" not in path}

    def _finished(self) -> None:
        """Check that a run marked as finished is complete and equal to the undisturbed run."""
        tree = self.disk.tree()
        self.must(json.loads(tree[str(RUN.finished)]) == {"steps": STEPS}, "the mark of the end is wrong")
        found = tree.get(str(RUN.metrics))
        self.must(found == self.undisturbed.metrics, f"metrics.jsonl differs at the end:\n{(found or b'').decode()}")
        self.must(STEPS in self._checkpoints(), "the run is finished without its last checkpoint")
        if self.frozen is None:
            self.frozen = {path: data for path, data in self._records().items() if path != str(RUN.finished)}
            finisher = self._process()
            self._finisher = finisher.name if finisher is not None else None

    def finish(self) -> None:
        """Check that a few undisturbed attempts finish the run and leave nothing behind."""
        self.final = True
        self.disk.full = False
        status = None
        for _ in range(LAST_ATTEMPTS):
            process = self._start(self.hosts[0], by_hand=True)
            self.world.run()
            status = process.status
            if status == 0:
                break
        self.must(status == 0, f"nobody can finish the run any more: status {status}: {process.output[-3:]}")
        self._finished()
        self._attempts_are_recorded()
        now = self._records()
        for path, content in (self.frozen or {}).items():
            self.must(now.get(path) == content, f"{path} of the finished run has changed")
        if self._may_leave_checkpoints():
            prune = partial(checkpoints_command.prune, RUN.checkpoints, STEPS, dry_run=False, as_json=False)
            self.spawn(self.hosts[0], "prune", prune)
            self.world.run()
        left = [path for path in self.disk.tree() if ".tmp-" in path]
        self.must(not left, f"files are left behind: {left}")

    def _attempts_are_recorded(self) -> None:
        """Check that each attempt has one line in the attempt log, in order, and that the last one finished the run."""
        lines = [json.loads(line) for line in self.disk.tree()[str(RUN.attempts)].splitlines()]
        numbers = [line["attempt"] for line in lines]
        self.must(numbers == list(range(1, len(lines) + 1)), f"attempts.jsonl has the attempts {numbers}")
        last = {name: lines[-1][name] for name in ("cause", "exit", "end_step")}
        self.must(last == {"cause": "finished", "exit": 0, "end_step": STEPS}, f"attempts.jsonl ends with {last}")

    def _may_leave_checkpoints(self) -> bool:
        """Return whether the finished run may have parts of deleted checkpoints, for `runner checkpoints --prune`.

        A disk may have refused their removal, or brought them back after a power loss. An attempt begins by removing
        such parts, but in a finished run no attempt does anything.
        """
        since = self.world.events[self._begun[self._finisher] :] if self._finisher is not None else []
        troubles = ("gets E", "loses power", "is full", "has room again")
        return any(event.shown and event.what.startswith(troubles) for event in since)


class _Quiet(Training):
    """The same run without strikes. It keeps all checkpoints, and its seed is the number of its kind."""

    name = "undisturbed"
    trees: ClassVar[dict[int, dict[str, bytes]]] = {}

    def __init__(self, world: World, seed: str) -> None:
        Scenario.__init__(self, world, seed)
        self.kind = int(seed)
        self._owner = self._task = None
        self._generators, self._gradients = {}, {}

    def begin(self) -> None:
        self.disk.make_dir(RUN.path)
        checkpoint = {"mode": "sync", "every_steps": 1, "keep_last": 1000}
        files.write_atomic(RUN.config, _text(self.kind, checkpoint))
        self.spawn(self.hosts[0], "attempt", partial(self._attempt, LocalJob()))

    def on_end(self, process: Process) -> None:
        self.must(process.status == 0, f"{process.errors} {process.output}")

    def _has_committed(self, step: int, fence: int) -> None: ...

    def _begins_to_delete(self, retention: Retention, step: int) -> None: ...

    def _whole(self) -> set[int]:
        return set()

    def _has_loaded(self, fence: int, step: int) -> None: ...

    def finish(self) -> None:
        self.trees[self.kind] = self.disk.tree()


@cache
def undisturbed(kind: int) -> Undisturbed:
    """Return the result of an undisturbed run of this kind."""
    story = play(_Quiet, Schedule(str(kind), ()))
    assert story.broken is None, story.broken
    made = Undisturbed(_Quiet.trees.pop(kind))
    assert made.metrics.count(b'"loss"') == STEPS
    return made


def _generators() -> Any:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_generators(state: Any) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
    torch.set_rng_state(state[2])
