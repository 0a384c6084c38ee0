"""Distinguish failures of other ranks from failures of this rank, and share the reason among ranks.

A rank whose code fails writes the reason to the job's key-value store before it exits. In the other ranks, a collective
fails. They read the reason and let the failed rank decide how the job ends.
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
"""Seconds to wait for the report, which the failed rank may still be writing."""
TRIES = 5
"""Maximum number of times that PyTorch tries to connect within `REPORT_S`. A process that exits during a try aborts."""
OUTLIVE_S = 10.0
"""Maximum seconds for which the rank that serves the store waits until the other ranks have read a report."""
POLL_S = 0.05
STOPPED = "stopped by a signal"
_FAILURE, _READ = "failure", "failure/read"  # keys of the report and of the number of ranks that have read it
MAX_STACKS_BYTES = 1 << 20  # per rank; the store accepts at most 8 MiB at once
LEAVE_S = 20
"""Seconds that a rank may take to exit once its records are closed. External loggers may still be sending records."""


@contextmanager
def peer_errors(world: World) -> Iterator[None]:
    """Convert errors of exchanges inside torch (DDP's backward, FSDP's forward) to a PeerError.

    If a peer is lost, such an exchange raises a plain RuntimeError, which this rank's code might also raise. A peer
    caused the error if its class is from torch.distributed, if a peer is gone, or if the code failed after the timeout
    of collectives.

    Raises:
        PeerError: another rank has exited or does not respond.
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
    """Report to the other ranks why this rank's code failed. If several ranks report, only the first report is kept."""
    _with_store(world, lambda store: store.compare_set(_FAILURE, "", f"rank {world.rank} failed: {reason}"))


def report_stop(world: World) -> None:
    """Report to the other ranks that this rank leaves during a step because of a signal."""
    _with_store(world, lambda store: store.compare_set(_FAILURE, "", STOPPED))


def reported_failure(world: World) -> str | None:
    """Return `rank N failed: reason`, STOPPED if a rank left because of a signal, or None if there is no report."""

    def read(store: Any) -> str | None:
        store.get(_FAILURE)  # waits for the report
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
    """Wait up to `OUTLIVE_S` seconds until the other ranks have read a reported failure, if there is one."""

    def wait(store: Any) -> None:
        deadline = clock.monotonic() + OUTLIVE_S
        while store.check([_FAILURE]) and store.add(_READ, 0) < world.size - 1 and clock.monotonic() < deadline:
            clock.sleep(POLL_S)

    _with_store(world, wait, OUTLIVE_S)


def all_arrive(world: World, place: str) -> bool:
    """Return True if all ranks reach this point of the code, at most `REPORT_S` seconds after this rank."""

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
    """Put this rank's stack traces into the store for rank 0."""
    _with_store(world, lambda store: store.set(_stacks_key(world.rank), text.encode()[:MAX_STACKS_BYTES]))


def left_stacks(world: World) -> dict[int, str]:
    """Return the stack traces that ranks have put into the store, by rank."""

    def read(store: Any) -> dict[int, str]:
        ranks = [rank for rank in range(world.size) if store.check([_stacks_key(rank)])]
        found = store.multi_get([_stacks_key(rank) for rank in ranks]) if ranks else []
        return {rank: text.decode(errors="replace") for rank, text in zip(ranks, found, strict=True)}

    return _with_store(world, read) or {}


def _stacks_key(rank: int) -> str:
    return f"stacks/{rank}"


def serves_store(rank: int) -> bool:
    """Check whether the process of `rank` serves the job's key-value store. With torchrun, torchrun serves it."""
    return rank == 0 and processes.environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def connect(timeout_s: float) -> Any:
    """Connect to the job's key-value store. Keys are separate for each start of the ranks.

    Raises:
        RuntimeError: the store does not exist or no longer exists. If its process is stopped, the connection times out.
    """
    from torch import distributed

    dist: Any = distributed  # its stores have no type annotations
    host, port = processes.environment["MASTER_ADDR"], int(processes.environment["MASTER_PORT"])
    store = dist.TCPStore(host, port, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    # torchrun's store survives a restart of the ranks.
    attempt = processes.environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"runner/{attempt}", store)


def in_group() -> bool:
    """Check whether this rank has joined the process group, which requires the key-value store."""
    from torch import distributed as dist

    return dist.is_initialized()


def store_is_gone(timeout_s: float) -> bool:
    """Check, after the store has failed, whether the process that served it has exited.

    The port of an exited process refuses a connection immediately. The port of a stopped process accepts it but does
    not answer, and a lost machine does not respond at all. The latter two may hang, but are not gone.
    """
    try:
        address = processes.environment["MASTER_ADDR"], int(processes.environment["MASTER_PORT"])
        socket.create_connection(address, timeout_s).close()
    except OSError as error:
        return isinstance(error, ConnectionRefusedError)
    return False


def leave_ranks(status: int) -> None:
    """Leave the process group, and end this process with `status` even if its destructors block forever.

    Call this when no object refers to the model any more. If DDP's reducer still refers to a process group, the group's
    destructor holds the GIL while it waits for gloo's threads, which need the GIL.
    """
    rank, size = current_ranks()
    if size == 1:
        return
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    with suppress(OSError):  # without a timer, a blocked destructor delays the exit
        processes.end_after(LEAVE_S, status)
    if serves_store(rank) and in_group():
        _outlive_readers(World(rank, size))
    gc.collect()  # DDP's objects refer to each other
    with suppress(RuntimeError):  # the group has lost a rank; the end of this attempt is already recorded
        World(rank, size).stop()


def _with_store(world: World, action: Callable[[Any], Any], within_s: float = 0.0) -> Any:
    """Return `action(store)`, or None on failure, because rank 0, which may serve the store, may be gone or frozen."""
    if world.size == 1:
        return None
    results: list[Any] = []

    def run() -> None:
        with suppress(RuntimeError):
            if not store_is_gone(REPORT_S):  # otherwise PyTorch would retry the connection for longer than the timeout
                results.append(action(connect(REPORT_S)))

    thread = threading.Thread(target=run, name="peers", daemon=True)
    thread.start()
    thread.join(max(within_s, TRIES * REPORT_S))
    return results[0] if results else None
