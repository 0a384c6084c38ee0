"""When another rank fails: telling its failure from one of this rank's own, and passing on the reason.

A rank that fails by itself reports the reason in the job's key-value store before it exits. The others notice a broken
collective; they look the reason up and leave it to the failed rank how the job ends.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

from runner.system import clock
from runner.system.distributed import TIMEOUT, World, lost_peer

REPORT_S = 2.0
"""How long a rank that follows waits for the report: the one that failed may be writing it just now."""


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
    _with_store(world, lambda store: store.compare_set("failure", "", f"rank {world.rank} failed: {reason}"))


def reported_failure(world: World) -> str | None:
    """`rank N failed: reason` if a rank of this job reported its failure."""
    found = _with_store(world, lambda store: store.get("failure"))
    return None if found is None else found.decode()


def _with_store(world: World, action: Callable[[Any], Any]) -> Any:
    """`action(store)`, or None: rank 0, which may serve the store, can be gone or frozen."""
    if world.size == 1:
        return None
    from torch import distributed

    dist: Any = distributed  # its stores are not typed
    results: list[Any] = []

    def run() -> None:
        with suppress(RuntimeError):
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            store = dist.TCPStore(host, port, timeout=timedelta(seconds=REPORT_S), wait_for_workers=False)
            # torchrun's store outlives a restart of its ranks.
            attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            results.append(action(dist.PrefixStore(f"runner/{attempt}", store)))

    thread = threading.Thread(target=run, name="peers", daemon=True)
    thread.start()
    thread.join(2 * REPORT_S)
    return results[0] if results else None
