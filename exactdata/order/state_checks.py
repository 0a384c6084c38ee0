"""Check complete saved states against declarations before any part of them is restored.

A declaration is a `Kind`, or a `Record`, `ListOf` or `MapOf` of declarations. A *seal* is a digest of a state that is
stored in the state. It detects values that were replaced with different values of the same kind. It detects mistakes,
not forgery.

This module does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import orjson
import xxhash

LARGEST = 2**62  # maximum of any count or position in a state
_MOST_SHOWN = 80  # maximum characters of a value in a message


@dataclass(frozen=True)
class Kind:
    """Declares a single value.

    Attributes:
        allowed: description of the allowed values, used in messages.
        fits: returns whether a value is allowed.
    """

    allowed: str
    fits: Callable[[Any], bool]


@dataclass(frozen=True)
class Record:
    """Declares a mapping with these keys. Additional keys are not checked.

    Attributes:
        required: declarations by key.
        optional: declarations of keys that may be missing.
    """

    required: Mapping[str, Declaration] = field(default_factory=dict)
    optional: Mapping[str, Declaration] = field(default_factory=dict)


@dataclass(frozen=True)
class ListOf:
    """Declares a list of any length."""

    item: Declaration


@dataclass(frozen=True)
class MapOf:
    """Declares a mapping with string keys."""

    value: Declaration


Declaration: TypeAlias = Kind | Record | ListOf | MapOf


def whole(low: int = 0, high: int = LARGEST) -> Kind:
    """Declare an integer (not a bool) from `low` to `high`."""
    bounds = f"an integer of {low} or more" if high == LARGEST else f"an integer from {low} to {high}"
    return Kind(bounds, lambda value: type(value) is int and low <= value <= high)


def one_of(*values: Any) -> Kind:
    """Declare that a value equals one of these values and has the same type."""
    return Kind(
        " or ".join(map(repr, values)),
        lambda value: any(type(value) is type(each) and value == each for each in values),
    )


def maybe(kind: Kind) -> Kind:
    """Declare that a value is None, or allowed by `kind`."""
    return Kind(f"None or {kind.allowed}", lambda value: value is None or kind.fits(value))


def hexadecimal(digits: int) -> Kind:
    """Declare a string of `digits` lower-case hexadecimal digits."""
    return Kind(
        f"a string of {digits} hexadecimal digits",
        lambda value: isinstance(value, str) and len(value) == digits and set(value) <= set("0123456789abcdef"),
    )


flag = Kind("true or false", lambda value: type(value) is bool)
text = Kind("a string", lambda value: isinstance(value, str))
mapping = Kind("a mapping", lambda value: isinstance(value, Mapping))
anything = Kind("anything", lambda value: True)
any_integer = Kind("an integer", lambda value: type(value) is int)


def problem_in(value: Any, declared: Declaration, key: str = "") -> tuple[str, str, str] | None:
    """Find the first value that does not match its declaration.

    Args:
        value: a state or a part of a state.
        declared: its declaration.
        key: dotted path of `value` in the state.

    Returns:
        The key, the value as a string, and a description of the allowed values, or None if there is no problem.
    """
    if isinstance(declared, Kind):
        return None if declared.fits(value) else (key, shown(value), declared.allowed)
    if isinstance(declared, Record | MapOf):
        return _problem_in_mapping(value, declared, key)
    if not isinstance(value, list | tuple):
        return key, shown(value), "a list"
    return _first(problem_in(each, declared.item, f"{key}[{i}]") for i, each in enumerate(value))


def _problem_in_mapping(value: Any, declared: Record | MapOf, key: str) -> tuple[str, str, str] | None:
    if not isinstance(value, Mapping):
        return key, shown(value), "a mapping"
    prefix = f"{key}." if key else ""
    if isinstance(declared, MapOf):
        if not all(isinstance(name, str) for name in value):
            return key, shown(value), "a mapping from strings"
        return _first(problem_in(each, declared.value, prefix + name) for name, each in value.items())
    for name, kind in {**declared.required, **declared.optional}.items():
        if name in value:
            found = problem_in(value[name], kind, prefix + name)
        else:
            missing = prefix + name, "missing", kind.allowed if isinstance(kind, Kind) else "there"
            found = missing if name in declared.required else None
        if found is not None:
            return found
    return None


def _first(problems: Iterable[tuple[str, str, str] | None]) -> tuple[str, str, str] | None:
    return next((problem for problem in problems if problem is not None), None)


def shown(value: Any) -> str:
    """Format a value on one line, shortened."""
    try:
        line = " ".join(repr(value).split())
    except RecursionError:
        line = f"a {type(value).__name__} that is nested too deeply"
    return line if len(line) <= _MOST_SHOWN else f"{line[: _MOST_SHOWN - 3]}..."


def check(value: Any, declared: Declaration, message: str, error: type[Exception]) -> None:
    """Check a state against its declaration.

    Args:
        value: the state.
        declared: its declaration.
        message: message of the error, with placeholders `{key}`, `{value}` and `{allowed}`.
        error: type of the error to raise.

    Raises:
        Exception: an `error` that names the first value that does not match its declaration.
    """
    problem = problem_in(value, declared)
    if problem is not None:
        key, found, allowed = problem
        raise error(message.format(key=key or "the state", value=found, allowed=allowed))


def sealed(state: Mapping[str, Any], key: str = "digest") -> dict[str, Any]:
    """Return `state` with its seal under `key`, replacing an earlier seal."""
    return {**state, key: digest_of(state, key)}


def without_foreign(state: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a state without keys that begin with an underscore, because other programs add such keys."""
    return {name: value for name, value in state.items() if not _is_foreign(name)}


def _is_foreign(name: Any) -> bool:
    return type(name) is str and name[:1] == "_"


def digest_of(state: Mapping[str, Any], key: str = "digest") -> str:
    """Compute the digest of a state, excluding its `key`. A round trip through JSON does not change the digest.

    A value that has a "seal" is replaced with that seal, which must be checked when the value is restored. Keys that
    begin with an underscore are ignored, because trainers add such keys.
    """
    content = {
        name: value["seal"] if type(value) is dict and "seal" in value else value
        for name, value in state.items()
        if name != key and not _is_foreign(name)
    }
    return xxhash.xxh3_64_hexdigest(_text_of(content))


def _text_of(content: Mapping[str, Any]) -> bytes:
    """Return JSON with sorted keys. Uses orjson if possible, which is ten times as fast as json.

    orjson cannot write integers above 64 bits, and writes NaN as null.
    """
    try:
        line = orjson.dumps(content, default=_outline, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS)
    except TypeError:
        return _slow_text_of(content)
    nulls = sum([value is None for value in content.values()])
    return line if line.count(b"null") == nulls else _slow_text_of(content)


def _slow_text_of(content: Mapping[str, Any]) -> bytes:
    try:
        line = json.dumps(_with_string_keys(content), sort_keys=True, separators=(",", ":"), default=_outline)
    except RecursionError:
        line = f"{sorted(map(str, content))} nested too deeply"
    return line.encode("utf-8", "surrogatepass")


def check_seal(state: Mapping[str, Any], what: str, error: type[Exception], key: str = "digest") -> None:
    """Check that a state has not changed since it was sealed.

    Args:
        state: the state.
        what: name of the state in the message.
        error: type of the error to raise.
        key: key of the seal.

    Raises:
        Exception: an `error` if the state has changed since it was sealed.
    """
    check_same_seal(state.get(key), digest_of(state, key), what, error, key)


def check_same_seal(recorded: Any, found: str, what: str, error: type[Exception], key: str = "seal") -> None:
    """Check that the seal recorded for a nested state equals the seal that was found in it; see `check_seal`."""
    if recorded != found:
        raise error(
            f"{what} records {key} {shown(recorded)}, but its content has {key} {found!r}: it was truncated or "
            "edited; use another checkpoint"
        )


def _with_string_keys(value: Any) -> Any:
    """Convert the keys of mappings to strings, at every depth, so that they can be sorted."""
    if isinstance(value, Mapping):
        return {
            name if isinstance(name, str) else json.dumps(name, default=repr): _with_string_keys(v)
            for name, v in value.items()
        }
    return [_with_string_keys(each) for each in value] if isinstance(value, list | tuple) else value


def _outline(value: Any) -> Any:
    """Describe a value that JSON cannot represent by its type, shape and dtype. Convert other containers for JSON."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, list | tuple):
        return list(value)
    if isinstance(value, float):
        return float(value)
    return f"{type(value).__name__} {getattr(value, 'shape', '')} {getattr(value, 'dtype', '')}"
