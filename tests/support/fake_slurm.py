"""Fake Slurm's commands with small scripts on PATH that print a file and record their arguments."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch import requeue, scheduler

SCRIPT = """\
#!/bin/sh
echo "$(basename "$0") $*" >> {folder}/calls
case $0 in */sbatch) echo "$1" > {folder}/script;; esac
key=$(echo "$(basename "$0") $1 $2" | tr ' /' '__')
if [ -f {folder}/"$key".then ]; then rm -f {folder}/$(cat {folder}/"$key".then); fi
for name in "$key" "$(basename "$0")"; do
    if [ -f {folder}/"$name".err ]; then cat {folder}/"$name".err >&2; exit 1; fi
    if [ -f {folder}/"$name".out ]; then
        script=$(cat {folder}/script 2>/dev/null)
        exec sed "s|@script@|$script|" {folder}/"$name".out
    fi
done
"""
PARTITIONS = (
    "PartitionName=low Default=YES GraceTime=20 MaxTime=1-00:00:00 Nodes=n[1-2] TotalNodes=2 PreemptMode=REQUEUE\n"
    "PartitionName=high Default=NO GraceTime=0 MaxTime=UNLIMITED Nodes=n[1-2] PreemptMode=OFF\n"
)
CONFIG = "KillWait = 30 sec\nMaxArraySize = 11\nPreemptType = preempt/partition_prio\nPreemptMode = REQUEUE\n"
SUBMITTED = "2026-01-01T00:00:00"
RUNNING = {"JobState": "RUNNING", "Restarts": "0", "Reason": "None", "PreemptTime": "None"}
"""The record of a running job."""


class FakeSlurm:
    """Fakes of Slurm at the process boundary. They replace no class of the project."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        for name in ("sbatch", "srun", "squeue", "scontrol", "scancel"):
            script = folder / name
            script.write_text(SCRIPT.format(folder=folder))
            script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}/usr/bin{os.pathsep}/bin")
        for name in [name for name in os.environ if name.startswith(("SLURM_", "SUBMITIT_"))]:
            monkeypatch.delenv(name)
        self.prints("scontrol_show_partition", PARTITIONS)
        self.prints("scontrol_show_config", CONFIG)
        self.prints("scontrol_show_node", f"NodeName=n1 NodeHostName={os.uname().nodename}\n")
        self.prints("sbatch", "Submitted batch job 12\n")
        self.shows_job(SubmitTime=SUBMITTED)

    def prints(self, command: str, text: str) -> None:
        """Let `command` (its name, or name_word_word) succeed and print `text` from now on."""
        (self.folder / f"{command}.err").unlink(missing_ok=True)
        (self.folder / f"{command}.out").write_text(text)

    def fails(self, command: str, text: str) -> None:
        """Let `command` fail and print `text` to standard error from now on."""
        (self.folder / f"{command}.err").write_text(text)

    def shows_job(self, **fields: str) -> None:
        """Let `scontrol show job` print this record of the last submitted job from now on."""
        self.prints("scontrol_show_job", job_line(**{**fields, "Command": "@script@"}))

    def calls(self, command: str = "") -> list[str]:
        """Return the recorded command lines that begin with `command`."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(command)]


def row(job_id: str, state: str = "PENDING", reason: str = "None", restarts: int = 0, **fields: str) -> str:
    """Return a row of squeue as `scheduler` reads it, by default of a job that this user submitted at SUBMITTED."""
    cells = {"JobArrayID": job_id, "State": state, "Reason": reason, "RestartCnt": restarts, "BatchHost": "n1"}
    cells |= {"SubmitTime": SUBMITTED, "UserID": os.getuid(), "Name": "run", "Command": "/spool/copy.sh"}
    cells |= {"StartTime": "N/A", "PendingTime": "0", **fields}
    return "".join(f"{cells[name]} |" for name in scheduler.FIELDS) + "\n"


def job_line(**fields: str) -> str:
    """Return the record of a job as `scontrol show job -o` prints it."""
    return " ".join(f"{key}={value}" for key, value in {"JobId": "12", **fields}.items()) + "\n"


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "slurm", monkeypatch)


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """Return three run directories."""
    made = [tmp_path / "outputs" / f"run{index}" for index in range(3)]
    for run in made:
        run.mkdir(parents=True)
    return made


@pytest.fixture
def inside(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSlurm]:
    """Let this process be task 1 of array 12, with job id 13. Waits are short."""
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "1")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setattr(requeue, "RETRY_S", 0.01)
    monkeypatch.setattr(requeue, "STATE_CHECK_PAUSE_S", 0.01)
    yield slurm
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.cancel()
            thread.join()
