"""Check the search for a broken promise, the shrinking of its story, and the command `make simulate`."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from runner.errors import ExitStatus
from simulation import story as stories
from simulation.brought_back import FAULTS
from simulation.command import SAME_EVERYWHERE, parse
from simulation.command import main as command
from simulation.disk import ROOT
from simulation.leases import Leases
from simulation.playing import command as in_a_process
from simulation.scenario import play
from simulation.scenarios import SCENARIOS, find, schedule
from simulation.search import Explorer, search
from simulation.shrink import length, promise, shrink


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overwrite files instead of replacing them, and limit the attempts to shorten a story."""
    FAULTS["in-place"].apply(monkeypatch)
    monkeypatch.setattr("simulation.shrink.SWITCHING", (0.0, 0.02))


def test_search_repeats_by_its_seed_and_mutates_the_new() -> None:
    texts = []
    for _ in range(2):
        explorer = Explorer(Leases, 5, near=["2.9"])
        texts.append([explorer.play()[0].schedule.text for _ in range(12)])
    assert texts[0] == texts[1]
    assert texts[0][0] == "2.9"
    fresh = [text for text in texts[0] if "." not in text]
    assert fresh == [str(5 + number) for number in range(len(fresh))]
    assert 2 < len(fresh) < 10
    assert {text.split(".")[0] for text in texts[0]} == {"2", *fresh}


@pytest.mark.usefixtures("faulty")
@pytest.mark.slow
def test_search_stops_at_a_failure_unless_told_to_continue() -> None:
    found = search("lease", 0, schedules=300)
    (failure,) = found.failures.values()
    assert found.broken == 1
    assert found.schedules < 300
    assert play(Leases, schedule(Leases, failure.seed)).broken == failure.broken
    more = search("lease", 0, schedules=found.schedules + 2, keep_going=True)
    assert more.schedules == found.schedules + 2


@pytest.mark.usefixtures("faulty")
def test_shrunk_story_keeps_the_failure_and_replays() -> None:
    (failure,) = search("lease", 17, schedules=100).failures.values()
    story = play(Leases, schedule(Leases, failure.seed))
    shortest = shrink(Leases, story)
    assert story.broken is not None
    assert shortest.broken is not None
    assert promise(shortest.broken) == promise(story.broken)
    assert length(shortest) < length(story)
    options = parse(stories.arguments("lease", shortest.schedule).split())
    again = play(Leases, schedule(Leases, options.seed or "", options.without, options.switching))
    assert again.events == shortest.events
    for number, _ in enumerate(shortest.schedule.strikes):  # every remaining strike is needed
        fewer = replace(shortest.schedule, without=shortest.schedule.without | {number})
        if fewer != shortest.schedule:
            broken = play(Leases, fewer).broken
            assert broken is None or promise(broken) != promise(story.broken)


def test_promise_is_recognised_by_its_first_words() -> None:
    assert promise("number 1 was given twice") == promise("number 23 was given twice")
    assert promise("value.json is lost") != promise("number 1 was given twice")
    first, second = (f"worker 1 ended with a traceback:\nTraceback\n{kind}: x" for kind in ("OSError", "KeyError"))
    assert promise(first) != promise(second)


def test_story_leaves_out_irrelevant_calls() -> None:
    good = play(Leases, schedule(Leases, "17"))
    told = list(stories.lines("lease", good))
    everything = list(stories.lines("lease", good, calls=True))
    assert told[-1] == "every promise holds"
    assert len(told) == sum(event.shown for event in good.events) + 4
    assert len(everything) == len(good.events) + 4
    assert not any(ROOT in line for line in everything)
    last = list(stories.lines("lease", replace(good, broken=f"{ROOT}/run is gone")))
    assert last[-1] == "broken: run is gone"
    assert sum(" · " in line for line in last) == stories.LAST_CALLS


# ---- the command


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the command in this process."""
    for name, value in SAME_EVERYWHERE.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("faulty", "here")
@pytest.mark.slow
def test_command_prints_the_shortest_story_and_its_seed(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--scenario", "lease", "--seed", "17", "--schedules", "100", "--workers", "1"]
    assert command(options) == ExitStatus.FAILED
    printed = capsys.readouterr().out
    told, _, replay = printed.partition("the story above again: make simulate ARGS=")
    words = replay.strip().strip('"').split()
    assert command(words) == ExitStatus.FAILED
    again = capsys.readouterr().out
    assert again in told
    assert again.splitlines()[-1].startswith("broken: value.json is ")
    assert command([*words, "--json"]) == ExitStatus.FAILED
    assert json.loads(capsys.readouterr().out)["broken"].startswith("value.json is ")


@pytest.mark.usefixtures("here")
def test_command_replays_one_story_or_searches(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--scenario", "lease", "--seed", "17"]) == ExitStatus.FINISHED
    assert capsys.readouterr().out.splitlines() == list(stories.lines("lease", play(Leases, schedule(Leases, "17"))))
    words = ["--scenario", "lease", "--seed", "17", "--schedules", "5", "--workers", "1", "--json"]
    assert command(words) == ExitStatus.FINISHED
    (result,) = json.loads(capsys.readouterr().out)
    assert (result["schedules"], result["broken"], result["failures"]) == (5, 0, [])


def test_search_without_time_plays_one_schedule() -> None:
    """Play at least one story, or a search on a busy machine would report that every promise holds."""
    assert search("lease", 0, schedules=9, seconds=0.0).schedules == 1


@pytest.mark.slow
def test_several_processes_share_a_search() -> None:
    done = in_a_process("simulation", "--scenario", "lease", "--schedules", "21", "--workers", "3", "--json")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    assert result["schedules"] == 21
    assert done.stderr.startswith("from seed ")


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_new_process_continues_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a replacement of a playing process does not change the schedules played."""
    alone = search("lease", 3, schedules=25, keep_going=True)
    monkeypatch.setattr("simulation.search.SHIFT", 10)
    in_turns = search("lease", 3, schedules=25, keep_going=True)
    assert replace(in_turns, seconds=0.0) == replace(alone, seconds=0.0)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--scenario leese", ["did you mean 'lease'?", "training", "all"]),
        ("--seed 17", ["--scenario", "lease"]),
        ("--scenario lease --seed 17.3 --schedules 5", ["whole number"]),
        ("--scenario lease --seed x", ["'x'", "17.3"]),
        ("--scenario lease --seed 17 --without 99", ["strike 99", "0 to "]),
        ("--scenario lease --seed 17 --without a", ["--without a"]),
        ("--without 1 --schedules 5", ["--seed"]),
        ("--schedules 0", ["1 or more"]),
        ("--minutes 0", ["more than 0"]),
        ("--minutes nan", ["more than 0"]),
        ("--workers 0", ["from 1 to"]),
        ("--scenario lease --seed 1 --switching 2", ["from 0 to 1"]),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_mistake_is_one_line(words: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(words.split()) == ExitStatus.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert [part for part in parts if part not in line] == []


def test_help_names_every_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command(["--help"])
    printed = capsys.readouterr().out
    assert [name for name in SCENARIOS if f"  {name} " not in printed] == []
    assert [find(name).name for name in SCENARIOS] == list(SCENARIOS)
