"""The training loop: one step, its boundary, and what happens there.

At the boundary after step s, in this order: evaluate if it is due, save if it is due, leave if it was
asked for; then the phase of the next step acts, and only then is its first batch drawn. A state saved
at the boundary therefore stands on one side of everything, and a resume runs the same lines.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from runner.checkpoint import build_train_state, get_rng_state, set_rng_state
from runner.checkpoint.cadence import Cadence
from runner.distributed import World
from runner.errors import TrainingError
from runner.parallel import accumulating, total_norm

Batch = Any
Loss = Callable[[nn.Module, Batch], torch.Tensor]


class Recorder(Protocol):
    """Where records go; only rank 0 has one that writes."""

    def step(self, record: dict[str, Any], seconds: float, tokens: int) -> None: ...

    def evaluation(self, record: dict[str, Any]) -> None: ...

    def before_save(self) -> bool: ...

    def cadence(self, explanation: str) -> None: ...


class Order(Protocol):
    """What the loop needs to know of the data order (see `runner.order`)."""

    names: list[str]

    def enter_step(self, step: int) -> bool: ...

    def consume(self) -> None: ...

    def control(self) -> np.ndarray: ...

    def commit(self, vector: np.ndarray) -> None: ...

    def record(self) -> dict[str, Any]: ...

    def state_dict(self) -> dict[str, Any]: ...


@dataclass
class Evaluation:
    """Held-out loss, replayed from the top each time, that disturbs neither RNG nor data order."""

    loader: Any
    batches: int
    every_steps: int

    def due(self, step: int) -> bool:
        return self.every_steps > 0 and step > 0 and step % self.every_steps == 0


@dataclass
class Trainer:
    """Everything one attempt trains with, and the step it is at (`step` = steps complete)."""

    world: World
    device: torch.device
    model: nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LambdaLR
    loss: Loss
    loader: Any
    order: Order
    evaluation: Evaluation | None
    manager: Any
    cadence: Cadence
    recorder: Recorder
    autocast: Callable[[], AbstractContextManager[Any]]
    stop: Callable[[], bool]
    check_owner: Callable[[], None]
    accum: int = 1
    clip_norm: float | None = None
    skip_nonfinite: bool = False
    step: int = 0
    tokens_seen: int = 0
    evaluated: bool = False
    eval_loss: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    clock: Callable[[], float] = time.monotonic
    after_first_step: Callable[[], None] = lambda: None
    _iterator: Iterator[Batch] | None = None
    _stop_agreed: bool = False
    _save_agreed: bool = False

    def run(self, steps: int) -> bool:
        """Train until `steps` steps are complete, and evaluated if that is due; False if a signal ended it before.

        Either way the state at the end is saved and committed.

        Raises:
            TrainingError: a non-finite loss, or the data ended.
            SupersededError: a newer incarnation of this run took over.
        """
        started_at = self.step
        self._agree()  # a signal may have come while everything was built
        while True:
            self.check_owner()
            interrupted = False
            if self.evaluation and not self.evaluated and self.evaluation.due(self.step):
                self.evaluated = self._evaluate(self.evaluation)
                interrupted = not self.evaluated
            leaving, saved = self._stop_agreed or self.step >= steps, True
            if (leaving and self.step > started_at) or self._save_agreed:
                saved = self._save(wait=leaving)
                # After a signal there is no time to mend a disk: the last good checkpoint has to do.
                if leaving and not saved and not self._stop_agreed:
                    raise TrainingError(self._unsaved())
            if leaving:
                return self.step >= steps and not interrupted and saved
            if self.order.enter_step(self.step):
                self._iterator = None
            self._train_step()
            if self.step == started_at + 1:
                self.after_first_step()

    def _train_step(self) -> None:
        began = self.clock()
        losses, sources, tokens = self._accumulate()
        mean_loss, by_source = self._reduce(losses, sources)
        norm = total_norm(self.model)
        lr = self.scheduler.get_last_lr()[0]
        finite = math.isfinite(mean_loss) and math.isfinite(norm.item())
        if finite:
            if self.clip_norm is not None:
                torch.nn.utils.clip_grads_with_norm_(self.model.parameters(), self.clip_norm, norm)
            self.optimizer.step()
        elif not self.skip_nonfinite:
            raise TrainingError(self._nonfinite(mean_loss, norm.item()))
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        self.step += 1
        self.evaluated = False
        tokens *= self.world.size
        self.tokens_seen += tokens
        self._agree()
        record: dict[str, Any] = {"step": self.step, "loss": mean_loss, "lr": lr, "tokens_seen": self.tokens_seen}
        record["grad_norm"] = norm.item()
        if not finite:
            record["skipped"] = True
        record |= self.order.record()
        if by_source:
            record["loss_by_source"] = by_source
        self.recorder.step(record, self.clock() - began, tokens)

    def _accumulate(self) -> tuple[list[torch.Tensor], list[Any], int]:
        """Forward and backward over the micro-batches: per-sample losses, their sources, tokens."""
        losses: list[torch.Tensor] = []
        sources: list[Any] = []
        tokens = 0
        self.model.train()
        for micro in range(self.accum):
            batch = self._next_batch()
            tokens += tokens_in(batch)
            sources.append(batch.get("dataset_idx") if isinstance(batch, dict) else None)
            batch = to_device(batch, self.device)
            with accumulating(self.model, last=micro == self.accum - 1):
                with self.autocast():
                    per_sample = self.loss(self.model, batch)
                torch.autograd.backward(per_sample.mean() / self.accum)
            losses.append(per_sample.detach())
        return losses, sources, tokens

    def _next_batch(self) -> Batch:
        for _ in range(2):  # an epoch may end here, and the next one begin
            if self._iterator is None:
                self._iterator = iter(self.loader)
            for batch in self._iterator:
                self.order.consume()
                return batch
            self._iterator = None
        stop_here = f"Set train.steps={self.step}, or give" if self.step else "Give"
        raise TrainingError(
            f"the data ended at step {self.step}: nothing is left to draw after {self.tokens_seen} tokens. "
            f"{stop_here} more data (more sources, a higher sampler.max_epochs, a smaller train.batch_size)"
        )

    def _reduce(self, losses: list[torch.Tensor], sources: list[Any]) -> tuple[float, dict[str, float]]:
        """Mean loss over the global batch, and by source where there are several."""
        values = torch.cat([loss.reshape(-1) for loss in losses]).double().cpu().numpy()
        n = max(len(self.order.names), 1)
        if n > 1 and all(source is not None for source in sources):
            where = torch.cat(sources).numpy()
        else:
            n, where = 1, np.zeros(len(values), dtype=np.int64)
        sums = np.stack([np.bincount(where, values, n), np.bincount(where, minlength=n)])
        total, count = self.world.sum(torch.from_numpy(sums)).numpy()
        by_source = {name: float(total[i] / count[i]) for i, name in enumerate(self.order.names) if n > 1 and count[i]}
        return float(total.sum() / count.sum()), by_source

    def _agree(self) -> None:
        """Let all ranks see the same stop flag, the same decision to save, the same data ledger."""
        due = self.step > 0 and self.world.is_main and self.cadence.should_save(self.step, self.clock())
        flags = np.array([self.stop(), due], dtype=np.int64)
        vector = torch.from_numpy(np.concatenate([flags, self.order.control()]))
        vector = self.world.sum(vector)
        self._stop_agreed, self._save_agreed = bool(vector[0]), bool(vector[1])
        self.order.commit(vector[2:].numpy())

    def _evaluate(self, evaluation: Evaluation) -> bool:
        """Evaluate and record; False if a signal came meanwhile (the resumed run evaluates again)."""
        rng = get_rng_state()
        self.model.eval()
        sums = torch.zeros(2, dtype=torch.float64)
        finished = True
        with torch.no_grad():
            for index, batch in enumerate(evaluation.loader):
                if index == evaluation.batches:
                    break
                if self._stop_now():
                    finished = False
                    break
                with self.autocast():
                    losses = self.loss(self.model, to_device(batch, self.device))
                sums += torch.tensor([losses.double().sum().item(), losses.numel()], dtype=torch.float64)
        self.world.sum(sums)
        self.model.train()
        set_rng_state(rng)
        if finished:
            self.eval_loss = (sums[0] / sums[1]).item()
            self.recorder.evaluation({"step": self.step, "eval_loss": self.eval_loss})
        return finished

    def _stop_now(self) -> bool:
        """The stop flag, agreed across ranks, in the middle of an evaluation."""
        flag = self.world.sum(torch.tensor([int(self.stop())]))
        self._stop_agreed = self._stop_agreed or bool(flag[0])
        return self._stop_agreed

    def _save(self, wait: bool) -> bool:
        """Make metrics durable, then commit a checkpoint of this boundary; False if it is known to have failed."""
        saved = False
        if self.world.on_main(self.recorder.before_save):
            extra = {**self.extra, "order": self.order.state_dict(), "evaluated": self.evaluated}
            state = build_train_state(self.step, self.tokens_seen, self.scheduler, self.loader, extra)
            metric = self.eval_loss if self.evaluated else None
            self._learn_cost()
            saved = self.manager.save(self.step, self.model, self.optimizer, state, metric=metric, wait=wait)
            self.cadence.saved(self.step, self.clock())
        return saved

    def _learn_cost(self) -> None:
        """Let an adaptive cadence know what the save before this one cost."""
        if self.cadence.adaptive is None:
            return
        self.manager.wait()
        cost = self.manager.last_save
        if cost and cost["write_s"]:
            self.cadence.adaptive.observe_save(cost["stall_s"], cost["write_s"])
            self.recorder.cadence(self.cadence.explain(self.clock()))

    def _unsaved(self) -> str:
        last = self.manager.newest()
        kept = f"the checkpoint of step {last.step} is kept" if last else "there is no checkpoint yet"
        return (
            f"the last save, at step {self.step}, failed: "
            f"{self.manager.last_error or 'metrics could not be written'}; {kept}; "
            "mend the cause (free space, permissions), and the same command goes on from there"
        )

    def _nonfinite(self, loss: float, norm: float) -> str:
        self.manager.wait()  # the last good one may still be on its way to the disk
        last = self.manager.newest()
        kept = f"the checkpoint of step {last.step} is kept" if last else "no checkpoint was written yet"
        return (
            f"the loss of step {self.step + 1} is {loss} (gradient norm {norm}): training stopped, {kept}. "
            "Lower optimizer.lr or train.clip_norm, or leave such steps out with train.on_nonfinite=skip"
        )


def tokens_in(batch: Batch) -> int:
    """Tokens of a batch: its labels where it has any, else its samples."""
    if isinstance(batch, dict):
        labels = batch.get("labels")
        if isinstance(labels, torch.Tensor):
            return labels.numel()
        batch = next(iter(batch.values()))
    elif isinstance(batch, (list, tuple)):
        batch = batch[0]
    return len(batch)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """`batch` with its tensors on `device` (copied without waiting where memory is pinned)."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
