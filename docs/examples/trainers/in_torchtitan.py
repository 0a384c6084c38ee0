"""The data of torchtitan in an exact, elastic order of samples: `python in_torchtitan.py`, on 1 rank or more.

The loader is built and saved as in torchtitan's trainer; the model is as small as possible.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tiny import options, record, sources
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig

from exactdata import TrainerLoader

opts = options()


def pairs(samples: list[dict[str, Any]]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Collate into what torchtitan's trainer expects: inputs by name, and labels."""
    batch = torch.utils.data.default_collate(samples)
    return {"input": batch["x"]}, batch["id"]


# --8<-- [start:recipe]
class Samples(TrainerLoader, BaseDataLoader):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        settings = {"num_replicas": dp_world_size, "rank": dp_rank, "collate_fn": pairs, **opts.more}
        super().__init__(sources(opts.mixed), global_batch_size=dp_world_size * local_batch_size, **settings)
        # --8<-- [end:recipe]


class Progress:
    """The number of steps."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


dist.init_process_group("gloo")
ranks = dist.get_world_size()
model: Any = fully_shard(torch.nn.Linear(1, 1), mesh=dist.init_device_mesh("cpu", (ranks,)))
groups = [ParamGroupConfig(pattern=".*", optimizer_name="AdamW")]
optimizer = OptimizersContainer.Config(param_groups=groups, implementation="for-loop").build(model_parts=[model])
scheduler = LRSchedulersContainer.Config().build(optimizers=optimizer, training_steps=opts.steps)
loader = Samples.Config().build(
    dp_world_size=ranks,
    dp_rank=dist.get_rank(),
    local_batch_size=opts.batch // ranks,
    tokenizer=None,
    seq_len=1,
    snapshot_every_n_steps=opts.save_at,
)
progress = Progress()
checkpointer = CheckpointManager.Config(enable=True, interval=opts.save_at).build(
    dataloader=loader,
    model_parts=[model],
    optimizers=optimizer,
    lr_schedulers=scheduler,
    states={"train_state": progress},
    sd_adapter=None,
    base_folder=opts.folder,
)
checkpointer.load()  # the newest checkpoint, if there is one
batches = iter(loader)
while progress.step < opts.steps:
    progress.step += 1
    inputs, labels = next(batches)
    record(opts, loader, progress.step, {"id": labels})
    ((model(inputs["input"]) - inputs["input"]) ** 2).mean().backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    checkpointer.save(progress.step)
checkpointer.close()
dist.destroy_process_group()
