"""Pack rows of integers, or JSON, into a short string that fits in JSON or in a train state. Does not import torch."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Iterable
from itertools import chain
from typing import Any

import numpy as np

from exactdata.order.arrays import U64

_MOST_JSON = 1 << 28  # bytes of unpacked JSON; a larger value must be a forgery


def pack_rows(rows: Iterable[Iterable[int]]) -> str:
    """Pack rows of integers from 0 to 2^64 - 1."""
    numbers = list(chain.from_iterable(rows))
    return base64.b64encode(struct.pack(f"<{len(numbers)}Q", *numbers)).decode()


def unpack_rows(text: str, width: int, most: int) -> U64:
    """Unpack the result of `pack_rows` into a new array.

    Raises:
        ValueError: `text` does not contain up to `most` rows of this width.
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


def pack_json(value: Any) -> str:
    """Compress a JSON value. Worthwhile because segments repeat the names and weights of many sources."""
    return base64.b64encode(zlib.compress(json.dumps(value, separators=(",", ":")).encode())).decode()


def unpack_json(text: str) -> Any:
    """Unpack the result of `pack_json`.

    Raises:
        ValueError: `pack_json` did not write `text`.
    """
    inflate = zlib.decompressobj()
    try:
        data = inflate.decompress(base64.b64decode(text, validate=True), _MOST_JSON)
    except zlib.error as error:
        raise ValueError(f"a compressed text that is damaged ({error})") from None
    if not inflate.eof:
        raise ValueError("a compressed text that is truncated or too long")
    return json.loads(data)
