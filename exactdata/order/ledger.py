"""Record which samples were consumed, as a digest, and count them per source.

For each sample, (position, source name, index within the source) is hashed to two 64-bit lanes. The digest is the sum
of the hashes over all samples, modulo 2^64. It does not depend on ranks, batches or workers. Two runs with the same
digest at a step consumed the same samples at the same positions. The digest detects mistakes, not forgery.

This module does not import torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from exactdata.order.arrays import I64, U64
from exactdata.order.hashing import GOLDEN, mix64, stream_key
from exactdata.order.packed import pack_rows, unpack_rows
from exactdata.order.state_checks import (
    LARGEST,
    MapOf,
    Record,
    check,
    check_seal,
    hexadecimal,
    sealed,
    text,
    whole,
)
from exactdata.order.weights import SamplerStateError

LANES = 2
_STATE = Record(
    {
        "digest": hexadecimal(16 * LANES),
        "counts": MapOf(whole()),
        "sizes": MapOf(whole()),
        "anchors": text,
        "seal": text,
    },
    {"tokens": MapOf(whole()), "documents": MapOf(whole())},
)
_MESSAGE = "the saved data ledger is incomplete: {key} is {value}; expected {allowed}; use another checkpoint"
_VERIFIED = 1 << 16  # maximum number of samples that a resume verifies
_ANCHORS = 1 << 8  # maximum number of parts they are verified in, each of complete steps
_SECOND = np.uint64(0xC2B2AE3D27D4EB4F)
_ODD = np.uint64(0x9FB21C651E98DF25)


class DataLedger:
    """A ledger of the samples that a run has consumed.

    Each rank adds its samples with `consume`. Once per step, `local()` is summed over all ranks (modulo 2^64) and every
    rank passes the sum to `commit`.

    Args:
        names: source names, in the order of the dataset.
        sizes: number of samples of each source.
        measures: functions by source name, for sources whose samples have different numbers of tokens. A function takes
            indices within the source, int64 of shape (count,), and returns the tokens and the documents of each sample,
            int64 of shape (count, 2).
    """

    def __init__(
        self, names: Sequence[str], sizes: Sequence[int], measures: Mapping[str, Callable[[I64], I64]] | None = None
    ) -> None:
        self.names, self.sizes = list(names), [int(size) for size in sizes]
        self._ends = np.cumsum(self.sizes)
        self._starts = self._ends - np.array(self.sizes)
        self._name_keys = np.array([_name_key(name) for name in names], np.uint64)
        self._end = end = LANES + len(self.names)  # end of the part that every ledger has, before tokens and documents
        self._measures = {
            self.names.index(name): (measure, slice(end + 2 * place, end + 2 * place + 2))
            for place, (name, measure) in enumerate((measures or {}).items())
        }
        self._local = np.zeros(self._end + 2 * len(self._measures), np.uint64)
        self._lanes = np.zeros(LANES, np.uint64)
        self._counts = dict.fromkeys(self.names, 0)
        self._measured = {name: [0, 0] for name in measures or ()}  # tokens and documents by source name
        self._total = 0
        # Digests of the last steps. Each entry has the first position, the number of samples, and the two lanes.
        self._anchors: deque[list[int]] = deque()

    def consume(self, indices: NDArray[np.integer], positions: NDArray[np.integer]) -> None:
        """Add samples that this rank consumes.

        Args:
            indices: indices into the dataset, shape (count,).
            positions: positions of the samples in the order, shape (count,).
        """
        indices = np.asarray(indices, np.int64)
        source = np.searchsorted(self._ends, indices, side="right")
        within = indices - self._starts[source]
        self._local[:LANES] += _lanes(positions, self._name_keys[source], within)
        counts = np.bincount(source, minlength=len(self.names))
        self._local[LANES : self._end] += counts.astype(np.uint64)
        if self._measures:
            for number in np.flatnonzero(counts).tolist():
                if number in self._measures:
                    measure, part = self._measures[number]
                    self._local[part] += measure(within[source == number]).sum(axis=0).astype(np.uint64)

    def local(self) -> U64:
        """Return the sums that this rank added since the last commit, shape (2 + sources + 2 x measured sources,).

        It contains two digest lanes, the samples per source, and the tokens and documents of each source with a
        measure.
        """
        return self._local.copy()

    def commit(self, vector: U64, since: int = 0) -> None:
        """Add the sum of `local()` over all ranks.

        Args:
            vector: the sum, of the same shape as `local()`.
            since: positions before this one (e.g. in an earlier epoch) cannot be recomputed after a resume. It never
                decreases.
        """
        first = self._total
        self._lanes += vector[:LANES]
        for source in self.sources_in(vector):
            count = int(vector[LANES + source])
            self._counts[self.names[source]] += count
            self._total += count
            if source in self._measures:
                had, more = self._measured[self.names[source]], vector[self._measures[source][1]].tolist()
                self._measured[self.names[source]] = [had[0] + more[0], had[1] + more[1]]
        self._local[:] = 0
        self._anchor(first, self._total - first, vector[:LANES].tolist(), since)

    def sources_in(self, vector: NDArray[Any]) -> list[int]:
        """Return the numbers of the sources with samples in `vector`, a sum of `local()`."""
        return np.flatnonzero(vector[LANES : self._end]).tolist()

    def _anchor(self, first: int, count: int, lanes: list[int], since: int) -> None:
        """Add the digest of a step, and drop digests that a resume would not compare.

        Digests that begin before `since`, or more than 65,536 samples ago, are dropped. Small steps share a digest, to
        keep the number of digests low. No digest covers positions on both sides of `since`.
        """
        last = self._anchors[-1] if self._anchors else [-1, 0]
        if last[0] >= since and last[1] < _VERIFIED // _ANCHORS:
            last[1] += count
            last[2:] = [(lane + more) % 2**64 for lane, more in zip(last[2:], lanes, strict=True)]
        else:
            self._anchors.append([first, count, *lanes])
        oldest = max(since, first + count - _VERIFIED)
        while len(self._anchors) > 1 and self._anchors[0][0] < oldest:
            self._anchors.popleft()

    def count(self, source: int) -> int:
        """Return the number of samples consumed from source number `source`."""
        return self._counts[self.names[source]]

    def measured(self, source: int) -> dict[str, int]:
        """Return the tokens and documents consumed from source number `source`, or {} if it has no measure.

        Does not include samples before a checkpoint that did not count tokens and documents.
        """
        if source not in self._measures:
            return {}
        return dict(zip(("tokens", "documents"), self._measured[self.names[source]], strict=True))

    @property
    def total(self) -> int:
        """Return the number of samples consumed by all ranks."""
        return self._total

    @property
    def counts(self) -> dict[str, int]:
        """Return the number of samples consumed from each source, including sources that were removed since."""
        return dict(self._counts)

    @property
    def digest(self) -> str:
        """Return the digest as 32 hexadecimal digits."""
        return "".join(f"{lane:016x}" for lane in self._lanes.tolist())

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-serializable state: digest, counts, sizes, digests of the last steps, and a seal.

        The digests of the last steps cover up to 65,536 samples and take up to 11 KB. The state also has `tokens` and
        `documents` by source if any source has, or had, a measure.
        """
        state: dict[str, Any] = {
            "digest": self.digest,
            "counts": self.counts,
            "sizes": dict(zip(self.names, self.sizes, strict=True)),
            "anchors": pack_rows(self._anchors),
        }
        if self._measured:
            state["tokens"] = {name: tokens for name, (tokens, _) in self._measured.items()}
            state["documents"] = {name: documents for name, (_, documents) in self._measured.items()}
        return sealed(state, "seal")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved ledger.

        Raises:
            SamplerStateError: the size of a source has changed, or the state is truncated or edited.
        """
        check(state, _STATE, _MESSAGE, SamplerStateError)
        lanes = [int(state["digest"][i : i + 16], 16) for i in range(0, 16 * LANES, 16)]
        counts, sizes = dict(state["counts"]), dict(state["sizes"])
        anchors = _unpacked(state["anchors"])
        for name, size in zip(self.names, self.sizes, strict=True):
            if sizes.get(name, size) != size:
                raise SamplerStateError(
                    f"source {name!r} had {sizes[name]} samples when the ledger was saved and has {size} now: "
                    "restore the source"
                )
        total = sum(counts.values())
        end = sum(anchors[-1][:2]) if anchors else total
        if end != total:
            raise SamplerStateError(
                f"the saved data ledger counts {total} samples but its last step ends at position {end}: it "
                "was edited; use another checkpoint"
            )
        check_seal(state, "the saved data ledger", SamplerStateError, "seal")
        self._lanes = np.array(lanes, np.uint64)
        self._counts = {**dict.fromkeys(self.names, 0), **counts}
        tokens, documents = state.get("tokens", {}), state.get("documents", {})
        names = dict.fromkeys([*(self.names[number] for number in self._measures), *tokens, *documents])
        self._measured = {name: [tokens.get(name, 0), documents.get(name, 0)] for name in names}
        self._total = total
        self._local[:] = 0
        self._anchors = anchors

    def verify(self, locate: Callable[[I64], tuple[Any, ...]], since: int = 0) -> int:
        """Recompute the samples of the last steps, and compare them with the saved digests.

        Args:
            locate: maps positions to (source names, indices within the sources, ...), like `ElasticSampler.locate`.
            since: digests that begin before this position are not compared, because `locate` does not cover them.

        Returns:
            The number of samples compared, at most 65,536 unless a single step is larger.

        Raises:
            SamplerStateError: the data order differs from the consumed samples. The message states the positions and
                both digests.
        """
        known = [row for row in self._anchors if row[0] >= since]
        for first, count, *saved in known:
            names, index = locate(np.arange(first, first + count, dtype=np.int64))[:2]
            distinct, which = np.unique(names, return_inverse=True)
            keys = np.array([_name_key(str(name)) for name in distinct.tolist()], np.uint64)
            found = _lanes(np.arange(first, first + count), keys[which], index).tolist()
            if found != saved:
                raise SamplerStateError(
                    f"positions {first} to {first + count - 1}: the run consumed samples with digest "
                    f"{saved[0]:016x}, the current data order gives {found[0]:016x}: "
                    "use the program version and settings of that run, or use another checkpoint"
                )
        return sum(count for _, count, *_ in known)


def _unpacked(text: str) -> deque[list[int]]:
    """Unpack the step digests in a saved state.

    Raises:
        SamplerStateError: `pack_rows` did not write `text`, or the ranges of positions are not consecutive.
    """
    try:
        rows = unpack_rows(text, 2 + LANES, most=_ANCHORS + 1)
    except ValueError as error:
        raise SamplerStateError(_MESSAGE.format(key="anchors", value=error, allowed="packed digests")) from None
    ends = rows[:, 0] + rows[:, 1]
    if (rows[:, :2] > LARGEST).any() or (ends[:-1] != rows[1:, 0]).any():
        raise SamplerStateError(_MESSAGE.format(key="anchors", value="edited", allowed="consecutive positions"))
    return deque(rows.tolist())


def _name_key(name: str) -> int:
    return stream_key("ledger", name)


def _lanes(positions: NDArray[np.integer], name_keys: U64, indices: NDArray[np.integer]) -> U64:
    """Compute the two lanes of the digest over these samples."""
    mixed = mix64(np.asarray(positions).astype(np.uint64) * np.uint64(GOLDEN) + name_keys)
    mixed ^= np.asarray(indices).astype(np.uint64) * _ODD
    mixed = mix64(mixed)
    return np.array([mixed.sum(dtype=np.uint64), mix64(mixed + _SECOND).sum(dtype=np.uint64)], np.uint64)
