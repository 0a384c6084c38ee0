"""Many lines of JSON that differ only in their numbers, read a block at a time: several times faster than one by one.

The literal text of every line is compared with that of the first line, and each column of numbers is then parsed as one
JSON list. Whatever is not exactly of that form is left to an ordinary JSON reader.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import orjson

MIN_LINES = 16  # below that the ordinary reader is as fast
MAX_LAYOUTS = 24  # of a block
MAX_MISSES = 4  # layouts of fewer lines, before the other reader takes the rest
MAX_WIDTH = 4096  # of the text between two values
Span = tuple[np.ndarray, np.ndarray]
_TOKEN = re.compile(
    rb'"(?P<key>[^"\\]+)": (?:(?P<open>\{)|(?P<number>-?\d[^,"{}\[\]]*|null)|(?P<text>"[^"\\]*"))|(?P<close>\})|, '
)


@dataclass(frozen=True)
class Value:
    """Where a value is in a line: its name, None for a text; its first and last quotes, and the distances from them."""

    name: str | None
    start: int
    end: int
    quotes: int  # before it


@dataclass(frozen=True)
class Layout:
    """A line as an example of those that differ from it only in their values."""

    line: bytes  # without the end of the line
    quotes: np.ndarray  # their offsets in it
    values: list[Value]

    @staticmethod
    def of(line: bytes) -> Layout | None:
        """The layout of a line; None if it has anything besides numbers, texts and objects of them."""
        values: list[Value] = []
        prefixes, at = [""], 1
        while at < len(line) and prefixes:
            token = _TOKEN.match(line, at)
            if token is None:
                return None
            if token["open"]:
                prefixes.append(f"{prefixes[-1]}{token['key'].decode(errors='replace')}/")
            elif token["close"]:
                prefixes.pop()
            elif token["key"]:
                kind = "number" if token["number"] else "text"
                name = prefixes[-1] + token["key"].decode(errors="replace") if kind == "number" else None
                values.append(Value(name, *token.span(kind), line.count(b'"', 0, token.start(kind))))
            at = token.end()
        names = [value.name for value in values if value.name is not None]
        if prefixes or at != len(line) or not line.startswith(b"{") or len(set(names)) < len(names):
            return None
        if len(line) > MAX_WIDTH:
            return None
        return Layout(line, np.flatnonzero(np.frombuffer(line, np.uint8) == ord('"')), values)

    def spans(self, quotes: np.ndarray, first: np.ndarray, ends: np.ndarray) -> Iterator[Span]:
        """Start and end of each value in several lines.

        Args:
            quotes: the offsets of all quotes.
            first: which of them is the first of each line, of shape (lines,).
            ends: of the lines.
        """
        for value in self.values:
            before = value.quotes - 1
            start = quotes[first + before] + (value.start - int(self.quotes[before]))
            if value.name is None:
                yield start, quotes[first + before + 2] + 1
            elif value.quotes < len(self.quotes):
                yield start, quotes[first + value.quotes] - (int(self.quotes[value.quotes]) - value.end)
            else:
                yield start, ends - (len(self.line) - value.end)


class Block:
    """Whole lines.

    Attributes:
        starts, ends: offsets of the lines, the end of the line excluded, of shape (lines,).
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._bytes = np.frombuffer(data + bytes(MAX_WIDTH), np.uint8)
        self.ends = np.flatnonzero(self._bytes == ord("\n"))
        self.starts = np.concatenate([[0], self.ends[:-1] + 1])
        self._quotes = np.flatnonzero(self._bytes == ord('"'))
        self._first = np.searchsorted(self._quotes, self.starts)  # quote of each line
        self._count = np.searchsorted(self._quotes, self.ends) - self._first

    def columns(self, wanted: Callable[[str], bool]) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray] | None]]:
        """Lines by their indices, with their columns by name; or with None where another reader has to read them."""
        left, odd, misses = np.arange(len(self.starts)), [np.arange(0)], 0
        for _ in range(0 if b"\\" in self.data else MAX_LAYOUTS):
            if len(left) < MIN_LINES or misses == MAX_MISSES:
                break
            layout = Layout.of(self.line(int(left[0])))
            alike, spans = self._alike(layout, left) if layout else (left[:1], [])
            if layout is None or len(alike) < MIN_LINES:
                odd.append(alike)
                misses += 1
            else:
                yield alike, self._read(layout, spans, wanted)
            left = np.setdiff1d(left, alike, assume_unique=True)
        others = np.concatenate([*odd, left])
        if len(others):
            yield others, None

    def line(self, index: int) -> bytes:
        """One line, without its end."""
        return self.data[self.starts[index] : self.ends[index]]

    def _alike(self, layout: Layout, lines: np.ndarray) -> tuple[np.ndarray, list[Span]]:
        """Those of the lines that differ from the layout's only in their values, and where those are."""
        lines = lines[self._count[lines] == len(layout.quotes)]
        ends = self.ends[lines]
        spans = list(layout.spans(self._quotes, self._first[lines], ends))
        same, at, example = np.ones(len(lines), dtype=bool), self.starts[lines], 0
        last = (ends, ends, len(layout.line), len(layout.line))
        for start, end, first, after in [
            *((*span, value.start, value.end) for span, value in zip(spans, layout.values, strict=True)),
            last,
        ]:
            literal = layout.line[example:first]
            same &= (start - at == len(literal)) & (end >= start)
            if literal:
                same &= self._texts(at, len(literal)) == literal
            at, example = end, after
        return lines[same], [(start[same], end[same]) for start, end in spans]

    def _texts(self, at: np.ndarray, width: int) -> np.ndarray:
        """The `width` bytes at each offset; an offset in no line may give any."""
        count = len(self._bytes) - width + 1
        texts: np.ndarray = np.ndarray((count,), dtype=f"S{width}", buffer=self._bytes, strides=(1,))
        return np.asarray(texts[np.clip(at, 0, count - 1)])

    def _read(
        self, layout: Layout, spans: Sequence[Span], wanted: Callable[[str], bool]
    ) -> dict[str, np.ndarray] | None:
        """The numbers at some places by name; None if one of them is no JSON number or null, or the step no integer."""
        chosen = [(value.name, *span) for value, span in zip(layout.values, spans, strict=True) if value.name]
        chosen = [(name, start, end) for name, start, end in chosen if wanted(name)]
        if not chosen:
            return None
        names = [name for name, _, _ in chosen]
        starts = np.stack([start for _, start, _ in chosen], axis=1).ravel()
        after = np.stack([end for _, _, end in chosen], axis=1).ravel() + 1  # with what becomes a comma
        text = self._bytes.copy()
        text[after - 1] = ord(",")
        lengths = after - starts
        before = np.cumsum(lengths) - lengths
        places = np.repeat((starts - before).astype(np.int32), lengths)
        places += np.arange(len(places), dtype=np.int32)
        try:
            numbers = orjson.loads(b"[" + text[places].tobytes()[:-1] + b"]")
        except orjson.JSONDecodeError:
            return None
        count = len(spans[0][0])
        if len(numbers) != count * len(names) or not set(map(type, numbers)) <= {int, float, type(None)}:
            return None
        if "step" in names and set(map(type, numbers[names.index("step") :: len(names)])) != {int}:
            return None
        table = np.array(numbers, dtype=np.float64).reshape(count, len(names))
        return dict(zip(names, np.ascontiguousarray(table.T), strict=True))
