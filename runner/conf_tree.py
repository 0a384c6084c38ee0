"""Where the config files are, and what they offer. Imports nothing but the standard library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def conf_dir() -> Path:
    """The shipped configs: `conf/` of a clone, or `runner/conf/` where the package was installed."""
    package = Path(__file__).resolve().parent
    installed = package / "conf"
    return installed if installed.is_dir() else package.parent / "conf"


def groups(directories: Sequence[Path]) -> dict[str, list[str]]:
    """The config groups in `directories` with their options, by name."""
    found: dict[str, set[str]] = {}
    for directory in directories:
        for path in directory.glob("*/**/*.yaml"):
            found.setdefault(path.parent.relative_to(directory).as_posix(), set()).add(path.stem)
    return {group: sorted(found[group]) for group in sorted(found)}
