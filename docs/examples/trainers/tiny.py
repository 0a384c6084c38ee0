"""Share the examples' settings, 200 samples in one or two sources, and the record of each step."""

from __future__ import annotations

import json
import os
import signal
import sys
from types import SimpleNamespace
from typing import Any

import torch

torch.set_num_threads(1)

RANK = int(os.environ.get("RANK", "0"))
DEFAULTS: dict[str, Any] = {
    "folder": "outputs/trainers",  # of the checkpoints
    "log": "",  # of the samples of each step; the number of the rank is appended
    "resume": False,
    "steps": 50,  # -1: until the epochs are trained
    "epochs": -1,
    "save_at": 10,  # the step after which to save a checkpoint
    "kill_before": 0,  # the step at whose start every rank is killed; 0: none
    "sharded": False,  # fully_shard in place of DistributedDataParallel
    "mixed": False,  # two sources in place of one
    "batch": 8,  # samples of a batch over all ranks
    "epoch_samples": 200,  # samples of a pass over all ranks; None: no passes
    "more": {},  # further arguments of TrainerLoader
    "update": None,  # or a pair: the step after which to change the weights, and the weights
}


def options() -> SimpleNamespace:
    """Read the settings: JSON in the first argument."""
    given = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
    return SimpleNamespace(**{**DEFAULTS, **given})


class Numbers(torch.utils.data.Dataset[dict[str, Any]]):
    """The numbers from `first` up to `end`."""

    def __init__(self, first: int, end: int) -> None:
        self.numbers = range(first, end)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"id": self.numbers[index], "x": torch.tensor([self.numbers[index] / 200])}


def sources(mixed: bool) -> dict[str, Numbers]:
    """Return the datasets by name."""
    return {"a": Numbers(0, 150), "b": Numbers(150, 200)} if mixed else {"data": Numbers(0, 200)}


def record(options: Any, loader: Any, step: int, batch: dict[str, Any]) -> None:
    """Append the samples of a step, counted from 1, to this rank's log; be killed, or change the weights, if asked."""
    if step == options.kill_before:
        os.kill(os.getpid(), signal.SIGKILL)
    if options.log:
        with open(f"{options.log}.{RANK}", "a") as log:
            log.write(json.dumps({"step": step, "ids": batch["id"].tolist()}) + "\n")
    if options.update and step == options.update[0]:
        loader.elastic_sampler.update_weights(options.update[1])
