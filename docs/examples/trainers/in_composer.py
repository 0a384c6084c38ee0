"""Composer with an exact, elastic order of samples: `python in_composer.py`, on 1 rank or more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from composer import Callback, DataSpec, Trainer
from composer.models import ComposerModel
from composer.utils import dist
from tiny import options, record, sources

from exactdata import TrainerLoader

opts = options()


class Model(ComposerModel):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        record(opts, loader, int(trainer.state.timestamp.batch) + 1, batch)
        return self.linear(batch["x"])

    def loss(self, outputs: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
        return ((outputs - batch["x"]) ** 2).mean()


dist.initialize_dist("cpu")
sizes = {"global_batch_size": opts.batch, "epoch_samples": opts.epoch_samples}


# --8<-- [start:recipe]
class Place(Callback):
    def state_dict(self) -> dict[str, str]:
        return loader.state_dict()

    def load_state_dict(self, state: dict[str, str]) -> None:
        loader.load_state_dict(state)


loader = TrainerLoader(sources(opts.mixed), **sizes, **opts.more)
data = DataSpec(loader, get_num_samples_in_batch=lambda batch: len(batch["id"]))
arguments = {"train_dataloader": data, "spin_dataloaders": False, "callbacks": [Place()]}
# --8<-- [end:recipe]
model = Model()
checkpoints = Path(opts.folder, "checkpoints")
trainer = Trainer(
    model=model,
    optimizers=torch.optim.SGD(model.parameters(), lr=0.1),
    max_duration=f"{opts.steps}ba",
    device="cpu",
    progress_bar=False,
    save_folder=str(checkpoints),
    save_interval=f"{opts.save_at}ba",
    save_overwrite=True,
    load_path=str(checkpoints / f"ep0-ba{opts.save_at}-rank0.pt") if opts.resume else None,
    **arguments,
)
trainer.fit()
