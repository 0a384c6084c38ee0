"""Arrays of integers as one short text: for states and records that may hold 100,000 ranges. Does not import torch.

A text is loadable from JSON and from a train state alike, and costs a save no time for each number. Whoever unpacks
one says how much it may hold at most: a text that was edited gives a ValueError of one line, and no more memory.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from runner.data.order.hashing import U64

I64 = NDArray[np.int64]

MOST = 1 << 24  # rows of a table
_HEAD = 8  # bytes, with the number of rows
_SIZES = (1, 2, 4, 8)  # bytes of an integer
_ONE, _SIGN = np.uint64(1), np.uint64(63)


def pack_rows(rows: U64) -> str:
    """Rows of uint64, shape (count, width), whose values have nothing in common, such as digests."""
    return base64.b64encode(rows.astype("<u8").tobytes()).decode()


def unpack_rows(text: str, width: int, most: int) -> U64:
    """The inverse of `pack_rows`, a new array.

    Raises:
        ValueError: it is not at most `most` rows of this width.
    """
    data = _decoded(text, most * width * 8)
    if len(data) % (8 * width) or len(data) > most * width * 8:
        raise ValueError(f"{len(data)} bytes, not up to {most} rows of {8 * width}")
    return np.frombuffer(data, "<u8").reshape(-1, width).astype(np.uint64)


def pack_columns(columns: Sequence[NDArray[np.integer]]) -> str:
    """Columns of int64 of the same length, each packed by the differences of its values: sorted ones are short."""
    parts = [len(columns[0]).to_bytes(_HEAD, "little")]
    for column in columns:
        steps = np.diff(column.astype(np.int64), prepend=np.int64(0)).view(np.uint64)
        folded = (steps << _ONE) ^ (np.uint64(0) - (steps >> _SIGN))  # small negative ones, too, are small
        largest = int(folded.max(initial=0))
        size = next(size for size in _SIZES if largest < 1 << 8 * size)
        planes = folded.astype(f"<u{size}").view(np.uint8).reshape(-1, size).T  # alike bytes together
        parts += [bytes([size]), planes.tobytes()]
    return base64.b64encode(zlib.compress(b"".join(parts), 1)).decode()


def unpack_columns(text: str, count: int) -> list[I64]:
    """The inverse of `pack_columns`.

    Args:
        text: what it returned.
        count: of the columns.

    Raises:
        ValueError: it is not so many columns of one length, or has more than 2^24 rows.
    """
    most = _HEAD + count * (1 + 8 * MOST)
    unpacking = zlib.decompressobj()
    try:
        data = unpacking.decompress(_decoded(text, most), most)
    except zlib.error as error:
        raise ValueError(f"packed numbers that are damaged ({error})") from None
    rows, at, columns = int.from_bytes(data[:_HEAD], "little"), _HEAD, []
    if not unpacking.eof or unpacking.unused_data or rows > MOST:
        raise ValueError("packed numbers that are damaged")
    for _ in range(count):
        size = data[at] if at < len(data) else 0
        end = at + 1 + rows * size
        if size not in _SIZES or end > len(data):
            raise ValueError("packed numbers that are damaged")
        planes = np.frombuffer(data, np.uint8, rows * size, at + 1).reshape(size, rows)
        folded = np.ascontiguousarray(planes.T).reshape(-1).view(f"<u{size}").astype(np.uint64)
        steps = (folded >> _ONE) ^ (np.uint64(0) - (folded & _ONE))
        columns.append(np.cumsum(steps, dtype=np.uint64).view(np.int64))
        at = end
    if at != len(data):
        raise ValueError("packed numbers that are damaged")
    return columns


def _decoded(text: str, most: int) -> bytes:
    if not isinstance(text, str):
        raise ValueError(f"a {type(text).__name__}, not a text")
    if len(text) > 2 * most + 1024:
        raise ValueError(f"{len(text)} characters")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"packed numbers that are damaged ({error})") from None
