"""Slurm's commands. Nothing here needs accounting (sacct)."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from runner.contracts import SLURM_ENDING, SLURM_OVER, SLURM_SUSPENDED, SLURM_WAITING, JobInfo
from runner.system import processes

COMMANDS = ("sbatch", "srun", "squeue", "scontrol")
TIMEOUT_S = 30  # a controller that is busy for longer counts as not answering
JOB_ID = re.compile(r"([0-9]{1,10})(_[0-9]{1,10})?")  # `12`, or `12_3` for a task of an array
# What Slurm and a node tell of the time may differ by this much: munge refuses others.
CLOCKS_DIFFER_S = 300.0
END_OF_JOB_IDS = 2**32 - 2  # this number and the next one mean "all" and "none" to Slurm
# How the name of a batch script begins, as submitit's own do; the name of the submission follows, and a number.
SCRIPT_PREFIX = ".submission_file_"
SCRIPT_NAME = re.compile(re.escape(SCRIPT_PREFIX) + r"([0-9a-f]{32})-\d+\.sh")
# squeue pads each field to its width and puts this after it.
SEPARATOR = "|"
# With their widths; the last two may contain the separator. A longer path does not tell the submission.
FIELDS = {
    **dict.fromkeys(("JobArrayID", "State", "RestartCnt", "SubmitTime", "UserID", "StartTime", "PendingTime"), 64),
    **dict.fromkeys(("Reason", "BatchHost", "Name"), 255),
    "Command": 1024,
}
# A user's defaults for these commands: filters that would hide jobs, formats other than those read here.
PREFERENCES = ("SQUEUE_", "SCONTROL_", "SLURM_TIME_FORMAT")
# Slurm's reasons for a job to wait of which the words alone do not tell what to do; {job} is its id. As scontrol prints
# them: squeue prints some with spaces, for which it has no name of its own (`launch failed requeued held`).
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
    """A job as the run that it was submitted for remembers it. Its id alone is not enough: ids come again."""

    job_id: str
    user: str | None = None  # its number
    name: str | None = None  # squeue shows 255 characters of it
    submitted: str | None = None  # by Slurm's clock, as Slurm prints it; a requeue sets it to that time
    seen: str | None = None  # when it was certainly submitted already, in the same form
    submission: str | None = None  # its name, in the path of its batch script

    def is_same(self, user: str, name: str, submitted: str, restarts: int, submission: str | None = None) -> bool:
        """Whether a job with the same id, as Slurm reports it now, is this one.

        The submission tells; where sbatch is a wrapper that submits a copy of the script, user, name and time do.
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
    """Whether Slurm could have given this id to a job. One other id makes squeue refuse a whole query."""
    found = JOB_ID.fullmatch(text)
    return found is not None and 0 < int(found[1]) < END_OF_JOB_IDS


class SchedulerError(OSError):
    """Slurm does not answer, or refuses; the message is Slurm's own, on one line."""


class ForgottenError(SchedulerError):
    """Slurm answers that it knows no such job: it is over for long, or Slurm has lost it."""


def missing_commands() -> list[str]:
    """Slurm's commands that are not on this machine's PATH."""
    return [name for name in COMMANDS if processes.find_command(name) is None]


def ask(*command: str, text: str | None = None) -> str:
    """The standard output of a Slurm command; `text` is its standard input.

    Raises:
        SchedulerError: the command does not exist, failed, or took longer than TIMEOUT_S.
        ForgottenError: Slurm knows no job with the id in question.
    """
    env = {name: value for name, value in processes.environment.items() if not name.startswith(PREFERENCES)}
    env["TZ"] = "UTC0"  # times are compared between shells and machines, and must not repeat
    if processes.find_command(command[0]) is None:
        raise SchedulerError(f"{command[0]} is not on this machine's PATH")
    try:
        # Slurm's signals reach every process of the job, in whatever session; others reach its process group. And a
        # requeue is answered while the job is being killed for it.
        done = processes.run_shielded(command, given=text, timeout=TIMEOUT_S, env=env, start_new_session=True)
    except subprocess.TimeoutExpired:
        raise SchedulerError(f"{command[0]} did not answer within {TIMEOUT_S} s") from None
    except OSError as error:  # no memory for another process, say: it may work the next time
        raise SchedulerError(f"{command[0]} cannot be started: {error.strerror or error}") from None
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        message = lines[-1] if lines else f"{command[0]} exited with status {done.returncode}"
        # (squeue says "Invalid job id: TEXT" of what could be none.)
        kind = ForgottenError if "invalid job id specified" in message.lower() else SchedulerError
        raise kind(re.sub(r"^\w+: (error: )*", "", message).strip())
    return done.stdout


def fields(line: str) -> dict[str, str]:
    """The `Key=Value` words of one line of `scontrol show -o`."""
    return dict(word.split("=", 1) for word in line.split() if "=" in word)


def show_job(job_id: str) -> dict[str, str]:
    """The record of a job, up to its command; `Command` is the rest of the line, users' texts with spaces and all.

    Raises:
        SchedulerError: Slurm does not answer, or has forgotten the job.
    """
    line, _, command = ask("scontrol", "show", "job", "-o", job_id).partition(" Command=")
    before, _, rest = line.partition(" JobName=")
    name, found, after = rest.partition(" UserId=")
    record = {**fields(f"{before} UserId={after}"), "JobName": name} if found else fields(line)
    return {**record, "Command": command} if command else record


def show_partitions() -> dict[str, dict[str, str]]:
    """The partitions by name, hidden ones too."""
    rows = [fields(line) for line in ask("scontrol", "show", "partition", "-o", "--all").splitlines()]
    return {row["PartitionName"]: row for row in rows if "PartitionName" in row}


def show_config() -> dict[str, str]:
    """Slurm's own configuration."""
    pairs = (line.split("=", 1) for line in ask("scontrol", "show", "config").splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def show_nodes(nodes: str) -> list[dict[str, str]]:
    """Read the records of a list of nodes such as `n[1-2]`.

    Raises:
        SchedulerError: Slurm does not answer, or does not know them.
    """
    # The reason why a node is drained follows, a user's text.
    lines = ask("scontrol", "show", "node", "-o", nodes).splitlines()
    return [fields(line.partition(" Reason=")[0]) for line in lines]


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


def known_jobs(jobs: Iterable[RecordedJob]) -> dict[RecordedJob, JobInfo]:
    """Those of `jobs` that Slurm remembers, by one call of squeue; not others that have come to the same ids.

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
    except ForgottenError:  # all of them
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
    """The name of the submission in the path of its batch script; None if it is no submission's."""
    found = SCRIPT_NAME.search(script)
    return found[1] if found else None


def live_scripts(user: str) -> dict[str, str]:
    """The batch script of each job of a user (their number) that is not over, as sbatch was given it.

    Raises:
        SchedulerError: Slurm does not answer.
    """
    # --all: jobs in hidden partitions too. The script is last, since a path may contain the separator.
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
    """Read a time as Slurm prints it (see `ask`), in seconds since 1970; None where Slurm knows none."""
    try:
        return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def _explained(reason: str, job_id: str) -> str | None:
    """Slurm's reason for a job to wait, with what it means where the words do not tell."""
    if reason in ("", "None"):
        return None
    meaning = REASONS.get(reason.partition(",")[0].replace(" ", "_"))
    return reason if meaning is None else f"{reason}: {meaning.format(job=job_id)}"
