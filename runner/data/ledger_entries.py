"""What a data order is made from: segments and exclusions. These are what a train state records.

No torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from runner.data.shares import SamplerError, check_temperature, check_weights, integer
from runner.errors import nearest


@dataclass(frozen=True)
class Segment:
    """From position `start` on, these weights hold (until the next segment).

    Attributes:
        start: position, counted over all ranks from the start of the run.
        weights: by source name; a source that is not named has none and is not drawn.
        temperature: shares are w^(1/T) / sum.
        max_epochs: by source name, after how many epochs of it the source is drawn no more.
    """

    start: int
    weights: Mapping[str, float]
    temperature: float = 1.0
    max_epochs: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "start": self.start,
            "weights": dict(sorted(self.weights.items())),
            "temperature": self.temperature,
            "max_epochs": dict(sorted(self.max_epochs.items())),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Segment:
        return cls(int(value["start"]), dict(value["weights"]), value["temperature"], dict(value["max_epochs"]))


@dataclass(frozen=True)
class Exclusion:
    """From position `at` on, these samples are left out.

    Attributes:
        at: position from which it acts.
        source: the source whose samples `first` to `last` (both included) are never drawn again; None:
            the order jumps over the samples that stood at positions `first` to `last`.
    """

    at: int
    source: str | None
    first: int
    last: int

    @property
    def text(self) -> str:
        """As a user writes it: `code:1234`, `code:10-20` or `positions:5000-5999`."""
        span = str(self.first) if self.first == self.last else f"{self.first}-{self.last}"
        return f"{'positions' if self.source is None else self.source}:{span}"

    def to_json(self) -> dict[str, Any]:
        return {"at": self.at, "exclude": self.text}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Exclusion:
        return cls.parse(value["exclude"], int(value["at"]))

    @classmethod
    def parse(cls, text: str, at: int) -> Exclusion:
        """Read `code:1234`, `code:10-20`, `positions:5000-5999` or bare `5000-5999` (both ends included).

        Raises:
            SamplerError: it is none of these.
        """
        name, colon, span = str(text).rpartition(":")
        name = name if colon else "positions"
        first, dash, last = span.partition("-")
        if not (name and first.isdecimal() and (last.isdecimal() if dash else True)):
            raise SamplerError(
                f"exclude {text!r}: expected SOURCE:INDEX, SOURCE:FIRST-LAST or positions:FIRST-LAST, both included"
            )
        bounds = int(first), int(last or first)
        if bounds[0] > bounds[1]:
            raise SamplerError(f"exclude {text!r}: {bounds[0]} comes after {bounds[1]}; write the smaller one first")
        if name == "positions":
            return cls(max(at, bounds[0]), None, *bounds)
        return cls(at, name, *bounds)


def check_sizes(sizes: Mapping[str, Any]) -> dict[str, int]:
    """The sizes as Python integers.

    Raises:
        SamplerError: there is no source, or a size is no integer from 0 to 2^62.
    """
    if not sizes:
        raise SamplerError("no sources: give sizes as a mapping of at least one source name to its number of samples")
    for name, size in sizes.items():
        if isinstance(size, bool) or not hasattr(size, "__index__") or not 0 <= size <= 1 << 62:
            raise SamplerError(f"source {name!r} has size {size!r}: expected an integer between 0 and 2^62")
    return {name: integer("size", size) for name, size in sizes.items()}


def check_segment(segment: Segment, sizes: Mapping[str, int]) -> None:
    """Raise a SamplerError for unknown sources, bad weights, temperatures and caps, and empty sources."""
    for what, names in (("weight", segment.weights), ("max_epochs", segment.max_epochs)):
        for name in names:
            if name not in sizes:
                raise SamplerError(
                    f"{what} for unknown source {name!r}{nearest(name, sizes)}; the sources are {', '.join(sizes)}"
                )
    check_temperature(segment.temperature)
    if not segment.weights:
        raise SamplerError(f"no weights at position {segment.start}: give at least one source a positive weight")
    check_weights(list(segment.weights.values()), segment.weights)
    for name, weight in segment.weights.items():
        if weight > 0 and sizes[name] == 0:
            raise SamplerError(f"source {name!r} has weight {weight:g} but no samples: set its weight to 0")
    for name, cap in segment.max_epochs.items():
        if not (isinstance(cap, int | float) and math.isfinite(cap) and cap >= 0):
            raise SamplerError(f"max_epochs {cap!r} of source {name!r}: expected a finite number of 0 or more")


def as_segment(value: Segment | Mapping[str, Any] | Sequence[Any], base: Segment) -> Segment:
    """A planned segment in any of its spellings; what it leaves out it takes from `base`.

    Args:
        value: a Segment, a mapping with `start` and any of `weights`, `temperature`, `max_epochs`, or a
            tuple (start, weights) or (start, weights, temperature). Sources that `weights` does not
            name keep their base weight.
    """
    if isinstance(value, Segment):
        value = value.to_json()
    elif not isinstance(value, Mapping):
        value = dict(zip(("start", "weights", "temperature"), value, strict=False))
    unknown = set(value) - {"start", "weights", "temperature", "max_epochs"}
    start = value.get("start")
    if unknown or not hasattr(start, "__index__") or integer("start", start) < 0:
        raise SamplerError(
            f"segment {dict(value)!r}: expected start (a position of 0 or more), weights, temperature, max_epochs"
        )
    temperature = value.get("temperature")
    return Segment(
        integer("start", start),
        {**base.weights, **(value.get("weights") or {})},
        base.temperature if temperature is None else temperature,
        {**base.max_epochs, **(value.get("max_epochs") or {})},
    )


def parse_exclusions(texts: Iterable[str | Exclusion], at: int, sizes: Mapping[str, int]) -> tuple[Exclusion, ...]:
    """Exclusions as a user writes them, acting from position `at` on.

    Raises:
        SamplerError: not readable, an unknown source, an index outside it, or positions all before `at`.
    """
    parsed = []
    for text in texts:
        entry = text if isinstance(text, Exclusion) else Exclusion.parse(text, at)
        if entry.source is None and entry.last < at:
            raise SamplerError(f"exclude {entry.text!r}: these positions were consumed already (now at {at})")
        if entry.source is not None and entry.source not in sizes:
            raise SamplerError(f"exclude {entry.text!r}: unknown source{nearest(entry.source, sizes)}")
        if entry.source is not None and entry.last >= sizes[entry.source]:
            raise SamplerError(
                f"exclude {entry.text!r}: source {entry.source!r} has indices 0 to {sizes[entry.source] - 1}"
            )
        parsed.append(entry)
    return tuple(parsed)
