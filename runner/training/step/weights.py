"""Sum the weights that a task returns with its losses. The gradients of a step are divided by the sum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from runner.errors import UserError


class Weights:
    """The sums of loss weights over all ranks, for the next updates.

    Args:
        task: name of the task, for messages.
        optimizers: names of the optimizers.
    """

    def __init__(self, task: str, optimizers: Sequence[str]) -> None:
        self._task = task
        self._sums: dict[str, float] = {}
        self._seen: dict[str, dict[int | None, bool]] = {name: {} for name in optimizers}

    def check(self, optimizer: str | None, weighted: bool, micro_batch: int | None) -> None:
        """Check that all gradients of an update can share one sum of weights.

        Args:
            optimizer: name of the optimizer whose parameters get gradients from the loss, or None for all optimizers.
            weighted: True if the loss has weights.
            micro_batch: number of the micro-batch, or None outside of `step.batches`.

        Raises:
            UserError: the gradients cannot share one sum.
        """
        for name in self._seen if optimizer is None else (optimizer,):
            seen = self._seen[name]
            if weighted and micro_batch is None:
                raise self._error("outside of the loop over step.batches: call step.backward in the loop")
            if seen and weighted not in seen.values():
                raise self._error("with some losses of an update and not with others: return it with all or none")
            if weighted and micro_batch in seen:
                raise self._error("with two losses of a micro-batch: add up the losses and call step.backward once")
            seen[micro_batch] = weighted

    def _error(self, when: str) -> UserError:
        return UserError(f"{self._task} returned a weight {when}")

    def add(self, sums: Mapping[str, float]) -> None:
        """Add the sums of weights since the last update. The keys are the names under which losses are logged."""
        for label, weight in sums.items():
            for name in self._seen:
                if label in ("loss", f"loss_{name}"):
                    self._sums[name] = self._sums.get(name, 0.0) + weight

    def take(self, optimizer: str) -> float | None:
        """Return and remove the sum of weights for an update, or None if its losses have no weights."""
        self._seen[optimizer].clear()
        return self._sums.pop(optimizer, None)


def mean(total: float, count: float) -> float:
    """Divide a sum by a count. Return nan if the count is 0."""
    return float(total / count) if count else math.nan
