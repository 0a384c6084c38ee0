"""Run the training loop: the steps, and the actions between two steps.

After step s, the loop evaluates if due, saves if due, and stops if asked to, in this order. Then it applies the phase
of the next step, and then draws the first batch. So a checkpoint contains nothing of the next step, and a resumed run
executes the same lines.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from exactdata.loading.protocols import BatchRecord, DataEndedError
from runner.checkpoint import TrainStateManager, build_train_state
from runner.checkpoint.cadence import Cadence
from runner.errors import CheckpointError, DivergedError, TrainingError, UnsavedError
from runner.rundir.paths import RunDir
from runner.rundir.time_account import TimeAccount
from runner.system import clock
from runner.training.callbacks.callbacks import Callbacks
from runner.training.data.consumption import Consumption
from runner.training.ending import EarlyEnd, Ending
from runner.training.evaluation.evaluation import Evaluation
from runner.training.ranks.peers import all_arrive
from runner.training.records.profiler import Profiler
from runner.training.records.recorder import Recorder
from runner.training.records.resources import StepMeter
from runner.training.records.run_state import RunState
from runner.training.step.invariant import StateOfMain
from runner.training.step.step import Drawn, StepResult, TrainStep
from runner.training.step.tasks import Batch

_log = logging.getLogger(__name__)


@dataclass
class Trainer:
    """The training loop of one attempt. `step` is the number of completed steps."""

    train_step: TrainStep
    consumption: Consumption
    evaluation: Evaluation | None
    manager: TrainStateManager
    cadence: Cadence
    recorder: Recorder
    run_state: RunState  # from the resumed checkpoint; changed fields are updated at each save
    stop: Callable[[], bool]
    check_fence: Callable[[], None]
    skip_nonfinite: bool = False
    step: int = 0
    tokens_seen: int = 0
    after_first_step: Callable[[], None] = lambda: None
    callbacks: Callbacks = field(default_factory=Callbacks.none)
    ending: Ending = field(default_factory=Ending)
    account: TimeAccount = field(default_factory=TimeAccount)
    meter: StepMeter = field(default_factory=lambda: StepMeter(torch.device("cpu")))
    profiler: Profiler = field(default_factory=lambda: Profiler(None, RunDir(Path()), "", torch.device("cpu")))

    def __post_init__(self) -> None:
        self.world = self.train_step.forward.world
        self.samples_seen = self.run_state.samples_seen
        self.evaluated = self.run_state.evaluated
        self.early_end: EarlyEnd | None = None
        self.paused = False  # paused at the requested step, before the last step
        self._metric: float | None = None  # metric of the last evaluation, which ranks checkpoints
        self._batches: Iterator[tuple[Batch, BatchRecord | None]] | None = None
        self._stop_agreed = self._save_agreed = self._empty_reported = False
        self.train_step.before_update = self._finish_copy

    def run(self, steps: int, pause: int | None = None, metric: str | None = None) -> bool:
        """Train and evaluate up to step `steps`. Return False if a signal arrived before that.

        Early stopping or a callback may end the run earlier. Then `early_end` holds the reason. The final state is
        always saved and committed.

        Args:
            steps: length of the run.
            pause: return after this step and its evaluation. The run can resume from this step later.
            metric: the metric that a search compares. If it is an evaluation's result, its existence is checked before
                the first step.

        Raises:
            TrainingError: a loss is not finite, or the data ended.
            SupersededError: a newer attempt holds the lease.
            PeerError: another rank has exited or does not respond.
            CallbackError: a callback raised, and train.on_callback_error=stop is set.
        """
        try:
            self.paused = False
            return self._run(steps, pause, metric)
        finally:
            self.account.switch("end")

    def _run(self, steps: int, pause: int | None, metric: str | None) -> bool:
        started_at, until = self.step, steps if pause is None else min(steps, pause)
        if self.evaluation and not (self.step or self.evaluation.due(0)):
            best = self.evaluation.best_metric if self.evaluation.needs_best else None
            judged = {"early_stopping.metric": self.ending.options.metric}
            judged |= {"search.metric": metric if metric and metric.startswith("eval_") else None}
            # A callback may add further results.
            names = {} if self.ending.nodes else judged
            self.evaluation.check_names({**names, "checkpoint.best.metric": best})
        self.callbacks.start(self.step)
        self._agree()  # a signal may have arrived while the session was opened
        self.account.switch("steps")
        while True:
            self.check_fence()
            interrupted = False
            if self.evaluation and not self.evaluated and self.evaluation.due(self.step):
                with self.account.doing("evaluation"):
                    self.evaluated = self._evaluate(self.evaluation)
                interrupted = not self.evaluated
            self.early_end = None if interrupted else self.ending.decide(self.step, self.world)
            ends = self.step >= until or self.early_end is not None
            leaving, saved = self._stop_agreed or ends, True
            if (leaving and self.step > started_at) or self._save_agreed:
                saved = self.save(wait=leaving)
                # After a signal, there is no time to fix a disk. The run will resume from the last valid checkpoint.
                if leaving and not saved and not self._stop_agreed:
                    raise UnsavedError(self._unsaved())
            if leaving:
                self.account.switch("end")
                pausing = self.step < steps and self.early_end is None
                finished = ends and not interrupted and saved and self._evaluate_end(always=pause is not None)
                self.paused = finished and pausing
                if finished and not pausing:
                    self.callbacks.end(self.step)
                return finished
            self.advance()
            if self.step == started_at + 1:
                self.after_first_step()

    def advance(self) -> None:
        """Train one step and record it.

        Raises:
            TrainingError: a loss is not finite, or the data ended.
        """
        if self.consumption.enter_step(self.step):
            self._batches = None
        began = clock.monotonic()
        self.profiler.begin(self.step + 1)
        result = self.train_step(self.meter.begin(self._next_batch), self.step)
        if result.nonfinite and not self.skip_nonfinite:
            raise DivergedError(self._nonfinite(result))
        self.step += 1
        if result.empty:
            self._report_empty()
        self.evaluated = False
        self.samples_seen += result.samples
        self.tokens_seen += result.tokens or 0
        self._agree()
        record = self.callbacks.step_end(self.step, self._record(result))
        self.recorder.step(record, clock.monotonic() - began, result.samples, result.tokens)
        self.profiler.end(self.step)
        self.account.stepped()

    def save(self, wait: bool) -> bool:
        """Sync the metrics to disk, then commit a checkpoint. Return False if the save is known to have failed.

        Args:
            wait: return only after the commit.
        """
        self.account.saving(self.step)
        with self.account.doing("save"):
            if not self.world.run_on_main(self.recorder.before_save):
                return False
            task = self.train_step.forward.task.state
            kept = replace(
                self.run_state,
                order=self.consumption.state_dict(),
                evaluated=self.evaluated,
                samples_seen=self.samples_seen,
                stop_asked=asked.to_json() if (asked := self.ending.asked) else {},
                task=self.world.gather_on_main(task.state_dict()) if task else [],
            )
            kept = self.callbacks.keep(kept)
            model, optimizers = self.train_step.forward.model, self.train_step.optimizers
            loader = self.consumption.loader
            loader = StateOfMain(self.world, loader) if self.train_step.fixed else loader
            state = build_train_state(self.step, self.tokens_seen, optimizers, loader, kept.to_extra())
            self._learn_cost()
            average = self.train_step.average
            # A task's `take_step` and a callback may change the weights at any time.
            later = self.train_step.forward.task.take_step is None and not self.callbacks.has("on_save")
            saved = self.manager.save(
                self.step,
                model,
                optimizers,
                state,
                averaged=average.averaged if average else None,
                metric=self._metric if self.evaluated else None,
                wait=wait,
                copy_later=later,
            )
            self.cadence.saved(self.step, clock.monotonic())
            if saved:
                self.callbacks.saved(self.step)
            return saved

    def _finish_copy(self) -> None:
        """Wait until the state of a save in progress is copied. This is called before an update."""
        if self.manager.copying:
            with self.account.doing("save"):
                self.manager.finish_copy()

    def _next_batch(self) -> Drawn:
        with self.account.doing("data_wait"):
            for _ in range(2):  # an epoch may end here, so that the next one begins
                if self._batches is None:
                    try:
                        self._batches = self.consumption.batches()
                    except DataEndedError:
                        break
                for batch, record in self._batches:
                    self.consumption.consume(record)
                    return Drawn(batch, self.consumption.sources(record))
                self._batches = None
            raise self._end_of_data()

    def _end_of_data(self) -> TrainingError:
        """Return the error for the end of this rank's data, or for the end of all ranks' data."""
        everywhere = all_arrive(self.world, f"end of data/{self.step}")
        whose = "the data" if everywhere else f"the data of rank {self.world.rank}"
        remedy = "" if everywhere else "give every rank as many batches as the others, "
        remedy += f"set train.steps={self.step}, or add" if self.step else "add"
        error = TrainingError(
            f"{whose} ended at step {self.step}, after {self.samples_seen} samples: {remedy} data "
            "(more sources, a higher sampler.max_epochs, a smaller train.batch_size)"
        )
        error.everywhere = everywhere
        return error

    def _record(self, result: StepResult) -> dict[str, Any]:
        """Return the line of metrics.jsonl for the last step."""
        record: dict[str, Any] = {
            "step": self.step,
            **result.values,
            "lr": next(iter(result.lrs.values())),
            "samples_seen": self.samples_seen,
            **({} if result.tokens is None else {"tokens_seen": self.tokens_seen}),
            "grad_norm": result.grad_norm,
        }
        if len(result.grad_norms) > 1:
            record |= {"lr_by_optimizer": result.lrs, "grad_norm_by_optimizer": result.grad_norms}
        if result.skipped:
            record["skipped"] = True
        record |= self.consumption.totals(self.step)
        record |= {f"{name}_by_source": means for name, means in result.by_source.items()}
        return record

    def _agree(self) -> None:
        """Agree with all ranks on the stop flag, the decision to save, and the data ledger."""
        due = self.step > 0 and self.world.is_main and self.cadence.should_save(self.step, clock.monotonic())
        flags = np.array([self.stop(), due], dtype=np.int64)
        vector = torch.from_numpy(np.concatenate([flags, self.consumption.control()]))
        vector = self.world.sum(vector)
        self._stop_agreed, self._save_agreed = bool(vector[0]), bool(vector[1])
        self.consumption.commit(vector[2:].numpy())

    def _evaluate(self, evaluation: Evaluation) -> bool:
        """Evaluate and record the results. Return False after a signal; the resumed run then evaluates again."""
        results = evaluation.run(self.step, self._stop_now)
        if results is None:
            return False
        self._metric = evaluation.judge(self.step, results)
        record = self.callbacks.evaluated(self.step, {"step": self.step, **results})
        self.recorder.evaluation(record)
        self.ending.evaluated(record, evaluation.complete(self.step))
        return True

    def _evaluate_end(self, always: bool) -> bool:
        """Evaluate the last step if no evaluation is due there. Return False after a signal.

        The last step depends on the run's length, so the result is added to the results of `runner evaluate`, not to
        the metrics.

        Args:
            always: evaluate even if eval.at_end is false.
        """
        if self.evaluation is None or not (always or self.evaluation.at_end) or self.evaluation.complete(self.step):
            return True
        with self.account.doing("evaluation"):
            results = self.evaluation.run(self.step, self._stop_now, every_set=True)
        if results is not None:
            self.recorder.last_evaluation({"step": self.step, **results})
        return results is not None

    def _stop_now(self) -> bool:
        """Return the stop flag during an evaluation, the same on every rank."""
        flag = self.world.sum(torch.tensor([int(self.stop())]))
        self._stop_agreed = self._stop_agreed or bool(flag[0])
        return self._stop_agreed

    def _learn_cost(self) -> None:
        """Pass the cost of the previous save to an adaptive cadence."""
        if self.cadence.adaptive is None:
            return
        self.manager.wait()
        cost = self.manager.last_save
        if cost and cost["write_s"]:
            self.cadence.adaptive.observe_save(cost["stall_s"], cost["write_s"])
            self.recorder.cadence(self.cadence.explain(clock.monotonic()))

    def _report_empty(self) -> None:
        """Warn about this attempt's first step whose loss weights are all 0. metrics.jsonl marks every such step."""
        if not self._empty_reported and self.world.is_main:
            _log.warning(
                f"step {self.step} made no update: the weights of its losses sum to 0 (are all labels masked?); "
                'metrics.jsonl marks such steps as "skipped"'
            )
        self._empty_reported = True

    def _unsaved(self) -> str:
        reason = self.manager.last_error or "metrics could not be written"
        return (
            f"the last save, at step {self.step}, failed: {reason}; {self._kept()}; "
            "fix the cause (free space, permissions) and rerun the command to resume"
        )

    def _nonfinite(self, result: StepResult) -> str:
        self.manager.wait()  # the last valid checkpoint may still be written
        return (
            f"the loss of step {self.step + 1} is {result.loss} (gradient norm {result.grad_norm}): training stopped, "
            f"{self._kept()}. Lower optimizer.lr or train.clip_norm, or skip such steps with train.on_nonfinite=skip"
        )

    def _kept(self) -> str:
        try:
            last = self.manager.newest()
        except CheckpointError as error:  # this message becomes part of a different error's message
            return f"which checkpoint is kept cannot be told ({error})"
        return f"the checkpoint of step {last.step} is kept" if last else "there is no checkpoint yet"
