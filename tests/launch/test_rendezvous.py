"""How the ranks of a job find each other."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from fake_slurm import FakeSlurm, inside, slurm

from launch import rendezvous

__all__ = ["inside", "slurm"]


def test_ranks_and_rendezvous_follow_from_slurm_alone(inside: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    given = {"NTASKS": "8", "PROCID": "5", "LOCALID": "1", "JOB_NUM_NODES": "2", "JOB_NODELIST": "n[1-2]"}
    for name, value in given.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    inside.prints("scontrol_show_hostnames", "localhost\nn2\n")
    rendezvous.export()
    first = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")}
    assert first == {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost"}
    port = int(os.environ["MASTER_PORT"])
    assert port in rendezvous.PORTS
    # If the size of a job may change, the number of tasks started by srun counts.
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    rendezvous.export()
    assert os.environ["WORLD_SIZE"] == "4"
    # A node whose name cannot be resolved is reached by the address that Slurm itself uses.
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name)
    inside.prints("scontrol_show_hostnames", "no-such-host.invalid\n")
    monkeypatch.setenv("SLURM_LAUNCH_NODE_IPADDR", "10.0.0.7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    rendezvous.export()
    assert os.environ["MASTER_ADDR"] == "10.0.0.7"
    assert int(os.environ["MASTER_PORT"]) != port


@contextmanager
def port_in_use() -> Iterator[int]:
    """Yield a port with a listener, followed by a free port."""
    while True:
        with socket.socket() as taken, socket.socket() as free:
            taken.bind(("", 0))
            taken.listen()
            first = taken.getsockname()[1]
            try:
                free.bind(("", first + 1))
            except (OSError, OverflowError):
                continue
            free.close()
            yield first
            return


def test_a_port_in_use_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    with port_in_use() as first:
        monkeypatch.setattr(rendezvous, "PORTS", range(first, first + 2))
        assert {rendezvous.free_port() for _ in range(5)} == {first + 1}
        monkeypatch.setattr(rendezvous, "PORTS", range(first, first + 1))
        with pytest.raises(OSError, match=f"{first} to {first} is free"):
            rendezvous.free_port()
