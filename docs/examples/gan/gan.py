"""Train a generative adversarial network (Goodfellow et al. 2014) to draw eight Gaussians on a circle."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus


def eight_gaussians(count: int, seed: int) -> list[Tensor]:
    """Draw points (2,)."""
    generator = torch.Generator().manual_seed(seed)
    angles = torch.randint(8, (count, 1), generator=generator) * (math.pi / 4)
    return [*torch.normal(2 * torch.cat([angles.cos(), angles.sin()], 1), 0.1, generator=generator)]


def mlp(first: int, width: int, last: int) -> nn.Module:
    return nn.Sequential(nn.Linear(first, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, last))


class Gan(nn.Module):
    """A generator of points and a discriminator, whose output is positive for points that it judges real."""

    def __init__(self, noise: int, width: int) -> None:
        super().__init__()
        self.noise = noise
        self.generator, self.discriminator = mlp(noise, width, 2), mlp(2, width, 1)

    def generate(self, count: int) -> Tensor:
        """Draw points (count, 2)."""
        return self.generator(torch.randn(count, self.noise))  # type: ignore[no-any-return]


class Adversarial:
    """Train the discriminator for one step, then the generator."""

    def take_step(self, step: Any) -> None:
        model = step.model
        for real in step.batches:
            fake = model.generate(len(real)).detach()
            losses = softplus(-model.discriminator(real)) + softplus(model.discriminator(fake))
            step.backward(losses[:, 0], "discriminator")
        step.update("discriminator")
        for real in step.batches:
            losses = softplus(-model.discriminator(model.generate(len(real))))
            step.backward(losses[:, 0], "generator")
        step.update("generator")

    def evaluation_step(self, model: Gan, real: Tensor) -> dict[str, Tensor]:
        """Measure the distances of real points to the nearest generated ones, and of generated ones to real ones."""
        distances = torch.cdist(real, model.generate(len(real)))
        return {"loss": distances.amin(1), "astray": distances.amin(0)}


class Picture:
    def on_evaluation(self, context: Any) -> None:
        """Draw the generated points: from -3 to 3 in both directions."""
        counts = torch.histogramdd(context.model.generate(20_000), [96, 96], range=[-3.0, 3.0, -3.0, 3.0]).hist
        context.log_image("points", (counts / 20).clamp(max=1))
