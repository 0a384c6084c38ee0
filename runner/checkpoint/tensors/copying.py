"""Copy tensors to host memory, so that training can continue while the copies are written.

An optimizer's parameters and state change only in an update, so they are copied in the background, during the next
forward and backward passes. Buffers and weights without an optimizer (e.g. of a target network) are copied immediately,
because code of a model or task may write to them at any time. So are parameters that a forward pass changes (e.g. an
embedding with `max_norm`). To find these parameters, the first save copies everything immediately and compares it with
the tensors after the next passes.
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
"""Number of elements compared at once."""


class Copy:
    """Copies of tensors. `complete` makes the deferred copies and may be called in any thread.

    Attributes:
        tensors: copies, by flat name.
        sources: original tensors, by flat name.
        unstable: names of tensors that changed while they were copied.
    """

    def __init__(self, tensors: Tensors, sources: Tensors, copy_later: Collection[str]) -> None:
        self.tensors = tensors
        self.sources = sources
        self.unstable: set[str] = set()
        self._copied_later = [name for name in sources if name in copy_later]
        self._versions = {name: _version(source) for name, source in sources.items()}
        self._ready = _events(sources[name] for name in self._copied_later)

    def complete(self) -> None:
        """Make the deferred copies.

        Raises:
            CheckpointError: a tensor changed before its copy was complete.
        """
        with ExitStack() as entered:
            if self._ready:  # a new thread uses the first GPU, even if the process trains on a different one
                torch.cuda.set_device(next(iter(self._ready)))
            make: Any = torch.cuda.Stream  # has no type annotations
            streams = [make(device) for device in self._ready]  # separate from the training streams
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
                # Copy with numpy, because training is using torch's threads.
                np.copyto(flat_bytes(target).numpy(), flat_bytes(source).numpy())
            else:
                target.copy_(source, non_blocking=source.is_cuda)

    @torch.no_grad()
    def changed(self, names: Collection[str]) -> set[str]:
        """Return the names of the sources among `names` that have changed since the copy began."""
        return {
            name
            for name in names
            if _version(self.sources[name]) != self._versions[name]
            or not _same_bytes(self.sources[name].detach(), self.tensors[name])
        }


class HostBuffers:
    """Host memory for copies, allocated once and reused by every save.

    A copy to newly allocated memory spends most of its time on page faults. Page-locked memory allows asynchronous
    copies from a GPU.
    """

    def __init__(self) -> None:
        self._buffers: Tensors = {}
        self._observed: set[str] = set()
        self._steady: set[str] = set()

    @torch.no_grad()
    def copy(self, tensors: Tensors, copy_later: Collection[str] = ()) -> Copy:
        """Copy this rank's shards of `tensors`. The next call overwrites the copies.

        Args:
            tensors: tensors to copy, by flat name.
            copy_later: names of tensors whose copies may be deferred, because only a forward pass can change them
                before `observe` is called. The first copy of each tensor is made immediately.
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
        """Find the tensors that forward and backward passes change. Call this after the passes that follow a copy."""
        new = copy.sources.keys() - self._observed
        self._steady |= new - copy.changed(new)
        self._observed |= new

    def never_copy_later(self, names: Collection[str]) -> None:
        """Copy these tensors immediately from now on."""
        self._steady.difference_update(names)

    def _buffer(self, name: str, source: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(name)
        if buffer is not None and buffer.shape == source.shape and buffer.dtype == source.dtype:
            return buffer
        pinned = source.device.type == "cuda"
        return torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=pinned)


def _version(tensor: torch.Tensor) -> int:
    """Return the number of in-place changes to a tensor. Writes through `.data` are not counted."""
    return 0 if tensor.is_inference() else tensor._version


def _events(tensors: Iterable[torch.Tensor]) -> dict[torch.device, Any]:
    """Record an event on the current stream of each GPU that holds some of the tensors."""
    return {device: torch.cuda.current_stream(device).record_event() for device in _gpus(tensors)}


def _gpus(tensors: Iterable[torch.Tensor]) -> list[torch.device]:
    """List the GPUs that hold some of the tensors: one GPU, unless the model is split across several."""
    return list(dict.fromkeys(tensor.device for tensor in tensors if tensor.is_cuda))


def _same_bytes(source: torch.Tensor, copy: torch.Tensor) -> bool:
    plain = source.resolve_conj().resolve_neg().contiguous()
    one, two = flat_bytes(plain), flat_bytes(copy)
    # Compare eight bytes at a time, which is several times as fast.
    words = len(one) // 8 * 8 if one.storage_offset() % 8 == 0 else 0
    parts = [(one[:words].view(torch.int64), two[:words].view(torch.int64)), (one[words:], two[words:])]
    return all(
        torch.equal(a, b.to(a.device))  # block by block, because a GPU may have little free memory
        for part in parts
        for a, b in zip(*(torch.split(each, COMPARED) for each in part), strict=True)
    )
