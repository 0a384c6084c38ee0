"""Train with torchft: replicas come and go, and each sample is trained on once, in the order of the sampler.

Start a lighthouse, and any number of replicas, each as a separate process; kill and start them at any time:

    torchft_lighthouse --min_replicas 1 --join_timeout_ms 1000 &
    export TORCHFT_LIGHTHOUSE=http://localhost:29510
    python in_torchft.py --log 0.jsonl & python in_torchft.py --log 1.jsonl & wait
"""

import argparse
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torchft
from torch import nn
from torch.distributed import TCPStore

from exactdata import ElasticSampler, MixtureDataset, committed_batches

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--seconds", type=float, default=0.05, help="how long a step takes")
parser.add_argument("--log", default="replica.jsonl")
parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"), help="for when no replica is left")
arguments = parser.parse_args()
torch.set_num_threads(1)

# The weight of a sample is the number of times it was trained on: each is its own gradient.
model = nn.Embedding(4000, 1)
nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1)


def state() -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def load(saved: dict[str, Any]) -> None:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])


store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
manager = torchft.Manager(
    pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)),
    load_state_dict=load,
    state_dict=state,
    min_replica_size=1,
    use_async_quorum=False,  # with True the first batches of all replicas but one do not count: see the documentation
    rank=0,
    world_size=1,
    store_addr="localhost",
    store_port=store.port,
)
parallel = torchft.DistributedDataParallel(manager, model)
fault_tolerant = torchft.Optimizer(manager, optimizer)

web, books = [{"id": one} for one in range(3000)], [{"id": one} for one in range(3000, 4000)]
# --8<-- [start:recipe]
data = MixtureDataset([web, books], ["web", "books"])
sampler = ElasticSampler({"web": 3000, "books": 1000}, [0.7, 0.3], global_batch_size=4, num_replicas=1)
batches = committed_batches(sampler, data, 4, lambda: (manager.batches_committed(), manager.participating_rank()))
# --8<-- [end:recipe]

if arguments.checkpoint.exists():
    saved = torch.load(arguments.checkpoint)
    load(saved["training"])
    manager.load_state_dict(saved["manager"])  # with the number of committed batches: the place in the data

with open(arguments.log, "a", buffering=1) as log:
    while manager.current_step() < arguments.steps:
        fault_tolerant.zero_grad()  # begins the step: which replicas take part?
        batch = next(batches)
        at = {"committed": manager.batches_committed(), "number": manager.participating_rank()}
        at["of"] = manager.num_participants()
        # torchft divides by the number of replicas: the sum in place of the mean counts every sample alike.
        loss = -parallel(batch["id"]).sum() * at["of"]
        print(json.dumps({**at, "ids": batch["id"].tolist()}), file=log)
        time.sleep(arguments.seconds)
        loss.backward()
        fault_tolerant.step()  # commits, or not
        if manager.batches_committed() > at["committed"]:
            print(json.dumps({**at, "step": manager.current_step()}), file=log)
            if at["number"] == 0 and manager.current_step() % 10 == 0:
                temporary = arguments.checkpoint.with_suffix(".new")
                torch.save({"training": state(), "manager": manager.state_dict()}, temporary)
                temporary.replace(arguments.checkpoint)
    counts = model.weight.flatten().round().int().tolist()
    print(json.dumps({"committed": manager.batches_committed(), "counts": counts}), file=log)
manager.shutdown(wait=False)
