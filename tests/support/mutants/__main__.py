"""Make random small changes of the code in a copy, and find out which of them the fast tests notice."""

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


def examine(copy: Copy, change: Change, tests: Executed, budget: float, own: bool) -> dict[str, Any]:
    """Which test notices a change, if one does: a line of the results."""
    begun, noticed, run, of = time.monotonic(), None, 0, 0
    for beside in (True,) if own else (True, False):
        chosen, cost, slowest = [], 0.0, 0.0
        for each in tests.tests_of(change, beside).values():
            seconds = [tests.seconds[test] for test in each]
            of += len(each)
            if beside or cost + sum(seconds) <= budget:
                chosen += each
                cost, slowest = cost + sum(seconds), max(slowest, *seconds)
        run += len(chosen)
        if chosen and not noticed:
            with copy.changed(change):
                result = copy.pytest(["-x", "-o", f"timeout={30 + 5 * slowest:.0f}", *chosen], 60 + 4 * cost, First)
            noticed = HANG if result is None else result["failed"]
        if noticed:
            break
    line = {"change": change.name, "file": change.file, "line": change.lines[0], "what": str(change)}
    line |= {"noticed": noticed, "tests": run, "of": of, "own": own, "seconds": round(time.monotonic() - begun, 1)}
    return line


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
    parser.add_argument("--budget", type=float, default=120.0, help="seconds of other folders' tests for one change")
    parser.add_argument("--only", metavar="PATTERN", default="*", help="of the files that match, as runner/rundir/*")
    parser.add_argument("--own", action="store_true", help="only with the tests of the module's own folder: quicker")
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
    preload()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the copy is removed, and what runs in it killed
    with Copy(root) as copy:
        tests = Executed(copy, folder / "executed", lambda line: print(line, flush=True))
        for number, change in enumerate(changes, 1):
            known = results.get(change.name)
            again = known and verdict(known, judged) == LIVES and (options.again or (known["own"] and not options.own))
            if known is None or again:
                known = results[change.name] = examine(copy, change, tests, options.budget, options.own)
                with path.open("a") as file:
                    file.write(json.dumps(known) + "\n")
                end = f"noticed by {known['noticed']}" if known["noticed"] else "LIVES"
                print(f"{number} {change.name} {change}: {end} ({known['seconds']} s)", flush=True)
    if tests.failed:
        print(f"not used, since they fail without a change: {', '.join(sorted(tests.failed))}")
    tried = [results[change.name] for change in changes]
    print(table(tried, judged))
    return int(any(verdict(result, judged) in (LIVES, "gap") for result in tried))


if __name__ == "__main__":
    sys.exit(main())
