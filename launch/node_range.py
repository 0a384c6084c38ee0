"""Support jobs of varying size: with `launcher.nodes=1-4`, each start gets the nodes that are free at that moment.

Slurm treats the number of tasks of a submission as a limit. To Slurm, a job with `--nodes=1-4 --ntasks-per-node=1` has
one task, so it never gets a second node. With more tasks per node, Slurm remembers at a requeue how many tasks the last
start had, and waits for the same number of nodes. So the submission requests CPUs and GPUs per node and no tasks. The
batch script passes srun the number of tasks for the nodes that the job has.
"""

from __future__ import annotations

from typing import Any

from launch.options import SlurmOptions

# Options of sbatch that fix the number of tasks.
TASKS = {"n", "ntasks", "ntasks_per_node", "tasks_per_node", "ntasks_per_gpu", "ntasks_per_core", "ntasks_per_socket"}


def errors(options: SlurmOptions) -> list[str]:
    """Return an error for each option that would fix the size of a job whose size may vary."""
    named = {str(key).lstrip("-"): key for key in options.additional}
    return [
        f"launcher.nodes={options.nodes}: launcher.additional.{key} would fix the number of tasks, and so that of the "
        "nodes: remove it, launcher.tasks_per_node is enough"
        for name, key in named.items()
        if options.is_elastic and name.replace("-", "_") in TASKS
    ]


def submission_options(options: SlurmOptions) -> dict[str, Any]:
    """Return the sbatch options that replace nodes, tasks per node and GPUs per task. Return none for a fixed size."""
    if not options.is_elastic:
        return {}
    nodes, tasks, gpus = options.node_counts, options.tasks_per_node, options.gpus_per_task
    return {
        "nodes": f"{nodes[0]}-{nodes[-1]}",
        "mincpus": tasks * (options.cpus_per_task or 1),
        **({"gpus-per-node": tasks * gpus} if gpus and options.gpus_per_node is None else {}),
    }


def script_lines(options: SlurmOptions) -> list[str]:
    """Return the batch script's lines that set srun's number of tasks. Return none for a fixed size.

    srun reads these variables, and passes the GPU variables to its tasks.
    """
    if not options.is_elastic:
        return []
    tasks, gpus = options.tasks_per_node, options.gpus_per_task
    return [
        f"export SLURM_NTASKS_PER_NODE={tasks} SLURM_NTASKS=$((SLURM_JOB_NUM_NODES * {tasks}))",
        *([f"export SLURM_GPUS_PER_TASK={gpus}"] if gpus else []),
    ]
