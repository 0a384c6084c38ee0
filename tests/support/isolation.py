"""Run each test in an empty directory, and fail the suite if a test changes the clone."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CACHES = {".git", ".venv", "__pycache__", "build", "dist"}  # and names with these endings
SUFFIXES = ("_cache", ".egg-info", ".hypothesis")

# Children import the code of this clone, from whatever directory they start.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


class _Directories:
    """Empty directories below a directory that is removed at the end of the session."""

    def __init__(self) -> None:
        self._root: Path | None = None
        self._made = 0

    def empty(self) -> Path:
        """Return an empty directory: the last one, unless a test left something in it."""
        self._root = self._root or Path(tempfile.mkdtemp(prefix="runner-tests-"))
        path = self._root / str(self._made)
        if path.exists() and any(path.iterdir()):
            self._made += 1
            path = self._root / str(self._made)
        path.mkdir(exist_ok=True)
        return path

    def remove(self) -> None:
        if self._root:
            shutil.rmtree(self._root, ignore_errors=True)


def _files() -> dict[str, int]:
    """Return the files and directories of the clone without caches, with modification times for runs."""
    found = {}
    for folder, names, files in os.walk(ROOT):
        names[:] = [name for name in names if name not in CACHES and not name.endswith(SUFFIXES)]
        inside = Path(folder).relative_to(ROOT)
        run = "outputs" in inside.parts  # elsewhere a developer may edit files while tests run
        for name in (*names, *files):
            with suppress(FileNotFoundError):
                found[str(inside / name)] = os.lstat(os.path.join(folder, name)).st_mtime_ns if run else 0
    return found


DIRECTORIES = pytest.StashKey[_Directories]()
BEFORE = pytest.StashKey[dict[str, int]]()
CHANGED = pytest.StashKey[list[str]]()


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[DIRECTORIES] = _Directories()
    session.config.stash[BEFORE] = _files()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Run the test and its fixtures in an empty directory."""
    before = os.getcwd()
    os.chdir(item.config.stash[DIRECTORIES].empty())
    try:
        return (yield)
    finally:
        os.chdir(before)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail if a test left something in the clone, or removed something."""
    stash = session.config.stash
    stash[DIRECTORIES].remove()
    if hasattr(session.config, "workerinput"):
        return  # the process that started the workers checks what they left
    before, after = stash[BEFORE], _files()
    stash[CHANGED] = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    if stash[CHANGED] and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if changed := config.stash.get(CHANGED, []):
        terminalreporter.section("the clone has changed", red=True)
        terminalreporter.line("No test may leave or remove anything here, and nothing else may while they run:")
        for name in changed:
            terminalreporter.line(f"  {name}")
