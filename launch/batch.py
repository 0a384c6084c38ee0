"""Write batch scripts with submitit, and submit them without the parts of submitit that break preempted runs.

Tested with submitit 1.5.2 to 1.5.4. submitit knows the options of sbatch and writes the script (`Script`). This module
replaces its `submit` and `submitit.core._submit`:

- The files of a submission contain its name instead of a random one, so that its job can be identified.
- The job reads JSON, not a pickle.
- sbatch's complete answer is kept, because it shows whether a job may be in the queue.
- The job installs no signal handlers. submitit's handlers ignore SIGTERM (every preemption), and exit in the middle of
  a step at SIGUSR2.
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
"""The environment variable of the job that holds the folder of its files."""
WAIT_S = 60  # how long a job waits for the command to record its id


class RefusedError(RuntimeError):
    """sbatch failed. The message is sbatch's own. `status` is its exit status, negative if a signal killed it."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Start:
    """The arguments of `launch.job.start`, stored for one job."""

    run_dir: str
    attempt: str
    submission: str
    max_timeouts: int | None
    requeue_killed: bool
    notice_s: int | None


def sweep_folder(parent: Path, user: str | None) -> Path:
    """Return the folder next to the runs for the batch scripts, notes and sweep logs of the user with id `user`.

    Each user has a separate folder, because jobs execute its files as that user, and several users may have sweeps in
        one directory.
    """
    return parent / f".slurm-{user}"


def check_folder(folder: Path) -> None:
    """Refuse a job folder that other users can write to.

    Raises:
        RunDirError: other users can write to the folder, or it belongs to one of them.
        OSError: the folder cannot be read.
    """
    trust.check_private(folder, folder, "jobs run what its files name", "remove it, or choose another run.root")


def script(folder: Path, python: str, runs: int, parameters: dict[str, Any]) -> str:
    """Return the text of a batch script.

    Args:
        folder: directory for the files of the script's jobs.
        python: the command that starts Python, quoted for the shell.
        runs: number of runs; two or more make an array.
        parameters: sbatch options under submitit's names.
    """
    from submitit.slurm.slurm import SlurmExecutor

    class Script(SlurmExecutor):
        @property
        def _submitit_command_str(self) -> str:
            """Return the command that srun starts, because submitit's would load a pickle."""
            return f"{self.python} -u -m launch.job {shlex.quote(str(self.folder))}"

        def text(self) -> str:
            return str(self._make_submission_file_text(self._submitit_command_str, ""))

    made = Script(folder, python=python)
    made.update_parameters(**parameters)
    if runs > 1:
        made.parameters["map_count"] = runs
    return made.text()


def submit(text: str, folder: Path, starts: Sequence[Start]) -> list[str]:
    """Submit one job or one array, and return the job id of each start.

    After a failure, files whose names contain the submission's name may be left.

    Raises:
        RefusedError: sbatch failed.
        RuntimeError: sbatch's answer names no job.
        OSError: a file cannot be written; the job may be in the queue.
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
    """Return the path of the file with the `Start` of a job."""
    return folder / f"{job_id}_start.json"


def find_start(folder: Path, job_id: str) -> Start | None:
    """Wait until the command has recorded the `Start` of this job, and return it. Return None after WAIT_S.

    Raises:
        OSError: the file cannot be read.
    """
    for _ in range(WAIT_S):
        if found := files.read_object(start_file(folder, job_id)):
            return Start(**found)
        clock.sleep(1.0)
    return None
