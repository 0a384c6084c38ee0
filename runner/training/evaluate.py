"""Evaluate each saved checkpoint of a run once, even while the run trains."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from runner.checkpoint.files import choice
from runner.checkpoint.files.choice import Candidate, Intact
from runner.checkpoint.files.directory import store_of
from runner.config.frozen import trained
from runner.config.schema import Config
from runner.contracts import Job
from runner.data.messages import words_of_config
from runner.errors import CheckpointError, ExitStatus, FileError, UnreadableError, UserError
from runner.rundir.evaluations import ALL, Request, add, evaluated
from runner.rundir.paths import RunDir
from runner.rundir.trust import check_trusted
from runner.system import files, processes
from runner.system.distributed import World
from runner.system.signals import STOP
from runner.training import signalled
from runner.training.attempt import beginning, carry_out
from runner.training.evaluation.evaluation import Evaluation
from runner.training.evaluation.held_out import evaluation_sets
from runner.training.evaluation.metrics import build_metrics
from runner.training.exactness import begin_exactly
from runner.training.load import restore, train_state
from runner.training.model import build
from runner.training.records.run_state import RunState
from runner.training.step.step import Forward
from runner.training.step.tasks import build_task

Say = Callable[[str], None]


class Evaluator:
    """Evaluate a checkpoint exactly as the run would have. On the same held-out data, results are bitwise identical.

    All sets are evaluated, regardless of their cadence.

    Args:
        config: the run's config, optionally with different settings under `eval` and `data.eval_sources`.
        first: train state of a checkpoint of the run.
        world: the ranks that share the batches. Each rank holds the complete model.

    Raises:
        UserError: there are no held-out data, or the task or a metric cannot be used with the data or model.
    """

    def __init__(self, config: Config, first: Mapping[str, Any], world: World) -> None:
        config = every_set(config)
        device = begin_exactly(config, world)
        self._world = world
        self._task = build_task(config)
        self._model = build.model(config).to(device)
        # The run evaluates averaged weights without torch.compile, and the trained weights with it.
        compiles = config.train.compile and config.train.ema_decay is None
        computing = build.compiled(self._model, device) if compiles else self._model
        forward = Forward(world, device, computing, self._task, build.autocast(config, device))
        build.seed_everything(config.seed)
        sets = evaluation_sets(config, world)
        self._task.check_evaluation()
        self._evaluation = Evaluation(forward, sets, build_metrics(config, device), config.seed)

    def results(self, chosen: Intact, stop: Callable[[], bool]) -> dict[str, Any] | None:
        """Return the results of a verified checkpoint, or None if `stop()` returned True. All ranks must agree on it.

        Raises:
            UserError: the checkpoint does not match the model, or the task or a metric cannot be used.
            CheckpointError: a rank can no longer read the checkpoint. Raised on every rank.
        """
        self._world.run_on_all(lambda: self._restore(chosen))
        return self._evaluation.run(chosen.step, stop)

    def _restore(self, chosen: Intact) -> None:
        with still_there(chosen):
            restore(self._model, chosen)
            self._task.restore(RunState.from_extra(train_state(chosen)).task, self._world.rank)


@contextmanager
def still_there(chosen: Intact) -> Iterator[None]:
    """Report a checkpoint that the run deletes while this process reads it.

    Raises:
        CheckpointError: the run has deleted the checkpoint.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{chosen.path} was deleted meanwhile") from error


def every_set(config: Config) -> Config:
    """Return `config` with all evaluations due at every step.

    Raises:
        UserError: the config has no held-out data.
    """
    if not config.data.eval_sources:
        raise UserError("there is nothing to evaluate: set data.eval_sources.NAME to held-out data")
    sets = {name: replace(one, every_steps=1) for name, one in config.eval.sets.items()}
    return replace(config, eval=replace(config.eval, every_steps=1, every_epochs=None, sets=sets))


@dataclass
class Work:
    """Carry out an evaluation request. Several processes can evaluate the same run at the same time.

    Attributes:
        run: the run directory. Only results are written to it.
        request: the checkpoints to evaluate, and the settings.
        config: the run's config with the request's settings.
        world: the ranks.
        stop: function that returns True if a signal asked this process to stop. Its result may differ between ranks.
        say: function that shows a line, such as a warning. Called on rank 0.
        on_progress: called on rank 0 after each checkpoint, and when no checkpoint is left to evaluate.
    """

    run: RunDir
    request: Request
    config: Config
    world: World
    stop: Callable[[], bool]
    say: Say = print
    on_progress: Callable[[], None] = lambda: None
    unusable: dict[int, str] = field(default_factory=dict)
    """The steps that a request for `all` skipped, each with the reason."""
    added: list[int] = field(default_factory=list)
    """On rank 0, the steps for which this process has added results."""
    _evaluator: Evaluator | None = None

    def do(self) -> bool:
        """Evaluate the missing checkpoints. Return False if a signal stopped this before the end.

        Raises:
            UserError: the requested checkpoint does not exist, or the config does not match the data, model or metrics.
            UnreadableError: a checkpoint cannot be read from disk. The remaining checkpoints were evaluated.
        """
        steps = self.world.run_on_main(self._begin)
        unread: UnreadableError | None = None
        for step in steps:
            if self._stop_agreed():
                return False
            if self.world.run_on_main(partial(self._is_evaluated, step)):
                continue
            try:
                if not self._evaluate(step):
                    return False
            except UnreadableError as error:  # a disk error does not mean that the checkpoint is corrupt
                unread = error
                self._warn(f"step {step} is left for the next time: {error}")
        if unread is not None:
            raise unread
        self.world.run_on_main(self.on_progress)
        return True

    def _begin(self) -> list[int]:
        with refused_in(self.run.evaluations):  # report errors before computing anything
            files.make_dirs_in(self.run.path, self.run.evaluations)
        return wanted(self.run, self.request)

    def _is_evaluated(self, step: int) -> bool:
        return step in evaluated(self.run, self.request.settings)

    def _stop_agreed(self) -> bool:
        return any(self.world.gather(self.stop()))

    def _evaluate(self, step: int) -> bool:
        """Evaluate one checkpoint. Return False if a signal stopped the evaluation.

        Raises:
            UnreadableError: the request is for `all`, and the checkpoint cannot be read from disk.
        """
        try:
            # Every rank reads and verifies the checkpoint. If one rank fails, all ranks fail.
            chosen = self.world.run_on_all(lambda: choice.choose(store_of(self.run), step))
        except (UserError, OSError) as error:
            return self._left_out(step, error)
        try:
            evaluator = self._evaluator or self._made(chosen)
            results = evaluator.results(chosen, self._stop_agreed)
        except CheckpointError as error:
            return self._left_out(step, error)
        except Exception as error:  # a killed compiler may raise any exception
            if self.world.size > 1 or not signalled.is_stop(error):  # other ranks wait for this rank
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
        """Skip a step whose checkpoint cannot be used, and return True. Runs on every rank.

        Raises:
            UserError, OSError: `error`, if the request was only for this step, or if the checkpoint did not cause the
                error.
        """
        there = self.world.run_on_main(lambda: self._may_be_there(step))
        about = isinstance(error, CheckpointError) and not isinstance(error, UnreadableError)
        if self.request.step != ALL or (there and not about):
            raise error
        self.unusable[step] = str(error)  # corrupt, or deleted by the run in the meantime
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
            add(self.run, record)
        self.added.append(record["step"])
        if self.request.step == ALL:
            numbers = ", ".join(f"{name} {value:.4f}" for name, value in record.items() if isinstance(value, float))
            self.say(f"step {record['step']}: {numbers}")
        self.on_progress()

    def _made(self, chosen: Intact) -> Evaluator:
        def first() -> dict[str, Any]:
            with still_there(chosen):
                return train_state(chosen)

        self._evaluator = Evaluator(self.config, self.world.run_on_all(first), self.world)
        return self._evaluator


def attempt(directory: str | os.PathLike[str], job: Job) -> int:
    """Carry out the submitted request in `directory` and return the exit status. Errors are printed.

    A job that is asked to stop ends after the current batch, and is requeued if the cause of the stop requires it. A
    start succeeds once a checkpoint is evaluated, or if there is no checkpoint to evaluate. A job that is killed three
    times in a row before a successful start is not restarted.
    """
    STOP.install()
    path = Path(directory).absolute()
    if job.auto_restarts and int(processes.environment.get("RANK", "0")) == 0:
        # Report the cause immediately, because the job may be killed before the batch is done.
        STOP.listen(lambda signum: print(f"{job.cause(signum)}: stopping after this batch", flush=True), job.cause)
    return carry_out(path, job, words_of_config()(lambda world: _attempt(path, job, world)))


def _attempt(directory: Path, job: Job, world: World) -> ExitStatus:
    run = RunDir(directory.parent.parent)
    with beginning(job):
        check_trusted(run)
        check_trusted(RunDir(directory))
        request = Request.read(directory)
        config = trained(request.config)
        config = replace(config, run=replace(config.run, dir=str(run.path)))
    if world.size > 1:
        world.start(build.choose_device(config.train.device, world))
    work = Work(run, request, config, world, lambda: bool(STOP), on_progress=job.on_started)
    with beginning(job):  # there is no attempt log, so disk errors are counted as failed starts
        done = work.do()
    if not done:
        if not world.is_main:
            job.yield_verdict()  # rank 0 decides how the job ends
        return world.run_on_main(lambda: _interrupted(job))
    if world.is_main:
        print(f"evaluated: results in {run.evaluations}")
    return ExitStatus.FINISHED


def _interrupted(job: Job) -> ExitStatus:
    STOP.wait_for_listener()
    cause = job.requeue_if_needed(job.cause(STOP.signum or 0))
    print(f"{cause} ({STOP.name}): the evaluation continues with the next checkpoint that has no results")
    return ExitStatus.INTERRUPTED


@contextmanager
def refused_in(path: Path) -> Iterator[None]:
    """Convert an error of the file system at `path` into a one-line error."""
    try:
        yield
    except OSError as error:
        raise FileError(
            f"{path} cannot be written ({error.strerror or error}): what was evaluated before is kept; make sure of "
            "space and permission there, and rerun the command for the others"
        ) from error


def committed(run: RunDir) -> list[int]:
    """Return the steps of all checkpoints in ascending order, including corrupt ones.

    Raises:
        CheckpointError: the directory of checkpoints is not readable.
    """
    return sorted(one.step for one in choice.candidates(store_of(run)))


def wanted(run: RunDir, request: Request, on_corruption: Callable[[Candidate, str], None] | None = None) -> list[int]:
    """Return the steps of the requested checkpoints, in ascending order.

    Args:
        run: the run directory.
        request: the request. Only its `step` is used.
        on_corruption: called with each corrupt checkpoint that is newer than the one that `last` selects, and a
            description of its corruption.

    Raises:
        UserError: the requested checkpoint does not exist.
    """
    if request.step == ALL:
        steps = committed(run)
        if not steps:
            raise UserError(f"{run.checkpoints} has no checkpoint")
        return steps
    known = evaluated(run, request.settings)
    if request.step.isdigit() and int(request.step) in known:
        return [int(request.step)]  # the checkpoint may have been deleted
    return [choice.choose(store_of(run), request.step, on_corruption).step]
