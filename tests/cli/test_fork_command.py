"""`runner fork`: what it starts, what waits for a trunk, what is refused in one line, and that then nothing is left."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from branches import hashes
from checkpoints import train
from fake_launcher import Command, FakeLauncher

from runner.checkpoint import pins as pins_of
from runner.checkpoint.adoption import adopt
from runner.checkpoint.directory import Fence
from runner.cli import start
from runner.cli.housekeeping import hidden
from runner.config.composition import compose
from runner.contracts import JobInfo
from runner.errors import UserError
from runner.rundir.lease import Lease
from runner.rundir.paths import RunDir
from runner.system import files, processes
from runner.training.branch import take_over

STEPS = 6
WORDS = ["experiment=smoke", "data=mixture", "sampler=elastic", "logger=none", f"train.steps={STEPS}"]


@dataclass
class Waiting(FakeLauncher):
    """What starts branches after their trunk."""

    trunk: Path
    status: int = 0
    started: list[Path] = field(default_factory=list)

    def launch(self, run_dirs: list[Path], attempt: str, guards: Any = ()) -> int:
        self.started.extend(run_dirs)
        if self.status == 0:
            for path in run_dirs:
                RunDir(path).job.write_text(json.dumps({"job_id": "8", "launcher": "fake_launcher.FakeLauncher"}))
        return self.status

    def preview(self, run_dirs: list[Path]) -> str:
        return f"after {self.trunk.name}: {' '.join(path.name for path in run_dirs)}"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory, shared_conf: Path) -> Path:
    """A trunk of which steps 1 to 3 were saved; its launcher is the fake one."""
    path = tmp_path_factory.mktemp("o") / "trunk"
    train(path / "checkpoints", 3, keep_last=3)
    job = compose([*WORDS, "checkpoint.every_steps=1", "launcher=fake", f"run.dir={path}"], [shared_conf])
    (path / "config.yaml").write_text(job.text)
    (path / "metrics.jsonl").write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in (1, 2, 3)))
    return path


@pytest.fixture
def trunk(template: Path, run: Command) -> Path:
    """In the current directory of the command."""
    made = Path(shutil.copytree(template, Path("o/trunk").absolute()))
    config = made / "config.yaml"
    config.write_text(config.read_text().replace(str(template), str(made)))
    return made


@pytest.fixture
def waiting(trunk: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Waiting]:
    launcher = Waiting(trunk)
    monkeypatch.setattr(FakeLauncher, "after", lambda self, run_dir: launcher if run_dir == trunk else None)
    return launcher  # type: ignore[return-value]


def branches(trunk: Path) -> list[Path]:
    return sorted(path for path in trunk.parent.iterdir() if path != trunk)


def pins(trunk: Path) -> list[str]:
    return sorted(path.name for path in (trunk / "checkpoints").glob("*.pinned"))


def test_a_branch_has_the_checkpoint_before_it_is_launched(trunk: Path, command: Command) -> None:
    """And the records up to it: whatever becomes of the trunk then."""
    before = hashes(trunk)
    assert command("fork", "o/trunk", "--step", "2", "seed=1") == 0
    (branch,) = branches(trunk)
    assert FakeLauncher.launched == [branch]
    assert RunDir(branch).checkpoint_steps() == [2]
    assert (branch / "metrics.jsonl").read_text().count("\n") == 2
    assert hashes(trunk) == before
    assert pins(trunk) == []
    assert command("fork", "o/trunk", "--step", "2", "seed=1") == 0
    assert branches(trunk) == [branch]


def test_the_name_of_a_trunk_may_look_like_a_setting(trunk: Path, command: Command) -> None:
    trunk.rename("o/lr=1")
    assert command("fork", "o/lr=1", "--step", "2", "seed=1") == 0
    (branch,) = FakeLauncher.launched
    assert branch.name.startswith("lr=1-at2-seed1-")


def test_a_branch_that_was_not_started_starts_at_the_step_of_its_fork(
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


@pytest.mark.slow
def test_a_branch_of_the_future_waits_and_its_checkpoint_is_pinned(
    trunk: Path, waiting: Waiting, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of one step wait together; the pin comes before the jobs."""
    assert command("fork", "-m", "o/trunk", "--step", "5", "seed=1,2", "-n") == 0
    assert "after trunk: trunk-at5-seed1" in capsys.readouterr().out
    assert pins(trunk) == []
    assert command("fork", "-m", "o/trunk", "--step", "5", "seed=1,2") == 0
    assert "a branch of o/trunk at step 5, which it waits for" in capsys.readouterr().out
    assert waiting.started == branches(trunk)
    assert len(waiting.started) == 2
    assert FakeLauncher.launched == []
    assert pins(trunk) == ["step_00000005.pinned"]


@pytest.mark.slow
def test_a_waiting_branch_that_left_the_queue_waits_again(trunk: Path, waiting: Waiting, command: Command) -> None:
    assert command("fork", "o/trunk", "--step", "5") == 0
    (branch,) = waiting.started
    FakeLauncher.queued = {branch: JobInfo("8", "pending", reason="Dependency")}
    assert command("fork", "o/trunk", "--step", "5") == 0
    assert waiting.started == [branch]
    FakeLauncher.queued = {}
    assert command("resume", str(branch)) == 0
    assert waiting.started == [branch, branch]
    train(trunk / "checkpoints", 5, keep_last=1)
    assert command("fork", "o/trunk", "--step", "5") == 0
    assert waiting.started == [branch, branch]
    assert FakeLauncher.launched == [branch]
    assert RunDir(branch).checkpoint_steps() == [5]


@pytest.mark.slow
def test_of_a_refused_submission_nothing_remains(trunk: Path, waiting: Waiting, command: Command) -> None:
    """Neither a directory that has a checkpoint already, nor a pin; one that is pinned by hand stays so."""
    before = hashes(trunk)
    waiting.status = 2
    assert command("fork", "o/trunk", "--step", "5") == 2
    assert command("-m", "fork=o/trunk@2,o/trunk@5") == 2
    assert [path.name for path in branches(trunk)] == []
    assert pins(trunk) == []
    (trunk / "checkpoints" / "step_00000005.pinned").touch()
    assert command("fork", "o/trunk", "--step", "5") == 2
    assert pins(trunk) == ["step_00000005.pinned"]
    assert hashes(trunk) == before


def test_what_the_disk_refuses_to_remove_of_a_refused_submission_is_named(
    trunk: Path,
    waiting: Waiting,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    waiting.status = 2
    monkeypatch.setattr(files, "remove_tree", refuse)
    assert command("fork", "o/trunk", "--step", "5") == 2
    (left,) = branches(trunk)
    warning = f"warning: o/{left.name} of the refused run cannot be removed (Disk quota exceeded): remove it by hand\n"
    assert warning in capsys.readouterr().err


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.slow
def test_a_refused_run_that_may_be_used_keeps_its_name(
    trunk: Path,
    waiting: Waiting,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    again: bool,
) -> None:
    """The disk does not tell whether somebody uses it. Where that name was taken meanwhile, the hidden one is told."""
    used = start._is_used

    def look(run: RunDir, *others: Any) -> bool:
        if not run.path.name.startswith("."):
            return used(run, *others)
        if again:
            name = run.path.name.removeprefix(".").partition(".refused-")[0]
            (run.path.parent / name / "logs").mkdir(parents=True)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    waiting.status = 2
    monkeypatch.setattr(start, "_is_used", look)
    assert command("fork", "o/trunk", "--step", "5") == 2
    left = [path.name for path in branches(trunk)]
    assert [name.startswith(".") for name in left] == ([True, False] if again else [False])
    told = f"warning: o/{left[0]} cannot be given its name o/{left[-1]} back" in capsys.readouterr().err
    assert told == again


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.slow
def test_a_run_that_a_command_was_killed_in_refusing_gets_its_name_back(
    trunk: Path, waiting: Waiting, command: Command, capsys: pytest.CaptureFixture[str], taken: bool
) -> None:
    """By the command that makes it, which finds its job then; `rm` takes it for nothing to delete."""
    words = ("fork", "o/trunk", "--step", "5")
    assert command(*words) == 0
    (branch,) = waiting.started
    aside = branch.rename(hidden(branch, "refused"))
    assert command("rm", str(branch), "--yes") == 2
    if taken:
        (branch / "logs").mkdir(parents=True)
    FakeLauncher.queued = {branch: JobInfo("8", "pending", reason="Dependency")}
    assert command(*words, "-n") == 0
    assert aside.is_dir()
    capsys.readouterr()
    assert command(*words) == 0
    assert branches(trunk) == ([aside, branch] if taken else [branch])
    assert waiting.started == [branch]
    named = f"warning: o/{aside.name} cannot be given its name o/{branch.name} back" in capsys.readouterr().err
    assert named == taken


@pytest.mark.parametrize("released", [False, True])
def test_a_refused_run_that_another_command_is_submitting_stays(
    run: Command, command: Command, monkeypatch: pytest.MonkeyPatch, released: bool
) -> None:
    """It began before this one, which makes the attempt itself, was refused; one that is over submitted nothing."""

    def refuse(lease: Lease, planned: Any) -> int:
        run = RunDir(planned.job.run_dir)
        holder = {**processes.this_process(), "host": "another", "released": released}
        run.submission.mkdir()
        (run.submission / "00000001.json").write_text(json.dumps(holder))
        raise UserError("it does not fit")

    monkeypatch.setattr(start, "_run_under", refuse)
    assert command("experiment=smoke", "run.dir=o/new") == 2
    assert Path("o/new").is_dir() != released


@pytest.mark.parametrize("which", [0, 1, "config"])
def test_of_a_command_that_is_refused_by_the_disk_no_directory_stays(
    trunk: Path,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    which: int | str,
) -> None:
    """In the lease of one of several runs, or in what is written under it."""
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


def test_of_an_attempt_that_the_disk_refuses_no_directory_stays(
    run: Command, command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(files, "create", full)
    assert command("experiment=smoke", "run.dir=there/deeper") == 2
    assert "No space left on device" in capsys.readouterr().err
    assert not Path("there").exists()


def test_who_cannot_tell_whether_a_branch_was_submitted_keeps_its_pin(
    trunk: Path, waiting: Waiting, command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And says why it was refused."""

    def refuse(*arguments: Any) -> None:
        monkeypatch.setattr(start, "_is_submitted", silent)
        raise UserError("a full disk, say")

    def silent(run: RunDir) -> bool:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(start, "_freeze", refuse)
    assert command("fork", "o/trunk", "--step", "5") == 2
    assert "a full disk, say" in capsys.readouterr().err
    assert pins(trunk) == ["step_00000005.pinned"]
    assert waiting.started == []


@pytest.mark.parametrize("step", [2, 5])
def test_a_branch_whose_checkpoint_is_deleted_meanwhile_is_not_submitted(
    trunk: Path,
    waiting: Waiting,
    command: Command,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    step: int,
) -> None:
    """One that is there when the command looks, and one that is saved and deleted before it is pinned."""
    monkeypatch.setattr(pins_of, "PAUSE_S", 0.001)
    reserve = start._reserve

    def late(*arguments: Any) -> None:
        if step == 5:
            train(trunk / "checkpoints", 6, keep_last=1)
        else:
            shutil.rmtree(RunDir(trunk).checkpoint(step))
        reserve(*arguments)

    monkeypatch.setattr(start, "_reserve", late)
    assert command("fork", "o/trunk", "--step", str(step)) != 0
    assert (
        "was saved and deleted meanwhile: fork another step\n" if step == 5 else "has no checkpoint of step 2"
    ) in capsys.readouterr().err
    assert waiting.started == FakeLauncher.launched == []
    assert branches(trunk) == []
    assert pins(trunk) == []


def test_a_refused_submission_leaves_the_pin_of_a_branch_that_was_submitted_meanwhile(
    trunk: Path, waiting: Waiting, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two commands fork the same step to come, and the one that pinned it first is refused then."""
    freeze = start._freeze
    submitted: list[int] = []

    def frozen(*arguments: Any) -> None:
        if not submitted:
            submitted.append(0)
            submitted[0] = command("fork", "o/trunk", "--step", "5", "seed=2")
            raise UserError("a full disk, say")
        freeze(*arguments)

    monkeypatch.setattr(start, "_freeze", frozen)
    assert command("fork", "o/trunk", "--step", "5", "seed=1") == 2
    assert submitted == [0]
    assert waiting.started == branches(trunk)
    assert len(waiting.started) == 1
    assert pins(trunk) == ["step_00000005.pinned"]


@pytest.mark.usefixtures("waiting")
def test_a_trunk_that_is_moved_meanwhile_is_not_made_anew(
    trunk: Path, command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither by the pin of what the branch waits for, nor does a branch remain that could never begin."""
    monkeypatch.setattr(start, "_show", lambda planned: trunk.rename("o/elsewhere"))
    assert command("fork", "o/trunk", "--step", "5") == 2
    assert "o/trunk was moved or removed meanwhile" in capsys.readouterr().err
    assert [path.name for path in Path("o").iterdir()] == ["elsewhere"]
    assert pins(Path("o/elsewhere")) == []


def test_a_launcher_that_refuses_leaves_no_checkpoint(
    trunk: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeLauncher, "launch", lambda self, run_dirs, attempt, guards=(): 2)
    assert command("fork", "o/trunk", "--step", "2") == 2
    assert branches(trunk) == []


def test_a_branch_that_another_machine_has_just_trained_keeps_its_records(
    trunk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing of a network file system may be some seconds old, until this machine changes something there."""
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


def test_who_cannot_see_what_a_branch_has_trained_replaces_no_records(
    trunk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_where_a_branch_was_moved_from_nothing_is_made(trunk: Path) -> None:
    """By a process that was suspended between its last look and the call."""
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
        (["o/trunk", "--step", "4"], "o/trunk has not saved step 4 yet: fork it once it has"),
        (
            ["o/trunk", "--step", "7", "train.steps=9"],
            "o/trunk ends at step 6: fork a step up to it",
        ),
        (["o/trunk", "--step", "x"], "fork=o/trunk@x must be RUN@STEP"),
        (["o/none", "--step", "2"], "o/none is not a run directory; if it was removed, runner resume continues"),
        (["--step", "2"], "pass one run directory, and settings as key=value"),
        (["-m", "o/trunk", "--step", "7", "train.steps=9", "seed=1,2"], "o/trunk ends at step 6"),
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
def test_a_step_between_checkpoints_is_refused_with_those_there_are(
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
    expected = "is at step 3 and will not save step 5: it saves every 3 steps and at its end; fork one of those"
    assert expected in capsys.readouterr().err
    (trunk / "finished.json").write_text('{"steps": 6}')
    assert command("fork", "o/trunk", "--step", "6", "train.steps=9") == 2
    assert "has no checkpoint of step 6" in capsys.readouterr().err


def test_a_trunk_that_others_may_write_is_not_trusted(
    trunk: Path, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its config names the classes that the branch would run."""
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
