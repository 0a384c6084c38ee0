"""Which fast tests execute which lines: a coverage pass over each file of tests, kept until it or the code changes."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mutants.changes import Change, modules
from mutants.trial import Copy

LIMIT_S = 1200.0  # for one file of tests
SETTINGS = """\
[run]
include = {include}
data_file = {folder}/data
parallel = true
patch = _exit
context = ${{PYTEST_CURRENT_TEST-}}
disable_warnings = no-data-collected, module-not-measured, dynamic-conflict
"""


class Recorder:
    """Notes which test executes what; commands that a test starts are measured, too, under its name."""

    def __init__(self, settings: Path) -> None:
        import os

        import coverage

        os.environ["COVERAGE_PROCESS_START"] = str(settings)
        self.result: dict[str, Any] = {"seconds": {}, "failed": []}
        self._coverage = coverage.Coverage(config_file=str(settings))
        self._coverage.start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._coverage.switch_context(item.nodeid)
        try:
            return (yield)
        finally:
            self._coverage.switch_context("")

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        """What several tests share is executed for every test of the file."""
        if fixturedef.scope == "function":
            return (yield)
        item = request._pyfuncitem.nodeid
        self._coverage.switch_context(item.partition("::")[0])
        try:
            return (yield)
        finally:
            self._coverage.switch_context(item)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = self.result["seconds"]
        seconds[report.nodeid] = round(seconds.get(report.nodeid, 0.0) + report.duration, 3)
        if report.failed:
            self.result["failed"].append(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()


@dataclass(frozen=True)
class Tests:
    """The tests that can notice a change, in the order in which they are run.

    Attributes:
        arguments: of pytest.
        seconds: that they take together.
        of: how many there are, with those that are too slow to be run.
    """

    arguments: list[str]
    seconds: float
    of: int


class Executed:
    """The lines of the modules, and the tests that execute them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.failed: list[str] = []
        self._lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))

    def add(self, measured: dict[str, Any]) -> None:
        """What one file of tests executes."""
        self.seconds |= measured["seconds"]
        self.failed += measured["failed"]
        for file, lines in measured["lines"].items():
            for line, tests in lines.items():
                self._lines[file][int(line)].update(tests)

    def tests_of(self, change: Change, budget: float) -> Tests:
        """The tests that execute the changed lines; those of the module's own folder where none is known to.

        Args:
            change: the change.
            budget: in seconds; the own folder's tests come first, then those of the fastest files.
        """
        lines = self._lines[change.file]
        chosen: set[str] = set()
        for line in lines if change.at_import else range(change.lines[0], change.lines[1] + 1):
            chosen |= lines.get(line, set())
        own = tests_beside(change.file)
        chosen = chosen or {test.partition("::")[0] for test in self.seconds if test.startswith(own)}
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in self.seconds:
            file = test.partition("::")[0]
            if (test in chosen or file in chosen) and test not in self.failed:
                by_file[file].append(test)
        cost = {file: sum(self.seconds[test] for test in tests) for file, tests in by_file.items()}
        arguments: list[str] = []
        seconds = 0.0
        for file in sorted(by_file, key=lambda file: (not file.startswith(own), cost[file])):
            if not arguments or seconds + cost[file] <= budget:
                arguments += by_file[file]
                seconds += cost[file]
        return Tests(arguments, seconds, sum(map(len, by_file.values())))


def tests_beside(file: str) -> str:
    """The folder of a module's own tests."""
    first, second, *_ = file.split("/")
    return f"tests/{second if first == 'runner' else first}/"


def executed(copy: Copy, kept: Path, say: Callable[[str], None]) -> Executed:
    """Measure what has changed since the last time.

    Args:
        copy: of the project.
        kept: folder of what was measured.
        say: called with the progress.

    Raises:
        RuntimeError: a file of tests does not come to its end.
    """
    kept.mkdir(parents=True, exist_ok=True)
    files = modules(copy.path)
    code = b"".join((copy.path / file).read_bytes() for file in files)
    found = Executed()
    for path in sorted(path for folder in {*map(tests_beside, files)} for path in (copy.path / folder).glob("test_*.py")):
        file = path.relative_to(copy.path).as_posix()
        known = kept / f"{hashlib.sha256(code + file.encode() + path.read_bytes()).hexdigest()[:16]}.json"
        if not known.exists():
            say(f"which lines does {file} execute?")
            known.write_text(json.dumps(_measured(copy, file, files)))
        found.add(json.loads(known.read_text()))
    return found


def _measured(copy: Copy, file: str, files: list[str]) -> dict[str, Any]:
    import coverage

    folder = copy.path.parent / "coverage"
    folder.mkdir(exist_ok=True)
    settings = folder / "settings"
    settings.write_text(SETTINGS.format(folder=folder, include=",".join(str(copy.path / each) for each in files)))
    measured = copy.pytest([file], LIMIT_S, lambda: Recorder(settings))
    if measured is None:
        raise RuntimeError(f"{file} did not end:\n{copy.output[-2000:]}")
    lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for part in folder.glob("data.*"):
        data = coverage.CoverageData(str(part))
        data.read()
        for each in data.measured_files():
            for line, contexts in data.contexts_by_lineno(each).items():
                tests = {context.removesuffix("|").partition(" (")[0] for context in contexts}
                lines[str(Path(each).relative_to(copy.path))][line] |= tests - {""}
        part.unlink()
    return {**measured, "lines": {each: {n: sorted(tests) for n, tests in of.items()} for each, of in lines.items()}}
