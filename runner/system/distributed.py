"""Hold this process's rank, the world size, and the collectives that the runner needs.

`World.from_environment` reads the variables that torchrun sets (the Slurm launcher derives them from the SLURM
variables). With one process every collective is the identity and nothing is initialized. Control traffic uses gloo on
the CPU; gradients use nccl where there are GPUs. Importing this module imports no torch.

Errors are sent between ranks as plain data, never as pickled exceptions: an exception that cannot be unpickled would
leave the other ranks waiting.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from runner import errors
from runner.errors import PeerError, UserError
from runner.system import clock, processes

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

# This timeout is for a rank that hangs. A dead rank is noticed immediately from its closed connection. Rank 0 may take
# long because of a slow disk or an unresponsive scheduler, while the other ranks wait.
TIMEOUT = timedelta(minutes=10)

PROBE_S = 5.0
"""How long `World.lost_a_peer` waits for an answer. A dead peer is noticed at once; live peers use all of it."""
AT_ONCE = 0.5
"""The share of PROBE_S within which an error means a dead peer. A later error is the timeout: the timers of gloo and of
this process differ, so it may come a little, or a step of the system's clock, before the deadline."""
_PROBE_TAG = 1_000_003  # not used by collectives and other messages


@dataclass(frozen=True)
class World:
    """A rank of the run, and its communication with the other ranks.

    All ranks must call the same methods in the same order.

    Every method that communicates raises PeerError if another rank has ended or does not answer within the timeout.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    _group: Any = field(default=None, repr=False, compare=False)  # None: the default process group

    @staticmethod
    def from_environment() -> World:
        """Read RANK, WORLD_SIZE and LOCAL_RANK as set by torchrun. If they are not set, return a world of one process.

        Raises:
            UserError: the variables are not integers or contradict each other.
        """
        try:
            rank, size, local_rank = (
                int(processes.environment.get(name, default))
                for name, default in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))
            )
        except ValueError as error:
            raise UserError(f"RANK, WORLD_SIZE and LOCAL_RANK must be integers: {error}") from None
        if not 0 <= rank < size:
            raise UserError(f"RANK={rank} must be between 0 and WORLD_SIZE - 1 = {size - 1}")
        if size > 1:
            # DDP advises to turn off the search for unused parameters, which `runner.training.ranks.parallel` needs.
            # The advice comes from C++ and can only be silenced before torch is imported.
            processes.environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        return World(rank, size, local_rank)

    @property
    def is_main(self) -> bool:
        """Check whether this is rank 0, the only one that writes the run directory."""
        return self.rank == 0

    @property
    def others(self) -> list[int]:
        """Return the other ranks."""
        return [rank for rank in range(self.size) if rank != self.rank]

    def start(self, device: torch.device) -> None:
        """Join the default process group; do nothing with one process."""
        if self.size == 1:
            return
        import torch.distributed as dist

        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
            with _peer_errors():
                dist.init_process_group(backend, rank=self.rank, world_size=self.size, timeout=TIMEOUT)

    def stop(self) -> None:
        """Leave the process group."""
        if self.size > 1:
            import torch.distributed as dist

            if dist.is_initialized():
                dist.destroy_process_group()

    def with_own_group(self, timeout_s: float) -> World:
        """Return the same ranks with a separate gloo group.

        A background thread may use it, one thread at a time, while training uses the default group.

        Args:
            timeout_s: how long a collective waits for a rank that does not answer.
        """
        if self.size == 1:
            return self
        import torch.distributed as dist

        with _peer_errors():
            return replace(self, _group=dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum a CPU tensor over all ranks, in place."""
        if self.size > 1:
            import torch.distributed as dist

            with _peer_errors():
                dist.all_reduce(tensor, group=self._group)
        return tensor

    def exchange(
        self, receive: Iterable[tuple[int, torch.Tensor]], send: Iterable[tuple[int, torch.Tensor]], tag: int = 0
    ) -> Callable[[], None]:
        """Begin to send tensors to other ranks and to receive tensors from them, on any device used for training.

        Args:
            receive: pairs of source rank and contiguous tensor, of the size that is sent. Tensors from one rank arrive
                in the order in which it sends them.
            send: pairs of target rank and contiguous tensor. Do not change sent and received tensors until the exchange
                has ended.
            tag: distinguishes exchanges that ranks may begin in different orders (not with nccl).

        Returns:
            A function that waits until the exchange has ended.
        """
        import torch.distributed as dist

        operations = [
            dist.P2POp(operation, tensor, rank, self._group, tag)
            for operation, tensors in ((dist.irecv, receive), (dist.isend, send))
            for rank, tensor in tensors
            if tensor.numel()
        ]
        with _peer_errors():
            works = dist.batch_isend_irecv(operations) if operations else []

        def wait() -> None:
            with _peer_errors():
                for work in works:
                    work.wait()

        return wait

    def broadcast_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy rank 0's values into `tensor` on every rank, in place; on any device that training uses."""
        if self.size > 1:
            import torch.distributed as dist

            with _peer_errors():
                dist.broadcast(tensor, src=0, group=self._group)
        return tensor

    def broadcast(self, value: T, source: int = 0) -> T:
        """Return the value of rank `source` on every rank (anything picklable; sent only between ranks of one job)."""
        if self.size == 1:
            return value
        import torch.distributed as dist

        box: list[Any] = [value]
        with _peer_errors():
            dist.broadcast_object_list(box, src=source, group=self._group)
        return box[0]  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, in rank order, on every rank."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        with _peer_errors():
            dist.all_gather_object(values, value, group=self._group)
        return values

    def gather_on_main(self, value: T) -> list[T]:
        """Return every rank's value in rank order on rank 0, and an empty list on other ranks to save memory."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size if self.is_main else []
        with _peer_errors():
            dist.gather_object(value, values if self.is_main else None, dst=0, group=self._group)
        return values

    def run_on_main(self, function: Callable[[], T]) -> T:
        """Run `function` only on rank 0, and return its result or raise its error on every rank.

        Raises:
            Exception: on rank 0 what `function` raised; on the others the same UserError or OSError, and a PeerError
                in place of anything else.
        """
        if self.size == 1:
            return function()
        result, error = _outcome(function) if self.is_main else (None, None)
        result, report = self.broadcast((result, None if error is None else _pack(error, 0)))
        if report is not None:
            raise shared(error or _unpack(report))
        return result  # type: ignore[return-value]

    def run_on_all(self, function: Callable[[], T]) -> T:
        """Run `function` on every rank. If any rank fails, all raise the error of the lowest failing rank.

        Raises:
            Exception: on the lowest failing rank what `function` raised; on the others the same UserError or OSError,
                and a PeerError in place of anything else.
        """
        if self.size == 1:
            return function()
        import torch

        result, error = _outcome(function)
        failed = torch.zeros(self.size, dtype=torch.int8)
        failed[self.rank] = error is not None
        if not self.sum(failed).any():
            return result  # type: ignore[return-value]
        first = int(failed.nonzero()[0])
        report = self.broadcast(("", "", None, None) if error is None else _pack(error, self.rank), first)
        if error is not None and first == self.rank:
            raise shared(error)
        other = shared(_unpack(report))
        raise other from other.__cause__ or error

    def lost_a_peer(self) -> bool:
        """Check whether the process of another rank has ended. Call once, after an error that ends this process.

        A gradient exchange that fails inside `backward` raises a plain RuntimeError, as user code on this rank might.
        Reading from an ended process fails at once. A live process answers if it failed too, and does not answer while
        it waits in a collective. A peer that hangs cannot be distinguished from one that waits for this rank.
        """
        distributed: Any = sys.modules.get("torch.distributed")
        if self.size == 1 or distributed is None or not distributed.is_initialized():
            return False
        import torch

        options: dict[str, Any] = {"group": self._group, "tag": _PROBE_TAG}
        began = clock.monotonic()
        deadline = began + PROBE_S
        try:
            messages = [distributed.isend(torch.zeros(1), peer, **options) for peer in self.others]
            messages += [distributed.irecv(torch.zeros(1), peer, **options) for peer in self.others]
            for message in messages:
                message.wait(timedelta(seconds=max(deadline - clock.monotonic(), 0.1)))
        except RuntimeError:  # a timeout closes every connection, so later errors mean nothing
            return clock.monotonic() - began < AT_ONCE * PROBE_S
        return False


def lost_peer(error: RuntimeError) -> PeerError:
    """Return the PeerError to raise if `error` came from a broken exchange with another rank."""
    return PeerError(
        f"another rank of this job has ended or does not answer: see its output ({type(error).__name__}: {error})"
    )


class _Waited(threading.local):
    seconds = 0.0


waited = _Waited()
"""`seconds`: time this thread has spent in collectives of `World` so far, including waiting for other ranks."""


@contextmanager
def _peer_errors() -> Iterator[None]:
    """Time a collective within the block, and raise its RuntimeErrors (torch raises no others) as PeerError."""
    began = clock.perf_counter()
    try:
        yield
    except RuntimeError as error:
        raise lost_peer(error) from error
    finally:
        waited.seconds += clock.perf_counter() - began


def _outcome(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:  # noqa: BLE001 the other ranks must learn of any error
        return None, error


Report = tuple[str, str, int | None, str | None]
"""An error as plain data: class in runner.errors (or OSError), message, and errno and file name of it or its cause."""


def _pack(error: Exception, rank: int) -> Report:
    """Return the portable form of an error of `rank`."""
    if isinstance(error, OSError) and error.errno is not None:
        return "OSError", f"{error.strerror} (rank {rank})", error.errno, error.filename and str(error.filename)
    if isinstance(error, UserError):
        known = next(base.__name__ for base in type(error).__mro__ if base.__module__ == errors.__name__)
        cause = error.__cause__
        code, filename = (cause.errno, cause.filename) if isinstance(cause, OSError) else (None, None)
        return known, str(error), code, filename and str(filename)
    # The exception's __str__ may fail as well; the traceback module handles that.
    return PeerError.__name__, f"rank {rank}: {''.join(traceback.format_exception_only(error)).strip()}", None, None


def _unpack(report: Report) -> Exception:
    kind, message, errno, filename = report
    if kind == "OSError":
        return OSError(errno, message, filename)
    error: Exception = getattr(errors, kind)(message)
    if errno is not None:  # every rank must know whether the cause is temporary
        error.__cause__ = OSError(errno, os.strerror(errno), filename)
    return error


def shared(error: Exception) -> Exception:
    """Mark `error` as one that every rank raises, and return it."""
    if isinstance(error, UserError):
        error.everywhere = True
    return error
