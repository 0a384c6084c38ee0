"""Rows of integers as one short text, loadable from JSON and from a train state alike. Does not import torch."""

from __future__ import annotations

import base64
import struct
from collections.abc import Iterable
from itertools import chain

import numpy as np

from runner.data.order.arrays import U64


def pack_rows(rows: Iterable[Iterable[int]]) -> str:
    """Rows of integers from 0 to 2^64 - 1."""
    numbers = list(chain.from_iterable(rows))
    return base64.b64encode(struct.pack(f"<{len(numbers)}Q", *numbers)).decode()


def unpack_rows(text: str, width: int, most: int) -> U64:
    """The inverse of `pack_rows`, a new array.

    Raises:
        ValueError: it is not at most `most` rows of this width.
    """
    if not isinstance(text, str) or len(text) > 2 * most * width * 8 + 1024:
        raise ValueError(f"not a text of up to {most} rows")
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise ValueError(f"packed numbers that are damaged ({error})") from None
    if len(data) % (8 * width) or len(data) > most * width * 8:
        raise ValueError(f"{len(data)} bytes, not up to {most} rows of {8 * width}")
    return np.frombuffer(data, "<u8").reshape(-1, width).astype(np.uint64)
