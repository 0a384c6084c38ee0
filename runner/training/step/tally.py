"""Collect the values logged in a step by name and source, and sum them over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from runner.training.step.division import Division
from runner.training.step.tasks import check_weights

COUNTS = 3  # number of counts: samples, tokens, batches without tokens
OUTSIDE = " (outside of step.batches)"
WEIGHTED = " (weighted)"


@dataclass
class _Part:
    """The values logged in one call. `number` is the micro-batch on this rank, or None outside of micro-batches."""

    values: torch.Tensor
    sources: np.ndarray | None
    number: int | None
    weight: torch.Tensor | None

    def tensors(self) -> list[torch.Tensor]:
        return [self.values] if self.weight is None else [self.values, self.weight]


_Logged = tuple[_Part, np.ndarray, np.ndarray | None]
"""A part, with its values and weights copied to the CPU."""


@dataclass
class Tally:
    """Collect values between two updates, and keep the sums of the step.

    Args:
        division: divides the step among the ranks.
        sources: number of sources, or 1 if they are unknown.
        agree: function that returns the names of all ranks. It is called with the number of previous reductions and,
            for each name, the micro-batches of this rank that logged it.
        task: name of the task, for messages.

    Attributes:
        sums: sums and counts by source, float64 (2, sources + 1), for each name. The last column is for values without
            a source. For weighted values, these are the sums of weight * value and the sums of weights.
        counts: number of samples, number of tokens, and number of batches without tokens.
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
        """Log the values of a micro-batch, or values outside of micro-batches.

        Args:
            name: name of the values.
            values: one per sample, shape (N,), or a single number.
            sources: source number of each sample, if known.
            number: number of the micro-batch on this rank, from 0, or None outside of micro-batches.
            weight: weight of each sample of a micro-batch, shape (N,). If None, each weight is 1.
        """
        known = sources if sources is not None and values.ndim and len(sources) == len(values) else None
        label = name + (OUTSIDE if number is None else "" if weight is None else WEIGHTED)
        self._parts.setdefault(label, []).append(_Part(values, known, number, weight))

    def count(self, number: int, samples: int, tokens: int | None) -> None:
        """Count the samples and tokens of a drawn micro-batch."""
        self._counted[number] += samples, tokens or 0, tokens is None

    @property
    def waits(self) -> bool:
        """Return True if values were logged since the last call of `reduce`."""
        return bool(self._parts)

    def reduce(self) -> dict[str, float]:
        """Sum the values and counts since the last call over all ranks, and add them to the sums of the step.

        Returns:
            The sum of the weights since the last call, by name, for values that were logged with weights.

        Raises:
            UserError: the ranks logged different names, or a weight is negative or not finite.
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
        """Return the parts of each label, with values and weights copied from the device in a single transfer."""
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
        """Return sums and counts by source, float64 (2, sources + 1)."""
        place = np.full(len(values), self.sources) if part.sources is None else part.sources
        weighted = values if weights is None else values * weights
        return np.stack(
            [
                np.bincount(place, weighted, self.sources + 1),
                np.bincount(place, weights, self.sources + 1).astype(np.float64),
            ]
        )

    def _outside(self, values: list[_Logged]) -> np.ndarray:
        """Return sums and counts of values outside of micro-batches, float64 (2, sources + 1)."""
        several = [mine for part, mine, _ in values if part.values.ndim]
        single = [mine for part, mine, _ in values if not part.values.ndim]
        found = self.division.everywhere(
            np.concatenate([*several, np.zeros(0)]), np.concatenate([*single, np.zeros(0)])
        )
        sums = np.zeros((2, self.sources + 1))
        sums[:, self.sources] = found.sum(), len(found)
        return sums
