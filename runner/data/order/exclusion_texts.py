"""What a user writes to leave samples out: `code:1234`, `code:10-20`, `positions:5000-5999`. Does not import torch.

100,000 of them are parsed together, in some arrays of their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from runner.data.order.hashing import U64
from runner.data.order.ranges import Ranges
from runner.data.order.state_checks import LARGEST
from runner.data.order.weights import SamplerError

I64 = NDArray[np.int64]
Bytes = NDArray[np.uint8]

POSITIONS = "positions"
_DIGITS = 18  # of numbers that are below 2^62
_CHUNK = 1 << 12  # texts parsed together, so that the working arrays stay in cache
_WORD = 8  # bytes
_BEFORE = 3 * _WORD  # bytes before the text, so that the words of any number are there
_REPEATED = 0x0101010101010101  # one in each byte of a word
_KEPT = np.array([2**64 - (1 << 8 * (_WORD - size)) for size in range(_WORD + 1)], np.uint64)  # of so many bytes


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


def parse_selections(texts: Sequence[str]) -> dict[str, Ranges]:
    """By source, or "positions", what the texts name.

    Raises:
        SamplerError: one of them has none of the forms of `Selection.parse`.
    """
    parts: dict[str, list[tuple[I64, I64]]] = {}
    for start in range(0, len(texts), _CHUNK):
        found = _parsed_together(texts[start : start + _CHUNK])
        if found is None:
            return _parsed_one_by_one(texts)
        for name, bounds in found.items():
            parts.setdefault(name, []).append(bounds)
    return {name: Ranges.of(*map(np.concatenate, zip(*bounds, strict=True))) for name, bounds in parts.items()}


def _parsed_one_by_one(texts: Sequence[str]) -> dict[str, Ranges]:
    by_source: dict[str, list[str]] = {}
    for text in texts:
        name, colon, bounds = text.rpartition(":")
        by_source.setdefault(name if colon else POSITIONS, []).append(bounds)
    parts = {}
    for source, each in by_source.items():
        ones = [Selection.parse(f"{source}:{bounds}") for bounds in each]
        for one in ones:
            if one.last > LARGEST:
                raise SamplerError(f"exclude '{one}': numbers must be at most 2^62 ({LARGEST})")
        parts[source] = Ranges.of(np.array([one.first for one in ones]), np.array([one.last for one in ones]))
    return parts


def _parsed_together(texts: Sequence[str]) -> dict[str, tuple[I64, I64]] | None:
    """First and last by source; None if there is anything to be refused, or a number of many digits."""
    data = bytes(_BEFORE - 1) + b"\n" + "\n".join(texts).encode(errors="surrogatepass") + b"\n"
    text = np.frombuffer(data, np.uint8)
    places = np.flatnonzero((text == ord("\n")) | (text == ord(":")) | (text == ord("-")))
    marks = text[places]
    lines = np.flatnonzero(marks == ord("\n"))
    if len(lines) != len(texts) + 1:
        return None
    starts, ends, before = places[lines[:-1]] + 1, places[lines[1:]], lines[1:] - 1
    dashed = marks[before] == ord("-")
    colon = places[before - dashed]  # or the end of the line before
    first = _numbers(text, colon + 1, np.where(dashed, places[before], ends))
    last = _numbers(text, places[before] + 1, ends)
    if first is None or last is None or (first > last).any():
        return None
    if (marks[before - dashed] == ord("-")).any() or (colon == starts).any():
        return None
    named = _named(text, starts, colon)
    return {name: (first[mine], last[mine]) for name, mine in named.items()}


def _named(text: Bytes, starts: I64, ends: I64) -> dict[str, NDArray[np.bool_]]:
    """The names between, and which of them each is; "positions" for one that ends before it starts."""
    sizes = ends - starts
    before = text[starts[0] - 1 : ends[0] + 1].tobytes()  # what separates the texts, with the name
    if (sizes == sizes[0]).all() and text.tobytes().count(before) == len(starts):
        return {before[1:-1].decode(errors="surrogatepass"): np.ones(len(starts), bool)}
    differs = np.append(True, sizes[1:] != sizes[:-1])
    for done in range(0, int(sizes.max()), _WORD):
        words = _words(text, ends - done, sizes - done)
        differs[1:] |= words[1:] != words[:-1]
    begins = np.flatnonzero(differs)
    bounds = zip(starts[begins].tolist(), ends[begins].tolist(), strict=True)
    found = [text[at:end].tobytes().decode(errors="surrogatepass") if end >= at else POSITIONS for at, end in bounds]
    numbers = {name: i for i, name in enumerate(dict.fromkeys(found))}
    named = np.repeat([numbers[name] for name in found], np.diff(begins, append=len(starts)))
    return {name: named == i for name, i in numbers.items()}


def _words(text: Bytes, ends: I64, sizes: I64, zero: int = 0) -> U64:
    """The `sizes` bytes before each end, up to 8, as little-endian integers: the last byte is the highest.

    `zero` is subtracted from each byte, bit by bit; absent bytes are 0.
    """
    words = np.lib.stride_tricks.sliding_window_view(text, _WORD)[ends - _WORD].view("<u8").reshape(-1)
    return (words ^ np.uint64(zero * _REPEATED)) & _KEPT[np.clip(sizes, 0, _WORD)]


def _numbers(text: Bytes, starts: I64, ends: I64) -> I64 | None:
    """The numbers between; None if one is none, or has many digits."""
    sizes, result = ends - starts, np.zeros(len(ends), np.uint64)
    if sizes.min() < 1 or sizes.max() > _DIGITS:
        return None
    for done in range(0, int(sizes.max()), _WORD):
        digits = _words(text, ends - done, sizes - done, ord("0"))
        if ((digits | (digits + np.uint64(6 * _REPEATED))) & np.uint64(0xF0 * _REPEATED)).any():
            return None
        # Pairs of digits, of pairs, and of fours: each multiplication adds neighbours, the left one times 10^n.
        digits = (digits * np.uint64(10 << 8 | 1) >> np.uint64(8)) & np.uint64(0x00FF00FF00FF00FF)
        digits = (digits * np.uint64(100 << 16 | 1) >> np.uint64(16)) & np.uint64(0x0000FFFF0000FFFF)
        digits = digits * np.uint64(10_000 << 32 | 1) >> np.uint64(32)
        result += digits * np.uint64(10**done)
    return result.view(np.int64)
