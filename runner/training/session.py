"""The objects of one attempt: built from the config, restored from the newest checkpoint, trained."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from runner.checkpoint import TrainStateManager, restore_train_state
from runner.checkpoint.cadence import AdaptiveInterval, Cadence
from runner.checkpoint.directory import Fence
from runner.checkpoint.reading import in_one_line, newest_step
from runner.config.frozen import load_plain
from runner.config.identity import evaluation_digest
from runner.config.plain_yaml import read_plain
from runner.config.schedule import unreached_phases
from runner.config.schema import Config, NonFinite, Strategy, phase_schedule, profiled_steps
from runner.config.targets import instantiate
from runner.data import StatefulDataLoader
from runner.data.order.batch_shape import BatchShape, append_shape
from runner.data.order.ledger import DataLedger
from runner.errors import MismatchError, UserError
from runner.metrics import resume_records
from runner.metrics.lineage import FINISHED, STOPPED, Fork, Lineage
from runner.metrics.progress import ProgressBar
from runner.rundir.attempt_log import AttemptLog, insist
from runner.rundir.evaluations import add
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.rundir.time_account import TimeAccount, lived_s
from runner.system import clock, files, generators, processes
from runner.system.distributed import World
from runner.system.signals import STOP
from runner.training.branch import restarts_optimizers, take_over, trunk_of
from runner.training.callbacks.callbacks import Callbacks
from runner.training.data.consumption import (
    ElasticConsumption,
    OwnConsumption,
    SeededConsumption,
    TrackedConsumption,
    UntrackedConsumption,
)
from runner.training.data.length import with_steps
from runner.training.data.order import batch_shape, check_epoch, data_plan, make_sampler, order_record
from runner.training.data.sources import fingerprint, join_sources, make_collate, open_sources, tokens_per_sample
from runner.training.data.weights import with_weights
from runner.training.effects import mixing_without_effect
from runner.training.evaluation.evaluation import Evaluation
from runner.training.evaluation.held_out import evaluation_sets
from runner.training.evaluation.metrics import build_metrics
from runner.training.exactness import inexact, make_exact
from runner.training.model import build
from runner.training.model.average import Average
from runner.training.model.optimizers import Optimizers
from runner.training.model.warm_start import Source, Table, fill, open_source, starts_warm
from runner.training.ranks.parallel import place
from runner.training.ranks.peers import peer_errors
from runner.training.records.profiler import Profiler
from runner.training.records.recorder import Recorder, RunRecorder
from runner.training.records.resources import StepMeter
from runner.training.records.run_state import RunState
from runner.training.step.counting import stated_tokens
from runner.training.step.invariant import FixedMicroBatches, StateOfMain
from runner.training.step.step import Forward, TrainStep
from runner.training.step.tasks import Task, build_task
from runner.training.trainer import Trainer

LEASE_CHECK_S = 1.0

_log = logging.getLogger(__name__)


class WarningHandler(logging.Handler):
    """Shows what `runner`'s modules log at WARNING and above, and records it in the status."""

    def __init__(self, log: AttemptLog) -> None:
        super().__init__(logging.WARNING)
        self.warn: Callable[[str], None] = self._before_recorder
        self._log = log
        self._pid = processes.own_pid()

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if processes.own_pid() == self._pid:
            self.warn(message)
        else:  # a loader worker: the status belongs to its parent
            _print_warning(message)

    def _before_recorder(self, message: str) -> None:
        _print_warning(message)
        self._log.warn(message)


def _print_warning(message: str) -> None:
    with suppress(OSError):  # a job's log may be on the disk that is full
        print(f"warning: {message}", file=sys.stderr, flush=True)


@dataclass
class Session:
    """What an attempt needs to train."""

    trainer: Trainer
    steps: int  # of the run, now that the data are open
    recorder: Recorder
    warm_up: threading.Thread
    handler: WarningHandler | None = None

    @property
    def step(self) -> int:
        return self.trainer.step

    @property
    def account(self) -> TimeAccount:
        return self.trainer.account

    def train(self, steps: int | None = None) -> bool:
        """Train to `steps`, by default to the end of the run; False if a signal came before.

        Files are closed either way.
        """
        try:
            finished = self.trainer.run(self.steps if steps is None else steps)
            self.recorder.state = FINISHED if finished else STOPPED
            return finished
        finally:
            self.trainer.manager.settle()
            self.trainer.profiler.close()
            self.close()
            if self.warm_up.is_alive():
                self.warm_up.join()  # an import cannot be cut off by the end of the interpreter

    def close(self) -> None:
        """Close the recorder and stop forwarding warnings."""
        self.recorder.close()
        if self.handler is not None:
            logging.getLogger("runner").removeHandler(self.handler)

    @staticmethod
    def open(run: RunDir, config: Config, world: World, log: AttemptLog | None, lease: Lease | None) -> Session:
        """Build everything, restore the newest checkpoint, and truncate the metrics to its step.

        Args:
            log: this attempt's, on rank 0.
            lease: that of the run directory, on rank 0.

        Raises:
            UserError: the config, the data or the checkpoint does not fit.
        """
        with _warnings_forwarded(log) as handler:
            return _Opening(run, config, world, log, lease, handler).session()


@contextmanager
def _warnings_forwarded(log: AttemptLog | None) -> Iterator[WarningHandler | None]:
    """A handler on the logger `runner`, on the rank that has `log`; taken off again only if the block fails."""
    if log is None:
        yield None
        return
    handler = WarningHandler(log)
    logging.getLogger("runner").addHandler(handler)
    try:
        yield handler
    except BaseException:
        logging.getLogger("runner").removeHandler(handler)
        raise


@dataclass(frozen=True)
class _Restored:
    """The parts of a session that a checkpoint restores, and what it says of the others.

    Attributes:
        sizes: samples of each source.
        bare: the model before it is wrapped.
        beginning: of the optimizers, before they were restored.
        state: the train state; empty at a fresh start.
        saved: the runner's own entries in it.
        run_state: those of this attempt.
    """

    device: torch.device
    datasets: dict[str, Any]
    sizes: list[int]
    task: Task
    bare: torch.nn.Module
    model: torch.nn.Module
    average: Average | None
    optimizers: Optimizers
    beginning: dict[str, Any]
    manager: TrainStateManager
    state: Mapping[str, Any]
    step: int
    saved: RunState | None
    run_state: RunState


@dataclass
class _Opening:
    """Builds the parts of a session in their order; each method builds one of them."""

    run: RunDir
    config: Config
    world: World
    log: AttemptLog | None
    lease: Lease | None
    handler: WarningHandler | None
    shapes: tuple[BatchShape, ...] = ()  # those of the checkpoint, once they are known to matter
    _own_account: TimeAccount = field(default_factory=TimeAccount)  # on the ranks without a log

    def session(self) -> Session:
        restored = self._restored()
        if with_steps(self.config, restored.sizes, restored.run_state.batch_shapes) != self.config:
            # The batch shape has changed, and so have the steps of the epochs, which the schedule follows: build anew.
            self.shapes = restored.run_state.batch_shapes
            restored = self._restored()
        return self._assembled(restored)

    def _restored(self) -> _Restored:
        """What is trained and saved, as in the newest checkpoint. Data and generators are restored later."""
        device = build.choose_device(self.config.train.device, self.world)
        make_exact(self.config, device)
        torch.set_num_threads(self.config.run.threads)  # their number decides how sums are split
        build.seed_everything(self.config.seed)  # a dataset or a task may draw when it is created
        datasets = open_sources(self.config)
        sizes = [len(dataset) for dataset in datasets.values()]
        self._weigh(datasets)
        task = build_task(self.config)
        if task.take_step is not None and self.config.strategy is Strategy.fsdp:
            raise UserError(f"{task.name} has take_step, which needs the whole model on each rank: use strategy=ddp")
        config = self.config = with_steps(self.config, sizes, self.shapes or (self._shape_from(0),))
        bare = build.model(config)
        if starts_warm(config) and not newest_step(self.run):
            self._warm_start(bare)
        average = build.average(config, bare, self.world, device)
        with peer_errors(self.world):
            model = place(bare, config.strategy.value, self.world, device)
        optimizers = build.optimizers(config, model, device)
        beginning = optimizers.beginning()
        build.seed_everything(config.seed, self.world.rank)
        manager = self._manager(fingerprint(config, datasets))
        with self.account.doing("restore"):
            self._take_over()
            with self._fits():
                averaged = average.averaged if average else None
                state = manager.load(model, optimizers, averaged, another_optimizer=self._restarts_optimizers) or {}
        if not state:
            self._warn_if_checkpoints_are_gone()
        step = int(state["step"]) if state else 0
        saved = RunState.from_extra(state) if state else None
        run_state = self._run_state(saved, step)
        return _Restored(
            device,
            datasets,
            sizes,
            task,
            bare,
            model,
            average,
            optimizers,
            beginning,
            manager,
            state,
            step,
            saved,
            run_state,
        )

    def _weigh(self, datasets: dict[str, Any]) -> None:
        """Fill in the weights that the data decide, and warn if these leave a temperature without effect."""
        config = with_weights(self.config, datasets)
        if config is not self.config and self.world.is_main:
            for line in mixing_without_effect(config):
                _log.warning(line)
        self.config = config

    def _assembled(self, of: _Restored) -> Session:
        """The session around what is restored."""
        config, step, saved = self.config, of.step, of.saved
        if self.world.is_main:  # which writes the records
            self._warn_if_inexact(of.device, of.run_state, saved)
            self._warn_of_idle_ranks(of.run_state.batch_shapes[-1])
        of.task.check_state()
        loader, consumption = self._training_data(of.datasets, of.device, of.run_state, saved, step)
        anew = self._restarts_optimizers(step)
        with self._fits():
            _, tokens, _ = restore_train_state(of.state, None if anew else of.optimizers, loader)
            if anew:
                of.optimizers.restart(of.beginning, of.state["scheduler"], step)
        if (seed := self._new_seed(step)) is not None:
            build.seed_everything(seed, self.world.rank, step)
        before = generators.states(gpus=True)
        if saved is not None:
            consumption.load_state_dict(saved.order)
            of.task.restore(saved.task, self.world.rank)
        if isinstance(consumption, TrackedConsumption) and self.world.is_main:
            order = order_record(config, consumption.sampler, of.datasets, of.run_state.batch_shapes)
            insist(lambda: order.write(self.run.order, self.run.guard), self.run.order)
        callbacks = Callbacks.open(config, self.world, self.run, of.bare, of.device, saved)
        meter = StepMeter(of.device)
        recorder = self._recorder(step, of.run_state.evaluated, of.manager, meter)
        callbacks.recorder, callbacks.seconds = recorder, meter.callbacks
        train_step = self._train_step(of, consumption.names)
        # What the first save imports takes a second: meanwhile, but not before the first step.
        warm_up = threading.Thread(target=of.manager.warm_up, name="warm up", daemon=True)
        build.seed_everything(config.seed)  # held-out data and metrics may draw when they are created
        forward = train_step.forward
        evaluation = self._evaluation(replace(forward, model=of.average.module) if of.average else forward)
        generators.put_back(before)  # whatever was created since may have drawn
        trainer = Trainer(
            world=self.world,
            train_step=train_step,
            loader=StateOfMain(self.world, loader) if of.run_state.batch_shapes[-1].micro_batches else loader,
            consumption=consumption,
            evaluation=evaluation,
            manager=of.manager,
            cadence=self._cadence(step),
            best_metric=config.checkpoint.best.metric,
            needs_best=config.checkpoint.keep_best > 0,
            evaluates_end=config.eval.at_end and config.evaluates_every_set,
            recorder=recorder,
            run_state=of.run_state,
            stop=lambda: bool(STOP),
            check_fence=self._fence_check(),
            skip_nonfinite=config.train.on_nonfinite is NonFinite.skip,
            step=step,
            samples_seen=of.run_state.samples_seen,
            tokens_seen=tokens,
            after_first_step=warm_up.start,
            callbacks=callbacks,
            account=self.account,
            meter=meter,
            profiler=self._profiler(step, of.device),
        )
        return Session(trainer, config.steps, recorder, warm_up, self.handler)

    def _train_step(self, of: _Restored, sources: Sequence[str]) -> TrainStep:
        """What makes the steps of this attempt.

        Raises:
            UserError: the task cannot be trained on so many ranks.
        """
        config = self.config
        compiled = build.compiled(of.model, of.device) if config.train.compile else of.model
        forward = Forward(self.world, of.device, compiled, of.task, build.autocast(config, of.device))
        shape, division = of.run_state.batch_shapes[-1], None
        if shape.micro_batches:
            with peer_errors(self.world):
                division = FixedMicroBatches(
                    self.world, of.bare, of.task, of.optimizers, shape, of.run_state.seed, of.device
                )
        return TrainStep(
            forward,
            of.optimizers,
            sources,
            shape.grad_accum_steps,
            config.train.clip_norm,
            stated_tokens(sources, tokens_per_sample(of.datasets)),
            of.average,
            division,
        )

    @property
    def account(self) -> TimeAccount:
        return self.log.account if self.log else self._own_account

    def _warm_start(self, model: torch.nn.Module) -> None:
        """Fill a new run's model with the weights that it is to begin with: after a kill with the same ones."""
        options, opened = self.config.init_from, list[Source]()

        def choose() -> dict[str, Any]:
            opened.append(open_source(options, self.run, files.read_object(self.run.init)))
            return opened[0].record()

        # On rank 0 first: what is the newest or the best may change before another rank looks.
        chosen = self.world.run_on_main(choose)

        def load() -> Table:
            return fill(model, opened[0] if opened else open_source(options, self.run, chosen), options)

        table = self.world.run_on_all(load)
        if self.world.is_main:
            record = {**chosen, **asdict(table)}
            insist(lambda: files.write_json(self.run.init, record, guard=self.run.guard), self.run.init)
            lines = [f"initial weights from {chosen['source']}:", *(f"  {each}" for each in table.lines())]
            print("\n".join(lines), flush=True)

    def _begins_branch(self, step: int) -> bool:
        """Whether what was restored is the trunk's, and what the branch changes takes effect now."""
        return self.config.fork.run is not None and step == self.config.fork.step

    def _restarts_optimizers(self, step: int) -> bool:
        """Whether optimizers and schedules begin anew at `step`."""
        return restarts_optimizers(self.config) and self._begins_branch(step)

    @contextmanager
    def _fits(self) -> Iterator[None]:
        """What the checkpoint of a trunk does not fit is an error in the command that begins the branch.

        Raises:
            UserError: in place of a MismatchError.
        """
        try:
            yield
        except MismatchError as error:
            if not self._begins_branch(newest_step(self.run)):
                raise
            # Without its remedy, which is for a run of its own.
            fork, reason = self.config.fork, re.split(r"; |: (?=restore|set|use)", str(error))[0]
            raise UserError(
                f"a branch of {fork.run} at step {fork.step} cannot change this: {reason}; leave it as "
                f"the trunk has it, or begin a new run with the weights that fit (init_from={fork.run}@{fork.step} "
                "init_from.strict=false)"
            ) from None

    def _take_over(self) -> None:
        """What a branch has of its trunk, if it has not begun yet."""
        trunk, step = trunk_of(self.config), self.config.fork.step
        if trunk is not None and step is not None:
            fence = Fence(self.lease.fence, self.lease.check_fence) if self.lease else Fence()
            with in_one_line(self.run.path):
                self.world.run_on_main(lambda: take_over(self.run, trunk, step, fence))

    def _warn_if_checkpoints_are_gone(self) -> None:
        """A run whose checkpoints were all removed starts again, but not silently."""
        earlier = self.log.earlier if self.log else []
        saved = max((attempt.get("checkpoint_step") or 0 for attempt in earlier), default=0)
        if saved:
            _log.warning(
                f"the checkpoint of step {saved} is gone from {self.run.checkpoints}: starting again at step 0"
            )

    def _warn_if_inexact(self, device: torch.device, run_state: RunState, saved: RunState | None) -> None:
        shape = run_state.batch_shapes[-1]
        before = saved.batch_shapes[-1] if saved else None
        for reason in inexact(self.config, device, saved.threads if saved else None, shape, before):
            _log.warning(f"not exact: {reason}")

    def _warn_of_idle_ranks(self, shape: BatchShape) -> None:
        if 0 < shape.micro_batches < shape.world_size:
            _log.warning(
                f"{shape.world_size - shape.micro_batches} of {shape.world_size} ranks have nothing to do: a step has "
                f"{shape.micro_batches} micro-batches; lower train.batch_size={shape.batch_size}, or use fewer ranks"
            )

    def _run_state(self, saved: RunState | None, step: int) -> RunState:
        """The state of this attempt, resumed at `step`."""
        return RunState(
            order={},
            evaluated=saved.evaluated if saved else False,
            threads=self.config.run.threads,
            batch_shapes=append_shape(saved.batch_shapes if saved else (), self._shape_from(step)),
            data_plan=data_plan(self.config),
            samples_seen=saved.samples_seen if saved else 0,
            seed=self._seed(saved, step),
        )

    def _seed(self, saved: RunState | None, step: int) -> int:
        """Of the random numbers from `step` on."""
        changed = self._new_seed(step)
        return (saved.seed if saved else self.config.seed) if changed is None else changed

    def _new_seed(self, step: int) -> int | None:
        """The seed that a branch begins with at `step`, if that is another one than its trunk's."""
        fork = self.config.fork
        return fork.seed if self._begins_branch(step) and "seed" in fork.was else None

    def _shape_from(self, step: int) -> BatchShape:
        """How the steps from `step` on are split."""
        return batch_shape(self.config, self.world, step)

    def _training_data(
        self,
        datasets: dict[str, Any],
        device: torch.device,
        run_state: RunState,
        saved: RunState | None,
        step: int,
    ) -> tuple[Any, TrackedConsumption | UntrackedConsumption]:
        """The training loader, not restored yet, and its order as the training loop sees it."""
        config, world = self.config, self.world
        if config.data.loader:
            loader = instantiate("data.loader", config.data.loader)
            return loader, UntrackedConsumption(loader)
        collate = make_collate(config)
        dataset = join_sources(datasets, collate)
        # The same plan at other positions: only the batch shape changed.
        same_plan = saved is not None and saved.data_plan == run_state.data_plan
        allow = config.run.allow_data_change or same_plan or self._begins_branch(step)
        sampler = make_sampler(config, dataset, datasets, world, run_state.batch_shapes, allow)
        pin = device.type == "cuda" if config.data.pin_memory is None else config.data.pin_memory
        options = replace(config.data, pin_memory=pin)
        check_epoch(config, sampler)
        loader = StatefulDataLoader(
            dataset, config.train.batch_size, sampler=sampler, collate_fn=collate, config=options
        )
        ledger = DataLedger(list(datasets), [len(part) for part in datasets.values()])
        tokens = tokens_per_sample(datasets)
        if config.sampler.kind.value.elastic:
            return loader, ElasticConsumption(loader, sampler, ledger, tokens)
        kind = OwnConsumption if config.sampler.kind.value.is_own else SeededConsumption
        consumption = kind(
            loader,
            sampler,
            ledger,
            tokens,
            phases=phase_schedule(config) if config.sampler.kind.value.mixes else None,
            num_replicas=world.size,
            rank=world.rank,
        )
        consumption.start_at(step)
        return loader, consumption

    def _evaluation(self, forward: Forward) -> Evaluation | None:
        """The evaluations of held-out data, if any are configured."""
        sets = evaluation_sets(self.config, self.world)
        if sets:
            forward.task.check_evaluation()
        metrics = build_metrics(self.config, forward.device)
        return Evaluation(forward, sets, metrics, self.config.seed) if sets else None

    def _manager(self, fingerprint: dict[str, Any]) -> TrainStateManager:
        options, lease = self.config.checkpoint, self.lease
        return TrainStateManager(
            self.run.checkpoints,
            fingerprint=fingerprint,
            keep_last=options.keep_last,
            keep_every_steps=options.keep_every_steps,
            keep_best=options.keep_best,
            best_metric=options.best.metric,
            best_mode=options.best.mode.value,
            mode=options.mode.value,
            check_fence=lease.check_fence if lease else None,
            fence=lease.fence if lease else 0,
        )

    def _profiler(self, step: int, device: torch.device) -> Profiler:
        """Of the steps of `train.profile` that are still to be made; the trace is named after the attempt."""
        steps = profiled_steps(self.config.train.profile or "")
        if steps is None or steps[1] <= step:
            return Profiler(None, self.run.profile, device)
        attempt = self.world.broadcast(self.log.record["attempt"] if self.log else 0)
        return Profiler(steps, self.run.profile / f"attempt{attempt}-rank{self.world.rank}.json", device)

    def _recorder(
        self, step: int, evaluated: bool, manager: TrainStateManager, meter: StepMeter | None = None
    ) -> Recorder:
        """Truncate the metrics to `step` and open them.

        Raises:
            FileError: the disk refuses.
            SupersededError: a newer attempt holds the lease.
        """
        if self.log is None:
            return Recorder()
        self.log.total = self.config.steps
        self.log.resumed(step)
        metrics, timings = insist(lambda: resume_records(self.run, step, evaluated), self.run.metrics)
        if metrics.reached < step:
            _log.warning(
                f"{self.run.metrics} ends at step {metrics.reached}, but the checkpoint is of step {step}: "
                "the records between are lost; the run continues"
            )
        recorder = RunRecorder(
            metrics=metrics,
            timings=timings,
            writers=[
                instantiate(f"logger.{name}", node, self.run, step, _log.warning)
                for name, node in self.config.logger.items()
                if isinstance(node, dict) and node.get("_target_")
            ],
            bar=ProgressBar(self.config.steps),
            log=self.log,
            meter=meter or StepMeter(torch.device("cpu")),
            last_save=lambda: dict(manager.last_save) if manager.last_save else None,
            add_evaluation=self._add_evaluation,
        )
        if recorder.writers:
            recorder.about(self._lineage(self.log.record["attempt"]))
        if self.handler is not None:
            self.handler.warn = recorder.warn
        self._show_start(recorder, step, self.log)
        return recorder

    def _add_evaluation(self, record: dict[str, Any]) -> None:
        """Record a result beside those of `runner evaluate`, which then need not compute it.

        Raises:
            OSError: the file system refused.
            UserError: another process does not finish adding its own.
        """
        digest = evaluation_digest(load_plain(self.run.path))
        add(self.run, {**record, "digest": digest}, None, self.config.run.lease_timeout_s)

    def _lineage(self, attempt: int) -> Lineage:
        """What loggers show of the run beside its numbers."""
        fork, trunk, best = self.config.fork, trunk_of(self.config), self.config.checkpoint.best
        settings: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            settings = read_plain(self.run.config)
        origin = Fork(trunk, fork.step, fork.digest or "") if trunk is not None and fork.step is not None else None
        return Lineage(settings, attempt, origin, {best.metric: best.mode.value} if best.metric else {})

    def _show_start(self, recorder: RunRecorder, step: int, log: AttemptLog) -> None:
        steps = self.config.steps
        if self.config.train.epochs is not None:  # otherwise the command has said so
            for message in unreached_phases(self.config.phases, steps):
                recorder.bar.say(f"warning: {message}")
        lost = log.earlier[-1].get("steps_lost") if log.earlier else 0
        repeated = f" (repeating {lost} steps that were not saved)" if lost else ""
        doing = "resuming" if step else "starting"
        if self._begins_branch(step):
            doing = f"branching off {self.config.fork.run}"
        recorder.bar.say(f"{doing} at step {step} of {steps}{self._shape(log)} in {self.run.path}{repeated}")

    def _shape(self, log: AttemptLog) -> str:
        """The number of ranks, where it is more than one or has changed."""
        ranks, before = self.world.size, log.ranks_before
        changed = before not in (None, ranks)
        if ranks == 1 and not changed:
            return ""
        return f" on {ranks} rank{'s' if ranks > 1 else ''}" + (f" ({before} before)" if changed else "")

    def _cadence(self, step: int) -> Cadence:
        options = self.config.checkpoint
        adaptive = None
        if options.adaptive:
            adaptive = AdaptiveInterval(options.min_interval_s, options.max_interval_s)
            if self.log:
                ended = [(lived_s(line), line["cause"]) for line in self.log.earlier]
                adaptive.observe_attempts((seconds, cause) for seconds, cause in ended if seconds is not None)
        now = clock.monotonic()
        return Cadence(options.every_steps, options.every_minutes, adaptive=adaptive, start_step=step, now=now)

    def _fence_check(self) -> Callable[[], None]:
        """Notices soon, at next to no cost, that a newer attempt holds the lease; every commit asks anyway."""
        last = clock.monotonic()

        def check() -> None:
            nonlocal last
            now = clock.monotonic()
            if self.lease is not None and now - last >= LEASE_CHECK_S:
                last = now
                with suppress(OSError):  # looked at again a second later, and by every write
                    self.lease.check_fence()

        return check
