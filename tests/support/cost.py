"""Measure the CPU time of each test, and hold the tests of `make fast` to a limit.

A test costs its own CPU seconds and those of its children, without imports and without fixtures that several tests
share. CPU time and not wall time, so that a busy machine makes no difference; a slow processor raises the limit.
"""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from typing import Any

import pytest

WARN_S, FAIL_S = 0.75, 3.0  # failing is far above warning: the speed of a shared machine varies by half
BOOTSTRAP: Any = import_module("importlib._bootstrap")
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
REFERENCE_S = 0.0125
"""Seconds that `_loop` takes on a quiet processor of 2026. On a slower one the limits are higher."""


def marked(item: pytest.Item) -> bool:
    """Return whether a test is left out of `make fast`."""
    return any(item.get_closest_marker(name) for name in ("promise", "slow"))


def _loop() -> float:
    begun, number = time.process_time(), 0
    for step in range(300_000):
        number = (number * 31 + step) % 1_000_003
    return time.process_time() - begun


def slowness() -> float:
    """Return how many times slower than the reference this processor is, at least 1."""
    return max(1.0, min(_loop() for _ in range(3)) / REFERENCE_S)


def cpu_s() -> float:
    """Return the CPU seconds of this process, its ended children, and the processes that its live children forked."""
    spent = _forked_s()
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        spent += usage.ru_utime + usage.ru_stime
    return spent


def _forked_s() -> float:
    """Return the CPU seconds of ended processes that a server such as the zygote forked for a test."""
    ticks = 0
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError):  # a thread or a process may end at any moment
            for pid in _text(f"/proc/self/task/{thread}/children").split():
                fields = _text(f"/proc/{pid}/stat").rpartition(")")[2].split()
                ticks += int(fields[13]) + int(fields[14])  # of its children: see proc(5)
    return ticks / CLOCK_TICKS


def _text(path: str) -> str:
    """Read a file of the kernel without a buffer, because this happens before and after each test."""
    with open(path, "rb", buffering=0) as file:
        return file.readall().decode(errors="replace")


class Costs:
    """Measure each test in the process that runs it.

    Args:
        unlimited: whether unmarked tests have no limit.
    """

    def __init__(self, unlimited: bool = False) -> None:
        self._unlimited = unlimited
        self.slowness = slowness()
        self._shared = 0.0  # spent on shared imports and fixtures since the test began
        self._importing = False
        self._patch = pytest.MonkeyPatch()
        self._begun = self._wall = 0.0

    @contextmanager
    def _for_all(self) -> Iterator[None]:
        """Leave the block out of the test's cost."""
        begun, before = cpu_s(), self._shared
        try:
            yield
        finally:
            self._shared = before + cpu_s() - begun

    def pytest_sessionstart(self) -> None:
        """Leave out imports. The interpreter calls this function for a module that is not imported yet."""
        find = BOOTSTRAP._find_and_load

        def timed(*arguments: Any) -> Any:
            if self._importing:
                return find(*arguments)
            self._importing = True
            begun, before = time.process_time(), self._shared  # an import starts no process
            try:
                return find(*arguments)
            finally:
                self._shared = before + time.process_time() - begun
                self._importing = False

        self._patch.setattr(BOOTSTRAP, "_find_and_load", timed)

    def pytest_sessionfinish(self) -> None:
        self._patch.undo()

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """Leave out fixtures that several tests share."""
        if fixturedef.scope == "function":
            return (yield)
        with self._for_all():
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self) -> Generator[None, object, object]:
        self._shared, self._begun, self._wall = 0.0, cpu_s(), time.monotonic()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Put the cost into the last report of a test. Fail an unmarked test that costs too much."""
        report = yield
        if call.when == "teardown":
            spent = cpu_s() - self._begun - self._shared
            report.user_properties = [
                ("cpu_s", round(spent, 3)),
                ("wall_s", round(time.monotonic() - self._wall, 3)),
                ("fast", not marked(item)),
                ("promises", [mark.args[0] for mark in item.iter_markers("promise")]),
            ]
            limited = report.passed and not (self._unlimited or marked(item))
            if limited and spent > FAIL_S * self.slowness:  # other processes may be using the processor's caches
                self.slowness = max(self.slowness, slowness())
            limit = FAIL_S * self.slowness
            if limited and spent > limit:
                report.outcome = "failed"
                report.longrepr = (
                    f"{item.nodeid} took {spent:.2f} s of CPU; a test of `make fast` may take {limit:.2f} s: "
                    "make it cheaper, or mark it promise or slow (CONTRIBUTING.md)"
                )
        return report
