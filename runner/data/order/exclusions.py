"""Samples to leave out: what a user writes, sets of it, and what a run records.

A range of *positions* names the samples that stand there in the order that the user looked at. What stands at
consecutive positions is a range of consecutive keys of each source, so it is recorded as such, and left out wherever
it would come: the sources' next samples move up, and neither the interleaving nor the segments move. Does not import
torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

from runner.data.order.weights import SamplerError
from runner.errors import nearest

POSITIONS = "positions"


class Selection(NamedTuple):
    """The samples `first` to `last`, inclusive, of a source, or, if `source` is "positions", those at positions."""

    source: str
    first: int
    last: int

    def __str__(self) -> str:
        """As a user writes it: `code:1234`, `code:10-20` or `positions:5000-5999`."""
        return f"{self.source}:{self.first}" + ("" if self.first == self.last else f"-{self.last}")

    @classmethod
    def parse(cls, text: str) -> Selection:
        """Parse `code:1234`, `code:10-20`, `positions:5000-5999` or `5000-5999`; both ends are inclusive.

        Raises:
            SamplerError: the text has none of these forms.
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
        return cls(name, first, last)


def parsed(texts: Iterable[str]) -> tuple[Selection, ...]:
    """What a user writes, normalized.

    Raises:
        SamplerError: it is not a list, or one of them has none of the forms of `Selection.parse`.
    """
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise SamplerError(f"exclude {texts!r}: it must be a list of texts such as 'code:10-20' or 'positions:500-599'")
    return normalized(Selection.parse(str(text)) for text in texts)


def normalized(selections: Iterable[Selection]) -> tuple[Selection, ...]:
    """The same samples as sorted, disjoint selections that do not touch: equal if and only if the samples are."""
    merged: list[Selection] = []
    for one in sorted(selections):
        if merged and merged[-1].source == one.source and one.first <= merged[-1].last + 1:
            merged[-1] = merged[-1]._replace(last=max(merged[-1].last, one.last))
        else:
            merged.append(one)
    return tuple(merged)


def without(selections: Iterable[Selection], removed: Iterable[Selection]) -> tuple[Selection, ...]:
    """The samples of `selections` that are not in `removed`, normalized."""
    left = []
    by_source = {source: list(group) for source, group in groupby(normalized(removed), key=lambda one: one.source)}
    for one in normalized(selections):
        first = one.first
        for gap in by_source.get(one.source, []):
            if first <= gap.last and gap.first <= one.last:
                if first < gap.first:
                    left.append(one._replace(first=first, last=gap.first - 1))
                first = gap.last + 1
        if first <= one.last:
            left.append(one._replace(first=first))
    return tuple(left)


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

    def is_in_force(self, position: int) -> bool:
        return self.at <= position and (self.until is None or position < self.until)

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources whose samples are left out."""
        return tuple(self.keys) if self.what.source == POSITIONS else (self.what.source,)

    def to_json(self) -> dict[str, Any]:
        keys = {name: list(bounds) for name, bounds in self.keys.items()}
        times = {"at": self.at, "until": self.until}
        return {**times, "exclude": str(self.what), "keys": keys, "planned": self.planned}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Exclusion:
        keys = {str(name): (int(first), int(stop)) for name, (first, stop) in value["keys"].items()}
        until = None if value["until"] is None else int(value["until"])
        return cls(int(value["at"]), Selection.parse(value["exclude"]), keys, until, bool(value["planned"]))


def check_selections(selections: Iterable[Selection], at: int, sizes: Mapping[str, int]) -> None:
    """Check what is to be excluded from position `at` on.

    Raises:
        SamplerError: an unknown source, an index outside it, or positions that are all before `at`.
    """
    for one in selections:
        if one.source == POSITIONS:
            if one.last < at:
                raise SamplerError(f"exclude '{one}': these positions were already consumed (now at {at})")
        elif one.source not in sizes:
            raise SamplerError(f"exclude '{one}': unknown source{nearest(one.source, sizes)}")
        elif one.last >= sizes[one.source]:
            raise SamplerError(f"exclude '{one}': source {one.source!r} has indices 0 to {sizes[one.source] - 1}")
