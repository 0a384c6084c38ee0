"""Call Slurm's commands and parse their output, without accounting (sacct)."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from runner.contracts import SLURM_ENDING, SLURM_OVER, SLURM_SUSPENDED, SLURM_WAITING, JobInfo
from runner.system import processes

COMMANDS = ("sbatch", "srun", "squeue", "scontrol")
TIMEOUT_S = 30  # a controller that is busy for longer is treated as not answering
JOB_ID = re.compile(r"([0-9]{1,10})(_[0-9]{1,10})?")  # `12`, or `12_3` for a task of an array
# The clocks of Slurm and a node may differ by this much: munge refuses larger differences.
CLOCKS_DIFFER_S = 300.0
END_OF_JOB_IDS = 2**32 - 2  # Slurm uses this number and the next one for "all" and "none"
# Prefix of batch script names, as in submitit. The submission's name and a number follow.
SCRIPT_PREFIX = ".submission_file_"
SCRIPT_NAME = re.compile(re.escape(SCRIPT_PREFIX) + r"([0-9a-f]{32})-\d+\.sh")
# squeue pads each field to its width and puts this after it.
SEPARATOR = "|"
# squeue's fields and their widths. The last two may contain the separator. In a longer path, the submission's name is
# cut off.
FIELDS = {
    **dict.fromkeys(("JobArrayID", "State", "RestartCnt", "SubmitTime", "UserID", "StartTime", "PendingTime"), 64),
    **dict.fromkeys(("Reason", "BatchHost", "Name"), 255),
    "Command": 1024,
}
# Variables with a user's defaults for these commands. They would hide jobs or change formats that are parsed here.
PREFERENCES = ("SQUEUE_", "SCONTROL_", "SLURM_TIME_FORMAT")
# Explanations of Slurm's reasons for a job to wait; {job} is its id. The keys are as scontrol prints them. squeue
# prints reasons for which it has no name with spaces (`launch failed requeued held`).
REASONS = {
    "Resources": "nodes with what it asks for are not free yet",
    "Priority": "jobs of higher priority come first",
    "JobArrayTaskLimit": "as many runs of its sweep as launcher.array_parallelism allows are running",
    "Dependency": "it waits for other jobs, such as earlier runs of its sweep (launcher.array_parallelism)",
    "JobHeldAdmin": "held by Slurm or an administrator: `scontrol release {job}`, or ask them",
    "JobHeldUser": "held by its user: `scontrol release {job}`",
    "launch_failed_requeued_held": "held by Slurm, since its node could not start it: `scontrol release {job}`",
    "job_requeued_in_held_state": "it was requeued on hold: `scontrol release {job}`",
    "BeginTime": "Slurm lets it start later (two minutes after a requeue)",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "PartitionTimeLimit": "its time limit exceeds that of the partition: it will not start",
    "PartitionConfig": "no node of its partition has what it asks for: it will not start",
    "PartitionNodeLimit": "it asks for more nodes than the partition allows: it will not start",
    "BadConstraints": "no node has what it asks for: it will not start",
    "DependencyNeverSatisfied": "it depends on a job that did not end so: it will not start",
    "ReqNodeNotAvail": "a node that it needs is not available",
    "NodeDown": "a node that it needs is down",
}


@dataclass(frozen=True)
class RecordedJob:
    """A job as recorded in its run's directory. The id alone does not identify it, because Slurm reuses ids."""

    job_id: str
    user: str | None = None  # the user id
    name: str | None = None  # squeue shows 255 characters of it
    submitted: str | None = None  # by Slurm's clock, as Slurm prints it; a requeue resets it
    seen: str | None = None  # a time after the submission, in the same form
    submission: str | None = None  # the submission's name, part of the batch script's path

    def is_same(self, user: str, name: str, submitted: str, restarts: int, submission: str | None = None) -> bool:
        """Return whether a job with the same id that Slurm now reports is this job.

        The submission's name identifies the job. If sbatch is a wrapper that submits a copy of the script, the user,
        job name and submit time identify it.
        """
        if None not in (self.submission, submission):
            return self.submission == submission
        if self.user not in (None, user):
            return False
        named = self.name is None or _shown_name(self.name) == _shown_name(name)
        if restarts == 0 and self.seen is not None:
            return named and (self.submitted or "") <= submitted <= self.seen
        if restarts == 0 and self.submitted is not None:
            return submitted == self.submitted
        return named and submitted >= (self.submitted or "")


def _shown_name(name: str) -> str:
    return name[: FIELDS["Name"]].rstrip()


def is_job_id(text: str) -> bool:
    """Return whether this is a valid Slurm job id. squeue refuses a complete query for one invalid id."""
    found = JOB_ID.fullmatch(text)
    return found is not None and 0 < int(found[1]) < END_OF_JOB_IDS


class SchedulerError(OSError):
    """Slurm does not answer, or refuses. The message is Slurm's own, on one line."""


class ForgottenError(SchedulerError):
    """Slurm knows no such job, because it ended long ago or Slurm has lost it."""


def missing_commands() -> list[str]:
    """Return Slurm's commands that are not on this machine's PATH."""
    return [name for name in COMMANDS if processes.find_command(name) is None]


def ask(*command: str, text: str | None = None) -> str:
    """Run a Slurm command with `text` as its standard input, and return its standard output.

    Raises:
        SchedulerError: the command does not exist, failed, or took longer than TIMEOUT_S.
        ForgottenError: Slurm knows no job with the id in question.
    """
    env = {name: value for name, value in processes.environment.items() if not name.startswith(PREFERENCES)}
    env["TZ"] = "UTC0"  # times are compared across shells and machines, and must not repeat (daylight saving)
    if processes.find_command(command[0]) is None:
        raise SchedulerError(f"{command[0]} is not on this machine's PATH")
    try:
        # Slurm's signals reach every process of the job, in any session; other signals reach its process group. The
        # answer to a requeue arrives while the job is being killed for it.
        done = processes.run_shielded(command, given=text, timeout=TIMEOUT_S, env=env, start_new_session=True)
    except subprocess.TimeoutExpired:
        raise SchedulerError(f"{command[0]} did not answer within {TIMEOUT_S} s") from None
    except OSError as error:  # for example no memory for a process; the next try may work
        raise SchedulerError(f"{command[0]} cannot be started: {error.strerror or error}") from None
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        message = lines[-1] if lines else f"{command[0]} exited with status {done.returncode}"
        # (For a malformed id, squeue says "Invalid job id: TEXT".)
        kind = ForgottenError if "invalid job id specified" in message.lower() else SchedulerError
        raise kind(re.sub(r"^\w+: (error: )*", "", message).strip())
    return done.stdout


def fields(line: str) -> dict[str, str]:
    """Return the `Key=Value` words of one line of `scontrol show -o`."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def show_job(job_id: str) -> dict[str, str]:
    """Return the record of a job. `Command` is the rest of the line, because user-defined values may contain spaces.

    Raises:
        SchedulerError: Slurm does not answer, or has forgotten the job.
    """
    line, _, command = ask("scontrol", "show", "job", "-o", job_id).partition(" Command=")
    before, _, rest = line.partition(" JobName=")
    name, found, after = rest.partition(" UserId=")
    record = {**fields(f"{before} UserId={after}"), "JobName": name} if found else fields(line)
    return {**record, "Command": command} if command else record


def show_partitions() -> dict[str, dict[str, str]]:
    """Return the partitions by name, including hidden ones."""
    rows = [fields(line) for line in ask("scontrol", "show", "partition", "-o", "--all").splitlines()]
    return {row["PartitionName"]: row for row in rows if "PartitionName" in row}


def show_config() -> dict[str, str]:
    """Return Slurm's configuration."""
    pairs = (line.split("=", 1) for line in ask("scontrol", "show", "config").splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def show_nodes(nodes: str) -> list[dict[str, str]]:
    """Read the records of a list of nodes such as `n[1-2]`.

    Raises:
        SchedulerError: Slurm does not answer, or does not know the nodes.
    """
    # The rest of the line is free text: the reason why a node is drained.
    lines = ask("scontrol", "show", "node", "-o", nodes).splitlines()
    return [fields(line.partition(" Reason=")[0]) for line in lines]


def requeue(job_id: str, only_running: bool) -> None:
    """Requeue a job; do nothing if it is already queued.

    Args:
        job_id: id of the job.
        only_running: do nothing if Slurm has ended the job, for example after a scancel. Slurm then reports success.

    Raises:
        SchedulerError: the job is not queued.
    """
    options = ["incomplete"] if only_running else []
    try:
        ask("scontrol", "requeue", *options, job_id)
    except SchedulerError as error:
        if "disabled" in str(error):  # requeueing is off by the site's default; the job's owner may enable it
            ask("scontrol", "update", f"jobid={job_id}", "requeue=1")
            ask("scontrol", "requeue", *options, job_id)
        elif "pending" not in str(error).lower():
            raise


def known_jobs(jobs: Iterable[RecordedJob]) -> dict[RecordedJob, JobInfo]:
    """Return the `jobs` that Slurm remembers, using one squeue call. Later jobs with the same ids are ignored.

    Raises:
        SchedulerError: Slurm does not answer.
    """
    wanted: dict[str, list[RecordedJob]] = {}
    for job in jobs:
        if is_job_id(job.job_id):
            wanted.setdefault(job.job_id, []).append(job)
    if not wanted:
        return {}
    arrays = ",".join(sorted({job_id.partition("_")[0] for job_id in wanted}))
    columns = ",".join(f"{name}:{width}{SEPARATOR}" for name, width in FIELDS.items())
    try:
        rows = ask("squeue", "--noheader", "--array", "--states=all", f"--jobs={arrays}", f"--Format={columns}")
    except ForgottenError:  # all jobs are forgotten
        return {}
    found = {}
    for row in rows.splitlines():
        first, _, script = row.rstrip().removesuffix(SEPARATOR).rpartition(SEPARATOR)
        cells = [cell.strip() for cell in first.split(SEPARATOR, len(FIELDS) - 2)]
        if len(cells) == len(FIELDS) - 1:
            shown = dict(zip(FIELDS, cells, strict=False))
            info = _job_info(shown)
            now = (shown["UserID"], shown["Name"], shown["SubmitTime"], info.restarts, submission_in(script))
            same = [job for job in wanted.get(info.job_id, []) if job.is_same(*now)]
            found.update(dict.fromkeys(same, info))
    return found


def submission_in(script: str) -> str | None:
    """Return the submission's name from the path of its batch script, or None if the path has none."""
    found = SCRIPT_NAME.search(script)
    return found[1] if found else None


def live_scripts(user: str) -> dict[str, str]:
    """Return the batch script path, as passed to sbatch, of each of a user's jobs that has not ended.

    `user` is a user id.

    Raises:
        SchedulerError: Slurm does not answer.
    """
    # --all includes jobs in hidden partitions. The script is the last field, because a path may contain the separator.
    columns = f"%i{SEPARATOR}%T{SEPARATOR}%o"
    rows = ask("squeue", f"--user={user}", "--noheader", "--all", "--array", "--states=all", f"--format={columns}")
    cells = [row.split(SEPARATOR, 2) for row in rows.splitlines()]
    return {row[0]: row[2] for row in cells if len(row) == 3 and row[1] not in SLURM_OVER and is_job_id(row[0])}


def _job_info(job: dict[str, str]) -> JobInfo:
    job_id, slurm_state, reason, restarts, node = (
        job[each] for each in ("JobArrayID", "State", "Reason", "RestartCnt", "BatchHost")
    )
    count = int(restarts) if restarts.isdigit() else 0
    if slurm_state in SLURM_WAITING:
        waiting = _number(job["PendingTime"]), _time(job["StartTime"])
        return JobInfo(job_id, "requeued" if count else "pending", None, _explained(reason, job_id), count, *waiting)
    if slurm_state in SLURM_SUSPENDED:
        state = "suspended"
    else:
        state = "ending" if slurm_state in SLURM_ENDING else SLURM_OVER.get(slurm_state, "running")
    return JobInfo(job_id, state, node if node != "n/a" else None, None, count)


def _number(text: str) -> float | None:
    return float(text) if text.isdecimal() else None


def _time(text: str) -> float | None:
    """Parse a time that Slurm prints (see `ask`) to seconds since 1970, or None if Slurm prints no time."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _explained(reason: str, job_id: str) -> str | None:
    """Return Slurm's reason why a job waits, with an explanation if `REASONS` has one."""
    if reason in ("", "None"):
        return None
    meaning = REASONS.get(reason.partition(",")[0].replace(" ", "_"))
    return reason if meaning is None else f"{reason}: {meaning.format(job=job_id)}"
