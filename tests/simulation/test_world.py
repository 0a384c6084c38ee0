"""Check the simulated world: repeatable stories, processes, threads, power losses, old listings."""

from __future__ import annotations

import builtins
import errno
import gc
import os
import queue
import threading
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from runner.rundir import lease
from runner.system import clock, files, processes
from simulation.disk import OLD_S, ROOT
from simulation.engine import Process, World
from simulation.leases import Leases
from simulation.scenario import Scenario, Story, play
from simulation.scenarios import find, schedule
from simulation.schedule import Schedule, Strike

HOME = Path(ROOT)
SEEDS = range(60)  # enough for each of the rare outcomes to occur


def written(path: Path, content: bytes, *, synced: bool = True) -> None:
    fd = files.open_fd(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    files.write_all(fd, content)
    if synced:
        files.fsync_fd(fd)
    files.close_fd(fd)


class Small(Scenario):
    """A scenario made of a test's functions: see `played`."""

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
    """Play a story of the processes that `started` starts, and check `ended` at its end."""
    kind = type("Made", (Small,), {"started": started, "ended": ended, "network": network})
    return play(kind, Schedule(str(seed), strikes))


def contents(scenario: Scenario) -> dict[str, bytes]:
    return {name.removeprefix(f"{ROOT}/"): data for name, data in scenario.disk.tree().items()}


# ---- the same seed


@pytest.fixture(scope="module", params=["lease 17.3.8", "training 3", "jobs 4", "custody 4"])
def told(request: pytest.FixtureRequest) -> tuple[str, Story]:
    """Return the name of a scenario, and a story of it."""
    name, text = request.param.split()
    return name, play(find(name), schedule(find(name), text))


def test_a_schedule_is_the_same_story_to_the_last_call(told: tuple[str, Story]) -> None:
    name, story = told
    assert story.broken is None
    assert story.steps > 50
    assert play(find(name), story.schedule).events == story.events


def test_other_schedules_are_other_stories() -> None:
    """Allow equal stories of mutations, because a mutation may affect only the time after the end."""
    seeds = [str(seed) for seed in range(5)]
    told = {text: tuple(play(Leases, schedule(Leases, text)).events) for seed in seeds for text in (seed, f"{seed}.1")}
    assert len({told[seed] for seed in seeds}) == len(seeds)
    assert len(set(told.values())) > 1.5 * len(seeds)


@pytest.mark.slow
def test_story_leaves_nothing_behind() -> None:
    """Check memory and the real system layer, because a search plays a million stories."""

    def worlds() -> int:
        gc.collect()
        return sum(type(each) is World for each in gc.get_objects())

    modules, before = {each: dict(vars(each)) for each in (files, clock, processes, lease, builtins)}, worlds()
    for seed in range(3):
        play(Leases, schedule(Leases, str(seed)))
    assert worlds() <= before  # worlds of other tests
    assert {module: dict(vars(module)) for module in modules} == modules


def test_module_imported_in_a_story_finds_its_threads() -> None:
    """Check that the imported module is a normal one after the story."""
    module: dict[str, Any] = {"__name__": "runner.imported_late"}
    made: list[object] = []

    def start(scenario: Small) -> None:
        exec("import queue, threading", module)
        made.extend((module["threading"].Lock(), module["queue"].SimpleQueue()))

    assert played(start).broken is None
    assert not any(type(each) in (queue.SimpleQueue, type(threading.Lock())) for each in made)
    assert (module["threading"], module["queue"]) == (threading, queue)


# ---- processes


def test_two_processes_are_distinct() -> None:
    """Check that both, as threads of one real process, write different temporary files."""
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


def test_killed_process_changes_nothing() -> None:
    """Kill the process at any call. Neither its `finally` nor its `except` blocks write a byte."""

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
        scenario.world.at(5.0, lambda: None)  # time for writes that must not happen

    for seed in range(20):
        left: list[dict[str, bytes]] = []

        def same(scenario: Small, left: list[dict[str, bytes]] = left) -> None:
            scenario.must(left == [contents(scenario)], f"{left[0]} became {contents(scenario)}")
            scenario.must("caught" not in left[0] and left[0]["lines"], "it was killed too early, or too late")

        assert played(start, same, seed=seed).broken is None


def test_frozen_process_continues() -> None:
    """Check that only the clock of the process is ahead."""
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
def test_endless_story_is_a_broken_promise(waits: str) -> None:
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
    """Return the files of a process that works and then waits."""
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
    """Return the files of a process after its machine lost power."""
    return left_by(lambda scenario: work(), seed, network=False, loses_power=True)


def test_power_loss_keeps_synced_data() -> None:
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
    assert {left.get("name") for left in found} == {None, b"synced"}  # an existing name has the synced content
    assert {left.get("neither") for left in found} >= {None, b"", b"data"}


def test_a_rename_is_atomic() -> None:
    """Check that after a power loss the name leads to the old content or to the new one, never to none."""

    def work() -> None:
        written(HOME / "value", b"old")
        files.fsync_dir(HOME)
        written(HOME / "value.tmp", b"new")
        files.rename(HOME / "value.tmp", HOME / "value")

    assert {after_power_loss(work, seed)["value"] for seed in SEEDS} == {b"old", b"new"}


def test_atomic_writes_survive_a_power_loss() -> None:
    def work() -> None:
        files.write_atomic(HOME / "value", "old")
        files.write_atomic(HOME / "value", "new")

    assert {after_power_loss(work, seed)["value"] for seed in SEEDS} == {b"new"}


@pytest.mark.parametrize("network", [False, True])
def test_only_a_network_file_system_has_old_listings(network: bool) -> None:
    """Limit the age of listings to some seconds. A machine sees its own changes at once."""
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


def test_injected_errors_reach_the_chosen_calls() -> None:
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
    """Call `action`, in which the next such call fails with EIO."""
    assert scenario.world.current is not None
    scenario.world.current.process.fails.append((frozenset({call}), errno.EIO))
    with pytest.raises(OSError, match="Input/output error"):
        action()


@pytest.mark.parametrize(("again", "left"), [(b"", {b"old", b"old+"}), (b"!", {b"old+!"})])
def test_refused_sync_may_lose_data_despite_a_second_one(again: bytes, left: set[bytes]) -> None:
    """Count the data as written after the error, as the kernel may, unless more is written to the page."""

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
def test_only_a_network_file_system_may_apply_refused_calls(network: bool) -> None:
    """Allow a refused rename to have happened, and data of a refused close to be on the server."""

    def work(scenario: Small) -> None:
        written(HOME / "old", b"x")
        refused(scenario, "rename", partial(files.rename, HOME / "old", HOME / "new"))
        if network:
            refused(scenario, "close", partial(written, HOME / "other", b"y", synced=False))

    found = [left_by(work, seed, network, loses_power=False) for seed in SEEDS]
    assert {name for left in found for name in left} == ({"old", "new", "other"} if network else {"old"})
    assert all(left.get("old", left.get("new")) == b"x" for left in found)
    assert {left.get("other") for left in found} == ({b"", b"y"} if network else {None})
