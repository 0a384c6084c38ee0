"""Pinned checkpoints are never deleted: by retention, by prune or by an interrupted deletion."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
from checkpoints import Toy, manager, names, train
from faults import failing, intercepted, interrupted, killed

from runner.checkpoint.files import choice, pins
from runner.checkpoint.files import directory as checkpoint_dir
from runner.checkpoint.files.directory import Directory, Folder
from runner.checkpoint.files.pins import is_pinned, pin, pinned, unpin
from runner.checkpoint.files.store import Fence, step_name
from runner.rundir.paths import RunDir
from runner.system import clock, files


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Save checkpoints of steps 1 to 3."""
    train(tmp_path / "checkpoints", 3, keep_last=10)
    return tmp_path / "checkpoints"


def test_pins_are_set_listed_and_removed(saved: Path) -> None:
    assert pinned(saved) == pinned(saved / "nowhere") == set()
    assert pin(saved / step_name(2))
    assert pin(saved / step_name(2))
    assert pin(saved / step_name(3))
    assert pinned(saved) == {2, 3}
    assert not is_pinned(saved / step_name(1))
    assert is_pinned(saved / step_name(2))
    unpin(saved / step_name(2))
    unpin(saved / step_name(2))
    assert pinned(saved) == {3}


def test_a_pin_of_a_killed_process_is_made_durable(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that set the pin may have been killed before its name was synced."""
    synced: list[Path] = []
    monkeypatch.setattr(files, "fsync_dir", synced.append)
    assert pin(saved / step_name(2))
    assert pin(saved / step_name(2))
    assert synced == [saved, saved]


def test_a_pin_is_not_taken_for_a_checkpoint(saved: Path) -> None:
    pin(saved / step_name(3))
    assert [one.step for one in choice.candidates(Directory(saved))] == [3, 2, 1]
    assert choice.strangers(Directory(saved)) == []
    assert checkpoint_dir.leftovers(saved) == []
    assert RunDir(saved.parent).checkpoint_steps() == [1, 2, 3]


def test_retention_keeps_pinned_checkpoints_and_the_newest(saved: Path) -> None:
    """Retention deletes the checkpoint at the next save after the pin was removed."""
    pin(saved / step_name(1))
    toy = Toy()
    keeping = manager(saved, keep_last=2)
    keeping.load(toy.model, toy.optimizer)
    for step in (4, 5):
        toy.step = step
        assert toy.save(keeping)
    assert [one.step for one in choice.candidates(Directory(saved))] == [5, 4, 1]
    unpin(saved / step_name(1))
    toy.step = 6
    assert toy.save(keeping)
    assert [one.step for one in choice.candidates(Directory(saved))] == [6, 5]


def test_a_deleted_checkpoint_is_not_pinned(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "sleep", lambda seconds: None)
    assert not pin(saved / step_name(9))
    assert pinned(saved) == set()


def test_a_pin_that_the_disk_refuses_is_none(saved: Path) -> None:
    for number in range(3):
        with intercepted(failing(number, errno.ENOSPC)), pytest.raises(OSError, match="No space"):
            pin(saved / step_name(2))
        assert pinned(saved) == set()


def test_pin_set_during_a_deletion_holds_or_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pin before each change of the deletion: `pin` succeeds and the checkpoint is there, or neither."""
    monkeypatch.setattr(pins, "LOOKS", 1)
    monkeypatch.setattr(clock, "sleep", lambda seconds: None)
    results = set()
    for number in range(changes_of_a_deletion(saved.parent)):
        path = saved.parent / f"checkpoints{number}" / step_name(1)
        train(path.parent, 1)
        answers: list[bool] = []
        with intercepted(interrupted(number, lambda path=path, answers=answers: answers.append(pin(path)))):  # type: ignore[misc]
            Directory(path.parent, Fence()).delete(path.name)
        # A pin refused while the checkpoint was moved aside: it may be back, without the pin.
        assert (answers[0], is_pinned(path)) in {(True, True), (False, False)}, number
        assert not answers[0] or verified(path), number
        assert not checkpoint_dir.leftovers(path.parent)
        results.add(answers[0])
    assert results == {True, False}


def test_kill_during_a_deletion_loses_nothing_pinned(saved: Path) -> None:
    """Retention looked before the pin was set, and is killed before it looks again."""
    for number in range(changes_of_a_deletion(saved.parent)):
        path = saved.parent / f"checkpoints{number}" / step_name(1)
        train(path.parent, 1)
        assert pin(path)
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            with intercepted(killed(number)):
                Directory(path.parent, Fence()).delete(path.name)
            os._exit(0)
        os.waitpid(child, 0)
        Directory(path.parent, Fence(1)).sweep()  # the next attempt
        assert verified(path), number
        assert names(path.parent) == [step_name(1), f"{step_name(1)}.pinned"], number


def test_kill_during_a_deletion_leaves_all_or_nothing_unpinned(saved: Path) -> None:
    for number in range(changes_of_a_deletion(saved.parent)):
        path = saved.parent / f"checkpoints{number}" / step_name(1)
        train(path.parent, 1)
        if (child := os.fork()) == 0:
            with intercepted(killed(number)):
                Directory(path.parent, Fence()).delete(path.name)
            os._exit(0)
        os.waitpid(child, 0)
        if path.is_dir() and number % 2:
            pin(path)
        Directory(path.parent, Fence(1)).sweep()
        assert not path.exists() or verified(path), number
        assert not checkpoint_dir.leftovers(path.parent), number


def test_move_that_reported_an_error_deletes_nothing(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may lose the answer, and the checkpoint was pinned since retention looked."""
    path, rename = saved / step_name(2), files.rename

    def answer_lost(source: Path, target: Path) -> None:
        rename(source, target)
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT), str(source))

    assert pin(path)
    with monkeypatch.context() as patch:
        patch.setattr(files, "rename", answer_lost)
        with pytest.raises(OSError, match="timed out"):
            Directory(path.parent, Fence(1)).delete(path.name)
    Directory(saved, Fence(2)).sweep()
    assert verified(path)


def test_corrupt_checkpoint_of_a_pinned_step_stays_away(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill interrupted its deletion, under the name that it was set aside with."""
    path = saved / step_name(2)
    assert pin(path)
    Directory(path.parent, Fence(1)).set_aside(path.name, "corrupt", "a bit")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_dir, "is_pinned", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            Directory(saved, Fence(1)).delete(f"{step_name(2)}.corrupt")
    Directory(saved, Fence(2)).sweep()
    assert names(saved) == [step_name(1), f"{step_name(2)}.pinned", step_name(3)]


def changes_of_a_deletion(folder: Path) -> int:
    """Return the number of changes to the file system that a deletion makes."""
    train(folder / "count", 1)
    with intercepted() as trace:
        Directory(folder / "count").delete(step_name(1))
    assert not (folder / "count" / step_name(1)).exists()
    return trace.count


def verified(path: Path) -> bool:
    """Return whether there is a checkpoint of which every byte is right."""
    found = choice.judge(Folder(path))
    return isinstance(found, choice.Candidate) and choice.corruption_of(found) is None
