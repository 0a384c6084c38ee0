"""What the loop knows of the data order: the sampler, the phases that drive it, and the ledger of what was seen.

Three kinds. `SeededOrder` drives the two seeded samplers: a phase that changes weights ends the epoch,
since their lists are drawn for a whole epoch. `ElasticOrder` needs nothing at a phase: its segments are
positions, laid down in advance. `NoOrder` is for a user's own loader, whose order is its own affair.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from runner.data.ledger import DataLedger
from runner.schedule import PhaseSchedule


class NoOrder:
    """For a loader that says nothing of its samples."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def enter_step(self, step: int) -> bool:
        return False

    def consume(self) -> None:
        pass

    def control(self) -> np.ndarray:
        return np.zeros(0, dtype=np.int64)

    def commit(self, vector: np.ndarray) -> None:
        pass

    def record(self) -> dict[str, Any]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def restore(self, state: dict[str, Any] | None) -> None:
        pass


@dataclass
class LedgerOrder:
    """Common to the samplers: every consumed sample goes into the ledger, and from there into the metrics."""

    loader: Any
    sampler: Any
    ledger: DataLedger
    names: list[str]
    sizes: list[int]
    tokens_per_sample: int

    def enter_step(self, step: int) -> bool:
        """Let the phase of `step` act; True if the loader must be iterated anew."""
        return False

    def consume(self) -> None:
        """Note the batch that the loader has just handed out."""
        self.ledger.consume(self.loader.last_indices, self.positions())

    def positions(self) -> np.ndarray:
        """Global positions of the samples of the last batch."""
        return np.asarray(self.loader.last_positions)

    def control(self) -> np.ndarray:
        """This rank's part of the ledger since the last commit, to be summed over ranks."""
        return self.ledger.local().view(np.int64)

    def commit(self, vector: np.ndarray) -> None:
        """Take in the sum over all ranks."""
        if vector.any():
            self.ledger.commit(vector.view(np.uint64))

    def record(self) -> dict[str, Any]:
        """For the metrics: the digest, and for each source what it gave so far."""
        counts = self.ledger.counts
        sources = {
            name: {
                "samples": counts[name],
                "tokens": counts[name] * self.tokens_per_sample,
                "epochs": round(counts[name] / size, 6),
            }
            for name, size in zip(self.names, self.sizes, strict=True)
        }
        return {"digest": self.ledger.digest, "sources": sources}

    def state_dict(self) -> dict[str, Any]:
        return {"ledger": self.ledger.state_dict()}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go on with the ledger of the checkpoint, after the loader was restored.

        Raises:
            SamplerStateError: the order as it is now does not give the samples that were consumed.
        """
        if state:
            self.ledger.load_state_dict(state["ledger"])
            self.verify(state)

    def verify(self, state: dict[str, Any]) -> None:
        """Work out the last consumed samples again and compare their digest."""


@dataclass
class ElasticOrder(LedgerOrder):
    """The elastic sampler's positions are those of the whole run."""

    def verify(self, state: dict[str, Any]) -> None:
        self.ledger.verify(self.sampler.locate)


@dataclass
class SeededOrder(LedgerOrder):
    """DistributedSampler and MixtureSampler, whose positions count from where the run began."""

    phases: PhaseSchedule | None = None
    num_replicas: int = 1
    rank: int = 0
    _in_force: tuple[Any, float] | None = None
    _pending: int = 0
    _epoch: int = -1
    _epoch_start: int = 0

    def start_at(self, step: int) -> None:
        """Set the weights that were in force in the last step before `step`, before the loader is restored."""
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

    def positions(self) -> np.ndarray:
        """Counted from the samples of all ranks before this step: ranks take turns."""
        count = len(self.loader.last_indices)
        base = self.ledger.total + self._pending * self.num_replicas
        if self.loader.epoch != self._epoch:
            self._epoch, self._epoch_start = self.loader.epoch, base
        self._pending += count
        return base + self.rank + self.num_replicas * np.arange(count, dtype=np.int64)

    def commit(self, vector: np.ndarray) -> None:
        super().commit(vector)
        self._pending = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "epoch": self._epoch, "epoch_start": self._epoch_start}

    def verify(self, state: dict[str, Any]) -> None:
        """Only within the epoch under way: the lists of earlier ones would have to be drawn again."""
        self._epoch, self._epoch_start = state["epoch"], state["epoch_start"]
        names, ends = np.array(self.names), np.cumsum(self.sizes)

        def locate(positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
            indices = self.sampler.indices_at(positions - self._epoch_start, self._epoch)
            source = np.searchsorted(ends, indices, side="right")
            return names[source], indices - (ends - self.sizes)[source]

        self.ledger.verify(locate, since=self._epoch_start)
