"""torch's `default_collate` for the usual samples, with less Python: the same batches, and the same errors.

Columns of numpy arrays are written into one new tensor (which `resize_` cannot enlarge), where torch makes a tensor of
each array first. A worker process does not allocate shared memory, which a batch that travels as bytes (`ipc`) does not
need. Everything unusual is left to torch's function: other types, samples that do not agree, and all samples if
somebody has changed its registry of types. Arrays with negative strides, which torch refuses, are copied like others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils.collate import default_collate_fn_map

_torchs: Callable[[Any], Any] = default_collate
_REGISTRY = dict(default_collate_fn_map)  # of torch, as long as nobody has changed it
_DTYPES: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(name): getattr(torch, name)
    for name in ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
}


def in_place_of(collate_fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`collate_samples` for torch's `default_collate`; any other function as it is."""
    return collate_samples if collate_fn is default_collate else collate_fn


def collate_samples(samples: Sequence[Any]) -> Any:
    """What `default_collate` returns for these samples, or raises."""
    return _merged(samples) if default_collate_fn_map == _REGISTRY else _torchs(samples)


def _merged(samples: Sequence[Any]) -> Any:
    first = samples[0]
    merge = _MERGE.get(type(first))
    if merge is not None:
        return merge(samples, first)
    if isinstance(first, tuple) and hasattr(first, "_fields") and set(map(type, samples)) == {type(first)}:
        return type(first)(*map(_merged, zip(*samples, strict=True)))
    return _torchs(samples)


def _tensors(samples: Sequence[Any], first: torch.Tensor) -> Any:
    if first.layout is not torch.strided or first.is_nested:
        return _torchs(samples)
    return torch.stack(samples, 0)  # type: ignore[arg-type]


def _arrays(samples: Sequence[Any], first: np.ndarray) -> Any:
    dtype, shape = _DTYPES.get(first.dtype), first.shape
    if dtype is None or not shape or set(map(type, samples)) != {type(first)}:
        return _torchs(samples)
    merged = torch.empty((len(samples), *shape), dtype=dtype)
    with suppress(TypeError, ValueError):  # another dtype or shape, or none
        if len(set(map(len, samples))) == 1:
            np.concatenate(samples, out=merged.numpy().reshape(-1, *shape[1:]), casting="no")
            return merged
    return _torchs(samples)


def _numbers(dtype: type[np.generic], kind: type) -> Callable[[Sequence[Any], Any], Any]:
    def merge(samples: Sequence[Any], first: Any) -> Any:
        if set(map(type, samples)) != {kind}:
            return _torchs(samples)
        try:
            return torch.from_numpy(np.array(samples, dtype))
        except OverflowError:
            return _torchs(samples)

    return merge


def _mappings(samples: Sequence[Any], first: dict[Any, Any]) -> Any:
    return {key: _merged([sample[key] for sample in samples]) for key in first}


def _sequences(samples: Sequence[Any], first: Sequence[Any]) -> Any:
    try:
        columns = list(zip(*samples, strict=True))
    except (TypeError, ValueError):  # another length, or no sequence at all
        return _torchs(samples)
    return [_merged(column) for column in columns]


def _texts(samples: Sequence[Any], first: Any) -> Any:
    return samples


_MERGE: dict[type, Callable[[Sequence[Any], Any], Any]] = {
    torch.Tensor: _tensors,
    np.ndarray: _arrays,
    np.memmap: _arrays,
    int: _numbers(np.int64, int),
    float: _numbers(np.float64, float),
    **{kind: _numbers(kind, kind) for kind in (np.bool_, np.int32, np.int64, np.float32, np.float64)},
    dict: _mappings,
    tuple: _sequences,
    list: _sequences,
    str: _texts,
    bytes: _texts,
}
