"""Detect that training makes no progress, and find out what all ranks are doing.

The main thread of a live process may be stuck: in a file system, a loader worker, a collective that another rank does
not join, or an infinite loop of a user's code. So a thread on each rank watches the steps, even with a single rank.
Some activities may take any time; see `STEP_PHASES`. The activities of other ranks are considered too, because this
rank waits for them. While a rank sends no heartbeat, only `PeerWatch` decides.

The first rank that detects a hang reports it in its next heartbeat. The other ranks then put their stack traces into
the job's key-value store. Rank 0, which has the attempt log, collects them from the store.

Time in which this process was stopped or its machine was suspended is not counted. Code that holds the interpreter lock
(GIL) also blocks the watch thread. With several ranks, `PeerWatch` detects this. With a single rank, it is not
detected.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from runner.errors import ExitStatus
from runner.rundir.time_account import Laps, TimeAccount
from runner.system import clock, processes, stacks
from runner.system.distributed import World
from runner.training.ranks.peer_watch import PeerWatch
from runner.training.ranks.peers import LEAVE_S, leave_stacks, left_stacks

STEP_PHASES = {"steps": "in a step", "data_wait": "waiting for data"}
"""The activities (see `runner.rundir.time_account`) during which a step must be completed in time. The other activities
are evaluations, saves, and the work before the first and after the last step."""
LONG_CODE = {
    "torch._dynamo.convert_frame": "compilation",
    "torch._inductor.compile_fx": "compilation",
    "bdb": "debugger",
    "pydevd": "debugger",
}
"""Modules that may also run for any length of time, at any point of a step."""
TIMES_MEDIAN = 20
LOOKS = 60
"""Number of checks within the timeout."""
MAX_INTERVAL_S = 1.0
ANSWER_S = 10.0
"""Seconds to wait for answers from other ranks after a rank has detected a hang."""
POLL_S = 0.2
MAX_NAMED = 3


@dataclass
class Judge:
    """Decide at each check whether training hangs.

    Args:
        timeout_s: maximum time without a step, in seconds, or `TIMES_MEDIAN` times the median step time if that is
            longer.
        interval_s: seconds between two checks. A longer gap is counted as one interval, because this process was not
            running.
    """

    timeout_s: float
    interval_s: float
    idle_s: float = 0.0
    _steps: int = 0

    def look(self, elapsed_s: float, laps: Laps, counts: bool) -> bool:
        """Return True if training hangs.

        Args:
            elapsed_s: seconds since the last check.
            laps: the steps so far.
            counts: True if all ranks are in a step, and none is in an activity that may take any time.
        """
        if laps.steps != self._steps or not counts:
            self._steps, self.idle_s = laps.steps, 0.0
        else:
            self.idle_s += min(elapsed_s, self.interval_s)
        return self.idle_s >= self.limit_s(laps)

    def limit_s(self, laps: Laps) -> float:
        """Return the maximum time without a step, in seconds."""
        return max(self.timeout_s, TIMES_MEDIAN * statistics.median(laps.seconds or (0.0,)))


@dataclass(frozen=True)
class Hang:
    """A hang: a sentence that states the rank and its activity, and on rank 0 the stack traces by rank."""

    reason: str
    stacks: Mapping[int, str] = field(default_factory=dict)


class HangWatch:
    """Watch the thread that enters this context manager, until it exits the context.

    Args:
        world: the ranks.
        timeout_s: see `Judge`. If None, nothing is watched.
        account: the attempt's activities and steps.
        step: function that returns the number of completed steps.
        peers: the watch over the other ranks.
        on_hang: called once, in the watch thread. It must end this process, because the main thread may be blocked
            forever.
    """

    def __init__(
        self,
        world: World,
        timeout_s: float | None,
        account: TimeAccount,
        step: Callable[[], int],
        peers: PeerWatch,
        on_hang: Callable[[Hang], None],
    ) -> None:
        self._world = world
        self._timeout_s = timeout_s or 0.0
        self._account = account
        self._step = step
        self._peers = peers
        self._on_hang = on_hang
        self.interval_s = min(self._timeout_s / LOOKS, MAX_INTERVAL_S)
        """Seconds between two checks."""
        self._judge = Judge(self._timeout_s, self.interval_s)
        self._looked = clock.monotonic()
        self._watched = 0  # ident of the watched thread
        self._found: dict[str, Any] | None = None  # activity of this rank, once a hang is detected
        self._stop = threading.Event()
        self._deciding = threading.Lock()

    def __enter__(self) -> HangWatch:
        if self._timeout_s:
            self._watched = threading.get_ident()
            self._peers.more = self._sign
            self._looked = clock.monotonic()
            threading.Thread(target=self._watch, name="hang watch", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop watching. After this, `on_hang` is not called. If it has been called already, block."""
        with self._deciding:
            self._stop.set()

    def _sign(self) -> dict[str, Any]:
        return {"phase": self._phase(), "hang": self._found}

    def _phase(self) -> str:
        """Return the activity that this rank reports: one of `STEP_PHASES`, or an activity that may take any time."""
        if self._stop.is_set():
            return "end"
        if not self._account.laps.steps:
            return "first step"
        running = stacks.running_modules()
        return next((phase for module, phase in LONG_CODE.items() if module in running), self._account.activity)

    def look(self) -> bool:
        """Return True if this rank or another one has found that training hangs."""
        now = clock.monotonic()
        elapsed, self._looked = now - self._looked, now
        signs = self._peers.signs()
        phases = [self._phase(), *(sign.get("phase") for sign in (signs or {}).values())]
        counts = signs is not None and all(phase in STEP_PHASES for phase in phases)
        called = any(sign.get("hang") for sign in (signs or {}).values())
        return self._judge.look(elapsed, self._account.laps, counts) or called

    def _watch(self) -> None:
        while not self._stop.wait(self.interval_s):
            if self.look():
                with self._deciding:
                    if not self._stop.is_set():
                        self._on_hang(self._examine())
                        return

    def _examine(self) -> Hang:
        """Describe what all ranks are doing, if they answer in time."""
        with suppress(OSError):  # this ends the process even if this thread is blocked too
            processes.end_after(int(ANSWER_S) + LEAVE_S, int(ExitStatus.FAILED))
        own = self._doing()
        text = self._header(own) + stacks.text(self._watched)
        if self._world.size == 1:
            return Hang(self._sentence({0: own}), {0: text})
        leave_stacks(self._world, text)  # before the other ranks can detect the hang
        self._found = own
        found = {self._world.rank: own, **self._answers()}
        if not self._world.is_main:
            return Hang(self._sentence(found))
        gathered = {**left_stacks(self._world), 0: text}
        self._found = {**own, "complete": True}
        self._peers.exchange_now()
        return Hang(self._sentence(found), gathered)

    def _answers(self) -> dict[int, dict[str, Any]]:
        """Return the activities of the other ranks, once rank 0 knows all of them or the time is over.

        No rank may exit before that, because its broken connections would end the other ranks.
        """
        deadline = clock.monotonic() + ANSWER_S
        while True:
            self._peers.exchange_now()
            signs = self._peers.signs() or {}
            answers = {rank: sign["hang"] for rank, sign in signs.items() if sign.get("hang")}
            complete = (
                signs.keys() <= answers.keys()
                if self._world.is_main
                else 0 not in signs or answers.get(0, {}).get("complete")
            )
            if complete or clock.monotonic() >= deadline:
                return answers
            self._stop.wait(POLL_S)

    def _doing(self) -> dict[str, Any]:
        """Describe what the training thread is doing."""
        frames = stacks.of_threads().get(self._watched, [])
        place = next((number for number, frame in enumerate(frames) if not frame.is_library), 0)
        within = [frame.module for frame in frames[:place]]
        waits = any(module.startswith("torch.distributed") for module in within)
        # DDP all-reduces gradients inside the backward pass.
        waits = waits or (within[:1] == ["torch.autograd.graph"])
        return {
            "step": self._step(),
            "phase": self._account.activity,
            "seconds": round(self._judge.idle_s, 1),
            "where": str(frames[place]) if frames else "",
            "waits": waits and self._world.size > 1,
        }

    def _header(self, own: Mapping[str, Any]) -> str:
        pid, host, when = processes.own_pid(), processes.host_name(), datetime.fromtimestamp(clock.wall(), UTC)
        return (
            f"Rank {self._world.rank}, process {pid} on {host}, {when:%Y-%m-%d %H:%M:%S} UTC: "
            f"no step for {own['seconds']:g} s after step {own['step']} (activity: {own['phase']})\n\n"
        )

    def _sentence(self, found: Mapping[int, Mapping[str, Any]]) -> str:
        own, limit_s = found[self._world.rank], self._judge.limit_s(self._account.laps)
        idle_s = max(each["seconds"] for each in found.values())
        hanging = {rank: each for rank, each in found.items() if not each["waits"]}
        named = dict(sorted((hanging or found).items())[:MAX_NAMED])
        who = ", ".join(f"rank {rank} {_at_work(each)}" for rank, each in named.items())
        more = len(hanging or found) - len(named)
        return (
            f"training hangs: no step for {idle_s:.0f} s after step {own['step']} ({limit_s:.0f} s are allowed; "
            f"if it is only slow, increase train.hang_timeout_s={self._timeout_s:g}): {who}"
            + (f" and {more} more" if more else "")
        )


def _at_work(doing: Mapping[str, Any]) -> str:
    what = "waiting for other ranks" if doing["waits"] else STEP_PHASES.get(doing["phase"], doing["phase"])
    return f"is {what}, in {doing['where']}"
