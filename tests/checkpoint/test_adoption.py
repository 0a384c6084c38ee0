"""Checkpoints that another run takes over: all or nothing, whatever happens to either run during this."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from checkpoints import Toy, manager, names, train
from faults import failing, intercepted, interrupted, killed

from runner.checkpoint.files import choice
from runner.checkpoint.files.adoption import adopt
from runner.checkpoint.files.directory import Directory, Folder
from runner.checkpoint.files.store import Fence
from runner.errors import CheckpointError, SupersededError
from runner.system import files

STEP = "step_00000002"


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    directory = tmp_path_factory.mktemp("template") / "trunk"
    return directory, train(directory, 3)


@pytest.fixture
def trunk(template: tuple[Path, dict[int, str]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(template[0], tmp_path / "trunk"))


def loaded(directory: Path) -> str:
    """Return the digest of what a run loads after a take-over."""
    toy = Toy(seed=1)
    manager(directory).load(toy.model, toy.optimizer)
    return toy.digest()


def contents(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.parametrize("linked", [True, False], ids=["links", "copies"])
def test_an_adopted_checkpoint_is_equal_and_outlives_its_origin(
    template: tuple[Path, dict[int, str]], trunk: Path, tmp_path: Path, linked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(source: Path, target: Path) -> None:
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    if not linked:
        monkeypatch.setattr(files, "link", refused)
    before = contents(trunk)
    adopt(trunk / STEP, tmp_path / "branch", Fence())
    adopt(trunk / STEP, tmp_path / "branch", Fence())  # it is there already
    assert contents(trunk) == before
    shutil.rmtree(trunk)
    assert names(tmp_path / "branch") == [STEP]
    assert loaded(tmp_path / "branch") == template[1][2]


def test_leftovers_of_a_reused_process_id_do_no_harm(trunk: Path, tmp_path: Path) -> None:
    """In a container each command may have the same PID. An attempt, which has a number, removes the leftovers."""
    branch = tmp_path / "branch"
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("runner.checkpoint.files.manifest.verify", Mock(side_effect=KeyboardInterrupt))
            patch.setattr("runner.checkpoint.files.commit.remove_tree", Mock())  # it was killed, and cleans nothing up
            with pytest.raises(KeyboardInterrupt):
                adopt(trunk / STEP, branch, Fence())
    assert len(names(branch)) == 2
    adopt(trunk / STEP, branch, Fence())
    Directory(branch, Fence(1)).sweep()
    assert names(branch) == [STEP]


def each_change(trunk: Path, directory: Path, act: Callable[[int, Path], object]) -> int:
    """Call `act` with the number of each change that a take-over makes. Return the number of changes."""
    with intercepted() as trace:
        adopt(trunk / STEP, directory / "count", Fence())
    for number in range(trace.count):
        act(number, directory / str(number))
    return trace.count


def test_killed_before_each_change(template: tuple[Path, dict[int, str]], trunk: Path, tmp_path: Path) -> None:
    """Take it over again: it is complete, and no leftovers remain once it is loaded."""

    def kill(number: int, branch: Path) -> None:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            with intercepted(killed(number)):
                adopt(trunk / STEP, branch, Fence())
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
        committed = isinstance(choice.judge(Folder(branch / STEP)), choice.Candidate)
        if committed:
            assert loaded(branch) == template[1][2]
        adopt(trunk / STEP, branch, Fence())
        assert loaded(branch) == template[1][2]
        assert names(branch) == [STEP]

    before = contents(trunk)
    assert each_change(trunk, tmp_path, kill) > 5
    assert contents(trunk) == before


def test_deleted_before_each_change(template: tuple[Path, dict[int, str]], trunk: Path, tmp_path: Path) -> None:
    """Prune during a fork: the result is either one error line or a valid checkpoint."""
    outcomes = set()

    def delete(number: int, branch: Path) -> None:
        other = Path(shutil.copytree(trunk, branch.with_name(f"trunk-{number}")))
        whole = True
        try:
            with intercepted(interrupted(number, lambda: Directory(other, Fence(7)).delete(STEP))):
                adopt(other / STEP, branch, Fence())
        except CheckpointError as error:
            whole, reason = False, str(error)
        if not whole:
            assert reason == f"{other / STEP} cannot be taken over: it was deleted meanwhile"
            assert names(branch) == []
        assert not whole or loaded(branch) == template[1][2]
        outcomes.add(whole)

    each_change(trunk, tmp_path, delete)
    assert outcomes == {True, False}


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=lambda code: errno.errorcode[code])
def test_refused_at_each_change(trunk: Path, tmp_path: Path, code: int) -> None:
    """A full or failing disk leaves no incomplete checkpoint."""

    def refuse(number: int, branch: Path) -> None:
        try:
            with intercepted(failing(number, code)):
                adopt(trunk / STEP, branch, Fence())
        except OSError:
            pass
        found = choice.judge(Folder(branch / STEP)) if branch.is_dir() else None
        assert found is None or choice.corruption_of(found) is None  # type: ignore[arg-type]

    each_change(trunk, tmp_path, refuse)


def test_a_damaged_one_is_refused_and_stays_as_it_is(trunk: Path, tmp_path: Path) -> None:
    for name in ("train_state.pt", "manifest.json", "tensors.json"):
        other = Path(shutil.copytree(trunk, tmp_path / name))
        os.truncate(other / STEP / name, 50)
        before = contents(other)
        with pytest.raises(CheckpointError, match=f"{STEP} cannot be taken over: ") as raised:
            adopt(other / STEP, tmp_path / f"of-{name}", Fence())
        assert "\n" not in str(raised.value)
        assert contents(other) == before
        assert not (tmp_path / f"of-{name}").exists() or names(tmp_path / f"of-{name}") == []
    with pytest.raises(CheckpointError, match="cannot be taken over: it is gone"):
        adopt(trunk / "step_00000009", tmp_path / "gone", Fence())


def test_a_superseded_process_takes_nothing_over(trunk: Path, tmp_path: Path) -> None:
    def superseded() -> None:
        raise SupersededError("newer")

    with pytest.raises(SupersededError):
        adopt(trunk / STEP, tmp_path / "branch", Fence(1, superseded))
    assert not (tmp_path / "branch").exists()
