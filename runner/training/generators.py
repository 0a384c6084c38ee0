"""Lends the global random generators to a user's code, and has them back as they were.

`checkpoint.get_rng_state` and `set_rng_state` do it in 190 µs, nearly all of it numpy's conversion of its state to
Python. Around a call after every step the state is copied as the bytes that it is: 30 µs altogether.
"""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_numpy: Any = np.random  # its type hints lack two functions
_WORDS = 624
_BYTES = 4 * (_WORDS + 1)  # of numpy's struct: the words of MT19937, and the place among them


def seed_of(*parts: object) -> int:
    """A 63-bit seed that depends on all of `parts`."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little") >> 1


class Generators:
    """Python's, numpy's and torch's global generators of this process; of CUDA's, that of `device`."""

    def __init__(self, device: torch.device) -> None:
        self._torch = [torch.default_generator]
        if device.type == "cuda":
            torch.cuda.init()  # type: ignore[no-untyped-call]
            self._torch.append(torch.cuda.default_generators[device.index or 0])
        self._raw = _layout_is_known()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Whatever the block draws, and however it seeds them: afterwards all are as before."""
        python, torch_states = random.getstate(), [generator.get_state() for generator in self._torch]
        restore_numpy = self._save_numpy()
        try:
            yield
        finally:
            random.setstate(python)
            restore_numpy()
            for generator, state in zip(self._torch, torch_states, strict=True):
                generator.set_state(state)

    def seed(self, seed: int) -> None:
        """Seed all of them."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        for generator in self._torch:
            generator.manual_seed(seed)

    def _save_numpy(self) -> Callable[[], None]:
        """Remember numpy's generator; the function returned puts it back."""
        bits: Any = _numpy.get_bit_generator()
        if not (self._raw and type(bits) is np.random.MT19937):
            state = np.random.get_state(legacy=False)
            return lambda: _put_back(bits, state)
        address = bits.ctypes.state_address
        words = ctypes.string_at(address, _BYTES)
        # Normal draws come in pairs, and the second one waits outside of this state. If one waits, a draw takes it and
        # moves nothing; a draw that moves the state shows that none waited.
        drawn = np.random.standard_normal()
        waiting = drawn if ctypes.string_at(address, _BYTES) == words else None

        def restore() -> None:
            _numpy.set_bit_generator(bits)  # forgets a draw that waits
            ctypes.memmove(address, words, _BYTES)
            if waiting is not None:
                np.random.set_state({**np.random.get_state(legacy=False), "has_gauss": 1, "gauss": waiting})

        return restore


def _put_back(bits: Any, state: Any) -> None:
    _numpy.set_bit_generator(bits)
    np.random.set_state(state)


def _layout_is_known() -> bool:
    """Whether this numpy lays out MT19937's state as `_BYTES` bytes that hold what its `state` says."""
    bits = np.random.MT19937(1)
    raw = np.frombuffer(ctypes.string_at(bits.ctypes.state_address, _BYTES), np.uint32)
    told: Any = bits.state["state"]
    return bool(np.array_equal(raw[:_WORDS], told["key"]) and raw[_WORDS] == told["pos"])
