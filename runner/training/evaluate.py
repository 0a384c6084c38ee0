"""Evaluations of checkpoints that a run has saved, by its settings or others: each once, also while it trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from runner.checkpoint import choice, pins
from runner.checkpoint import directory as checkpoint_dir
from runner.checkpoint.directory import Candidate
from runner.config.schema import Config
from runner.errors import CheckpointError, FileError, LockedError, StoppedError, UnreadableError, UserError
from runner.rundir.evaluations import ALL, Following, Request, add, evaluated, make_work, work_lease
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.system import clock, files
from runner.system.distributed import World
from runner.training import signalled
from runner.training.evaluation.evaluation import Evaluation
from runner.training.evaluation.held_out import evaluation_sets
from runner.training.evaluation.metrics import build_metrics
from runner.training.exactness import make_exact
from runner.training.load import restore, train_state
from runner.training.model import build
from runner.training.records.run_state import RunState
from runner.training.step.step import Forward
from runner.training.step.tasks import build_task

POLL_S = 2.0
"""Pause between two looks for a new checkpoint."""
UNLIMITED_S = 10.0**9

Say = Callable[[str], None]


class Evaluator:
    """Computes what the run itself records: for the same held-out data, the same bits.

    Every set is evaluated, whatever its cadence.

    Args:
        config: what the run trains by, perhaps with other settings under `eval` and `data.eval_sources`.
        first: the train state of a checkpoint of the run.
        world: the ranks among which the batches are divided; each holds the whole model.

    Raises:
        UserError: there are no held-out data, or the task or a metric does not fit.
    """

    def __init__(self, config: Config, first: Mapping[str, Any], world: World) -> None:
        config = every_set(config)
        device = build.choose_device(config.train.device, world)
        make_exact(config, device)
        torch.set_num_threads(config.run.threads)  # their number decides how sums are split
        build.seed_everything(config.seed)
        self._world = world
        self._task = build_task(config)
        self._model = build.model(config).to(device)
        # The run evaluates its average as it is, and its weights compiled.
        compiles = config.train.compile and config.train.ema_decay is None
        computing = build.compiled(self._model, device) if compiles else self._model
        forward = Forward(world, device, computing, self._task, build.autocast(config, device))
        build.seed_everything(config.seed)
        sets = evaluation_sets(config, world)
        self._task.check_evaluation()
        self._evaluation = Evaluation(forward, sets, build_metrics(config, device), config.seed)

    def results(self, chosen: Candidate, stop: Callable[[], bool]) -> dict[str, Any] | None:
        """The results of a verified checkpoint; None if `stop()`, agreed across ranks, is true before the end.

        Raises:
            UserError: the checkpoint, the task or a metric does not fit.
            CheckpointError: on every rank: one of them cannot read the checkpoint any more.
        """
        self._world.run_on_all(lambda: self._restore(chosen))
        return self._evaluation.run(chosen.step, stop)

    def _restore(self, chosen: Candidate) -> None:
        with still_there(chosen):
            restore(self._model, chosen)
            self._task.restore(RunState.from_extra(train_state(chosen)).task, self._world.rank)


@contextmanager
def still_there(chosen: Candidate) -> Iterator[None]:
    """While a verified checkpoint is read: the run may delete it meanwhile.

    Raises:
        CheckpointError: it has.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{chosen.path} was deleted meanwhile") from error


def every_set(config: Config) -> Config:
    """`config` with all of its evaluations due at every step.

    Raises:
        UserError: it has no held-out data.
    """
    if not config.data.eval_sources:
        raise UserError("there is nothing to evaluate: set data.eval_sources.NAME to held-out data")
    sets = {name: replace(one, every_steps=1) for name, one in config.eval.sets.items()}
    return replace(config, eval=replace(config.eval, every_steps=1, sets=sets))


@dataclass
class Work:
    """Carries out a request, alone or beside other processes that evaluate the same run.

    Attributes:
        run: the run directory, of which only the evaluations are written.
        request: what to evaluate.
        config: the run's config with the request's settings.
        world: of this process.
        stop: whether a signal asked this process to stop; need not be agreed across ranks.
        holder: describes this process, as for a lease.
        say: shows a warning; called on rank 0.
        show: shows the results of a checkpoint; called on rank 0.
        on_progress: called on rank 0 after each checkpoint, and once there is none to evaluate.
        given_up: whether nobody wants the results any more.
    """

    run: RunDir
    request: Request
    config: Config
    world: World
    stop: Callable[[], bool]
    holder: Mapping[str, Any] = field(default_factory=dict)
    say: Say = print
    show: Say = print
    on_progress: Callable[[], None] = lambda: None
    given_up: Callable[[], bool] = lambda: False
    unusable: dict[int, str] = field(default_factory=dict)
    """Of `all`: the steps that were left out, and why."""
    added: list[int] = field(default_factory=list)
    """The steps whose results this process has added; on rank 0."""
    _unread: dict[int, UnreadableError] = field(default_factory=dict)
    """Of `all`: the steps that are put off, since the disk has refused to read them."""
    _evaluator: Evaluator | None = None
    _wanted: list[int] = field(default_factory=list)

    def do(self) -> str:
        """Evaluate what is missing; `done`, `stopped` by a signal, or the state in which a followed run has stopped.

        Raises:
            UserError: there is no such checkpoint, or something does not fit.
            UnreadableError: the disk refuses to read one; all others are evaluated.
        """
        self._wanted = self.world.run_on_main(lambda: wanted(self.run, self.request))
        if not self.request.follow:
            return "done" if self._all_there_are() and self._put_off() else "stopped"
        outcome = self._follow()
        if outcome != "stopped":
            self.world.run_on_main(lambda: pins.evaluation_done(self.run.checkpoints, self.request.name))
        return "done" if outcome == "finished" else outcome

    def _missing(self) -> list[int]:
        """The steps that are to be evaluated and are not yet, the oldest first."""
        done = evaluated(self.run, self.request.settings).keys() | self.unusable.keys() | self._unread.keys()
        steps = committed(self.run) if self.request.follow else self._wanted
        return [step for step in steps if step not in done]

    def _follow(self) -> str:
        """As `do`: `finished`, `stopped`, `given up` or the state of the run."""
        following = Following(self.run, self.config.known_steps, self.config.train.epochs)
        while True:
            # Asked before the look for checkpoints: the last one is saved before the run is over.
            over = self.world.run_on_main(following.over)
            if not self._all_there_are():
                return "stopped"
            if self.world.run_on_main(self.given_up):
                return "given up"
            if over is not None:
                return over if self._put_off() else "stopped"
            if not self._pause():
                return "stopped"

    def _pause(self) -> bool:
        """Wait before the next look; False if asked to stop."""
        end = clock.monotonic() + POLL_S
        while clock.monotonic() < end and not self.stop():
            clock.sleep(0.05)
        return not self._stop_agreed()

    def _stop_agreed(self) -> bool:
        return any(self.world.gather(self.stop()))

    def _all_there_are(self) -> bool:
        """Evaluate the checkpoints that are there and missing in the results; False if asked to stop."""
        while True:
            if self._stop_agreed():
                return False
            missing = self.world.run_on_main(self._missing)
            if self.request.follow:
                self.world.run_on_main(self._keep)
            if not missing or self.world.run_on_main(self.given_up):
                if not self._unread:
                    self.world.run_on_main(self.on_progress)
                return True
            if not self._one(missing[0]):
                return False

    def _put_off(self) -> bool:
        """Evaluate what the disk has refused to read before; False if asked to stop.

        Raises:
            UnreadableError: it still refuses.
        """
        if not self._unread:
            return True
        self._unread.clear()
        finished = self._all_there_are()
        for error in self._unread.values():
            raise error
        return finished

    def _keep(self) -> None:
        """Let retention keep what is to be evaluated."""
        if files.is_dir(self.run.checkpoints):
            done = evaluated(self.run, self.request.settings)
            # Another process that has just ended this evaluation may have removed the temporary file.
            with refused_in(self.run.checkpoints), suppress(FileNotFoundError):
                pins.await_evaluation(self.run.checkpoints, self.request.name, done, self.request.keep)

    def _one(self, step: int) -> bool:
        """Evaluate one checkpoint, unless another process is faster; False if asked to stop."""
        with ExitStack() as held:
            if not self.world.run_on_main(lambda: self._acquire(held)):
                return False
            if self.world.run_on_main(lambda: step in evaluated(self.run, self.request.settings)):
                return True
            return self._evaluate(step)

    def _acquire(self, held: ExitStack) -> bool:
        """Acquire the lease of these settings, however long another process keeps it; False if asked to stop."""
        directory = work_lease(self.run, self.request.settings)
        make_work(self.run, directory, self.holder, self.config.run.lease_timeout_s)
        try:
            lease = Lease.acquire(
                directory,
                self.holder,
                self.config.run.lease_timeout_s,
                wait_s=UNLIMITED_S,
                asked_to_stop=self.stop,
                report=self.say,
                within=self.run.path,
            )
        except (LockedError, StoppedError):
            return False
        held.enter_context(lease)
        return True

    def _evaluate(self, step: int) -> bool:
        try:
            # Every rank reads and verifies it, so that all of them fail if one does.
            chosen = self.world.run_on_all(lambda: choice.choose(self.run.checkpoints, step))
        except (UserError, OSError) as error:
            return self._left_out(step, error)
        try:
            evaluator = self._evaluator or self._made(chosen)
            results = evaluator.results(chosen, self._stop_agreed)
        except CheckpointError as error:
            return self._left_out(step, error)
        except Exception as error:  # whatever a compiler's end came up as
            if self.world.size > 1 or not signalled.is_stop(error):  # other ranks wait for this one
                raise
            self._warn(signalled.line(error))
            return False
        if results is None:
            return False
        request = self.request
        record = {"step": step, **results, "digest": request.settings}
        if request.overrides:
            record |= {"settings": request.settings, "overrides": list(request.overrides)}
        self.world.run_on_main(lambda: self._add(record))
        return True

    def _left_out(self, step: int, error: UserError | OSError) -> bool:
        """Go on without a step whose checkpoint cannot be used, as every rank knows; True.

        Raises:
            UserError, OSError: the `error`, if that step alone was asked for, or its checkpoint is not why.
        """
        there = self.world.run_on_main(lambda: self._may_be_there(step))
        if self.request.step != ALL or (there and not isinstance(error, CheckpointError)):
            raise error
        if there and isinstance(error, UnreadableError):  # which says nothing about the checkpoint
            self._unread[step] = error
            self._warn(f"step {step} is tried again at the end: {error}")
        else:  # corrupt, or deleted by the run meanwhile
            self.unusable[step] = str(error)
            self._warn(f"step {step} is left out: {error}")
        return True

    def _may_be_there(self, step: int) -> bool:
        with suppress(OSError):
            return files.is_dir(self.run.checkpoint(step))
        return True

    def _warn(self, message: str) -> None:
        if self.world.is_main:
            self.say(f"warning: {message}")

    def _add(self, record: dict[str, Any]) -> None:
        with refused_in(self.run.evaluations):
            if add(self.run, record, self.holder, self.config.run.lease_timeout_s):
                self.added.append(record["step"])
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in record.items() if isinstance(value, float))
        self.show(f"step {record['step']}: {numbers}")
        self.on_progress()

    def _made(self, chosen: Candidate) -> Evaluator:
        def first() -> dict[str, Any]:
            with still_there(chosen):
                return train_state(chosen)

        self._evaluator = Evaluator(self.config, self.world.run_on_all(first), self.world)
        return self._evaluator


@contextmanager
def refused_in(path: Path) -> Iterator[None]:
    """Turn a refusal of the file system to write at `path` into an error of one line."""
    try:
        yield
    except OSError as error:
        raise FileError(
            f"{path} cannot be written ({error.strerror or error}): what was evaluated before is kept; make sure of "
            "space and permission there, and rerun the command for the others"
        ) from error


def committed(run: RunDir) -> list[int]:
    """The steps of all checkpoints in ascending order, those that turn out to be corrupt included.

    Raises:
        CheckpointError: their directory is not readable.
    """
    return sorted(one.step for one in checkpoint_dir.candidates(run.checkpoints))


def wanted(run: RunDir, request: Request, on_corruption: Callable[[Candidate, str], None] | None = None) -> list[int]:
    """The steps of the checkpoints that a request means, in ascending order.

    Args:
        run: the run directory.
        request: of which `step` counts.
        on_corruption: called with each corrupt checkpoint that is newer than the one that `last` means.

    Raises:
        UserError: there is no such checkpoint.
    """
    if request.step == ALL:
        steps = committed(run)
        if not steps and not request.follow:
            raise UserError(f"{run.checkpoints} has no checkpoint")
        return steps
    known = evaluated(run, request.settings)
    if request.step.isdigit() and int(request.step) in known:
        return [int(request.step)]  # the checkpoint may be gone
    return [choice.choose(run.checkpoints, request.step, on_corruption).step]
