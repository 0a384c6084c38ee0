"""Print the progress of the tests instead of lines of dots, and the promises that they have shown at the end."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import durations
import pytest
from durations import Durations

EVERY_S = 20.0
"""Seconds between two lines of progress where the output is not a terminal."""


class Progress:
    """Report progress from the process that the user started, once the tests are collected."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._out = sys.__stdout__ or sys.stdout
        self._live = self._out.isatty()
        self._workers = max(int(config.getoption("numprocesses", 0) or 0), 1)
        self._durations = Durations.read()
        self._count = self._done = self._failed = 0
        self._whole_s = self._done_s = 0.0
        self._begun = self._printed = time.monotonic()
        self._over = threading.Event()
        self._measured: list[tuple[str, float, float, bool]] = []  # id, wall, CPU, whether it is in `make fast`
        self._shown: list[tuple[str, str, float]] = []  # outcome, promise, wall
        self._outcomes: dict[str, str] = {}

    def pytest_sessionstart(self) -> None:
        self._print("collecting the tests: 10 to 20 s")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if session.items:
            self._begin([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._begin(ids)

    def _begin(self, ids: list[str]) -> None:
        if self._count:
            return  # another worker has reported it
        self._count, self._begun = len(ids), time.monotonic()
        self._whole_s = sum(map(self._durations.of, ids))
        if self._config.getoption("numprocesses", None):  # no extra thread, because some tests fork
            threading.Thread(target=self._report, daemon=True).start()
        estimate = _minutes(self._whole_s / self._workers)
        self._print(f"{self._count:,} tests in {self._workers} processes, about {estimate} on two quiet cores")

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        """Let pytest count, but print no letter."""
        if report.passed:
            return ("passed" if report.when == "call" else "", "", "")
        return None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed:
            self._outcomes[report.nodeid] = report.outcome
        if report.failed:
            self._failed += 1
            self._print(f"FAILED {report.nodeid}")
        if report.when == "teardown":
            self._end(report)

    def _end(self, report: pytest.TestReport) -> None:
        """Count a finished test."""
        told: dict[str, Any] = dict(report.user_properties)
        self._done += 1
        self._done_s += self._durations.of(report.nodeid)
        self._measured.append((report.nodeid, told["wall_s"], told["cpu_s"], told["fast"]))
        for promise in told["promises"]:
            self._shown.append((self._outcomes[report.nodeid], promise, told["wall_s"]))
        self._print_if_due()

    def _report(self) -> None:
        """Print the state at intervals, also while a test takes long."""
        while not self._over.wait(0.5):
            self._print_if_due()

    def _print_if_due(self) -> None:
        if time.monotonic() - self._printed >= (0.5 if self._live else EVERY_S):
            self._print(self._state(), stays=False)

    def _state(self) -> str:
        spent = time.monotonic() - self._begun
        left = (self._whole_s - self._done_s) / self._workers
        if self._done_s > self._whole_s / 10:  # correct the recorded durations by the speed of this machine
            left *= spent * self._workers / self._done_s
        failed = f", {self._failed} failed" if self._failed else ""
        share = 100 * self._done_s / max(self._whole_s, 1e-9)
        rate = self._done / max(spent, 1e-9)
        return f"{share:3.0f} %  {self._done:,} of {self._count:,} tests{failed}  {rate:.1f}/s  {_minutes(left)} left"

    def _print(self, text: str, *, stays: bool = True) -> None:
        self._printed = time.monotonic()
        begin, end = ("\r\x1b[K", "\n" if stays else "") if self._live else ("", "\n")
        self._out.write(f"{begin}{text}{end}")
        self._out.flush()

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        self._over.set()
        if self._live:
            self._out.write("\r\x1b[K")
            self._out.flush()
        if self._config.getoption("record_durations"):
            durations.record((name, wall) for name, wall, _, _ in self._measured)
        limit = _warn_s()
        close = sorted((cpu, name) for name, _, cpu, fast in self._measured if fast and cpu > limit)
        if close:
            terminalreporter.section(f"fast tests that took more than {limit:.2f} s of CPU")
            for cpu, name in reversed(close):
                terminalreporter.line(f"{cpu:6.2f} s  {name}")
        if count := self._config.getoption("costs"):
            terminalreporter.section("the most expensive tests, in seconds of CPU")
            for name, _, cpu, _ in sorted(self._measured, key=lambda each: -each[2])[:count]:
                terminalreporter.line(f"{cpu:6.2f} s  {name}")
        self._summary(terminalreporter)

    def _summary(self, terminalreporter: Any) -> None:
        """Print each promise, and the fast tests as one line."""
        fast = [(name, cpu) for name, _, cpu, fast in self._measured if fast]
        terminalreporter.section("what was shown")
        for outcome, promise, wall in sorted(self._shown, key=lambda each: each[1]):
            terminalreporter.line(f"{_WORDS.get(outcome, outcome):<8}{promise:<84}{wall:6.1f} s")
        rest = self._done - len(fast) - len(self._shown)
        terminalreporter.line(
            f"{len(fast):,} fast tests, {sum(cpu for _, cpu in fast):.0f} s of CPU; {rest:,} slow ones"
        )


_WORDS = {"passed": "shown", "failed": "FAILED"}


def _warn_s() -> float:
    from cost import WARN_S, slowness

    return WARN_S * slowness()


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"
