"""A process that lost its lease changes nothing, wherever it was stopped and whenever it wakes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import faults
import pytest
from tiny_attempts import attempt, contents, tiny_attempts

from runner.errors import ExitStatus


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with tiny_attempts():
        yield


class Stopped:
    """An attempt in a thread, which is stopped at one of its changes to the file system, like a process by SIGSTOP."""

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
        """Whether it was stopped; otherwise it has ended."""
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


SLOW = [pytest.param(when, 1, marks=pytest.mark.slow) for when in ("before", "after")]


@pytest.mark.parametrize(("when", "stride"), [("before", 9), *SLOW])
def test_a_process_stopped_anywhere_changes_nothing_after_its_successor(when: str, stride: int, tmp_path: Path) -> None:
    """At every call of an attempt that creates, changes or removes something: records, metrics, lease, checkpoints."""
    changed: dict[str, Any] = {}
    at, stopped = 0, True
    while stopped:
        path = tmp_path / str(at)
        path.mkdir()
        older = Stopped(path, at, when)
        with faults.intercepted(older.act):
            stopped = older.run_until_stopped()
            if stopped:
                held = (path / "lease" / "00000001.json").exists()
                finished = (path / "finished.json").exists()
                assert attempt(path, restart_count=1) == ExitStatus.FINISHED
                before = contents(path)
                older.wake()
                after = contents(path)
                if not held:  # it had no lease yet, and comes to a finished run as a newer attempt
                    before, after = ({k: v for k, v in c.items() if k[:6] != "lease/"} for c in (before, after))
                done = finished or not held
                if before != after or older.status != (ExitStatus.FINISHED if done else ExitStatus.SUPERSEDED):
                    differing = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
                    changed[f"{at}: {older.calls[at]}"] = (older.status, differing)
        at += stride
    assert at > 50
    assert not changed, changed
