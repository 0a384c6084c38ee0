"""The simulated world keeps its own promises, and the runner's code keeps its promises in it."""

from __future__ import annotations

import builtins
import errno
import gc
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from new_seeds import new_seed

from runner.errors import ExitStatus
from runner.rundir import lease
from runner.system import clock, files, processes
from simulation import story as stories
from simulation.brought_back import FAULTS
from simulation.brought_back.measuring import measure
from simulation.command import SAME_EVERYWHERE, parse
from simulation.command import main as command
from simulation.disk import OLD_S, ROOT
from simulation.engine import Process, World
from simulation.leases import Leases
from simulation.scenario import Scenario, Story, play
from simulation.scenarios import SCENARIOS, find, schedule
from simulation.schedule import Schedule, Strike
from simulation.search import Explorer, search
from simulation.shrink import length, promise, shrink

HOME = Path(ROOT)
SEEDS = range(60)  # enough for each of the few things that may happen to have happened
FIXED = {"lease": 30, "training": 8, "jobs": 15, "custody": 20}  # schedules of the fast test
MORE = {"training": 60, "jobs": 120, "custody": 120}  # of the slow one
NEW = {"lease": 4000, "training": 1000, "jobs": 1500, "custody": 3000}
"""New schedules for each commit: some minutes. A search of many thousands has found nothing in any of them."""
CLONE = Path(__file__).resolve().parents[2]


def written(path: Path, content: bytes, *, synced: bool = True) -> None:
    fd = files.open_fd(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    files.write_all(fd, content)
    if synced:
        files.fsync_fd(fd)
    files.close_fd(fd)


class Small(Scenario):
    """A scenario of a test's own: see `played`."""

    name = "small"
    started: Callable[[Small], None]
    ended: Callable[[Small], None]

    def begin(self) -> None:
        type(self).started(self)

    def finish(self) -> None:
        type(self).ended(self)

    def on_end(self, process: Process) -> None:
        self.must(not process.errors, "".join(process.errors))


def played(
    started: Callable[[Small], object],
    ended: Callable[[Small], object] = lambda scenario: None,
    *,
    seed: int = 1,
    network: bool = False,
    strikes: tuple[Strike, ...] = (),
) -> Story:
    """The story of processes that `started` starts, of which `ended` says what must hold at its end."""
    kind = type("Made", (Small,), {"started": started, "ended": ended, "network": network})
    return play(kind, Schedule(str(seed), strikes))


def contents(scenario: Scenario) -> dict[str, bytes]:
    return {name.removeprefix(f"{ROOT}/"): data for name, data in scenario.disk.tree().items()}


# ---- the same seed


@pytest.mark.parametrize("text", ["0", "3", "17", "17.3.8"])
def test_a_schedule_is_the_same_story_to_the_last_call(text: str) -> None:
    first, second = (play(Leases, schedule(Leases, text)) for _ in range(2))
    assert first.events == second.events
    assert first.steps > 20


def test_another_schedule_is_another_story() -> None:
    """A mutation may change what would have come after the end."""
    seeds = [str(seed) for seed in range(10)]
    told = {text: tuple(play(Leases, schedule(Leases, text)).events) for seed in seeds for text in (seed, f"{seed}.1")}
    assert len({told[seed] for seed in seeds}) == len(seeds)
    assert len(set(told.values())) > 1.5 * len(seeds)


def simulate(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "simulation", *arguments]
    variables = {**os.environ, "PYTHONPATH": f"{CLONE}:{CLONE / 'tests'}", **environment}
    return subprocess.run(words, env=variables, capture_output=True, text=True, check=False, timeout=500)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_seed_is_the_same_story_in_every_process(name: str) -> None:
    """Whatever order sets have there, by which the command would otherwise differ from one call to the next."""
    told = [simulate("--scenario", name, "--seed", "17.3", "--calls", PYTHONHASHSEED=seed) for seed in ("1", "2")]
    assert [done.returncode for done in told] == [0, 0], told[0].stdout + told[0].stderr
    assert told[0].stdout == told[1].stdout
    assert told[0].stdout.endswith("every promise holds\n")


def test_nothing_of_a_story_is_left() -> None:
    """A search plays a million of them; and the real system layer is back afterwards."""

    def worlds() -> int:
        gc.collect()
        return sum(type(each) is World for each in gc.get_objects())

    modules, before = {each: dict(vars(each)) for each in (files, clock, processes, lease, builtins)}, worlds()
    for seed in range(3):
        play(Leases, schedule(Leases, str(seed)))
    assert worlds() <= before  # of other tests
    assert {module: dict(vars(module)) for module in modules} == modules


def test_a_module_that_is_imported_in_a_story_finds_the_threads_of_the_story() -> None:
    """Only for as long as the story lasts: then it is like any other."""
    module: dict[str, Any] = {"__name__": "runner.imported_late"}
    made: list[object] = []

    def start(scenario: Small) -> None:
        exec("import queue, threading", module)
        made.extend((module["threading"].Lock(), module["queue"].SimpleQueue()))

    assert played(start).broken is None
    assert not any(type(each) in (queue.SimpleQueue, type(threading.Lock())) for each in made)
    assert (module["threading"], module["queue"]) == (threading, queue)


# ---- processes


def test_two_processes_are_not_taken_for_one() -> None:
    """Both are threads of one real process, and must not write the same temporary file."""
    renamed: list[tuple[str, str]] = []

    def work() -> None:
        assert processes.own_pid() == processes.this_process()["pid"]
        files.write_atomic(HOME / "record", b"")

    def start(scenario: Small) -> None:
        scenario.disk.watchers.append(lambda what, path, to: renamed.append((what, Path(path).name)))
        for number in range(2):
            scenario.spawn(scenario.hosts[0], f"worker {number}", work)

    assert played(start).broken is None
    names = {name for what, name in renamed if what == "rename"}
    assert names == {"record.tmp-101-1000", "record.tmp-102-1000"}


def test_a_killed_process_changes_nothing_any_more() -> None:
    """Wherever it was, and whatever it would do at its end: no `finally` and no `except` of it writes a byte."""

    def work(scenario: Small) -> None:
        count = 0
        while True:
            try:
                clock.sleep(0.01)
                files.append_line(HOME / "lines", count)
                count += 1
            except BaseException:
                files.write_atomic(HOME / "caught", "x")
                raise
            finally:
                files.append_line(HOME / "finally", count)

    def start(scenario: Small) -> None:
        process = scenario.spawn(scenario.hosts[0], "worker 1", partial(work, scenario))

        def kill() -> None:
            scenario.world.kill(process)
            left.append(contents(scenario))

        scenario.world.at(scenario.random.uniform(0.1, 1.0), kill)
        scenario.world.at(5.0, lambda: None)  # time for what must not come

    for seed in range(20):
        left: list[dict[str, bytes]] = []

        def same(scenario: Small, left: list[dict[str, bytes]] = left) -> None:
            scenario.must(left == [contents(scenario)], f"{left[0]} became {contents(scenario)}")
            scenario.must("caught" not in left[0] and left[0]["lines"], "it was killed too early, or too late")

        assert played(start, same, seed=seed).broken is None


def test_a_frozen_process_goes_on() -> None:
    """And finds its clock, but nothing else, ahead."""
    times: list[float] = []

    def work() -> None:
        for _ in range(100):
            files.append_line(HOME / "lines", 1)
            times.append(clock.monotonic())

    def start(scenario: Small) -> None:
        scenario.spawn(scenario.hosts[0], "worker 1", work)

    def all_there(scenario: Small) -> None:
        scenario.must(contents(scenario)["lines"] == b"1\n" * 100, "some lines are missing")

    told = played(start, all_there, strikes=(Strike(60, "freeze", 0.0),))
    assert told.broken is None
    assert [event.what for event in told.events if event.shown][1:3] == ["is frozen", "continues"]
    assert max(after - before for before, after in pairwise(times)) > 0.2


@pytest.mark.parametrize("waits", ["for an event", "in turns"])
def test_a_story_that_does_not_end_is_a_broken_promise(waits: str) -> None:
    def wait() -> None:
        if waits == "for an event":
            threading.Event().wait()
        while True:
            clock.sleep(1.0)

    def start(scenario: Small) -> None:
        scenario.world.max_steps = 500
        scenario.spawn(scenario.hosts[0], "waiter", wait)
        if waits == "in turns":
            scenario.spawn(scenario.hosts[0], "other", lambda: [files.exists(HOME) for _ in range(1000)])

    broken = played(start).broken
    assert broken is not None
    assert broken.startswith("the story does not end: ")
    assert "waiter" in broken


# ---- files


def left_by(work: Callable[[Small], None], seed: int, network: bool, loses_power: bool) -> dict[str, bytes]:
    """What a process leaves behind that waits, once it has done something."""
    left = dict[str, bytes]()

    def start(scenario: Small) -> None:
        def do() -> None:
            work(scenario)
            threading.Event().wait()

        scenario.spawn(scenario.hosts[0], "worker 1", do)

    def end(scenario: Small) -> None:
        if loses_power:
            scenario.power_loss(scenario.hosts[0])
        else:
            scenario.world.kill(scenario.world.processes[0])
        left.update(contents(scenario))

    assert played(start, end, seed=seed, network=network).broken is None
    return left


def after_power_loss(work: Callable[[], None], seed: int) -> dict[str, bytes]:
    """What is left of what a process did before its machine lost power."""
    return left_by(lambda scenario: work(), seed, network=False, loses_power=True)


def test_a_power_loss_keeps_what_was_synced_and_may_lose_the_rest() -> None:
    def work() -> None:
        written(HOME / "kept", b"synced")
        files.fsync_dir(HOME)
        fd = files.open_fd(HOME / "kept", os.O_WRONLY | os.O_APPEND)
        files.write_all(fd, b" and not")
        written(HOME / "name", b"synced")
        written(HOME / "neither", b"data", synced=False)

    found = [after_power_loss(work, seed) for seed in SEEDS]
    assert all(left["kept"].startswith(b"synced") for left in found)
    assert {len(left["kept"]) for left in found} >= {len(b"synced"), len(b"synced and not")}
    assert {left.get("name") for left in found} == {None, b"synced"}  # a name that is there has what was synced
    assert {left.get("neither") for left in found} >= {None, b"", b"data"}


def test_a_rename_is_atomic() -> None:
    """After a power loss the name leads to the old content or to the new one, and never to none."""

    def work() -> None:
        written(HOME / "value", b"old")
        files.fsync_dir(HOME)
        written(HOME / "value.tmp", b"new")
        files.rename(HOME / "value.tmp", HOME / "value")

    assert {after_power_loss(work, seed)["value"] for seed in SEEDS} == {b"old", b"new"}


def test_what_the_runner_writes_atomically_survives_a_power_loss() -> None:
    def work() -> None:
        files.write_atomic(HOME / "value", "old")
        files.write_atomic(HOME / "value", "new")

    assert {after_power_loss(work, seed)["value"] for seed in SEEDS} == {b"new"}


@pytest.mark.parametrize("network", [False, True])
def test_only_a_network_file_system_has_old_listings(network: bool) -> None:
    """And those are of the last few seconds, never of one's own changes."""
    lags = []
    for seed in SEEDS:
        seen: list[float] = []
        created: list[float] = []

        def write(scenario: Small, created: list[float] = created) -> None:
            clock.sleep(5.0)
            files.write_atomic(HOME / "new", "")
            created.append(scenario.world.now)
            assert "new" in files.list_dir(HOME)

        def look(scenario: Small, seen: list[float] = seen) -> None:
            while "new" not in files.list_dir(HOME):
                clock.sleep(scenario.random.uniform(0.0, 0.5))
            seen.append(scenario.world.now)

        def start(scenario: Small, write: Any = write, look: Any = look) -> None:
            scenario.spawn(scenario.hosts[0], "writer", partial(write, scenario))
            scenario.spawn(scenario.hosts[-1], "reader", partial(look, scenario))

        assert played(start, seed=seed, network=network).broken is None
        lags.append(seen[0] - created[0])
    assert max(lags) < OLD_S + 1.0
    assert (max(lags) > 1.0) == network


def test_errors_come_from_the_calls_they_are_meant_for() -> None:
    found: list[int | None] = []

    def work(scenario: Small) -> None:
        assert scenario.world.current is not None
        scenario.world.current.process.fails.append((frozenset({"fsync"}), errno.EIO))
        try:
            files.write_atomic(HOME / "value", "x")
        except OSError as error:
            found.append(error.errno)
        files.write_atomic(HOME / "value", "y")

    def start(scenario: Small) -> None:
        scenario.spawn(scenario.hosts[0], "worker 1", partial(work, scenario))

    def one_file(scenario: Small) -> None:
        scenario.must(contents(scenario) == {"value": b"y"}, f"left: {contents(scenario)}")

    assert played(start, one_file).broken is None
    assert found == [errno.EIO]


def refused(scenario: Small, call: str, action: Callable[[], object]) -> None:
    """Do something in which the next such call gets EIO."""
    assert scenario.world.current is not None
    scenario.world.current.process.fails.append((frozenset({call}), errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        action()


@pytest.mark.parametrize(("again", "left"), [(b"", {b"old", b"old+"}), (b"!", {b"old+!"})])
def test_what_a_sync_has_refused_may_be_lost_though_a_second_one_succeeds(again: bytes, left: set[bytes]) -> None:
    """The kernel may take it for written, unless more is written there."""

    def work(scenario: Small) -> None:
        written(HOME / "value", b"old")
        files.fsync_dir(HOME)
        fd = files.open_fd(HOME / "value", os.O_WRONLY | os.O_APPEND)
        files.write_all(fd, b"+")
        refused(scenario, "fsync", partial(files.fsync_fd, fd))
        files.write_all(fd, again)
        files.fsync_fd(fd)
        assert files.read_bytes(HOME / "value") == b"old+" + again

    assert {left_by(work, seed, network=False, loses_power=True)["value"] for seed in SEEDS} == left


@pytest.mark.parametrize("network", [False, True])
def test_only_a_network_file_system_may_have_done_what_it_refused(network: bool) -> None:
    """A rename has taken place or not, and what was to be at the server at the close is there or not."""

    def work(scenario: Small) -> None:
        written(HOME / "old", b"x")
        refused(scenario, "rename", partial(files.rename, HOME / "old", HOME / "new"))
        if network:
            refused(scenario, "close", partial(written, HOME / "other", b"y", synced=False))

    found = [left_by(work, seed, network, loses_power=False) for seed in SEEDS]
    assert {name for left in found for name in left} == ({"old", "new", "other"} if network else {"old"})
    assert all(left.get("old", left.get("new")) == b"x" for left in found)
    assert {left.get("other") for left in found} == ({b"", b"y"} if network else {None})


# ---- search, shrinking, stories


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Writes do not ask whether the lease is still held."""
    FAULTS["no-check"].apply(monkeypatch)


def test_a_search_is_repeated_by_its_seed_and_mutates_what_was_new() -> None:
    texts = []
    for _ in range(2):
        explorer = Explorer(Leases, 5)
        texts.append([explorer.play()[0].schedule.text for _ in range(20)])
    assert texts[0] == texts[1]
    fresh = [text for text in texts[0] if "." not in text]
    assert fresh == [str(5 + number) for number in range(len(fresh))]
    assert 3 < len(fresh) < 18
    assert {text.split(".")[0] for text in texts[0]} == set(fresh)


@pytest.mark.usefixtures("faulty")
def test_a_search_stops_at_a_failure_unless_it_is_told_to_go_on() -> None:
    found = search("lease", 0, schedules=300)
    (failure,) = found.failures.values()
    assert found.broken == 1
    assert found.schedules < 300
    assert play(Leases, schedule(Leases, failure.seed)).broken == failure.broken
    more = search("lease", 0, schedules=found.schedules + 10, keep_going=True)
    assert more.schedules == found.schedules + 10


@pytest.mark.usefixtures("faulty")
def test_shrinking_keeps_the_failure_and_the_story_comes_back() -> None:
    (failure,) = search("lease", 17, schedules=500).failures.values()
    story = play(Leases, schedule(Leases, failure.seed))
    shortest = shrink(Leases, story)
    assert story.broken is not None
    assert shortest.broken is not None
    assert promise(shortest.broken) == promise(story.broken)
    assert length(shortest) < length(story)
    options = parse(stories.arguments("lease", shortest.schedule).split())
    again = play(Leases, schedule(Leases, options.seed or "", options.without, options.switching))
    assert again.events == shortest.events
    for number, _ in enumerate(shortest.schedule.strikes):  # none of the strikes that are left is superfluous
        fewer = replace(shortest.schedule, without=shortest.schedule.without | {number})
        if fewer != shortest.schedule:
            broken = play(Leases, fewer).broken
            assert broken is None or promise(broken) != promise(story.broken)


def test_a_promise_is_recognised_by_its_words() -> None:
    assert promise("number 1 was given twice") == promise("number 23 was given twice")
    assert promise("value.json is lost") != promise("number 1 was given twice")
    first, second = (f"worker 1 ended with a traceback:\nTraceback\n{kind}: x" for kind in ("OSError", "KeyError"))
    assert promise(first) != promise(second)


def test_a_story_is_told_without_the_calls_that_do_not_matter() -> None:
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
    """The command does not begin anew in another process."""
    for name, value in SAME_EVERYWHERE.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("faulty", "here")
def test_the_command_prints_the_shortest_story_and_how_to_bring_it_back(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--scenario", "lease", "--seed", "17", "--schedules", "500", "--workers", "1"]
    assert command(options) == ExitStatus.FAILED
    printed = capsys.readouterr().out
    told, _, replay = printed.partition("the story above again: make simulate ARGS=")
    words = replay.strip().strip('"').split()
    assert command(words) == ExitStatus.FAILED
    again = capsys.readouterr().out
    assert again in told
    assert again.splitlines()[-1].startswith("broken: number ")
    assert command([*words, "--json"]) == ExitStatus.FAILED
    assert json.loads(capsys.readouterr().out)["broken"].startswith("number ")


@pytest.mark.usefixtures("here")
def test_the_command_tells_one_story_or_searches(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--scenario", "lease", "--seed", "17"]) == ExitStatus.FINISHED
    assert capsys.readouterr().out.splitlines() == list(stories.lines("lease", play(Leases, schedule(Leases, "17"))))
    words = ["--scenario", "lease", "--seed", "17", "--schedules", "5", "--workers", "1", "--json"]
    assert command(words) == ExitStatus.FINISHED
    (result,) = json.loads(capsys.readouterr().out)
    assert (result["schedules"], result["broken"], result["failures"]) == (5, 0, [])


@pytest.mark.slow
def test_several_processes_share_a_search() -> None:
    done = simulate("--scenario", "lease", "--schedules", "21", "--workers", "3", "--json")
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout)
    assert result["schedules"] == 21
    assert done.stderr.startswith("from seed ")


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_process_that_takes_over_continues_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that play are replaced now and then, and nobody can tell from what was played."""
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


# ---- the scenarios


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_promise_holds_under_some_schedules(name: str) -> None:
    _assert_holds(name, 0, FIXED[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE)
def test_every_promise_holds_under_more_schedules(name: str) -> None:
    _assert_holds(name, 1_000, MORE[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", NEW)
def test_every_promise_holds_under_new_schedules(name: str) -> None:
    """The seed is at the top of what pytest prints, and in the message of a failure."""
    _assert_holds(name, new_seed(), NEW[name])


def _assert_holds(name: str, start: int, schedules: int) -> None:
    """By the command, in a process of its own: so that a failure is the same story again."""
    options = ["--scenario", name, "--seed", str(start), "--schedules", str(schedules), "--workers", "1"]
    done = simulate(*options)
    assert done.returncode == 0, f"{options}\n{done.stdout}\n{done.stderr}"
    assert f"{schedules:,} schedules" in done.stdout, done.stdout


QUICK = ("no-sweep", "no-check", "no-fsync", "no-fsync-of-names", "in-place", "process-number")


@pytest.fixture(scope="module")
def holds() -> Iterator[Callable[[str, int], None]]:
    """Whether the unchanged code keeps its promises under the schedules that found a fault."""
    known: dict[str, int] = {}

    def check(scenario: str, schedules: int) -> None:
        if known.get(scenario, 0) < schedules:
            _assert_holds(scenario, 0, schedules)
            known[scenario] = schedules

    yield check  # noqa: PT022


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_fault_is_found(name: str, holds: Callable[[str, int], None]) -> None:
    measured = measure(name, schedules=300)
    assert measured.found, f"{name} was not found in {measured.schedules} schedules"
    assert 0 < measured.lines <= 20, measured.text
    holds(FAULTS[name].scenario, measured.schedules)
