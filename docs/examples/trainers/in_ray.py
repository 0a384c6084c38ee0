"""Ray Train with an exact, elastic order of samples: `RAY_AUTH_MODE=disabled python in_ray.py`.

Rerun with the same folder, it resumes from the newest checkpoint, with any number of workers.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_model
from tiny import options

from exactdata import TrainerLoader


def train_loop(opts: Any) -> None:
    """Train on one worker."""
    from tiny import record, sources

    model = prepare_model(torch.nn.Linear(1, 1))
    weights = getattr(model, "module", model)  # it is wrapped only if there are several workers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step, data = 0, sources(opts.mixed)
    # --8<-- [start:recipe]
    loader = TrainerLoader(data, global_batch_size=opts.batch, epoch_samples=opts.epoch_samples, **opts.more)
    checkpoint = ray.train.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "state.pt"))
        loader.load_state_dict(saved["loader"])
        # --8<-- [end:recipe]
        weights.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, opts.kill_before = saved["step"], 0  # killed once, not again after each restart
    while step < opts.steps:
        for batch in loader:
            step += 1
            record(opts, loader, step, batch)
            ((model(batch["x"]) - batch["x"]) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == opts.save_at:
                state = {"loader": loader.state_dict(), "model": weights.state_dict()}
                state |= {"optimizer": optimizer.state_dict(), "step": step}
                save(state)
            if step == opts.steps:
                break


def save(state: dict[str, Any]) -> None:
    """Save rank 0's state, and return when the checkpoint is registered: `report` alone returns earlier."""
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder, "state.pt"))
        is_first = ray.train.get_context().get_world_rank() == 0
        ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder) if is_first else None)
    ray.train.get_all_reported_checkpoints()


if __name__ == "__main__":
    opts = options()
    run = ray.train.RunConfig(
        name="samples",
        storage_path=str(Path(opts.folder).resolve()),
        failure_config=ray.train.FailureConfig(max_failures=getattr(opts, "restarts", 0)),
    )
    scaling = ray.train.ScalingConfig(num_workers=getattr(opts, "ranks", 2))
    TorchTrainer(train_loop, train_loop_config=opts, scaling_config=scaling, run_config=run).fit()
