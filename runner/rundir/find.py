"""Find run directories and searches below a directory."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from pathlib import Path

from runner.errors import RunDirError
from runner.rundir.paths import RunDir
from runner.system import files

RUN_FILES = {"config.yaml", "status.json", "attempts.jsonl"}
"""Files of a run directory; one of them is enough."""
SEARCH_FILES = {"search.json", "journal.jsonl"}
"""Files of a search's directory; it has both."""


def run_dir(path: str | os.PathLike[str]) -> RunDir:
    """Return the run at a path, which is made absolute.

    Raises:
        RunDirError: there is no run at the path.
    """
    found = RunDir(Path(path).absolute())
    if not files.is_file(found.config):
        raise RunDirError(f"{path} is not a run directory, which has a config.yaml: {what_to_pass(Path(path))}")
    return found


def what_to_pass(path: Path) -> str:
    """Suggest which path to pass instead of `path`, which is not a run directory."""
    with suppress(OSError):
        names = files.list_dir(path)
        if is_search(names):
            return f"it is a search, whose runs are beside it: python -m runner search {path} lists them"
        if runs := sorted(name for name in names if files.is_file(RunDir(path / name).config)):
            return f"it holds runs, such as {path / runs[0]}"
    return "pass a directory such as outputs/NAME"


def find_runs(root: Path, on_error: Callable[[OSError], object] | None = None) -> Iterator[RunDir]:
    """Yield the run directories at and below `root`, ordered by path.

    If `root` is a search, yield its runs, which are next to it.

    Args:
        root: the directory.
        on_error: called for each directory that cannot be read.
    """
    for directory, children, names in files.walk(root, onerror=on_error):
        if is_search(names):  # a search's slots are not runs, and its runs are next to it
            children.clear()
            if Path(directory) == root:
                yield from _of_search(root)
            continue
        present = RUN_FILES.intersection((*names, *children))
        if present and not (present == {"config.yaml"} and _composes(Path(directory) / "config.yaml")):
            children.clear()
            yield RunDir(Path(directory))
        children[:] = sorted(child for child in children if not child.startswith("."))


def is_search(names: Collection[str]) -> bool:
    """Check whether a directory with these file names is a search."""
    return SEARCH_FILES.issubset(names)


def base_of(root: Path) -> Path:
    """Return the directory that run names are relative to: `root`, or its parent if `root` is a search."""
    return root.parent if all(files.is_file(root / name) for name in SEARCH_FILES) else root


def _of_search(root: Path) -> Iterator[RunDir]:
    """Yield the runs that a search's journal names."""
    lines = files.read_lines(root / "journal.jsonl", having=b'"run"')
    names = dict.fromkeys(line["run"] for line in lines if isinstance(line, dict) and isinstance(line.get("run"), str))
    for name in sorted(names):
        if files.is_dir(path := Path(os.path.normpath(root.parent / name))):
            yield RunDir(path)


def _composes(config: Path) -> bool:
    """Check whether a config.yaml has a defaults list. If so, it belongs to a project's conf, not to a run."""
    try:
        return re.search(rb"^defaults:", files.read_regular(config), re.MULTILINE) is not None
    except OSError:
        return False


def find_searches(root: Path) -> Iterator[Path]:
    """Yield the directories of searches at and below `root`, ordered by path.

    Run directories are not descended into.
    """
    for directory, children, names in files.walk(root):
        if is_search(names):
            yield Path(directory)
        is_run = is_search(names) or RUN_FILES.intersection(names)
        children[:] = [] if is_run else sorted(child for child in children if not child.startswith("."))
