"""The commands of docs/slurm.md and docs/status.md do what the pages say (nothing is submitted)."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from fake_slurm import FakeSlurm, slurm

__all__ = ["slurm"]

ROOT = Path(__file__).parents[2]


def commands(page: str) -> list[str]:
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def options_of(page: str) -> set[str]:
    """The options of the launcher that a page names."""
    return set(re.findall(r"launcher\.(\w+)", (ROOT / "docs" / page).read_text()))


@pytest.mark.slow
@pytest.mark.parametrize("command", [*commands("slurm.md"), *commands("status.md")])
def test_the_command_works(command: str, slurm: FakeSlurm, tmp_path: Path) -> None:
    slurm.prints("scontrol_show_partition", "PartitionName=gpu Default=YES MaxTime=1-0 Nodes=n1\n")
    words = [sys.executable if word == "python" else word for word in shlex.split(command)]
    if words[3:4] == ["doctor"]:
        words += ["experiment=smoke", f"run.root={tmp_path}"]
    elif "=" in words[3] or words[3].startswith("-"):
        words += ["launcher.dry_run=true", f"run.root={tmp_path}"]
    Path("outputs").mkdir()
    # As on a terminal, where what is watched shows at once.
    terminal = {**os.environ, "FORCE_COLOR": "1", "TERM": "xterm"}
    with subprocess.Popen(words, env=terminal, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        if "--watch" in words:  # it refreshes until Ctrl-C
            assert process.stdout is not None
            assert process.stdout.read(1)
            process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    assert not slurm.calls("sbatch /")  # a script, that is a submission


def test_every_option_in_the_docs_exists_and_every_option_is_explained() -> None:
    import dataclasses

    import yaml

    from launch.local import LocalLauncher
    from launch.slurm import SlurmLauncher

    for name, launcher in (("slurm", SlurmLauncher), ("local", LocalLauncher)):
        text = (ROOT / "conf" / "launcher" / f"{name}.yaml").read_text()
        shipped = yaml.safe_load(text)
        fields = {field.name for field in dataclasses.fields(launcher)} - {"command", "wait"}
        assert shipped.keys() - {"_target_", "wait"} == fields
        made = launcher(**{key: value for key, value in shipped.items() if key != "_target_"})
        assert made == launcher()  # the file says what the class does without it
        for option in fields:
            assert re.search(rf"^{option}:.*#", text, re.MULTILINE), f"{option} has no comment"
    assert options_of("slurm.md") | options_of("status.md") <= {
        field.name for field in dataclasses.fields(SlurmLauncher)
    }
