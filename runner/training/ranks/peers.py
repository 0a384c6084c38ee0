"""Tell a failure of another rank from a failure of this rank, and pass on the reason.

A rank whose own code fails reports the reason in the job's key-value store before it exits. The other ranks notice a
broken collective. They read the reason and let the failed rank decide how the job ends.
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
"""The time to wait for the report, which the failed rank may still be writing."""
TRIES = 5
"""The most times that PyTorch tries to connect for `REPORT_S`. A process that ends during a try is aborted."""
OUTLIVE_S = 10.0
"""The longest time that the rank that serves the store waits until the others have read a report."""
POLL_S = 0.05
STOPPED = "stopped by a signal"
_FAILURE, _READ = "failure", "failure/read"  # keys: the report, and the number of ranks that have read it
MAX_STACKS_BYTES = 1 << 20  # of one rank; the store takes 8 MiB at once
LEAVE_S = 20
"""The time that a rank may take to end once its records are closed. External loggers may still be sending their
records."""


@contextmanager
def peer_errors(world: World) -> Iterator[None]:
    """Turn errors of exchanges inside torch (DDP's backward, FSDP's forward) into a PeerError.

    If a peer is lost, such an exchange raises a plain RuntimeError, as this rank's own code might. The peer is at fault
    if torch.distributed raised one of its own classes, if a peer is gone, or if the code failed after the collectives'
    timeout.

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
    """Report to the other ranks why this rank's own code failed. The first report counts."""
    _with_store(world, lambda store: store.compare_set(_FAILURE, "", f"rank {world.rank} failed: {reason}"))


def report_stop(world: World) -> None:
    """Report to the other ranks that this rank leaves in the middle of a step because of a signal."""
    _with_store(world, lambda store: store.compare_set(_FAILURE, "", STOPPED))


def reported_failure(world: World) -> str | None:
    """Return `rank N failed: reason`, STOPPED if a rank left because of a signal, or None without a report."""

    def read(store: Any) -> str | None:
        store.get(_FAILURE)  # waits for it
        return read_report(store)

    found: str | None = _with_store(world, read)
    return found


def read_report(store: Any) -> str | None:
    """Return the report in the store, if there is one, and mark it as read."""
    if not store.check([_FAILURE]):
        return None
    store.add(_READ, 1)
    reason: str = store.get(_FAILURE).decode()
    return reason


def _outlive_readers(world: World) -> None:
    """Wait a moment until the other ranks have read a reported failure, if there is one."""

    def wait(store: Any) -> None:
        deadline = clock.monotonic() + OUTLIVE_S
        while store.check([_FAILURE]) and store.add(_READ, 0) < world.size - 1 and clock.monotonic() < deadline:
            clock.sleep(POLL_S)

    _with_store(world, wait, OUTLIVE_S)


def all_arrive(world: World, place: str) -> bool:
    """Return True if all ranks come to this place in the code, at most a moment after this rank."""

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
    """Return the stacks that ranks have left, by rank."""

    def read(store: Any) -> dict[int, str]:
        ranks = [rank for rank in range(world.size) if store.check([_stacks_key(rank)])]
        found = store.multi_get([_stacks_key(rank) for rank in ranks]) if ranks else []
        return {rank: text.decode(errors="replace") for rank, text in zip(ranks, found, strict=True)}

    return _with_store(world, read) or {}


def _stacks_key(rank: int) -> str:
    return f"stacks/{rank}"


def serves_store(rank: int) -> bool:
    """Check whether the process of `rank` serves the job's key-value store; torchrun serves its own."""
    return rank == 0 and processes.environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def connect(timeout_s: float) -> Any:
    """Return a new connection to the job's key-value store, with separate keys for each start of the ranks.

    Raises:
        RuntimeError: the store is not there, or no longer. A stopped process does not even refuse the connection.
    """
    from torch import distributed

    dist: Any = distributed  # its stores are not typed
    host, port = processes.environment["MASTER_ADDR"], int(processes.environment["MASTER_PORT"])
    store = dist.TCPStore(host, port, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    # torchrun's store outlives a restart of its ranks.
    attempt = processes.environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"runner/{attempt}", store)


def in_group() -> bool:
    """Check whether this rank has joined the others, for which it needed the key-value store."""
    from torch import distributed as dist

    return dist.is_initialized()


def store_is_gone(timeout_s: float) -> bool:
    """Check whether no process serves the job's key-value store any more, after the store failed.

    The port of an ended process refuses a connection at once. The port of a stopped process accepts it without an
    answer, and a lost machine does not answer at all. These may hang, but are not gone.
    """
    try:
        address = processes.environment["MASTER_ADDR"], int(processes.environment["MASTER_PORT"])
        socket.create_connection(address, timeout_s).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def leave_ranks(status: int) -> None:
    """Leave the process group, and end this process with `status` even if its destructors wait for ever.

    Call this when no object refers to the model any more. The destructor of a process group that DDP's reducer still
    refers to holds the interpreter's lock while it waits for gloo's threads, which need the lock.
    """
    rank, size = current_ranks()
    if size == 1:
        return
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    with suppress(OSError):  # without a timer, a destructor that waits delays the end
        processes.end_after(LEAVE_S, status)
    if serves_store(rank) and in_group():
        _outlive_readers(World(rank, size))
    gc.collect()  # DDP's objects refer to each other
    with suppress(RuntimeError):  # the group has lost a rank; how this attempt ended is already recorded
        World(rank, size).stop()


def _with_store(world: World, action: Callable[[Any], Any], within_s: float = 0.0) -> Any:
    """Return `action(store)`, or None on failure: rank 0, which may serve the store, can be gone or frozen."""
    if world.size == 1:
        return None
    results: list[Any] = []

    def run() -> None:
        with suppress(RuntimeError):
            if not store_is_gone(REPORT_S):  # otherwise PyTorch would try to connect for longer than the timeout
                results.append(action(connect(REPORT_S)))

    thread = threading.Thread(target=run, name="peers", daemon=True)
    thread.start()
    thread.join(max(within_s, TRIES * REPORT_S))
    return results[0] if results else None
