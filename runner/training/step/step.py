"""Train one step: a task's computation over the micro-batches, its updates, and sums over all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from runner.config.schema import Config
from runner.errors import UserError, nearest
from runner.system.distributed import World
from runner.training.model.average import Average
from runner.training.model.build import autocast, compiled
from runner.training.model.optimizers import Optimizers
from runner.training.ranks.parallel import Computation
from runner.training.ranks.peers import peer_errors
from runner.training.records.run_state import RunState
from runner.training.step.counting import NONE_STATED, samples_in, stated_tokens, tokens_in
from runner.training.step.division import Division
from runner.training.step.invariant import FixedMicroBatches
from runner.training.step.tally import Tally
from runner.training.step.tasks import Batch, Task, check_name, per_sample
from runner.training.step.trained import Trained
from runner.training.step.weights import Weights, mean


@dataclass(frozen=True)
class Drawn:
    """A micro-batch from the loader.

    Attributes:
        sources: source number of each sample, int64 (B,), or None if unknown.
    """

    batch: Batch
    sources: np.ndarray | None = None


@dataclass
class Forward:
    """Run a task's computation from the model and a batch, on `device` and in the precision of `autocast`."""

    world: World
    device: torch.device
    model: nn.Module
    task: Task
    autocast: Callable[[], AbstractContextManager[Any]]

    def evaluate(self, batch: Batch) -> Any:
        """Return the output of the task's evaluation step.

        Raises:
            PeerError: another rank has exited or does not respond.
        """
        batch = to_device(batch, self.device)
        with peer_errors(self.world), self.autocast():
            assert self.task.evaluation_step is not None  # checked in `Task.check_evaluation`
            return self.task.evaluation_step(self.model, batch)


@dataclass(frozen=True)
class StepResult:
    """The result of one step over all ranks.

    Attributes:
        values: means of the task's values over the global batch, before the update, by name. `loss` is one of them.
        by_source: the same means by source. Empty with a single source. A source whose weights sum to 0 is omitted.
        grad_norms: 2-norm of the gradients before clipping, by optimizer.
        lrs: learning rate of the update in the first parameter group, by optimizer.
        samples: number of samples in the global batch.
        tokens: number of tokens in the global batch, or None if the data have no tokens.
        skipped: True if an update was not applied.
        nonfinite: True if the reason was a loss or a gradient that is not finite. False if only a gradient was not
            finite and gradients are scaled, because the next steps use a smaller scale.
        empty: True if the reason was that the weights of the losses sum to 0.
    """

    values: dict[str, float]
    by_source: dict[str, dict[str, float]]
    grad_norms: dict[str, float]
    lrs: dict[str, float]
    samples: int
    tokens: int | None
    skipped: bool
    nonfinite: bool = False
    empty: bool = False

    @property
    def loss(self) -> float:
        return self.values["loss"]

    @property
    def grad_norm(self) -> float:
        """Return the norm of the gradients over all optimizers."""
        return math.hypot(*self.grad_norms.values())


@dataclass
class TrainStep:
    """Train steps. `sources` are the names of the sources, ordered by source number.

    `fixed` divides rank-invariant steps among the ranks. Without it, each rank computes `accum` micro-batches.
    `before_update` is called after a step's forward and backward passes, before the weights or an optimizer's state
    change. `usual_weight` is the typical sum of a micro-batch's weights. Weighted losses are divided by it before their
    gradients are summed, which keeps the gradients in range until the sum of weights over the step is known.
    """

    forward: Forward
    optimizers: Optimizers
    sources: Sequence[str]
    accum: int = 1
    clip_norm: float | None = None
    stated_tokens: np.ndarray = field(default_factory=lambda: NONE_STATED)  # see `runner.training.step.counting`
    average: Average | None = None
    fixed: FixedMicroBatches | None = None
    usual_weight: float = 1.0
    before_update: Callable[[], None] = lambda: None
    _names: dict[int, list[str]] = field(default_factory=dict)

    @staticmethod
    def build(
        of: Trained,
        config: Config,
        world: World,
        now: RunState,
        sources: Sequence[str],
        tokens_per_sample: Mapping[str, float],
    ) -> TrainStep:
        """Build the training step of an attempt.

        Args:
            of: the task, model and optimizers.
            config: config of the run.
            world: the ranks.
            now: run state, which has the batch shape and the seed of rank-invariant steps.
            sources: names of the sources that are counted separately.
            tokens_per_sample: tokens per sample, by source, for sources that state it. A float is a mean.

        Raises:
            UserError: the task cannot be trained on this number of ranks.
        """
        model = compiled(of.model, of.device) if config.train.compile else of.model
        forward = Forward(world, of.device, model, of.task, autocast(config, of.device))
        shape, fixed = now.batch_shapes[-1], None
        if shape.micro_batches:
            with peer_errors(world):
                fixed = FixedMicroBatches(world, of.bare, of.task, of.optimizers, shape, now.seed, of.device)
        accum, tokens = shape.grad_accum_steps, stated_tokens(sources, tokens_per_sample)
        usual = float(config.train.batch_size * max(tokens_per_sample.values(), default=1))
        clip = config.train.clip_norm
        return TrainStep(forward, of.optimizers, sources, accum, clip, tokens, of.average, fixed, usual)

    def __post_init__(self) -> None:
        forward, takes_step = self.forward, self.forward.task.take_step is not None
        self.division = self.fixed or Division(forward.world, forward.model, self.optimizers, self.accum, takes_step)
        self.computation: nn.Module | None = None  # None if the task defines `take_step`
        if not takes_step:
            assert forward.task.training_step is not None
            with peer_errors(forward.world):  # DDP compares the parameters
                self.computation = self.division.wrap(
                    Computation(forward.model, forward.task.training_step), forward.device
                )

    def __call__(self, draw: Callable[[], Drawn], index: int = 0) -> StepResult:
        """Train the step that follows `index` completed steps.

        Args:
            draw: function that returns the next micro-batch.
            index: number of completed steps, which is passed to the task.

        Raises:
            UserError: the task returned invalid values.
            PeerError: another rank has exited or does not respond.
        """
        self.forward.model.train()
        self.division.begin(index)
        step = Step(self, draw, index)
        with peer_errors(self.forward.world), self.forward.autocast():
            (self.forward.task.take_step or self._take_step)(step)
        result = step.result()
        self.before_update()  # again, in case no update was applied
        with peer_errors(self.forward.world):
            self.division.end()
            if self.average is not None:
                self.average.update(self.forward.model)
        self.optimizers.schedulers.step()
        return result

    def _take_step(self, step: Step) -> None:
        assert self.computation is not None
        for batch in step.batches:
            step.backward(self.computation(batch))
        for name in self.optimizers.names:
            step.update(name)

    def agree(self, update: int, logged: Mapping[str, set[int | None]]) -> list[str]:
        """Return the names of the values that every rank reduces. They are the same in every step.

        Args:
            update: number of previous reductions in this step.
            logged: maps each name that this rank logged to the micro-batches that logged it. A rank without
                micro-batches logs no names, and uses the names of the other ranks.

        Raises:
            UserError: the names differ.
        """
        names = list(logged)
        if self.fixed is not None:
            self._check_alike(logged)
        elif self.forward.world.size == 1:
            return names
        takes_part = bool(names) or self.division.count > 0
        if update not in self._names:
            everywhere = self.forward.world.gather(names if takes_part else None)
            first, *others = [found for found in everywhere if found is not None]
            if different := [other for other in others if other != first]:
                self._refuse(first, different[0], "on another rank")
            self._names[update] = first
        elif takes_part and names != self._names[update]:
            self._refuse(self._names[update], names, "in a later step")
        return self._names[update]

    def _check_alike(self, logged: Mapping[str, set[int | None]]) -> None:
        """Check that all micro-batches logged values of the same names, because they may be on different ranks."""
        for name, numbers in logged.items():
            if None not in numbers and len(numbers) < self.division.count:
                raise UserError(
                    f"{self.forward.task.name} gave {name} in some micro-batches of a step and not in others: "
                    "give it in all of them, or set train.rank_invariant=false"
                )

    def _refuse(self, names: list[str], others: list[str], where: str) -> None:
        raise UserError(
            f"{self.forward.task.name} gave the values {', '.join(names) or 'none'}, and {where} "
            f"{', '.join(others) or 'none'}: give the same values in every step and on every rank"
        )


class Step:
    """A training step, passed to a task's `take_step`.

    Attributes:
        model: the model, in training mode.
        index: number of completed steps.
        device: device of the model.
    """

    def __init__(self, maker: TrainStep, draw: Callable[[], Drawn], index: int) -> None:
        self.model = maker.forward.model
        self.index = index
        self.device = maker.forward.device
        self._maker = maker
        self._draw = draw
        self._keeps = maker.forward.task.take_step is not None
        self._drawn: list[Drawn] = []
        self._drawn_so_far = 0
        self._current: Drawn | None = None
        self._number: int | None = None  # number of the current micro-batch
        self._tally = Tally(maker.division, max(len(maker.sources), 1), maker.agree, maker.forward.task.name)
        self._weights = Weights(maker.forward.task.name, maker.optimizers.names)
        self._grad_norms: dict[str, float] = {}
        self._skipped = self._nonfinite = self._empty = False

    @property
    def batches(self) -> Iterator[Batch]:
        """Yield this rank's micro-batches of the step, on the device. A task's `take_step` may iterate repeatedly."""
        division = self._maker.division
        with division.iteration():
            for number in range(division.count):
                drawn = self._drawn[number] if number < len(self._drawn) else self._next()
                with division.micro_batch(number):
                    self._current, self._number = drawn, number
                    try:
                        yield to_device(drawn.batch, self.device)
                    finally:
                        self._current = self._number = None

    def _next(self) -> Drawn:
        drawn = self._draw()
        samples = samples_in(drawn.batch) if drawn.sources is None else len(drawn.sources)
        tokens = tokens_in(drawn.batch, samples, self._maker.stated_tokens, drawn.sources)
        self._tally.count(self._drawn_so_far, samples, tokens)
        self._drawn_so_far += 1
        if self._keeps:
            self._drawn.append(drawn)
        return drawn

    def backward(self, outputs: Any, optimizer: str | None = None, retain_graph: bool = False) -> None:
        """Backpropagate the mean loss, accumulating gradients, and log all values in `outputs`.

        Args:
            outputs: losses of shape (B,), or a mapping with `loss` (B,) and further values (B,). While `batches` are
                iterated, each micro-batch contributes its share of the step's mean. If the mapping has `weight` (B,),
                all values are averaged with these weights, and a micro-batch's share is its part of the step's sum of
                weights.
            optimizer: name of the optimizer whose parameters get gradients, or None for all trainable parameters. The
                loss of a named optimizer is logged as `loss_OPTIMIZER`.
            retain_graph: as in torch.

        Raises:
            UserError: a shape is wrong, there is no such optimizer, or the weights cannot be summed over the step.
        """
        maker, current = self._maker, self._current
        known = len(current.sources) if current is not None and current.sources is not None else None
        given = per_sample(maker.forward.task.name, outputs, None if self._keeps else known)
        loss = given.values["loss"]
        if not loss.requires_grad:
            raise UserError(
                f"{maker.forward.task.name} gave a loss without a gradient: it is detached, or depends on no parameter "
                "that is trained"
            )
        of = None if optimizer is None else self._named(optimizer)
        if twice := given.values.keys() & {f"loss_{name}" for name in maker.optimizers.names}:
            raise UserError(
                f"{maker.forward.task.name} gave a value named {min(twice)!r}, as the loss of that optimizer is named: "
                "choose another name"
            )
        self._weights.check(of, given.weight is not None, self._number)
        for name, value in given.values.items():
            self._log(f"loss_{of}" if name == "loss" and of is not None else name, value, given.weight)
        part = loss.mean() if given.weight is None else given.weighted_sum() / maker.usual_weight
        part = part / maker.division.parts if current is not None else part
        with self._full_precision():
            inputs = None if of is None else maker.optimizers.parameters(of)
            torch.autograd.backward(maker.optimizers.scale(part), retain_graph=retain_graph, inputs=inputs)

    def log(self, name: str, values: Any) -> None:
        """Log the mean of `values`, one per sample (B,) or a single number, over the step and all ranks."""
        check_name(self._maker.forward.task.name, str(name))
        self._log(name, values)

    def _log(self, name: str, values: Any, weight: torch.Tensor | None = None) -> None:
        tensor = self._tensor(f"log({name!r}, …)", values)
        sources = self._current.sources if self._current is not None else None
        self._tally.add(name, tensor.reshape(-1) if tensor.ndim else tensor, sources, self._number, weight)

    def _tensor(self, call: str, values: Any) -> torch.Tensor:
        """Convert a task's numbers to a tensor without a graph."""
        try:
            return torch.as_tensor(values).detach()
        except (TypeError, ValueError, RuntimeError):
            kind = type(values).__name__
            raise UserError(
                f"{self._maker.forward.task.name}: step.{call} is passed a {kind}: pass a number, or one per sample"
            ) from None

    def mean(self, values: Any) -> torch.Tensor:
        """Return the mean of `values` over their first dimension and all ranks.

        If a task computes its state from such means, the state is the same on all ranks.

        Args:
            values: one or more values per sample. Every rank must pass the same shape, except for the first dimension
                (the samples).

        Raises:
            PeerError: another rank has exited or does not respond.
        """
        tensor = self._tensor("mean", values)
        if not tensor.ndim:
            raise UserError(
                f"{self._maker.forward.task.name}: step.mean takes one value or more per sample, not a number"
            )
        self._check_place("mean")
        kind = tensor.dtype if tensor.is_floating_point() else torch.get_default_dtype()
        return self._maker.division.mean(tensor).to(tensor.device, kind)

    def _check_place(self, call: str) -> None:
        """Check that a call that involves all ranks is outside of the loop over `batches`, if this is required."""
        reason = self._maker.division.in_loop
        if reason is not None and self._current is not None:
            raise UserError(f"{self._maker.forward.task.name}: step.{call} is called {reason}")

    def update(self, optimizer: str | None = None) -> bool:
        """Update with the all-rank gradients of one optimizer, and zero them. Return False if no update was applied.

        Raises:
            UserError: there are several optimizers, and `optimizer` is None.
            PeerError: another rank has exited or does not respond.
        """
        maker = self._maker
        optimizers = maker.optimizers
        name = self._named(optimizer)
        self._check_place("update")
        maker.division.check(name)
        self._weights.add(self._tally.reduce())
        weight = self._weights.take(name)
        sums = self._tally.sums
        finite = all(math.isfinite(each[0].sum()) for key, each in sums.items() if key.startswith("loss"))
        with self._full_precision():
            maker.division.reduce_gradients(name)
            waiting = optimizers.scaler is not None and maker.division.holds_gradients()
            maker.before_update()
            factor = maker.usual_weight * maker.division.total / weight if weight else 1.0
            allowed = finite and weight != 0
            norm, applied = optimizers.apply(name, maker.clip_norm, allowed=allowed, waiting=waiting, factor=factor)
        self._grad_norms[name] = norm
        self._skipped = self._skipped or not applied
        self._empty = self._empty or weight == 0
        self._nonfinite = self._nonfinite or not (finite and (applied or weight == 0 or optimizers.scaler is not None))
        return applied

    @contextmanager
    def _full_precision(self) -> Iterator[None]:
        """Disable autocast in the `with` block, and drop its cached copies of the weights afterwards.

        The cached copies belong to the weights before an update, and to a different graph.
        """
        if not torch.is_autocast_enabled(self.device.type):
            yield
            return
        with torch.autocast(self.device.type, enabled=False):
            yield
        torch.clear_autocast_cache()

    def _named(self, optimizer: str | None) -> str:
        """Return the name of the optimizer to use: `optimizer`, or the only one."""
        task, names = self._maker.forward.task.name, self._maker.optimizers.names
        if optimizer is None and len(names) == 1:
            return names[0]
        if optimizer is None:
            raise UserError(f"{task} made an update without saying of which optimizer: name one of {', '.join(names)}")
        if optimizer not in names:
            raise UserError(
                f"{task}: no optimizer {optimizer!r}{nearest(optimizer, names)}; optimizers has {', '.join(names)}"
            )
        return optimizer

    def result(self) -> StepResult:
        """Return the means over the step. Also draw the batches that the task did not use, to advance the data order.

        Raises:
            UserError: the task made no update, or computed no loss.
        """
        maker = self._maker
        while self._drawn_so_far < maker.division.count:
            self._next()
        if self._tally.waits or self._keeps:  # even if only another rank has logged values
            self._tally.reduce()
        if not self._grad_norms:
            raise UserError(f"{maker.forward.task.name}.take_step made no update: call step.update()")
        lrs = {name: maker.optimizers.lr(name) for name in maker.optimizers.names}
        values = {name: mean(sums[0].sum(), sums[1].sum()) for name, sums in self._tally.sums.items()}
        if "loss" not in values:
            parts = [value for name, value in values.items() if name.startswith("loss_")]
            if not parts:
                raise UserError(f"{maker.forward.task.name} gave no loss: call step.backward, or step.log('loss', …)")
            values = {"loss": sum(parts), **values}
        samples, tokens, without = map(int, self._tally.counts)
        return StepResult(
            values,
            self._by_source(),
            self._grad_norms,
            lrs,
            samples,
            None if without else tokens,
            self._skipped,
            self._nonfinite,
            self._empty,
        )

    def _by_source(self) -> dict[str, dict[str, float]]:
        names = self._maker.sources
        if len(names) < 2:
            return {}
        return {
            key: {names[i]: float(sums[0, i] / sums[1, i]) for i in np.flatnonzero(sums[1, :-1]).tolist()}
            for key, sums in self._tally.sums.items()
            if sums[1, :-1].any()
        }


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Return `batch` with its tensors on `device`, copied asynchronously from pinned memory."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        parts = [to_device(value, device) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
