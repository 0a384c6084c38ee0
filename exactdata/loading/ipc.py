"""Send a batch from a worker process to the main process, converting small tensors to bytes."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import torch

LIMIT = 8 << 20  # maximum bytes per tensor; beyond it, shared memory is faster than a pipe


class _LeaveToTorchError(Exception):
    """The batch contains a tensor that only torch can send, or that torch sends faster."""


class _Pickler(pickle.Pickler):
    """Pickle plain CPU tensors as numpy arrays.

    Raises:
        _LeaveToTorchError: the tensor is large, or not a plain CPU tensor.
    """

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is not torch.Tensor:
            if isinstance(thing, torch.Tensor):
                raise _LeaveToTorchError  # subclasses define how they are pickled
            return NotImplemented
        plain = thing.device.type == "cpu" and thing.layout is torch.strided and not thing.requires_grad
        if not plain or thing.is_conj() or thing.is_neg() or thing.is_quantized:
            raise _LeaveToTorchError
        if thing.is_shared():  # type: ignore[no-untyped-call]
            raise _LeaveToTorchError  # memory that the user shares must stay shared
        if thing.numel() * thing.element_size() > LIMIT:
            raise _LeaveToTorchError
        if thing.dtype in _BITS:
            return _from_bits, (thing.view(_BITS[thing.dtype]).numpy(), str(thing.dtype).removeprefix("torch."))
        try:
            return torch.from_numpy, (thing.numpy(),)
        except (TypeError, RuntimeError) as error:
            raise _LeaveToTorchError from error


_BITS = {torch.bfloat16: torch.int16}


def _from_bits(array: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(array).view(getattr(torch, dtype))


def pack(batch: Any) -> Any:
    """Return the batch as bytes, or unchanged if torch must send it."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(batch)
    except (_LeaveToTorchError, pickle.PicklingError, AttributeError, TypeError):
        return batch
    return Packed(buffer.getvalue())


class Packed(bytes):
    """A packed batch. The type distinguishes it from a user's batch."""


def unpack(payload: Any) -> Any:
    """Return the batch that was passed to `pack`."""
    return pickle.loads(payload) if type(payload) is Packed else payload
