"""Kill a training script on some ranks, resume it on others, and compare its samples with an undisturbed order."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from exactdata import ElasticSampler

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs/examples/trainers"
TIMEOUT_S = 300
SAMPLES, SAVE_AT = 400, 10
STEPS_AFTER = 3  # steps between the checkpoint and the kill

Steps = list[list[int]]
"""The ids of each step over all ranks, in the order of their positions."""


class Shape(NamedTuple):
    """Ranks of an attempt, and samples per step over all ranks."""

    ranks: int
    batch: int = 8


@dataclass(frozen=True)
class Outcome:
    """Counts of repeated, lost and all samples, and whether they came in the order of the undisturbed run."""

    repeated: int
    lost: int
    exact: bool


EXACT = Outcome(0, 0, True)

MIXTURE: dict[str, Any] = {  # its weights change in a planned segment, and by a call before the checkpoint
    "mixed": True,
    "update": [5, {"a": 1, "b": 3}],
    "more": {"num_workers": 2, "segments": [[120, {"a": 1, "b": 1}]]},
}


def _cell(before: Shape, after: Shape, settings: dict[str, Any]) -> Any:
    name = "-".join(f"{one.ranks}x{one.batch // one.ranks}" for one in (before, after))
    return pytest.param(before, after, settings, id=f"{name}-{'mixture' if settings else 'one-source'}")


CELLS = [
    _cell(Shape(2), Shape(2), {}),
    _cell(Shape(2), Shape(1), {}),
    _cell(Shape(1), Shape(2), {}),
    _cell(Shape(1, 4), Shape(2, 8), {}),
    _cell(Shape(1), Shape(1), MIXTURE),
    _cell(Shape(1), Shape(2), MIXTURE),
    _cell(Shape(2, 8), Shape(1, 4), MIXTURE),
]
"""Arguments of a test: the shapes before and after a kill, and settings. Runs without the mixture have no workers."""
TWO_TO_ONE = _cell(Shape(2), Shape(1), MIXTURE)


def skip_without(*modules: str) -> None:
    """Skip the calling module unless all packages are installed. They are not imported, which would take seconds."""
    for name in modules:
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)


def compare(steps: Steps, expected: Steps) -> Outcome:
    """Compare the steps of a run with those of an undisturbed one."""
    ids, wanted = ([one for step in run for one in step] for run in (steps, expected))
    repeated, lost = Counter(ids) - Counter(wanted), Counter(wanted) - Counter(ids)
    return Outcome(repeated.total(), lost.total(), ids == wanted)


def undisturbed(batch: int = 8, **settings: Any) -> Steps:
    """Return the steps of a run that is never killed, from the order itself."""
    sizes = {"a": 150, "b": 50} if settings.get("mixed") else {"data": 200}
    segments = settings.get("more", {}).get("segments")
    order = ElasticSampler(sizes, list(sizes.values()), global_batch_size=batch, num_replicas=1, segments=segments)
    if settings.get("update"):
        step, weights = settings["update"]
        order.update_weights(weights, position=step * batch)
    ids = order.indices_at(np.arange(SAMPLES)).tolist()
    return [ids[at : at + batch] for at in range(0, SAMPLES, batch)]


def train(script: Path, folder: Path, ranks: int, **settings: Any) -> Steps:
    """Run a script on some ranks until all have ended.

    When a rank fails or is killed, the others are ended.

    Args:
        script: takes its settings as JSON in its first argument; see `tiny.py` next to the examples.
        folder: folder of the checkpoints (`folder` in the settings) and the log.
        ranks: the number of processes.
        settings: the other settings, such as kill_before.

    Returns:
        The steps that all ranks have logged.

    Raises:
        AssertionError: a rank failed, did not end in time, or was not killed although a kill was planned.
    """
    attempt = len(list(folder.glob("attempt*")))
    logs = folder / f"attempt{attempt}"
    logs.mkdir(parents=True)
    argument = json.dumps({"folder": str(folder), "log": str(logs / "log"), **settings})
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    running = []
    for rank in range(ranks):
        env = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        with (logs / f"output.{rank}").open("wb") as output:
            command = [sys.executable, str(script), argument]
            running.append(subprocess.Popen(command, cwd=folder, env=env, stdout=output, stderr=subprocess.STDOUT))
    end = time.monotonic() + TIMEOUT_S
    codes: list[int | None] = [None] * ranks
    try:
        while None in codes and not any(codes) and time.monotonic() < end:
            time.sleep(0.02)
            codes = [one.poll() for one in running]
    finally:
        for one in running:
            one.kill()
            one.wait()
    is_as_asked = -signal.SIGKILL in codes if settings.get("kill_before") else codes == [0] * ranks
    if not is_as_asked:
        outputs = [(logs / f"output.{rank}").read_text(errors="replace") for rank in range(ranks)]
        raise AssertionError(f"{script.name}: exit codes {codes} (None: after {TIMEOUT_S} s)\n" + "\n".join(outputs))
    return logged(logs, ranks)


def logged(logs: Path, ranks: int) -> Steps:
    """Read the steps that all ranks have logged."""
    of_ranks = [[json.loads(line) for line in (logs / f"log.{rank}").read_text().splitlines()] for rank in range(ranks)]
    steps = list(zip(*of_ranks, strict=False))
    assert all(len({one["step"] for one in step}) == 1 for step in steps), "the ranks count their steps differently"
    return [[one for group in zip(*(part["ids"] for part in step), strict=True) for one in group] for step in steps]


@dataclass
class Trials:
    """Trials of one script. A killed attempt runs once, however many resumes follow it."""

    script: Path
    folder: Path
    _killed: dict[str, tuple[Path, Steps]] = field(default_factory=dict)

    def killed(self, shape: Shape, settings: Mapping[str, Any]) -> tuple[Path, Steps]:
        """Run an attempt that is killed. Return a copy of its folder, and the steps before its checkpoint."""
        key, save_at = json.dumps([shape, settings], sort_keys=True), settings.get("save_at", SAVE_AT)
        if key not in self._killed:
            folder = self.folder / f"killed{len(self._killed)}"
            kill_before = save_at + STEPS_AFTER + 1
            arguments = {"batch": shape.batch, "kill_before": kill_before, "save_at": save_at, **settings}
            self._killed[key] = folder, train(self.script, folder, shape.ranks, **arguments)
        folder, steps = self._killed[key]
        copy = Path(f"{folder}-{len(list(self.folder.iterdir()))}")
        shutil.copytree(folder, copy)
        assert len(steps) >= save_at, f"killed at step {len(steps)}, before the checkpoint"
        return copy, steps[:save_at]

    def outcome(self, before: Shape, after: Shape, **settings: Any) -> Outcome:
        """Kill an attempt, resume it in another shape, and compare both with an undisturbed run."""
        folder, done = self.killed(before, settings)
        rest = SAMPLES - before.batch * len(done)
        steps = len(done) + -(-rest // after.batch)
        arguments = {"batch": after.batch, "steps": steps, "save_at": SAVE_AT, **settings}
        done = done + train(self.script, folder, after.ranks, resume=True, **arguments)
        return compare(done, undisturbed(before.batch, **settings))
