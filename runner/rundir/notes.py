"""Read and add users' notes on a run, and read the note and tags from its config. Imports no torch.

    added_notes/1764288000.123456-1234-89abcdef.json   one note: its time and text

Nothing here needs the run's lease, because each note is a new file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from runner.errors import RunDirError
from runner.rundir.paths import RunDir
from runner.system import clock, files, processes

MAX_LENGTH = 2000  # characters of a note


@dataclass(frozen=True)
class Note:
    """A note. `time` is in seconds since 1970, from the clock of the machine that wrote it."""

    time: float
    text: str


def add(run: RunDir, text: str) -> None:
    """Add a note to a run.

    Raises:
        RunDirError: the run was moved or removed.
        OSError: the file system refused.
    """
    now = clock.wall()
    try:
        files.make_dirs_in(run.path, run.notes)
        files.create(run.notes / f"{now:.6f}-{processes.tag()}.json", json.dumps({"time": now, "text": text}).encode())
    except FileNotFoundError:
        raise RunDirError(f"{run.path} was moved or removed meanwhile: rerun the command") from None


def notes(run: RunDir) -> list[Note]:
    """Read the notes that were added to a run, oldest first. Skip files that are not notes.

    Raises:
        OSError: they cannot be read.
    """
    try:
        names = files.list_dir(run.notes)
    except FileNotFoundError:
        return []
    records = [files.read_object(run.notes / name) for name in names if name.endswith(".json")]
    found = [Note(float(one["time"]), one["text"]) for one in records if _is_note(one)]
    return sorted(found, key=lambda note: note.time)


def _is_note(record: dict[str, Any]) -> bool:
    return isinstance(record.get("text"), str) and isinstance(record.get("time"), int | float)
