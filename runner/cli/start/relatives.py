"""Find the existing run most similar to a new one, because a typo in a setting would start a new run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner.cli.base.console import shown
from runner.config.composition import Composed
from runner.config.identity import ABSENT, as_text, identifying_values
from runner.config.plain_yaml import read_plain
from runner.rundir.paths import RunDir
from runner.rundir.state import modified
from runner.system import files

MOST = 3
"""Runs that differ in more settings than this are not similar."""
LOOKED_AT = 200
"""The maximum number of runs to read, newest first. Reading a run takes a millisecond or two."""


def nearest(job: Composed) -> str | None:
    """Describe the existing run in the same directory that differs least from a new one, with the differences.

    Return None if no run is similar.
    """

    def others() -> Iterator[tuple[Path, dict[str, Any]]]:
        for path in _beside(job.run_dir):
            with suppress(OSError, ValueError, LookupError, TypeError):  # only a hint, so malformed runs are skipped
                yield path, identifying_values(read_plain(RunDir(path).config))

    return closest(identifying_values(job.plain), others())


def closest(mine: Mapping[str, Any], others: Iterable[tuple[Path, Mapping[str, Any]]]) -> str | None:
    """Describe the directory that differs least from `mine`, or return None if no directory is similar.

    Args:
        mine: the settings of the new run, by dotted key.
        others: run directories with their settings. The description lists the differences.
    """
    found = []
    for path, other in others:
        pairs = {key: (other.get(key, ABSENT), mine.get(key, ABSENT)) for key in sorted(mine.keys() | other.keys())}
        changes = [f"{key} ({as_text(old)} → {as_text(new)})" for key, (old, new) in pairs.items() if old != new]
        if len(changes) <= MOST:
            how = f"differs from {shown(path)} only in {', '.join(changes)}"
            found.append((len(changes), f"new: {how if changes else f'{shown(path)} has the same settings'}"))
    return min(found, key=lambda each: each[0])[1] if found else None


def _beside(run_dir: Path) -> list[Path]:
    """List the newest runs in the same directory, newest first."""
    timed = []
    with suppress(OSError):
        for name in files.list_dir(run_dir.parent):
            path = run_dir.parent / name
            if path != run_dir and not name.startswith(".") and files.is_file(RunDir(path).config):
                timed.append((modified(RunDir(path).config) or 0.0, path))
    return [path for _, path in sorted(timed, reverse=True)[:LOOKED_AT]]
