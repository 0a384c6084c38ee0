"""The tags and the notes of a run: those of its config, and the notes that were added later."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from runner.config.plain_yaml import read_section
from runner.rundir.notes import notes
from runner.rundir.paths import RunDir


def labels(run: RunDir) -> tuple[list[str], list[str]]:
    """Return the tags and the notes of a run; a config that cannot be parsed has none.

    Raises:
        OSError: they cannot be read.
    """
    found: Any = None
    with suppress(ValueError):
        found = read_section(run.config, "run")
    settings = found if isinstance(found, dict) else {}
    tags, note = settings.get("tags"), settings.get("notes")
    texts = [note] if isinstance(note, str) else []
    return [str(tag) for tag in tags] if isinstance(tags, list) else [], [*texts, *(each.text for each in notes(run))]
