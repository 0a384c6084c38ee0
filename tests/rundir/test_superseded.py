"""A process that lost its lease changes nothing, wherever it was stopped and whenever it wakes."""

from __future__ import annotations

import itertools
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faults
import pytest
from tiny_attempts import STEPS, attempt, contents, tiny_attempts, training_to

from runner.errors import ExitStatus
from runner.rundir.attempt_log import Finish
from runner.rundir.paths import RunDir


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with tiny_attempts():
        yield


class Stopped:
    """An attempt in a thread that stops at one of its changes to the file system, as a process does at SIGSTOP."""

    def __init__(self, path: Path, at: int, when: str) -> None:
        self.calls: list[str] = []
        self.status: int | None = None
        self._at, self._when = at, when
        self._stopped, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(path,), daemon=True)

    def _run(self, path: Path) -> None:
        self.status = attempt(path, restart_count=0)
        self._stopped.set()

    def run_until_stopped(self) -> bool:
        """Return whether it was stopped; otherwise it has ended."""
        self._thread.start()
        assert self._stopped.wait(120)
        return self.status is None

    def wake(self) -> None:
        self._wake.set()
        self._thread.join(120)
        assert not self._thread.is_alive()

    def act(self, index: int, name: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        if threading.current_thread() is not self._thread or name == "fsync":  # which changes nothing
            return call()
        here = len(self.calls) == self._at
        self.calls.append(f"{name} {faults.path_of(args[0])}")
        if here and self._when == "before":
            self._stop()
        try:
            return call()
        finally:
            if here and self._when == "after":
                self._stop()

    def _stop(self) -> None:
        self._stopped.set()
        assert self._wake.wait(120)


Choice = Callable[[str], bool]
WHERE: list[Any] = [pytest.param(when, lambda call: True, marks=pytest.mark.slow) for when in ("before", "after")]


_numbers = itertools.count()


def sometimes(call: str) -> bool:
    return next(_numbers) % 9 == 0


def at_the_records(call: str) -> bool:
    return bool(re.search(r"(metrics|timings)\.jsonl|appender\.json", call))


def changes_after(
    tmp_path: Path, when: str, where: Choice, begin: Callable[[Path], int], succeed: Callable[[Path], object]
) -> dict[str, Any]:
    """Stop an attempt at chosen calls, let others succeed it, and wake it. Return its late changes by call.

    Args:
        tmp_path: directory of the runs.
        when: `before` or `after` the call.
        where: chooses the calls.
        begin: prepares a run directory; returns the number of the lease that the attempt will acquire.
        succeed: makes the attempts that come while the older one is stopped.
    """
    changed: dict[str, Any] = {}
    begin(tmp_path / "whole")
    whole = Stopped(tmp_path / "whole", -1, when)
    with faults.intercepted(whole.act):
        assert not whole.run_until_stopped()
    assert len(whole.calls) > 50
    chosen = [at for at, call in enumerate(whole.calls) if where(call)]
    assert len(chosen) > 5
    for at in chosen:
        path = tmp_path / str(at)
        number = begin(path)
        older = Stopped(path, at, when)
        with faults.intercepted(older.act):
            if not older.run_until_stopped():  # the status is written every other second: this one made fewer calls
                continue
            held = (path / "lease" / f"{number:08d}.json").exists()
            finished = Finish.of(RunDir(path)).steps >= STEPS * number
            succeed(path)
            before = contents(path)
            older.wake()
            after = contents(path)
        if not held:  # it had no lease yet, and comes to a finished run as a newer attempt
            before, after = ({k: v for k, v in c.items() if k[:6] != "lease/"} for c in (before, after))
        expected = [ExitStatus.FINISHED] * (finished or not held) + [ExitStatus.SUPERSEDED] * (not finished)
        if before != after or older.status not in expected:
            differing = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
            changed[f"{at}: {older.calls[at]}"] = (older.status, differing)
    return changed


@pytest.mark.parametrize(("when", "where"), [("before", sometimes), *WHERE])
def test_stopped_process_changes_nothing_after_its_successor(when: str, where: Choice, tmp_path: Path) -> None:
    """Stop it at each call that changes the file system: records, metrics, lease, checkpoints."""

    def begin(path: Path) -> int:
        path.mkdir()
        return 1

    def succeed(path: Path) -> None:
        assert attempt(path, restart_count=1) == ExitStatus.FINISHED

    changed = changes_after(tmp_path, when, where, begin, succeed)
    assert not changed, changed


@pytest.mark.parametrize(("when", "where"), [("before", at_the_records), *WHERE])
def test_stopped_process_truncates_no_records_of_successors(when: str, where: Choice, tmp_path: Path) -> None:
    """Only closed records are truncated in place, not those that a stopped process still has open.

    The first of its two successors has to make copies, and the second truncates those. To the second, records that the
    last attempt has closed must not count as closed if an older process still has them open.
    """
    template = tmp_path / "template"
    template.mkdir()
    assert attempt(template) == ExitStatus.FINISHED
    for name in ("metrics.jsonl", "timings.jsonl"):  # a kill may leave more steps than were saved
        with open(template / name, "a") as file:
            file.write('{"step": 3, "loss": 9.0}\n{"step": 4, "lo')

    def begin(path: Path) -> int:
        shutil.copytree(template, path)
        return 2

    def succeed(path: Path) -> None:
        files: list[int] = []
        for restart, steps in enumerate((2 * STEPS, 3 * STEPS, 4 * STEPS), 1):
            with training_to(steps):
                assert attempt(path, restart_count=restart) == ExitStatus.FINISHED
            files.append((path / "metrics.jsonl").stat().st_ino)
        assert files[0] == files[1] == files[2]

    with training_to(2 * STEPS):
        changed = changes_after(tmp_path, when, where, begin, succeed)
    assert not changed, changed
