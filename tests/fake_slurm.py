"""Slurm's commands as small scripts on PATH: what they print is a file, what they were asked is another."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SCRIPT = """\
#!/bin/sh
echo "$(basename "$0") $*" >> {folder}/calls
key=$(echo "$(basename "$0") $1 $2" | tr ' /' '__')
if [ -f {folder}/"$key".then ]; then rm -f {folder}/$(cat {folder}/"$key".then); fi
for name in "$key" "$(basename "$0")"; do
    if [ -f {folder}/"$name".err ]; then cat {folder}/"$name".err >&2; exit 1; fi
    if [ -f {folder}/"$name".out ]; then cat {folder}/"$name".out; exit 0; fi
done
"""
PARTITIONS = (
    "PartitionName=low Default=YES GraceTime=20 MaxTime=1-00:00:00 Nodes=n[1-2] PreemptMode=REQUEUE\n"
    "PartitionName=high Default=NO GraceTime=0 MaxTime=UNLIMITED Nodes=n[1-2] PreemptMode=OFF\n"
)
CONFIG = "KillWait = 30 sec\nMaxArraySize = 11\nPreemptType = preempt/partition_prio\nPreemptMode = REQUEUE\n"


class FakeSlurm:
    """The process boundary: no class of ours is replaced."""

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

    def prints(self, command: str, text: str) -> None:
        """`command` (its name, or name_word_word) succeeds with `text` from now on."""
        (self.folder / f"{command}.err").unlink(missing_ok=True)
        (self.folder / f"{command}.out").write_text(text)

    def fails(self, command: str, text: str) -> None:
        """`command` fails with `text` on standard error from now on."""
        (self.folder / f"{command}.err").write_text(text)

    def calls(self, command: str = "") -> list[str]:
        """The command lines so far that begin with `command`."""
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(command)]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path / "slurm", monkeypatch)
