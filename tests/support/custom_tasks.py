"""Tasks, models and metrics as a user might write them, correct and incorrect."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import paced
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from runner.models.tasks import NextToken


class Points(Dataset[torch.Tensor]):
    """Points in the plane, (2,)."""

    def __init__(self, size: int = 256, seed: int = 0) -> None:
        self.points = torch.randn(size, 2, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.points[index]


class PointStream(IterableDataset[torch.Tensor]):
    """The same points as a stream."""

    def __init__(self, size: int = 50, seed: int = 1) -> None:
        self.points = Points(size, seed).points

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.points)


class NoisyStream(PointStream):
    """A stream that draws random numbers when it is created and when it is read."""

    def __init__(self, size: int = 7) -> None:
        super().__init__(size)
        self.points = self.points + torch.randn(size, 2)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for number in torch.randperm(len(self.points)).tolist():
            yield self.points[number] + torch.randn(2)


class OwnIterator(PointStream):
    """A stream that is its iterator and cannot start again."""

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
    """A task with alternating updates and a state."""

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


class Choosy:
    """A task that draws which values it computes and which parameters take part, per micro-batch."""

    def training_step(self, model: Any, batch: torch.Tensor) -> Any:
        if random.random() < 0.4:
            batch = model.generator(batch)
        judged: Any = model.discriminator(batch)
        return {"loss": judged.mean(1).square() + float(np.random.rand()) * batch.mean(1), "judged": judged.mean(1)}

    def evaluation_step(self, model: nn.Module, batch: torch.Tensor) -> Any:
        return model(batch).mean(1).square()


class Remembering:
    """A task whose loss depends on a running mean of this rank's samples. The state is a tensor by default."""

    def __init__(self, broken: str = "") -> None:
        self.broken = broken
        self.mean = torch.zeros(2)

    def training_step(self, model: Any, batch: torch.Tensor) -> Any:
        paced.pause(model)
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
    """A task whose evaluation also depends on its state."""

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


class Masked(NextToken):
    """A task that masks odd labels, and all labels of some samples."""

    def training_step(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return super().training_step(model, self._masked(batch))

    def evaluation_step(self, model: nn.Module, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return super().evaluation_step(model, self._masked(batch))

    def _masked(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        labels = batch["labels"]
        masked = (labels % 2 == 1) | (labels[:, :1] % 5 == 0)
        return {**batch, "labels": labels.masked_fill(masked, -100)}


class Fine:
    def training_step(self, model: nn.Module, batch: Any) -> Any:
        return model(batch).square().mean(1)


def loss(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch).square().mean(1)


class NoMerge:
    """A user's metric without support for ranks: the last value and the number of batches."""

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


class Careless:
    """A task whose results depend on which rank gets which micro-batch."""

    def __init__(self, mistake: str) -> None:
        self.mistake = mistake
        self.seen = 0.0

    def take_step(self, step: Any) -> None:
        losses = []
        for points in step.batches:
            loss = step.model(points).mean(1).square()
            losses.append(loss)
            self.seen += float(points.sum()) if self.mistake == "state" else 0.0
            if self.mistake != "backward":
                step.backward(loss)
            if self.mistake == "mean":
                step.mean(loss)
            if self.mistake == "update":
                step.update()
            if self.mistake == "leave":
                break
        if self.mistake == "backward":
            step.backward(torch.cat(losses))
        step.log("largest", torch.cat(losses).detach() * 2)
        step.log("step", step.index) if self.mistake == "reserved" else step.log("index", step.index / 3)
        step.log("mean", step.mean(torch.cat(losses)))
        step.update()

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class Columns(nn.Module):
    """A model with column-major weights. With `keeps` it carries a value from one forward pass to the next."""

    def __init__(self, keeps: str = "") -> None:
        super().__init__()
        self.keeps, self.passes = keeps, 0
        self.weight = nn.Parameter(torch.randn(2, 3001).t())
        self.centre = nn.Parameter(torch.zeros(2), requires_grad=False)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        if self.training and self.keeps == "parameter":
            self.centre.data.lerp_(points.mean(0), 0.1)
        if self.training and self.keeps == "extra state":
            self.passes += 1
        return torch.tanh((points - self.centre) @ self.weight.t()).mean(1, keepdim=True)

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor(self.passes)

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.passes = int(state)


class Langevin(torch.optim.SGD):
    """An optimizer that adds noise to the weights."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        with torch.no_grad():
            for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)


class Twice:
    """A task that iterates over its micro-batches twice and combines the results."""

    def take_step(self, step: Any) -> None:
        found = []
        for scale in (1.0, 1e-3 / 3):
            for points in step.batches:
                loss = scale * step.model(points).mean(1).square()
                step.backward(loss)
                found.append(loss.detach().double() / 3)
        step.log("found", torch.cat(found))
        step.log("mean", step.mean(torch.cat(found)))
        step.update()


class Moody:
    """A task that returns a value for some micro-batches only, or skips the others."""

    def __init__(self, leaves: bool) -> None:
        self.leaves = leaves

    def take_step(self, step: Any) -> None:
        for points in step.batches:
            step.backward(step.model(points).mean(1).square())
            if points[0, 0] > 0 and self.leaves:
                break
            if points[0, 0] > 0:
                step.log("positive", points[:, 0])
        step.update()


class Steep:
    """A task whose float16 gradients overflow for the discriminator and not for the generator."""

    def training_step(self, model: Any, batch: torch.Tensor) -> Any:
        generated = model.generator(batch)
        steep: Any = model.discriminator(batch).mean(1)
        return generated.square().mean(1) + (steep - steep.detach()) * 1e3
