"""Ranks: collectives, and how the failure of one rank reaches the others."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import on_ranks

from exactdata.ranks import current_ranks
from runner.errors import CheckpointError, PeerError, UnreadableError, UserError
from runner.system import clock, distributed
from runner.system.distributed import World


class SettingError(UserError, ValueError):
    """A user error of another module, which the receiving rank need not have imported."""


class UnpicklableError(Exception):
    """An error that can be neither pickled nor printed."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def __str__(self) -> str:
        raise RuntimeError("no text")


def raising(error: Exception) -> Any:
    raise error


def world_of(rank: int, size: int, directory: str) -> World:
    method = f"file://{directory}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
    return World(rank, size)


def unreadable() -> UnreadableError:
    error = UnreadableError("no answer")
    error.__cause__ = OSError(errno.EIO, "Input/output error", Path("/disk"))
    return error


ERRORS: list[tuple[Exception, type[Exception], str]] = [
    (CheckpointError("no checkpoint"), CheckpointError, "no checkpoint"),
    (SettingError("lr=0"), UserError, "lr=0"),
    (unreadable(), UnreadableError, "no answer"),
    (OSError(errno.ENOSPC, "No space left on device", Path("/disk")), OSError, "No space left on device (rank 1)"),
    (ValueError("a bug"), PeerError, "rank 1: ValueError: a bug"),
    (UnpicklableError(), PeerError, "rank 1: "),
]


def exchange(rank: int, directory: str) -> None:
    everyone = world_of(rank, 3, directory)
    assert current_ranks() == (rank, 3)
    for world in (everyone, everyone.with_own_group(60.0)):
        assert world.sum(torch.tensor([rank])).item() == 3
        assert world.broadcast(rank) == 0
        assert world.gather(rank) == [0, 1, 2]
        assert world.gather_on_main(rank) == ([0, 1, 2] if rank == 0 else [])
        assert world.run_on_main(lambda: rank) == 0
        assert world.run_on_all(lambda: rank) == rank
        for error, kind, message in ERRORS:
            # Rank 2 fails too; the error of the lowest rank counts.
            action = (list, partial(raising, error), partial(raising, KeyError()))[rank]
            with pytest.raises(type(error) if rank == 1 else kind) as caught:
                world.run_on_all(action)
            if rank == 1:
                assert caught.value is error
            else:
                assert message in str(caught.value)
                assert not isinstance(caught.value, UserError) or caught.value.everywhere
            if isinstance(caught.value, UnreadableError):  # every rank sees whether the cause may pass
                assert isinstance(caught.value.__cause__, OSError)
                assert (caught.value.__cause__.errno, str(caught.value.__cause__.filename)) == (errno.EIO, "/disk")
            with pytest.raises(type(error) if rank == 0 else kind):
                world.run_on_main(partial(raising, error))
        assert world.gather(rank) == [0, 1, 2]  # nothing was left over
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_an_error_of_any_kind_reaches_all_ranks_and_none_waits(tmp_path: Path) -> None:
    on_ranks(exchange, 3, str(tmp_path))


def lose(rank: int, directory: str, how: str) -> None:
    """Kill rank 1, or fail its own code, in a training step; or fail the code of all ranks."""
    distributed.PROBE_S = 3.0
    world = world_of(rank, 3, directory)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
    if rank == 1 and how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    fails = how == "all" or rank == 1
    with pytest.raises(RuntimeError):
        model(torch.ones(1, 3 if fails else 2)).sum().backward()
    assert world.lost_a_peer() == (not fails)
    if not fails:
        with pytest.raises(PeerError):
            world.gather(rank)
    (Path(directory) / f"done-{rank}").touch()
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "survivors"), [("killed", {0, 2}), ("failed", {0, 1, 2}), ("all", {0, 1, 2})])
def test_a_lost_peer_is_distinguished_from_an_error_of_this_rank(tmp_path: Path, how: str, survivors: set[int]) -> None:
    context = multiprocessing.get_context("forkserver")
    processes = [context.Process(target=lose, args=(rank, str(tmp_path), how)) for rank in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert {rank for rank in range(3) if (tmp_path / f"done-{rank}").exists()} == survivors


@pytest.mark.parametrize(("seconds", "lost"), [(0.001, True), (4.0, False), (4.999, False), (5.1, False)])
def test_a_wait_that_ends_early_is_no_lost_peer(monkeypatch: pytest.MonkeyPatch, seconds: float, lost: bool) -> None:
    """A dead peer is noticed at once. An error near the end of the wait is its timeout, under any clock."""
    now = [100.0]

    class Message:
        def wait(self, timeout: object) -> None:
            now[0] += seconds
            raise RuntimeError("Timed out waiting 5000ms for send operation to complete")

    monkeypatch.setattr(clock, "monotonic", lambda: now[0])
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for name in ("isend", "irecv"):
        monkeypatch.setattr(torch.distributed, name, lambda *args, **options: Message())
    assert World(0, 2).lost_a_peer() == lost


def test_a_single_process_needs_no_process_group() -> None:
    world = World()
    assert current_ranks() == (0, 1)
    assert world.with_own_group(1.0) is world
    assert (world.broadcast(5), world.gather(5), world.gather_on_main(5)) == (5, [5], [5])
    actions: list[Callable[[Callable[[], int]], int]] = [world.run_on_main, world.run_on_all]
    for run in actions:
        assert run(lambda: 5) == 5
        with pytest.raises(KeyError):
            run(lambda: int(raising(KeyError())))
    assert not world.lost_a_peer()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "one"}, "must be integers"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 must be between 0 and WORLD_SIZE - 1 = 1"),
    ],
)
def test_wrong_variables_are_refused(variables: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=message):
        World.from_environment()
