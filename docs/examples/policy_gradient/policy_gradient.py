"""Balance a pole on a cart with REINFORCE (Williams 1992)."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid


def starts(count: int, seed: int) -> list[Tensor]:
    """Draw the starts of episodes: position, velocity, angle and angular velocity, all near 0."""
    return [*torch.rand(count, 4, generator=torch.Generator().manual_seed(seed)) * 0.1 - 0.05]


def move(states: Tensor, right: Tensor) -> Tensor:
    """Return the states (B, 4) 0.02 s later, after a push of 10 N (Barto, Sutton and Anderson 1983)."""
    speed, angle, spin = states[:, 1:].unbind(1)
    push = (20 * right - 10 + 0.05 * spin**2 * angle.sin()) / 1.1
    turn = (9.8 * angle.sin() - push * angle.cos()) / (0.5 * (4 / 3 - 0.1 * angle.cos() ** 2 / 1.1))
    slide = push - 0.05 * turn * angle.cos() / 1.1
    return states + 0.02 * torch.stack([speed, slide, spin, turn], 1)


class Reinforce:
    """Make pushes more likely that led to longer episodes than usual."""

    def __init__(self, longest: int, memory: float) -> None:
        self.longest, self.memory = longest, memory
        self.usual = torch.zeros(longest)  # how long an episode still lasts, by step: a running mean

    def play(self, policy: nn.Module, states: Tensor, greedy: bool) -> tuple[Tensor, ...]:
        """Return log-probabilities of the pushes, and whether the pole stands after them: two of (B, longest)."""
        stands, played = torch.ones(len(states)), []
        for _ in range(self.longest):
            preference = policy(states)[:, 0]
            right = (preference > 0).float() if greedy else torch.bernoulli(preference.detach().sigmoid())
            chosen = logsigmoid(preference * (2 * right - 1)) * stands
            states = move(states, right)
            stands = stands * (states[:, 0].abs() < 2.4) * (states[:, 2].abs() < 0.21)
            played.append(torch.stack([chosen, stands]))
        return torch.stack(played, 2).unbind()

    def take_step(self, step: Any) -> None:
        for states in step.batches:
            chosen, stands = self.play(step.model, states, greedy=False)
            lasts = stands.flip(1).cumsum(1).flip(1)
            step.backward(-(chosen * (lasts - self.usual)).mean(1))
            step.log("return", lasts[:, 0])
            self.usual.lerp_(step.mean(lasts), 1 - self.memory)  # the mean over all ranks
        step.update()

    def evaluation_step(self, policy: nn.Module, states: Tensor) -> dict[str, Tensor]:
        lasts = self.play(policy, states, greedy=True)[1].sum(1)
        return {"loss": -lasts, "return": lasts}

    def state_dict(self) -> dict[str, Tensor]:
        return {"usual": self.usual}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.usual = state["usual"]
