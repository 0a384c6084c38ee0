"""Notices within `train.peer_timeout_s` that another rank hangs, and names it.

A rank that ends closes its connections, which the others notice at once. One that hangs (a stopped process, a lost
node, a thread that keeps the interpreter's lock) leaves them blocked in a collective until that times out. So each rank
lets a counter go up in the job's key-value store, from a thread of its own, and watches those of the others. Clocks of
different machines are never compared, and time in which this process itself did not run does not count.

Code that keeps the interpreter's lock for long (a data set that is built, an object that is pickled) stops that thread
as well. Until a rank has opened its session, it may be silent for as long as a collective may take.

A main thread that is stuck while its process lives is noticed by `runner.training.ranks.hang_watch`, for which the
signs carry what each rank is doing. What a blocked collective does when it is told to stop depends on its backend
(gloo's ignores it), so the attempt is ended by the watching thread; with NCCL that is untested.
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
"""How often a rank looks at the others within the time in which one must give a sign of life."""
MAX_INTERVAL_S = 5.0
MISSED = 3
"""So many intervals without a sign of a rank, and it may be stopped."""


@dataclass
class _Peer:
    """What was last seen of another rank, and for how many seconds it has been the same."""

    seen: bytes = b""
    sign: dict[str, Any] = field(default_factory=dict)
    silent_s: float = 0.0
    left: bool = False
    opening: bool = False
    """Whether its session was not open yet."""

    @property
    def present(self) -> bool:
        """Whether it has joined, and not left in order."""
        return bool(self.seen) and not self.left


class PeerWatch:
    """Watches the other ranks of `world` between `start` and `stop`.

    Args:
        timeout_s: how long a rank whose session is open may go without a sign of life.
        progress: this rank's step, which the others quote if it hangs; None: its session is not open yet.
        on_silent: called once, in the watching thread, with a sentence that names the rank. It must end this process:
            the main thread may be blocked for ever.
        interval_s: how often a rank looks at the others at least, in seconds.
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
        """Why another rank failed, as it has reported: it may serve the store itself, and be gone with it soon."""
        self.more: Callable[[], dict[str, Any]] = dict
        """What else this rank shows of itself in its signs."""
        self._peers = {rank: _Peer() for rank in range(world.size) if rank != world.rank}
        self._store_silent_s = 0.0
        self._answers = 0  # of the store
        self._gone = False  # the store, with the process that served it: that is no silence
        self._stop = threading.Event()
        self._due = threading.Event()  # a sign is wanted at once
        self._shown_open = threading.Event()
        self._deciding = threading.Lock()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Begin; before the ranks first wait for each other. Nothing to do with one rank."""
        if self._world.size > 1:
            for action in (self._exchange, self._judge):
                thread = threading.Thread(target=action, name="peer watch", daemon=True)
                thread.start()
                self._threads.append(thread)

    def show_open(self) -> None:
        """Return when the others can see that this rank's session is open, or cannot be told.

        Before the first step: if it stopped there, the others would otherwise know no more than that it starts.
        """
        if self._threads:
            self._shown_open.clear()
            self._due.set()
            self._shown_open.wait(self._timeout_s)

    def stop(self) -> None:
        """Tell the others that this rank leaves. `on_silent` is not called any more; if it has been, this blocks."""
        with self._deciding:
            self._stop.set()
        self._due.set()
        if self._threads:
            self._threads[0].join(self._interval_s)  # the store may not answer

    def exchange_now(self) -> None:
        """Show a sign and look at those of the others at once."""
        self._due.set()

    def signs(self) -> dict[int, dict[str, Any]] | None:
        """The last signs of the ranks that are present; None if one has missed some of them: it may be stopped."""
        if self._gone:
            return {}
        present = {rank: peer for rank, peer in self._peers.items() if peer.present}
        longest = max([self._store_silent_s, *(peer.silent_s for peer in present.values())])
        if longest >= MISSED * self._interval_s:
            return None
        return {rank: peer.sign for rank, peer in present.items()}

    def silent(self, share: float = 0.5) -> str | None:
        """A sentence that names the rank that has been silent longest, for at least this share of its timeout."""
        # The store answers without the interpreter's lock.
        if self._store_silent_s >= share * self._timeout_s and serves_store(0):
            return self._sentence(0, self._store_silent_s)
        present = [(rank, peer) for rank, peer in self._peers.items() if peer.present]
        silent = {rank: peer.silent_s for rank, peer in present if peer.silent_s >= share * self._allowed_s(peer)}
        rank = max(silent, key=lambda rank: silent[rank], default=None)
        return None if rank is None else self._sentence(rank, silent[rank])

    def _allowed_s(self, peer: _Peer) -> float:
        return max(self._timeout_s, TIMEOUT.total_seconds()) if peer.opening else self._timeout_s

    def absent(self) -> str | None:
        """A sentence that names the ranks that have not joined the job, if there are any."""
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
            # At most twice the interval: this process itself may have been stopped.
            elapsed, before = min(now - before, 2 * self._interval_s), now
            # Whether or not this rank's connection got so far: a process that is stopped may not even let it.
            waiting = answers == self._answers and not self._gone and self._world.rank != 0 and in_group()
            self._store_silent_s = self._store_silent_s + elapsed if waiting else 0.0
            answers = self._answers
            with self._deciding:
                sentence = None if self._stop.is_set() else self.silent(1.0)
                if sentence is not None:
                    self._on_silent(sentence)
                    return

    def _exchange(self) -> None:
        """Show that this rank is alive and look at the others, until it leaves."""
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
                self._shown_open.set()  # as well as it can be
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
