"""Make small random changes in a copy of the code, and find out which of them `make test` notices."""

from __future__ import annotations

import argparse
import difflib
import json
import signal
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mutants.changes import Change, drawn
from mutants.executed import Executed
from mutants.simulation import Simulation
from mutants.trial import Copy, preload

ROOT = Path(__file__).resolve().parents[2]
JUDGED = "tests/mutants/judged.toml"
HANG, START, LIVES = "time limit", "start of pytest", "lives"
STAGES = OWN, OTHERS, SIMULATION = "own", "others", "simulation"
ADDED = "added"  # noticed by a stage that had not noticed the change before


class First:
    """A pytest plugin that remembers the first failing test."""

    def __init__(self) -> None:
        self.result: dict[str, Any] = {"failed": None}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.result["failed"] = self.result["failed"] or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.result["failed"] = self.result["failed"] or f"import of {report.nodeid}"


def examine(
    change: Change,
    known: dict[str, Any],
    stages: list[str],
    copy: Copy,
    tests: Executed,
    simulation: Simulation,
    budget: float,
) -> dict[str, Any]:
    """Find out which test notices a change. Return a line of the results, which may continue an earlier line."""
    begun, tried = time.monotonic(), known.get("tried", [])
    line: dict[str, Any] = {"change": change.name, "file": change.file, "line": change.lines[0], "what": str(change)}
    line |= {"tests": known.get("tests", 0), "of": known.get("of", 0)}
    noticed = by = None
    for stage in stages:
        if stage == SIMULATION:
            noticed = simulation.noticed(change)
        else:
            noticed, run, of = _tested(change, copy, tests, stage == OWN, budget)
            if stage not in tried:
                line |= {"tests": line["tests"] + run, "of": line["of"] + of}
        if noticed:
            by = ADDED if stage in tried else stage
            break
    tried = [stage for stage in STAGES if stage in (*tried, *stages)]
    return line | {"tried": tried, "noticed": noticed, "by": by, "seconds": round(time.monotonic() - begun, 1)}


def _tested(change: Change, copy: Copy, tests: Executed, own: bool, budget: float) -> tuple[str | None, int, int]:
    """Return the test that notices a change, the maximum number of tests run, and how many execute it."""
    chosen, cost, slowest, of = [], 0.0, 0.0, 0
    for each in tests.tests_of(change, own).values():
        seconds = [tests.seconds[test] for test in each]
        of += len(each)
        if own or cost + sum(seconds) <= budget:
            chosen += each
            cost, slowest = cost + sum(seconds), max(slowest, *seconds)
    if not chosen:
        return None, 0, of
    options, limit = ["-x", "-o", f"timeout={30 + 5 * slowest:.0f}"], 60 + 4 * cost
    with copy.changed(change):
        result = copy.pytest([*options, *chosen], limit, First)
        if result and result["status"] == pytest.ExitCode.USAGE_ERROR:  # the change may rename a test
            result = copy.pytest([*options, *dict.fromkeys(test.partition("::")[0] for test in chosen)], limit, First)
    return _noticed(result), len(chosen), of


def _noticed(result: dict[str, Any] | None) -> str | None:
    """Return the test that failed, or another reason why pytest failed. Without the change it passed."""
    if result is None:
        return HANG
    failed: str | None = result["failed"]
    return failed or (None if result["status"] == pytest.ExitCode.OK else START)


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Read the last result of each change by the change's name. Skip a line that a kill truncated."""
    found = {}
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                result = json.loads(line)
            except ValueError:
                continue
            found[result["change"]] = result
    return found


def verdict(result: dict[str, Any], judged: dict[str, Any]) -> str:
    """Return the test that noticed the change, the judgement of a surviving change, or `lives`."""
    if result["noticed"]:
        return str(result["by"])
    return str(judged.get(result["change"], {}).get("verdict", LIVES))


def table(results: Iterable[dict[str, Any]], judged: dict[str, Any]) -> str:
    """Return a table of the results by package."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        for row in (result["file"].rpartition("/")[0], "all"):
            rows[row].update(["drawn", verdict(result, judged)])
    columns = ("drawn", *STAGES, ADDED, "equivalent", "gap", LIVES)
    lines = [f"{'':44}" + "".join(f"{name:>11}" for name in columns)]
    order = sorted(rows, key=lambda row: (row == "all", row))
    return "\n".join(lines + [f"{row:44}" + "".join(f"{rows[row][name]:>11}" for name in columns) for row in order])


def show(root: Path, change: Change) -> str:
    """Return a change as a diff."""
    before = (root / change.file).read_bytes()
    old, new = (text.decode().splitlines(keepends=True) for text in (before, change.applied(before)))
    return "".join(difflib.unified_diff(old, new, change.file, f"{change.file} ({change.name})"))


def say(line: str) -> None:
    """Print and flush a line."""
    print(line, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run the command. Return 1 if a change lives that was not judged equivalent, otherwise 0."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="which changes are drawn")
    parser.add_argument("--count", type=int, default=100, help="how many; a greater number draws more besides these")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of other folders' tests for one change")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="of the files that match, as runner/rundir/*")
    parser.add_argument("--own", action="store_true", help="only with the tests of the module's own folder: quicker")
    parser.add_argument("--simulation", action="store_true", help="what lives is also tried with the simulation")
    parser.add_argument("--again", action="store_true", help="try again what was not noticed the last time")
    parser.add_argument("--show", metavar="CHANGE", help="print one change as a diff")
    parser.add_argument("--root", type=Path, default=ROOT, help="the project")
    options = parser.parse_args(arguments)
    root = options.root.resolve()
    if options.show:
        found = [change for change in drawn(root, options.seed) if change.name == options.show]
        print(show(root, found[0]) if found else f"no change is called {options.show}")
        return int(not found)
    folder = root / "build" / "mutants"
    folder.mkdir(parents=True, exist_ok=True)
    judged = tomllib.loads((root / JUDGED).read_text()) if (root / JUDGED).exists() else {}
    wanted = (change for change in drawn(root, options.seed) if fnmatch(change.file, options.only))
    changes = list(islice(wanted, options.count))
    results, path = read(folder / f"seed-{options.seed}.jsonl"), folder / f"seed-{options.seed}.jsonl"
    asked = [OWN, *[OTHERS] * (not options.own), *[SIMULATION] * options.simulation]
    preload()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # removes the copy and kills its processes
    with Copy(root) as copy:
        tests = Executed(copy, folder / "executed", say)
        simulation = Simulation(copy, say)
        for number, change in enumerate(changes, 1):
            known = results.get(change.name, {})
            stages = [stage for stage in asked if options.again or stage not in known.get("tried", ())]
            if stages and (not known or verdict(known, judged) == LIVES):
                known = examine(change, known, stages, copy, tests, simulation, options.budget)
                results[change.name] = known
                with path.open("a") as file:
                    file.write(json.dumps(known) + "\n")
                end = f"noticed by {known['noticed']}" if known["noticed"] else "LIVES"
                say(f"{number} {change.name} {change}: {end} ({known['seconds']} s)")
    if tests.failed:
        print(f"not used, since they fail without a change: {', '.join(sorted(tests.failed))}")
    tried = [results[change.name] for change in changes]
    print(table(tried, judged))
    return int(any(verdict(result, judged) in (LIVES, "gap") for result in tried))


if __name__ == "__main__":
    sys.exit(main())
