"""Tasks, models and metrics as a user might write them, right and wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, IterableDataset


class Points(Dataset[torch.Tensor]):
    """Points in the plane, (2,)."""

    def __init__(self, size: int = 256, seed: int = 0) -> None:
        self.points = torch.randn(size, 2, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.points[index]


class PointStream(IterableDataset[torch.Tensor]):
    """The same as a stream."""

    def __init__(self, size: int = 50, seed: int = 1) -> None:
        self.points = Points(size, seed).points

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.points)


class NoisyStream(PointStream):
    """Draws while it is read, and when it is created."""

    def __init__(self, size: int = 7) -> None:
        super().__init__(size)
        self.points = self.points + torch.randn(size, 2)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in torch.randperm(len(self.points)).tolist():
            yield self.points[number] + torch.randn(2)


class OwnIterator(PointStream):
    """A stream that cannot start again."""

    def __iter__(self) -> OwnIterator:
        return self

    def __next__(self) -> torch.Tensor:
        raise StopIteration


class Pair(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return self.discriminator(points)  # type: ignore[no-any-return]


class Adversarial:
    """Alternating updates, with a state of its own."""

    def __init__(self) -> None:
        self.steps = 0
        self.between: Callable[[], None] = lambda: None

    def take_step(self, step: Any) -> None:
        self.steps += 1
        for real in step.batches:
            fake = step.model.generator(torch.randn_like(real)).detach()
            judged = step.model.discriminator(real), step.model.discriminator(fake)
            loss = F.softplus(-judged[0]) + F.softplus(judged[1])
            step.backward({"loss": loss.mean(1), "real": judged[0].mean(1)}, "discriminator")
        step.update("discriminator")
        self.between()
        for real in step.batches:
            fake = step.model.generator(torch.randn_like(real))
            step.backward(F.softplus(-step.model.discriminator(fake)).mean(1), "generator")
        step.update("generator")
        step.log("steps", self.steps)

    def evaluation_step(self, model: nn.Module, batch: torch.Tensor) -> Any:
        return {"loss": model(batch).mean(1), "preds": model(batch)[:, 0], "target": batch[:, 0]}

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps = state["steps"]


class Remembering:
    """Its loss depends on a running mean of this rank's samples; its state is a tensor unless told otherwise."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.mean = torch.zeros(2)

    def training_step(self, model: Any, batch: torch.Tensor) -> Any:
        self.mean = 0.5 * self.mean + 0.5 * batch.mean(0)
        judged: Any = model.discriminator(batch)  # any part of the model may be called
        return {"loss": (judged.mean(1) - self.mean.sum()).square(), "kept": judged.mean(1)}

    def evaluation_step(self, model: nn.Module, batch: torch.Tensor) -> Any:
        return model(batch).mean(1).square()

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self if self.broken == "save" else self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["means" if self.broken == "load" else "mean"]


class Centred(Remembering):
    """Its evaluation depends on its state, too."""

    def evaluation_step(self, model: nn.Module, batch: torch.Tensor) -> Any:
        return (model(batch).mean(1) - self.mean.sum()).square()


class StepsOnly:
    def take_step(self, step: Any) -> None: ...


class HalfAState:
    def training_step(self, model: nn.Module, batch: Any) -> Any: ...

    def state_dict(self) -> Any: ...


class Misspelt:
    def traning_step(self, model: nn.Module, batch: Any) -> Any: ...


class OneArgument:
    def training_step(self, batch: Any) -> Any: ...


class WithParameters(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)

    def training_step(self, model: nn.Module, batch: Any) -> Any: ...


class Fine:
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        return model(batch).square().mean(1)


def loss(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch).square().mean(1)


class NoMerge:
    """A metric of the user's without any notion of ranks: the last value, and how many batches there were."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def update(self, preds: torch.Tensor) -> None:
        self.seen.append(preds.sum().item())

    def compute(self) -> dict[str, float]:
        return {"last": self.seen[-1], "batches": len(self.seen)}


class Shapeless(NoMerge):
    def compute(self) -> Any:
        return torch.zeros(2, 2)


def distance(preds: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (preds - target).abs()


def too_short(preds: torch.Tensor) -> torch.Tensor:
    return preds.mean()
