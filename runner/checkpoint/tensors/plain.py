"""Reads plain values that anybody may have saved: `weights_only=True` runs nothing, and this bounds the rest.

A pickle of some kilobytes may nest values so deeply that Python's stack overflows when one is hashed, as the key of a
dict, or refer to the same value so often that a walk through it takes years. So its nesting is computed from its
operations before anything is made of it, and that of the values afterwards, as lists and dicts may contain themselves.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Iterable
from typing import Any

import torch

MAX_DEPTH = 100
"""The deepest nesting of values; states have about ten levels."""
MOST_REPEATED = 100
"""How many times longer than the file a walk through all values may be: some values are referred to repeatedly."""

MAX_BITS = 4096
"""The most bits of an integer: Python refuses to print much larger ones."""

_IN_PLACE = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
_Extent = tuple[int, int]
"""How deeply a value is nested, and how many values a walk through it visits."""


def load(raw: bytes) -> Any:
    """Load a file that torch.save wrote: numbers, strings and tensors, and dicts, lists and tuples of them.

    Raises:
        ValueError: it is nested too deeply, or is no such file.
        Exception: torch's own, if it contains anything else; nothing in it was run.
    """
    most = MOST_REPEATED * len(raw)
    try:
        _check_pickle(_pickle_in(raw), most)
    except (LookupError, zipfile.BadZipFile, NotImplementedError, EOFError, OSError) as error:
        raise ValueError(f"it is not as torch.save writes it ({type(error).__name__}: {error})") from error
    value = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    _check_values(value, most)
    return value


def _pickle_in(raw: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        names = [name for name in archive.namelist() if name.lower().endswith("data.pkl")]  # torch ignores the case
        if len(names) != 1:
            raise ValueError(f"it has {len(names)} pickles, and not one")
        return archive.read(names[0])


def _around(inner: Iterable[_Extent], most: int) -> _Extent:
    """Compute the extent of a value that contains others.

    Raises:
        ValueError: it is too large.
    """
    depth, size = 0, 1
    for each in inner:
        depth, size = max(depth, each[0]), size + each[1]
    if depth >= MAX_DEPTH:
        raise ValueError(f"its values are nested more than {MAX_DEPTH} levels deep")
    if size > most:
        raise ValueError("its values refer to each other too often")
    return depth + 1, size


def _check_pickle(pickled: bytes, most: int) -> None:
    """Follow the operations of a pickle with extents in place of values.

    Raises:
        ValueError: a value is nested too deeply, or the pickle is malformed.
        LookupError: the pickle is malformed.
    """
    stack: list[_Extent] = []
    marks: list[int] = []
    memo: dict[Any, _Extent] = {}
    for operation, argument, _ in pickletools.genops(pickled):
        name, before = operation.name, operation.stack_before
        if isinstance(argument, int) and argument.bit_length() > MAX_BITS:
            raise ValueError(f"it has an integer of {argument.bit_length()} bits")
        if name == "MARK":
            marks.append(len(stack))
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name.endswith("PUT"):
            memo[argument] = stack[-1]
        elif name.endswith("GET"):
            stack.append(memo[argument])
        else:
            marked = pickletools.markobject in before
            first = marks.pop() - before.index(pickletools.markobject) if marked else len(stack) - len(before)
            taken = stack[first:]
            del stack[first:]
            if name in _IN_PLACE:
                (depth, size), (around, more) = taken[0], _around(taken[1:], most)
                stack.append((max(depth, around), size + more))
            else:
                stack += [_around(taken, most) if taken else (0, 1)] * len(operation.stack_after)


def _check_values(top: Any, most: int) -> None:
    """Walk through a value without recursion.

    Raises:
        ValueError: it is nested too deeply, or contains itself.
    """
    extents: dict[int, _Extent] = {}
    open_values: set[int] = set()
    pending = [(top, False)]
    while pending:
        value, is_complete = pending.pop()
        inner = list(value.values()) if isinstance(value, dict) else value
        if not isinstance(inner, list | tuple) or id(value) in extents:
            continue
        if is_complete:
            open_values.remove(id(value))
            extents[id(value)] = _around((extents.get(id(each), (0, 1)) for each in inner), most)
        elif id(value) in open_values:
            raise ValueError("one of its values contains itself")
        else:
            open_values.add(id(value))
            pending.append((value, True))
            pending += [(each, False) for each in inner]
