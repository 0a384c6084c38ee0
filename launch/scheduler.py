"""Talking to Slurm by its commands: squeue and scontrol. Nothing here needs accounting (sacct)."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable

from launch import JobInfo

COMMANDS = ("sbatch", "srun", "squeue", "scontrol")
TIMEOUT_S = 30  # a controller that is busy for longer counts as not answering
JOB_ID = re.compile(r"\d+(_\d+)?")  # `12`, or `12_3` for a task of an array
# squeue prints each field padded to its width and followed by this.
SEPARATOR = "|"
FIELDS = ("JobArrayID", "State", "Reason", "RestartCnt", "BatchHost")
# A job has one word at a time, and a running one many besides RUNNING: SUSPENDED, SIGNALING until every node has
# answered to a signal, STOPPED, RESIZING, and what later versions add. So these are the words of jobs that do not run.
WAITING = {"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
ENDING = {"COMPLETING", "STAGE_OUT"}
# The job is over; Slurm remembers it for some minutes (MinJobAge).
OVER = {
    "COMPLETED": "completed",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "PREEMPTED": "cancelled",
    **dict.fromkeys(("FAILED", "TIMEOUT", "NODE_FAIL", "BOOT_FAIL", "OUT_OF_MEMORY", "DEADLINE"), "failed"),
}


# A user's defaults for these commands: filters that would hide jobs, other formats than those read here.
PREFERENCES = ("SQUEUE_", "SCONTROL_", "SLURM_TIME_FORMAT")
NOT_RUNNING = WAITING | ENDING | OVER.keys()


class SchedulerError(OSError):
    """Slurm does not answer, or refuses; the message is its own, in one line."""


def missing() -> list[str]:
    """The commands of Slurm that are not on this machine's PATH."""
    return [name for name in COMMANDS if shutil.which(name) is None]


def ask(*command: str, text: str | None = None) -> str:
    """What a Slurm command prints.

    Raises:
        SchedulerError: the command is not there, failed, or took longer than TIMEOUT_S.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith(PREFERENCES)}
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=env
        )
    except FileNotFoundError:
        raise SchedulerError(f"{command[0]} is not on this machine's PATH") from None
    except subprocess.TimeoutExpired:
        raise SchedulerError(f"{command[0]} did not answer within {TIMEOUT_S} s") from None
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        message = lines[-1] if lines else f"{command[0]} ended with status {done.returncode}"
        raise SchedulerError(re.sub(r"^\w+: (error: )*", "", message).strip())
    return done.stdout


def fields(line: str) -> dict[str, str]:
    """`Key=Value` words of one line of `scontrol show -o`."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def show_job(job_id: str) -> dict[str, str]:
    """What Slurm knows of a job.

    Raises:
        SchedulerError: Slurm does not answer, or has forgotten the job.
    """
    # From Command on there are texts of the user's, spaces and all; everything of interest stands before.
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
    """The host names behind a list of nodes such as `n[1-2]`."""
    rows = [fields(line) for line in ask("scontrol", "show", "node", "-o", nodes).splitlines()]
    return {row["NodeHostName"] for row in rows if "NodeHostName" in row}


def requeue(job_id: str, only_running: bool) -> None:
    """Put a job back in the queue; one that waits there already is left as it is.

    Args:
        only_running: leave a job alone that Slurm has ended meanwhile, by a scancel, say (Slurm calls that a success).

    Raises:
        SchedulerError: it is not in the queue now.
    """
    options = ["incomplete"] if only_running else []
    try:
        ask("scontrol", "requeue", *options, job_id)
    except SchedulerError as error:
        if "disabled" in str(error):  # by the site's defaults: the owner may allow it
            ask("scontrol", "update", f"jobid={job_id}", "requeue=1")
            ask("scontrol", "requeue", *options, job_id)
        elif "pending" not in str(error).lower():
            raise


def known_jobs(job_ids: Iterable[str]) -> dict[str, JobInfo]:
    """Those of `job_ids` (`12` or `12_3` for a task of an array) that Slurm remembers, by one call of squeue.

    Raises:
        SchedulerError: Slurm does not answer.
    """
    wanted = set(job_ids)
    if not wanted:
        return {}
    arrays = ",".join(sorted({job_id.partition("_")[0] for job_id in wanted}))
    columns = ",".join(f"{name}:{64 if name != 'BatchHost' else 255}{SEPARATOR}" for name in FIELDS)
    try:
        lines = ask(
            "squeue", "--noheader", "--array", "--states=all", f"--jobs={arrays}", f"--Format={columns}"
        ).splitlines()
    except SchedulerError as error:
        if "invalid job id" in str(error).lower():  # all of them have left Slurm's memory
            return {}
        raise
    found = (_job_info([cell.strip() for cell in line.split(SEPARATOR)]) for line in lines)
    return {info.job_id: info for info in found if info is not None and info.job_id in wanted}


def _job_info(cells: list[str]) -> JobInfo | None:
    if len(cells) < len(FIELDS):
        return None
    job_id, state, reason, restarts, node = cells[: len(FIELDS)]
    count = int(restarts) if restarts.isdigit() else 0
    if state in WAITING:
        return JobInfo(job_id, "requeued" if count else "pending", None, reason, count)
    word = "ending" if state in ENDING else OVER.get(state, "running")
    return JobInfo(job_id, word, node if node != "n/a" else None, None, count)
