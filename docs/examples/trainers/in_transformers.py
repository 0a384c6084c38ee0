"""transformers.Trainer with an exact, elastic order of samples: `python in_transformers.py`, on 1 rank or more."""

from __future__ import annotations

from typing import Any

import torch
from tiny import options, record, sources
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import ExportableState

from exactdata import TrainerLoader

opts = options()
data = sources(opts.mixed)


class Model(torch.nn.Module):
    """A line."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def forward(self, x: torch.Tensor, **others: Any) -> dict[str, torch.Tensor]:
        return {"loss": ((self.line(x) - x) ** 2).mean()}


class Recording(Trainer):
    """Records the samples of each step."""

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *others: Any) -> torch.Tensor:
        record(opts, loader, self.state.global_step + 1, inputs)
        return super().training_step(model, inputs, *others)


args = TrainingArguments(
    opts.folder,
    max_steps=opts.steps,
    save_steps=opts.save_at,
    ignore_data_skip=True,  # the loader resumes by itself
    use_cpu=True,
    report_to="none",
    disable_tqdm=True,
)
# --8<-- [start:recipe]
loader = TrainerLoader(data, global_batch_size=opts.batch, epoch_samples=opts.epoch_samples, **opts.more)


class Place(TrainerCallback, ExportableState):  # in trainer_state.json
    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"loader": loader.state_dict()}}

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        if state.global_step:
            loader.load_state_dict(state.stateful_callbacks["Place"]["attributes"]["loader"])


trainer = Recording(Model(), args, callbacks=[Place()])
trainer.get_train_dataloader = lambda: loader
# --8<-- [end:recipe]
trainer.train(resume_from_checkpoint=f"{opts.folder}/checkpoint-{opts.save_at}" if opts.resume else None)
