"""Run `make simulate`: the runner's code in a simulated world, under many schedules, or one schedule again.

make simulate ARGS="--schedules 2000"
make simulate ARGS="--scenario lease --seed 17.3"
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from random import SystemRandom
from typing import TYPE_CHECKING, Any

from runner.cli.base.console import console, print_errors
from runner.errors import ExitStatus, UserError, nearest
from runner.system import processes
from simulation.scenario import Story, play
from simulation.scenarios import SCENARIOS, find, schedule
from simulation.search import Failure, Found, search
from simulation.shrink import shrink
from simulation.story import lines, replay

if TYPE_CHECKING:
    from rich.console import Console

ALL = "all"
DEFAULT_SCHEDULES = 1000
SEEDS = 10**9  # a search without --seed starts at a random number below this one
MAX_MINUTES = 60 * 24 * 30
SAME_EVERYWHERE = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
"""Variables that make a seed the same story in every process: they fix the order of sets and of sums."""
DESCRIPTION = """\
Play schedules of simulated processes, which run the runner's own code: who continues when, and what befalls whom,
follows from a seed. With --seed, and without --schedules and --minutes, tell the story of one schedule.
"""
EPILOG = """\
Scenarios
{scenarios}

Examples
  make simulate ARGS="--minutes 10"                     look for a schedule that breaks a promise
  make simulate ARGS="--scenario lease --seed 17.3"     tell the story of one schedule

Exit status: 0 every promise holds; 1 one is broken; 2 an error in the command.
"""


@dataclass(frozen=True)
class Options:
    """The command line."""

    scenarios: tuple[str, ...]
    seed: str | None
    schedules: int | None
    minutes: float | None
    without: tuple[int, ...]
    switching: float | None
    calls: bool
    workers: int
    keep_going: bool
    json: bool

    @property
    def replays(self) -> bool:
        """Return whether to replay one story instead of searching."""
        return self.seed is not None and self.schedules is None and self.minutes is None


def main(arguments: Sequence[str]) -> int:
    """Run the command and return its exit status. Print one line for an error in the arguments."""
    try:
        return _run(arguments)
    except UserError as error:
        return print_errors(error)


def _run(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    if any(processes.environment.get(name) != value for name, value in SAME_EVERYWHERE.items()):
        sys.stdout.flush()
        command = [sys.executable, "-m", "simulation", *arguments]
        processes.become(sys.executable, command, {**processes.environment, **SAME_EVERYWHERE})
    return _replay(options) if options.replays else _search(options)


def parse(arguments: Sequence[str]) -> Options:
    """Parse the arguments.

    Raises:
        UserError: one of them is invalid.
    """
    given = _parser().parse_args(list(arguments))
    if given.scenario not in (ALL, *SCENARIOS):
        raise UserError(
            f"--scenario {given.scenario}: no such scenario{nearest(given.scenario, SCENARIOS)}; "
            f"choose from {', '.join((*SCENARIOS, ALL))}"
        )
    if given.schedules is not None and given.schedules < 1:
        raise UserError(f"--schedules {given.schedules}: must be 1 or more")
    if given.minutes is not None and not 0 < given.minutes <= MAX_MINUTES:
        raise UserError(f"--minutes {given.minutes:g}: must be more than 0 and at most {MAX_MINUTES:,}")
    if given.workers is not None and not 1 <= given.workers <= 1024:
        raise UserError(f"--workers {given.workers}: must be from 1 to 1024")
    if given.switching is not None and not 0 <= given.switching <= 1:
        raise UserError(f"--switching {given.switching:g}: is a probability, from 0 to 1")
    options = Options(
        scenarios=tuple(SCENARIOS) if given.scenario == ALL else (given.scenario,),
        seed=given.seed,
        schedules=given.schedules,
        minutes=given.minutes,
        without=_numbers(given.without),
        switching=given.switching,
        calls=given.calls,
        workers=given.workers or processes.cores(),
        keep_going=given.keep_going,
        json=given.json,
    )
    _check_combination(options)
    return options


def _check_combination(options: Options) -> None:
    if options.replays:
        if len(options.scenarios) > 1:
            raise UserError(
                f"--seed {options.seed} alone tells one story: name its scenario with --scenario, one of "
                f"{', '.join(SCENARIOS)}; to search from there, set --schedules or --minutes"
            )
        if options.keep_going:
            raise UserError("--keep-going: is for a search, which takes --schedules or --minutes")
    else:
        if options.seed is not None and not (options.seed.isdecimal() and len(options.seed) <= 18):
            raise UserError(f"--seed {options.seed}: a search begins at a whole number of at most 18 digits")
        if options.without or options.switching is not None:
            raise UserError("--without and --switching: are for one story, that of --seed without --schedules")


def _numbers(text: str | None) -> tuple[int, ...]:
    numbers = [part.strip() for part in (text or "").split(",") if part.strip()]
    if not all(number.isdecimal() and len(number) < 6 for number in numbers):
        raise UserError(f"--without {text}: write numbers of strikes, such as 0,3")
    return tuple(sorted({int(number) for number in numbers}))


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, SCENARIOS))
    scenarios = "\n".join(f"  {name:{width}}  {about}" for name, about in SCENARIOS.items())
    parser = argparse.ArgumentParser(
        prog="python -m simulation",
        description=DESCRIPTION,
        epilog=EPILOG.format(scenarios=scenarios),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--scenario", default=ALL, metavar="NAME", help="which one; default: all, one after the other")
    add("--seed", metavar="S", help="the schedule to tell, or where a search begins; default: a random place")
    add("--schedules", type=int, metavar="N", help=f"how many to play of each; default: {DEFAULT_SCHEDULES:,}")
    add("--minutes", type=float, metavar="M", help="how long to play, all scenarios together")
    add("--workers", type=int, metavar="N", help="processes that play; default: one for each core")
    add("--keep-going", action="store_true", help="play all schedules, even after one has broken a promise")
    add("--calls", action="store_true", help="tell every single call, not only the last ones")
    add("--without", metavar="N,...", help="leave out strikes of the schedule, counted from 0")
    add("--switching", type=float, metavar="P", help="how likely another thread continues after a call")
    add("--json", action="store_true", help="print the result as JSON")
    return parser


# ---- one story


def _replay(options: Options) -> int:
    (name,) = options.scenarios
    assert options.seed is not None
    kind = find(name)
    story = play(kind, schedule(kind, options.seed, options.without, options.switching))
    if options.json:
        print(json.dumps(_story(name, story, options.calls), indent=2))
    else:
        shown = console()
        for line in lines(name, story, calls=options.calls):
            shown.print(line)
    return _status(story.broken is None)


def _status(good: bool) -> int:
    return int(ExitStatus.FINISHED if good else ExitStatus.FAILED)


def _story(name: str, story: Story, calls: bool) -> dict[str, Any]:
    return {
        "scenario": name,
        "seed": story.schedule.text,
        "without": sorted(story.schedule.without),
        "switching": story.schedule.switching,
        "broken": story.broken,
        "calls": story.steps,
        "events": [
            {"time": event.time, "who": event.who, "what": event.what} | ({"call": not event.shown} if calls else {})
            for event in story.events
            if event.shown or calls
        ],
        "replay": replay(name, story.schedule),
    }


# ---- a search


def _search(options: Options) -> int:
    shown = console(stderr=options.json)
    start = SystemRandom().randrange(SEEDS) if options.seed is None else int(options.seed)
    shown.print(f"from seed {start} on, with {options.workers} process{'es' * (options.workers > 1)}")
    limit = options.schedules
    if limit is None and options.minutes is None:
        limit = DEFAULT_SCHEDULES
    seconds = None if options.minutes is None else options.minutes * 60 / len(options.scenarios)
    results, good = [], True
    for name in options.scenarios:
        with _progress(shown, name, limit, seconds) as tell:
            found = search(
                name,
                start,
                schedules=limit,
                seconds=seconds,
                workers=options.workers,
                keep_going=options.keep_going,
                tell=tell,
            )
        shown.print(_summary(name, found))
        results.append(_result(name, start, found, shown, options))
        good = good and not found.broken
        if not good and not options.keep_going:
            break
    if options.json:
        print(json.dumps(results, indent=2))
    return _status(good)


def _summary(name: str, found: Found) -> str:
    verdict = "every promise holds" if not found.broken else f"{found.broken} broke a promise"
    return (
        f"{name}: {found.schedules:,} schedule{'s' * (found.schedules != 1)} in {found.seconds:.1f} s "
        f"({found.per_second:.0f} per second), {found.features:,} features: {verdict}"
    )


def _result(name: str, start: int, found: Found, shown: Console, options: Options) -> dict[str, Any]:
    failures = [_shrunk(name, failure, shown, options) for failure in found.failures.values()]
    return {
        "scenario": name,
        "seed": start,
        "schedules": found.schedules,
        "seconds": round(found.seconds, 3),
        "features": found.features,
        "broken": found.broken,
        "failures": failures,
    }


def _shrunk(name: str, failure: Failure, shown: Console, options: Options) -> dict[str, Any]:
    """Print the shortest story of a failure and the command that replays it."""
    kind = find(name)
    story = play(kind, schedule(kind, failure.seed))
    if story.broken is None:  # must not happen, but a report is better than an error here
        shown.print(f"seed {failure.seed} broke a promise in the search, but not again: {failure.broken}")
        return {"scenario": name, "seed": failure.seed, "broken": failure.broken, "replay": None}
    shortest = shrink(kind, story)
    shown.print()
    for line in lines(name, shortest, calls=options.calls):
        shown.print(line)
    shown.print(f"\nfound as seed {failure.seed}; the story above again: {replay(name, shortest.schedule)}\n")
    return _story(name, shortest, options.calls)


@contextmanager
def _progress(shown: Console, name: str, limit: int | None, seconds: float | None) -> Iterator[Any]:
    """Show a bar on a terminal, and nothing elsewhere."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}"), TimeElapsedColumn())
    with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as bar:
        task = bar.add_task(name, total=limit if limit is not None else seconds, text="")

        def tell(found: Found) -> None:
            done = found.schedules if limit is not None else found.seconds
            text = f"{found.schedules:,} schedules, {found.per_second:.0f} per second, {found.features:,} features"
            bar.update(task, completed=done, text=text)

        yield tell
