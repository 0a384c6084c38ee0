"""What a user writes to leave samples out: `code:1234`, `code:10-20`, `positions:5000-5999`. Does not import torch."""

from __future__ import annotations

from typing import NamedTuple

from runner.data.order.state_checks import LARGEST
from runner.data.order.weights import SamplerError

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
        if last > LARGEST:
            raise SamplerError(f"exclude {text!r}: numbers must be at most 2^62 ({LARGEST})")
        return cls(name, first, last)
