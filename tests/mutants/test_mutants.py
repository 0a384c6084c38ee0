"""Check `make mutants`: the same changes from the same seed, correct verdicts, and no edits outside the copy."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mutants import changes, executed, simulation
from mutants.__main__ import _noticed, read
from mutants.executed import Executed
from mutants.trial import Copy

ROOT = Path(__file__).resolve().parents[2]
MODULE = "runner/rundir/lease.py"
SOURCE = '''\
"""A module."""

import logging

LIMIT: int = 3  # 4 would do


def clip(value: int, most: "int | None" = None) -> int:
    """At most 3, at least 0."""
    if value > LIMIT and most is not None:
        logging.warning("more than %d", 3)
        raise ValueError(f"{value + 1} > {3}")
    try:
        record(value)
    except OSError:
        pass
    return max(value, 0)


def record(value: int) -> None:
    NOTED.append(value)


def unused(value: int) -> int:
    return value - 7


NOTED: list[int] = []
'''
TEST = """\
from runner.rundir import lease


def test_it() -> None:
    assert lease.clip(2) == 2
    assert lease.NOTED == [2]
"""
DRAWN = """\
number: 3 -> 4
condition: value > LIMIT and most is not None -> negated
comparison: > -> <=
off by one: > -> >=
and/or: and -> or
comparison: is not -> is
call: record(value) -> pass
except: OSError -> ()
return: max(value, 0) -> None
min/max: max -> min
number: 0 -> 1
call: NOTED.append(value) -> pass
return: value - 7 -> None
plus/minus: - -> +
number: 7 -> 8
"""


NOTICED = """\
condition: value > LIMIT and most is not None -> negated
call: record(value) -> pass
return: max(value, 0) -> None
min/max: max -> min
call: NOTED.append(value) -> pass
""".splitlines()


CONFTEST = """\
def pytest_addoption(parser):
    parser.addoption("--unlimited", action="store_true")
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Return a project with one module and one test."""
    path = tmp_path / "project"
    for name, text in {
        MODULE: SOURCE,
        "runner/__init__.py": "",
        "runner/rundir/__init__.py": "",
        "tests/rundir/test_lease.py": TEST,
        "tests/conftest.py": CONFTEST,
        ".gitignore": "build/\n__pycache__/\n",
    }.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=path, check=True)
    return path


def test_docstrings_hints_messages_and_logging_are_left_alone(project: Path) -> None:
    found = [str(change).split(" ", 1)[1] for change in changes.changes_of(project, MODULE)]
    assert sorted(found) == sorted(DRAWN.splitlines())


def test_every_mutant_is_valid_python_on_its_line() -> None:
    """Also check that every pattern matches a module with a folder of tests."""
    assert all(list(ROOT.glob(pattern)) for pattern in changes.MODULES)
    assert all((ROOT / executed.tests_beside(file)).is_dir() for file in changes.modules(ROOT))
    for change in [change for file in changes.modules(ROOT)[::5] for change in changes.changes_of(ROOT, file)[::97]]:
        source = (ROOT / change.file).read_bytes()
        changed = change.applied(source)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), change
        assert changed.splitlines()[: change.lines[0] - 1] == source.splitlines()[: change.lines[0] - 1]
        assert changed.splitlines()[change.lines[0] - 1] != source.splitlines()[change.lines[0] - 1], change


def test_same_seed_draws_the_same_mutants_after_moves(project: Path) -> None:
    names = [change.name for change in changes.drawn(project, 1)]
    assert names == [change.name for change in changes.drawn(project, 1)]
    assert names != [change.name for change in changes.drawn(project, 2)]
    assert len(set(names)) == len(names)
    path = project / MODULE
    path.write_text(path.read_text().replace("import logging\n", "import logging\n\nMORE = 5\n"))
    moved = [change.name for change in changes.drawn(project, 1)]
    assert [name for name in moved if name in names] == names
    assert len(moved) == len(names) + 1


def test_change_is_only_in_the_copy_and_temporary(project: Path) -> None:
    (change, *_) = changes.drawn(project, 1)
    with Copy(project) as copy:
        before = (copy.path / MODULE).stat().st_mtime_ns
        with copy.changed(change):
            assert (copy.path / MODULE).read_bytes() == change.applied(SOURCE.encode())
            assert (project / MODULE).read_text() == SOURCE
        assert (copy.path / MODULE).read_text() == SOURCE
        assert (copy.path / MODULE).stat().st_mtime_ns == before
    assert not copy.path.exists()


def test_tests_of_a_line_are_found_nearest_first(project: Path) -> None:
    """Count a shared fixture for each of its tests, and try a line without coverage with all tests."""
    every = {change.kind: change for change in changes.changes_of(project, MODULE) if change.lines[0] != 25}
    with Copy(project) as copy:
        tests = Executed(copy, project / "build", lambda line: None)
        tests.measure = lambda folder: None  # type: ignore[method-assign]
        line = {
            str(every["call"].lines[0]): ["tests/rundir/test_a.py::x", "tests/cli/test_b.py", "tests/cli/test_c.py::y"]
        }
        seconds = {"tests/cli/test_c.py::y": 9.0, "tests/cli/test_b.py::z": 1.0, "tests/rundir/test_a.py::x": 5.0}
        seconds["tests/rundir/test_d.py::other"] = 1.0
        tests.add({"seconds": seconds, "failed": [], "lines": {MODULE: line}})
        assert tests.tests_of(every["call"], own=True) == {"tests/rundir/test_a.py": ["tests/rundir/test_a.py::x"]}
        others = tests.tests_of(every["call"], own=False)
        assert list(others.items()) == [
            ("tests/cli/test_b.py", ["tests/cli/test_b.py::z"]),
            ("tests/cli/test_c.py", ["tests/cli/test_c.py::y"]),
        ]
        assert list(tests.tests_of(every["min/max"], own=True)) == ["tests/rundir/test_d.py", "tests/rundir/test_a.py"]
        assert tests.tests_of(every["min/max"], own=False) == {}


def test_measurements_stay_valid_when_the_code_moves(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Find a line by its text, and give a changed line the tests of the lines that it replaces."""
    every = {change.kind: change for change in changes.changes_of(project, MODULE) if change.lines[0] < 25}
    tests = {kind: f"tests/rundir/test_lease.py::{kind}" for kind in ("min/max", "except")}
    lines = {str(every[kind].lines[0]): [test] for kind, test in tests.items()}
    measured = {"seconds": dict.fromkeys(tests.values(), 1.0), "failed": [], "lines": {MODULE: lines}}

    def found(kind: str) -> dict[str, list[str]]:
        change = next(each for each in changes.changes_of(project, MODULE) if each.kind == kind)
        with Copy(project) as copy:
            return Executed(copy, project / "build", lambda line: None).tests_of(change, own=True)

    with monkeypatch.context() as patch:
        patch.setattr(executed, "_measured", lambda copy, file, files: measured)
        assert found("except") == {"tests/rundir/test_lease.py": [tests["except"]]}
    path = project / MODULE
    moved = path.read_text().replace("import logging\n", "import logging\n\nMORE = 5\n")
    path.write_text(moved.replace("except OSError:", "except (OSError, ValueError):"))
    for kind, test in tests.items():
        assert found(kind) == {"tests/rundir/test_lease.py": [test]}


@pytest.mark.parametrize(
    ("found", "without_the_change", "noticed"),
    [
        pytest.param([], None, None, id="every promise holds"),
        pytest.param([["17.3", "lost"]], None, "simulation: lease 17.3: lost", id="broken"),
        pytest.param([["17.3", "lost"]], "lost", None, id="broken without the change, too"),
        pytest.param(None, None, "simulation: lease does not come to its end", id="no end"),
    ],
)
def test_simulation_notices_breaks_caused_by_the_change(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    found: list[list[str]] | None,
    without_the_change: str | None,
    noticed: str | None,
) -> None:
    """Play only scenarios that reach the changed line."""
    change = next(each for each in changes.changes_of(project, MODULE) if each.kind == "call")
    played: list[str] = []

    def run(self: simulation.Simulation, code: str, name: str, *rest: str, limit: float) -> dict[str, object] | None:
        changed = (self._copy.path / MODULE).read_text() != SOURCE
        if code == simulation.REPLAY:
            assert not changed
            return {"broken": without_the_change}
        played.append(name)
        if not changed:
            return {"seconds": 1.0, "broken": []}
        return None if found is None else {"broken": found}

    monkeypatch.setattr(simulation.Simulation, "_run", run)
    reached = {"lease": {MODULE: {change.lines[0]}}}
    monkeypatch.setattr(simulation.Simulation, "_look", lambda self, name: reached.get(name, {}))
    with Copy(project) as copy:
        assert simulation.Simulation(copy, lambda line: None).noticed(change) == noticed
    assert played.count("lease") == 2
    assert all(played.count(name) <= 1 for name in simulation.SCHEDULES if name != "lease")


@pytest.mark.slow
def test_simulation_of_the_copy_plays_and_replays() -> None:
    with Copy(ROOT) as copy:
        played = simulation.Simulation(copy, lambda line: None)
        assert played._run(simulation.SEARCH, "lease", "2", limit=300) is not None
        assert played._run(simulation.REPLAY, "lease", "1", limit=300) == {"broken": None}
        assert "runner/rundir/lease.py" in played._look("lease")


@pytest.mark.slow
def test_unknown_options_of_pytest_are_an_error(project: Path) -> None:
    """Fail, because otherwise no test would run and every change would live."""
    (project / "tests/conftest.py").unlink()
    with Copy(project) as copy, pytest.raises(RuntimeError, match=r"pytest did not run tests/rundir/test_lease\.py"):
        Executed(copy, project / "kept", print).measure("tests/rundir/")


@pytest.mark.parametrize(
    ("result", "noticed"),
    [
        (None, "time limit"),
        ({"failed": None, "status": 0}, None),
        ({"failed": "test_it", "status": 1}, "test_it"),
        ({"failed": None, "status": 4}, "start of pytest"),  # a conftest that cannot be imported
        ({"failed": None, "status": 5}, "start of pytest"),  # no test is left
    ],
)
def test_a_change_lives_only_if_pytest_passes(result: dict[str, Any] | None, noticed: str | None) -> None:
    assert _noticed(result) == noticed


@pytest.mark.slow
def test_mutants_are_tried_once_and_recorded(project: Path) -> None:
    """Check a test that executes `clip` with 2 and notices no change of the limit or in `unused`."""
    first, judged, *_ = (each for each in changes.drawn(project, 1) if str(each).split(" ", 1)[1] not in NOTICED)
    (project / "tests/mutants").mkdir(parents=True)
    text = f'["{judged.name}"]\nverdict = "equivalent"\nwhy = "nobody reaches it"\n'
    (project / "tests/mutants/judged.toml").write_text(text)
    path = project / "build/mutants/seed-1.jsonl"

    def run(count: int) -> list[str]:
        """Return the last line of the table."""
        command = [sys.executable, "-m", "mutants", "--root", str(project), "--count", str(count)]
        environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "tests")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 1, done.stderr
        return done.stdout.splitlines()[-1].split()

    total = run(8)
    results = read(path)
    assert list(results) == [change.name for change in islice(changes.drawn(project, 1), 8)]
    for result in results.values():
        noticed = result["what"].split(" ", 1)[1] in NOTICED
        assert result["noticed"] == ("tests/rundir/test_lease.py::test_it" if noticed else None), result
    lives = sum(result["noticed"] is None for result in results.values())
    assert first.name in results
    assert judged.name in results
    columns = dict(zip(("own", "others", "simulation", "added", "equivalent", "gap", "lives"), total[2:], strict=True))
    assert total[:2] == ["all", "8"]
    assert {name: int(count) for name, count in columns.items() if count != "0"} == {
        "own": 8 - lives,
        "equivalent": 1,
        "lives": lives - 1,
    }
    assert (project / MODULE).read_text() == SOURCE
    assert run(9)[:2] == ["all", "9"]
    assert len(path.read_text().splitlines()) == 9


def test_change_with_a_truncated_result_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "seed-1.jsonl"
    path.write_text(json.dumps({"change": "a", "noticed": None}) + "\n" + '{"change": "b", "not')
    assert list(read(path)) == ["a"]
