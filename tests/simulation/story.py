"""Write a story as text for a person: its events, and the last calls before a promise was broken."""

from __future__ import annotations

from collections.abc import Iterator

from simulation.disk import ROOT
from simulation.engine import Event
from simulation.scenario import Story
from simulation.schedule import Schedule

LAST_CALLS = 15
"""Number of single calls shown before the break."""


def replay(name: str, schedule: Schedule) -> str:
    """Return the command that replays a story of the scenario `name`."""
    return f'make simulate ARGS="{arguments(name, schedule)}"'


def arguments(name: str, schedule: Schedule) -> str:
    """Return the arguments of that command."""
    return f"--scenario {name} {_options(schedule)}"


def _options(schedule: Schedule) -> str:
    options = f"--seed {schedule.text}"
    if schedule.without:
        options += f" --without {','.join(map(str, sorted(schedule.without)))}"
    if schedule.switching is not None:
        options += f" --switching {schedule.switching}"
    return options


def lines(name: str, story: Story, *, calls: bool = False) -> Iterator[str]:
    """Yield the text of a story line by line.

    Args:
        name: name of the scenario.
        story: the story to write.
        calls: whether to show every single call, not only the last ones before the break.
    """
    strikes = len(story.schedule.carried_out)
    yield (
        f"{name} {_options(story.schedule)}: {strikes} strike{'s' * (strikes != 1)}, {story.steps:,} calls, "
        f"{_duration(story):.1f} s in the simulated world"
    )
    yield ""
    shown = _shown(story, calls)
    width = max((len(event.who) for event in shown), default=0)
    for event in shown:
        first, *rest = _plain(event.what).splitlines() or [""]
        # A single call looks different from an event.
        before = f"{event.time - _began(story):9.3f} s  {event.who:{width}}  {'' if event.shown else '  · '}"
        yield f"{before}{first}".rstrip()
        yield from (f"{'':{len(before)}}{line}".rstrip() for line in rest)
    yield ""
    yield "every promise holds" if story.broken is None else f"broken: {_plain(story.broken).strip()}"


def _shown(story: Story, calls: bool) -> list[Event]:
    if calls:
        return story.events
    left = LAST_CALLS if story.broken is not None else 0
    found = []
    for event in reversed(story.events):
        if event.shown or left > 0:
            found.append(event)
            left -= not event.shown
    return found[::-1]


def _plain(text: str) -> str:
    return text.replace(f"{ROOT}/", "").replace(ROOT, "/")


def _began(story: Story) -> float:
    return story.events[0].time if story.events else 0.0


def _duration(story: Story) -> float:
    return story.events[-1].time - _began(story) if story.events else 0.0
