"""Finds run directories."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from runner.errors import RunDirError
from runner.rundir.paths import RunDir
from runner.system import files

RUN_FILES = {"config.yaml", "status.json", "attempts.jsonl"}
"""What makes a directory that of a run, one of which may be missing."""


def run_dir(path: str | os.PathLike[str]) -> RunDir:
    """Return the run at a path, with an absolute one.

    Raises:
        RunDirError: there is none.
    """
    found = RunDir(Path(path).absolute())
    if not files.is_file(found.config):
        raise RunDirError(
            f"{path} is not a run directory, which has a config.yaml: pass a directory such as outputs/NAME"
        )
    return found


def find_runs(root: Path, on_error: Callable[[OSError], object] | None = None) -> Iterator[RunDir]:
    """Yield the run directories at and below `root`, in the order of their paths.

    Args:
        root: the directory.
        on_error: called for each directory that cannot be read.
    """
    for directory, children, names in files.walk(root, onerror=on_error):
        present = RUN_FILES.intersection((*names, *children))
        if present and not (present == {"config.yaml"} and _composes(Path(directory) / "config.yaml")):
            children.clear()
            yield RunDir(Path(directory))
        children[:] = sorted(child for child in children if not child.startswith("."))


def _composes(config: Path) -> bool:
    """Tell whether a config.yaml is one that others are composed from, as in a project's conf, and not a run's."""
    try:
        return re.search(rb"^defaults:", files.read_regular(config), re.MULTILINE) is not None
    except OSError:
        return False
