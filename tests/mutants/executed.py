"""Find out which tests of `make test` execute which lines, with coverage of each test file, cached until it changes.

If the code has changed since then, its lines are found by their text.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import pytest

from mutants.changes import Change, modules
from mutants.trial import Copy

LIMIT_S = 1200.0  # for one test file
SETTINGS = """\
[run]
include = {include}
data_file = {folder}/data
parallel = true
patch = _exit
context = ${{PYTEST_CURRENT_TEST-}}
disable_warnings = no-data-collected, module-not-measured, dynamic-conflict
"""


_RAN = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)


class Recorder:
    """Record the tests that execute each line. Commands that a test starts count for that test."""

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
        """Count a shared fixture for every test of the file."""
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


class Executed:
    """The lines of the modules and the tests that execute them. A folder of tests is measured on first use.

    Args:
        copy: the copy of the project.
        kept: folder of the cached measurements.
        say: called with the progress.
    """

    def __init__(self, copy: Copy, kept: Path, say: Callable[[str], None]) -> None:
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self._copy, self._kept, self._say = copy, kept, say
        self._modules = modules(copy.path)
        self._sources = {file: (copy.path / file).read_text() for file in self._modules}
        self._folders: set[str] = set()
        self._lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        self._matched: dict[tuple[str, str], list[tuple[str, int, int, int, int]]] = {}
        kept.mkdir(parents=True, exist_ok=True)

    def measure(self, folder: str) -> None:
        """Measure which lines the tests in a folder execute, unless that is known.

        Raises:
            RuntimeError: a test file does not finish.
        """
        if folder in self._folders:
            return
        self._folders.add(folder)
        for path in sorted((self._copy.path / folder).glob("test_*.py")):
            file = f"{folder}{path.name}"
            known = self._kept / f"{_digest(file + path.read_text())}.json"
            if not known.exists():
                self._say(f"which lines does {file} execute?")
                measured = _measured(self._copy, file, self._modules)
                measured["sources"] = {module: self._keep(self._sources[module]) for module in measured["lines"]}
                known.write_text(json.dumps(measured))
            measured = json.loads(known.read_text())
            sources = measured["sources"]
            lines = {file: self._moved(lines, file, sources[file]) for file, lines in measured["lines"].items()}
            self.add({**measured, "lines": lines})

    def _keep(self, source: str) -> str:
        """Return the file name for the text of a module at the time of a measurement."""
        name = _digest(source)
        (self._kept / f"{name}.source").write_text(source)
        return name

    def _moved(self, lines: dict[str, list[str]], file: str, then: str) -> dict[int, set[str]]:
        """Map tests to the present lines of a module. A changed line gets the tests of the lines that it replaces."""
        moved: dict[int, set[str]] = defaultdict(set)
        for kind, start, end, first, last in self._matching(file, then):
            for line in range(start, end):
                for each in (first + line - start,) if kind == "equal" else range(first, last):
                    moved[each + 1].update(lines.get(str(line + 1), ()))
        return moved

    def _matching(self, file: str, then: str) -> list[tuple[str, int, int, int, int]]:
        if (file, then) not in self._matched:
            before, after = (self._kept / f"{then}.source").read_text(), self._sources.get(file, "")
            matcher = SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
            self._matched[file, then] = [*matcher.get_opcodes()]
        return self._matched[file, then]

    def add(self, measured: dict[str, Any]) -> None:
        """Add the lines that one test file executes."""
        self.seconds |= measured["seconds"]
        self.failed.update(measured["failed"])
        for file, lines in measured["lines"].items():
            for line, tests in lines.items():
                self._lines[file][int(line)].update(tests)

    def tests_of(self, change: Change, own: bool) -> dict[str, list[str]]:
        """Return the tests that execute the changed lines, by file, the fastest file first.

        Args:
            change: the change.
            own: whether to return the tests of the module's folder (all, if no test is known to execute the change);
                otherwise those of the other folders.
        """
        beside = tests_beside(change.file)
        for folder in sorted({beside} if own else {tests_beside(file) for file in self._modules}):
            self.measure(folder)
        lines = self._lines[change.file]
        chosen: set[str] = set()
        for line in lines if change.at_import else range(change.lines[0], change.lines[1] + 1):
            chosen |= lines.get(line, set())
        by_file: dict[str, list[str]] = defaultdict(list)
        for test in self.seconds:
            file = test.partition("::")[0]
            hit = test in chosen or file in chosen or (own and not chosen)
            if hit and file.startswith(beside) == own and test not in self.failed:
                by_file[file].append(test)
        return dict(sorted(by_file.items(), key=lambda item: sum(self.seconds[test] for test in item[1])))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tests_beside(file: str) -> str:
    """Return the folder of a module's tests."""
    first, second, *_ = file.split("/")
    return f"tests/{second if first == 'runner' else first}/"


def _measured(copy: Copy, file: str, files: list[str]) -> dict[str, Any]:
    import coverage

    folder = copy.path.parent / "coverage"
    folder.mkdir(exist_ok=True)
    settings = folder / "settings"
    settings.write_text(SETTINGS.format(folder=folder, include=",".join(str(copy.path / each) for each in files)))
    measured = copy.pytest([file], LIMIT_S, lambda: Recorder(settings))
    if measured is None:
        raise RuntimeError(f"{file} did not end:\n{copy.output[-2000:]}")
    if measured["status"] not in _RAN:
        raise RuntimeError(f"pytest did not run {file}:\n{copy.output[-2000:]}")
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
