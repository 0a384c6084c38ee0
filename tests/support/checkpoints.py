"""Small runs to save and load, for the tests of checkpoints."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.checkpoint import TrainStateManager, build_train_state

FINGERPRINT = {"data": {"code": 100, "prose": 50}, "seed": 7}


class Clockwork:
    """A dataloader whose state is a counter."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.position = state_dict["position"]


class Toy:
    """A small run: a model with a buffer, an optimizer with state, a scheduler and a data position."""

    def __init__(self, seed: int = 0, width: int = 8) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.2), nn.Linear(width, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.loader = Clockwork()
        self.step = 0

    def train(self, steps: int = 1) -> float:
        loss = torch.tensor(0.0)
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(torch.randn(4, 4)).square().mean()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            self.loader.position += 4
        return loss.item()

    def state(self, **extra: Any) -> dict[str, Any]:
        return build_train_state(self.step, 16 * self.step, self.scheduler, self.loader, extra)

    def save(self, manager: TrainStateManager, *, metric: float | None = None, wait: bool = True) -> bool:
        return manager.save(self.step, self.model, self.optimizer, self.state(), metric=metric, wait=wait)

    def digest(self) -> str:
        """Return the SHA-256 over every value of model and optimizer."""
        return digest_of(self.model, self.optimizer)


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return the SHA-256 over every value of model and optimizer."""
    sha = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        sha.update(name.encode() + tensor.numpy().tobytes())
    for key, state in optimizer.state_dict()["state"].items():
        for name, value in state.items():
            sha.update(f"{key}{name}".encode() + torch.as_tensor(value).numpy().tobytes())
    return sha.hexdigest()


def manager(directory: Path, **options: Any) -> TrainStateManager:
    """Return a manager with the fingerprint of these tests."""
    return TrainStateManager(directory, **{"fingerprint": FINGERPRINT, **options})


def names(directory: Path) -> list[str]:
    """Return the sorted names in `directory`."""
    return sorted(path.name for path in directory.iterdir())


def train(directory: Path, steps: int, **options: Any) -> dict[int, str]:
    """Train a toy and save it after every step. Return the digest of each checkpoint's content, by step."""
    toy, saving, digests = Toy(), manager(directory, **options), {}
    for step in range(1, steps + 1):
        toy.train()
        toy.save(saving)
        digests[step] = toy.digest()
    return digests
