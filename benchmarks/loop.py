"""Measure the training loop against a loop written by hand: the same model, data, optimizer and clipping.

Both train in this process, in turns of a few steps, so that other work on the machine slows both.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import Table, table
from exactdata import DistributedSampler
from exactdata.datasets import collate
from runner.config.composition import compose
from runner.config.schema import Config
from runner.models.loss import next_token_loss
from runner.rundir.attempt_log import AttemptLog
from runner.rundir.paths import RunDir
from runner.system.distributed import World
from runner.training.data.sources import open_sources
from runner.training.job import LocalJob
from runner.training.model import build
from runner.training.session import Session

TURNS, STEPS = 21, 10
CPU = torch.device("cpu")


def by_hand(config: Config, device: torch.device = CPU, **options: Any) -> Callable[[], None]:
    """Return one step of the loop that a user would write: torch's loader and optimizer, no bookkeeping.

    Args:
        config: the config of the run.
        device: device of the model.
        options: further arguments of AdamW.
    """
    dataset = next(iter(open_sources(config).values()))
    sampler = DistributedSampler(dataset, 1, 0, seed=config.seed)
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=config.train.batch_size,
        sampler=sampler,
        collate_fn=collate,
        drop_last=True,
        pin_memory=device.type == "cuda",
    )
    model = build.model(config).to(device)
    precision = build.autocast(config, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)

    def endless() -> Iterator[Any]:
        while True:
            yield from loader

    batches = endless()

    def step() -> None:
        batch = {key: value.to(device, non_blocking=True) for key, value in next(batches).items()}
        with precision():
            loss = next_token_loss(model, batch).mean()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        scheduler.step()
        loss.item()  # everybody logs the loss

    return step


def ours(config: Config, run: RunDir, save_every: int | None = None) -> tuple[Callable[[], None], Session]:
    """Return one step of the runner's loop with metrics, status, digest and TensorBoard, and saves if requested."""
    run.path.mkdir()
    log = AttemptLog.begin(run, LocalJob().identity(), config.steps, lambda record: "killed")
    session = Session.open(run, config, World(), log, None)
    trainer = session.trainer

    def step() -> None:
        trainer.advance()
        if save_every and trainer.step % save_every == save_every // 2:  # within a turn: the next step ends the copy
            trainer.save(wait=False)

    return step, session


def timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    return time.perf_counter() - start


Rows = Mapping[str, tuple[str, Mapping[str, Any]]]
"""The row of each loop, and the goal of its ratio."""


def add_speeds(found: Table, turns: Mapping[str, Sequence[float]], tokens: int, rows: Rows) -> None:
    """Add tokens/s of each loop, and the median ratio over the turns to the loop in the row before.

    Args:
        found: the table.
        turns: by loop, seconds of each turn.
        tokens: tokens of a turn.
        rows: by loop, its row and the goal of its ratio.
    """
    peer = None
    for name, (row, goal) in rows.items():
        found.add(row, "tokens/s", tokens / statistics.median(turns[name]), "per s")
        if peer is not None:
            ratio = statistics.median(a / b for a, b in zip(turns[peer], turns[name], strict=True))
            found.add(row, "ratio", ratio, **goal)
        peer = name


def main() -> None:
    """Measure tokens/s of the three loops and the median ratios over the turns."""
    with tempfile.TemporaryDirectory() as folder:
        config = compose(["train.steps=1000000", "scheduler.warmup_steps=0", "eval.every_steps=0"]).config
        plain, session = ours(config, RunDir(Path(folder, "plain")))
        saving, saving_session = ours(config, RunDir(Path(folder, "saving")), save_every=10)
        loops = {"by hand": by_hand(config), "runner": plain, "saving": saving}
        turns: dict[str, list[float]] = {name: [timed(step)][:0] for name, step in loops.items()}  # one to warm up
        for _ in range(TURNS):
            for name, step in loops.items():
                turns[name].append(timed(step))
        for opened in (session, saving_session):
            opened.close()
    tokens = STEPS * config.train.batch_size * config.data.sequence_length
    rows: Rows = {
        "by hand": ("by hand", {}),
        "runner": ("runner, with metrics, digest, status and TensorBoard; ratio to by hand", {"at_least": 0.98}),
        "saving": ("with a save every 10 steps; ratio to none", {"at_least": 0.99}),
    }
    add_speeds(table("loop"), turns, tokens, rows)


if __name__ == "__main__":
    main()
