"""Relative paths in a config are resolved against the directory of the command, wherever the job then runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from runner.system import files

# Arguments of dataset classes that hold a path or a list of paths.
PATH_KEYS = ("path", "paths", "file", "files", "folder", "directory", "root", "cache_dir")


def anchored(path: str, base: Path) -> str:
    """`path` made absolute against `base`; `~` is the home directory."""
    return str(base / Path(path).expanduser())


def anchor(plain: dict[str, Any], base: Path) -> None:
    """Make the paths of a resolved config absolute, in place.

    For a class of this package every value under a name in `PATH_KEYS` is a path. For a class of the user's it may
    be something else (the name of a dataset on a hub), so there it is a path only if that exists.
    """
    run, data = plain["run"], plain["data"]
    run["root"] = anchored(run["root"], base)
    if run["dir"] is not None:
        run["dir"] = anchored(run["dir"], base)
    if plain["init_from"]["path"] is not None:
        plain["init_from"]["path"] = os.path.abspath(anchored(plain["init_from"]["path"], base))
    if data["cache_dir"] is not None:
        data["cache_dir"] = anchored(data["cache_dir"], base)
    for node in (data["sources"], data["eval_sources"], data["loader"]):
        _anchor_node(node, base, shipped=False)


def _anchor_node(node: Any, base: Path, shipped: bool) -> None:
    if isinstance(node, list):
        for item in node:
            _anchor_node(item, base, shipped)
    if not isinstance(node, dict):
        return
    shipped = str(node["_target_"]).startswith("runner.") if "_target_" in node else shipped
    for key, value in node.items():
        if key not in PATH_KEYS:
            _anchor_node(value, base, shipped)
        elif isinstance(value, str):
            node[key] = _path(value, base, shipped)
        elif isinstance(value, list):
            node[key] = [_path(item, base, shipped) if isinstance(item, str) else item for item in value]


def _path(value: str, base: Path, shipped: bool) -> str:
    if "://" in value:
        return value
    path = anchored(value, base)
    return path if shipped or files.exists(path) else value
