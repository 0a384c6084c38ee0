"""Detect within `train.peer_timeout_s` that another rank hangs, and name that rank.

If a rank exits, its connections close, and the other ranks notice immediately. If a rank hangs (a stopped process, a
lost node, a thread that holds the GIL), the other ranks are blocked in a collective until its timeout. So a thread on
each rank sends heartbeats: it increases a counter in the job's key-value store, and watches the counters of the other
ranks. Clocks of different machines are never compared. Time in which this process was not running is not counted.

Code that holds the GIL for a long time (building a dataset, pickling an object) also blocks that thread. So until its
session is open, a rank may be silent for as long as the timeout of a collective.

`runner.training.ranks.hang_watch` detects a stuck main thread in a live process. It reads the activity of each rank
from the heartbeats. Whether a blocked collective can be aborted depends on the backend (gloo ignores it), so the watch
thread ends the attempt. This is untested with NCCL.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from runner.system import clock, processes
from runner.system.distributed import TIMEOUT, World
from runner.training.ranks.peers import connect, in_group, read_report, serves_store, store_is_gone

LOOKS = 12
"""Number of times within the timeout that a rank checks the heartbeats of the other ranks."""
MAX_INTERVAL_S = 5.0
MISSED = 3
"""Number of intervals without a heartbeat after which a rank may have stopped."""


@dataclass
class _Peer:
    """The last heartbeat of another rank, and the seconds since it last changed."""

    seen: bytes = b""
    sign: dict[str, Any] = field(default_factory=dict)
    silent_s: float = 0.0
    left: bool = False
    opening: bool = False
    """True if the rank's session was not open yet."""

    @property
    def present(self) -> bool:
        """Return True if the rank has joined and has not left normally."""
        return bool(self.seen) and not self.left


class PeerWatch:
    """Watch the other ranks of `world` between `start` and `stop`.

    Args:
        world: the ranks.
        timeout_s: maximum time without a heartbeat for a rank whose session is open, in seconds.
        progress: function that returns this rank's step, or None if its session is not open yet. The other ranks report
            this step if the rank hangs.
        on_silent: called once, in the watch thread, with a sentence that names the silent rank. It must end this
            process, because the main thread may be blocked forever.
        interval_s: maximum interval between two checks, in seconds.
    """

    def __init__(
        self,
        world: World,
        timeout_s: float,
        progress: Callable[[], int | None],
        on_silent: Callable[[str], None],
        interval_s: float = MAX_INTERVAL_S,
    ) -> None:
        self._world = world
        self._timeout_s = timeout_s
        self._progress = progress
        self._on_silent = on_silent
        self._interval_s = min(timeout_s / LOOKS, MAX_INTERVAL_S, interval_s)
        self.reported: str | None = None
        """The reason that another rank reported for its failure. It is kept here because that rank may serve the store
        and may exit soon."""
        self.more: Callable[[], dict[str, Any]] = dict
        """Function that returns additional entries for this rank's heartbeats."""
        self._peers = {rank: _Peer() for rank in range(world.size) if rank != world.rank}
        self._store_silent_s = 0.0
        self._answers = 0  # number of answers from the store
        self._gone = False  # the store's process has exited, which is not a hang
        self._stop = threading.Event()
        self._due = threading.Event()  # send a heartbeat immediately
        self._shown_open = threading.Event()
        self._deciding = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start watching. Call this before the ranks first wait for each other. With a single rank, do nothing."""
        if self._world.size > 1:
            for action in (self._exchange, self._judge):
                thread = threading.Thread(target=action, name="peer watch", daemon=True)
                thread.start()
                self._threads.append(thread)

    def show_open(self) -> None:
        """Wait until the other ranks can see that this rank's session is open, or the store cannot be reached.

        Call this before the first step. Otherwise, if this rank stopped in the first step, the other ranks would report
        it as still starting.
        """
        if self._threads:
            self._shown_open.clear()
            self._due.set()
            self._shown_open.wait(self._timeout_s)

    def stop(self) -> None:
        """Tell the other ranks that this rank leaves. `on_silent` is no longer called. If it has been called, block."""
        with self._deciding:
            self._stop.set()
        self._due.set()
        if self._threads:
            self._threads[0].join(self._interval_s)  # the store may not answer

    def exchange_now(self) -> None:
        """Send a heartbeat and read the heartbeats of the other ranks immediately."""
        self._due.set()

    def signs(self) -> dict[int, dict[str, Any]] | None:
        """Return the last heartbeats of the joined ranks, or None if a rank has missed some and may have stopped."""
        if self._gone:
            return {}
        present = {rank: peer for rank, peer in self._peers.items() if peer.present}
        longest = max([self._store_silent_s, *(peer.silent_s for peer in present.values())])
        if longest >= MISSED * self._interval_s:
            return None
        return {rank: peer.sign for rank, peer in present.items()}

    def silent(self, share: float = 0.5) -> str | None:
        """Return a sentence that names the longest silent rank, if it was silent for this share of its timeout."""
        # The store answers without needing the GIL.
        if self._store_silent_s >= share * self._timeout_s and serves_store(0):
            return self._sentence(0, self._store_silent_s)
        present = [(rank, peer) for rank, peer in self._peers.items() if peer.present]
        silent = {rank: peer.silent_s for rank, peer in present if peer.silent_s >= share * self._allowed_s(peer)}
        rank = max(silent, key=lambda rank: silent[rank], default=None)
        return None if rank is None else self._sentence(rank, silent[rank])

    def _allowed_s(self, peer: _Peer) -> float:
        return max(self._timeout_s, TIMEOUT.total_seconds()) if peer.opening else self._timeout_s

    def absent(self) -> str | None:
        """Return a sentence that names the ranks that have not joined the job, or None."""
        missing = [str(rank) for rank, peer in self._peers.items() if not peer.seen]
        if not self._answers or not missing:
            return None
        return f"rank {', '.join(missing)} did not join the job: see the output of its process"

    def _sentence(self, rank: int, seconds: float) -> str:
        seen = self._peers[rank].seen
        who = ""
        if seen:
            last = json.loads(seen)
            where = "starting" if last["step"] is None else f"at step {last['step']}"
            who = f" (process {last['pid']} on {last['host']}, {where})"
        return (
            f"rank {rank}{who} has given no sign of life for {seconds:.0f} s: its process or its machine hangs, or its "
            f"code keeps the interpreter's lock; if that is so, increase train.peer_timeout_s={self._timeout_s:g}"
        )

    def _judge(self) -> None:
        answers, before = 0, clock.monotonic()
        while not self._stop.wait(self._interval_s):
            now = clock.monotonic()
            # Count at most two intervals, because this process may have been stopped.
            elapsed, before = min(now - before, 2 * self._interval_s), now
            # Count the store as silent even without a connection, because a stopped process may not accept one.
            waiting = answers == self._answers and not self._gone and self._world.rank != 0 and in_group()
            self._store_silent_s = self._store_silent_s + elapsed if waiting else 0.0
            answers = self._answers
            with self._deciding:
                sentence = None if self._stop.is_set() else self.silent(1.0)
                if sentence is not None:
                    self._on_silent(sentence)
                    return

    def _exchange(self) -> None:
        """Send heartbeats and read the heartbeats of the other ranks, until this rank leaves."""
        own = {"host": processes.host_name(), "pid": processes.own_pid()}
        store, beat = None, 0
        before = clock.monotonic()
        while True:
            left = self._stop.is_set()
            sign = {**own, "step": self._progress(), "beat": beat, "left": left}
            sign |= self.more()
            try:
                store = store or connect(self._timeout_s)
                store.set(f"alive/{self._world.rank}", json.dumps(sign))
                if sign["step"] is not None:
                    self._shown_open.set()
                now = clock.monotonic()
                self._look(store, min(now - before, 2 * self._interval_s))
                before = now
                if self.reported is None and any(peer.left for peer in self._peers.values()):
                    self.reported = read_report(store)
                self._answers += 1
                self._gone = False
            except RuntimeError:
                store = None
                self._gone = store_is_gone(self._timeout_s)
                self._shown_open.set()  # without a store, the other ranks can see no more
            beat += 1
            if left:
                return
            self._due.wait(self._interval_s)
            self._due.clear()

    def _look(self, store: Any, elapsed: float) -> None:
        joined = [rank for rank, peer in self._peers.items() if peer.seen or store.check([f"alive/{rank}"])]
        signs = store.multi_get([f"alive/{rank}" for rank in joined]) if joined else []
        for rank, seen in zip(joined, signs, strict=True):
            peer = self._peers[rank]
            peer.silent_s = peer.silent_s + elapsed if seen == peer.seen else 0.0
            peer.seen = seen
            with suppress(ValueError):
                peer.sign = json.loads(seen)
                peer.left, peer.opening = bool(peer.sign["left"]), peer.sign["step"] is None
