"""`runner fork`: what it starts, and one-line refusals that leave no files."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from branches import hashes
from checkpoints import train
from fake_launcher import Command, FakeLauncher

from runner.checkpoint.files.adoption import adopt
from runner.checkpoint.files.store import Fence
from runner.config.composition import compose
from runner.rundir.paths import RunDir
from runner.system import files, processes
from runner.training.branch import take_over

STEPS = 6
WORDS = ["experiment=smoke", "data=mixture", "sampler=elastic", "logger=none", f"train.steps={STEPS}"]


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, shared_conf: Path) -> Path:
    """Make a trunk with saved steps 1 to 3 and the fake launcher."""
    path = tmp_path_factory.mktemp("o") / "trunk"
    train(path / "checkpoints", 3, keep_last=3)
    job = compose([*WORDS, "checkpoint.every_steps=1", "launcher=fake", f"run.dir={path}"], [shared_conf])
    (path / "config.yaml").write_text(job.text)
    (path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in (1, 2, 3)))
    return path


@pytest.fixture
def trunk(template: Path, run: Command) -> Path:
    """Copy the trunk into the current directory of the command."""
    made = Path(shutil.copytree(template, Path("o/trunk").absolute()))
    config = made / "config.yaml"
    config.write_text(config.read_text().replace(str(template), str(made)))
    return made


def branches(trunk: Path) -> list[Path]:
    return sorted(path for path in trunk.parent.iterdir() if path != trunk)


def test_a_branch_has_the_checkpoint_before_it_is_launched(trunk: Path, command: Command) -> None:
    """Compare the records up to the checkpoint, too. The trunk may change afterwards."""
    before = hashes(trunk)
    assert command("fork", "o/trunk", "--step", "2", "seed=1") == 0
    (branch,) = branches(trunk)
    assert FakeLauncher.launched == [branch]
    assert RunDir(branch).checkpoint_steps() == [2]
    assert (branch / "metrics.jsonl").read_text().count("\n") == 2
    assert hashes(trunk) == before
    assert command("fork", "o/trunk", "--step", "2", "seed=1") == 0
    assert branches(trunk) == [branch]


def test_the_name_of_a_trunk_may_look_like_a_setting(trunk: Path, command: Command) -> None:
    trunk.rename("o/lr=1")
    assert command("fork", "o/lr=1", "--step", "2", "seed=1") == 0
    (branch,) = FakeLauncher.launched
    assert branch.name.startswith("lr=1-at2-seed1-")


def test_unstarted_branch_starts_at_the_step_of_its_fork(
    trunk: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("fork", "o/trunk", "--step", "2", "seed=1") == 0
    capsys.readouterr()
    assert command("fork", "o/trunk", "--step", "2", "seed=1", "-n") == 0
    assert ": starting at step 2: it was never started" in capsys.readouterr().out


@pytest.mark.slow
def test_each_value_of_a_sweep_is_a_branch(trunk: Path, command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("fork", "-m", "o/trunk", "--step", "2", "seed=1,2", "-n") == 0
    assert branches(trunk) == []
    assert "new, a branch of o/trunk at step 2" in capsys.readouterr().out
    assert command("fork", "-m", "o/trunk", "--step", "2", "seed=1,2") == 0
    assert command("-m", "fork=o/trunk@1,o/trunk@2", "seed=1,2") == 0
    assert len(branches(trunk)) == 4


@pytest.mark.parametrize("which", [0, 1, "config"])
def test_command_refused_by_the_disk_leaves_no_directory(
    trunk: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    which: int | str,
) -> None:
    """Refuse the lease of one of several runs, or a write while it is held."""
    create, write, leases = files.create, files.write_atomic, []

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def created(path: Path, content: bytes) -> None:
        leases.append(path)
        full(path) if len(leases) - 1 == which else create(path, content)

    def written(path: Path, *rest: Any, **options: Any) -> None:
        full(path) if which == path.stem else write(path, *rest, **options)

    monkeypatch.setattr(files, "create", created)
    monkeypatch.setattr(files, "write_atomic", written)
    assert command("fork", "-m", "o/trunk", "--step", "2", "seed=1,2", "run.root=there/deeper") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not Path("there").exists()


def test_a_refused_attempt_leaves_no_directory(
    run: Command, command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(files, "create", full)
    assert command("experiment=smoke", "run.dir=there/deeper") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not Path("there").exists()


def test_a_launcher_that_refuses_leaves_no_checkpoint(
    trunk: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = hashes(trunk)
    monkeypatch.setattr(FakeLauncher, "launch", lambda self, run_dirs, attempt, guards=(): 2)
    assert command("fork", "-m", "o/trunk", "--step", "2", "seed=1,2") == 2
    assert branches(trunk) == []
    assert hashes(trunk) == before


@pytest.mark.parametrize("what", ["job", "holder", "records", "files"])
def test_a_refused_run_that_another_process_uses_stays(
    trunk: Path, command: Command, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """Another command submits, trains or has trained it; or its directory existed before, with files in it."""
    branch = Path("o/b").absolute()
    if what == "files":
        branch.mkdir()
        (branch / "notes").write_text("precious")

    def refuse(launcher: FakeLauncher, run_dirs: list[Path], attempt: str, guards: Any = ()) -> int:
        run = RunDir(branch)
        if what == "job":
            run.job.write_text("{}")
        elif what == "holder":
            run.lease.mkdir(exist_ok=True)
            (run.lease / "00000001.json").write_text(json.dumps({**processes.this_process(), "released": True}))
        elif what == "records":
            run.metrics.write_text('{"step": 3, "loss": 1.0}\n')
        return 2

    monkeypatch.setattr(FakeLauncher, "launch", refuse)
    assert command("fork", "o/trunk", "--step", "2", "run.dir=o/b") == 2
    assert RunDir(branch).config.is_file()


def test_a_trunk_that_is_a_job_can_be_waited_for_by_another_job(
    trunk: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    (trunk / "job.json").write_text('{"job_id": "99"}')
    assert command("fork", "o/trunk", "--step", "5") == 2
    assert "let a job wait for it: sbatch --dependency=afterok:99 --wrap='THIS COMMAND'" in capsys.readouterr().err


def test_branch_just_trained_elsewhere_keeps_its_records(trunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing of a network file system may be seconds old, until this machine changes the directory."""
    branch, anew, really = RunDir(Path("o/branch").absolute()), set[Path](), files.list_dir
    train(branch.checkpoints, 3, keep_last=1)
    branch.metrics.write_text((trunk / "metrics.jsonl").read_text())
    before = hashes(branch.path)

    def list_dir(path: Path) -> list[str]:
        return [] if path == branch.checkpoints and path not in anew else really(path)

    monkeypatch.setattr(files, "look_anew", anew.add)
    monkeypatch.setattr(files, "list_dir", list_dir)
    take_over(branch, RunDir(trunk), 2, Fence())
    assert hashes(branch.path) == before


def test_unreadable_records_of_a_branch_are_not_replaced(trunk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    branch = RunDir(Path("o/branch").absolute())
    branch.checkpoints.mkdir(parents=True)
    branch.metrics.write_text((trunk / "metrics.jsonl").read_text())
    before = hashes(branch.path)

    def refuse(path: Path) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr(files, "look_anew", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        take_over(branch, RunDir(trunk), 2, Fence())
    assert hashes(branch.path) == before


def test_nothing_is_made_at_the_old_place_of_a_branch(trunk: Path) -> None:
    """Suspend the process between its last look and the call."""
    branch = Path("o/branch").absolute()
    branch.mkdir()
    with pytest.raises(FileNotFoundError):
        adopt(RunDir(trunk).checkpoint(2), branch / "checkpoints", Fence(1, branch.rmdir))
    assert not branch.exists()


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_and_leaves_nothing(
    trunk: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    (trunk / "checkpoints/step_00000002/train_state.pt").write_bytes(b"x")
    assert command("fork", "-m", "o/trunk", "--step", "2", "seed=1,2") == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "step_00000002 cannot be taken over: it is corrupt (train_state.pt has 1 bytes" in error
    assert branches(trunk) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["o/trunk", "--step", "4"], "every 1 steps and at its end: rerun this command once step 4 is saved"),
        (
            ["o/trunk", "--step", "7", "train.steps=9"],
            "it ends at step 6: fork a step up to that",
        ),
        (["o/trunk", "--step", "x"], "fork=o/trunk@x must be RUN@STEP"),
        (["o/none", "--step", "2"], "o/none is not a run directory; if it was removed, runner resume continues"),
        (["--step", "2"], "pass one run directory, and settings as key=value"),
        (["-m", "o/trunk", "--step", "7", "train.steps=9", "seed=1,2"], "it ends at step 6"),
        (["o/trunk", "--step", "2", "seed"], "seed: pass one run directory, and settings as key=value"),
        (["o/trunk", "--step", "2", "fork=null"], "fork=null: RUN and --step say what it is a branch of"),
        (["o/trunk", "--step", "2", "seedd=1"], "seedd"),
    ],
)
def test_refused_in_one_line(
    trunk: Path, command: Command, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert command("fork", *words) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert branches(trunk) == []


@pytest.mark.slow
def test_step_between_checkpoints_is_refused_with_the_choices(
    trunk: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(trunk / "checkpoints/step_00000002")
    assert command("fork", "o/trunk", "--step", "2") == 2
    assert "o/trunk has no checkpoint of step 2: it has those of steps 1, 3" in capsys.readouterr().err
    shutil.rmtree(trunk / "checkpoints/step_00000001")
    assert command("fork", "o/trunk", "--step", "2") == 2
    assert "o/trunk has no checkpoint of step 2: it has that of step 3" in capsys.readouterr().err
    text = (trunk / "config.yaml").read_text()
    (trunk / "config.yaml").write_text(text.replace("every_steps: 1\n", "every_steps: 3\n", 1))
    assert command("fork", "o/trunk", "--step", "5") == 2
    expected = "it is at step 3 of 6, and saves every 3 steps and at its end: fork one of those steps"
    assert expected in capsys.readouterr().err
    (trunk / "finished.json").write_text('{"steps": 6}')
    assert command("fork", "o/trunk", "--step", "6", "train.steps=9") == 2
    assert "has no checkpoint of step 6" in capsys.readouterr().err


def test_a_trunk_that_others_may_write_is_not_trusted(
    trunk: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """The config of the trunk names the classes that the branch would run."""
    trunk.chmod(0o777)
    assert command("fork", "o/trunk", "--step", "2") == 2
    assert "can be written by everybody" in capsys.readouterr().err
    assert branches(trunk) == []


def test_help_names_it(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("--help") == 0
    assert "fork RUN --step N [key=value ...]" in capsys.readouterr().out
    assert command("fork", "--help") == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("--step N", "--dry-run", "-m", "The same command is the same branch"))
