"""A rank that hangs is noticed soon and named, wherever it hangs, and the run can be continued."""

from __future__ import annotations

import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ranks import start_ranks
from runs import PATIENCE_S, TINY, Run

from runner.system import clock
from runner.system.distributed import World
from runner.training.ranks import peer_watch
from runner.training.ranks.peer_watch import PeerWatch

TIMEOUT_S = 5.0
INTERVAL_S = 0.005
WATCH_S = INTERVAL_S * peer_watch.LOOKS
COMMON = [
    *TINY,
    "model._target_=stopping.StoppingGPT",
    "train.steps=6",
    "eval.every_steps=4",
    "eval.batches=9",
    "checkpoint.every_steps=2",
    f"train.peer_timeout_s={TIMEOUT_S}",
    "train.hang_timeout_s=2",  # for live ranks, of which there are none here
]


class Store:
    """The part of the key-value store that is used, and the clock; with `blocks`, it stops answering.

    Time passes when the store answers, so that no rank is silent because a thread of this process got no processor. If
    the store blocks, time passes whenever the clock is read.
    """

    def __init__(self, **signs: dict[str, Any]) -> None:
        self.signs = signs
        self.now = 0.0
        self.blocks = threading.Event()
        self.closed = threading.Event()

    def set(self, key: str, value: str) -> None:
        if self.blocks.is_set():
            self.closed.wait()
        self.signs[key] = json.loads(value)
        self.now += INTERVAL_S

    def monotonic(self) -> float:
        if self.blocks.is_set():
            self.now += INTERVAL_S
        return self.now

    def check(self, keys: list[str]) -> bool:
        return all(key in self.signs for key in keys)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [json.dumps(self.signs[key]).encode() for key in keys]


class Leaping(Store):
    """A store whose clock leaps once between two signs, while both watch threads wait, as after SIGCONT."""

    def __init__(self, **signs: dict[str, Any]) -> None:
        super().__init__(**signs)
        self.looks = 0

    def set(self, key: str, value: str) -> None:
        time.sleep(5 * INTERVAL_S)
        super().set(key, value)
        self.looks = 0

    def monotonic(self) -> float:
        self.looks += 1  # the first is of the thread that shows the sign, the second may be the first after the answer
        if self.looks == 3:
            self.now += 1000.0
        return self.now


def sign(**changes: Any) -> dict[str, Any]:
    return {"host": "node7", "pid": 4711, "step": 12, "beat": 0, "left": False, **changes}


@pytest.fixture
def watch(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[Store, int], tuple[PeerWatch, list[str], threading.Event]]]:
    """Yield rank `rank` of 3, whose watch looks every few milliseconds, with its findings and their times."""
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    made: list[tuple[Store, PeerWatch]] = []

    def make(store: Store, rank: int) -> tuple[PeerWatch, list[str], threading.Event]:
        monkeypatch.setattr(peer_watch, "connect", lambda timeout_s: store)
        monkeypatch.setattr(peer_watch, "in_group", lambda: True)
        monkeypatch.setattr(clock, "monotonic", store.monotonic)
        found: list[str] = []
        done = threading.Event()

        def on_silent(sentence: str) -> None:
            found.append(sentence)
            done.set()

        watching = PeerWatch(World(rank, 3), WATCH_S, lambda: 3, on_silent)
        made.append((store, watching))
        return watching, found, done

    yield make
    for store, watching in made:  # their threads use what was patched
        store.blocks.clear()
        store.closed.set()
        watching.stop()
        for thread in watching._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_the_others_see_at_once_that_a_session_is_open(watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that beat rarely are seen as well."""
    monkeypatch.setattr(peer_watch, "LOOKS", 1e-4)
    monkeypatch.setattr(peer_watch, "MAX_INTERVAL_S", PATIENCE_S)
    store = Store()
    watching, _, _ = watch(store, 1)
    steps = iter([None])
    watching._progress = lambda: next(steps, 7)
    watching.start()
    while "alive/1" not in store.signs:
        time.sleep(0.01)
    seen = [store.signs["alive/1"]["step"]]
    watching.show_open()
    assert [*seen, store.signs["alive/1"]["step"]] == [None, 7]
    watching.stop()


def not_accused(watching: PeerWatch, store: Store, done: threading.Event) -> bool:
    """Check that no rank is accused in three times the time that it would take."""
    looks, silent = 0, watching.silent

    def look(share: float = 0.5) -> str | None:
        nonlocal looks
        looks += 1
        return silent(share)

    watching.silent = look  # type: ignore[method-assign]
    until, deadline = store.now + 3 * WATCH_S, time.monotonic() + PATIENCE_S
    while (looks < 3 * peer_watch.LOOKS or store.now < until) and not done.is_set():
        assert time.monotonic() < deadline
        time.sleep(INTERVAL_S)
    return not done.is_set()


def beating(store: Store, *ranks: int, every: int = 1) -> None:
    """Let the counters of `ranks` rise, for example at every look or at every second one."""
    seen, looks = store.multi_get, itertools.count()

    def multi_get(keys: list[str]) -> list[bytes]:
        look = next(looks)
        for rank in ranks:
            store.signs[f"alive/{rank}"]["beat"] = look // every
        return seen(keys)

    store.multi_get = multi_get  # type: ignore[method-assign]


def test_a_rank_whose_counter_stands_still_is_named(watch: Any) -> None:
    store = Store(**{"alive/0": sign(), "alive/2": sign()})
    beating(store, 0)
    watching, found, done = watch(store, 1)
    watching.start()
    assert done.wait(PATIENCE_S)
    assert "rank 2 (process 4711 on node7, at step 12) has given no sign of life" in found[0]
    assert store.signs["alive/1"]["step"] == 3


@pytest.mark.parametrize("connected", [True, False])
def test_a_store_that_does_not_answer_is_its_ranks_silence(
    connected: bool, watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(**{"alive/0": sign(), "alive/2": sign()})
    beating(store, 0, 2)
    watching, found, done = watch(store, 1)
    if not connected:  # the store stopped before it took the connection, for which PyTorch's client waits for ever
        monkeypatch.setattr(peer_watch, "connect", lambda timeout_s: store.closed.wait() and store)
    watching.start()
    store.blocks.set()
    assert done.wait(PATIENCE_S)
    store.closed.set()
    assert found[0].startswith("rank 0 ")


@pytest.mark.parametrize("served", ["stopped", "ended"])
def test_a_port_that_refuses_is_no_silence(served: str, watch: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process keeps its port, an exited one does not."""
    with socket.socket() as port:
        port.bind(("127.0.0.1", 0))
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port.getsockname()[1]))
        if served == "stopped":
            port.listen()
        store = Store()
        watching, found, done = watch(store, 1)

        def connect(timeout_s: float) -> Any:
            raise RuntimeError("no answer")

        monkeypatch.setattr(peer_watch, "connect", connect)
        watching.start()
        deadline = time.monotonic() + PATIENCE_S
        while served == "ended" and not watching._gone:
            assert time.monotonic() < deadline
            time.sleep(INTERVAL_S)
        store.blocks.set()
        if served == "stopped":
            assert done.wait(PATIENCE_S)
            assert found[0].startswith("rank 0 ")
        else:
            assert not_accused(watching, store, done)
            watching.stop()


@pytest.mark.parametrize("case", ["beating", "not joined", "left", "opening", "torchrun's store", "no group yet"])
def test_no_rank_is_accused_that_beats_or_left_or_has_not_joined(  # or builds its data sets, say
    case: str, watch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"left": sign(left=True), "opening": sign(step=None)}.get(case, sign())
    store = Store() if case == "not joined" else Store(**{"alive/0": sign(), "alive/2": other})
    if case != "not joined":
        beating(store, 0, *([] if case in ("left", "opening") else [2]))
    watching, found, done = watch(store, 1)
    if case == "no group yet":
        monkeypatch.setattr(peer_watch, "in_group", lambda: False)
    if case == "torchrun's store":
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    watching.start()
    if case in ("torchrun's store", "no group yet"):
        store.blocks.set()
    assert not_accused(watching, store, done)
    store.closed.set()
    store.blocks.clear()
    watching.stop()
    assert found == []
    assert watching.silent() is None
    assert store.signs["alive/1"]["left"] is True
    expected = "rank 0, 2 did not join the job" if case == "not joined" else None
    assert (watching.absent() or "").startswith(expected or "")
    assert (watching.absent() is None) == (expected is None)


def test_time_of_a_stopped_watcher_does_not_count(watch: Any) -> None:
    store = Leaping(**{"alive/0": sign(), "alive/2": sign()})
    beating(store, 0, 2, every=2)
    watching, found, done = watch(store, 1)
    watching.start()
    assert not_accused(watching, store, done)
    watching.stop()
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "stopped", "ranks"),
    [("start", 0, 2), ("training", 0, 3), ("save", 1, 2), ("evaluation", 1, 2)],
)
def test_a_stopped_rank_is_named_and_the_run_continues(where: str, stopped: int, ranks: int, tmp_path: Path) -> None:
    run = Run(tmp_path / "run", COMMON)
    processes = start_ranks(run, ranks, STOP_RANK=str(stopped), STOP_IN=where)
    hanging = processes.pop(stopped)
    try:
        outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
        assert hanging.poll() is None
    finally:
        for process in [hanging, *processes]:
            process.kill()
            process.wait()
        assert hanging.stdout is not None
        hanging.stdout.close()
    name = f"rank {stopped} (process {hanging.pid} on {socket.gethostname()}, "
    if where == "start":  # it may have stopped before the others ever saw it
        name = f"rank {stopped} "
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 1, output
        assert name in output, output
        assert "Traceback" not in output
    if stopped != 0:  # only rank 0 could close the records; if it is killed, the next attempt closes them
        (attempt,) = run.attempts()
        assert (attempt["cause"], attempt["exit"]) == ("crash", 1)
        assert name in attempt["reason"]
    if where != "training":
        return
    run.ranks = 1
    run.finish()
    assert [record["step"] for record in run.records() if "loss" in record] == list(range(1, 7))


@pytest.mark.slow
def test_ranks_end_after_an_error_of_all_of_them(tmp_path: Path) -> None:
    """DDP's reducer used to outlive the process group, whose destructor then waited for ever in two of three runs."""
    few = "+sampler.max_epochs={prose: 0.0002, code: 0.0002, encodings: 0.0002}"
    common = [*TINY, "data=mixture", "sampler=elastic", few, "train.steps=100000", "eval.every_steps=0"]
    for number in range(2):
        run = Run(tmp_path / f"run-{number}", common)
        processes = start_ranks(run, 2)
        outputs = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
        assert [process.returncode for process in processes] == [1, 1], outputs
        assert "the data ended at step" in outputs[0]
        (attempt,) = run.attempts()
        assert (attempt["cause"], attempt["exit"]) == ("failed", 1)
