"""Parse and record samples to exclude, e.g. `code:1234` or `positions:5000-5999`.

A range of *positions* means the samples at these positions in the current order. In each source, these samples have
consecutive keys, which are recorded and skipped. Later samples of the source move up to fill the gap. The interleaving
of the sources and the segments do not change. This module does not import torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from exactdata.errors import nearest
from exactdata.order.arrays import I64
from exactdata.order.ranges import Ranges
from exactdata.order.state_checks import LARGEST
from exactdata.order.weights import SamplerError

KeyBounds = Mapping[str, tuple[int, int]]
KeyRanges = Callable[[I64, I64], Sequence[KeyBounds]]

POSITIONS = "positions"
_MOST_LISTED = 10  # maximum selections listed in a message


class Selection(NamedTuple):
    """The samples `first` to `last`, both included, of a source, or at positions if `source` is "positions"."""

    source: str
    first: int
    last: int

    def __str__(self) -> str:
        """Format the selection as a user writes it, e.g. `code:1234`, `code:10-20` or `positions:5000-5999`."""
        return f"{self.source}:{self.first}" + ("" if self.first == self.last else f"-{self.last}")

    @classmethod
    def parse(cls, text: str) -> Selection:
        """Parse `code:1234`, `code:10-20`, `positions:5000-5999` or `5000-5999`. Both ends are included.

        Raises:
            SamplerError: `text` has none of these forms.
        """
        name, colon, bounds = text.rpartition(":")
        name = name if colon else POSITIONS
        start, dash, end = bounds.partition("-")
        if not (name and start.isdecimal() and (end.isdecimal() if dash else True)):
            raise SamplerError(
                f"exclude {text!r}: expected SOURCE:INDEX, SOURCE:FIRST-LAST or positions:FIRST-LAST (inclusive)"
            )
        first, last = int(start), int(end or start)
        if first > last:
            raise SamplerError(f"exclude {text!r}: {first} comes after {last}; write the smaller one first")
        if last > LARGEST:
            raise SamplerError(f"exclude {text!r}: numbers must be at most 2^62 ({LARGEST})")
        return cls(name, first, last)


@dataclass(frozen=True)
class Selections:
    """A set of samples by source, and a set of positions. Two Selections are equal if and only if these sets are.

    Attributes:
        parts: non-empty sorted ranges by source name or "positions".
    """

    parts: Mapping[str, Ranges]

    @classmethod
    def parse(cls, texts: Iterable[str]) -> Selections:
        """Parse a user's list of selections.

        Raises:
            SamplerError: the value is not a list, or `Selection.parse` rejects an item.
        """
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise SamplerError(
                f"exclude {texts!r}: it must be a list of texts such as 'code:10-20' or 'positions:500-599'"
            )
        return cls.of(Selection.parse(str(text)) for text in texts)

    @classmethod
    def of(cls, selections: Iterable[Selection]) -> Selections:
        """Merge selections in any order. They may overlap."""
        by_source: dict[str, list[tuple[int, int]]] = {}
        for source, first, last in selections:
            by_source.setdefault(source, []).append((first, last))
        return cls({source: Ranges.of(by_source[source]) for source in sorted(by_source)})

    def __len__(self) -> int:
        return sum(map(len, self.parts.values()))

    def __iter__(self) -> Iterator[Selection]:
        return (Selection(source, *bounds) for source, part in self.parts.items() for bounds in part)

    def __str__(self) -> str:
        return listed(list(self))

    def without(self, other: Selections) -> Selections:
        """Return the samples that are not in `other`."""
        rest = {name: part.without(other.parts.get(name, Ranges())) for name, part in self.parts.items()}
        return Selections({name: part for name, part in rest.items() if len(part)})

    def to_json(self) -> list[str]:
        """Return a list of strings that `parse` accepts."""
        return list(map(str, self))


def listed(selections: Sequence[Selection]) -> str:
    """Format the first selections for a message, with the number of remaining selections."""
    texts = ", ".join(map(str, selections[:_MOST_LISTED])) or "nothing"
    return texts if len(selections) <= _MOST_LISTED else f"{texts} and {len(selections) - _MOST_LISTED} more"


class Exclusion(NamedTuple):
    """Samples that are excluded from position `at` until position `until`.

    Attributes:
        at: position at which the exclusion was made.
        what: the excluded samples or positions.
        keys: for an exclusion by position, the first excluded key and one past the last, by source name. Only these
            occurrences are excluded, and the samples are drawn again in later epochs.
        until: position at which the exclusion was withdrawn. From there on, the samples are drawn again.
        planned: whether the exclusion was an argument of the sampler, which may withdraw it. If False, it was made by a
            call during the run.
    """

    at: int
    what: Selection
    keys: KeyBounds = {}  # noqa: RUF012  nobody changes it
    until: int | None = None
    planned: bool = True

    def to_json(self) -> dict[str, Any]:
        keys = {name: list(bounds) for name, bounds in self.keys.items()}
        return {"at": self.at, "what": str(self.what), "keys": keys, "until": self.until, "planned": self.planned}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Exclusion:
        """Parse the result of `to_json`.

        Raises:
            ValueError: the value is invalid.
        """
        at, until, planned = value["at"], value["until"], value["planned"]
        keys = {str(name): (first, stop) for name, (first, stop) in value["keys"].items()}
        numbers = [at, at if until is None else until, *(number for bounds in keys.values() for number in bounds)]
        if not all(type(number) is int and 0 <= number <= LARGEST for number in numbers):
            raise ValueError(f"an exclusion with a number that is not from 0 to 2^62: {value!r:.80}")
        if type(planned) is not bool or any(first >= stop for first, stop in keys.values()):
            raise ValueError(f"an exclusion that is none: {value!r:.80}")
        return cls(at, Selection.parse(value["what"]), keys, until, planned)


Exclusions = tuple[Exclusion, ...]


def excluded_from(selections: Iterable[Selection], at: int, key_ranges: KeyRanges, planned: bool = True) -> Exclusions:
    """Return the exclusions to record when these samples are excluded from position `at` on.

    Args:
        selections: samples or positions to exclude. Positions before `at` have no effect.
        at: position from which the exclusions apply.
        key_ranges: `ElasticSequence.key_ranges` of the order before this change.
        planned: see `Exclusion`.

    Raises:
        SamplerError: the positions are too large.
    """
    made, places = [], []
    for one in selections:
        if one.source != POSITIONS:
            made.append(Exclusion(at, one, planned=planned))
        elif one.last >= at:
            places.append(one if one.first >= at else one._replace(first=at))
    if places:
        bounds = np.array([(one.first, one.last) for one in places], np.int64)
        keys = key_ranges(bounds[:, 0], bounds[:, 1])
        made += [Exclusion(at, one, each, planned=planned) for one, each in zip(places, keys, strict=True)]
    return tuple(made)


def samples_in_force(exclusions: Exclusions) -> Selections:
    """Return the samples that are currently excluded, other than by position."""
    return Selections.of(one.what for one in exclusions if one.until is None and one.what.source != POSITIONS)


def withdrawn(
    exclusions: Exclusions, removed: Selections, position: int
) -> tuple[Exclusions, list[Selection], list[Selection]]:
    """Withdraw `removed` samples from the exclusions, from a position on.

    Returns:
        The new exclusions, then a list of selections of samples, and a list of selections of positions. An exclusion
        withdrawn in whole or in part ends at `position`, or is dropped if it began there. The lists contain the parts
        of such exclusions that were not withdrawn, to be excluded again from `position` on.
    """
    kept: list[Exclusion] = []
    samples: list[Selection] = []
    positions: list[Selection] = []
    for one in exclusions:
        source, first, last = one.what
        part = removed.parts.get(source, Ranges())
        rest = Ranges.of([(first, last)])
        if one.planned and one.until is None and len(part):
            rest = rest.without(part)
        if rest.total == last - first + 1:
            kept.append(one)
            continue
        (positions if source == POSITIONS else samples).extend(Selection(source, *bounds) for bounds in rest)
        if one.at < position:
            kept.append(one._replace(until=position))
    return tuple(kept), samples, positions


class LeftOut:
    """Look up the excluded samples and keys of each source at any position.

    Attributes:
        changes: by position, the sources whose exclusions begin or end there.
    """

    def __init__(self, exclusions: Exclusions) -> None:
        # By source: tuples (position where the exclusion begins, position where it ends, first, last).
        self._samples: dict[str, list[tuple[int, int, int, int]]] = defaultdict(list)
        self._keys: dict[str, list[tuple[int, int, int, int]]] = defaultdict(list)
        self.changes: dict[int, set[str]] = defaultdict(set)
        for at, what, keys, until, _ in exclusions:
            end = LARGEST if until is None else until
            for name, (first, stop) in keys.items():
                self._keys[name].append((at, end, first, stop - 1))
            if what.source != POSITIONS:
                self._samples[what.source].append((at, end, what.first, what.last))
            names = keys if what.source == POSITIONS else (what.source,)
            self.changes[at].update(names)
            if until is not None:
                self.changes[until].update(names)

    def at(self, source: str, position: int) -> tuple[Ranges, Ranges]:
        """Return the samples and the keys of a source that are excluded at a position."""
        samples, keys = (
            Ranges.of([(first, last) for at, end, first, last in each.get(source, ()) if at <= position < end])
            for each in (self._samples, self._keys)
        )
        return samples, keys


def check_selections(selections: Selections, at: int, sizes: Mapping[str, int]) -> None:
    """Check samples to exclude from position `at` on.

    Raises:
        SamplerError: a source is unknown, an index is outside its source, or all positions are before `at`.
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
