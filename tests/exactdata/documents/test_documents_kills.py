"""Preparations that are killed, run out of space or run twice at once end with the same files."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from exactdata.documents import claims, prepared, preparing
from exactdata.documents.dataset import spec_of
from exactdata.documents.packed import PlanOptions, make_plan
from exactdata.errors import DataError

Tree = dict[str, bytes]
CHANGES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.utime")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a source file of three parts."""
    monkeypatch.setattr(prepared, "SMALL", 1000)
    monkeypatch.setattr(prepared, "LARGE", 1000)
    monkeypatch.setattr(claims, "STALE_S", 0.0)  # a claim that was killed half written
    monkeypatch.setattr(claims, "POLL_S", 0.001)
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": "x" * (n % 60)}) + "\n" for n in range(60)))
    return path


def prepare(source: Path, cache: Path) -> Path:
    """Prepare and plan in this process."""
    index = preparing.prepare(spec_of(source), cache, workers=0)
    assert len(index.store.spec.parts) == 3
    return make_plan(index, PlanOptions(32)).directory


def tree(cache: Path) -> Tree:
    """Return all files below the cache except the claims of killed processes."""
    kept = [path for path in cache.rglob("*") if path.is_file() and path.parent.name != "claims"]
    hidden = list(cache.rglob(".*"))
    assert not hidden, hidden
    return {str(path.relative_to(cache)): path.read_bytes() for path in kept}


def in_child(act: Callable[[], None]) -> int:
    """Run in a forked process; return its exit status, negative for a signal."""
    if not (pid := os.fork()):
        status = 70
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def dies_before(change: int, cache: Path) -> None:
    """Kill this process before a change below the cache. Data that it has not flushed are lost."""
    left = change

    def hook(event: str, args: tuple[object, ...]) -> None:
        nonlocal left
        if event in CHANGES and isinstance(args[0], str | Path) and str(args[0]).startswith(str(cache)):
            if event == "open" and not int(args[2]) & (os.O_WRONLY | os.O_RDWR):  # type: ignore[call-overload]
                return
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


@pytest.mark.promise("documents whose preparation is killed at any call are complete after the next start")
def test_killed_preparation_is_completed_by_the_next_start(source: Path, tmp_path: Path) -> None:
    """Kill a forked process with SIGKILL. Claims, temporary folders and half-written files stay behind."""
    prepare(source, tmp_path / "whole")
    expected = tree(tmp_path / "whole")
    for change in range(1000):
        cache = tmp_path / f"killed-{change}"

        def act(change: int = change, cache: Path = cache) -> None:
            dies_before(change, cache)
            prepare(source, cache)

        status = in_child(act)
        if not status:
            break
        assert status == -signal.SIGKILL
        prepare(source, cache)
        assert tree(cache) == expected, change
    assert change > 40


def test_full_disk_is_one_error_and_a_start_with_space_works(source: Path, tmp_path: Path) -> None:
    """Stand in for a full disk with a limit on file sizes, from nothing up to the largest file."""
    prepare(source, tmp_path / "whole")
    expected = tree(tmp_path / "whole")
    sizes = sorted({len(content) for content in expected.values()})
    for limit in [0, *(size - 1 for size in sizes if size > 1)]:
        cache = tmp_path / f"full-{limit}"

        def act(limit: int = limit, cache: Path = cache) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            with pytest.raises(DataError, match=r"cannot (prepare documents here|write the pack plan).*set.*cache"):
                prepare(source, cache)

        assert in_child(act) == 0, limit
        prepare(source, cache)
        assert tree(cache) == expected, limit


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_a_real_file_system_that_is_full_is_an_error_at_any_size(source: Path, tmp_path: Path) -> None:
    prepare(source, tmp_path / "whole")
    small, failed = tmp_path / "small", 0
    small.mkdir()
    for blocks in range(1, 40):
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={blocks * 4}k", "tmpfs", small], check=False)
        if mounted.returncode:
            pytest.skip("mount is not permitted")
        try:

            def act() -> None:
                with pytest.raises(DataError, match=r"No space left on device.*cache"):
                    prepare(source, small)

            status = in_child(lambda: (prepare(source, small), None)[1])
            if status == 0:
                break
            assert status == 70
            assert in_child(act) == 0
            failed += 1
            subprocess.run(["mount", "-o", "remount,size=9m", small], check=True)
            prepare(source, small)
            assert tree(small) == tree(tmp_path / "whole")
        finally:
            subprocess.run(["umount", small], check=True)
    assert failed > 5


COMMAND = """
import sys
from pathlib import Path
from exactdata.documents import preparing
from exactdata.documents.dataset import spec_of
from exactdata.documents.packed import PlanOptions, make_plan
index = preparing.prepare(spec_of(sys.argv[1]), Path(sys.argv[2]), workers=2)
make_plan(index, PlanOptions(256))
"""


def start(source: Path, cache: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", COMMAND, str(source), str(cache)]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, start_new_session=True)


def workers_of(cache: Path) -> set[int]:
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if b"exactdata.documents.worker" in words and any(w.startswith(str(cache).encode()) for w in words):
            found.add(int(path.parent.name))
    return found


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.slow
def test_two_processes_share_work_and_one_survives_a_kill(tmp_path: Path) -> None:
    """Run two processes with two workers each: both complete, then one is killed and its workers end."""
    source = tmp_path / "a.jsonl"
    with open(source, "w") as file:
        for number in range(60_000):
            file.write(json.dumps({"text": f"{number} " * (number % 97)}) + "\n")
    both = [start(source, tmp_path / "both") for _ in range(2)]
    errors = [process.communicate(timeout=300)[1].decode() for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    told = [int(e.split("prepared ")[1].split()[0].replace(",", "")) if "prepared" in e else 0 for e in errors]
    assert sum(told) == sum(bool(number % 97) for number in range(60_000)), "nothing was done twice"

    cache = tmp_path / "killed"
    first, second = start(source, cache), start(source, cache)
    wait_for(lambda: list(cache.glob("*/parts/0*")))
    first.kill()
    first.communicate()
    errors = [second.communicate(timeout=300)[1].decode()]
    assert second.returncode == 0, errors
    wait_for(lambda: not workers_of(cache), 10)
    assert tree(cache) == tree(tmp_path / "both")

    alone = tmp_path / "alone"
    process = start(source, alone)
    wait_for(lambda: list(alone.glob("*/parts/0*")))
    process.kill()
    process.communicate()
    wait_for(lambda: not workers_of(alone), 10)
    done = {part.name: part.stat().st_mtime_ns for part in alone.glob("*/parts/0*")}
    last = start(source, alone)
    errors = [last.communicate(timeout=300)[1].decode()]
    assert last.returncode == 0, errors
    assert tree(alone) == tree(cache)
    assert done == {part.name: part.stat().st_mtime_ns for part in alone.glob("*/parts/0*") if part.name in done}
