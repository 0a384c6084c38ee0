"""Accelerate with an exact, elastic order of samples: `python in_accelerate.py`, on 1 rank or more."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import Accelerator
from tiny import options, record, sources

from exactdata import TrainerLoader

opts = options()
data = sources(opts.mixed)
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
# --8<-- [start:recipe]
loader = TrainerLoader(data, global_batch_size=opts.batch, epoch_samples=opts.epoch_samples, **opts.more)
accelerator.register_for_checkpointing(loader)
# --8<-- [end:recipe]
assert accelerator.prepare(loader) is loader
checkpoint = Path(opts.folder, f"step{opts.save_at}")
step = 0
if opts.resume:
    accelerator.load_state(str(checkpoint))
    step = opts.save_at
while step < opts.steps:
    for batch in loader:
        step += 1
        record(opts, loader, step, batch)
        x = batch["x"].to(accelerator.device)
        accelerator.backward(((model(x) - x) ** 2).mean())
        optimizer.step()
        optimizer.zero_grad()
        if step == opts.save_at:
            accelerator.save_state(str(checkpoint))
        if step == opts.steps:
            break
accelerator.end_training()
