"""Model the states of a disk after a kill or a power failure.

The changes of one real run are recorded once, with their data (`recorded`). Any state is then computed and written out,
without another run. After a kill, everything done so far is there. After a power failure (`after_power_failure`), only
what was fsynced is certain: the content of a file after an fsync of the file, a name after an fsync of its directory.
Of all other changes any subset may have survived, in any order; the data of a file may be missing, zero or cut. A
rename is atomic: it happened or it did not.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from faults import intercepted

Tree = dict[str, bytes | None]
"""Content of each file, and None for each directory, by path below the root."""


@dataclass(frozen=True)
class Change:
    """One change: `create`, `write`, `sync`, `rename`, `mkdir`, `unlink`, `rmdir`, or `nothing`.

    Paths are relative to the root. `nothing` is a call that failed or was outside the root.
    """

    kind: str
    path: str
    to: str = ""
    data: bytes = b""


@dataclass
class Recording:
    """The initial files of a run, and every change that the run made."""

    root: Path
    before: Tree
    changes: list[Change] = field(default_factory=list)

    def after_kill(self, number: int, torn: bool = False) -> Tree:
        """Return the tree after a kill right before change `number`.

        `torn`: the kill comes in the middle of a write.
        """
        done = self.changes[:number]
        if torn:
            change = self.changes[number]
            done = [*done, replace(change, data=change.data[: len(change.data) // 2])]
        disk = _Disk(self.before)
        for change in done:
            disk.apply(change)
        return disk.tree()

    def after_power_failure(self, number: int) -> Iterator[Tree]:
        """Yield the worst trees that a power failure right before change `number` may leave.

        Of the unsynced names, none survive, all do, each alone does, or all but one do (every subset if they are few).
        Each case occurs with all, half, none or zeros of the unsynced data.
        """
        done = self.changes[:number]
        certain, unsure = _durable_names(self.before, done)
        for kept in _subsets(unsure):
            for data in ("all", "half", "none", "zeros"):
                yield _survivors(self.before, done, certain | kept, data)


def _subsets(unsure: list[int], small: int = 4) -> Iterable[frozenset[int]]:
    if len(unsure) <= small:
        sizes = range(len(unsure) + 1)
        return [frozenset(chosen) for size in sizes for chosen in itertools.combinations(unsure, size)]
    each = [frozenset([one]) for one in unsure]
    every = frozenset(unsure)
    return [frozenset(), every, *each, *(every - one for one in each)]


def _durable_names(before: Tree, done: list[Change]) -> tuple[frozenset[int], list[int]]:
    """Return the numbers of the changes of names that certainly survive, and of those that may."""
    disk = _Disk(before)
    pending: dict[int, list[_Directory]] = {}
    for number, change in enumerate(done):
        if change.kind == "sync":
            synced = disk.find(change.path)
            pending = {n: parents for n, parents in pending.items() if all(parent is not synced for parent in parents)}
        elif change.kind not in ("write", "nothing"):
            pending[number] = [disk.parent(path) for path in (change.path, change.to) if path]
        disk.apply(change)
    certain = {n for n, change in enumerate(done) if change.kind not in ("write", "sync", "nothing")} - pending.keys()
    return frozenset(certain), list(pending)


def _survivors(before: Tree, done: list[Change], kept: frozenset[int], data: str) -> Tree:
    """Return the tree of the surviving names, with what is left of unsynced data."""
    whole, disk = _Disk(before), _Disk(before)
    contents: dict[int, tuple[bytes, bytes]] = {}
    files: dict[int, _File] = {}
    for number, change in enumerate(done):
        whole.apply(change)
        if change.kind in ("write", "sync"):
            node = whole.find(change.path)
            if isinstance(node, _File):
                synced, _ = contents.get(node.number, (node.synced, b""))
                contents[node.number] = (node.content if change.kind == "sync" else synced, node.content)
        elif number in kept:
            made = disk.apply(change, missing_ok=True)
            twin = whole.find(change.path) if change.kind == "create" else None
            if isinstance(made, _File) and isinstance(twin, _File):
                made.number = twin.number
                files[twin.number] = made
    for number, (synced, written) in contents.items():
        if number in files:
            rest = written[len(synced) :]
            left = {"all": rest, "half": rest[: len(rest) // 2], "none": b"", "zeros": bytes(len(rest))}[data]
            files[number].content = synced + left
    return disk.tree()


class _File:
    _numbers = itertools.count()

    def __init__(self, content: bytes = b"") -> None:
        self.content = self.synced = content
        self.number = next(self._numbers)


_Directory = dict[str, Any]


class _Disk:
    """Directories and files in memory."""

    def __init__(self, tree: Tree) -> None:
        self.root: _Directory = {}
        for path, content in sorted(tree.items()):
            self.parent(path)[os.path.basename(path)] = {} if content is None else _File(content)

    def find(self, path: str) -> Any:
        """Return the file or directory at `path`. Raise KeyError if there is none."""
        node: Any = self.root
        for part in Path(path).parts:
            node = node[part]
        return node

    def parent(self, path: str) -> _Directory:
        directory: _Directory = self.find(os.path.dirname(path))
        return directory

    def apply(self, change: Change, missing_ok: bool = False) -> Any:
        """Apply one change and return the node that it creates.

        The change may be impossible if an earlier one was lost.
        """
        try:
            return self._apply(change)
        except (KeyError, TypeError):
            if not missing_ok:
                raise
            return None

    def _apply(self, change: Change) -> Any:
        name = os.path.basename(change.path)
        if change.kind in ("create", "mkdir"):
            made: Any = _File() if change.kind == "create" else {}
            self.parent(change.path)[name] = made
            return made
        if change.kind == "write":
            self.find(change.path).content += change.data
        elif change.kind == "rename":
            target = self.parent(change.to)
            target[os.path.basename(change.to)] = self.parent(change.path).pop(name)
        elif change.kind in ("unlink", "rmdir"):
            del self.parent(change.path)[name]
        return None

    def tree(self) -> Tree:
        return dict(self._walk(self.root, ""))

    def _walk(self, directory: _Directory, prefix: str) -> Iterator[tuple[str, bytes | None]]:
        for name, node in directory.items():
            if isinstance(node, _File):
                yield prefix + name, node.content
            else:
                yield prefix + name, None
                yield from self._walk(node, f"{prefix}{name}/")


def tree_of(root: Path) -> Tree:
    """Return the tree below `root`."""
    return {str(p.relative_to(root)): p.read_bytes() if p.is_file() else None for p in sorted(root.rglob("*"))}


def write_tree(root: Path, tree: Tree) -> Path:
    """Create `root` with the content of `tree`."""
    root.mkdir()
    for path, content in sorted(tree.items()):
        if content is None:
            (root / path).mkdir()
        else:
            (root / path).write_bytes(content)
    return root


@contextmanager
def recorded(root: Path) -> Iterator[Recording]:
    """Record every change below `root`. Only count calls that fail or are outside of it."""
    recording = Recording(root, tree_of(root))
    kinds = {"open": "create", "fsync": "sync", "replace": "rename"}

    def act(_: int, name: str, call: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        path, new = str(trace.calls[-1][1]), str(trace.calls[-1][2])
        recording.changes.append(Change("nothing", path))
        result = call()
        if not Path(path).is_relative_to(root):
            return result
        data = bytes(args[1][:result]) if name == "write" else b""
        to = str(Path(new).relative_to(root)) if new else ""
        relative = str(Path(path).relative_to(root))
        recording.changes[-1] = Change(kinds.get(name, name), "" if relative == "." else relative, to, data)
        return result

    with intercepted(act) as trace:
        yield recording
