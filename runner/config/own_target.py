"""Define config groups with typed options that you can replace with your own function or class (`_target_`).

Without `_target_`, such a group has only its typed options. With `_target_`, additional keys are options of the target.
To make a group replaceable, subclass `Replaceable`. No other module has to be changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from runner.errors import nearest


@dataclass
class Replaceable:
    """Base class of a typed group. `options` contains the additional keys, which only a `_target_` uses."""

    _target_: str | None = None

    def __post_init__(self) -> None:
        self.options: dict[str, Any] = {}

    @property
    def target(self) -> str | None:
        return self._target_

    def node(self, parameters: Collection[str]) -> dict[str, Any]:
        """Return the node for `targets.bind`: the additional keys, and those typed options that the target accepts.

        Typed options that are null are not passed, so that the target's defaults apply.
        """
        typed = {each.name: getattr(self, each.name) for each in fields(self) if each.name in parameters}
        plain = {name: value.name if isinstance(value, Enum) else value for name, value in typed.items()}
        set_ones = {name: value for name, value in plain.items() if value is not None}
        return {**set_ones, **self.options, "_target_": self._target_}


def option_errors(key: str, group: Replaceable) -> Iterator[str]:
    """Yield a line for each additional key below the config's `key` that nothing uses."""
    if group.target is not None:
        return
    known = [each.name for each in fields(group) if each.name != "_target_"]
    for name, value in group.options.items():
        yield (
            f"{key}.{name}={value}: no such option in {key}{nearest(name, known)}; there are {', '.join(known)}, and "
            f"options of a function or class that {key}._target_ names"
        )
