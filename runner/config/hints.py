"""Look up the types of the settings in the schema, and describe them. Imports neither torch nor Hydra."""

from __future__ import annotations

import typing
from dataclasses import is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin

from runner.config.schema import Command

TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a dictionary"}


def without_none(hint: Any) -> tuple[Any, bool]:
    """Return the type without `None`, and whether it allowed `None`."""
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        return kinds[0], True
    return hint, False


def expected(key: str) -> str:
    """Describe what the schema allows for the dotted `key`; empty if it allows anything."""
    hint, optional = without_none(type_of(key))
    text = description(hint)
    return f"{text} or null" if text and optional else text


def type_of(key: str) -> Any:
    """Return the type of the dotted `key` in the schema; None if it has none."""
    hint: Any = Command
    for name in key.split("."):
        hint = without_none(hint)[0]
        if is_dataclass(hint):
            hint = typing.get_type_hints(hint).get(name)
        elif get_origin(hint) is dict:
            hint = get_args(hint)[1]
        else:
            return None
    return hint


def description(hint: Any) -> str:
    """Describe values of a type in words; empty if they may be anything."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(member.name for member in hint)
    origin = get_origin(hint)
    if origin is list:
        return "a list such as [a,b]"
    return TYPE_NAMES.get(origin or hint, "a dictionary" if is_dataclass(hint) else "")
