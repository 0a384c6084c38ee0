"""Run attempts as forks of a process that has imported torch and the runner, which takes most of a start.

`start` returns an object like a `subprocess.Popen`. With several ranks the process does what torchrun does: it serves
the ranks' key-value store, starts each rank in a separate session, and ends the others when one fails.

Such processes share the seed of Python's hashes. The runs of the docs, of Slurm and of `chaos` are new processes.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
MAX_REQUEST = 1 << 20  # bytes
END_S = 30.0  # time for ranks to end when another one has failed


class Forked:
    """A process forked by the zygote, with as much of `subprocess.Popen` as the tests use."""

    def __init__(self, pid: int, pidfd: int, output: int, words: Sequence[str]) -> None:
        self.pid, self.args = pid, list(words)
        self.returncode: int | None = None
        self._pidfd = pidfd
        self.stdout: IO[str] = os.fdopen(output)

    def poll(self) -> int | None:
        """Return the exit status, or None while the process runs."""
        if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
            self.returncode = _zygote().status(self.pid)
            os.close(self._pidfd)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the process and return its exit status.

        Raises:
            TimeoutExpired: it does not end within `timeout` seconds.
        """
        if self.poll() is None and not select.select([self._pidfd], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Wait for the process and return its output.

        Raises:
            TimeoutExpired: it does not end within `timeout` seconds.
        """
        parts, deadline = [], None if timeout is None else time.monotonic() + timeout
        while True:
            left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
            if not select.select([self.stdout], [], [], left)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            part = os.read(self.stdout.fileno(), 1 << 16)
            if not part:
                break
            parts.append(part)
        self.stdout.close()
        self.wait(None if deadline is None else max(deadline - time.monotonic(), 0.0))
        return b"".join(parts).decode(), None

    def send_signal(self, signum: int) -> None:
        """Signal the process if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, signum)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


class _Zygote:
    """The tests' connection to the process that forks."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, __file__, str(theirs.fileno())]
        self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, start_new_session=True)
        theirs.close()
        atexit.register(self.close)

    def fork(self, request: dict[str, Any], output: int) -> int:
        """Fork a process and return its id."""
        socket.send_fds(self._socket, [json.dumps(request).encode()], [output])
        return self._answer()

    def status(self, pid: int) -> int:
        """Return the exit status of a process that has ended."""
        self._socket.send(json.dumps({"status": pid}).encode())
        return self._answer()

    def _answer(self) -> int:
        answer = self._socket.recv(MAX_REQUEST)
        assert answer, "the process that forks the runs has ended"
        return int(answer)

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def _zygote() -> _Zygote:
    return _Zygote()


def start(words: Sequence[str], environment: Mapping[str, str], cwd: Path = ROOT, ranks: int = 1) -> Forked:
    """Start `python -m runner WORDS` in a new session, with all output on one pipe.

    Args:
        words: the command's arguments.
        environment: all environment variables.
        cwd: the current directory.
        ranks: number of ranks. Several are started as torchrun starts them.
    """
    reading, writing = os.pipe()
    try:
        request = {"words": list(words), "environment": dict(environment), "cwd": str(cwd), "ranks": ranks}
        pid = _zygote().fork(request, writing)
    finally:
        os.close(writing)
    return Forked(pid, os.pidfd_open(pid), reading, words)


def _preload() -> None:
    import torch
    import torch.distributed.checkpoint
    import torch.distributed.fsdp

    import launch
    import runner

    assert torch
    for package in (runner, launch):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                with suppress(ImportError):  # part of an extra
                    import_module(module.name)


def _serve(requests: socket.socket) -> None:
    """Fork and wait as requested until the tests have ended. Return in the child."""
    while True:
        message, files, *_ = socket.recv_fds(requests, MAX_REQUEST, 1)
        if not message:
            sys.exit()
        request = json.loads(message)
        if "status" in request:
            answer = os.waitstatus_to_exitcode(os.waitpid(request["status"], 0)[1])
        else:
            answer = os.fork()
            if not answer:
                requests.close()
                _become(request, files[0])
                return
            os.close(files[0])
        requests.send(str(answer).encode())


def _become(request: dict[str, Any], output: int) -> None:
    """Turn this process into the requested command."""
    os.setsid()
    for fd in (1, 2):
        os.dup2(output, fd)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["cwd"])
    path = [request["cwd"], *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
    sys.argv = ["runner", *request["words"]]
    if request["ranks"] > 1:
        _ranks(request["ranks"])
    _seed_anew()


def _seed_anew() -> None:
    """Seed all generators anew, so that two processes do not draw the same numbers."""
    import random

    import numpy as np
    import torch

    random.seed()
    np.random.seed()
    torch.seed()


def _ranks(count: int) -> None:
    """Fork `count` ranks and return in each of them. The parent ends when they have ended."""
    listening = socket.create_server(("127.0.0.1", 0))
    common = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listening.getsockname()[1]),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    ranks = []
    for rank in range(count):
        pid = os.fork()
        if not pid:
            listening.close()
            os.setsid()
            os.environ.update(common, RANK=str(rank), LOCAL_RANK=str(rank))
            return
        ranks.append(pid)
    os._exit(_attend(ranks, listening))


def _attend(ranks: list[int], listening: socket.socket) -> int:
    """Serve the ranks' store until they have ended. Return 1 if one failed, which ends the others."""
    from torch import distributed

    dist: Any = distributed  # the stores are not typed
    port = listening.getsockname()[1]
    options = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listening.detach()}
    store = dist.TCPStore("127.0.0.1", port, **options)
    assert store

    def stop(signum: int, _frame: object = None) -> None:
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(rank, signum)

    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, stop)
    signal.signal(signal.SIGALRM, lambda *_: stop(signal.SIGKILL))
    failed = False
    while ranks:
        pid, status = os.wait()
        ranks.remove(pid)
        if status and not failed:
            failed = True
            print(f"a rank (process {pid}) ended with {os.waitstatus_to_exitcode(status)}", flush=True)
            stop(signal.SIGTERM)
            signal.setitimer(signal.ITIMER_REAL, END_S)
    return int(failed)


if __name__ == "__main__":
    _preload()
    _serve(socket.socket(fileno=int(sys.argv[1])))
    from runner.__main__ import main

    sys.exit(main())
