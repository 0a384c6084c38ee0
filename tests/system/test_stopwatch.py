"""The stopwatch: its activities add up to the whole time, without gap or overlap, for any reader."""

from __future__ import annotations

import sys
import threading
from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.system import clock
from runner.system.stopwatch import Stopwatch

EVENTS = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 10_000), st.booleans()), max_size=30)


@given(events=EVENTS, before=st.integers(0, 100))
def test_each_second_belongs_to_exactly_one_activity(events: list[tuple[str, int, bool]], before: int) -> None:
    """Compare with manual sums over switches and blocks, by a clock with random jumps."""
    now = 1e6
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "monotonic", lambda: now)
        watch, doing, expected = Stopwatch("start", since=now - before), "start", {"start": float(before)}
        for what, seconds, in_a_block in events:
            if not in_a_block:
                watch.switch(what)
                doing = what
            with watch.doing(what) if in_a_block else nullcontext():
                now += seconds
                expected[what] = expected.get(what, 0) + seconds
                assert watch.of(what) == expected[what]
        assert doing == watch.switch(doing)
        assert {what: watch.of(what) for what in expected} == expected
        assert sum(watch.seconds().values()) == now - 1e6 + before


def test_an_activity_that_fails_ends_too() -> None:
    watch = Stopwatch("steps")
    with pytest.raises(ZeroDivisionError), watch.doing("save"):
        raise ZeroDivisionError
    assert watch.switch("end") == "steps"


def test_another_thread_never_reads_a_second_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in the middle of a switch: each second counts once, and none is lost."""
    began = clock.monotonic()
    watch, wrong, done = Stopwatch("a", since=began - 1000), [], threading.Event()

    def look() -> None:
        last = 0.0
        while not done.is_set():
            found = sum(watch.seconds().values())
            if not last - 1e-6 <= found <= clock.monotonic() - began + 1000 + 1e-6:
                wrong.append(found)
            last = found

    thread, interval = threading.Thread(target=look), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for number in range(20_000):
            watch.switch("ab"[number % 2])
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert wrong == []


def test_a_process_began_before_this_line_and_after_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from runner.system import processes

    assert processes.uptime(0.0) < processes.began() < clock.monotonic()
    # Where the system does not tell, it begins now.
    monkeypatch.setattr(processes, "state_of", lambda pid: None)
    before: Any = clock.monotonic()
    assert before <= processes.began() <= clock.monotonic()
