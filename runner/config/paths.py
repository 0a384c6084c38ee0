"""Resolve relative paths in a config against the command's working directory, wherever the job runs later.

The config contains the absolute path, which the job reads. Under `run.typed` it also contains the path as typed, which
is part of the run's identity. Therefore the identity does not depend on whether the path exists yet.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.system import files

# Dataset arguments that are a path or a list of paths.
PATH_KEYS = ("path", "paths", "file", "files", "folder", "directory", "root", "cache_dir")
# Dataset arguments that are a path or other text. They are treated as a path only if it exists.
PATHS_OR_WORDS = ("tokenizer", "chat_template")


def anchored(path: str, base: Path) -> str:
    """Return `path` as an absolute path, resolved against `base`. `~` is replaced with the home directory."""
    return str(base / Path(path).expanduser())


def anchor(plain: dict[str, Any], base: Path) -> None:
    """Make the paths in a resolved config absolute, in place. Record the working directory and the paths as typed.

    For a class of this package, every value with a key in `PATH_KEYS` is a path. For a user's class, such a value may
    be something else, e.g. the name of a dataset on a hub. It is therefore treated as a path only if the path exists.
    This does not affect the identity of the run.
    """
    run, data = plain["run"], plain["data"]
    before = Path(run["directory"]) if run["directory"] else base
    run["root"] = anchored(run["root"], base)
    if run["dir"] is not None:
        run["dir"] = anchored(run["dir"], base)
    if plain["init_from"]["path"] is not None:
        plain["init_from"]["path"] = os.path.abspath(anchored(plain["init_from"]["path"], base))
    if data["cache_dir"] is not None:
        data["cache_dir"] = anchored(data["cache_dir"], base)
    typed: dict[str, Any] = {}
    for group in ("sources", "eval_sources", "loader"):
        for key, name, node, shipped in _paths(data[group], f"data.{group}", shipped=False):
            value, known = node[name], run["typed"].get(key)
            if known is not None and value in (known, _absolute(known, before, shipped)):  # frozen and unchanged
                typed[key], node[name] = known, _absolute(known, before, shipped)
                continue
            node[name] = _absolute(value, base, shipped)
            if name in PATHS_OR_WORDS and node[name] == value:
                continue
            if any(not os.path.isabs(text) for text in _texts(value)):
                typed[key] = value
    run["typed"], run["directory"] = typed, str(before)


def relocate(plain: dict[str, Any], run_dir: Path) -> None:
    """Resolve the paths in a frozen config again, in place, if the run was moved or copied together with its project.

    A project has moved if two conditions hold. The run directory has the same relative path in some new directory as it
    had in the working directory of the command. And every path, as typed, exists relative to that new directory.
    """
    run, base = plain["run"], None
    with suppress(TypeError, ValueError):  # an old or edited config has no directory, or the run was not in it
        inside = Path(run["dir"]).relative_to(run["directory"])
        if Path(run["dir"]) != run_dir and run_dir.parts[-len(inside.parts) :] == inside.parts:
            base = Path(*run_dir.parts[: -len(inside.parts)])
    texts = [text for value in run["typed"].values() for text in _texts(value)]
    if base is None or not texts or not all(files.exists(anchored(text, base)) for text in texts):
        return
    for group in ("sources", "eval_sources", "loader"):
        for key, name, node, _ in _paths(plain["data"][group], f"data.{group}", shipped=False):
            if key in run["typed"]:
                node[name] = _absolute(run["typed"][key], base, shipped=False)
    run["directory"] = str(base)


def _paths(node: Any, key: str, shipped: bool) -> Iterator[tuple[str, str, dict[str, Any], bool]]:
    """Yield (dotted key, last part of the key, its dictionary, whether its class is in this package) per path."""
    if isinstance(node, list):
        for number, item in enumerate(node):
            yield from _paths(item, f"{key}.{number}", shipped)
    if not isinstance(node, dict):
        return
    shipped = str(node["_target_"]).startswith("runner.") if "_target_" in node else shipped
    for name, value in node.items():
        if name in PATHS_OR_WORDS and isinstance(value, str) and value != "bytes":
            yield f"{key}.{name}", name, node, False
        elif name not in PATH_KEYS:
            yield from _paths(value, f"{key}.{name}", shipped)
        elif _texts(value):
            yield f"{key}.{name}", name, node, shipped


def _texts(value: Any) -> list[str]:
    """Return the paths in a value, without URLs."""
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str) and "://" not in text]


def _absolute(value: Any, base: Path, shipped: bool) -> Any:
    if isinstance(value, list):
        return [_absolute(item, base, shipped) for item in value]
    if not _texts(value):
        return value
    path = anchored(value, base)
    return path if shipped or files.exists(path) else value
