"""The ledger of consumed samples: a digest that proves what was consumed, and counts per source.

The digest is the sum over all samples, modulo 2^64 in two lanes, of a hash of (position, source name, index within the
source). A sum does not depend on ranks, batches or workers: two runs with the same digest at a step consumed the same
samples at the same positions. It detects mistakes, not forgery.

Does not import torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.data.order.hashing import GOLDEN, U64, mix64, stream_key
from runner.data.order.state_checks import (
    ListOf,
    MapOf,
    Record,
    TupleOf,
    check,
    check_seal,
    hexadecimal,
    sealed,
    text,
    whole,
)
from runner.data.order.weights import SamplerStateError

I64 = NDArray[np.int64]

LANES = 2
_STATE = Record(
    {
        "digest": hexadecimal(16 * LANES),
        "counts": MapOf(whole()),
        "sizes": MapOf(whole()),
        "anchors": ListOf(TupleOf((whole(), whole(), hexadecimal(16), hexadecimal(16)))),
        "seal": text,
    }
)
_VERIFIED = 1 << 16  # a resume verifies at most this many samples
_SECOND = np.uint64(0xC2B2AE3D27D4EB4F)
_ODD = np.uint64(0x9FB21C651E98DF25)


class DataLedger:
    """What a run has consumed.

    Each rank adds its own samples with `consume`. Once per step, `local()` is summed over all ranks (modulo 2^64) and
    every rank passes the sum to `commit`.

    Args:
        names: source names, in the order of the dataset.
        sizes: number of samples of each source.
    """

    def __init__(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        self.names, self.sizes = list(names), [int(size) for size in sizes]
        self._ends = np.cumsum(self.sizes)
        self._starts = self._ends - np.array(self.sizes)
        self._name_keys = np.array([_name_key(name) for name in names], np.uint64)
        self._local = np.zeros(LANES + len(self.names), np.uint64)
        self._lanes = np.zeros(LANES, np.uint64)
        self._counts = dict.fromkeys(self.names, 0)
        self._anchors: deque[tuple[int, int, int, int]] = deque()  # first position, samples, lanes

    def consume(self, indices: NDArray[np.integer], positions: NDArray[np.integer]) -> None:
        """Add samples of this rank.

        Args:
            indices: indices into the dataset, shape (count,).
            positions: positions in the run, shape (count,).
        """
        indices = np.asarray(indices, np.int64)
        source = np.searchsorted(self._ends, indices, side="right")
        self._local[:LANES] += _lanes(positions, self._name_keys[source], indices - self._starts[source])
        self._local[LANES:] += np.bincount(source, minlength=len(self.names)).astype(np.uint64)

    def local(self) -> U64:
        """What this rank added since the last commit, shape (2 + sources,): two digest lanes, samples per source."""
        return self._local.copy()

    def commit(self, vector: U64) -> None:
        """Add the sum of `local()` over all ranks."""
        first = self.total
        self._lanes += vector[:LANES]
        for name, count in zip(self.names, vector[LANES:].tolist(), strict=True):
            self._counts[name] += count
        self._local[:] = 0
        self._anchors.append((first, self.total - first, int(vector[0]), int(vector[1])))
        while len(self._anchors) > 1 and self.total - self._anchors[0][0] > _VERIFIED:
            self._anchors.popleft()

    @property
    def total(self) -> int:
        """Samples consumed by all ranks."""
        return sum(self._counts.values())

    @property
    def counts(self) -> dict[str, int]:
        """Samples consumed from each source, including sources retired since."""
        return dict(self._counts)

    @property
    def digest(self) -> str:
        """32 hexadecimal digits."""
        return "".join(f"{lane:016x}" for lane in self._lanes.tolist())

    def state_dict(self) -> dict[str, Any]:
        """Digest, counts, sizes, the digests of the last steps (up to 65,536 samples), a seal; JSON-serializable."""
        state = {
            "digest": self.digest,
            "counts": self.counts,
            "sizes": dict(zip(self.names, self.sizes, strict=True)),
            "anchors": [[first, count, f"{a:016x}", f"{b:016x}"] for first, count, a, b in self._anchors],
        }
        return sealed(state, "seal")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved ledger.

        Raises:
            SamplerStateError: the size of a source has changed, or the state is incomplete or was edited.
        """
        message = "the saved data ledger is incomplete: {key} is {value}; expected {allowed}; use another checkpoint"
        check(state, _STATE, message, SamplerStateError)
        lanes = [int(state["digest"][i : i + 16], 16) for i in range(0, 16 * LANES, 16)]
        counts, sizes = dict(state["counts"]), dict(state["sizes"])
        anchors = [(first, count, int(a, 16), int(b, 16)) for first, count, a, b in state["anchors"]]
        for name, size in zip(self.names, self.sizes, strict=True):
            if sizes.get(name, size) != size:
                raise SamplerStateError(
                    f"source {name!r} had {sizes[name]} samples when the ledger was saved and has {size} now: "
                    "restore the source"
                )
        if anchors and sum(anchors[-1][:2]) != sum(counts.values()):
            raise SamplerStateError(
                f"the saved data ledger counts {sum(counts.values())} samples but its last step ends at position "
                f"{sum(anchors[-1][:2])}: it was edited; use another checkpoint"
            )
        check_seal(state, "the saved data ledger", SamplerStateError, "seal")
        self._lanes = np.array(lanes, np.uint64)
        self._counts = {**dict.fromkeys(self.names, 0), **counts}
        self._local[:] = 0
        self._anchors = deque(anchors)

    def verify(self, locate: Callable[[I64], tuple[Any, ...]], since: int = 0) -> int:
        """Recompute what the last steps consumed and compare it with the saved digests.

        Args:
            locate: positions -> (source names, indices within the sources, ...), such as `ElasticSampler.locate`.
            since: steps that begin before this position are not compared, because `locate` does not cover them.

        Returns:
            The number of samples compared: up to 65,536, or one step.

        Raises:
            SamplerStateError: the data order is not the one that was consumed; states the positions and both digests.
        """
        known = [anchor for anchor in self._anchors if anchor[0] >= since]
        for first, count, *saved in known:
            names, index = locate(np.arange(first, first + count, dtype=np.int64))[:2]
            distinct, which = np.unique(names, return_inverse=True)
            keys = np.array([_name_key(str(name)) for name in distinct.tolist()], np.uint64)
            found = _lanes(np.arange(first, first + count), keys[which], index).tolist()
            if found != saved:
                raise SamplerStateError(
                    f"positions {first} to {first + count - 1}: the run consumed samples with digest "
                    f"{saved[0]:016x}, the current data order gives {found[0]:016x}: "
                    "restore the program version and configuration, or use another checkpoint"
                )
        return sum(count for _, count, *_ in known)


def _name_key(name: str) -> int:
    return stream_key("ledger", name)


def _lanes(positions: NDArray[np.integer], name_keys: U64, indices: NDArray[np.integer]) -> U64:
    """The two lanes of the digest of these samples."""
    mixed = mix64(np.asarray(positions).astype(np.uint64) * np.uint64(GOLDEN) + name_keys)
    mixed ^= np.asarray(indices).astype(np.uint64) * _ODD
    mixed = mix64(mixed)
    return np.array([mixed.sum(dtype=np.uint64), mix64(mixed + _SECOND).sum(dtype=np.uint64)], np.uint64)
