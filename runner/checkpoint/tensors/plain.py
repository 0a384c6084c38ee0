"""Read plain values from an untrusted file. `weights_only=True` runs no code, and this module limits their size.

A pickle of a few kilobytes can nest values so deeply that hashing one as a dict key overflows Python's stack. It can
also refer to the same value so often that traversing it takes years. So the nesting depth is computed from the pickle's
opcodes before any value is built. The built values are checked again, because lists and dicts can contain themselves.
"""

from __future__ import annotations

import io
import pickletools
import zipfile
from collections.abc import Iterable
from typing import Any

import torch

MAX_DEPTH = 100
"""Maximum nesting depth of values. Train states have about ten levels."""
MOST_REPEATED = 100
"""Maximum number of values that a traversal visits, per byte of the file. Shared values are visited repeatedly."""

MAX_BITS = 4096
"""Maximum number of bits of an integer. Python refuses to print much larger ones."""

_IN_PLACE = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
_Extent = tuple[int, int]
"""The nesting depth of a value, and the number of values that a traversal visits."""


def load(raw: bytes) -> Any:
    """Load a torch.save file that contains only numbers, strings, tensors, and dicts, lists and tuples of them.

    Raises:
        ValueError: the values are nested too deeply, or torch.save did not write the file.
        Exception: torch's error if the file contains anything else. No code from the file was run.
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
    """Compute the extent of a container from the extents of its items.

    Raises:
        ValueError: the value is nested too deeply or has too many values.
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
    """Interpret the opcodes of a pickle, computing extents in place of values.

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
    """Traverse a value without recursion, and check its nesting.

    Raises:
        ValueError: the value is nested too deeply, or contains itself.
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
