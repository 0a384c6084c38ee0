"""What a step has logged, by name and source, and its sums over micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from runner.training.step.division import Division

COUNTS = 3  # samples, tokens, batches without tokens
OUTSIDE = " (outside of step.batches)"


@dataclass
class _Part:
    """Values of one call: of a micro-batch, by its number on this rank, or of none."""

    values: torch.Tensor
    sources: np.ndarray | None
    number: int | None


@dataclass
class Tally:
    """Collects values between two updates, and keeps the sums of the step.

    Args:
        division: how the ranks share the step.
        sources: how many there are; 1 if they are not known.
        agree: (update, in which micro-batches of this rank each name was logged) -> the names of every rank.

    Attributes:
        sums: by name, sums and counts by source, the last for values without one; float64 (2, sources + 1).
        counts: samples, tokens and batches without tokens.
    """

    division: Division
    sources: int
    agree: Callable[[int, dict[str, set[int | None]]], list[str]]
    sums: dict[str, np.ndarray] = field(default_factory=dict)
    counts: np.ndarray = field(default_factory=lambda: np.zeros(COUNTS))
    _parts: dict[str, list[_Part]] = field(default_factory=dict)
    _updates: int = 0

    def __post_init__(self) -> None:
        self._counted = np.zeros((self.division.count, COUNTS))

    def add(self, name: str, values: torch.Tensor, sources: np.ndarray | None, number: int | None) -> None:
        """Log the values of a micro-batch, or of none.

        Args:
            name: of the values.
            values: one per sample, shape (N,), or a single number.
            sources: the source of each sample, if they are known.
            number: of the micro-batch on this rank, from 0.
        """
        known = sources if sources is not None and values.ndim and len(sources) == len(values) else None
        label = name if number is not None else name + OUTSIDE
        self._parts.setdefault(label, []).append(_Part(values, known, number))

    def count(self, number: int, samples: int, tokens: int | None) -> None:
        """Count a micro-batch that was drawn."""
        self._counted[number] += samples, tokens or 0, tokens is None

    @property
    def waits(self) -> bool:
        """Whether anything was logged since the last sum."""
        return bool(self._parts)

    def reduce(self) -> None:
        """Add what was logged and counted since the last call to the sums of the step, over all ranks."""
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
            for part, mine in values:
                rows[part.number, place] += self._by_source(part, mine)
        flat = np.concatenate([self._counted, rows.reshape(len(rows), outside.size)], 1)
        total = self.division.sum(flat, np.concatenate([np.zeros(COUNTS), outside.reshape(-1)]))
        self.counts = self.counts + total[:COUNTS]
        for label, sums in zip(labels, total[COUNTS:].reshape(shape), strict=True):
            name = label.removesuffix(OUTSIDE)
            self.sums[name] = self.sums[name] + sums if name in self.sums else sums
        self._parts.clear()
        self._counted[:] = 0

    def _values(self, labels: list[str]) -> list[tuple[str, list[tuple[_Part, np.ndarray]]]]:
        """The parts of each label with their values, which come from the device at once."""
        parts = [(label, part) for label in labels for part in self._parts.get(label, ())]
        flat = torch.cat([part.values.double().reshape(-1) for _, part in parts]).cpu().numpy() if parts else None
        found: dict[str, list[tuple[_Part, np.ndarray]]] = {label: [] for label in labels}
        at = 0
        for label, part in parts:
            assert flat is not None
            found[label].append((part, flat[at : at + part.values.numel()]))
            at += part.values.numel()
        return list(found.items())

    def _by_source(self, part: _Part, values: np.ndarray) -> np.ndarray:
        """Sums and counts, float64 (2, sources + 1)."""
        place = np.full(len(values), self.sources) if part.sources is None else part.sources
        return np.stack(
            [
                np.bincount(place, values, self.sources + 1),
                np.bincount(place, minlength=self.sources + 1).astype(np.float64),
            ]
        )

    def _outside(self, values: list[tuple[_Part, np.ndarray]]) -> np.ndarray:
        """Sums and counts of what belongs to no micro-batch, float64 (2, sources + 1)."""
        several = [mine for part, mine in values if part.values.ndim]
        single = [mine for part, mine in values if not part.values.ndim]
        found = self.division.everywhere(
            np.concatenate([*several, np.zeros(0)]), np.concatenate([*single, np.zeros(0)])
        )
        sums = np.zeros((2, self.sources + 1))
        sums[:, self.sources] = found.sum(), len(found)
        return sums
