"""Find the shortest story of a failure: without unneeded strikes, and with fewer switches between threads."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from simulation.scenario import Scenario, Story, play
from simulation.schedule import Schedule

WORDS = 6
"""Number of words of a message that identify the broken promise."""
MOST = 200
"""Maximum number of stories played to shrink a failure."""
SWITCHING = (0.0, *(number / 500 for number in range(1, 9)), 0.02, 0.03, 0.05, 0.1, 0.2)
"""Probabilities of a switch to try. Even similar ones give different stories, and so more chances."""


def promise(broken: str) -> str:
    """Return the promise of a message: its first words without numbers, and the kind of error in a traceback."""
    lines = broken.strip().splitlines() or [""]
    words = " ".join(lines[0].split()[:WORDS])
    kind = f" {lines[-1].partition(':')[0]}" if len(lines) > 1 else ""
    return re.sub(r"\d+", "N", words + kind)


def length(story: Story) -> tuple[int, int, int]:
    """Return the length of a story for a person: strikes, lines shown, calls."""
    return len(story.schedule.carried_out), sum(event.shown for event in story.events), story.steps


def shrink(kind: type[Scenario], story: Story) -> Story:
    """Return the shortest story found that breaks the same promise as `story`, perhaps `story`.

    Args:
        kind: the scenario.
        story: a story that broke a promise.
    """
    return _Shrinking(kind, story).shortest()


class _Shrinking:
    def __init__(self, kind: type[Scenario], story: Story) -> None:
        assert story.broken is not None, "there is nothing to shrink"
        self._kind, self._story = kind, story
        self._promise = promise(story.broken)
        self._left = MOST

    def shortest(self) -> Story:
        best = self._without_strikes(self._story)
        for switching in SWITCHING:
            for without in dict.fromkeys((best.schedule.without, self._story.schedule.without)):
                found = self._broken(replace(best.schedule, without=without, switching=switching))
                if found is not None:
                    best = min(best, self._without_strikes(found), key=length)
        return best

    def _broken(self, schedule: Schedule) -> Story | None:
        """Return the story of a schedule if it breaks the same promise."""
        if self._left <= 0:
            return None
        self._left -= 1
        story = play(self._kind, schedule)
        return story if story.broken is not None and promise(story.broken) == self._promise else None

    def _without_strikes(self, story: Story) -> Story:
        """Leave out all strikes, half of them, a quarter, down to single ones, until none can be left out."""
        size = max(1, len(story.schedule.carried_out))
        while size:
            shorter = self._without_some(story, size)
            if shorter is None:
                size //= 2
            else:
                story = shorter
        return story

    def _without_some(self, story: Story, size: int) -> Story | None:
        schedule = story.schedule
        kept = [number for number in range(len(schedule.strikes)) if number not in schedule.without]
        for chunk in _chunks(kept, size):
            found = self._broken(replace(schedule, without=schedule.without | set(chunk)))
            if found is not None:
                return found
        return None


def _chunks(numbers: list[int], size: int) -> Iterable[list[int]]:
    return (numbers[at : at + size] for at in range(0, len(numbers), size))
