"""The loader's own random stream, so that it draws what torch's loader would draw and moves nobody else's.

torch's DataLoader takes a seed for its workers from the global generator at every `iter()`, and a shuffling
sampler takes another with the first index. This loader takes both from a private copy of the global
generator's state, made when it is first iterated: after `torch.manual_seed` the order is torch's, epoch after
epoch, and the global generator stays where it was, so that a resumed run's dropout is that of the run that was
never interrupted. A `generator=` of the user's is drawn from as torch does.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def draw_seed(generator: torch.Generator) -> int:
    """One seed, drawn as torch's DataLoader draws its base seed."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


class SeedStream:
    """Seeds of the epochs, and how to come back to those of an epoch.

    Where the sampler seeds itself, and for the later epochs of persistent workers, the next seed follows from
    the one before: one integer is the whole state.

    Args:
        generator: the user's, or None.
        seeds_itself: the sampler needs no random draw of ours.
        sampler: may have a `generator` of its own, which is then taken back with the others.
    """

    def __init__(self, generator: torch.Generator | None, seeds_itself: bool, sampler: Any) -> None:
        self.generator = generator
        self._generators = {"generator": generator, "of_sampler": generator_of(sampler)}
        self.seeds_itself = seeds_itself
        self.base_seed: int | None = None
        self.chained = False
        self._private: torch.Generator | None = None
        self._mark: dict[str, Any] | None = None

    @property
    def private(self) -> torch.Generator:
        if self._private is None:
            self._private = torch.Generator()
            self._private.set_state(torch.get_rng_state())
        return self._private

    def begin(self, chain: bool) -> torch.Generator:
        """Begin an epoch; the generator returned would draw `base_seed` next (hand it to torch's loader).

        Args:
            chain: derive the seed from the last one instead of drawing it, if there is a last one.
        """
        if self.seeds_itself or (chain and self.base_seed is not None):
            self.base_seed, self.chained = draw_seed(torch.Generator().manual_seed(self._root())), True
            self._note()
            return torch.Generator().manual_seed(self.base_seed)
        source = self.generator or self.private
        self._note()
        ahead = torch.Generator()
        ahead.set_state(source.get_state())
        self.base_seed, self.chained = draw_seed(source), False
        return ahead

    def again(self) -> torch.Generator:
        """Begin the epoch that `load` restored."""
        if self.chained:
            assert self.base_seed is not None
            return torch.Generator().manual_seed(self.base_seed)
        self.base_seed = None
        return self.begin(chain=False)

    def _note(self) -> None:
        self._mark = None
        if not self.seeds_itself:
            self._mark = {"private": self.private.get_state()}
            for name, generator in self._generators.items():
                if generator is not None:
                    self._mark[name] = generator.get_state()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let what is drawn from torch's global generator come from the private stream instead."""
        if self.seeds_itself:
            yield
            return
        outside = torch.get_rng_state()
        torch.set_rng_state(self.private.get_state())
        try:
            yield
        finally:
            self.private.set_state(torch.get_rng_state())
            torch.set_rng_state(outside)

    def state(self, begun: bool) -> dict[str, Any]:
        """The state of this epoch if it has begun, else that of the next."""
        state: dict[str, Any] = {"begun": begun, "base_seed": self.base_seed, "chained": self.chained}
        if self.seeds_itself:
            state["base_seed"] = self._root()
            return state
        if not begun:
            self._note()
        assert self._mark is not None
        for name, tensor in self._mark.items():
            if isinstance(tensor, torch.Tensor):  # encoded once an epoch, when it is first asked for
                self._mark[name] = base64.b64encode(tensor.numpy().tobytes()).decode()
            state[name] = self._mark[name]
        return state

    def _root(self) -> int:
        """The seed that the next epoch's follows from."""
        if self.base_seed is None:
            self.base_seed = draw_seed(self.generator or self.private)
        return self.base_seed

    def load(self, state: dict[str, Any]) -> None:
        """Go back to a saved epoch."""
        self.base_seed, self.chained = state["base_seed"], state["chained"]
        if "private" in state:
            self.private.set_state(_decode(state["private"]))
            for name, generator in self._generators.items():
                if generator is not None and name in state:
                    generator.set_state(_decode(state[name]))
        self._note()


def generator_of(sampler: Any) -> torch.Generator | None:
    """The generator of a sampler, or of the sampler within a batch sampler."""
    found = getattr(sampler, "generator", None) or getattr(getattr(sampler, "sampler", None), "generator", None)
    return found if isinstance(found, torch.Generator) else None


def _decode(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())
