"""Provide the training loop with batches in their data order, apply phases, and track consumed samples in the ledger.

There are four classes. `SeededConsumption` is for the two seeded samplers. A phase that changes weights ends their
epoch, because they draw the index list of a complete epoch. `ElasticConsumption` ignores phases, because the elastic
sampler knows the positions of all weight changes in advance. `OwnConsumption` counts the samples of a user's sampler.
`Consumption` is for a user's loader, whose order is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from exactdata.loading.protocols import BatchRecord
from exactdata.order.ledger import DataLedger
from runner.config.schedule import PhaseSchedule
from runner.errors import CheckpointError
from runner.metrics.records import names_all


@dataclass
class Consumption:
    """The consumption of a loader that does not report its samples, so that their order is unknown."""

    loader: Any

    @property
    def names(self) -> list[str]:
        """Return the names of the sources, ordered by source number."""
        return []

    def enter_step(self, step: int) -> bool:
        """Apply the phase of `step`. Return True if the loader must be iterated again."""
        return False

    def batches(self) -> Iterator[tuple[Any, BatchRecord | None]]:
        """Iterate over the remaining batches of the epoch, each with its record."""
        return ((batch, None) for batch in self.loader)

    def consume(self, record: BatchRecord | None) -> None:
        """Count the samples of a batch that is used for training."""

    def sources(self, record: BatchRecord | None) -> np.ndarray | None:
        """Return the source number of each sample in a batch, int64 of shape (B,), or None if unknown."""
        return None

    def control(self) -> np.ndarray:
        """Return this rank's additions to the ledger since the last commit. The caller sums them over ranks."""
        return np.zeros(0, dtype=np.int64)

    def commit(self, vector: np.ndarray) -> None:
        """Add `vector`, which is summed over all ranks, to the ledger."""

    def totals(self, step: int) -> dict[str, Any]:
        """Return the ledger's digest and totals for the metrics of `step`, for the sources that this line names."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the ledger from a checkpoint. Call this after restoring the loader.

        Raises:
            CheckpointError: an entry is missing.
            SamplerStateError: the current data order does not reproduce the consumed samples.
        """


@dataclass
class TrackedConsumption(Consumption):
    """Base class for consumptions of samplers. Every consumed sample is added to the ledger, then to the metrics."""

    sampler: Any
    ledger: DataLedger
    tokens_per_sample: Mapping[str, int]  # by source; tokens of a source without an entry are not counted
    _taken: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)  # samples to add to the ledger

    @cached_property
    def _ends(self) -> np.ndarray:
        """Return the end (exclusive) of each source's dataset indices."""
        return np.cumsum(self.ledger.sizes)

    @property
    def names(self) -> list[str]:
        return self.ledger.names

    def batches(self) -> Iterator[tuple[Any, BatchRecord]]:
        return self.loader.iter_recorded()  # type: ignore[no-any-return]

    def consume(self, record: BatchRecord | None) -> None:
        assert record is not None
        assert record.indices is not None
        self._taken.append((record.indices, self.positions(record)))

    def sources(self, record: BatchRecord | None) -> np.ndarray | None:
        if record is None or record.indices is None:
            return None
        return np.searchsorted(self._ends, record.indices, side="right")

    def positions(self, record: BatchRecord) -> np.ndarray:
        """Return the positions of a batch's samples in the run."""
        assert record.positions is not None
        return record.positions

    def control(self) -> np.ndarray:
        if self._taken:  # all micro-batches at once, because hashing eight is as fast as hashing one
            indices, positions = zip(*self._taken, strict=True)
            self.ledger.consume(np.concatenate(indices), np.concatenate(positions))
            self._taken.clear()
        return self.ledger.local().view(np.int64)

    _given: Sequence[int] = ()  # source numbers of the last commit

    def commit(self, vector: np.ndarray) -> None:
        self._given = self.ledger.sources_in(vector)
        if vector.any():
            self.ledger.commit(vector.view(np.uint64), self.recomputable_from())

    def recomputable_from(self) -> int:
        """Return the first position whose samples can be recomputed at a resume."""
        return 0

    def totals(self, step: int) -> dict[str, Any]:
        ledger = self.ledger
        numbers = range(len(ledger.names)) if names_all(step, len(ledger.names)) else self._given
        sources: dict[str, dict[str, float]] = {}
        for number in numbers:
            name, samples = ledger.names[number], ledger.count(number)
            sources[name] = {"samples": samples}
            if measured := ledger.measured(number):
                sources[name] |= measured
            elif name in self.tokens_per_sample:
                sources[name]["tokens"] = samples * self.tokens_per_sample[name]
            sources[name]["epochs"] = round(samples / ledger.sizes[number], 6)
        return {"digest": ledger.digest, "sources": sources}

    def state_dict(self) -> dict[str, Any]:
        return {"ledger": self.ledger.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        missing = [key for key in self.state_dict() if key not in state]
        if missing:
            raise CheckpointError(
                f"the order in the train state has no {', '.join(map(repr, missing))}: it was saved with another kind "
                "of sampler or loader; put back sampler and data.loader, or use another checkpoint"
            )
        self.ledger.load_state_dict(state["ledger"])
        self.verify(state)

    def verify(self, state: dict[str, Any]) -> None:
        """Recompute the last consumed samples and compare their digest."""


@dataclass
class ElasticConsumption(TrackedConsumption):
    """The consumption of the elastic sampler, whose positions count from the beginning of the run."""

    def verify(self, state: dict[str, Any]) -> None:
        self.ledger.verify(self.sampler.locate)


@dataclass
class SeededConsumption(TrackedConsumption):
    """The consumption of DistributedSampler and MixtureSampler. Positions count the samples of all ranks."""

    phases: PhaseSchedule | None = None
    num_replicas: int = 1
    rank: int = 0
    _in_force: tuple[Any, float] | None = None
    _pending: int = 0
    _epoch: int = -1
    _epoch_start: int = 0

    def start_at(self, step: int) -> None:
        """Set the weights that applied in the last step before `step`. Call this before restoring the loader."""
        if self.phases is not None:
            state = self.phases.at(max(step - 1, 0))
            self._in_force = (state.weights, state.temperature)
            self.sampler.update_weights(state.weight_list, state.temperature)

    def enter_step(self, step: int) -> bool:
        if self.phases is None:
            return False
        state = self.phases.at(step)
        wanted = (state.weights, state.temperature)
        if wanted == self._in_force:
            return False
        self._in_force = wanted
        self.sampler.update_weights(state.weight_list, state.temperature)
        if self.loader.batches_yielded:
            self.loader.end_epoch()
        return True

    def positions(self, record: BatchRecord) -> np.ndarray:
        """Return positions, given the number of samples of all ranks before this step. Ranks take samples in turn."""
        assert record.indices is not None
        count = len(record.indices)
        base = self.ledger.total + self._pending * self.num_replicas
        if record.epoch != self._epoch:
            self._epoch, self._epoch_start = record.epoch, base
        self._pending += count
        return base + self.rank + self.num_replicas * np.arange(count, dtype=np.int64)

    def commit(self, vector: np.ndarray) -> None:
        super().commit(vector)
        self._pending = 0

    def recomputable_from(self) -> int:
        return self._epoch_start

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "epoch": self._epoch, "epoch_start": self._epoch_start}

    def verify(self, state: dict[str, Any]) -> None:
        """Verify only the current epoch, because the index lists of earlier epochs would have to be drawn again."""
        self._epoch, self._epoch_start = state["epoch"], state["epoch_start"]
        if not hasattr(self.sampler, "indices_at"):  # a user's sampler that cannot look up the order of an epoch
            return
        names, starts = np.array(self.ledger.names), self._ends - self.ledger.sizes

        def locate(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            indices = self.sampler.indices_at(positions - self._epoch_start, self._epoch)
            source = np.searchsorted(self._ends, indices, side="right")
            return names[source], indices - starts[source]

        self.ledger.verify(locate, since=self._epoch_start)


@dataclass
class OwnConsumption(SeededConsumption):
    """The consumption of a user's sampler. Positions are counted unless the sampler provides them."""

    def positions(self, record: BatchRecord) -> np.ndarray:
        by_position = hasattr(self.sampler, "state_dict_at") and record.positions is not None
        return record.positions if by_position else super().positions(record)  # type: ignore[return-value]
