"""Copy the project and run pytest in the copy, in forks of a process with torch imported."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from mutants.changes import Change

PRELOADED = """
    torch torch.distributed.checkpoint torch.utils.data numpy hydra omegaconf yaml orjson xxhash rich.progress submitit
    safetensors.torch hypothesis hypothesis.strategies psutil coverage
""".split()
OPTIONS = ["-q", "-p", "no:cacheprovider", "--unlimited", "-m", "(promise or not slow) and not slurm"]
OPTIONS += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # plugins are preloaded


def preload() -> None:
    """Import the libraries that most tests need, and nothing of the project."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for name in PRELOADED:
        with suppress(ImportError):
            import_module(name)


class Copy:
    """A copy of the project's files in a temporary folder. Nothing outside of it is changed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._folder = Path(tempfile.mkdtemp(prefix="mutants-"))
        self.path = self._folder / "copy"
        self._ticks = 0
        words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(words, cwd=root, check=True, capture_output=True, text=True).stdout
        for name in filter(None, listed.split("\0")):
            if (root / name).is_file():
                (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(root / name, self.path / name)
        who = ["-c", "user.name=mutants", "-c", "user.email=mutants@localhost"]
        for words in (["init", "-q"], ["add", "-A"], [*who, "commit", "-q", "-m", "copy"]):
            subprocess.run(["git", *words], cwd=self.path, check=True, capture_output=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def changed(self, change: Change) -> Iterator[None]:
        """Apply the change to the copy within the block."""
        path = self.path / change.file
        before, times = path.read_bytes(), path.stat()
        self._ticks += 1
        try:
            path.write_bytes(change.applied(before))
            later = times.st_mtime + self._ticks  # compiled files are identified by their source's second
            os.utime(path, (later, later))
            yield
        finally:
            path.write_bytes(before)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def pytest(self, arguments: list[str], limit: float, plugin: Callable[[], Any]) -> dict[str, Any] | None:
        """Run pytest in a new process.

        Args:
            arguments: arguments of pytest.
            limit: seconds after which pytest and its children are killed.
            plugin: called in the process; an object with pytest's hooks and `result`, a dict.

        Returns:
            The plugin's result, with pytest's exit `status`; None if the process was killed.
        """
        result = self._folder / "result.json"
        result.unlink(missing_ok=True)
        temporary = self._folder / "tmp"
        shutil.rmtree(temporary, ignore_errors=True)
        pid = os.fork()
        if not pid:
            self._become(arguments, temporary, result, plugin)
        ended = os.pidfd_open(pid)
        try:
            select.select([ended], [], [], limit)
        finally:
            os.close(ended)
            with suppress(ProcessLookupError):  # the whole session's group, with its children
                os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return json.loads(result.read_text()) if result.exists() else None

    def _become(self, arguments: list[str], temporary: Path, result: Path, plugin: Callable[[], Any]) -> None:
        """Run pytest in this process and do not return."""
        import pytest

        try:
            os.setsid()
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            output = os.open(self._folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for fd in (1, 2):
                os.dup2(output, fd)
            os.chdir(self.path)
            os.environ.update(PYTHONPATH=str(self.path), TMPDIR=str(self._folder))
            tempfile.tempdir = None
            own = ("", str(self._root), str(self._root / "tests"))
            sys.path[:] = [str(self.path), *(entry for entry in sys.path if entry not in own)]
            hooks = plugin()
            status = pytest.main([*OPTIONS, f"--basetemp={temporary}", *arguments], plugins=[hooks])
            whole = result.with_suffix(".part")
            whole.write_text(json.dumps(hooks.result | {"status": int(status)}))
            whole.rename(result)
        except BaseException:  # noqa: BLE001 the fork must not return to its caller
            traceback.print_exc()
        finally:
            os._exit(0)

    @property
    def output(self) -> str:
        """Return the output of the last pytest."""
        return (self._folder / "output").read_text(errors="replace")
