"""Run the real batch script of a simulated job in a real bash, which asks the world to run commands.

`scontrol`, `srun`, `sleep`, `date`, `rm` and `echo` are shell functions that send their arguments through a pipe and
wait for the answer. Bash reads and writes the marker files in a real folder, a copy of the simulated one. At each
request, the changes of bash are copied to the simulated folder, and other changes to the real folder before bash
continues. All actions between two requests therefore happen at one moment.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO

from runner.system import files
from simulation.disk import Disk
from simulation.engine import World

FUNCTIONS = r"""
ask() {
    local IFS=$'\x1f' answer
    printf '%s\n' "$*" >&"$OUT_FD"
    IFS= read -r -u "$IN_FD" answer || exit 99
    [ -z "${answer#*$'\x1f'}" ] || printf '%s\n' "${answer#*$'\x1f'}"
    return "${answer%%$'\x1f'*}"
}
scontrol() { ask scontrol "$@"; }
srun() { ask srun; }
sleep() { ask sleep "$@"; }
date() { ask date; }
rm() { ask rm "$@"; }
echo() { ask echo "$@"; }
"""
END = b"\x1f"

Answer = tuple[int, str]
"""Exit status and output, one line, of a command."""


@cache
def _place() -> Path:
    """Return the folder for copies of marker files. It is removed when this process ends."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    holder = tempfile.TemporaryDirectory(prefix="runner-batch-", dir=shared)
    _KEPT.append(holder)
    return Path(holder.name)


_KEPT: list[tempfile.TemporaryDirectory[str]] = []


class Batch:
    """One start of a batch script, in a thread of its simulated process.

    Args:
        world: the world of the process.
        disk: the files of that world.
        text: content of the script.
        folder: folder of the marker files, on the simulated disk.
        mark: prefix of the names of the marker files.
        environment: environment variables of the script.
        commands: implementations of `scontrol`, `srun`, `sleep`, `date` and `echo`.
    """

    def __init__(
        self,
        world: World,
        disk: Disk,
        text: str,
        folder: Path,
        mark: str,
        environment: Mapping[str, str],
        commands: Mapping[str, Callable[[Sequence[str]], Answer]],
    ) -> None:
        self._world = world
        self._disk = disk
        self._folder = folder
        self._prefix = f"{mark}."
        self._environment = environment
        self._commands = commands
        self._copy = _place() / f"{os.getpid()}-{world.number()}"  # a fork of this process has the same place
        self._text = FUNCTIONS + text.replace(str(folder), str(self._copy))
        self._known: dict[str, bytes] = {}

    def run(self) -> int:
        """Run the script to its end and return its exit status."""
        os.mkdir(self._copy)
        try:
            with self._bash() as (bash, asked, answers):
                while line := asked.readline():
                    self._bring()
                    status, output = self._carry_out(line.rstrip(b"\n").split(END))
                    self._fetch()
                    os.write(answers, b"%d\x1f%s\n" % (status, output.encode()))
                self._bring()
                return bash.wait()
        finally:
            shutil.rmtree(self._copy, ignore_errors=True)

    @contextmanager
    def _bash(self) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes], int]]:
        asked_by, asks = os.pipe()
        hears, answers = os.pipe()
        self._fetch()
        bash = subprocess.Popen(
            ["/bin/bash", "--norc", "--noprofile", "-c", self._text],
            env={**self._environment, "PATH": "", "LC_ALL": "C", "OUT_FD": str(asks), "IN_FD": str(hears)},
            pass_fds=(asks, hears),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(asks)
        os.close(hears)
        with open(asked_by, "rb") as asked:
            try:
                yield bash, asked, answers
            finally:
                os.close(answers)
                bash.kill()
                bash.wait()

    def _carry_out(self, words: list[bytes]) -> Answer:
        name, rest = words[0].decode(), [word.decode() for word in words[1:]]
        if name == "rm":
            for path in rest:
                self._remove(Path(path).name)
            return 0, ""
        return self._commands[name](rest)

    def _remove(self, name: str) -> None:
        with suppress(OSError):
            files.remove(self._folder / name)
        self._known.pop(name, None)

    def _bring(self) -> None:
        """Copy bash's changes to the simulated disk."""
        for name in sorted(os.listdir(self._copy)):
            path = self._copy / name
            if path.is_dir():
                continue
            data = path.read_bytes()
            if self._known.get(name) != data:
                self._known[name] = data
                with suppress(OSError):
                    fd = files.open_fd(self._folder / name, os.O_RDWR | os.O_CREAT, 0o644)
                    try:
                        files.overwrite(fd, data)
                    finally:
                        files.close_fd(fd)

    def _fetch(self) -> None:
        """Copy the present marker files to bash's folder. On a full disk bash can create none."""
        found = self._disk.files_in(self._folder)
        there = {name: data for name, data in found.items() if name.startswith(self._prefix)}
        starts = f"{self._prefix}starts"
        if self._disk.full and starts not in there:
            if not (self._copy / starts).is_dir():
                (self._copy / starts).unlink(missing_ok=True)
                (self._copy / starts).mkdir()  # a directory, to which bash cannot write
        elif (self._copy / starts).is_dir():
            (self._copy / starts).rmdir()
        for name in os.listdir(self._copy):
            if name not in there and not (self._copy / name).is_dir():
                (self._copy / name).unlink()
        for name, data in there.items():
            if self._known.get(name) != data or not (self._copy / name).exists():
                (self._copy / name).write_bytes(data)
        self._known = there
