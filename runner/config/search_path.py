"""Where the config files are, and which groups and options they define. Imports neither Hydra nor OmegaConf."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runner.system import files


def conf_dir() -> Path:
    """The shipped configs: `conf/` of a clone, `runner/conf/` of an installed package."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def groups(directories: Sequence[Path]) -> dict[str, list[str]]:
    """The config groups in `directories`: name -> the names of its options, both sorted."""
    found: dict[str, set[str]] = {}
    for directory in directories:
        for path, _, names in files.walk(directory, followlinks=True):
            group = Path(path).relative_to(directory).as_posix()
            if options := {Path(name).stem for name in names if name.endswith(".yaml") and group != "."}:
                found.setdefault(group, set()).update(options)
    return {group: sorted(found[group]) for group in sorted(found)}
