"""Sending a batch from a worker process: small tensors travel as bytes.

torch sends each tensor as a file descriptor of shared memory, which costs a tenth of a millisecond and more;
for batches of up to a few megabytes it is the cost of a worker. Here the worker pickles the batch itself, CPU
tensors as numpy arrays in it, and the main process gets the same tensors back, in memory of its own. Larger
batches go torch's way.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

LIMIT = 8 << 20  # bytes in one tensor; above, a shared mapping is cheaper than copying through a pipe


class _TooLargeError(Exception):
    """A tensor in the batch had better go torch's way."""


def collate(samples: list[Any]) -> Any:
    """`default_collate`, in ordinary memory.

    In a worker process torch's own allocates a file of shared memory for each tensor, which a batch that
    travels as bytes does not need. Only the plain cases are done here; the others are torch's.
    """
    first = samples[0]
    kind = type(first)
    if kind is torch.Tensor and first.layout is torch.strided and first.device.type == "cpu":
        if all(type(sample) is torch.Tensor and not sample.is_nested for sample in samples):
            return torch.stack(samples, 0)
    elif kind is dict and all(type(sample) is dict and sample.keys() == first.keys() for sample in samples):
        return {key: collate([sample[key] for sample in samples]) for key in first}
    elif kind in (tuple, list) and all(type(sample) is kind and len(sample) == len(first) for sample in samples):
        return [collate(list(column)) for column in zip(*samples, strict=True)]
    elif kind is np.ndarray and first.dtype.kind in "fiub" and first.shape:
        return collate([torch.as_tensor(sample) for sample in samples])
    return default_collate(samples)


class _Pickler(pickle.Pickler):
    """Plain CPU tensors as numpy arrays; raises _TooLargeError where a tensor had better go torch's way."""

    def __init__(self, buffer: io.BytesIO, may_be_shared: bool) -> None:
        super().__init__(buffer, protocol=pickle.HIGHEST_PROTOCOL)
        self._may_be_shared = may_be_shared

    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is not torch.Tensor:
            if isinstance(thing, torch.Tensor):
                raise _TooLargeError  # subclasses know best how they travel
            return NotImplemented
        plain = thing.device.type == "cpu" and thing.layout is torch.strided and not thing.requires_grad
        if not plain or thing.is_conj() or thing.is_neg() or thing.is_quantized:
            raise _TooLargeError
        if not self._may_be_shared and thing.is_shared():  # type: ignore[no-untyped-call]
            raise _TooLargeError  # the user's own shared memory must stay shared
        if thing.numel() * thing.element_size() > LIMIT:
            raise _TooLargeError
        if thing.dtype in _BITS:
            return _from_bits, (thing.view(_BITS[thing.dtype]).numpy(), str(thing.dtype).removeprefix("torch."))
        try:
            return torch.from_numpy, (thing.numpy(),)
        except (TypeError, RuntimeError) as error:
            raise _TooLargeError from error


_BITS = {torch.bfloat16: torch.int16}


def _from_bits(array: np.ndarray, dtype: str) -> torch.Tensor:
    return torch.from_numpy(array).view(getattr(torch, dtype))


def pack(batch: Any, may_be_shared: bool = False) -> Any:
    """The batch as bytes, or itself where torch's own way is better or the only one.

    Args:
        may_be_shared: a tensor in shared memory is there only because torch's collate put it there.
    """
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, may_be_shared).dump(batch)
    except (_TooLargeError, pickle.PicklingError, AttributeError, TypeError):
        return batch
    return Packed(buffer.getvalue())


class Packed(bytes):
    """A batch as bytes; a type of its own, so that a batch that is bytes is not mistaken for one."""


def unpack(payload: Any) -> Any:
    """What `pack` was given."""
    return pickle.loads(payload) if type(payload) is Packed else payload
