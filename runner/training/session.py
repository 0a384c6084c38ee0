"""Build an attempt's objects from the config, restore the newest checkpoint, and train."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from exactdata import generators
from exactdata.order.batch_shape import BatchShape
from runner.checkpoint import TrainStateManager, restore_train_state
from runner.config.frozen import load_plain
from runner.config.identity import evaluation_digest
from runner.config.schema import Config, NonFinite
from runner.metrics.lineage import FINISHED, STOPPED
from runner.rundir.attempt_log import AttemptLog
from runner.rundir.evaluations import add, recorded
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.rundir.time_account import TimeAccount
from runner.system.distributed import World
from runner.system.signals import STOP
from runner.training.branch import fitting, restarts_optimizers, trunk_of
from runner.training.callbacks.callbacks import Callbacks
from runner.training.data.consumption import Consumption
from runner.training.data.epoch_steps import EpochSteps
from runner.training.data.order import batch_shape, warn_of_idle_ranks, with_steps
from runner.training.data.sources import fingerprint, mean_tokens, open_sources, tokens_per_sample, with_weights
from runner.training.data.training_data import open_training_data, record_order, run_state_at
from runner.training.effects import mixing_without_effect
from runner.training.ending import EarlyEnd, Ending
from runner.training.evaluation.evaluation import Evaluation
from runner.training.exactness import begin_exactly, inexact
from runner.training.model import footprint
from runner.training.model.build import seed_everything
from runner.training.records.profiler import Profiler
from runner.training.records.recorder import Recorder
from runner.training.records.resources import StepMeter
from runner.training.records.run_state import RunState
from runner.training.records.start import open_recorder, show_start
from runner.training.records.warnings import WarningHandler, warnings_forwarded
from runner.training.saving import check_beginning, fence_check, make_cadence, make_manager
from runner.training.step.step import TrainStep
from runner.training.step.tasks import build_task
from runner.training.step.trained import Trained
from runner.training.trainer import Trainer

_log = logging.getLogger(__name__)


@dataclass
class Session:
    """An attempt's objects, restored and ready to train."""

    trainer: Trainer
    steps: int  # length of the run, known once the data are opened
    warm_up: threading.Thread
    handler: WarningHandler | None = None

    @property
    def step(self) -> int:
        return self.trainer.step

    @property
    def early_end(self) -> EarlyEnd | None:
        """Return the reason why the run ended before its last step, or None if it did not."""
        return self.trainer.early_end if self.step < self.steps else None

    @property
    def account(self) -> TimeAccount:
        return self.trainer.account

    @property
    def recorder(self) -> Recorder:
        return self.trainer.recorder

    @property
    def paused(self) -> bool:
        """Return whether training has paused at the requested step, before the last step."""
        return self.trainer.paused

    def train(self, steps: int | None = None, pause: int | None = None, metric: str | None = None) -> bool:
        """Train to `steps`, by default to the end of the run. Return False if a signal arrived before that.

        All files are closed at the end, even after an error.

        Args:
            steps: length of the run.
            pause: end at this step if it is before the end of the run.
            metric: the metric that a search compares.
        """
        try:
            finished = self.trainer.run(self.steps if steps is None else steps, pause, metric)
            self.recorder.state = FINISHED if finished and not self.paused else STOPPED
            self.recorder.reason = early.reason if finished and (early := self.early_end) else None
            return finished
        finally:
            self.trainer.manager.settle()
            self.trainer.profiler.close()
            self.close()
            if self.warm_up.is_alive():
                self.warm_up.join()  # the interpreter must not shut down during an import

    def close(self) -> None:
        """Close the recorder and stop forwarding warnings."""
        self.recorder.close()
        if self.handler is not None:
            self.handler.remove()

    @staticmethod
    def open(run: RunDir, config: Config, world: World, log: AttemptLog | None, lease: Lease | None) -> Session:
        """Build everything, restore the newest checkpoint, and truncate the metrics to its step.

        Args:
            run: the run directory.
            config: config of the run.
            world: the ranks.
            log: attempt log on rank 0, otherwise None.
            lease: lease of the run directory on rank 0, otherwise None.

        Raises:
            UserError: the config, the data and the checkpoint do not match.
        """
        with warnings_forwarded(log) as handler:
            return _Opening(run, config, world, log, lease, handler).session()


@dataclass(frozen=True)
class _Restored:
    """The parts of a session that a checkpoint restores, and the checkpoint's entries for the other parts.

    Attributes:
        datasets: sources by name.
        state: the train state. Empty for a new run.
        saved: the runner's entries in the train state, or None for a new run.
        run_state: the runner's entries for this attempt.
    """

    datasets: dict[str, Any]
    trained: Trained
    manager: TrainStateManager
    state: Mapping[str, Any]
    step: int
    saved: RunState | None
    run_state: RunState

    @property
    def shapes(self) -> tuple[BatchShape, ...]:
        return self.run_state.batch_shapes


@dataclass
class _Opening:
    """Build the parts of a session, one after the other."""

    run: RunDir
    config: Config
    world: World
    log: AttemptLog | None
    lease: Lease | None
    handler: WarningHandler | None
    shapes: tuple[BatchShape, ...] = ()  # from the checkpoint, if the number of steps per epoch depends on them

    def __post_init__(self) -> None:
        self.account = self.log.account if self.log else TimeAccount()

    def session(self) -> Session:
        restored = self._restored()
        if self._with_steps(restored.datasets, restored.shapes) != self.config:
            # The batch shape has changed, and therefore the number of steps. The schedule depends on it, so build
            # everything again.
            self.shapes = restored.shapes
            restored = self._restored()
        return self._assembled(restored)

    def _with_steps(self, datasets: dict[str, Any], shapes: tuple[BatchShape, ...]) -> Config:
        return with_steps(self.config, [len(dataset) for dataset in datasets.values()], shapes)

    def _restored(self) -> _Restored:
        """Build and restore the objects that are trained and saved. Data order and generators are restored later."""
        device = begin_exactly(self.config, self.world)
        datasets = open_sources(self.config)
        self._weigh(datasets)
        task = build_task(self.config)
        config = self.config = self._with_steps(datasets, self.shapes or (batch_shape(self.config, self.world, 0),))
        trained = Trained.build(task, config, self.run, self.world, device)
        seed_everything(config.seed, self.world.rank)
        manager = make_manager(config, self.run, self.lease, fingerprint(config, datasets))
        with self.account.doing("restore"), fitting(self.run, self.config):
            state = self._load(manager, trained)
        if not state:
            self.world.run_on_main(lambda: check_beginning(config, self.run, self.log))
        step = int(state["step"]) if state else 0
        saved = RunState.from_extra(state) if state else None
        return _Restored(datasets, trained, manager, state, step, saved, run_state_at(step, config, self.world, saved))

    def _weigh(self, datasets: dict[str, Any]) -> None:
        """Fill in the weights that depend on the data. Warn if a temperature has no effect with these weights."""
        config = with_weights(self.config, datasets)
        if config is not self.config and self.world.is_main:
            for line in mixing_without_effect(config):
                _log.warning(line)
        self.config = config

    def _load(self, manager: TrainStateManager, trained: Trained) -> Mapping[str, Any]:
        """Restore model and optimizers. Return the train state, which is empty for a new run."""
        averaged = trained.average.averaged if trained.average else None
        restarts = partial(restarts_optimizers, self.config)
        return manager.load(trained.model, trained.optimizers, averaged, another_optimizer=restarts) or {}

    def _assembled(self, of: _Restored) -> Session:
        """Build the session around the restored parts."""
        config, world, step, saved, trained = self.config, self.world, of.step, of.saved, of.trained
        if world.is_main:  # rank 0 writes the records
            for reason in inexact(config, trained.device, of.run_state, saved):
                _log.warning(f"not exact: {reason}")
            warn_of_idle_ranks(of.shapes[-1])
        trained.task.check_state()
        consumption = open_training_data(config, world, of.datasets, trained.device, of.run_state, saved, step)
        tokens = self._restore_position(of, consumption)
        before = generators.states(gpus=True)
        if saved is not None:
            consumption.load_state_dict(saved.order)
            trained.task.restore(saved.task, world.rank)
        if world.is_main:
            record_order(self.run, config, consumption, of.datasets, of.shapes)
        callbacks = Callbacks.open(config, world, self.run, trained.bare, trained.device, saved)
        meter = StepMeter(trained.device)
        recorder = self._recorder(of, meter)
        callbacks.recorder, callbacks.seconds = recorder, meter.callbacks
        stated = mean_tokens(of.datasets)
        train_step = TrainStep.build(trained, config, world, of.run_state, consumption.names, stated)
        # The imports for the first save take a second, so do them in a thread after the first step.
        warm_up = threading.Thread(target=of.manager.warm_up, name="warm up", daemon=True)
        epochs = EpochSteps.of(config, [len(dataset) for dataset in of.datasets.values()], of.shapes)
        evaluation = Evaluation.open(config, train_step.forward, trained.average, epochs)
        generators.put_back(before)  # objects created since then may have drawn random numbers
        trainer = Trainer(
            train_step=train_step,
            consumption=consumption,
            evaluation=evaluation,
            manager=of.manager,
            cadence=make_cadence(config, self.log, step, epochs),
            recorder=recorder,
            run_state=of.run_state,
            stop=lambda: bool(STOP),
            check_fence=fence_check(self.lease),
            skip_nonfinite=config.train.on_nonfinite is NonFinite.skip,
            step=step,
            tokens_seen=tokens,
            after_first_step=warm_up.start,
            callbacks=callbacks,
            ending=self._ending(callbacks, saved),
            account=self.account,
            meter=meter,
            profiler=Profiler.open(config, self.run, world, self.log, step, trained.device),
        )
        return Session(trainer, config.steps, warm_up, self.handler)

    def _ending(self, callbacks: Callbacks, saved: RunState | None) -> Ending:
        """Create the `Ending`, which may end the run before its last step. Rank 0 passes it the evaluations so far."""
        options, nodes = self.config.early_stopping, self.config.callbacks
        so_far = list(recorded(self.run)) if self.world.is_main and options.is_set else []
        named = {name: node for name, node in nodes.items() if node is not None}
        return Ending(options, named, callbacks, so_far, saved.stop_asked if saved else {})

    def _restore_position(self, of: _Restored, consumption: Consumption) -> int:
        """Restore loader, schedules and random generators. Return the number of tokens seen so far."""
        anew, optimizers = restarts_optimizers(self.config, of.step), of.trained.optimizers
        with fitting(self.run, self.config):
            _, tokens, _ = restore_train_state(of.state, None if anew else optimizers, consumption.loader)
            if anew:
                optimizers.restart(of.state["scheduler"], of.step)
        if (seed := self.config.fork.seed_at(of.step)) is not None:
            seed_everything(seed, self.world.rank, of.step)
        return tokens

    def _recorder(self, of: _Restored, meter: StepMeter) -> Recorder:
        if self.log is None:
            return Recorder()
        recorder = open_recorder(
            self.run,
            self.config,
            self.log,
            meter,
            of.step,
            of.run_state.evaluated,
            trunk_of(self.config),
            lambda: of.manager.last_save,
            self._add_evaluation,
        )
        if self.handler is not None:
            self.handler.warn = recorder.warn
        if of.trained.device.type == "cuda":
            self.log.note(gpus=self.world.size)
        show_start(recorder, self.config, of.step, self.world.size)
        recorder.bar.say(f"model: {self._model(of)}")
        return recorder

    def _model(self, of: _Restored) -> str:
        """Describe the model on this rank, and the samples per step."""
        average = of.trained.average is not None
        held = footprint.measured(of.trained.model, of.trained.optimizers, average)
        stated, samples = tokens_per_sample(of.datasets), None
        if of.datasets:
            samples = of.shapes[-1].global_batch_size
        same = len({*stated.values()}) == 1 and len(stated) == len(of.datasets)
        return f"{held}{footprint.per_step(self.world.size, samples, next(iter(stated.values())) if same else None)}"

    def _add_evaluation(self, record: dict[str, Any]) -> None:
        """Add a result to the results of `runner evaluate`, which then skips this evaluation.

        Raises:
            OSError: the file system returned an error.
        """
        add(self.run, {**record, "digest": evaluation_digest(load_plain(self.run.path))})
