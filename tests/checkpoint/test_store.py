"""The storage interface: checkpoints in a dictionary are saved, listed, loaded, set aside and deleted like files."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from errno import ENOENT
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from checkpoints import FINGERPRINT, Toy

from runner.checkpoint import TrainStateManager
from runner.checkpoint.files import choice
from runner.checkpoint.files.store import Fence, FileRecord, new_hash
from runner.errors import CheckpointError, SupersededError
from runner.system import files


class Memory:
    """A `Store`, its `Stored`, `Save` and `Writer`: files by checkpoint name and file name."""

    def __init__(self, path: Path, fence: Fence, name: str = "", shared: Memory | None = None) -> None:
        self.path, self.fence, self.name = path / name, fence, name
        self.content: dict[str, dict[str, bytes]] = shared.content if shared else {}
        self.new: dict[str, bytes] = {}

    def at(self, name: str) -> Memory:
        return Memory(self.path, self.fence, name, self)

    save = at

    def names(self) -> list[str]:
        return list(self.content[self.name] if self.name else self.content)

    def wrong_kind(self) -> str | None:
        if self.name not in self.content:
            raise FileNotFoundError(ENOENT, "missing")
        return None

    def open(self, name: str) -> tuple[BinaryIO, int]:
        if name not in self.content.get(self.name, {}):
            raise FileNotFoundError(ENOENT, "missing")
        return io.BytesIO(self.content[self.name][name]), self.size(name)

    def size(self, name: str) -> int:
        return len(self.content[self.name][name])

    def begin(self) -> None:
        self.fence.check()

    def writer(self, path: Path) -> Memory:
        return Memory(path.parent, self.fence, path.name, self)

    def __enter__(self) -> Memory:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def write(self, name: str, fill: Callable[[Any], Any]) -> FileRecord:
        fill(file := io.BytesIO())
        digest, self.new[name] = new_hash(), file.getvalue()
        digest.update(self.new[name])
        return FileRecord(len(self.new[name]), digest.hexdigest())

    def sync(self) -> None: ...

    def commit(self, manifest: bytes, new: Any) -> None:
        self.fence.check()
        self.content[self.name] = {**new.new, "manifest.json": manifest}

    def abort(self) -> None: ...

    def set_aside(self, name: str, mark: str, why: str) -> None:
        self.content[f"{name}.{mark}"] = self.content.pop(name)

    def delete(self, name: str) -> None:
        del self.content[name]

    def sweep(self) -> None:
        self.fence.check()

    def results(self) -> dict[int, dict[str, Any]]:
        return {}

    def pinned(self) -> set[int]:
        return set()

    def look_anew(self) -> None: ...

    def warning(self) -> None: ...


def manager(store: Memory) -> TrainStateManager:
    def shared(path: Path, fence: Fence) -> Memory:
        return Memory(store.path, fence, shared=store)

    return TrainStateManager(store.path, fingerprint=FINGERPRINT, keep_last=2, store=shared)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Memory:
    for name in ("open_fd", "open_file", "list_dir", "make_dir", "stat", "lstat", "scan"):
        monkeypatch.setattr(files, name, lambda path, *others, **options: pytest.fail(f"{os.fspath(path)} was used"))
    return Memory(Path("memory"), Fence())


def test_a_memory_store_saves_lists_deletes_and_loads(store: Memory) -> None:
    toy, saving, digests = Toy(), manager(store), {}
    for step in (1, 2, 3):
        toy.train()
        assert toy.save(saving), saving.last_error
        digests[step] = toy.digest()
    assert [each.step for each in choice.candidates(store)] == [3, 2]
    assert choice.choose(store).step == 3
    store.content["step_00000003"]["rank_00000.safetensors"] = b"rot"
    other = Toy(1)
    state = manager(store).load(other.model, other.optimizer)
    assert state is not None
    assert (state["step"], other.digest()) == (2, digests[2])
    assert choice.set_aside_earlier(store) == ["step_00000003.corrupt"]


def test_a_superseded_save_in_memory_commits_nothing(store: Memory) -> None:
    def check() -> None:
        raise SupersededError("a newer attempt")

    toy = Toy()
    saving = manager(store)
    saving._store.fence = saving._fence = Fence(1, check)  # type: ignore[attr-defined]
    with pytest.raises(SupersededError):
        toy.save(saving)
    assert choice.candidates(store) == []


def test_damage_in_a_store_is_an_error_with_the_place(store: Memory) -> None:
    toy = Toy()
    toy.save(manager(store))
    store.content["step_00000000"]["train_state.pt"] += b"x"
    with pytest.raises(CheckpointError, match="no checkpoint in memory is valid"):
        choice.newest(store)
