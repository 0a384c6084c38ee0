"""Kill and resume runs, and compare them bit for bit with the same runs without a kill.

Both runs of a case begin with the same command, as separate processes with separate compiler caches. One of them is
killed after step `KILL` and resumes from step `RESUMED`. Some cases have a smaller model, so that all of them share a
GPU and a disk.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import sizes
from benchmarks.gpu.report import Report
from benchmarks.gpu.runs import SAVE, Run, held_words
from benchmarks.results import Table, table
from runner.chaos.compare import compare
from runner.checkpoint.files import manifest
from runner.checkpoint.files.directory import Folder
from runner.checkpoint.tensors.reader import tensors
from runner.checkpoint.tensors.staging import MODEL
from runner.rundir.paths import RunDir
from runner.system import files

STEPS, KILL = 30, 25
RESUMED = KILL // SAVE * SAVE
EXACT = "train.deterministic=true"
MODELS = "benchmarks.gpu.models."
FLOAT16 = ["train.precision=float16", f"train.loss._target_={MODELS}large_loss"]
RECOMPUTED = [f"model._target_={MODELS}checkpointed", "model.dropout=0.1"]
INVARIANT = ["sampler=elastic", f"train.global_batch_size={4 * sizes.SIZE.small_batch}"]


@dataclass(frozen=True)
class Case:
    """Two runs of one config: one is killed and resumed, the other is not.

    Attributes:
        name: name in the table.
        overrides: overrides of both runs.
        exact: whether a difference is a failure.
        small: whether the model has a quarter of the layers and of the vocabulary.
        ranks: number of ranks of the first attempts.
        resumed_ranks: number of ranks of the attempt after the kill; None: the same.
    """

    name: str
    overrides: list[str]
    exact: bool = True
    small: bool = True
    ranks: int = 1
    resumed_ranks: int | None = None


COMPILED = "train.compile=true"
ONE_RANK = [
    Case("deterministic", [EXACT], small=False),
    Case("not deterministic", [], exact=not sizes.ON_GPU, small=False),
    Case("compiled, deterministic", [EXACT, COMPILED], small=False),
    Case("compiled, not deterministic", [COMPILED], exact=not sizes.ON_GPU, small=False),
    Case("float16 with overflows", [EXACT, *FLOAT16]),
    Case("activation checkpointing, dropout", [EXACT, *RECOMPUTED]),
    Case("rank-invariant", [EXACT, *INVARIANT]),
]


def several_ranks(count: int) -> list[Case]:
    return [
        Case(f"DDP on {count} ranks", [EXACT], ranks=count),
        Case(f"FSDP2 on {count} ranks", [EXACT, "strategy=fsdp"], ranks=count),
        Case(f"rank-invariant, {count} ranks, then one", [EXACT, *INVARIANT], ranks=count, resumed_ranks=1),
    ]


def runs_of(case: Case, folder: Path) -> tuple[Run, Run]:
    """Create both runs of a case, each with a separate compiler cache."""
    size = sizes.SIZE.smaller() if case.small else sizes.SIZE
    words = [
        *held_words(folder, size),
        f"train.steps={STEPS}",
        *([] if INVARIANT[-1] in case.overrides else ["train.grad_accum_steps=2"]),
        *case.overrides,
    ]
    name = "-".join(case.name.replace(",", "").split())
    paths = [folder / f"{name}-{which}" for which in ("whole", "killed")]
    compiler = {"TORCHINDUCTOR_COMPILE_THREADS": "4"}
    whole, killed = (Run(path, words, {**compiler, "TORCHINDUCTOR_CACHE_DIR": f"{path}.inductor"}) for path in paths)
    return whole, killed


def ranks(count: int) -> list[str]:
    """Return the overrides that start `count` ranks."""
    return [f"launcher.ranks={count}", *([] if sizes.ON_GPU else ["launcher.gpus=[]"])] if count > 1 else []


def killed_and_resumed(run: Run, case: Case) -> None:
    run.kill_at(KILL, *ranks(case.ranks))
    run.finish(*ranks(case.resumed_ranks or case.ranks))
    if run.resumed_at() != [0, RESUMED]:
        raise RuntimeError(f"{run.path.name}: its attempts began at steps {run.resumed_at()}, not 0 and {RESUMED}")


def records(run: Run) -> list[Any]:
    return list(files.read_lines(RunDir(run.path).metrics))


def weights_apart(one: Run, two: Run) -> float:
    """Return ‖a − b‖ / ‖a‖ of the last weights of two runs."""
    folders = [Folder(RunDir(run.path).checkpoint(STEPS)) for run in (one, two)]
    gap = whole = 0.0
    for (_, a), (_, b) in zip(*(tensors(at, manifest.read(at), MODEL) for at in folders), strict=True):
        gap += float((a.double() - b.double()).square().sum())
        whole += float(a.double().square().sum())
    return math.sqrt(gap / whole)


@dataclass(frozen=True)
class Judgement:
    """The result of comparing two runs."""

    steps: int
    differing: int
    apart: float
    skipped: int
    difference: str  # the first one; empty if there is none


def judged(jobs: Sequence[Future[None]], whole: Run, killed: Run) -> Judgement:
    """Wait for two runs, compare them, and delete them.

    Raises:
        RuntimeError: one of them failed, or nothing was compared.
    """
    for job in jobs:
        job.result()
    mine, theirs = records(whole), records(killed)
    compared = compare(RunDir(whole.path), RunDir(killed.path))
    if not compared.tensors and compared.identical:
        raise RuntimeError(f"{whole.path.name}: nothing was compared")
    found = Judgement(
        steps=len(mine),
        differing=sum(a != b for a, b in zip_longest(mine, theirs)),
        apart=weights_apart(whole, killed),
        skipped=sum(bool(record.get("skipped")) for record in mine),
        difference="" if compared.identical else str(compared.differences[0]),
    )
    for run in (whole, killed):
        shutil.rmtree(run.path, ignore_errors=True)
    return found


def add(case: Case, jobs: Mapping[str, Future[Judgement]], found: Table) -> None:
    """Add a row to the table.

    Raises:
        RuntimeError: runs that have to be identical differ.
    """
    result, goal = jobs[case.name].result(), {"at_most": 0} if case.exact else {}
    found.add(case.name, "steps", result.steps, "steps")
    found.add(case.name, "that differ", result.differing, "steps", **goal)
    found.add(case.name, "distance of the weights / their norm", 1e6 * result.apart, "ppm", **goal)
    if case.exact and result.difference:
        raise RuntimeError(f"not the same after a kill: {result.difference}")
    if FLOAT16[0] in case.overrides:
        found.add(case.name, "overflows", result.skipped, "steps")
        if not result.skipped:
            raise RuntimeError("no gradient overflowed")


def main(report: Report, folder: Path) -> None:
    """Start the runs of all cases, several at a time, and compare them."""
    found = table("gpu-exactness", f"killed after step {KILL}, resumed from step {RESUMED}")
    count = torch.cuda.device_count() if sizes.ON_GPU else 2
    several = several_ranks(max(count, 2))
    alone = "there is one GPU" if count < 2 else ""
    jobs: dict[str, Future[Judgement]] = {}
    with ThreadPoolExecutor(sizes.at_once()) as pool, ThreadPoolExecutor(sizes.at_once()) as judges:
        for case in [*ONE_RANK, *([] if alone else several)]:
            whole, killed = runs_of(case, folder)
            made = (
                pool.submit(whole.finish, *ranks(case.resumed_ranks or case.ranks)),
                pool.submit(killed_and_resumed, killed, case),
            )
            jobs[case.name] = judges.submit(judged, made, whole, killed)
        for case in ONE_RANK:
            report.step(case.name, partial(add, case, jobs, found))
        for case in several:
            report.step(case.name, partial(add, case, jobs, found), alone)
