"""What a step has logged, by name and source, and its sums over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from runner.training.step.division import Division
from runner.training.step.tasks import check_weights

COUNTS = 3  # samples, tokens, batches without tokens
OUTSIDE = " (outside of step.batches)"
WEIGHTED = " (weighted)"


@dataclass
class _Part:
    """Values of one call: of a micro-batch, by its number on this rank, or of none."""

    values: torch.Tensor
    sources: np.ndarray | None
    number: int | None
    weight: torch.Tensor | None

    def tensors(self) -> list[torch.Tensor]:
        return [self.values] if self.weight is None else [self.values, self.weight]


_Logged = tuple[_Part, np.ndarray, np.ndarray | None]
"""A part with its values and its weights on the CPU."""


@dataclass
class Tally:
    """Collects values between two updates, and keeps the sums of the step.

    Args:
        division: how the ranks share the step.
        sources: how many there are; 1 if they are not known.
        agree: (update, in which micro-batches of this rank each name was logged) -> the names of every rank.
        task: for messages.

    Attributes:
        sums: by name, sums and counts by source, the last for values without one; float64 (2, sources + 1). For values
            with weights, sums of weight times value, and of weights.
        counts: samples, tokens and batches without tokens.
    """

    division: Division
    sources: int
    agree: Callable[[int, dict[str, set[int | None]]], list[str]]
    task: str = "the task"
    sums: dict[str, np.ndarray] = field(default_factory=dict)
    counts: np.ndarray = field(default_factory=lambda: np.zeros(COUNTS))
    _parts: dict[str, list[_Part]] = field(default_factory=dict)
    _updates: int = 0

    def __post_init__(self) -> None:
        self._counted = np.zeros((self.division.count, COUNTS))

    def add(
        self,
        name: str,
        values: torch.Tensor,
        sources: np.ndarray | None,
        number: int | None,
        weight: torch.Tensor | None = None,
    ) -> None:
        """Log the values of a micro-batch, or of none.

        Args:
            name: of the values.
            values: one per sample, shape (N,), or a single number.
            sources: the source of each sample, if they are known.
            number: of the micro-batch on this rank, from 0.
            weight: of each sample of a micro-batch, shape (N,); None: each counts once.
        """
        known = sources if sources is not None and values.ndim and len(sources) == len(values) else None
        label = name + (OUTSIDE if number is None else "" if weight is None else WEIGHTED)
        self._parts.setdefault(label, []).append(_Part(values, known, number, weight))

    def count(self, number: int, samples: int, tokens: int | None) -> None:
        """Count a micro-batch that was drawn."""
        self._counted[number] += samples, tokens or 0, tokens is None

    @property
    def waits(self) -> bool:
        """Whether anything was logged since the last sum."""
        return bool(self._parts)

    def reduce(self) -> dict[str, float]:
        """Add what was logged and counted since the last call to the sums of the step, over all ranks.

        Returns:
            The sum of the weights since the last call, by name, for the values that were logged with weights.

        Raises:
            UserError: the ranks logged different values, or a weight is below 0 or not finite.
        """
        labels = self.agree(
            self._updates, {label: {part.number for part in parts} for label, parts in self._parts.items()}
        )
        self._updates += 1
        shape = len(labels), 2, self.sources + 1
        rows = np.zeros((self.division.count, *shape))
        outside = np.zeros(shape)
        for place, (label, values) in enumerate(self._values(labels)):
            if label.endswith(OUTSIDE):
                outside[place] = self._outside(values)
                continue
            for part, mine, weights in values:
                rows[part.number, place] += self._by_source(part, mine, weights)
        flat = np.concatenate([self._counted, rows.reshape(len(rows), outside.size)], 1)
        total = self.division.sum(flat, np.concatenate([np.zeros(COUNTS), outside.reshape(-1)]))
        self.counts = self.counts + total[:COUNTS]
        weighed: dict[str, float] = {}
        for label, sums in zip(labels, total[COUNTS:].reshape(shape), strict=True):
            name = label.removesuffix(OUTSIDE).removesuffix(WEIGHTED)
            self.sums[name] = self.sums[name] + sums if name in self.sums else sums
            if label.endswith(WEIGHTED):
                weighed[name] = float(sums[1].sum())
        self._parts.clear()
        self._counted[:] = 0
        return weighed

    def _values(self, labels: list[str]) -> list[tuple[str, list[_Logged]]]:
        """Return the parts of each label with their values and weights, copied from the device at once."""
        parts = [(label, part) for label in labels for part in self._parts.get(label, ())]
        tensors = [tensor.double().reshape(-1) for _, part in parts for tensor in part.tensors()]
        ends = np.cumsum([len(each) for each in tensors])
        flat = iter(np.split(torch.cat(tensors).cpu().numpy(), ends[:-1]) if tensors else ())
        found: dict[str, list[_Logged]] = {label: [] for label in labels}
        for label, part in parts:
            values = next(flat)
            weights = None if part.weight is None else next(flat)
            if weights is not None:
                check_weights(self.task, weights)
            found[label].append((part, values, weights))
        return list(found.items())

    def _by_source(self, part: _Part, values: np.ndarray, weights: np.ndarray | None) -> np.ndarray:
        """Sums and counts, float64 (2, sources + 1)."""
        place = np.full(len(values), self.sources) if part.sources is None else part.sources
        weighted = values if weights is None else values * weights
        return np.stack(
            [
                np.bincount(place, weighted, self.sources + 1),
                np.bincount(place, weights, self.sources + 1).astype(np.float64),
            ]
        )

    def _outside(self, values: list[_Logged]) -> np.ndarray:
        """Sums and counts of what belongs to no micro-batch, float64 (2, sources + 1)."""
        several = [mine for part, mine, _ in values if part.values.ndim]
        single = [mine for part, mine, _ in values if not part.values.ndim]
        found = self.division.everywhere(
            np.concatenate([*several, np.zeros(0)]), np.concatenate([*single, np.zeros(0)])
        )
        sums = np.zeros((2, self.sources + 1))
        sums[:, self.sources] = found.sum(), len(found)
        return sums
