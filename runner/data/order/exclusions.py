"""Samples to leave out: sets of them, and what a run records.

A range of *positions* names the samples that stand there in the order that the user looked at. What stands at
consecutive positions is a range of consecutive keys of each source, so it is recorded as such, and left out wherever
it would come: the sources' next samples move up, and neither the interleaving nor the segments move.

There may be 100,000 ranges, so they are kept in columns, and in states and records as packed texts. Does not import
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.data.order.exclusion_texts import POSITIONS, Selection, parse_selections
from runner.data.order.packed import pack_columns, unpack_columns
from runner.data.order.ranges import NarrowRanges, Ranges, narrow, rest_of
from runner.data.order.state_checks import LARGEST
from runner.data.order.weights import SamplerError
from runner.errors import nearest

I64 = NDArray[np.int64]
Flags = NDArray[np.bool_]
Parts = tuple[str, I64, I64]

_NEVER = -1  # in the column `until`
_SHOWN = 10  # in a message
_NONE: NDArray[Any] = np.zeros(0, np.int8)
_ROWS = ("source", "at", "until", "planned", "first", "more")
_KEYS = ("row", "source", "first", "size")


class Selections:
    """Sets of samples of sources, and of positions: equal if and only if the samples are.

    Args:
        parts: by source, or "positions".
    """

    def __init__(self, parts: Mapping[str, Ranges]) -> None:
        kept = {source: parts[source] for source in sorted(parts) if len(parts[source])}
        self._narrow = {source: NarrowRanges(part) for source, part in kept.items()}

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Selections:
        """What a user writes.

        Raises:
            SamplerError: it is not a list, or one of them has none of the forms of `Selection.parse`.
        """
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise SamplerError(
                f"exclude {texts!r}: it must be a list of texts such as 'code:10-20' or 'positions:500-599'"
            )
        texts = list(texts)
        return cls(parse_selections(texts if set(map(type, texts)) <= {str} else list(map(str, texts))))

    @property
    def parts(self) -> dict[str, Ranges]:
        """By source, or "positions", sorted."""
        return {source: part.widened() for source, part in self._narrow.items()}

    def __len__(self) -> int:
        return sum(map(len, self._narrow.values()))

    def __iter__(self) -> Iterator[Selection]:
        return (Selection(source, *bounds) for source, part in self.parts.items() for bounds in part)

    def __eq__(self, other: object) -> bool:
        return self.parts == other.parts if isinstance(other, Selections) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.parts.items()))

    def __str__(self) -> str:
        return listed(self, len(self))

    def without(self, other: Selections) -> Selections:
        """The samples of these that are not in `other`."""
        return Selections({name: part.without(other.parts.get(name, Ranges())) for name, part in self.parts.items()})

    @cached_property
    def _packed(self) -> dict[str, str]:
        return {name: pack_columns([part.first, part.last - part.first]) for name, part in self.parts.items()}

    def to_json(self) -> dict[str, str]:
        """By source, its ranges as a packed text."""
        return dict(self._packed)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Selections:
        """The inverse of `to_json`.

        Raises:
            ValueError: it is not what `to_json` gives.
        """
        parts = {}
        for name, packed in value.items():
            first, length = unpack_columns(packed, 2)
            _check_bounds(first, length)
            parts[str(name)] = Ranges.of(first, first + length)
        return cls(parts)


def listed(selections: Iterable[Selection], count: int) -> str:
    """The first of them, for a message, and how many there are."""
    texts = ", ".join(map(str, islice(selections, _SHOWN))) or "nothing"
    return texts if count <= _SHOWN else f"{texts} and {count - _SHOWN} more"


@dataclass(frozen=True)
class Exclusion:
    """From position `at` on, until position `until`, these samples are left out.

    Attributes:
        at: position at which the exclusion was made.
        what: the samples.
        keys: of an exclusion by position, by source: the first key of what stood there, and one past the last. Only
            these occurrences are left out; later epochs have the samples again.
        until: position at which the exclusion was withdrawn; what is left of it returns from there on.
        planned: whether the configuration excludes them, and may withdraw that; False: a call during the run did.
    """

    at: int
    what: Selection
    keys: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    until: int | None = None
    planned: bool = True


class Exclusions(Sequence[Exclusion]):
    """What a run has excluded, in columns with a number for each exclusion.

    Args:
        names: the sources; numbers of sources are indices into them.
        rows: columns `source`, `at`, `until` (-1: not withdrawn), `planned`, `first`, and `more`: how many follow that.
        keys: of the exclusions by position, one entry for each source: columns `row`, `source`, `first` and `size`.
    """

    def __init__(
        self, names: Sequence[str] = (), rows: Mapping[str, I64] | None = None, keys: Mapping[str, I64] | None = None
    ) -> None:
        self.names = tuple(names)
        self._rows: dict[str, NDArray[Any]] = {name: narrow(rows[name]) if rows else _NONE for name in _ROWS}
        self._keys: dict[str, NDArray[Any]] = {name: narrow(keys[name]) if keys else _NONE for name in _KEYS}

    @classmethod
    def make(
        cls,
        selections: Iterable[Parts],
        at: int,
        planned: bool,
        key_ranges: Callable[[I64, I64], Mapping[str, tuple[I64, I64, I64]]],
    ) -> Exclusions:
        """What a run records when these samples are excluded from position `at` on.

        Args:
            selections: sources, or "positions", with the first and last of their ranges. Positions before `at` have no
                effect.
            at: the position.
            planned: see `Exclusion`.
            key_ranges: first and last positions -> by source, the numbers of the ranges that have samples of it, the
                first keys of them there, and one past the last.

        Raises:
            SamplerError: the positions are too large.
        """
        made = cls()
        for source, starts, stops in selections:
            first, last = starts, stops
            keys: dict[str, tuple[I64, I64, I64]] = {}
            if source == POSITIONS:
                ahead = stops >= at
                first, last = np.maximum(starts, at)[ahead], stops[ahead]
                keys = dict(key_ranges(first, last))
            names = (source, *keys)
            rows = {"first": first, "more": last - first, "source": np.zeros_like(first), "at": np.full_like(first, at)}
            rows |= {"until": np.full_like(first, _NEVER), "planned": np.full_like(first, planned)}
            row, begin, stop = (
                np.concatenate([each[i] for each in keys.values()] or [np.zeros(0, np.int64)]) for i in range(3)
            )
            entries = {"row": row, "first": begin, "size": stop - begin}
            entries["source"] = np.repeat(np.arange(1, len(names)), [len(each[0]) for each in keys.values()])
            made = made.joined(cls(names, rows, entries))
        return made

    def joined(self, other: Exclusions) -> Exclusions:
        """These, and the others after them."""
        if not len(self) or not len(other):
            return other if len(other) else self
        names = [*self.names, *(name for name in other.names if name not in self.names)]
        place = {name: i for i, name in enumerate(names)}
        code = np.array([place[name] for name in other.names])
        theirs_rows = {**other._rows, "source": code[other._rows["source"]]}
        theirs_keys = {**other._keys, "source": code[other._keys["source"]]} if len(other._keys["row"]) else other._keys
        theirs_keys = {**theirs_keys, "row": theirs_keys["row"] + np.int64(len(self))}
        return Exclusions(
            names,
            {name: np.concatenate([self._rows[name], theirs_rows[name]]) for name in _ROWS},
            {name: np.concatenate([self._keys[name], theirs_keys[name]]) for name in _KEYS},
        )

    def select(self, chosen: Flags) -> Exclusions:
        """The chosen ones."""
        if chosen.all():
            return self
        of_key = chosen[self._keys["row"]]
        keys = {name: column[of_key] for name, column in self._keys.items()}
        keys["row"] = (np.cumsum(chosen) - 1)[keys["row"]]
        return Exclusions(self.names, {name: column[chosen] for name, column in self._rows.items()}, keys)

    def _ended(self, chosen: Flags, position: int) -> Exclusions:
        """The same, but the chosen ones are withdrawn at a position."""
        until = np.where(chosen, np.int64(position), self._rows["until"])
        return Exclusions(self.names, {**self._rows, "until": until}, self._keys)

    # --- what a run asks ---------------------------------------------------------------------------------------------

    def changes(self) -> list[int]:
        """The positions at which exclusions are made or withdrawn, sorted."""
        until = self._rows["until"]
        return [int(at) for at in np.unique(np.concatenate([self._rows["at"], until[until != _NEVER]]))]

    def sources(self) -> set[str]:
        """The sources whose samples are left out."""
        return self._named(self._rows["source"], self._keys["source"])

    def changed_at(self, position: int) -> list[str]:
        """The sources of the exclusions that are made or withdrawn at a position, sorted."""
        rows = (self._rows["at"] == position) | (self._rows["until"] == position)
        keys = slice(None) if rows.all() else rows[self._keys["row"]]
        return sorted(self._named(self._rows["source"][rows], self._keys["source"][keys]))

    def _named(self, *codes: NDArray[Any]) -> set[str]:
        """The sources with these numbers."""
        counts = sum(np.bincount(each, minlength=len(self.names)) for each in codes)
        return {self.names[code] for code in np.flatnonzero(counts).tolist()} - {POSITIONS}

    def left_out(self, source: str, position: int) -> tuple[Ranges, Ranges]:
        """The samples and the keys of a source that are left out at a position."""
        if source not in self.names:
            return Ranges(), Ranges()
        code = self.names.index(source)
        until = self._rows["until"]
        in_force = (self._rows["at"] <= position) & ((until == _NEVER) | (until > position))
        rows = in_force & (self._rows["source"] == code)
        keys = self._keys["source"] == code
        keys &= True if in_force.all() else in_force[self._keys["row"]]
        first = self._keys["first"][keys].astype(np.int64)
        return Ranges.of(*self._bounds(rows)), Ranges.of(first, first + self._keys["size"][keys] - 1)

    def _bounds(self, rows: Flags) -> tuple[I64, I64]:
        """The first samples or positions of these rows, and the last ones."""
        first = self._rows["first"][rows].astype(np.int64)
        return first, first + self._rows["more"][rows]

    def places(self) -> I64:
        """The positions at which exclusions are made, and the first samples or positions of each."""
        return np.concatenate([self._rows["at"], self._rows["first"]]).astype(np.int64)

    def selections(self) -> Iterator[Selection]:
        """What each one leaves out."""
        rows = zip(*(self._rows[name].tolist() for name in ("source", "first", "more")), strict=True)
        return (Selection(self.names[source], first, first + more) for source, first, more in rows)

    def samples_in_force(self) -> Selections:
        """The samples, not positions, that have not returned."""
        held = self._rows["until"] == _NEVER
        parts = {}
        for code in np.unique(self._rows["source"][held]).tolist():
            if self.names[code] != POSITIONS:
                rows = held & (self._rows["source"] == code)
                parts[self.names[code]] = Ranges.of(*self._bounds(rows))
        return Selections(parts)

    def withdrawn(self, removed: Selections, position: int) -> tuple[Exclusions, list[Parts], list[Parts]]:
        """Withdraw from a position on what the configuration no longer excludes.

        Returns:
            The exclusions without those that are withdrawn even in part, or up to there; and what is left of these, to
            be excluded from there on, as `make` takes it: samples, and positions.
        """
        touched = np.zeros(len(self), bool)
        rest: tuple[list[Parts], list[Parts]] = [], []
        for source, part in removed.parts.items():
            if source not in self.names:
                continue
            rows = (self._rows["source"] == self.names.index(source)) & (self._rows["until"] == _NEVER)
            rows &= self._rows["planned"] == 1
            first, last = self._bounds(rows)
            is_touched = part.touches(first, last)
            touched[np.flatnonzero(rows)[is_touched]] = True
            rest[source == POSITIONS].append((source, *rest_of(first[is_touched], last[is_touched], part)[:2]))
        started = self._rows["at"] < position
        return self._ended(touched & started, position).select(~touched | started), *rest

    # --- as a sequence -----------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._rows["source"])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        row = {name: int(column[index]) for name, column in self._rows.items()}
        keys = np.flatnonzero(self._keys["row"] == index % len(self))
        entries = zip(*(self._keys[name][keys].tolist() for name in ("source", "first", "size")), strict=True)
        return Exclusion(
            row["at"],
            Selection(self.names[row["source"]], row["first"], row["first"] + row["more"]),
            {self.names[source]: (first, first + size) for source, first, size in entries},
            None if row["until"] == _NEVER else row["until"],
            bool(row["planned"]),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Exclusions):
            return NotImplemented
        if self is other or len(self) != len(other) or not len(self):
            return len(self) == len(other)
        if len(self._keys["row"]) != len(other._keys["row"]):
            return False
        return all(map(np.array_equal, self._comparable(), other._comparable()))

    __hash__ = None  # type: ignore[assignment]

    def _comparable(self) -> list[NDArray[Any]]:
        """The columns, with sources numbered in the order of their names, and keys in that of rows and sources."""
        order = sorted(self.names)
        place = {name: i for i, name in enumerate(order)}
        rank = np.array([place[name] for name in self.names] or [0])
        used = np.unique(rank[np.concatenate([self._rows["source"], self._keys["source"]])])
        rows, keys = (
            {**each, "source": np.searchsorted(used, rank[each["source"]])} for each in (self._rows, self._keys)
        )
        by_row = np.lexsort((keys["source"], keys["row"]))
        names = np.array([order[i] for i in used.tolist()])
        return [names, *rows.values(), *(column[by_row] for column in keys.values())]

    # --- as JSON -----------------------------------------------------------------------------------------------------

    @cached_property
    def _packed(self) -> dict[str, Any]:
        packed = {
            name: pack_columns(list(each.values())) for name, each in (("rows", self._rows), ("keys", self._keys))
        }
        return {"count": len(self), "sources": list(self.names), **packed}

    def to_json(self) -> dict[str, Any]:
        """How many there are, the names of the sources, and the columns as packed texts."""
        return dict(self._packed)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Exclusions:
        """The inverse of `to_json`.

        Raises:
            ValueError: it is not what `to_json` gives.
        """
        if value == _NO_EXCLUSIONS:
            return cls()
        names = [str(name) for name in value["sources"]]
        rows = dict(zip(_ROWS, unpack_columns(value["rows"], len(_ROWS)), strict=True))
        keys = dict(zip(_KEYS, unpack_columns(value["keys"], len(_KEYS)), strict=True))
        _check_bounds(rows["first"], rows["more"])
        _check_bounds(keys["first"], keys["size"])
        limits = {
            "source": (0, len(names) - 1),
            "at": (0, LARGEST),
            "until": (_NEVER, LARGEST),
            "planned": (0, 1),
            "row": (0, len(rows["at"]) - 1),
        }
        for name, column in (*rows.items(), *keys.items()):
            lowest, highest = limits.get(name, (0, LARGEST))
            if len(column) and not lowest <= int(column.min()) <= int(column.max()) <= highest:
                raise ValueError(f"{name} of an exclusion is not from {lowest} to {highest}")
        if value["count"] != len(rows["at"]) or len(set(names)) < len(names):
            raise ValueError(f"{value['count']} exclusions of {len(names)} sources")
        return cls(names, rows, keys)


def _check_bounds(first: I64, length: I64) -> None:
    """Check what was unpacked.

    Raises:
        ValueError: a range that is none.
    """
    for column in (first, length):
        if len(column) and (column.min() < 0 or column.max() > LARGEST):
            raise ValueError("a range with numbers outside 0 to 2^62")


_NO_EXCLUSIONS = Exclusions().to_json()


def check_selections(selections: Selections, at: int, sizes: Mapping[str, int]) -> None:
    """Check what is to be excluded from position `at` on.

    Raises:
        SamplerError: an unknown source, an index outside it, or positions that are all before `at`.
    """
    for source, part in selections.parts.items():
        if source == POSITIONS:
            if part.last[0] < at:
                one = Selection(source, int(part.first[0]), int(part.last[0]))
                raise SamplerError(f"exclude '{one}': these positions were already consumed (now at {at})")
            continue
        one = Selection(source, int(part.first[-1]), int(part.last[-1]))
        if source not in sizes:
            raise SamplerError(f"exclude '{one}': unknown source{nearest(one.source, sizes)}")
        if one.last >= sizes[source]:
            raise SamplerError(f"exclude '{one}': source {source!r} has indices 0 to {sizes[source] - 1}")
