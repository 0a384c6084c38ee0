"""What is wrong with a submission, found before anything is submitted."""

from __future__ import annotations

import difflib
import math
import re
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from launch import Finding, scheduler

if TYPE_CHECKING:
    from launch.slurm import SlurmLauncher

TIME_FORMATS = "minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM, D-HH:MM:SS"
WITH_DAYS = r"(?P<days>\d+)-(?P<hours>\d+)(?::(?P<minutes>\d+)(?::(?P<seconds>\d+))?)?"
TIME = re.compile(rf"(?:{WITH_DAYS}|(?P<plain>\d+(?::\d+){{0,2}}))")
# File systems that live on one machine, by their names in /proc/mounts.
LOCAL_FILE_SYSTEMS = {"tmpfs", "ramfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "overlay", "f2fs"}
LEAST_SIGNAL_DELAY_S, MOST_SIGNAL_DELAY_S = 1, 65_535


def minutes(time: int | str) -> int:
    """A time limit in whole minutes, rounded up as Slurm does it.

    Raises:
        ValueError: it is none of Slurm's formats.
    """
    match = TIME.fullmatch(str(time).strip())
    if match is None:
        raise ValueError(f"{time!r} is not a time that Slurm knows: give {TIME_FORMATS}, in quotes")
    if match["days"] is not None:
        days, hours, mins, seconds = (int(match[name] or 0) for name in ("days", "hours", "minutes", "seconds"))
    else:
        parts = [int(part) for part in match["plain"].split(":")]
        hours, mins, seconds = {1: [0, *parts, 0], 2: [0, *parts], 3: parts}[len(parts)]
        days = 0
    return math.ceil((((days * 24) + hours) * 60 + mins) + seconds / 60)


def check_options(launcher: SlurmLauncher) -> list[str]:
    """Faults that need no cluster to be seen."""
    faults = _check_times(launcher)
    numbers = (
        "nodes",
        "tasks_per_node",
        "cpus_per_task",
        "array_parallelism",
        "max_timeouts",
        "gpus_per_node",
        "gpus_per_task",
    )
    for name in numbers:
        value = getattr(launcher, name)
        least = 0 if name.startswith("gpus") else 1
        if value is not None and (not isinstance(value, int) or value < least):
            faults.append(f"launcher.{name}={value!r} must be a whole number from {least}")
    for name, kind, example in (
        ("setup", list, "'[module load cuda]'"),
        ("srun_args", list, "'[--cpu-bind=cores]'"),
        ("additional", dict, "'{licenses: matlab}'"),
    ):
        value = getattr(launcher, name)
        if not isinstance(value, kind):
            faults.append(f"launcher.{name}={value!r} must be a {kind.__name__}, for example launcher.{name}={example}")
    if sum(value is not None for value in (launcher.mem, launcher.mem_per_cpu, launcher.mem_per_gpu)) > 1:
        faults.append("launcher.mem, mem_per_cpu and mem_per_gpu exclude each other: give one of them")
    return faults


def _check_times(launcher: SlurmLauncher) -> list[str]:
    """Faults of the time limit and of the notice before it."""
    delay, most, below = launcher.signal_delay_s, MOST_SIGNAL_DELAY_S, ""
    if launcher.time is not None:
        try:
            limit = minutes(launcher.time)
        except ValueError as error:
            return [f"launcher.time: {error}"]
        if limit < 1:
            return [f"launcher.time={launcher.time} must be 1 minute or more, or null for the cluster's default"]
        most, below = min(most, limit * 60 - 1), f", below launcher.time={launcher.time} ({limit} min)"
    if isinstance(delay, int) and LEAST_SIGNAL_DELAY_S <= delay <= most:
        return []
    return [f"launcher.signal_delay_s={delay} must be a whole number from {LEAST_SIGNAL_DELAY_S} to {most}{below}"]


def check_cluster(launcher: SlurmLauncher, run_dirs: list[Path]) -> list[str]:
    """Faults that Slurm would not name before the job is queued, or would put less plainly.

    Raises:
        SchedulerError: Slurm does not answer.
    """
    partitions = scheduler.show_partitions()
    name = launcher.partition or default_partition(partitions)
    faults = _check_array(len(run_dirs))
    if name is None:
        return [
            *faults,
            f"launcher.partition is needed here: the cluster has no default (it has {_list(partitions)})",
        ]
    for each in name.split(","):
        if each not in partitions:
            close = difflib.get_close_matches(each, partitions, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            faults.append(f"launcher.partition={each!r} does not exist: {hint}the cluster has {_list(partitions)}")
        else:
            faults += _check_time(launcher, partitions[each])
            faults += _check_folder(launcher, run_dirs, partitions[each])
    return faults


def default_partition(partitions: dict[str, dict[str, str]]) -> str | None:
    """Where a job goes that names no partition."""
    return next((name for name, row in partitions.items() if row.get("Default") == "YES"), None)


def _list(partitions: dict[str, dict[str, str]]) -> str:
    return ", ".join(partitions) or "none"


def _check_array(runs: int) -> list[str]:
    most = int(scheduler.show_config().get("MaxArraySize", "1001"))  # the indices are 0 to one less
    if runs <= most:
        return []
    return [f"a sweep of {runs} runs is larger than the {most} tasks of an array that this cluster allows: split it"]


def _check_time(launcher: SlurmLauncher, partition: dict[str, str]) -> list[str]:
    """sbatch takes a time above the partition's limit, and the job then waits for ever."""
    most = partition.get("MaxTime", "UNLIMITED")
    if launcher.time is None or not most[0].isdigit() or minutes(launcher.time) <= minutes(most):
        return []
    name = partition["PartitionName"]
    return [f"launcher.time={launcher.time} is more than partition {name!r} allows: at most {most}"]


def _check_folder(launcher: SlurmLauncher, run_dirs: list[Path], partition: dict[str, str]) -> list[str]:
    """Whether other machines can see the run directories, as far as this machine can tell."""
    if not launcher.check_folder or not run_dirs:
        return []
    parent = run_dirs[0].absolute().parent
    file_system = file_system_of(parent)
    if file_system not in LOCAL_FILE_SYSTEMS:
        return []
    here = socket.gethostname().partition(".")[0]
    others = {host.partition(".")[0] for host in scheduler.show_hosts(partition.get("Nodes", ""))} - {here}
    if not others:
        return []
    fault = f"{parent} is on a disk of {here} alone ({file_system}), so {min(others)} cannot see it"
    return [f"{fault}: set run.root to a shared directory (it is shared all the same? launcher.check_folder=false)"]


def examine_cluster(launcher: SlurmLauncher, save_s: float | None) -> list[Finding]:
    """How a job of this launcher would be asked to go, and whether a save fits into the notice it gets.

    Raises:
        SchedulerError: Slurm does not answer.
    """
    partitions, config = scheduler.show_partitions(), scheduler.show_config()
    name = (launcher.partition or default_partition(partitions) or "").split(",")[0]
    if name not in partitions:
        return []  # a fault of `check_cluster`
    partition = partitions[name]
    limit = "no time limit" if launcher.time is None else f"{minutes(launcher.time)} min an attempt"
    found = [Finding("ok", f"partition {name}: {limit}, at most {partition.get('MaxTime', 'UNLIMITED')}")]
    found.append(Finding("ok", "requeue: asked for by every job, so that it comes back after a lost node"))
    found += _examine_preemption(partition, config, save_s)
    if save_s is not None:
        option = "launcher.signal_delay_s"
        found.append(_fits(save_s, launcher.signal_delay_s, f"the notice of the time limit ({option})", option))
    return found


def _examine_preemption(partition: dict[str, str], config: dict[str, str], save_s: float | None) -> list[Finding]:
    name = partition["PartitionName"]
    mode = partition.get("PreemptMode", "OFF").split(",")[0]
    if config.get("PreemptType", "preempt/none") == "preempt/none" or mode == "OFF":
        return [Finding("ok", f"preemption: none in partition {name}")]
    found = [Finding("ok", f"preemption: {mode} in partition {name}")]
    if mode == "CANCEL":
        remedy = "the runner requeues itself within the grace; after a kill without one, give the command again"
        found = [Finding("warning", f"preemption: partition {name} cancels jobs instead of requeueing them", remedy)]
    grace = int(partition.get("GraceTime", "0"))
    if grace == 0:
        wait = config.get("KillWait", "30 sec").split()[0]
        remedy = "save often enough by itself: checkpoint.every_minutes"
        text = f"preemption without a grace: {wait} s (KillWait) from the signal to the kill"
        return [*found, Finding("warning", text, remedy)]
    if save_s is None:
        return [*found, Finding("ok", f"preemption with a grace of {grace} s (GraceTime)")]
    return [*found, _fits(save_s, grace, "the grace of a preemption (GraceTime)", None)]


def _fits(save_s: float, notice_s: float, what: str, option: str | None) -> Finding:
    """Whether a save fits into a notice twice, since the step under way is finished first."""
    text = f"a save takes {save_s:.1f} s, {what} is {notice_s:g} s"
    if notice_s >= 2 * save_s:
        return Finding("ok", text)
    remedy = f"{option}={math.ceil(4 * save_s)}" if option else "checkpoint.every_minutes bounds what is lost"
    return Finding("fault" if notice_s < save_s else "warning", text, remedy)


def file_system_of(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """The type of the file system that holds `path` (or its nearest parent that exists)."""
    real = next(each for each in (path.resolve(), *path.resolve().parents) if each.exists())
    best: tuple[int, str] | None = None
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        point, kind = line.split()[1:3]
        mounted = Path(point.replace("\\040", " "))
        if real.is_relative_to(mounted) and (best is None or len(mounted.parts) >= best[0]):
            best = len(mounted.parts), kind
    return best[1] if best else None
