"""Train runs whose attempts differ in their number of ranks. All ranks are forks of one process with torch imported.

`Shapes` is the test's interface to that process, which reads one run per line and answers with one line.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PATIENCE_S = 400.0
# Elements of a group, of a bucket and of one addition. The first values are the product's, with which a small model has
# a single group. Sums do not depend on them.
SIZES = [(1 << 18, 1 << 23, 1 << 20), (1, 1, 0), (300, 2000, 0), (300, 2000, 1000)]
GRACE_S = 5.0  # for ranks that get a stop request before they have joined each other


class Part(NamedTuple):
    """An attempt: its ranks, and the signal that ends it after some lines of metrics and more milliseconds."""

    ranks: int
    lines: int | None = None  # None: the attempt finishes
    delay_ms: int = 0
    signum: int = signal.SIGKILL


class Shapes:
    """The process that forks the ranks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"},
        )

    def run(self, folder: Path, words: list[str], parts: list[Part]) -> list[int | None]:
        """Run these attempts in `folder`. Return each status, or None if an attempt ended before its signal."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(folder), words, parts]) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert isinstance(answer, list), answer
        return answer

    def close(self) -> None:
        self._process.communicate()


@functools.cache
def the_shapes() -> Shapes:
    """Return the process that all tests of this process share. It ends with this process."""
    made = Shapes()
    atexit.register(made.close)
    return made


def make(folder: Path, words: list[str], parts: list[Part]) -> list[Any]:
    import forked

    from runner.training.ranks import gradient_sum

    folder.mkdir(parents=True, exist_ok=True)
    log, metrics = folder.parent / f"{folder.name}.log", folder / "metrics.jsonl"
    statuses = []
    for number, part in enumerate(parts):
        sizes = SIZES[(part.ranks - 1 + number) % len(SIZES)]
        gradient_sum.GROUP, gradient_sum.BUCKET, gradient_sum.AT_ONCE = sizes
        processes = forked.attempt_of([*words, f"run.dir={folder}"], log, part.ranks)
        if part.lines is not None:
            _wait_for(part.lines, metrics, processes)
            time.sleep(part.delay_ms / 1000)
            for process in processes:
                with suppress(ProcessLookupError):
                    os.killpg(process, part.signum)
        ended = _statuses(processes)
        statuses.append(ended[0])
        if part.lines is None and any(ended):
            raise RuntimeError(f"{part} ended with {ended}:\n{log.read_text()}")
    return statuses


def _statuses(processes: list[int]) -> list[int]:
    """Return how the ranks ended. End the others when one fails, as srun and torchrun do."""
    found: dict[int, int] = {}
    failed: float | None = None
    while len(found) < len(processes):
        for process in set(processes) - found.keys():
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                found[process] = os.waitstatus_to_exitcode(status)
        if any(found.values()) and failed is None:
            failed = time.monotonic()
        if failed is not None and (min(found.values()) < 0 or time.monotonic() - failed > GRACE_S):
            for process in set(processes) - found.keys():
                os.killpg(process, signal.SIGKILL)
        time.sleep(0.002)
    return [found[process] for process in processes]


def _wait_for(lines: int, metrics: Path, processes: list[int]) -> None:
    """Return when the metrics have `lines` lines, or a rank has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while (metrics.read_bytes().count(b"\n") if metrics.exists() else 0) < lines:
        if any(os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) for process in processes):
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{metrics} did not get {lines} lines")
        time.sleep(0.002)


def main() -> None:
    import torch

    from runner.training import attempt, session

    assert attempt
    assert session
    torch.set_num_threads(1)
    output, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        folder, words, parts = json.loads(line)
        try:
            answer: Any = make(Path(folder), words, [Part(*part) for part in parts])
        except RuntimeError as error:
            answer = str(error)
        print(json.dumps(answer), file=output, flush=True)


if __name__ == "__main__":
    main()
