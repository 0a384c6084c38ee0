"""Derive the environment variables that torchrun would set from Slurm's, so that a job's ranks can connect.

`python -m launch.rendezvous` prints a free port. The batch script runs it on the first node, where rank 0 will listen,
and passes the port to all ranks.
"""

from __future__ import annotations

import random
import socket
import zlib

from launch import scheduler
from runner.system import processes

# These ports are below the kernel's ephemeral range.
PORTS = range(12_000, 32_000)


def export() -> None:
    """Set RANK, WORLD_SIZE and LOCAL_RANK, and MASTER_ADDR and MASTER_PORT unless the batch script has set them.

    Without a port from the batch script, derive it from the job id and the restart count, which all ranks share.
    """
    environment = processes.environment
    environment["RANK"] = environment.get("SLURM_PROCID", "0")
    # Use the number of tasks that srun has started, because the number in the job's record may differ.
    environment["WORLD_SIZE"] = environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS", "1")
    # With one GPU bound to each task, every rank sees only that GPU, as number 0.
    bound = environment.get("SLURM_GPUS_PER_TASK") == "1"
    environment["LOCAL_RANK"] = "0" if bound else environment.get("SLURM_LOCALID", "0")
    if not environment.get("MASTER_ADDR"):
        environment["MASTER_ADDR"] = first_host()
    if not environment.get("MASTER_PORT"):
        name = f"{environment.get('SLURM_JOB_ID', '0')}.{restart_count()}"
        environment["MASTER_PORT"] = str(PORTS[zlib.crc32(name.encode()) % len(PORTS)])


def restart_count() -> int:
    """Return how often Slurm has restarted this job."""
    return int(processes.environment.get("SLURM_RESTART_COUNT", "0"))


def first_host() -> str:
    """Return an address of rank 0's node."""
    if processes.environment.get("SLURM_JOB_NUM_NODES", "1") == "1":
        return "127.0.0.1"
    try:
        host = scheduler.ask("scontrol", "show", "hostnames", processes.environment["SLURM_JOB_NODELIST"]).split()[0]
        socket.getaddrinfo(host, None)
    except (OSError, KeyError, IndexError):  # the resolver may not know the nodes' names
        return processes.environment.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1")
    return host


def free_port() -> int:
    """Return a free port of this machine.

    Raises:
        OSError: all ports of `PORTS` are in use.
    """
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as listener:
            try:
                listener.bind(("", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port from {PORTS.start} to {PORTS.stop - 1} is free on {processes.host_name()}")


if __name__ == "__main__":
    print(free_port())
