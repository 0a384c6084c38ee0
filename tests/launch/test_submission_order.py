"""What a command checks first: finished and queued runs need no scheduler, and a refusal leaves no files."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_fixtures import command, conf, run
from fake_launcher import Command, FakeLauncher, finish, run_dirs
from fake_slurm import FakeSlurm, slurm

from runner.contracts import JobInfo
from runner.errors import ExitStatus
from runner.system import files

__all__ = ["command", "conf", "run", "slurm"]

HERE = "run.dir=outputs/here"  # a name of its own need not be derived from the config


def test_a_finished_run_needs_no_scheduler(run: Command, capsys: pytest.CaptureFixture[str]) -> None:
    """The job may be in a slow epilog, the controller away, the cluster drained."""
    assert run(HERE) == 0
    finish(run_dirs()[0], 300)
    capsys.readouterr()
    FakeLauncher.answers, FakeLauncher.errors = False, ["Slurm does not answer"]
    FakeLauncher.launched.clear()
    assert run(HERE) == ExitStatus.FINISHED
    assert "finished, all 300 steps" in capsys.readouterr().out
    assert FakeLauncher.launched == []
    assert run(HERE, "train.steps=400") == ExitStatus.USAGE  # more steps are requested: now a scheduler must answer


def test_a_queued_run_is_not_checked_again(run: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(HERE) == 0
    FakeLauncher.queued[run_dirs()[0]] = JobInfo("12", "suspended")
    FakeLauncher.errors = ["too few nodes"]
    assert run(HERE) == ExitStatus.FINISHED
    assert "suspended, job 12" in capsys.readouterr().out


@pytest.mark.slow
def test_refusal_of_sbatch_is_final_and_leaves_nothing(
    command: Command, slurm: FakeSlurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm.fails("sbatch", "sbatch: error: Batch job submission failed: Invalid qos specification\n")
    sweep = ("-m", "launcher=slurm", "launcher.check_folder=false", "experiment=smoke", "seed=1,2", "run.root=a/b")
    assert command(*sweep) == ExitStatus.USAGE
    assert "nothing was submitted: sbatch: error: Batch job submission failed: Invalid qos" in capsys.readouterr().err
    assert not Path("a").exists()
    (slurm.folder / "sbatch.err").unlink()
    assert command(*sweep) == ExitStatus.FINISHED
    assert len(list(Path("a/b").glob("*/job.json"))) == 2


SBATCH_ONCE = """\
#!/bin/sh
if [ -e {folder}/once ]; then echo "sbatch: error: Slurm job queue full" >&2; exit 1; fi
touch {folder}/once
echo Submitted batch job 12
"""


def test_the_directory_of_a_submitted_run_is_never_renamed(
    command: Command, slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job may run already, although a later array of the same command was refused."""
    slurm.prints("scontrol_show_config", "MaxArraySize = 2\n")
    (slurm.folder / "sbatch").write_text(SBATCH_ONCE.format(folder=slurm.folder))
    renamed: list[Path] = []
    rename = files.rename

    def recording(source: Path, target: Path) -> None:
        if Path(source).is_dir() and not Path(source).name.startswith("."):  # at first
            renamed.append(Path(source))
        rename(source, target)

    monkeypatch.setattr(files, "rename", recording)
    sweep = ("-m", "launcher=slurm", "launcher.check_folder=false", "experiment=smoke", "seed=1,2,3", "run.root=a/b")
    assert command(*sweep) == ExitStatus.USAGE
    left = sorted(path.parent for path in Path("a/b").glob("*/job.json"))
    assert len(left) == len(list(Path("a/b").glob("*/config.yaml"))) == 2
    assert len(renamed) == 1
    assert {path.name for path in left}.isdisjoint(path.name for path in renamed)
