"""When another rank fails: telling its failure from one of this rank's own, and passing on the reason.

A rank that fails by itself reports the reason in the job's key-value store before it exits. The others notice a broken
collective; they look the reason up and leave it to the failed rank how the job ends.
"""

from __future__ import annotations

import gc
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from exactdata.ranks import current_ranks
from runner.system import clock, processes
from runner.system.distributed import TIMEOUT, World, lost_peer

REPORT_S = 2.0
"""How long a rank that follows waits for the report: the one that failed may be writing it just now."""
TRIES = 5
"""How often at most PyTorch tries to connect for so long; a process that ends meanwhile is aborted."""
OUTLIVE_S = 10.0
"""How long at most the rank that serves the store waits until the others have read a report."""
POLL_S = 0.05
STOPPED = "stopped by a signal"
_FAILURE, _READ = "failure", "failure/read"  # in the store: the report, and how many ranks have read it
MAX_STACKS_BYTES = 1 << 20  # of one rank; the store takes 8 MiB at once
LEAVE_S = 20
"""How long a rank may take to end once its records are closed; external loggers may still be sending theirs."""


@contextmanager
def peer_errors(world: World) -> Iterator[None]:
    """Around code that exchanges tensors inside torch (DDP's backward, FSDP's forward).

    Such an exchange raises a plain RuntimeError when a peer is lost, as this rank's own code might. It is the peer's
    failure if torch.distributed raised one of its own classes, if a peer is gone, or if the code failed after the
    collectives' timeout.

    Raises:
        PeerError: another rank has ended or does not answer.
    """
    began = clock.monotonic()
    try:
        yield
    except RuntimeError as error:
        if world.size > 1 and _lost(world, error, clock.monotonic() - began):
            raise lost_peer(error) from error
        raise


def _lost(world: World, error: RuntimeError, seconds: float) -> bool:
    import torch.distributed as dist

    return isinstance(error, dist.DistError) or seconds >= TIMEOUT.total_seconds() or world.lost_a_peer()


def report_failure(world: World, reason: str) -> None:
    """Let the other ranks know why this one fails by itself; the first report counts."""
    _with_store(world, lambda store: store.compare_set(_FAILURE, "", f"rank {world.rank} failed: {reason}"))


def report_stop(world: World) -> None:
    """Let the other ranks know that this one leaves in the middle of a step because of a signal."""
    _with_store(world, lambda store: store.compare_set(_FAILURE, "", STOPPED))


def reported_failure(world: World) -> str | None:
    """`rank N failed: reason` if a rank of this job reported its failure; STOPPED if it left because of a signal."""

    def read(store: Any) -> str | None:
        store.get(_FAILURE)  # waits for it
        return read_report(store)

    found: str | None = _with_store(world, read)
    return found


def read_report(store: Any) -> str | None:
    """The report in the store, if there is one; its reporter learns that it was read."""
    if not store.check([_FAILURE]):
        return None
    store.add(_READ, 1)
    reason: str = store.get(_FAILURE).decode()
    return reason


def _outlive_readers(world: World) -> None:
    """If a rank has reported its failure, wait a moment until the others have read it."""

    def wait(store: Any) -> None:
        deadline = clock.monotonic() + OUTLIVE_S
        while store.check([_FAILURE]) and store.add(_READ, 0) < world.size - 1 and clock.monotonic() < deadline:
            clock.sleep(POLL_S)

    _with_store(world, wait, OUTLIVE_S)


def all_arrive(world: World, place: str) -> bool:
    """Whether all ranks come to this place in the code, at most a moment after this one; one rank alone does."""

    def arrive(store: Any) -> bool:
        store.add(place, 1)
        deadline = clock.monotonic() + REPORT_S
        while store.add(place, 0) < world.size:
            if clock.monotonic() >= deadline:
                return False
            clock.sleep(POLL_S)
        return True

    return world.size == 1 or bool(_with_store(world, arrive))


def leave_stacks(world: World, text: str) -> None:
    """Put the stacks of this rank where rank 0 finds them."""
    _with_store(world, lambda store: store.set(_stacks_key(world.rank), text.encode()[:MAX_STACKS_BYTES]))


def left_stacks(world: World) -> dict[int, str]:
    """The stacks that ranks have left, by rank."""

    def read(store: Any) -> dict[int, str]:
        ranks = [rank for rank in range(world.size) if store.check([_stacks_key(rank)])]
        found = store.multi_get([_stacks_key(rank) for rank in ranks]) if ranks else []
        return {rank: text.decode(errors="replace") for rank, text in zip(ranks, found, strict=True)}

    return _with_store(world, read) or {}


def _stacks_key(rank: int) -> str:
    return f"stacks/{rank}"


def serves_store(rank: int) -> bool:
    """Whether the process of `rank` serves the job's key-value store; torchrun serves it itself."""
    return rank == 0 and processes.environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def connect(timeout_s: float) -> Any:
    """A connection of its own to the job's key-value store; of torchrun's, the part of this start of the ranks.

    Raises:
        RuntimeError: it is not there, or not there any more. A process that is stopped does not even refuse.
    """
    from torch import distributed

    dist: Any = distributed  # its stores are not typed
    host, port = processes.environment["MASTER_ADDR"], int(processes.environment["MASTER_PORT"])
    store = dist.TCPStore(host, port, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    # torchrun's store outlives a restart of its ranks.
    attempt = processes.environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"runner/{attempt}", store)


def in_group() -> bool:
    """Whether this rank has joined the others, for which it needed the key-value store."""
    from torch import distributed as dist

    return dist.is_initialized()


def store_is_gone(timeout_s: float) -> bool:
    """Whether nothing serves the job's key-value store (any more), to be asked when it failed.

    The port of a process that has ended refuses a connection at once. That of one that is stopped takes it without a
    word, and a machine that is lost says nothing at all: these may hang, but are not gone.
    """
    try:
        address = processes.environment["MASTER_ADDR"], int(processes.environment["MASTER_PORT"])
        socket.create_connection(address, timeout_s).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def leave_ranks(status: int) -> None:
    """Leave the process group, and let this process end with `status` even if its destructors wait for ever.

    To be called when nothing refers to the model any more: the destructor of a process group that DDP's reducer still
    refers to waits for gloo's threads while it holds the interpreter's lock, which they need.
    """
    rank, size = current_ranks()
    if size == 1:
        return
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    with suppress(OSError):  # no timer is left: then only a destructor that waits is waited for
        processes.end_after(LEAVE_S, status)
    if serves_store(rank) and in_group():
        _outlive_readers(World(rank, size))
    gc.collect()  # DDP's objects refer to each other
    with suppress(RuntimeError):  # of a group that has lost a rank; how this attempt ended is settled
        World(rank, size).stop()


def _with_store(world: World, action: Callable[[Any], Any], within_s: float = 0.0) -> Any:
    """`action(store)`, or None: rank 0, which may serve the store, can be gone or frozen."""
    if world.size == 1:
        return None
    results: list[Any] = []

    def run() -> None:
        with suppress(RuntimeError):
            if not store_is_gone(REPORT_S):  # else the connection would be tried for longer than this is waited for
                results.append(action(connect(REPORT_S)))

    thread = threading.Thread(target=run, name="peers", daemon=True)
    thread.start()
    thread.join(max(within_s, TRIES * REPORT_S))
    return results[0] if results else None
