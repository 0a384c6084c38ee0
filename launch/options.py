"""Define the options of a Slurm job, which conf/launcher/slurm.yaml documents."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from launch import ranges


@dataclass
class SlurmOptions:
    """The settings of conf/launcher/slurm.yaml. None leaves an option to Slurm."""

    partition: str | None = None
    time: int | str | None = None
    nodes: int | str = 1
    tasks_per_node: int = 1
    cpus_per_task: int | None = None
    gpus_per_node: int | None = None
    gpus_per_task: int | None = None
    mem: str | None = None
    mem_per_cpu: str | None = None
    mem_per_gpu: str | None = None
    qos: str | None = None
    account: str | None = None
    constraint: str | None = None
    nodelist: str | None = None
    exclude: str | None = None
    exclusive: bool = False
    reservation: str | None = None
    dependency: str | None = None
    comment: str | None = None
    job_name: str | None = None
    signal_delay_s: int = 120
    array_parallelism: int = 256
    setup: list[str] = field(default_factory=list)
    srun_args: list[str] = field(default_factory=list)
    additional: dict[str, Any] = field(default_factory=dict)
    python: str | None = None
    max_timeouts: int | None = None
    requeue_killed: bool = True
    check_folder: bool = True
    wait: bool = False
    dry_run: bool = False
    retry_failed: bool = False

    @property
    def parallel(self) -> int:
        """Return launcher.array_parallelism."""
        return self.array_parallelism

    @property
    def node_counts(self) -> range:
        """Return the allowed numbers of nodes of a start, in ascending order.

        Raises:
            UserError: launcher.nodes is neither a number nor a range.
        """
        return ranges.parse("launcher.nodes", self.nodes)

    @property
    def is_elastic(self) -> bool:
        """Return whether each start gets the nodes that are free, within a range."""
        return len(self.node_counts) > 1

    @property
    def tasks(self) -> int:
        """Return the number of ranks, or the largest number if it may vary."""
        return self.node_counts[-1] * self.tasks_per_node
