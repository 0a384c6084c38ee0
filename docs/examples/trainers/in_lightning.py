"""Lightning with an exact, elastic order of samples: `python in_lightning.py`, on 1 rank or more."""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import options, record, sources

from exactdata import TrainerLoader

opts = options()
ranks = int(os.environ.get("WORLD_SIZE", "1"))
data = sources(opts.mixed)


# --8<-- [start:recipe]
class Data(lightning.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.loader = TrainerLoader(data, global_batch_size=opts.batch, epoch_samples=opts.epoch_samples, **opts.more)

    def train_dataloader(self) -> TrainerLoader:
        return self.loader

    def state_dict(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


# --8<-- [end:recipe]
class Model(lightning.LightningModule):
    """A line."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def training_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
        record(opts, self.trainer.train_dataloader, self.global_step + 1, batch)
        return ((self.line(batch["x"]) - batch["x"]) ** 2).mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = max(1, int(self.trainer.estimated_stepping_batches))  # Lightning makes the loader's iterator here
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)]


trainer = lightning.Trainer(
    accelerator="cpu",
    devices=ranks,
    strategy="ddp" if ranks > 1 else "auto",
    max_steps=opts.steps,
    max_epochs=opts.epochs,
    callbacks=[ModelCheckpoint(opts.folder, "{step}", every_n_train_steps=opts.save_at, save_top_k=-1)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), datamodule=Data(), ckpt_path=f"{opts.folder}/step={opts.save_at}.ckpt" if opts.resume else None)
