"""One attempt's objects, joined: built from the config, restored from the newest checkpoint, trained."""

from __future__ import annotations

import sys
import threading
import time
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import torch

from runner import build
from runner.attempts import AttemptLog
from runner.checkpoint import TrainStateManager, restore_train_state
from runner.checkpoint.cadence import AdaptiveInterval, Cadence
from runner.data import StatefulDataLoader
from runner.data.datasets import collate
from runner.data.ledger import DataLedger
from runner.data.sampler import DistributedSampler
from runner.data.shapes import Shape, extended
from runner.distributed import World
from runner.lease import Lease
from runner.loop import Evaluation, Trainer
from runner.metrics import JsonlWriter, resume_jsonl
from runner.metrics.progress import ProgressBar
from runner.order import ElasticOrder, LedgerOrder, NoOrder, SeededOrder
from runner.parallel import wrap
from runner.recorder import RunRecorder, SilentRecorder
from runner.run_dir import RunDir
from runner.schema import Config, NonFinite, SamplerKind
from runner.signals import STOP

OWNER_CHECK_S = 1.0


@dataclass
class Session:
    """What `train` needs of an attempt."""

    trainer: Trainer
    recorder: RunRecorder | SilentRecorder
    warming: threading.Thread

    @property
    def step(self) -> int:
        return self.trainer.step

    def train(self, steps: int) -> bool:
        """Train to `steps`; False if a signal ended it before. Files are closed either way."""
        try:
            return self.trainer.run(steps)
        finally:
            self.trainer.manager.settle()
            self.recorder.close()
            if self.warming.is_alive():
                self.warming.join()  # an import cannot be cut off by the end of the interpreter

    @staticmethod
    def open(run: RunDir, config: Config, world: World, log: AttemptLog | None, lease: Lease | None) -> Session:
        """Build everything, restore the newest checkpoint, and bring the metrics to its step.

        Raises:
            UserError: the config, the data or the checkpoint does not fit.
        """
        return _Opening(run, config, world, log, lease).session()


@dataclass
class _Opening:
    """Builds the parts in their order; each method is one of them."""

    run: RunDir
    config: Config
    world: World
    log: AttemptLog | None
    lease: Lease | None
    _recorder_made: RunRecorder | None = None

    def session(self) -> Session:
        config, world = self.config, self.world
        self.device = build.choose_device(config.train.device, world)
        self.accum, _ = build.batch_shape(config, world)
        if config.train.deterministic:
            torch.use_deterministic_algorithms(True)
        datasets = build.sources(config)
        model = wrap(build.model(config), config.strategy.value, world, self.device)
        optimizer = build.optimizer(config, model)
        scheduler = build.scheduler(config, optimizer, build.phase_schedule(config))
        build.seed_everything(config.seed, world.rank)
        manager = self._manager(build.fingerprint(config, datasets))
        state = manager.load(model, optimizer) or {}
        if not state:
            self._say_what_is_gone()
        self._threads(state)
        self._cut_up(state)
        loader, order = self._data(datasets, state)
        step, tokens, extra = restore_train_state(state, scheduler, loader)
        order.restore(extra.get("order"))
        evaluated = bool(extra.get("evaluated", False))
        if isinstance(order, LedgerOrder) and world.is_main:
            sizes = {name: len(part) for name, part in datasets.items()}
            build.order_record(config, order.sampler, sizes, self.shapes).write(self.run.order)
        recorder = self._recorder(step, evaluated, manager)
        # What the first save needs takes a second to import: meanwhile, not before the first step.
        warming = threading.Thread(target=manager.warm_up, name="warm up", daemon=True)
        trainer = Trainer(
            world=world,
            device=self.device,
            model=cast(torch.nn.Module, torch.compile(model)) if config.train.compile else model,
            optimizer=optimizer,
            scheduler=scheduler,
            loss=build.loss(config),
            loader=loader,
            order=order,
            evaluation=self._evaluation(),
            manager=manager,
            cadence=self._cadence(step),
            recorder=recorder,
            autocast=build.autocast(config, self.device),
            stop=lambda: bool(STOP),
            check_owner=self._owner_check(),
            accum=self.accum,
            clip_norm=config.train.clip_norm,
            skip_nonfinite=config.train.on_nonfinite is NonFinite.skip,
            step=step,
            tokens_seen=tokens,
            evaluated=evaluated,
            extra={
                "threads": torch.get_num_threads(),
                "shapes": [asdict(shape) for shape in self.shapes],
                "data_plan": build.data_plan(config),
            },
            after_first_step=warming.start,
        )
        return Session(trainer, recorder, warming)

    def _say_what_is_gone(self) -> None:
        """A run that had checkpoints and has none any more begins again, but not in silence."""
        earlier = self.log.earlier if self.log else []
        saved = max((attempt.get("checkpoint_step") or 0 for attempt in earlier), default=0)
        if saved:
            self._report(
                f"the checkpoint of step {saved} is gone from {self.run.checkpoints}: starting again at step 0"
            )

    def _data(self, datasets: dict[str, Any], state: dict[str, Any]) -> tuple[Any, LedgerOrder | NoOrder]:
        """The training loader, and what the loop is to know of its order."""
        config, world = self.config, self.world
        if config.data.loader:
            loader = build.instantiate("data.loader", config.data.loader)
            return loader, NoOrder()
        dataset = build.join(datasets, mixed=len(datasets) > 1)
        # A plan that is the same in the config but not in positions has only been cut up otherwise.
        same_plan = state.get("data_plan") == build.data_plan(config)
        allow = config.run.allow_data_change or same_plan
        sampler = build.sampler(config, dataset, datasets, world, self.shapes, allow)
        pin = self.device.type == "cuda" if config.data.pin_memory is None else config.data.pin_memory
        options = replace(config.data, pin_memory=pin)
        loader = StatefulDataLoader(dataset, config.train.batch_size, sampler=sampler, config=options)
        sizes = {name: len(part) for name, part in datasets.items()}
        common = {
            "loader": loader,
            "sampler": sampler,
            "ledger": DataLedger(list(sizes), list(sizes.values())),
            "names": list(sizes),
            "sizes": list(sizes.values()),
            "tokens_per_sample": config.data.sequence_length,
        }
        if config.sampler.kind is SamplerKind.elastic:
            return loader, ElasticOrder(**common)
        phases = build.phase_schedule(config) if config.sampler.kind is SamplerKind.mixture else None
        order = SeededOrder(**common, phases=phases, num_replicas=world.size, rank=world.rank)
        order.start_at(int(state.get("step", 0)))
        return loader, order

    def _evaluation(self) -> Evaluation | None:
        """The held-out loader: plain, unshuffled, from the top each time."""
        config = self.config
        if not config.eval.every_steps or not config.data.eval_sources:
            return None
        datasets = build.sources(config, "eval_sources")
        dataset = build.join(datasets, mixed=len(datasets) > 1)
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_size=config.eval.batch_size or config.train.batch_size,
            sampler=DistributedSampler(dataset, self.world.size, self.world.rank, shuffle=False),
            collate_fn=collate,
            generator=torch.Generator(),  # its own: the global one belongs to training
        )
        return Evaluation(loader, config.eval.batches, config.eval.every_steps)

    def _manager(self, fingerprint: dict[str, Any]) -> TrainStateManager:
        options, lease = self.config.checkpoint, self.lease
        return TrainStateManager(
            self.run.checkpoints,
            fingerprint=fingerprint,
            keep_last=options.keep_last,
            keep_every_steps=options.keep_every_steps,
            keep_best=options.keep_best,
            mode=options.mode.value,
            check_fence=lease.check if lease else None,
            fence=lease.fence if lease else 0,
            report=self._report,
        )

    def _report(self, message: str) -> None:
        """Faults that training survives; before the recorder is there they go to the screen alone."""
        if self.world.is_main:
            if self._recorder_made is not None:
                self._recorder_made.fault(message)
            else:
                print(f"warning: {message}", file=sys.stderr, flush=True)

    def _recorder(self, step: int, evaluated: bool, manager: TrainStateManager) -> RunRecorder | SilentRecorder:
        """Bring the metrics back to `step` and open them."""
        if self.log is None:
            return SilentRecorder()
        self.log.resumed(step)
        reached = resume_jsonl(self.run.metrics, step, evaluated)
        resume_jsonl(self.run.timings, step, evaluated)
        if reached < step:
            self._report(
                f"{self.run.metrics} ends at step {reached}, the checkpoint is of step {step}: "
                "what was between is gone; the run goes on"
            )
        writers = [
            build.instantiate(f"logger.{name}", node, self.run, step, self._report)
            for name, node in self.config.logger.items()
            if isinstance(node, dict) and node.get("_target_")
        ]
        made = RunRecorder(
            metrics=JsonlWriter(self.run.metrics),
            timings=JsonlWriter(self.run.timings),
            writers=writers,
            bar=ProgressBar(self.config.train.steps),
            log=self.log,
            last_save=lambda: dict(manager.last_save) if manager.last_save else None,
        )
        self._recorder_made = made
        begins = "going on from" if step else "starting at"
        lost = self.log.earlier[-1].get("steps_lost") if self.log.earlier else 0
        again = f" ({lost} steps after it are made again)" if lost else ""
        for name, phase in self.config.phases.items():
            if phase.start_step >= self.config.train.steps:
                made.bar.say(
                    f"warning: phases.{name}.start_step={phase.start_step} is never reached: "
                    f"the run ends after {self.config.train.steps} steps"
                )
        made.bar.say(f"{begins} step {step} of {self.config.train.steps} in {self.run.path}{again}")
        return made

    def _cadence(self, step: int) -> Cadence:
        options = self.config.checkpoint
        adaptive = None
        if options.adaptive:
            adaptive = AdaptiveInterval(options.min_interval_s, options.max_interval_s)
            if self.log:
                adaptive.observe_attempts((line["ended"] - line["started"], line["cause"]) for line in self.log.earlier)
        return Cadence(
            options.every_steps, options.every_minutes, adaptive=adaptive, start_step=step, now=time.monotonic()
        )

    def _threads(self, state: dict[str, Any]) -> None:
        """As many CPU threads as the run began with: their number decides how sums are split up."""
        wanted = self.config.run.threads or state.get("threads")
        if wanted:
            torch.set_num_threads(int(wanted))

    def _cut_up(self, state: dict[str, Any]) -> None:
        """How the steps of this run are and were cut up, this attempt's included."""
        earlier = [Shape(**entry) for entry in state.get("shapes", [])]
        now = Shape(int(state.get("step", 0)), self.world.size, self.config.train.batch_size, self.accum)
        self.shapes = extended(earlier, now)

    def _owner_check(self) -> Any:
        """Notice soon, at next to no cost, that a newer incarnation took over; every commit asks anyway."""
        last = time.monotonic()

        def check() -> None:
            nonlocal last
            now = time.monotonic()
            if self.lease is not None and now - last >= OWNER_CHECK_S:
                last = now
                self.lease.check()

        return check
