"""Read a run's config.yaml as plain values, quickly: with the YAML reader in C, without omegaconf."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from runner.system import files

MAX_BYTES = 8 << 20  # room for 100,000 exclusions; most have a few thousand bytes
MAX_DEPTH = 100
CACHED = 1 << 14  # config sections kept in memory, read or written
_NOT_OURS = re.compile(r"^(?!\w+:| |- |$)", re.MULTILINE)
_TOP_LEVEL = re.compile(r"^(?=\w+:)", re.MULTILINE)
_FLOAT = re.compile(
    r"""^(?:[-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)
    |\.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?::[0-5]?[0-9])+\.[0-9_]*
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """Read YAML as OmegaConf does: 1e-3 is a number, a date is text, and duplicate keys are errors."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a dictionary; PyYAML calls this.

        Raises:
            ConstructorError: two keys are the same.
        """
        keys = [key.value for key, _ in node.value if key.tag == "tag:yaml.org,2002:str"]
        if len(keys) > len(set(keys)):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise yaml.constructor.ConstructorError(None, None, f"found duplicate key {twice}", node.start_mark)
        made: dict[Any, Any] = super().construct_mapping(node, deep=deep)
        return made


Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789."))
Loader.yaml_implicit_resolvers = {
    first: [each for each in resolvers if each[0] != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in Loader.yaml_implicit_resolvers.items()
}


def read_plain(path: Path) -> dict[str, Any]:
    """Return the resolved values of a frozen config.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a frozen config.
    """
    text = files.read_regular(path, limit=MAX_BYTES).decode()
    try:
        plain: dict[str, Any] = _unescaped(parsed(text))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML ({error})".splitlines()[0]) from None
    except ValueError as error:
        raise ValueError(f"{path} {error}") from None
    return plain


def parsed(text: str) -> dict[str, Any]:
    """Return the values of a config as they are written. They are shared, so do not modify them.

    Top-level entries are read one by one if possible, because the runs of a sweep share most of them.

    Raises:
        ValueError: it is not a frozen config.
        YAMLError: it is not YAML.
    """
    check_structure(text)
    try:
        entries = [section(part) for part in sections(text)]
    except (yaml.YAMLError, ValueError):
        entries = []
    values = dict(entries)
    if not entries or len(values) < len(entries):
        values = yaml.load(text, Loader=Loader)
    if not isinstance(values, dict):
        raise ValueError("is not a frozen config")
    return values


def sections(text: str) -> list[str]:
    """Split a config into its top-level entries, each a YAML text.

    Raises:
        ValueError: the text does not have the form that `runner.config.frozen.to_yaml` writes.
    """
    if _NOT_OURS.search(text):
        raise ValueError("not written by this program")
    return [part for part in _TOP_LEVEL.split(text) if part]


@lru_cache(maxsize=CACHED)
def section(text: str) -> tuple[str, Any]:
    """Return the name and the value of a top-level entry.

    Raises:
        ValueError: there is not exactly one entry.
        YAMLError: it is not YAML.
    """
    ((name, value),) = yaml.load(text, Loader=Loader).items()
    return name, value


def read_section(path: Path, name: str) -> Any:
    """Read one top-level entry of a frozen config; None if it is missing.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a frozen config.
    """
    text = files.read_regular(path, limit=MAX_BYTES).decode()
    try:
        check_structure(text)
        for part in sections(text):
            if part.startswith(f"{name}:"):
                return _unescaped(copied(section(part)[1]))
    except (yaml.YAMLError, ValueError):
        return read_plain(path).get(name)
    return None


def check_structure(text: str) -> None:
    """Refuse text that is never in a frozen config and could exhaust the reader's stack, or take hours.

    Raises:
        ValueError: it has aliases, or is nested too deeply.
        YAMLError: it is not YAML.
    """
    if "&" not in text and "*" not in text and _is_shallow(text):
        return  # without scanning its tokens, which takes as long as reading it
    depth = 0
    for event in yaml.parse(text, Loader=Loader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"the alias *{event.anchor} refers to another part of the file")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def _is_shallow(text: str) -> bool:
    """Return whether the text is certainly not nested deeply, by its brackets and indentation."""
    flow = text.count("[") + text.count("{")
    block = max(len(line) - len(line.lstrip(" -?:")) for line in text.splitlines() or [""])
    return flow + block < MAX_DEPTH // 3


def copied(node: Any) -> Any:
    """Copy the dictionaries and lists in `node`."""
    if isinstance(node, dict):
        return {name: copied(part) for name, part in node.items()}
    return [copied(part) for part in node] if isinstance(node, list) else node


def escaped(node: Any) -> Any:
    """Escape `${` in resolved values, so that OmegaConf reads them back unchanged."""
    return _rewritten(node, lambda text: re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


def _unescaped(node: Any) -> Any:
    """Undo `escaped`."""
    return _rewritten(node, lambda text: re.sub(r"((?:\\\\)*)\\\$\{", lambda m: m[1][::2] + "${", text))


def _rewritten(node: Any, rewrite: Callable[[str], str]) -> Any:
    """Rewrite every string in `node` except keys."""
    if isinstance(node, dict):
        return {key: _rewritten(value, rewrite) for key, value in node.items()}
    if isinstance(node, list):
        return [_rewritten(value, rewrite) for value in node]
    return rewrite(node) if isinstance(node, str) else node
