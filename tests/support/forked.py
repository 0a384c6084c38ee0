"""Train one configuration undisturbed, and again with many kills. Each attempt is a fork of this process.

    python forked.py FOLDER RANKS KILLS SEED WORD...

The runs are FOLDER/plain and FOLDER/killed, relative to the current directory. A fork has torch and the libraries of
the examples imported already, which takes most of a start.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

import torch
import torch.distributed.checkpoint
import torch.utils.data

from runner.__main__ import run
from runner.training import attempt, session

FOR_EXAMPLES = ("PIL.Image", "kornia.augmentation", "torchmetrics.classification", "transformers.models.gpt2")
PATIENCE_S = 300.0


def fork(words: list[str], log: Path, **environment: str) -> int:
    """Start one rank and return its process id, which is also its process group."""
    child = os.fork()
    if child:
        with suppress(OSError):  # the rank may have ended
            os.setpgid(child, child)  # in parent and child, so that the group exists whichever runs first
        return child
    status = 1
    try:
        os.setpgid(0, 0)
        os.environ.update(environment)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        status = run(words)
    except BaseException:  # noqa: BLE001 the traceback goes into the log for the parent
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def attempt_of(words: list[str], log: Path, ranks: int) -> list[int]:
    """Start all ranks of an attempt."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    if ranks == 1:
        return [fork(words, log)]
    return [fork(words, log, **where, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(ranks)]


def finish(processes: list[int], log: Path) -> None:
    """Wait until all ranks have exited successfully."""
    statuses = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
    if any(statuses):
        sys.exit(f"{statuses}:\n{log.read_text()}")


def kill_at(step: int, processes: list[int], metrics: Path, log: Path) -> None:
    """Send SIGKILL to all ranks and their workers once the metrics have `step` lines or more."""
    deadline = time.monotonic() + PATIENCE_S
    while (metrics.read_bytes().count(b"\n") if metrics.exists() else 0) < step:
        ended = [os.waitpid(process, os.WNOHANG)[0] for process in processes]
        if any(ended) or time.monotonic() > deadline:
            sys.exit(f"the attempt did not reach step {step}:\n{log.read_text()}")
        time.sleep(0.001)
    for signum in (signal.SIGSTOP, signal.SIGKILL):  # all at the same moment, as when a node is lost
        for process in processes:
            os.killpg(process, signum)
    for process in processes:
        os.waitpid(process, 0)


def main() -> None:
    folder, (ranks, kills, seed), words = Path(sys.argv[1]), map(int, sys.argv[2:5]), sys.argv[5:]
    log, numbers = folder / "log.txt", random.Random(seed)
    finish(attempt_of([*words, f"run.dir={folder / 'plain'}"], log, ranks), log)
    lines = (folder / "plain" / "metrics.jsonl").read_text().count("\n")
    for line in sorted(numbers.sample(range(lines), kills)):
        mine = [*words, f"run.dir={folder / 'killed'}", f"data.num_workers={numbers.choice([0, 2])}"]
        kill_at(line, attempt_of(mine, log, ranks), folder / "killed" / "metrics.jsonl", log)
    finish(attempt_of([*words, f"run.dir={folder / 'killed'}"], log, ranks), log)


if __name__ == "__main__":
    sys.path.insert(0, os.getcwd())
    torch.set_num_threads(1)
    project = "".join(path.read_text() for suffix in ("py", "yaml") for path in Path().rglob(f"*.{suffix}"))
    for module in FOR_EXAMPLES:
        if module.partition(".")[0] in project:
            __import__(module)
    assert attempt
    assert session
    main()
