"""A real Slurm on this machine: two nodes, a private directory, free ports; daemons are stopped by pid file.

Two partitions: a job in `high` preempts jobs in `low`, after a grace time of GRACE seconds; `nograce` is like `low`
without a grace time, and in `cancels` the job is cancelled. There is no accounting, as on many small clusters.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

# All limits of waits are multiplied by this. They only end a wait for an event that never happens.
PATIENCE = float(os.environ.get("RUNNER_TEST_PATIENCE", "5"))
GRACE = 60  # seconds between a preemption's SIGTERM and its SIGKILL
NODES = ("n1", "n2")
DAEMONS = ("slurmctld", "slurmd", "munged", "sbatch")
INSTALL = "apt-get update && apt-get install -y slurmctld slurmd slurm-client munge (as root)"

# Settings left out have their default in every version (no accounting, cred/munge, task/none), under names that vary.
CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool/%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd.%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
JobRequeue=1
ReturnToService=2
MpiDefault=none
KillWait=5
SlurmdTimeout=30
MinJobAge=600
MaxArraySize=4
Epilog={directory}/epilog.sh
SlurmdParameters=config_overrides
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=4000
PartitionName=low Nodes=n1,n2 Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime={grace} MaxTime=1-0 State=UP
PartitionName=nograce Nodes=n1,n2 PriorityTier=1 PreemptMode=REQUEUE GraceTime=0 MaxTime=1-0 State=UP
PartitionName=cancels Nodes=n1,n2 PriorityTier=1 PreemptMode=CANCEL GraceTime=0 MaxTime=1-0 State=UP
PartitionName=high Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """Return the Slurm daemons that this machine lacks. The tests on a real cluster need all of them."""
    path = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))
    return [name for name in DAEMONS if shutil.which(name, path=path) is None]


class Cluster:
    """Two nodes on this machine. `environment` is the environment of a client."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.slow_epilog = directory / "slow-epilog"  # while it exists, no job ends completely
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "SBATCH_"))},
            "SLURM_CONF": str(directory / "slurm.conf"),
            "PATH": os.environ.get("PATH", "") + ":/usr/sbin",
        }

    def start(self) -> None:
        """Start munge and the daemons, and wait until both nodes are idle."""
        for name in ("state", "spool/n1", "spool/n2"):
            (self.directory / name).mkdir(parents=True)
        host = socket.gethostname().partition(".")[0]
        config = CONFIG.format(host=host, directory=self.directory, ports=_free_ports(3), grace=GRACE)
        (self.directory / "slurm.conf").write_text(config)
        epilog = self.directory / "epilog.sh"
        epilog.write_text(f"#!/bin/sh\nwhile [ -e {self.slow_epilog} ]; do sleep 0.1; done\n")
        epilog.chmod(0o755)
        self._start_munge()
        self._daemon("slurmctld")
        for node in NODES:
            self.start_node(node)
        self.wait(lambda: self.run("sinfo", "-h", "-N", "-p", "low", "-o", "%T").split() == ["idle"] * 2, 120)

    def _start_munge(self) -> None:
        """Start a munge with key, socket and pid file in this directory."""
        key = self.directory / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(64))
        files = {"key-file": key}
        names = {
            "socket": "munge.socket",
            "pid-file": "munge.pid",
            "log-file": "munge.log",
            "seed-file": "munge.seed",
        }
        files |= {option: self.directory / name for option, name in names.items()}
        options = [f"--{option}={path}" for option, path in files.items()]
        subprocess.run(["/usr/sbin/munged", "--force", *options], check=True, env=self.environment)

    def _daemon(self, *command: str) -> None:
        config = ["-f", str(self.directory / "slurm.conf")]
        subprocess.run([*command, *config], check=True, env=self.environment, timeout=30 * PATIENCE)

    def stop_controller(self) -> None:
        """Stop the controller, as in an upgrade or a crash: jobs keep running, and commands get no answer."""
        self._signal("slurmctld.pid", signal.SIGTERM)
        self.wait(lambda: not (self.directory / "slurmctld.pid").exists(), 60, "the end of slurmctld")

    def start_controller(self) -> None:
        """Start the controller again, and wait until it answers."""
        self._daemon("slurmctld")
        self.wait(lambda: " is UP" in self.run("scontrol", "ping", check=False), 60, "slurmctld")

    def start_node(self, node: str) -> None:
        self._daemon("slurmd", "-N", node)

    def stop_node(self, node: str, signum: int = signal.SIGKILL) -> None:
        """Send a signal to the slurmd of `node`; by default kill it, as if the machine were lost."""
        self._signal(f"slurmd.{node}.pid", signum)

    def _signal(self, pid_file: str, signum: int) -> None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
            os.kill(int((self.directory / pid_file).read_text()), signum)

    def stop(self) -> None:
        """Cancel every job, then stop the daemons by their pid files."""
        with contextlib.suppress(subprocess.CalledProcessError, TimeoutError):
            self.run("scancel", "--user=root", "--signal=KILL", "--full")
            self.run("scancel", "--user=root")
            self.wait(lambda: not self.run("squeue", "-h"), 20)
        for name in ("slurmd.n1.pid", "slurmd.n2.pid", "slurmctld.pid", "munge.pid"):
            self._signal(name, signal.SIGTERM)

    def run(self, *command: str, check: bool = True) -> str:
        """Return the standard output of a Slurm command on this cluster."""
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60 * PATIENCE, check=False
        )
        if check and done.returncode:
            raise subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
        return done.stdout

    def wait(self, condition: Callable[[], object], timeout_s: float, what: str = "") -> None:
        """Poll `condition` until it is true.

        Raises:
            TimeoutError: it was not true within `timeout_s` seconds, times PATIENCE.
        """
        timeout_s *= PATIENCE
        end = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"{what or condition} took more than {timeout_s} s\n{self.run('squeue')}")
            time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def running(directory: Path) -> Iterator[Cluster]:
    """Yield a cluster. Stop it at the end, also if it failed to start completely."""
    cluster = Cluster(directory)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
