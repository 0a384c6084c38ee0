"""Make random small changes of the code in a copy, and find out which of them the fast tests notice."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mutants.changes import Change, drawn
from mutants.executed import Executed, executed
from mutants.trial import Copy, preload

ROOT = Path(__file__).resolve().parents[3]
JUDGED = "tests/support/mutants/judged.toml"
HANG, LIVES = "time limit", "lives"


class First:
    """Remembers the first test that fails."""

    def __init__(self) -> None:
        self.result: dict[str, Any] = {"failed": None}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.result["failed"] = self.result["failed"] or report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.result["failed"] = self.result["failed"] or f"import of {report.nodeid}"

    def pytest_keyboard_interrupt(self) -> None:
        self.result["failed"] = self.result["failed"] or "interrupt"


def examine(copy: Copy, change: Change, tests: Executed, budget: float) -> dict[str, Any]:
    """Which test notices a change, if one does: a line of the results."""
    chosen = tests.tests_of(change, budget)
    begun = time.monotonic()
    slowest = max((tests.seconds.get(test, 0.0) for test in chosen.arguments), default=0.0)
    options = ["-x", "-o", f"timeout={30 + 5 * slowest:.0f}"]
    with copy.changed(change):
        result = copy.pytest([*options, *chosen.arguments], 60 + 4 * chosen.seconds, First)
    noticed = HANG if result is None else result["failed"]
    return {
        "change": change.name,
        "file": change.file,
        "line": change.lines[0],
        "what": str(change),
        "noticed": noticed,
        "tests": len(chosen.arguments),
        "of": chosen.of,
        "seconds": round(time.monotonic() - begun, 1),
    }


def read(path: Path) -> dict[str, dict[str, Any]]:
    """The results so far, by the change's name; the last one counts. A line that a kill cut short does not."""
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
    """`noticed`, what was judged of a change that lives, or `lives`."""
    if result["noticed"]:
        return "noticed"
    return str(judged.get(result["change"], {}).get("verdict", LIVES))


def table(results: Iterable[dict[str, Any]], judged: dict[str, Any]) -> str:
    """What became of the changes, by file."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for result in results:
        for row in (result["file"], "all"):
            rows[row].update(["drawn", verdict(result, judged)])
    columns = ("drawn", "noticed", "equivalent", "gap", LIVES)
    lines = [f"{'':44}" + "".join(f"{name:>12}" for name in columns)]
    order = sorted(rows, key=lambda row: (row == "all", row))
    return "\n".join(lines + [f"{row:44}" + "".join(f"{rows[row][name]:>12}" for name in columns) for row in order])


def show(root: Path, change: Change) -> str:
    """A change as a diff."""
    before = (root / change.file).read_bytes()
    old, new = (text.decode().splitlines(keepends=True) for text in (before, change.applied(before)))
    return "".join(difflib.unified_diff(old, new, change.file, f"{change.file} ({change.name})"))


def main(arguments: list[str] | None = None) -> int:
    """0, or 1 if a change lives that was not judged equivalent."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="which changes are drawn")
    parser.add_argument("--count", type=int, default=100, help="how many; a greater number draws more besides these")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of tests for one change")
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
    changes = list(islice(drawn(root, options.seed), options.count))
    results, path = read(folder / f"seed-{options.seed}.jsonl"), folder / f"seed-{options.seed}.jsonl"
    preload()
    with Copy(root) as copy:
        tests = executed(copy, folder / "executed", lambda line: print(line, flush=True))
        if tests.failed:
            print(f"not used, since they fail without a change: {', '.join(tests.failed)}")
        for number, change in enumerate(changes, 1):
            known = results.get(change.name)
            if known is None or (options.again and verdict(known, judged) == LIVES):
                known = results[change.name] = examine(copy, change, tests, options.budget)
                with path.open("a") as file:
                    file.write(json.dumps(known) + "\n")
                end = f"noticed by {known['noticed']}" if known["noticed"] else "LIVES"
                print(f"{number} {change.name} {change}: {end} ({known['seconds']} s)", flush=True)
    own = [results[change.name] for change in changes]
    print(table(own, judged))
    return int(any(verdict(result, judged) in (LIVES, "gap") for result in own))


if __name__ == "__main__":
    sys.exit(main())
