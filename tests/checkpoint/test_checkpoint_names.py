"""The step in a manifest counts, not the name; foreign entries are left alone."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoints import Toy, manager, names, train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.checkpoint import restore_train_state
from runner.checkpoint.files import choice
from runner.checkpoint.files.directory import Directory, Folder
from runner.checkpoint.files.store import Fence, step_name
from runner.errors import CheckpointError
from runner.rundir.paths import RunDir
from runner.system import clock, files


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, str]]:
    """Return checkpoints of steps 1 to 3, and what each holds."""
    directory = tmp_path_factory.mktemp("trained") / "checkpoints"
    return directory, train(directory, 3, keep_last=9)


@pytest.fixture
def run(trained: tuple[Path, dict[int, str]], tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained[0], tmp_path / "checkpoints"))


def load(directory: Path) -> tuple[Toy, int]:
    toy = Toy(seed=9)
    state = manager(directory).load(toy.model, toy.optimizer)
    toy.step, _, _ = restore_train_state(state or {}, toy.scheduler, toy.loader)
    return toy, toy.step


def tree(path: Path) -> dict[str, bytes]:
    """Return every file below `path`."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_copy_under_a_name_that_the_run_needs_costs_nothing(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that trusted the name would finish at step 6 with the state of step 2."""
    shutil.copytree(run / "step_00000002", run / "step_00000006")
    toy, step = load(run)
    assert step == 3
    assert "step_00000006 (it contains step 2" in caplog.text
    saving = manager(run, keep_last=9)
    for _ in range(3):
        toy.train()
        assert toy.save(saving)
    again, step = load(run)
    assert (step, again.digest()) == (6, toy.digest())
    assert tree(run / "step_00000006.misnamed") == tree(run / "step_00000002")
    assert "step_00000006 is misnamed" in caplog.text


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([0, 2, 4, 9]), st.booleans(), st.booleans())))
def test_only_true_names_of_checkpoints_are_used(
    trained: tuple[Path, dict[int, str]],
    tmp_path_factory: pytest.TempPathFactory,
    changes: list[tuple[int, int, bool, bool]],
) -> None:
    source, digests = trained
    run = tmp_path_factory.mktemp("renamed") / "checkpoints"
    shutil.copytree(source, run)
    for origin, step, short, move in changes:
        one = run / step_name(origin)
        other = run / (f"step_{step}" if short else step_name(step))
        if one.is_dir() and not other.exists():
            one.rename(other) if move else shutil.copytree(one, other)
    true = [step for step in (1, 2, 3) if (run / step_name(step)).is_dir()]
    true = [step for step in true if choice.judge(Folder(run / step_name(step))).step == step]  # type: ignore[union-attr]
    before = tree(run)
    assert RunDir(run.parent).checkpoint_steps() == true
    if not true:
        with pytest.raises(CheckpointError, match="it contains step"):
            load(run)
        return
    toy, step = load(run)
    assert (step, toy.digest()) == (max(true), digests[max(true)])
    assert tree(run) == before
    toy.step = 4
    assert toy.save(manager(run, keep_last=1))
    assert load(run)[1] == 4


def other_tool(path: Path) -> None:
    path.mkdir()
    torch.save({"weights": torch.ones(3)}, path / "model.pt")
    (path / "tensors.json").write_bytes(b"not ours")


def other_manifest(path: Path) -> None:
    path.mkdir()
    (path / "manifest.json").write_text('{"step": 6, "files": ["model.pt"]}')


def a_file(path: Path) -> None:
    path.write_text("notes")


def a_link(path: Path) -> None:
    path.symlink_to(path.parent.parent)


def a_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("put", [other_tool, other_manifest, a_file, a_link, a_dangling_link])
@pytest.mark.parametrize("name", ["step_6", "step_00000006"])
def test_foreign_entries_are_left_alone(
    run: Path, put: Callable[[Path], None], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    put(run / name)
    before = tree(run / name) if (run / name).is_dir() and not (run / name).is_symlink() else None
    toy, step = load(run)
    assert step == 3
    assert caplog.text.count(f"{name} (it ") == 1
    assert RunDir(run.parent).checkpoint_steps() == [1, 2, 3]
    saving = manager(run, keep_last=1)
    saved = []
    for _ in range(4):
        toy.train()
        saved.append(toy.save(saving))
    wanted = name == "step_00000006"
    assert saved == [True, True, not wanted, True]
    if wanted:
        assert "is in the way" in caplog.text
        assert "move it to another name" in caplog.text
    assert names(run) == sorted(["step_00000007", name])
    assert (tree(run / name) if before is not None else None) == before
    assert load(run)[0].digest() == toy.digest()


def test_run_with_only_foreign_checkpoints_starts_at_step_0(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other_tool(tmp_path / "step_00000006")
    assert load(tmp_path)[1] == 0
    assert "it has no manifest of this runner" in caplog.text


def test_an_empty_directory_is_foreign_and_blocks_no_save(run: Path) -> None:
    (run / "step_00000004").mkdir()
    toy, step = load(run)
    assert step == 3
    toy.train()
    assert toy.save(manager(run))
    assert load(run)[1] == 4


@pytest.mark.parametrize("lost", ["manifest.json", "train_state.pt"])
def test_checkpoint_that_lost_a_file_is_corrupt(run: Path, lost: str) -> None:
    (run / "step_00000003" / lost).unlink()
    assert load(run)[1] == 2
    assert names(run) == ["step_00000001", "step_00000002", "step_00000003.corrupt"]


@pytest.mark.parametrize("name", ["step_00000002", "step_00000002.corrupt"])
def test_a_deletion_that_was_killed_is_finished_and_not_undone(
    name: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "step_00000002").rename(run / name)

    def killed(path: Path) -> None:
        (manifest,) = path.glob("*/manifest.json")
        manifest.unlink()
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(files, "remove_tree", killed)
        with pytest.raises(InterruptedError):
            Directory(run, Fence()).delete(name)
    Directory(run, Fence()).sweep()
    assert names(run) == ["step_00000001", "step_00000003"]


def test_killed_deletion_frees_the_name_before_the_files(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power loss in between would restore the name with only part of the files."""
    calls: list[str] = []
    sync, remove = files.fsync_dir, files.remove_tree

    def killed(path: Path) -> None:
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(files, "remove_tree", killed)
        with pytest.raises(InterruptedError):
            Directory(run, Fence(1)).delete("step_00000002")

    def synced(path: Path) -> None:
        calls.append(f"sync {path.name}")
        sync(path)

    def removed(path: Path) -> None:
        calls.append("remove")
        remove(path)

    monkeypatch.setattr(files, "fsync_dir", synced)
    monkeypatch.setattr(files, "remove_tree", removed)
    Directory(run, Fence(2)).sweep()
    assert calls == [f"sync {run.name}", "remove"]


@pytest.mark.parametrize("refusals", [3, 4])
def test_no_attempt_resumes_during_a_save_that_may_commit(
    refusals: int, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of that save may only be stopped. Its rename fails once the directory has another name."""
    unfinished = run / "step_00000004.tmp-1-99"
    unfinished.mkdir()
    left, real = [unfinished] * refusals, files.rename

    def refusing(source: Path, target: Path) -> None:
        if left and source == left[-1]:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(left.pop()))
        real(source, target)

    monkeypatch.setattr(files, "rename", refusing)
    monkeypatch.setattr(clock, "sleep", lambda seconds: None)
    if refusals == 4:
        with pytest.raises(CheckpointError, match=r"step_00000004\.tmp-1-99 was left behind .* could commit it yet"):
            Directory(run, Fence(2)).sweep()
    else:
        Directory(run, Fence(2)).sweep()
    assert unfinished.exists() == (refusals == 4)


def test_a_train_state_of_another_step_is_refused(run: Path) -> None:
    from test_checkpoint_corruption import forge

    state = torch.load(run / "step_00000003" / "train_state.pt", weights_only=True)
    torch.save({**state, "step": 2}, run / "step_00000003" / "train_state.pt")
    forge(run / "step_00000003")
    with pytest.raises(CheckpointError, match=r"is of step 2, but its manifest is of step 3"):
        load(run)
