"""Copies of tensors in host memory, so that training may continue while they are written.

What only an update changes, that is an optimizer's parameters and state, is copied in the background, during the next
forward and backward passes. Buffers and weights that no optimizer has (a target network's), which the code of a model
or a task may write at any time, are copied at once. So are parameters that the forward pass of this model changes (an
embedding with `max_norm`): which these are is found out in the step after the first copy, all of which is made at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch

from runner.checkpoint.tensors.layout import flat_bytes
from runner.checkpoint.tensors.staging import Tensors, shard
from runner.errors import CheckpointError

COMPARED = 1 << 23
"""How many elements are compared at once."""


class Copy:
    """Copies of tensors, some of which are still to be made by `complete`, in any thread.

    Attributes:
        tensors: the copies, by flat name.
        sources: what they are copies of.
        unstable: names of those that were found to change while they were copied.
    """

    def __init__(self, tensors: Tensors, sources: Tensors, copy_later: Collection[str]) -> None:
        self.tensors = tensors
        self.sources = sources
        self.unstable: set[str] = set()
        self._copied_later = [name for name in sources if name in copy_later]
        self._versions = {name: _version(source) for name, source in sources.items()}
        self._ready = _events(sources[name] for name in self._copied_later)

    def complete(self) -> None:
        """Make the rest of the copies.

        Raises:
            CheckpointError: a tensor was changed meanwhile.
        """
        with ExitStack() as entered:
            if self._ready:  # a thread begins on the first GPU, whichever one the process trains on
                torch.cuda.set_device(next(iter(self._ready)))
            make: Any = torch.cuda.Stream  # which is not typed
            streams = [make(device) for device in self._ready]  # beside those that train
            for stream, event in zip(streams, self._ready.values(), strict=True):
                stream.wait_event(event)
                entered.enter_context(torch.cuda.stream(stream))
            self._copy()
        for stream in streams:
            stream.synchronize()
        self.unstable = {name for name in self._copied_later if _version(self.sources[name]) != self._versions[name]}
        if self.unstable:
            names = ", ".join(sorted(self.unstable))
            raise CheckpointError(f"a forward or backward pass changed {names}, which is copied at once from now on")

    @torch.no_grad()
    def _copy(self) -> None:
        for name in self._copied_later:
            target, source = self.tensors[name], self.sources[name].detach()
            if source.is_cpu and source.is_contiguous() and not source.is_conj() and not source.is_neg():
                np.copyto(flat_bytes(target).numpy(), flat_bytes(source).numpy())  # with torch's threads it trains
            else:
                target.copy_(source, non_blocking=source.is_cuda)

    @torch.no_grad()
    def changed(self, names: Collection[str]) -> set[str]:
        """Those of the sources `names` that are not what they were when the copy was begun."""
        return {
            name
            for name in names
            if _version(self.sources[name]) != self._versions[name]
            or not _same_bytes(self.sources[name].detach(), self.tensors[name])
        }


class HostBuffers:
    """Host memory for copies, which is allocated once and reused by every save.

    A copy into fresh memory spends most of its time on page faults; page-locked memory allows asynchronous copies from
    a GPU.
    """

    def __init__(self) -> None:
        self._buffers: Tensors = {}
        self._observed: set[str] = set()
        self._steady: set[str] = set()

    @torch.no_grad()
    def copy(self, tensors: Tensors, copy_later: Collection[str] = ()) -> Copy:
        """Copy `tensors` (this rank's shards); the next call overwrites the result.

        Args:
            tensors: by flat name.
            copy_later: names of those that stay as they are until `observe` is called, unless a forward pass changes
                them. Each is copied at once the first time, too.
        """
        sources = {name: shard(tensor) for name, tensor in tensors.items()}
        self._buffers = {name: self._buffer(name, source) for name, source in sources.items()}
        later = self._steady.intersection(copy_later)
        now = [name for name in sources if name not in later]
        if any(not sources[name].is_cpu for name in now):
            for name in now:
                self._buffers[name].copy_(sources[name], non_blocking=sources[name].is_cuda)
            for device in _gpus(sources[name] for name in now):
                torch.cuda.synchronize(device)
        elif now:
            torch._foreach_copy_([self._buffers[name] for name in now], [sources[name] for name in now])
        return Copy(self._buffers, sources, later)

    def observe(self, copy: Copy) -> None:
        """After the forward and backward passes that follow a copy: find out which tensors they change, once."""
        new = copy.sources.keys() - self._observed
        self._steady |= new - copy.changed(new)
        self._observed |= new

    def never_copy_later(self, names: Collection[str]) -> None:
        """Copy these at once from now on."""
        self._steady.difference_update(names)

    def _buffer(self, name: str, source: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.shape == source.shape and buffer.dtype == source.dtype:
            return buffer
        pinned = source.device.type == "cuda"
        return torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pinned)


def _version(tensor: torch.Tensor) -> int:
    """How often it was changed in place; writes through `.data` do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _events(tensors: Iterable[torch.Tensor]) -> dict[torch.device, Any]:
    """Mark this moment in the work of each GPU that has some of the tensors."""
    return {device: torch.cuda.current_stream(device).record_event() for device in _gpus(tensors)}


def _gpus(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """Where the tensors are that are on GPUs: on one, unless a model is divided among several."""
    return list(dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda))


def _same_bytes(source: torch.Tensor, copy: torch.Tensor) -> bool:
    plain = source.resolve_conj().resolve_neg().contiguous()
    one, two = flat_bytes(plain), flat_bytes(copy)
    words = len(one) // 8 * 8 if one.storage_offset() % 8 == 0 else 0  # eight at a time is several times as fast
    parts = [(one[:words].view(torch.int64), two[:words].view(torch.int64)), (one[words:], two[words:])]
    return all(
        torch.equal(a, b.to(a.device))  # block by block: a GPU that trains may have little memory left
        for part in parts
        for a, b in zip(*(torch.split(each, COMPARED) for each in part), strict=True)
    )
