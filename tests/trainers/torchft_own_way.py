"""Train with the data setup of torchft's README and train_ddp.py: a DistributedSampler in torchdata's loader.

With --save, the state of the loader is saved after each step, as the documentation recommends, in a file of this
replica. The records are those of docs/examples/trainers/in_torchft.py.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torchft
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torchdata.stateful_dataloader import StatefulDataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--seconds", type=float, default=0.05)
parser.add_argument("--log", default="replica.jsonl")
parser.add_argument("--save", action="store_true")
parser.add_argument("--sync", action="store_true", help="use_async_quorum=False, which is not the default")
given = parser.parse_args()
torch.set_num_threads(1)
number = int(os.environ["REPLICA"])

model = nn.Embedding(4000, 1)
nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1)
store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
manager = torchft.Manager(
    pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)),
    load_state_dict=model.load_state_dict,
    state_dict=model.state_dict,
    min_replica_size=1,
    use_async_quorum=not given.sync,
    rank=0,
    world_size=1,
    store_addr="localhost",
    store_port=store.port,
)
parallel = torchft.DistributedDataParallel(manager, model)
fault_tolerant = torchft.Optimizer(manager, optimizer)
sampler = torchft.DistributedSampler(
    range(4000),
    replica_rank=number,
    num_replica_groups=3,
    group_rank=0,
    num_replicas=1,
    shuffle=True,
)
loader: Any = StatefulDataLoader(range(4000), batch_size=4, sampler=sampler)
saved = Path(f"loader{number}.pt")
if given.save and saved.exists():
    loader.load_state_dict(torch.load(saved, weights_only=False))


def endless() -> Iterator[torch.Tensor]:
    while True:
        yield from loader


with open(given.log, "a", buffering=1) as log:
    for batch in endless():
        if manager.current_step() >= given.steps:
            break
        fault_tolerant.zero_grad()
        of = manager.num_participants()
        at = {"committed": manager.batches_committed(), "number": manager.participating_rank(), "of": of}
        loss = -parallel(batch).sum() * of
        print(json.dumps({**at, "ids": batch.tolist()}), file=log)
        time.sleep(given.seconds)
        loss.backward()
        fault_tolerant.step()
        if manager.batches_committed() > at["committed"]:
            print(json.dumps({**at, "step": manager.current_step()}), file=log)
        if given.save:
            torch.save(loader.state_dict(), f"{saved}.new")
            Path(f"{saved}.new").rename(saved)
    counts = model.weight.flatten().round().int().tolist()
    print(json.dumps({"committed": manager.batches_committed(), "counts": counts}), file=log)
manager.shutdown(wait=False)
