"""Draw the loader's seeds like torch's loader, without advancing the global generator.

torch's DataLoader draws a seed for its workers from the global generator at every `iter()`, and a shuffling sampler
draws a second seed at its first index. This loader draws both from a private copy of the global generator, made at the
first iteration. After `torch.manual_seed`, the order is the same as torch's in every epoch. The global generator does
not advance, so that dropout is the same in a resumed and in an uninterrupted run. If you pass `generator=`, seeds are
drawn from it as in torch.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from exactdata.loading.protocols import LoaderStateError
from exactdata.order.hashing import stream_key
from exactdata.order.state_checks import shown


def draw_seed(generator: torch.Generator) -> int:
    """Draw one seed the way torch's DataLoader draws its base seed."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


class SeedStream:
    """One seed per epoch, and the state from which to reproduce it.

    Seeds are chained if the sampler needs no draws from the loader, and in later epochs with persistent workers. Each
    seed is then derived from the previous one, and the state is a single integer. The first seed of a chain is derived
    from the sampler's `seed`, if it has one, so that every rank has the same state even if ranks seed torch
    differently.

    Args:
        generator: the generator passed to the loader, or None.
        seeds_itself: whether the sampler needs no random draws from the loader.
        sampler: the sampler. If it has a `generator`, the generator is saved and restored, too.
    """

    def __init__(self, generator: torch.Generator | None, seeds_itself: bool, sampler: Any) -> None:
        self.generator = generator
        self._generators = {"generator": generator, "sampler_generator": generator_of(sampler)}
        self.seeds_itself = seeds_itself
        self._sampler = sampler
        self.base_seed: int | None = None
        self.chained = False
        self._private: torch.Generator | None = None
        self._at_start: dict[str, Any] | None = None  # states of the generators at the start of the epoch

    @property
    def private(self) -> torch.Generator:
        """Return the private copy of the global generator. Creates it on first use."""
        if self._private is None:
            self._private = torch.Generator()
            self._private.set_state(torch.get_rng_state())
        return self._private

    def begin(self, chain: bool) -> torch.Generator:
        """Begin an epoch.

        Args:
            chain: whether to derive the seed from the previous one, if there is one, instead of drawing it.

        Returns:
            A generator to pass to torch's loader. Its next draw is `base_seed`.
        """
        if self.seeds_itself or (chain and self.base_seed is not None):
            self.base_seed, self.chained = draw_seed(torch.Generator().manual_seed(self._root())), True
            self._save_generators()
            return torch.Generator().manual_seed(self.base_seed)
        source = self.generator or self.private
        self._save_generators()
        ahead = torch.Generator()
        ahead.set_state(source.get_state())
        self.base_seed, self.chained = draw_seed(source), False
        return ahead

    def begin_restored(self) -> torch.Generator:
        """Begin the epoch that `load` restored, and return a generator like `begin`."""
        if self.chained:
            assert self.base_seed is not None
            return torch.Generator().manual_seed(self.base_seed)
        self.base_seed = None
        return self.begin(chain=False)

    def _save_generators(self) -> None:
        self._at_start = None
        if not self.seeds_itself:
            self._at_start = {"private": self.private.get_state()}
            for name, generator in self._generators.items():
                if generator is not None:
                    self._at_start[name] = generator.get_state()

    @contextmanager
    def in_place_of_global(self) -> Iterator[None]:
        """Redirect draws from torch's global generator to the private one."""
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

    def state(self, in_epoch: bool) -> dict[str, Any]:
        """Return the state at the start of the current epoch, or of the next epoch if not `in_epoch`."""
        state: dict[str, Any] = {"base_seed": self.base_seed, "chained": self.chained}
        if self.seeds_itself:
            state["base_seed"] = self._root()
            return state
        if not in_epoch:
            self._save_generators()
        assert self._at_start is not None
        for name, tensor in self._at_start.items():
            if isinstance(tensor, torch.Tensor):  # encode once per epoch, on first use
                self._at_start[name] = base64.b64encode(tensor.numpy().tobytes()).decode()
            state[name] = self._at_start[name]
        return state

    def _root(self) -> int:
        """Return the seed from which the next epoch's seed is derived."""
        if self.base_seed is None:
            seed = getattr(self._sampler, "seed", None) if self.seeds_itself else None
            if isinstance(seed, int):
                self.base_seed = stream_key(seed, "loader") >> 1
            else:
                self.base_seed = draw_seed(self.generator or self.private)
        return self.base_seed

    def worker_seed(self, rank: int) -> int | None:
        """Return this rank's worker seed for this epoch, or None if torch draws it from the generator of `begin`."""
        if not self.chained or self.base_seed is None:
            return None
        return stream_key(self.base_seed, rank) >> 1 if rank else self.base_seed

    def check(self, state: dict[str, Any]) -> None:
        """Check that `load` can restore `state`.

        Raises:
            LoaderStateError: a generator's state is invalid, the seed of a chain is missing, or exactly one of the
                current and the saved sampler has a generator.
        """
        if state["chained"] and state["base_seed"] is None:
            raise LoaderStateError(
                "seeds.base_seed in this state is None; it must be an integer if seeds.chained is true: the state was "
                "edited; use another checkpoint"
            )
        for name in ("private", "generator", "sampler_generator"):
            try:
                if name in state:
                    torch.Generator().set_state(_decode(state[name]))
            except (ValueError, TypeError, RuntimeError):
                raise LoaderStateError(
                    f"seeds.{name} in this state is {shown(state[name])}; it must be the base64 text of a generator's "
                    "state: the state was edited; use another checkpoint"
                ) from None
        own = self._generators["sampler_generator"] is not None
        if "private" in state and own is not ("sampler_generator" in state):
            raise LoaderStateError(
                f"this state was saved with a sampler {'without' if own else 'with'} a generator, "
                f"{type(self._sampler).__name__} here is one {'with' if own else 'without'}, and would have another "
                f"order: {'leave out' if own else 'pass'} generator= as where it was saved"
            )

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned."""
        self.base_seed, self.chained = state["base_seed"], state["chained"]
        if "private" in state:
            self.private.set_state(_decode(state["private"]))
            for name, generator in self._generators.items():
                if generator is not None and name in state:
                    generator.set_state(_decode(state[name]))
        self._save_generators()


def generator_of(sampler: Any) -> torch.Generator | None:
    """Return the generator of a sampler, or of the sampler inside a batch sampler."""
    found = getattr(sampler, "generator", None) or getattr(getattr(sampler, "sampler", None), "generator", None)
    return found if isinstance(found, torch.Generator) else None


def _decode(text: str) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())
