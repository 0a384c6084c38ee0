"""Collect the labels of runs: tags, notes, and the settings that differ between runs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from runner.config.identity import ABSENT, as_text
from runner.config.plain_yaml import read_section
from runner.rundir.notes import notes
from runner.rundir.paths import RunDir

_VAGUE = ("_target_", "name", "path", "step", "steps", "start_step", "every", "size")
_BELOW_NAMES = (
    "sampler.weights.",
    "data.sources.",
    "data.eval_sources.",
    "callbacks.",
    "fork.",
    "init_from.",
    "phases.",
    "user.",
)
"""Settings whose last word is ambiguous. Their short names include the word before it."""


def labels(run: RunDir) -> tuple[list[str], list[str]]:
    """Return the tags and notes of a run. Both are empty if the config cannot be parsed.

    Raises:
        OSError: the tags or notes cannot be read.
    """
    found: Any = None
    with suppress(ValueError):
        found = read_section(run.config, "run")
    settings = found if isinstance(found, dict) else {}
    tags, note = settings.get("tags"), settings.get("notes")
    texts = [note] if isinstance(note, str) else []
    return [str(tag) for tag in tags] if isinstance(tags, list) else [], [*texts, *(each.text for each in notes(run))]


def telling(settings: Sequence[Mapping[str, Any]], most: int = 4) -> list[str]:
    """Return the settings that distinguish the runs, those with the most values first.

    If several settings differ in the same way, return only one of them.

    Args:
        settings: the settings of each run by dotted key. Runs without settings are ignored.
        most: the maximum number of settings to return.
    """
    known = [each for each in settings if each]
    if len(known) < 2:
        return []
    keys = dict.fromkeys(key for each in known for key in each)
    first = known[0]
    differing = [key for key in keys if any(each.get(key, ABSENT) != first.get(key, ABSENT) for each in known)]
    found: dict[tuple[int, ...], str] = {}

    def order(key: str) -> tuple[bool, bool, int]:
        is_list = any(isinstance(each.get(key), list) for each in known)
        return is_list, key.startswith(("fork.", "init_from.")), len(key)

    for key in sorted(differing, key=order):
        numbers: dict[str, int] = {}
        values = (as_text(each[key]) if key in each else "" for each in known)
        found.setdefault(tuple(numbers.setdefault(value, len(numbers)) for value in values), key)
    return [found[each] for each in sorted(found, key=max, reverse=True)][:most]


def short_names(keys: Sequence[str], taken: Collection[str]) -> dict[str, str]:
    """Return the shortest suffixes of dotted keys that are unambiguous and distinct.

    Args:
        keys: the dotted keys of the settings.
        taken: names that are already used and must be avoided.
    """
    found = {}
    for key in keys:
        words = key.split(".")
        least = 2 if words[-1] in _VAGUE or key.startswith(_BELOW_NAMES) else 1
        parts = (".".join(words[-count:]) for count in range(least, len(words) + 1))
        found[key] = next(
            (
                part
                for part in parts
                if part not in taken and sum(f".{other}".endswith(f".{part}") for other in keys) == 1
            ),
            key,
        )
    return found
