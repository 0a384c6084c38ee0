"""Measure the records of a run: a line of metrics.jsonl by number of sources, and a resume by size of the file.

- A step's record, from the indices of a batch of 16 to the line in the file: counting, summing up, writing. In seconds
  of CPU, which other work on the machine changes less. Lines that name every source are the peer.
- A resume that drops the last 100 steps: in place, as after an attempt that has certainly ended; by a copy, as after an
  attempt that may still run; and the peer, which reads the file and rewrites it. All three are timed until durable.
- The other files that a start of a long run reads: the last step, and the log of its attempts.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.results import Table, table
from benchmarks.timing import seconds
from exactdata.loading.protocols import BatchRecord
from exactdata.order.ledger import DataLedger
from runner.metrics import resume_jsonl, resume_records
from runner.rundir.appender import announce, withdraw
from runner.rundir.attempt_log import AttemptLog, last_step
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.system import files
from runner.training.data.consumption import TrackedConsumption

BATCH, SIZE = 16, 10_000
STEPS, TURNS = 500, 15
SOURCES = (1, 10, BATCH, 1_000)
MEGABYTES = (1, 22, 221)
TAIL = 100
ATTEMPTS = (10, 1_000)


class Records:
    """The records of a run with `sources` sources. Each batch is drawn from as many different sources as possible."""

    def __init__(self, path: Path, sources: int, always_all: bool) -> None:
        names = [f"source{number:04d}" for number in range(sources)]
        self.consumption = TrackedConsumption(
            None, None, DataLedger(names, [SIZE] * sources), dict.fromkeys(names, 2048)
        )
        self.names, self.always_all = names, always_all
        self.writer = resume_jsonl(path, 0)
        draw = np.random.default_rng(0)
        self.batches = itertools.cycle(
            [
                draw.permutation(sources)[np.arange(BATCH) % sources] * SIZE + draw.integers(SIZE, size=BATCH)
                for _ in range(100)
            ]
        )
        self.step = 0

    def write(self) -> None:
        """Make the record of a step."""
        self.step += 1
        positions = np.arange(BATCH * (self.step - 1), BATCH * self.step)
        batch = BatchRecord(next(self.batches), positions, 0)
        self.consumption.consume(batch)
        sources = self.consumption.sources(batch)
        assert sources is not None
        self.consumption.commit(self.consumption.control())
        losses = np.bincount(sources, np.full(BATCH, 0.123456789), len(self.names)) / 3
        record: dict[str, Any] = {"step": self.step, "loss": 2.3456789, "lr": 1e-3, "samples_seen": BATCH * self.step}
        record |= self.consumption.totals(1 if self.always_all else self.step)
        record["loss_by_source"] = {self.names[i]: float(losses[i]) for i in np.flatnonzero(losses).tolist()}
        self.writer.write(record)


def lines(folder: Path) -> None:
    """Measure bytes and time of a line."""
    found = table("records", "a record of a batch of 16")
    all_runs = {
        (sources, always): Records(folder / f"{sources}-{always}.jsonl", sources, always)
        for sources in SOURCES
        for always in (False, True)
    }
    taken: dict[tuple[int, bool], list[float]] = {key: [] for key in all_runs}
    for _ in range(TURNS):
        for key, records in all_runs.items():
            began = time.process_time()
            for _ in range(STEPS):
                records.write()
            taken[key].append((time.process_time() - began) / STEPS)
    for sources in SOURCES:
        size, size_of_all = (
            files.size_of(all_runs[sources, always].writer._fd) / (TURNS * STEPS) for always in (False, True)
        )
        mine, whole, few = (np.array(taken[key]) for key in ((sources, False), (sources, True), (BATCH, False)))
        row = f"from {sources:,} sources"
        found.add(row, "bytes", size, "B")
        found.add(row, "time", 1e6 * float(np.median(mine)), "µs")
        found.add(row, "naming all: bytes", size_of_all, "B")
        found.add(row, "naming all: time", 1e6 * float(np.median(whole)), "µs")
        if sources > BATCH:
            found.add(row, f"time, of {BATCH} sources'", float(np.median(mine / few)), at_most=1.5)


def text_of(first: int, last: int) -> bytes:
    """Return the lines of some steps, of 220 bytes."""
    return b"".join(
        b'{"step": %d, "loss": 2.345678901, "text": "%s"}\n' % (step, b"x" * (220 - 44 - len(str(step))))
        for step in range(first, last + 1)
    )


@contextmanager
def held(path: Path) -> Iterator[RunDir]:
    with Lease.acquire(RunDir(path).lease, None, 5.0) as lease:
        yield RunDir(path, lease.guard)


def resumes(folder: Path) -> None:
    """Time a resume, by size of the file."""
    found = table("records-resume", "metrics.jsonl")
    medians: dict[int, float] = {}
    for megabytes in MEGABYTES:
        steps = megabytes * 1_000_000 // 220
        path = folder / f"{megabytes}"
        path.mkdir()
        with held(path) as run:
            run.metrics.write_bytes(text_of(1, steps))
            run.timings.write_bytes(b"")
            copying, _ = resume_records(run, steps)
            copying.close()
            taken: dict[str, list[float]] = {name: [] for name in ACTIONS}
            for _ in range(5):
                for name, (before, act) in ACTIONS.items():
                    before(run)
                    taken[name].append(seconds(partial(act, run, steps - TAIL)))
                    with run.metrics.open("ab") as file:
                        file.write(text_of(steps - TAIL + 1, steps))
                        file.flush()
                        os.fsync(file.fileno())
        report(found, f"{megabytes} MB", taken)
        medians[megabytes] = statistics.median(taken["in place"])
    least, most = MEGABYTES[0], MEGABYTES[-1]
    found.add(f"{most} MB / {least} MB", "in place", medians[most] / medians[least], at_most=1.5)


def resume(run: RunDir, step: int) -> None:
    for writer in resume_records(run, step):
        writer.abandon()


def by_hand(run: RunDir, step: int) -> None:
    """Read the lines, and write the kept ones into a new file that replaces the old one."""
    path = run.metrics
    data = path.read_bytes()
    end = data.index(b'{"step": %d,' % (step + 1))
    temporary = path.with_name("temporary")
    with temporary.open("wb") as file:
        file.write(data[:end])
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


Act = Callable[[RunDir], None]
ACTIONS: dict[str, tuple[Act, Callable[[RunDir, int], None]]] = {
    "in place": (withdraw, resume),
    "copy": (announce, resume),
    "read and write": (withdraw, by_hand),
}
"""How the attempt before ended, and how the resume then treats the file."""


def report(found: Table, row: str, taken: dict[str, list[float]]) -> None:
    for name, each in taken.items():
        found.add(row, name, 1000 * statistics.median(each), "ms")
    for name in ("in place", "copy"):
        ratio = statistics.median(a / b for a, b in zip(taken[name], taken["read and write"], strict=True))
        large = row.startswith(str(MEGABYTES[-1])) and name == "in place"
        found.add(row, f"{name} / read and write", ratio, at_most=0.1 if large else None)


def starts(folder: Path) -> None:
    """Time the other reads at the start of a long run."""
    found = table("records-start", "what a start reads")
    path = folder / "long"
    path.mkdir()
    with held(path) as run:
        run.metrics.write_bytes(text_of(1, 1_000_000))
        taken = cpu(lambda: last_step(run), 100)
        found.add("the last step of 1,000,000", "time", 1000 * taken, "ms")
        for attempts in ATTEMPTS:
            line = {"attempt": 1, "cause": "killed", "host": "node0001", "seconds": {"steps": 600.0}, "start_step": 1}
            line |= {"end_step": 9, "checkpoint_step": 8, "steps_lost": 1, "started": 1.7e9, "ended": 1.7e9 + 600}
            run.attempts.write_text("".join(json.dumps({**line, "attempt": n}) + "\n" for n in range(1, attempts + 1)))
            taken = cpu(lambda: AttemptLog.begin(run, {}, 10, lambda record: "killed"), 5)
            found.add(f"the log of {attempts:,} attempts, with closing the last", "time", 1000 * taken, "ms")


def cpu(act: Callable[[], object], times: int) -> float:
    """Return the median seconds of CPU."""
    taken = []
    for _ in range(times):
        began = time.process_time()
        act()
        taken.append(time.process_time() - began)
    return statistics.median(taken)


def main() -> None:
    """Measure all tables."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines(folder)
        resumes(folder)
        starts(folder)


if __name__ == "__main__":
    main()
