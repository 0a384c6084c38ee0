"""Look up and describe the types of settings in the schema. Imports neither torch nor Hydra."""

from __future__ import annotations

import typing
from dataclasses import is_dataclass
from enum import Enum
from types import UnionType
from typing import Any, Union, get_args, get_origin

from runner.config.schema import Command

TYPE_NAMES = {int: "a whole number", float: "a number", bool: "true or false", str: "text", dict: "a dictionary"}


def without_none(hint: Any) -> tuple[Any, bool]:
    """Return a type without `None`, and whether it allowed `None`."""
    if get_origin(hint) in (Union, UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
        return kinds[0], True
    return hint, False


def expected(key: str) -> str:
    """Describe the values that the schema allows for the dotted `key`. Return an empty string if it allows any."""
    hint, optional = without_none(type_of(key))
    text = description(hint)
    return f"{text} or null" if text and optional else text


def type_of(key: str) -> Any:
    """Return the type of the dotted `key` in the schema, or None if the schema does not define one."""
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
    """Describe the values of a type in words. Return an empty string if any value is allowed."""
    if isinstance(hint, type) and issubclass(hint, Enum):
        return "one of " + ", ".join(member.name for member in hint)
    origin = get_origin(hint)
    if origin is list:
        return "a list such as [a,b]"
    return TYPE_NAMES.get(origin or hint, "a dictionary" if is_dataclass(hint) else "")
