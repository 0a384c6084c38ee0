"""torch.distributed.checkpoint with an exact, elastic order of samples: `python in_dcp.py`, on 1 rank or more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny import options, record, sources
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from exactdata import TrainerLoader

opts = options()
data = sources(opts.mixed)
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())  # what the ranks draw does not matter
model: Any = torch.nn.Linear(1, 1)
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
model = fully_shard(model, mesh=mesh) if opts.sharded else DistributedDataParallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


class Progress:
    """The step, the model and the optimizer."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        parameters, moments = get_state_dict(model, optimizer)
        return {"step": self.step, "model": parameters, "optimizer": moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


progress = Progress()
# --8<-- [start:recipe]
loader = TrainerLoader(data, global_batch_size=opts.batch, epoch_samples=opts.epoch_samples, **opts.more)
state = {"progress": progress, "loader": loader}
# --8<-- [end:recipe]
checkpoint = Path(opts.folder, f"step{opts.save_at}")
if opts.resume:
    dcp.load(state, checkpoint_id=checkpoint)
while progress.step < opts.steps:
    for batch in loader:
        progress.step += 1
        record(opts, loader, progress.step, batch)
        ((model(batch["x"]) - batch["x"]) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if progress.step == opts.save_at:
            dcp.save(state, checkpoint_id=checkpoint)
        if progress.step == opts.steps:
            break
dist.destroy_process_group()
