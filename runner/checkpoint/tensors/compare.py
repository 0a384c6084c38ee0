"""Compare values, tensors and checkpoints bit for bit, and describe the differences.

Tensors are compared as raw bytes: 0.0 and -0.0 differ, and NaNs with the same bits are equal.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runner.checkpoint.files.manifest import Manifest, refusing_corruption
from runner.checkpoint.files.store import Stored

if TYPE_CHECKING:
    import torch

LARGEST = 2**62  # upper limit of any count in a state
EVERY = "*"  # stands for all keys; see `unlike`
MISSING = "missing"  # shown in place of a value that only the other side has
MAX_SHOWN = 80  # maximum length of a value in a message


@dataclass(frozen=True)
class ValueDifference:
    """A value that differs: its name, and the value on each side as a string."""

    name: str
    one: str
    two: str


@dataclass
class CheckpointComparison:
    """The number of equal tensors, the number of elements in them, and the differences."""

    tensors: int = 0
    values: int = 0
    differences: list[ValueDifference] = field(default_factory=list)


def compare_checkpoints(
    one: Stored, two: Stored, manifests: tuple[Manifest, Manifest], ignore: Iterable[str] = ()
) -> CheckpointComparison:
    """Compare every tensor and the train states of two checkpoints.

    Args:
        one: a verified checkpoint.
        two: a second verified checkpoint.
        manifests: manifests of `one` and `two`.
        ignore: top-level entries of the train states that may differ.
    """
    from runner.checkpoint.tensors.reader import CheckpointReader, load_train_state

    def opened(at: Stored, manifest: Manifest) -> tuple[CheckpointReader, dict[str, Any]]:
        with refusing_corruption(at.path):
            return CheckpointReader(at, manifest), load_train_state(at, manifest)

    found = CheckpointComparison()
    left, left_state = opened(one, manifests[0])
    right, right_state = opened(two, manifests[1])
    with left, right:
        for name in dict.fromkeys([*left.entries, *right.entries]):
            if name not in left.entries or name not in right.entries:
                present = ["present" if name in side.entries else "missing" for side in (left, right)]
                found.differences.append(ValueDifference(name, *present))
                continue
            tensor = left.read(name)
            if (described := tensor_difference(tensor, right.read(name))) is not None:
                found.differences.append(ValueDifference(name, *described))
                continue
            found.tensors += 1
            found.values += tensor.numel()
    ignored = set(ignore)
    left_state, right_state = (
        {key: value for key, value in state.items() if key not in ignored} for state in (left_state, right_state)
    )
    found.differences += [
        ValueDifference(name, shown(a), shown(b))
        for name, a, b in nested_differences(left_state, right_state, "train state")
    ]
    return found


def nested_differences(one: Any, two: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield each difference between two nested values: the entry's name and both entries (tensors as strings)."""
    if isinstance(one, dict) and isinstance(two, dict):
        for key in dict.fromkeys([*one, *two]):
            yield from nested_differences(one.get(key, MISSING), two.get(key, MISSING), f"{name}.{key}")
    elif isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)) and len(one) == len(two):
        for index, (a, b) in enumerate(zip(one, two, strict=True)):
            yield from nested_differences(a, b, f"{name}[{index}]")
    elif _is_tensor(one) and _is_tensor(two):
        if (described := tensor_difference(one, two)) is not None:
            yield name, *described
    elif type(one) is not type(two) or (one != two and not (_is_nan(one) and _is_nan(two))):
        yield name, one, two


def unlike(value: Any, example: Any, name: str) -> str | None:
    """Describe the first entry of `value` whose type does not match `example`, or return None if all match.

    Args:
        value: an untrusted value.
        example: the expected structure. An integer matches integers >= 0, and a float matches any number. The items of
            a list match the items of the value in order, and the last one also matches all further items. A tuple
            matches a sequence of the same length. The entries of a mapping match the same keys of the value, or all
            keys for `{EVERY: ...}`. None and other types match anything.
        name: name of the value, for the description.
    """
    inner: Iterable[tuple[str, Any, Any]] = ()
    fits, expected = True, ""
    if isinstance(example, dict):
        fits, expected = isinstance(value, dict), "a mapping"
        inner = ((f"{name}.{key}", value[key], example.get(key, example.get(EVERY))) for key in (value if fits else ()))
    elif isinstance(example, (list, tuple)):
        same_length = isinstance(example, list) or (isinstance(value, (list, tuple)) and len(value) == len(example))
        fits, expected = isinstance(value, (list, tuple)) and same_length, f"a {type(example).__name__}"
        pairs = zip(value, [*example, *example[-1:] * len(value)], strict=False) if fits and example else ()
        inner = ((f"{name}[{index}]", *pair) for index, pair in enumerate(pairs))
    elif isinstance(example, (bool, str)):
        fits, expected = isinstance(value, type(example)), "a string" if isinstance(example, str) else "true or false"
    elif isinstance(example, int):
        fits, expected = type(value) is int and 0 <= value <= LARGEST, "an integer of 0 or more"
    elif isinstance(example, float):
        single = _is_tensor(value) and value.numel() == 1
        fits, expected = single or (isinstance(value, (int, float)) and not isinstance(value, bool)), "a number"
    if not fits:
        return f"{name} is {shown(value)}, and not {expected}"
    return next((found for key, each, like in inner if (found := unlike(each, like, key))), None)


def tensor_difference(one: torch.Tensor, two: torch.Tensor) -> tuple[str, str] | None:
    """Return the first differing value of two tensors as a string for each side, or None if their bytes are equal."""
    import torch

    if one.shape != two.shape or one.dtype != two.dtype:
        return _kind(one), _kind(two)
    flat = [tensor.detach().cpu().contiguous().reshape(-1) for tensor in (one, two)]
    if not flat[0].numel():
        return None
    raw = [tensor.view(torch.uint8).reshape(tensor.numel(), -1) for tensor in flat]
    differing = (raw[0] != raw[1]).any(dim=1).nonzero()
    if not len(differing):
        return None
    first = int(differing[0])
    gap = (flat[0].double() - flat[1].double()).abs().nan_to_num(torch.inf).max().item()
    note = f" ({len(differing)} of {len(raw[0])} values differ, by up to {gap:.3g}, the first at {first})"
    values = [_number(tensor[first].item()) for tensor in flat]
    return values[0], values[1] + note


def shown(value: Any) -> str:
    """Format a value as a string of at most `MAX_SHOWN` characters."""
    if _is_tensor(value):
        return _kind(value)
    text = value if isinstance(value, str) else json.dumps(value, default=_kind_or_text, skipkeys=True)
    return text if len(text) <= MAX_SHOWN else text[: MAX_SHOWN - 1] + "…"


def _kind(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} of {tensor.dtype}"


def _kind_or_text(value: Any) -> str:
    return _kind(value) if _is_tensor(value) else str(value)


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "untyped_storage")


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _number(number: Any) -> str:
    """Format a number so that different bits give different strings."""
    return f"{number!r} = {number.hex()}" if isinstance(number, float) else repr(number)
