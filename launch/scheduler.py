"""Slurm's commands. Nothing here needs accounting (sacct)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable

from runner.contracts import SLURM_ENDING, SLURM_OVER, SLURM_WAITING, JobInfo
from runner.system import processes

COMMANDS = ("sbatch", "srun", "squeue", "scontrol")
TIMEOUT_S = 30  # a controller that is busy for longer counts as not answering
JOB_ID = re.compile(r"\d+(_\d+)?")  # `12`, or `12_3` for a task of an array
# squeue pads each field to its width and puts this after it.
SEPARATOR = "|"
FIELDS = {"JobArrayID": 64, "State": 64, "Reason": 64, "RestartCnt": 64, "BatchHost": 255}  # with their widths
# A user's defaults for these commands: filters that would hide jobs, formats other than those read here.
PREFERENCES = ("SQUEUE_", "SCONTROL_", "SLURM_TIME_FORMAT")


class SchedulerError(OSError):
    """Slurm does not answer, or refuses; the message is Slurm's own, on one line."""


def missing_commands() -> list[str]:
    """Slurm's commands that are not on this machine's PATH."""
    return [name for name in COMMANDS if shutil.which(name) is None]


def ask(*command: str, text: str | None = None) -> str:
    """The standard output of a Slurm command; `text` is its standard input.

    Raises:
        SchedulerError: the command does not exist, failed, or took longer than TIMEOUT_S.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(PREFERENCES)}
    try:
        # A session of its own: a signal to the job's process group must not end the command as well.
        done = processes.run(
            command,
            input=text,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
            env=env,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise SchedulerError(f"{command[0]} is not on this machine's PATH") from None
    except subprocess.TimeoutExpired:
        raise SchedulerError(f"{command[0]} did not answer within {TIMEOUT_S} s") from None
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        message = lines[-1] if lines else f"{command[0]} exited with status {done.returncode}"
        raise SchedulerError(re.sub(r"^\w+: (error: )*", "", message).strip())
    return done.stdout


def fields(line: str) -> dict[str, str]:
    """The `Key=Value` words of one line of `scontrol show -o`."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def show_job(job_id: str) -> dict[str, str]:
    """The record of a job, up to its command.

    Raises:
        SchedulerError: Slurm does not answer, or has forgotten the job.
    """
    # From Command on, users' texts follow, with spaces and all; the fields of interest are before it.
    return fields(ask("scontrol", "show", "job", "-o", job_id).partition(" Command=")[0])


def show_partitions() -> dict[str, dict[str, str]]:
    """The partitions by name."""
    rows = [fields(line) for line in ask("scontrol", "show", "partition", "-o").splitlines()]
    return {row["PartitionName"]: row for row in rows if "PartitionName" in row}


def show_config() -> dict[str, str]:
    """Slurm's own configuration."""
    pairs = (line.split("=", 1) for line in ask("scontrol", "show", "config").splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def show_hosts(nodes: str) -> set[str]:
    """The host names of a list of nodes such as `n[1-2]`."""
    rows = [fields(line) for line in ask("scontrol", "show", "node", "-o", nodes).splitlines()]
    return {row["NodeHostName"] for row in rows if "NodeHostName" in row}


def requeue(job_id: str, only_running: bool) -> None:
    """Requeue a job; a job that is queued already is left as it is.

    Args:
        only_running: leave a job alone that Slurm has ended meanwhile, after a scancel, say (which Slurm reports as a
            success).

    Raises:
        SchedulerError: the job is not queued.
    """
    options = ["incomplete"] if only_running else []
    try:
        ask("scontrol", "requeue", *options, job_id)
    except SchedulerError as error:
        if "disabled" in str(error):  # the site's default; the owner of the job may change it
            ask("scontrol", "update", f"jobid={job_id}", "requeue=1")
            ask("scontrol", "requeue", *options, job_id)
        elif "pending" not in str(error).lower():
            raise


def known_jobs(job_ids: Iterable[str]) -> dict[str, JobInfo]:
    """Those of `job_ids` that Slurm remembers, by one call of squeue.

    Raises:
        SchedulerError: Slurm does not answer.
    """
    wanted = set(job_ids)
    if not wanted:
        return {}
    arrays = ",".join(sorted({job_id.partition("_")[0] for job_id in wanted}))
    columns = ",".join(f"{name}:{width}{SEPARATOR}" for name, width in FIELDS.items())
    try:
        rows = ask("squeue", "--noheader", "--array", "--states=all", f"--jobs={arrays}", f"--Format={columns}")
    except SchedulerError as error:
        if "invalid job id" in str(error).lower():  # Slurm has forgotten all of them
            return {}
        raise
    found = (_job_info([cell.strip() for cell in row.split(SEPARATOR)]) for row in rows.splitlines())
    return {info.job_id: info for info in found if info is not None and info.job_id in wanted}


def _job_info(cells: list[str]) -> JobInfo | None:
    if len(cells) < len(FIELDS):
        return None
    job_id, slurm_state, reason, restarts, node = cells[: len(FIELDS)]
    count = int(restarts) if restarts.isdigit() else 0
    if slurm_state in SLURM_WAITING:
        return JobInfo(job_id, "requeued" if count else "pending", None, reason, count)
    state = "ending" if slurm_state in SLURM_ENDING else SLURM_OVER.get(slurm_state, "running")
    return JobInfo(job_id, state, node if node != "n/a" else None, None, count)
