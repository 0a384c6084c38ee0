"""Nodes of the schema that take further keys: the options of the class that their `_target_` names.

A dataclass with a field `options: dict[str, Any] = field(default_factory=dict, metadata=FURTHER)` is such a node.
OmegaConf does not see the field: it sees the further keys beside the others, and `frozen.to_config` puts them there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from runner.errors import nearest

FURTHER = {"omegaconf_ignore": True}


def takes_further(kind: Any) -> bool:
    """Whether nodes of this dataclass do."""
    return is_dataclass(kind) and any(one.name == "options" and one.metadata for one in fields(kind))


def known_keys(kind: Any) -> list[str]:
    """The keys that the schema itself gives such a node."""
    return [one.name for one in fields(kind) if one.name != "options"]


def unknown_key_errors(key: str, node: Any) -> Iterator[str]:
    """A line for each further key of a node without `_target_`, where it is only a misspelled one."""
    known = known_keys(type(node))
    for name, value in {} if node._target_ else node.options.items():
        yield f"{key}.{name}={value}: no such option in {key}{nearest(name, known)}; there are {', '.join(known)}"
