"""Lightning with an exact, elastic order of samples: `python in_lightning.py`, on 1 rank or more."""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from tiny import options, record, sources

from exactdata import TrainerLoader

given = options()
ranks = int(os.environ.get("WORLD_SIZE", "1"))


class Model(lightning.LightningModule):
    """A line."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    # --8<-- [start:recipe]
    def train_dataloader(self) -> TrainerLoader:
        return TrainerLoader(
            sources(given.mixed),
            global_batch_size=given.batch,
            epoch_samples=given.epoch_samples,
            fetched_ahead=0 if given.epoch_samples else 1,
            num_workers=given.workers,
            segments=given.segments,
        )

    # --8<-- [end:recipe]

    def training_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
        record(given, self.trainer.train_dataloader, self.global_step + 1, batch)
        return ((self.line(batch["x"]) - batch["x"]) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


trainer = lightning.Trainer(
    accelerator="cpu",
    devices=ranks,
    strategy="ddp" if ranks > 1 else "auto",
    max_steps=given.steps,
    max_epochs=-1,
    callbacks=[ModelCheckpoint(given.folder, "{step}", every_n_train_steps=given.save_at, save_top_k=-1)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), ckpt_path=f"{given.folder}/step={given.save_at}.ckpt" if given.resume else None)
