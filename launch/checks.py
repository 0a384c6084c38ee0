"""Find errors in a submission before it is submitted."""

from __future__ import annotations

import difflib
import math
import re
from pathlib import Path

from launch import node_range, scheduler
from launch.options import SlurmOptions
from runner.contracts import Finding
from runner.errors import UserError
from runner.system import files, processes

TIME_FORMATS = "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS"
WITH_DAYS = r"(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?"
TIME = re.compile(rf"(?:{WITH_DAYS}|(?P<plain>\d+(?::\d+){{0,2}}))")
# Types of file systems that only one machine can see, as named in /proc/mounts.
LOCAL_FILE_SYSTEMS = {"tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "f2fs"}
MIN_SIGNAL_DELAY_S, MAX_SIGNAL_DELAY_S = 1, 65_535
# Characters that Slurm interprets in log file names.
EXPANDED = frozenset("%\\\n")
# Matches the number of GPUs in a node's record, such as `gpu:a100:4(S:0-1)` or `gpu:2,shard:8`.
GPUS = re.compile(r"\bgpu(?::[^:,(]+)?:(\d+)")
# The minimum of each integer option.
MINIMA = {
    "tasks_per_node": 1,
    "cpus_per_task": 1,
    "array_parallelism": 1,
    "max_timeouts": 1,
    "gpus_per_node": 0,
    "gpus_per_task": 0,
}
# The type and an example of each option that is a collection.
COLLECTIONS: dict[str, tuple[type, str]] = {
    "setup": (list, "'[module load cuda]'"),
    "srun_args": (list, "'[--cpu-bind=cores]'"),
    "additional": (dict, "'{licenses: matlab}'"),
}


def minutes(time: int | str) -> int:
    """Return a time limit in whole minutes, rounded up as Slurm does.

    Raises:
        ValueError: the string has none of Slurm's time formats.
    """
    match = TIME.fullmatch(str(time).strip())
    if match is None:
        raise ValueError(f"{time!r} is not a time that Slurm accepts: use {TIME_FORMATS}, in quotes")
    if match["days"] is not None:
        days, hours, mins, seconds = (int(match[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
    else:
        parts = [int(part) for part in match["plain"].split(":")]
        hours, mins, seconds = {1: [0, *parts, 0], 2: [0, *parts], 3: parts}[len(parts)]
        days = 0
    return math.ceil((((days * 24) + hours) * 60 + mins) + seconds / 60)


def option_errors(options: SlurmOptions) -> list[str]:
    """Return the errors that can be found without a cluster."""
    errors = [*_time_errors(options), *_node_errors(options)]
    for name, least in MINIMA.items():
        value = getattr(options, name)
        if value is not None and (not isinstance(value, int) or value < least):
            errors.append(f"launcher.{name}={value!r} must be a whole number, {least} or more")
    for name, (kind, example) in COLLECTIONS.items():
        value = getattr(options, name)
        if not isinstance(value, kind):
            errors.append(f"launcher.{name}={value!r} must be a {kind.__name__}, for example launcher.{name}={example}")
    if sum(value is not None for value in (options.mem, options.mem_per_cpu, options.mem_per_gpu)) > 1:
        errors.append("launcher.mem, mem_per_cpu and mem_per_gpu are mutually exclusive: set one of them")
    return errors


def _node_errors(options: SlurmOptions) -> list[str]:
    try:
        options.node_counts  # noqa: B018
    except UserError as error:
        return [str(error)]
    return node_range.errors(options) if isinstance(options.additional, dict) else []


def _time_errors(options: SlurmOptions) -> list[str]:
    """Return errors in the time limit and in the signal before it."""
    delay, most, below = options.signal_delay_s, MAX_SIGNAL_DELAY_S, ""
    if options.time is not None:
        try:
            limit = minutes(options.time)
        except ValueError as error:
            return [f"launcher.time: {error}"]
        if limit < 1:
            return [f"launcher.time={options.time} must be 1 minute or more, or null for the cluster's default"]
        most, below = min(most, limit * 60 - 1), f", below launcher.time={options.time} ({limit} min)"
    if isinstance(delay, int) and MIN_SIGNAL_DELAY_S <= delay <= most:
        return []
    return [f"launcher.signal_delay_s={delay} must be a whole number from {MIN_SIGNAL_DELAY_S} to {most}{below}"]


def path_errors(run_dirs: list[Path]) -> list[str]:
    """Refuse run directories with sequences that Slurm and submitit expand in log paths, such as %j."""
    bad = next((path for path in map(Path.absolute, run_dirs) if set(str(path)) & EXPANDED), None)
    if bad is None:
        return []
    return [
        f"the run directory {str(bad)!r} contains %, \\ or a line break, which Slurm interprets: choose another one"
    ]


def cluster_errors(options: SlurmOptions, run_dirs: list[Path]) -> list[str]:
    """Return errors that Slurm would report late, less clearly or not at all.

    Raises:
        SchedulerError: Slurm does not answer.
    """
    partitions = scheduler.show_partitions()
    name = options.partition or default_partition(partitions)
    errors = []
    if name is None:
        return [f"set launcher.partition: the cluster has no default (it has {_list(partitions)})"]
    for each in name.split(","):
        if each not in partitions:
            close = difflib.get_close_matches(each, partitions, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            errors.append(f"launcher.partition={each!r} does not exist: {hint}the cluster has {_list(partitions)}")
        else:
            errors += _limit_errors(options, partitions[each])
            errors += _folder_errors(options, run_dirs, partitions[each])
    return errors


def default_partition(partitions: dict[str, dict[str, str]]) -> str | None:
    """Return the partition used for jobs that do not name one."""
    return next((name for name, row in partitions.items() if row.get("Default") == "YES"), None)


def _list(partitions: dict[str, dict[str, str]]) -> str:
    return ", ".join(partitions) or "none"


def _limit_errors(options: SlurmOptions, partition: dict[str, str]) -> list[str]:
    """Compare the options with the partition's limits, unless a QOS may lift them.

    sbatch accepts a job that exceeds the limits, and the job then waits forever.
    """
    errors, name, nodes = [], partition["PartitionName"], partition.get("TotalNodes", "")
    if nodes.isdigit() and options.node_counts[0] > int(nodes):  # with a range, Slurm uses the nodes that exist
        errors.append(f"launcher.nodes={options.nodes} exceeds the {nodes} nodes of partition {name!r}")
    most = _limit(partition, "MaxTime")
    if options.time is not None:
        if most is not None and minutes(options.time) > most and options.qos is None:
            errors.append(
                f"launcher.time={options.time} exceeds the limit of partition {name!r}: {partition['MaxTime']}"
            )
        return errors
    limit, where = attempt_limit(options, partition)
    if limit is not None and options.signal_delay_s >= limit * 60:
        errors.append(
            f"launcher.signal_delay_s={options.signal_delay_s} must be below the time limit of {limit} min ({where})"
        )
    return errors


def _limit(partition: dict[str, str], key: str) -> int | None:
    """Return a time limit of a partition in minutes, or None if it is unlimited."""
    text = partition.get(key, "")
    return minutes(text) if text[:1].isdigit() else None


def attempt_limit(options: SlurmOptions, partition: dict[str, str]) -> tuple[int | None, str]:
    """Return one attempt's time limit in minutes (None if unlimited), and where the limit is set."""
    if options.time is not None:
        return minutes(options.time), "launcher.time"
    for key in ("DefaultTime", "MaxTime"):
        if (limit := _limit(partition, key)) is not None:
            return limit, f"{key} of partition {partition['PartitionName']!r}"
    return None, ""


def _folder_errors(options: SlurmOptions, run_dirs: list[Path], partition: dict[str, str]) -> list[str]:
    """Refuse run directories that other machines probably cannot see, judging by this machine's mounts."""
    if not options.check_folder or not run_dirs:
        return []
    parent = run_dirs[0].absolute().parent
    file_system = file_system_of(parent)
    if file_system not in LOCAL_FILE_SYSTEMS:
        return []
    here = processes.host_name().partition(".")[0]
    nodes = scheduler.show_nodes(partition.get("Nodes", ""))
    others = {host.partition(".")[0] for node in nodes if (host := node.get("NodeHostName"))} - {here}
    if not others:
        return []
    return [
        f"{parent} is on a local disk of {here} ({file_system}), so {min(others)} cannot see it: set run.root to a "
        "shared directory, or launcher.check_folder=false if this one is shared after all"
    ]


def start_errors(options: SlurmOptions) -> list[Finding]:
    """Find reasons why the job would never start: its partition is not up, or no node has the requested resources.

    sbatch refuses some of these jobs and lets others wait forever. `sbatch --test-only` does not report them.

    Raises:
        SchedulerError: Slurm does not answer.
    """
    partition = _chosen_partition(options, scheduler.show_partitions())
    if partition is None:
        return []  # reported by `cluster_errors`
    name, state = partition["PartitionName"], partition.get("State", "UP")
    another = "choose another launcher.partition"
    if state != "UP":
        return [
            Finding("error", f"partition {name} is {state}: no job starts in it", f"{another}, or wait until it is UP")
        ]
    tasks = options.tasks_per_node
    cpus, gpus = tasks * (options.cpus_per_task or 1), options.gpus_per_node or tasks * (options.gpus_per_task or 0)
    memory = _megabytes(options.mem) or cpus * _megabytes(options.mem_per_cpu) or gpus * _megabytes(options.mem_per_gpu)
    nodes = scheduler.show_nodes(partition.get("Nodes", ""))
    most = {
        "CPUs": (cpus, [int(node.get("CPUTot", cpus)) for node in nodes], "tasks_per_node or launcher.cpus_per_task"),
        "GPUs": (gpus, [sum(map(int, GPUS.findall(node.get("Gres", "")))) for node in nodes], "gpus_per_node"),
        "MB of memory": (memory, [int(node.get("RealMemory", memory)) for node in nodes], "mem"),
    }
    return [
        Finding(
            "error",
            f"the job needs nodes with {need:.0f} {what}, and no node of partition {name} has more than {max(have)}",
            f"reduce launcher.{option}, or {another}",
        )
        for what, (need, have, option) in most.items()
        if have and need > max(have)
    ]


def _megabytes(text: str | None) -> float:
    """Parse an amount of memory as sbatch does. Return 0 if there is none, or if sbatch will refuse it."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", str(text or 0).strip().upper())
    return float(found[1]) * 1024.0 ** ("KMGT".index(found[2] or "M") - 1) if found else 0.0


def _chosen_partition(options: SlurmOptions, partitions: dict[str, dict[str, str]]) -> dict[str, str] | None:
    """Find the job's partition, the first of several. Return None if it is missing (see `cluster_errors`)."""
    return partitions.get((options.partition or default_partition(partitions) or "").split(",")[0])


def cluster_findings(options: SlurmOptions, save_s: float | None) -> list[Finding]:
    """Report how Slurm would ask a job to stop, and whether a save fits into the time after the signal.

    Args:
        options: the job's options.
        save_s: duration of a save in seconds; None if unknown.

    Raises:
        SchedulerError: Slurm does not answer.
    """
    partition, config = _chosen_partition(options, scheduler.show_partitions()), scheduler.show_config()
    if partition is None:
        return []
    name = partition["PartitionName"]
    limit, where = attempt_limit(options, partition)
    per_attempt = "no time limit" if limit is None else f"{limit} min per attempt ({where})"
    found = [Finding("ok", f"partition {name}: {per_attempt}, at most {partition.get('MaxTime', 'UNLIMITED')}")]
    found.append(Finding("ok", "requeue: every job asks for it, so that it is requeued if its node is lost"))
    found += _preemption_findings(partition, config, save_s)
    if save_s is not None and limit is not None:
        option = "launcher.signal_delay_s"
        found.append(_fits(save_s, options.signal_delay_s, f"the notice before the time limit ({option})", option))
    return found


def _preemption_findings(partition: dict[str, str], config: dict[str, str], save_s: float | None) -> list[Finding]:
    name = partition["PartitionName"]
    mode = partition.get("PreemptMode", "OFF").split(",")[0]
    if config.get("PreemptType", "preempt/none") == "preempt/none" or mode == "OFF":
        return [Finding("ok", f"preemption: none in partition {name}")]
    found = [Finding("ok", f"preemption: {mode} in partition {name}")]
    if mode == "CANCEL":
        remedy = "the runner requeues itself within the grace time; after a kill without one, rerun the command"
        found = [Finding("warning", f"preemption: partition {name} cancels jobs instead of requeueing them", remedy)]
    grace = int(partition.get("GraceTime", "0"))
    if grace == 0:
        wait = config.get("KillWait", "30 sec").split()[0]
        text = f"preemption without a grace time: {wait} s (KillWait) from the signal to the kill"
        return [*found, Finding("warning", text, "save often: checkpoint.every_minutes")]
    if save_s is None:
        return [*found, Finding("ok", f"preemption with a grace time of {grace} s (GraceTime)")]
    return [*found, _fits(save_s, grace, "the grace time of a preemption (GraceTime)", None)]


def _fits(save_s: float, notice_s: float, what: str, option: str | None) -> Finding:
    """Check that the time after a signal is twice a save's duration, because the current step is finished first."""
    text = f"a save takes {save_s:.1f} s, {what} is {notice_s:g} s"
    if notice_s >= 2 * save_s:
        return Finding("ok", text)
    remedy = f"{option}={math.ceil(4 * save_s)}" if option else "checkpoint.every_minutes bounds what is lost"
    return Finding("error" if notice_s < save_s else "warning", text, remedy)


def file_system_of(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """Return the file system type of `path`, or of its nearest existing parent. Return None if unknown."""
    real = next(each for each in (files.resolve(path), *files.resolve(path).parents) if files.exists(each))
    best: tuple[int, str] | None = None
    for line in (files.read_small(mounts) or "").splitlines():
        point, kind = line.split()[1:3]
        mounted = Path(point.replace("\\040", " "))
        if real.is_relative_to(mounted) and (best is None or len(mounted.parts) >= best[0]):
            best = len(mounted.parts), kind
    return best[1] if best else None
