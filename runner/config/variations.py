"""The jobs of a sweep that differ in single values only: composed once, then varied.

A composition by Hydra takes 0.1 s, most of it for what the jobs of a sweep have in common. Overrides that set values
are applied last of all, after every group has been chosen and merged. So one that sets a single value changes that
value and what interpolates it, and nothing else. OmegaConf sets and interpolates here too, in the composed config:
types, conversions and references are its own. Whatever is not certain to be such a change is left to Hydra.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf

from runner.config.frozen import READ_ERRORS, plain_values
from runner.config.plain_yaml import copied

Path = tuple[str | int, ...]
Values = dict[str, Any]
MARK = "${"
_MISSING = "???"
_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+)*")
# `${env:...}`: what a resolver returns may be another value each time, those of OmegaConf excepted.
_FOREIGN_RESOLVER = re.compile(r"\$\{\s*(?!oc\.)[^\s{}]*:")

# `${data.sequence_length}`; whatever refers to something in another way may refer to anything.
_REFERENCE = re.compile(r"\$\{([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)\}")


def is_single(key: str, value: Any) -> bool:
    """Whether setting `key` to `value` is a change that can be made in a composed config."""
    if not _KEY.fullmatch(key) or not isinstance(value, bool | int | float | str | None):
        return False
    return not isinstance(value, str) or (MARK not in value and value != _MISSING)


@dataclass(frozen=True)
class Shape:
    """What jobs must have in common to be variations of each other, and the values in which they may differ."""

    common: tuple[object, ...]  # overrides in their order; of one that sets a single value, all but the value
    values: Values  # dotted key -> value


def shape_of(
    overrides: Sequence[str],
    group_of: Callable[[str], str | None],
    single: Callable[[str], tuple[str, Any] | None],
) -> Shape | None:
    """The shape of a job; None if its overrides depend on each other's order.

    Args:
        overrides: of the job.
        group_of: override -> the config group that it chooses an option of, or None.
        single: the dotted key and the value of an override that sets a single value, None for any other.
    """
    common, values, keys = list[object](), dict[str, Any](), list[str]()
    for text in overrides:
        key, _, value = text.partition("=")
        chooses = group_of(text) and not value.lstrip().startswith("{")  # `optimizer={lr:0.5}` sets values
        found = None if chooses else single(text)
        if found is not None:
            values[found[0]] = found[1]
        common.append(text if found is None else (key, found[0]))  # `sampler.weights={code:2}` sets a key of its value
        if not chooses:
            keys.append(f"{found[0] if found else key.lstrip('+~')}.")
    ordered = sorted(keys)
    if any(after.startswith(before) for before, after in pairwise(ordered)):
        return None
    return Shape(tuple(common), values)


class Variations:
    """A composed config in which single values can be changed.

    Args:
        config: composed, not resolved, without Hydra's node; it is kept, and changed.
        typed: the same values, resolved and merged into the schema; likewise.
        plain: `typed` as plain values.
        choices: config group -> the option chosen.
        keys: dotted keys of the values that its overrides set one by one, and that may be others.
    """

    def __init__(
        self, config: DictConfig, typed: DictConfig, plain: Values, choices: Mapping[str, Any], keys: Iterable[str]
    ) -> None:
        self.choices = choices
        self._config, self._typed, self._plain = config, typed, copied(plain)
        raw = dict(_leaves(plain_values(config, resolve=False)))
        texts = {path: value for path, value in raw.items() if isinstance(value, str) and MARK in value}
        self._paths: dict[str, Path] = {key: tuple(key.split(".")) for key in keys}
        self._certain = all(path in raw for path in self._paths.values()) and not any(
            _FOREIGN_RESOLVER.search(text) for text in texts.values()
        )
        top = [path for path in self._paths.values() if len(path) == 1 and path in raw]
        self._top = {path[0]: type(config[path[0]]) for path in top}
        self._following = {path: _at(config, path[:-1]) for path in _following(texts, self._paths)}
        self._before = {path: _plain_value(node[path[-1]]) for path, node in self._following.items()}

    def plain(self, values: Values) -> Values | None:
        """The resolved config with other values; None if that is not certain to be what Hydra would compose.

        Args:
            values: dotted key -> value, for each of the keys.
        """
        if not self._certain:
            return None
        try:
            changed = {self._paths[key]: self._set(key, value) for key, value in values.items()}
            for path, node in self._following.items():
                value = _plain_value(node[path[-1]])
                if not _same(value, self._before[path]):
                    changed[path] = value
            made: Values = copied(self._plain)
            for path, value in changed.items():
                _at(made, path[:-1])[path[-1]] = self._converted(path, value)
        except (*READ_ERRORS, _NotSingleError):
            return None
        return made

    def _set(self, key: str, value: Any) -> Any:
        """Set a value as an override does; the value that it has then."""
        if self._following and type(value) is not self._top.get(key, type(value)):
            raise _NotSingleError  # what follows it may need its type, which the schema gives
        OmegaConf.update(self._config, key, value, merge=True)
        path = self._paths[key]
        return _plain_value(_at(self._config, path[:-1])[path[-1]])

    def _converted(self, path: Path, value: Any) -> Any:
        """`value` as the schema has it."""
        if isinstance(value, dict | list) or (isinstance(value, str) and MARK in value):
            raise _NotSingleError
        node = _at(self._typed, path[:-1])
        node[path[-1]] = value
        return _plain_value(node[path[-1]])


class _NotSingleError(Exception):
    """A change reaches a whole dictionary or list, or makes an interpolation."""


def _leaves(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """(path, value) of all that is neither a dictionary nor a list."""
    if isinstance(node, dict | list):
        for name, part in node.items() if isinstance(node, dict) else enumerate(node):
            yield from _leaves(part, (*path, name))
    else:
        yield path, node


def _following(texts: Mapping[Path, str], keys: Iterable[str]) -> list[Path]:
    """Which of the interpolations `texts` may change with the values of `keys`: by way of others, too."""
    moving, found = set(keys), list[Path]()
    waiting: dict[Path, list[str] | None] = {  # what each refers to, None if that may be anything
        path: None if MARK in _REFERENCE.sub("", text) else _REFERENCE.findall(text) for path, text in texts.items()
    }
    while new := [path for path, names in waiting.items() if names is None or _overlap(names, moving)]:
        for path in new:
            del waiting[path]
        found += new
        moving |= {".".join(map(str, path)) for path in new}
    return found


def _overlap(names: Iterable[str], others: Iterable[str]) -> bool:
    """Whether one of the dotted keys is one of the others, or above or below one."""
    pairs = ((f"{name}.", f"{other}.") for name in names for other in others)
    return any(name.startswith(other) or other.startswith(name) for name, other in pairs)


def _at(node: Any, path: Path) -> Any:
    for name in path:
        node = node[name]
    return node


def _plain_value(value: Any) -> Any:
    """A value of a config as `plain_values` has it."""
    if isinstance(value, DictConfig | ListConfig):
        return OmegaConf.to_container(value, resolve=True, enum_to_str=True)
    return value.name if isinstance(value, Enum) else value


def _same(one: Any, other: Any) -> bool:
    """Whether two values are equal and of one type, and so are all in them."""
    return type(one) is type(other) and (one == other if not isinstance(one, dict | list) else repr(one) == repr(other))
