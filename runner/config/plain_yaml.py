"""Read a run's config.yaml as plain values. This is fast: it uses the YAML reader written in C, and not omegaconf."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from runner.system import files

MAX_BYTES = 8 << 20  # enough for 100,000 exclusions; most configs have a few thousand bytes
MAX_DEPTH = 100
CACHED = 1 << 14  # the number of config sections cached in memory, for reading and writing
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
    """Read YAML as OmegaConf does: 1e-3 is a number, a date is a string, and duplicate keys are errors."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Construct a dictionary. PyYAML calls this.

        Raises:
            ConstructorError: a key occurs twice.
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
    """Return the resolved values of a frozen config file.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a frozen config.
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
    """Return the values in a config's text. Callers share them, so do not modify them.

    Top-level entries are parsed one by one if possible, because the runs of a sweep share most of them.

    Raises:
        ValueError: the text is not a frozen config.
        YAMLError: the text is not YAML.
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
    """Split a config into its top-level entries, each a YAML string.

    Raises:
        ValueError: the text is not in the format that `runner.config.frozen.to_yaml` writes.
    """
    if _NOT_OURS.search(text):
        raise ValueError("not written by this program")
    return [part for part in _TOP_LEVEL.split(text) if part]


@lru_cache(maxsize=CACHED)
def section(text: str) -> tuple[str, Any]:
    """Return the name and the value of a single top-level entry.

    Raises:
        ValueError: the text does not have exactly one entry.
        YAMLError: the text is not YAML.
    """
    ((name, value),) = yaml.load(text, Loader=Loader).items()
    return name, value


def read_section(path: Path, name: str) -> Any:
    """Read one top-level entry of a frozen config. Return None if it is missing.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a frozen config.
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
    """Reject text that no frozen config contains and that could exhaust the reader's stack or take hours to read.

    Raises:
        ValueError: the text has aliases, or is nested too deeply.
        YAMLError: the text is not YAML.
    """
    if "&" not in text and "*" not in text and _is_shallow(text):
        return  # skips scanning the tokens, which takes as long as reading the text
    depth = 0
    for event in yaml.parse(text, Loader=Loader):
        if isinstance(event, yaml.AliasEvent):
            raise ValueError(f"the alias *{event.anchor} refers to another part of the file")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} levels deep")


def _is_shallow(text: str) -> bool:
    """Return True if brackets and indentation prove that the text is not deeply nested."""
    flow = text.count("[") + text.count("{")
    block = max(len(line) - len(line.lstrip(" -?:")) for line in text.splitlines() or [""])
    return flow + block < MAX_DEPTH // 3


def copied(node: Any) -> Any:
    """Copy `node` with all nested dictionaries and lists."""
    if isinstance(node, dict):
        return {name: copied(part) for name, part in node.items()}
    return [copied(part) for part in node] if isinstance(node, list) else node


def escaped(node: Any) -> Any:
    """Escape `${` in resolved values, so that OmegaConf reads them back unchanged."""
    return _rewritten(node, lambda text: re.sub(r"(\\*)\$\{", r"\1\1\\${", text))


def _unescaped(node: Any) -> Any:
    """Reverse the effect of `escaped`."""
    return _rewritten(node, lambda text: re.sub(r"((?:\\\\)*)\\\$\{", lambda m: m[1][::2] + "${", text))


def _rewritten(node: Any, rewrite: Callable[[str], str]) -> Any:
    """Apply `rewrite` to every string in `node` except keys."""
    if isinstance(node, dict):
        return {key: _rewritten(value, rewrite) for key, value in node.items()}
    if isinstance(node, list):
        return [_rewritten(value, rewrite) for value in node]
    return rewrite(node) if isinstance(node, str) else node
