"""A superseded process neither deletes nor sets aside a checkpoint, whenever it learns that it is superseded."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from checkpoints import names, train
from faults import intercepted

from runner.checkpoint.files.directory import Directory
from runner.checkpoint.files.store import Fence, step_name
from runner.errors import SupersededError

CHANGES: dict[str, Callable[[Path, Fence], None]] = {
    "delete": lambda path, fence: Directory(path.parent, fence).delete(path.name),
    "set aside": lambda path, fence: Directory(path.parent, fence).set_aside(path.name, "corrupt", "a test"),
}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Save checkpoints of steps 1 and 2."""
    train(tmp_path / "checkpoints", 2, keep_last=9)
    return tmp_path / "checkpoints"


def superseded_at(calls: list[str], number: int) -> None:
    """Return a fence check that fails at its call number `number` and later."""
    calls.append("check")
    if len(calls) >= number:
        raise SupersededError("attempt 2 holds the lease")


@pytest.mark.parametrize("change", CHANGES)
def test_a_superseded_process_creates_no_directory(saved: Path, change: str) -> None:
    """If it were killed next, the directory would stay in the run directory of its successor."""
    with intercepted() as trace, pytest.raises(SupersededError):
        CHANGES[change](saved / step_name(1), Fence(1, partial(superseded_at, [], 1)))
    assert trace.calls == []


@pytest.mark.parametrize("change", CHANGES)
def test_the_fence_is_checked_before_a_checkpoint_is_moved(saved: Path, change: str) -> None:
    """A successor that came between the check and the new directory has not swept that directory."""
    before = names(saved)
    with pytest.raises(SupersededError):
        CHANGES[change](saved / step_name(1), Fence(1, partial(superseded_at, [], 2)))
    assert names(saved) == before
    assert names(saved / step_name(1)) == names(saved / step_name(2))


@pytest.mark.parametrize("change", CHANGES)
def test_the_holder_of_the_lease_does_it(saved: Path, change: str) -> None:
    CHANGES[change](saved / step_name(1), Fence(1))
    left = {"delete": [], "set aside": [f"{step_name(1)}.corrupt"]}[change]
    assert names(saved) == [*left, step_name(2)]
