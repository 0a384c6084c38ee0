"""The batch script, by submitit, and what submitit does not do as a run that is preempted needs it.

Tried with submitit 1.5.2 to 1.5.4. It knows the options of sbatch and writes the script (`Script`). The rest is here,
instead of in its `submit` and its `submitit.core._submit`:

- The files of a submission are named after it and not at random, so its job is told from other jobs.
- What a job is to do is JSON, not a pickle.
- sbatch's answer is kept whole: whether it refused decides whether a job may be in the queue.
- In the job no signal handlers are installed. submitit's ignore SIGTERM (every preemption) and exit in the middle of a
  step at SIGUSR2.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch.scheduler import SCRIPT_PREFIX
from runner.rundir import trust
from runner.system import clock, files, processes

FOLDER = "RUNNER_JOB_FOLDER"
"""The variable with the folder of the job's files, in the job."""
WAIT_S = 60  # for the command to write down the id of its job


class RefusedError(RuntimeError):
    """sbatch failed; the message is its own. `status` is negative if a signal ended it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Start:
    """What a job is to do: the arguments of `launch.job.start`, which explains them."""

    run_dir: str
    attempt: str
    submission: str
    max_timeouts: int | None
    requeue_killed: bool
    notice_s: int | None


def sweep_folder(parent: Path, user: str | None) -> Path:
    """Return the folder of a user's batch scripts, notes and logs of sweeps, beside the runs; the user is a number.

    Each has one of their own: what is in it is run as that user, and others may have sweeps in the same directory.
    """
    return parent / f".slurm-{user}"


def check_folder(folder: Path) -> None:
    """Refuse a folder of jobs that others can write.

    Raises:
        RunDirError: they can, or it is another user's.
        OSError: it cannot be read.
    """
    trust.check_private(folder, folder, "jobs run what its files name", "remove it, or choose another run.root")


def script(folder: Path, python: str, runs: int, parameters: dict[str, Any]) -> str:
    """The text of a batch script.

    Args:
        folder: where the files of its jobs go.
        python: the command that starts Python, as the shell reads it.
        runs: how many; an array from two on.
        parameters: the options, by submitit's names.
    """
    from submitit.slurm.slurm import SlurmExecutor

    class Script(SlurmExecutor):
        @property
        def _submitit_command_str(self) -> str:
            """What srun starts; submitit's would load a pickle."""
            return f"{self.python} -u -m launch.job {shlex.quote(str(self.folder))}"

        def text(self) -> str:
            return str(self._make_submission_file_text(self._submitit_command_str, ""))

    made = Script(folder, python=python)
    made.update_parameters(**parameters)
    if runs > 1:
        made.parameters["map_count"] = runs
    return made.text()


def submit(text: str, folder: Path, starts: Sequence[Start]) -> list[str]:
    """Submit one job, or one array; the id of the job of each start.

    Files with the name of the submission in theirs may be left if it fails.

    Raises:
        RefusedError: sbatch failed.
        RuntimeError: nobody can tell which job its answer names.
        OSError: the file system refused; the job may be in the queue.
    """
    unique = starts[0].submission
    noted = [folder / f"{unique}-{index}.json" for index in range(len(starts))]
    for path, start in zip(noted, starts, strict=True):
        files.write_atomic(path, json.dumps(asdict(start)))
    path = folder / f"{SCRIPT_PREFIX}{unique}-{len(starts)}.sh"
    files.write_atomic(path, text)
    done = processes.run(["sbatch", str(path)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RefusedError(str(done.stderr or done.stdout), done.returncode)
    found = re.search(r"job ([0-9]+)", str(done.stdout))
    if found is None:
        raise RuntimeError(f"sbatch printed {str(done.stdout)[:200]!r}, without the id of a job")
    files.rename(path, folder / f"{found[1]}_submission.sh")
    ids = [f"{found[1]}_{index}" for index in range(len(starts))] if len(starts) > 1 else [found[1]]
    for note, job_id in zip(noted, ids, strict=True):
        files.rename(note, start_file(folder, job_id))
    return ids


def start_file(folder: Path, job_id: str) -> Path:
    """What the job with this id is to do."""
    return folder / f"{job_id}_start.json"


def find_start(folder: Path, job_id: str) -> Start | None:
    """Wait until the command has written what the job is to do; None if it does not.

    Raises:
        OSError: it cannot be read.
    """
    for _ in range(WAIT_S):
        if found := files.read_object(start_file(folder, job_id)):
            return Start(**found)
        clock.sleep(1.0)
    return None
