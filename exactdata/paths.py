"""Expand paths, folders and globs to files, and find the cache directory. Imports neither torch nor numpy."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from exactdata.errors import DataError


def cache_directory(cache_dir: str | Path | None = None) -> Path:
    """Return `cache_dir`. If None, return $RUNNER_CACHE, or ~/.cache/runner if that is not set."""
    return Path(cache_dir or os.environ.get("RUNNER_CACHE") or "~/.cache/runner").expanduser()


@contextmanager
def usable_cache(directory: Path, what: str) -> Iterator[None]:
    """Convert an OSError from a cache to a DataError with a remedy. A node may lack the home directory.

    Raises:
        DataError: the block raised an OSError.
    """
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{directory}: cannot prepare {what} here ({error.strerror or error}): set data.cache_dir or RUNNER_CACHE "
            "to a folder that every node can read and write, with enough space"
        ) from error


def expand(paths: str | Path | Sequence[str | Path], pattern: str | Sequence[str]) -> list[Path]:
    """Expand files, folders and globs to a list of files.

    Args:
        paths: one or more paths. Their order is kept.
        pattern: one or more glob patterns. In a folder, the files that match any of them are used, sorted by name.

    Raises:
        DataError: a path does not exist, or a folder or glob has no matching file.
    """
    entries = [paths] if isinstance(paths, str | Path) else list(paths)
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    files: list[Path] = []
    for entry in entries:
        path = Path(entry).expanduser()
        if path.is_file():
            found = [path]
        elif path.is_dir():
            found = sorted({file for each in patterns for file in path.glob(each) if file.is_file()})
        else:
            found = _glob(path)
        if not found:
            wanted = " or ".join(map(repr, patterns))
            problem = f"has no file that matches {wanted}" if path.is_dir() else "does not exist"
            raise DataError(f"{path}: {problem}: check the path; relative paths start at {Path.cwd()}")
        files.extend(found)
    if not files:
        raise DataError("paths is empty: name files, folders or globs")
    return files


def _glob(path: Path) -> list[Path]:
    parts = path.parts
    wild = next((i for i, part in enumerate(parts) if any(c in part for c in "*?[")), None)
    if wild is None:
        return []
    return sorted(file for file in Path(*parts[:wild]).glob(str(Path(*parts[wild:]))) if file.is_file())
