"""Find the config files, and the groups and options that they define. Imports neither Hydra nor OmegaConf."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runner.errors import UserError
from runner.system import files

PROJECT = "pyproject.toml"


def conf_dir() -> Path:
    """Return the directory of the shipped configs: `conf/` in a clone, `runner/conf/` in an installed package."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def project_dirs() -> list[Path]:
    """Return the config directory that pyproject.toml in the current directory names, as a list of at most one entry.

        [tool.runner]
        config_dir = "conf"

    Raises:
        UserError: the file cannot be read, or the directory does not exist.
    """
    try:
        text = files.read_regular(Path(PROJECT)).decode()
        tools: Any = tomllib.loads(text).get("tool")
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{PROJECT} in the current directory cannot be read ({reason}): fix it") from None
    options = tools.get("runner") if isinstance(tools, dict) else None
    given = options.get("config_dir") if isinstance(options, dict) else None
    if given is None:
        return []
    if not isinstance(given, str) or not files.is_dir(Path(given)):
        raise UserError(
            f"{PROJECT}: tool.runner.config_dir={given!r} is not a directory: create it, or remove the line"
        )
    return [Path(given)]


def groups(directories: Sequence[Path]) -> dict[str, list[str]]:
    """Return the config groups in `directories`, each with the names of its options, both sorted."""
    found: dict[str, set[str]] = {}
    for directory in directories:
        for path, _, names in files.walk(directory, followlinks=True):
            group = Path(path).relative_to(directory).as_posix()
            if options := {Path(name).stem for name in names if name.endswith(".yaml") and group != "."}:
                found.setdefault(group, set()).update(options)
    return {group: sorted(found[group]) for group in sorted(found)}
