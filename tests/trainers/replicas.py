"""Run replicas of a torchft script, kill and restart some at random moments, and count their samples.

By hand: `python tests/trainers/replicas.py SCRIPT [--steps 200] [--kills 10] [--seed 0]`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from exactdata import ElasticSampler

ROOT = Path(__file__).parents[2]
BATCH = 4
TIMEOUT_S = 600  # a machine may be three times slower than others
Record = dict[str, Any]


@dataclass
class Replicas:
    """Replica groups of one process each, with a separate lighthouse.

    Args:
        script: logs a record of each step before its commit, and another one after it, as in_torchft.py does.
        folder: folder of the logs and outputs.
        count: number of replicas.
        options: further arguments of the script.
    """

    script: Path
    folder: Path
    steps: int
    count: int = 3
    options: list[str] = field(default_factory=list)
    lives: dict[int, int] = field(default_factory=dict)
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}",
        }
        command = [str(Path(sys.executable).with_name("torchft_lighthouse")), "--bind", f"127.0.0.1:{port}"]
        command += ["--min_replicas", "1", "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "2000"]
        self.lighthouse = self._popen(command, "lighthouse")

    def _popen(self, command: list[str], name: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.out").open("wb") as output:
            return subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=output, stderr=subprocess.STDOUT
            )

    def start(self, number: int) -> None:
        """Start or restart a replica."""
        self.lives[number] = self.lives.get(number, -1) + 1
        name = f"replica{number}-{self.lives[number]}"
        command = [sys.executable, str(self.script), "--log", f"{name}.jsonl", "--steps", str(self.steps)]
        self.environment["REPLICA"] = str(number)
        self.processes[number] = self._popen([*command, *self.options], name)

    def kill(self, number: int) -> None:
        """Kill a replica with SIGKILL."""
        process = self.processes.pop(number)
        process.kill()
        process.wait()

    def records(self, number: int, life: int) -> list[Record]:
        """Read the complete lines of a log."""
        path = self.folder / f"replica{number}-{life}.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    def commits(self, number: int) -> list[Record]:
        """Return the commits of a replica since its latest start."""
        return [one for one in self.records(number, self.lives[number]) if "step" in one]

    def train(self, kills: int, rng: random.Random, kill_all_at: int | None = None) -> None:
        """Run all replicas to the end. Kill some of them on the way, and restart them some steps later.

        Args:
            kills: how often to kill one.
            rng: draws the moments, and the replicas to kill.
            kill_all_at: a step after which to kill all at once.

        Raises:
            AssertionError: a replica failed, or did not finish in time.
        """
        until = time.monotonic() + TIMEOUT_S
        for number in range(self.count):
            self.start(number)
        moments = sorted(rng.sample(range(self.steps // 8, self.steps * 3 // 4), kills))
        absent: dict[int, int] = {}  # the step at which each is restarted
        while any(process.poll() is None for process in self.processes.values()):
            assert time.monotonic() < until, f"not finished after {TIMEOUT_S} s; see {self.folder}"
            time.sleep(rng.uniform(0.02, 0.2))
            failed = [number for number, process in self.processes.items() if process.poll()]
            assert not failed, (self.folder / f"replica{failed[0]}-{self.lives[failed[0]]}.out").read_text()[-3000:]
            if any("counts" in one for number in self.processes for one in self.records(number, self.lives[number])):
                absent, moments = {}, []
                for late in [number for number in self.processes if not self.commits(number)]:
                    self.kill(late)  # it would begin at step 0, alone
            latest = [commits[-1] for number in self.processes if (commits := self.commits(number))]
            step = max((one["step"] for one in latest), default=0)
            for number in [number for number, at in absent.items() if at <= step]:
                del absent[number]
                self.start(number)
            if kill_all_at is not None and step >= kill_all_at:
                kill_all_at, absent = None, {}
                for number in list(self.processes):
                    self.kill(number)
                for number in range(self.count):
                    self.start(number)
            elif moments and step >= moments[0] and len(latest) > 1 and max(one["of"] for one in latest) > 1:
                victim = rng.choice([number for number in self.processes if self.commits(number)])
                self.kill(victim)
                absent[victim] = step + rng.randint(1, 5)
                moments.pop(0)

    def stop(self) -> None:
        """Kill the replicas that still run."""
        for process in [*self.processes.values(), self.lighthouse]:
            process.kill()
            process.wait()

    def all_records(self) -> list[Record]:
        """Read the logs of all starts."""
        return [
            one for number, last in self.lives.items() for life in range(last + 1) for one in self.records(number, life)
        ]


def participants(records: list[Record], committed: int) -> list[int]:
    """Return how many replicas took part in each step that led to `committed` batches."""
    steps: list[int] = []
    reached = {0: steps}
    for at in range(committed):
        for one in records:
            if at in reached and one["committed"] == at and one.get("step") == len(reached[at]) + 1:
                reached[at + one["of"]] = [*reached[at], one["of"]]
    return reached[committed]


def in_order(final: Record) -> bool:
    """Return whether the trained samples are the first committed ones of the example's order."""
    wanted = Counter(samples(final["committed"] * BATCH))
    return wanted == Counter({sample: count for sample, count in enumerate(final["counts"]) if count})


def samples(count: int) -> list[int]:
    """Return the first samples of the example's order."""
    sampler = ElasticSampler({"web": 3000, "books": 1000}, [0.7, 0.3], global_batch_size=BATCH, num_replicas=1)
    return list(sampler.indices_at(np.arange(count)).tolist())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("script", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    given, options = parser.parse_known_args()
    folder = Path(tempfile.mkdtemp(prefix="replicas-"))
    replicas = Replicas(given.script.resolve(), folder, given.steps, options=options)
    began = time.monotonic()
    try:
        replicas.train(given.kills, random.Random(given.seed))
    finally:
        replicas.stop()
    records = replicas.all_records()
    fetched = {sample for one in records for sample in one.get("ids", [])}
    print(f"{given.steps} steps, {given.kills} kills, {time.monotonic() - began:.0f} s, logs in {folder}")
    print("uncommitted attempts:", sum("ids" in one for one in records) - sum("step" in one for one in records))
    for final in [one for one in records if "counts" in one]:
        counts, committed = final["counts"], final["committed"]
        of = dict(sorted(Counter(participants(records, committed)).items()))
        trained = {sample for sample, count in enumerate(counts) if count}
        repeated = sum(max(count - 1, 0) for count in counts)
        print(f"a replica at its end: {committed} committed batches, steps by participants {of}")
        print(f"  trained on {sum(counts)} samples of {committed * BATCH}, {repeated} of them repeats")
        print(f"  fetched and never trained on: {len(fetched - trained)}; exactly the order: {in_order(final)}")


if __name__ == "__main__":
    main()
