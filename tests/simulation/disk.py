"""A simulated file system with the guarantees of POSIX and NFS, and no others.

    local    one machine. After a power loss, only what was synced is certain: the content of a file after an fsync of
             the file, a name after an fsync of its directory. Any part of the rest may survive, in any order. Data that
             was not synced may be missing, cut or zero. A rename happened or it did not.
    network  a server that several machines share. A change of a name is certain once the call returns; data once it was
             synced, or its file closed. A machine caches for a while which names a directory has and which files
             are missing (`OLD_S`), unless it has changed that directory. Opening a file always asks the server.

A call may fail with an error that a strike has prepared (`Process.fails`). Calls that need room fail with ENOSPC while
the disk is full. On a network file system a failed call may have changed a name: the server has done it, and its answer
was lost.
"""

from __future__ import annotations

import errno
import io
import os
import posixpath
import stat as modes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NoReturn

from simulation.engine import Host, Process, World

ROOT = "/simulated"
"""The simulated file system has all paths below this one. Reads of other paths are real."""
OLD_S = 3.0
"""Maximum age of a machine's cache of a directory on a network file system, in seconds."""
FIRST_FD = 100_000
CHANGES = frozenset({"create", "mkdir", "rename", "unlink", "rmdir", "link"})
"""Calls that may fail although they took effect."""
USER, GROUP = os.getuid(), os.getgid()


@dataclass(eq=False)
class Node:
    """A file, a directory or a symbolic link."""

    number: int
    kind: int  # stat.S_IFREG and so on
    mode: int = 0o644
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""
    dirty: Host | None = None  # the machine with unsynced data of the node
    writer: Process | None = None  # the last writer
    refused: bool = False  # the disk has refused to write the unsynced data: no later sync tries it again
    target: str = ""
    entries: dict[str, Node] = field(default_factory=dict)
    lasting: dict[str, Node] = field(default_factory=dict)
    """The part of `entries` that certainly survives a power loss."""
    names: int = 0
    changed: float = 0.0
    version: int = 0  # version of `entries`

    def __post_init__(self) -> None:
        self.is_dir = self.kind == modes.S_IFDIR


@dataclass
class Change:
    """A change of names that a power loss may undo."""

    node: Node
    parent: Node
    name: str
    target: Node | None = None  # target directory of a rename
    to: str = ""
    added: bool = True


@dataclass
class Open:
    """An open file."""

    node: Node
    path: str
    flags: int
    process: Process | None
    at: int = 0


class Disk:
    """The files of a world. Its methods replace the primitives of `runner.system.files`.

    Args:
        world: the world whose threads call the methods.
        network: whether it is a network file system, see above.
    """

    def __init__(self, world: World, network: bool = False) -> None:
        self.world = world
        self.network = network
        self.full = False
        self.root = Node(0, modes.S_IFDIR, 0o755)
        self._pending: list[Change] = []
        self._open: dict[int, Open] = {}
        self._next_fd = FIRST_FD
        self._unanswered: tuple[Process, int, str] | None = None
        self.watchers: list[Callable[[str, str, str], None]] = []
        """Called with each change of a name: the kind of change, path, new path."""

    # ---- finding nodes

    def _parts(self, path: Any) -> tuple[str, ...] | None:
        """Return the names on the way to a path of this file system, or None for a path of the real one."""
        return _split(os.fspath(path))

    def _find(self, parts: Sequence[str], path: Any, follow: bool = True, depth: int = 0) -> Node:
        node = self.root
        for number, part in enumerate(parts):
            child = node.entries.get(part)
            if child is None:
                raise _error(errno.ENOENT if node.is_dir else errno.ENOTDIR, path)
            if child.kind == modes.S_IFLNK and (follow or number < len(parts) - 1):
                if depth > 8:
                    raise _error(errno.ELOOP, path)
                there = posixpath.normpath(posixpath.join(ROOT, *parts[:number], child.target))
                rest = self._parts(there)
                if rest is None:
                    raise _error(errno.ENOENT, path)
                child = self._find(rest, path, True, depth + 1)
            node = child
        return node

    def _parent(self, path: Any) -> tuple[Node, str]:
        parts = self._parts(path)
        if not parts:
            raise _error(errno.EROFS, path)  # nothing may be written to a real path
        node = self._find(parts[:-1], path)
        if not node.is_dir:
            raise _error(errno.ENOTDIR, path)
        return node, parts[-1]

    def _host(self) -> Host | None:
        task = self.world.current
        return task.process.host if task is not None else None

    def _process(self) -> Process | None:
        return self.world.current.process if self.world.current is not None else None

    def _call(self, what: str, path: Any = "", room: bool = False) -> None:
        """Make one call: a step, and perhaps an error."""
        world = self.world
        if world.current is None:
            return
        world.step(what, path)
        process = world.current.process
        if process.fails and what in process.fails[0][0]:
            number = process.fails.popleft()[1]
            if self.network and what in CHANGES and world.random.random() < 0.5:
                self._unanswered = process, number, what
            else:
                self._fail(process, number, what, path)
        if room and self.full:
            world.features.add(("full", process.name.partition(" ")[0], what))
            raise _error(errno.ENOSPC, path)

    def _fail(self, process: Process, number: int, what: str, path: Any, after: str = "") -> NoReturn:
        self.world.tell(f"gets {errno.errorcode[number]} from {what} {_short(path)}{after}", process.name)
        raise _error(number, path)

    # ---- names

    def _changed(self, directory: Node) -> None:
        directory.version += 1
        directory.changed = self.world.now
        host = self._host()
        if host is not None:
            host.seen.pop(directory, None)

    def _add(self, parent: Node, name: str, node: Node) -> None:
        parent.entries[name] = node
        node.names += 1
        self._note(Change(node, parent, name))

    def _drop(self, parent: Node, name: str) -> None:
        node = parent.entries.pop(name)
        node.names -= 1
        self._note(Change(node, parent, name, added=False))

    def _note(self, change: Change) -> None:
        for directory, name in ((change.parent, change.name), (change.target, change.to)):
            if directory is not None:
                self._changed(directory)
                if (host := self._host()) is not None:  # a machine knows its own changes
                    host.seen.pop((directory, name), None)
        if self.network or self.world.current is None:
            _make_lasting(change)
        else:
            self._pending.append(change)

    def _tell(self, what: str, path: Any, to: Any = "") -> None:
        """Report the change of a name, perhaps with an error."""
        for watcher in self.watchers:
            watcher(what, str(os.fspath(path)), str(os.fspath(to)) if to else "")
        if self._unanswered is not None:
            (process, number, call), self._unanswered = self._unanswered, None
            if call == what and process is self._process():
                self._fail(process, number, what, path, ", which was done")

    def make_dir(self, path: Any, mode: int = 0o777) -> None:
        """Simulate `os.mkdir`."""
        self._call("mkdir", path, room=True)
        parent, name = self._parent(path)
        if name in parent.entries:
            raise _error(errno.EEXIST, path)
        process = self._process()
        node = Node(self.world.number(), modes.S_IFDIR, mode & ~(process.umask if process else 0o022))
        self._add(parent, name, node)
        self._tell("mkdir", path)

    def rename(self, source: Any, target: Any) -> None:
        """Simulate `os.replace`."""
        self._call("rename", f"{source} -> {os.path.basename(os.fspath(target))}")
        old_parent, old = self._parent(source)
        new_parent, new = self._parent(target)
        node = old_parent.entries.get(old)
        if node is None:
            raise _error(errno.ENOENT, source)
        there = new_parent.entries.get(new)
        if there is node:
            return
        if there is not None:
            if there.is_dir and not node.is_dir:
                raise _error(errno.EISDIR, target)
            if node.is_dir and not there.is_dir:
                raise _error(errno.ENOTDIR, target)
            if there.is_dir and there.entries:
                raise _error(errno.ENOTEMPTY, target)
            there.names -= 1
        del old_parent.entries[old]
        new_parent.entries[new] = node
        self._note(Change(node, old_parent, old, new_parent, new))
        self._tell("rename", source, target)

    def unlink(self, path: Any) -> None:
        """Simulate `os.unlink`."""
        self._call("unlink", path)
        parent, name = self._parent(path)
        node = parent.entries.get(name)
        if node is None:
            raise _error(errno.ENOENT, path)
        if node.is_dir:
            raise _error(errno.EISDIR, path)
        self._drop(parent, name)
        self._tell("unlink", path)

    def remove_dir(self, path: Any) -> None:
        """Simulate `os.rmdir`."""
        self._call("rmdir", path)
        parent, name = self._parent(path)
        node = parent.entries.get(name)
        if node is None:
            raise _error(errno.ENOENT, path)
        if not node.is_dir:
            raise _error(errno.ENOTDIR, path)
        if node.entries:
            raise _error(errno.ENOTEMPTY, path)
        self._drop(parent, name)
        self._tell("rmdir", path)

    def make_link(self, source: Any, target: Any, *, follow_symlinks: bool = True) -> None:
        """Simulate `os.link`."""
        self._call("link", target, room=True)
        parts = self._parts(source)
        node = self._find(parts or (), source, follow_symlinks)
        parent, name = self._parent(target)
        if name in parent.entries:
            raise _error(errno.EEXIST, target)
        self._add(parent, name, node)
        self._tell("link", source, target)

    def make_symlink(self, source: Any, target: Any, target_is_directory: bool = False) -> None:
        """Simulate `os.symlink`."""
        self._call("symlink", target, room=True)
        parent, name = self._parent(target)
        if name in parent.entries:
            raise _error(errno.EEXIST, target)
        self._add(parent, name, Node(self.world.number(), modes.S_IFLNK, 0o777, target=os.fspath(source)))

    def disk_usage(self, path: Any) -> tuple[int, int, int]:
        """Simulate `shutil.disk_usage`."""
        self._call("disk usage", path)
        return 1 << 40, 1 << 39, 0 if self.full else 1 << 39

    def read_link_raw(self, path: Any) -> str:
        """Simulate `os.readlink`."""
        parts = self._parts(path)
        if parts is None:
            return str(os.readlink(path))
        self._call("readlink", path)
        node = self._find(parts, path, follow=False)
        if node.kind != modes.S_IFLNK:
            raise _error(errno.EINVAL, path)
        return node.target

    # ---- reads of names

    def list_dir(self, path: Any = ".") -> list[str]:
        """Simulate `os.listdir`."""
        parts = self._parts(path)
        if parts is None:
            return os.listdir(path)
        self._call("listdir", path)
        node = self._find(parts, path)
        if not node.is_dir:
            raise _error(errno.ENOTDIR, path)
        names = self._names(node)
        self.world.random.shuffle(names)
        return names

    def _names(self, node: Node) -> list[str]:
        """Return the names in a directory as this machine sees them, perhaps some seconds late."""
        host, world = self._host(), self.world
        if not self.network or host is None:
            return list(node.entries)
        seen = host.seen.get(node)
        if seen is not None and world.now - seen[0] < OLD_S:
            if seen[2] != node.version:
                world.features.add(("old listing", world.current.process.name.partition(" ")[0]))  # type: ignore[union-attr]
            return list(seen[1])
        names = list(node.entries)
        host.seen[node] = (world.now, names, node.version)
        return list(names)

    def scan(self, path: Any = ".") -> Any:
        """Simulate `os.scandir`."""
        parts = self._parts(path)
        if parts is None:
            return os.scandir(path)
        found = []
        for name in self.list_dir(path):
            try:
                node = self._find((*parts, name), path, follow=False)
            except FileNotFoundError:  # listed from an older cache
                continue
            found.append(_Entry(name, posixpath.join(os.fspath(path), name), node.kind))
        return _Entries(found)

    def walk(self, top: Any, topdown: bool = True, onerror: Any = None, followlinks: bool = False) -> Iterator[Any]:
        """Simulate `os.walk`."""
        if self._parts(top) is None:
            yield from os.walk(top, topdown, onerror, followlinks)
            return
        try:
            with self.scan(top) as entries:
                listed = list(entries)
        except OSError as error:
            if onerror is not None:
                onerror(error)
            return
        folders = [entry.name for entry in listed if entry.is_dir(follow_symlinks=False)]
        others = [entry.name for entry in listed if not entry.is_dir(follow_symlinks=False)]
        if topdown:
            yield os.fspath(top), folders, others
        for name in folders:
            yield from self.walk(posixpath.join(os.fspath(top), name), topdown, onerror, followlinks)
        if not topdown:
            yield os.fspath(top), folders, others

    def remove_tree(self, path: Any, ignore_errors: bool = False, onerror: Any = None, **_: Any) -> None:
        """Simulate `shutil.rmtree`."""
        try:
            for folder, folders, names in self.walk(path, topdown=False):
                for name in names:
                    self.unlink(posixpath.join(folder, name))
                for name in folders:
                    self.remove_dir(posixpath.join(folder, name))
            self.remove_dir(path)
        except OSError:
            if not ignore_errors:
                raise

    def stat(self, path: Any, *, follow_symlinks: bool = True) -> Any:
        """Simulate `os.stat`, of a path or a file descriptor."""
        if isinstance(path, int):
            return self.stat_fd(path)
        parts = self._parts(path)
        if parts is None:
            return os.stat(path, follow_symlinks=follow_symlinks)
        self._call("stat", path)
        self._remember_missing(parts, path)
        return _status(self._find(parts, path, follow_symlinks))

    def lstat(self, path: Any) -> Any:
        """Simulate `os.lstat`."""
        return self.stat(path, follow_symlinks=False)

    def _remember_missing(self, parts: Sequence[str], path: Any) -> None:
        """Simulate that a machine on a network file system may remember for a while that a name was missing.

        Raises:
            FileNotFoundError: the machine believes that the name is missing.
        """
        host = self._host()
        if not self.network or host is None or not parts:
            return
        try:
            parent = self._find(parts[:-1], path)
        except OSError:
            return
        key = (parent, parts[-1])
        if parts[-1] in parent.entries:
            since, version = host.seen.get(key, (-OLD_S, None))
            seen = host.seen.get(parent)  # a newer read or change of the directory by this machine overrides it
            if seen is not None and self.world.now - since < OLD_S and seen[2] == version != parent.version:
                raise _error(errno.ENOENT, path)
        else:
            host.seen.setdefault(key, (self.world.now, parent.version))
            if self.world.now - host.seen[key][0] >= OLD_S:
                host.seen[key] = (self.world.now, parent.version)

    def resolve(self, path: Any) -> Any:
        """Simulate `os.path.realpath`, as text."""
        if self._parts(path) is None:
            return os.path.realpath(path)
        self.world.look()
        return posixpath.normpath(os.fspath(path))

    def has_access_list(self, path: Any) -> bool:
        """Return False: this file system has no access lists."""
        return False

    def set_times(self, path: Any, *_: Any, **__: Any) -> None:
        """Simulate `os.utime`."""
        self._call("utime", path)
        node = self._find(self._parts(path) or (), path)
        node.changed = self.world.now
        if (host := self._host()) is not None:  # the server's answer shows whether the directory has other changes
            for key in [key for key in host.seen if key is node or (type(key) is tuple and key[0] is node)]:
                del host.seen[key]

    # ---- open files

    def open_fd(self, path: Any, flags: int, mode: int = 0o777, **_: Any) -> int:
        """Simulate `os.open`."""
        parts = self._parts(path)
        if parts is None:
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                raise _error(errno.EROFS, path)
            return os.open(path, flags, mode)
        creates = bool(flags & os.O_CREAT)
        self._call("create" if creates else "open", path)
        follow = not flags & os.O_NOFOLLOW
        try:
            node = self._find(parts, path, follow)
        except FileNotFoundError:
            if not creates:
                raise
            if self.full and self.world.current is not None:
                raise _error(errno.ENOSPC, path) from None
            parent, name = self._parent(path)
            process = self._process()
            node = Node(self.world.number(), modes.S_IFREG, mode & ~(process.umask if process else 0o022))
            node.changed = self.world.now
            self._add(parent, name, node)
            self._tell("create", path)
        else:
            if creates and flags & os.O_EXCL:
                raise _error(errno.EEXIST, path)
        if node.kind == modes.S_IFLNK:
            raise _error(errno.ELOOP, path)
        if node.is_dir and flags & (os.O_WRONLY | os.O_RDWR):
            raise _error(errno.EISDIR, path)
        if flags & os.O_DIRECTORY and not node.is_dir:
            raise _error(errno.ENOTDIR, path)
        if flags & os.O_TRUNC and node.data:
            del node.data[:]
            self._soil(node)
        self._next_fd += 1
        self._open[self._next_fd] = Open(node, str(path), flags, self._process())
        return self._next_fd

    def _soil(self, node: Node) -> None:
        node.changed = self.world.now
        node.refused = False  # data written from now on, and the page around it, will be tried
        host = self._host()
        if host is None:
            node.synced = bytes(node.data)
        else:
            node.dirty, node.writer = host, self._process()

    def _of(self, fd: int) -> Open:
        found = self._open.get(fd)
        if found is None:
            raise _error(errno.EBADF, f"file descriptor {fd}")
        return found

    def read_fd(self, fd: int, count: int) -> bytes:
        """Simulate `os.read`."""
        if fd < FIRST_FD:
            return os.read(fd, count)
        found = self._of(fd)
        if found.at >= len(found.node.data) and not found.node.is_dir:  # a reader asks once too often:
            self.world.look()  # no step, because interrupting it could find nothing
            return b""
        data = self.read_at(fd, count, found.at)
        found.at += len(data)
        return data

    def read_at(self, fd: int, count: int, offset: int) -> bytes:
        """Simulate `os.pread`."""
        if fd < FIRST_FD:
            return os.pread(fd, count, offset)
        found = self._of(fd)
        self._call("read", found.path)
        if found.node.is_dir:
            raise _error(errno.EISDIR, found.path)
        return bytes(self._content(found.node)[offset : offset + count])

    def _content(self, node: Node) -> bytes | bytearray:
        """Return the content that this machine reads. The server may have less of a file that another one writes."""
        host = self._host()
        if self.network and node.dirty is not None and host is not None and node.dirty is not host:
            return node.synced if self.world.random.random() < 0.5 else node.data
        return node.data

    def write_fd(self, fd: int, data: Any) -> int:
        """Simulate `os.write`."""
        if fd < FIRST_FD:
            raise _error(errno.EROFS, fd)
        found = self._of(fd)
        if found.flags & os.O_APPEND:
            self._call("append", found.path, room=True)
            found.at = len(found.node.data)
        else:
            self._call("write", found.path, room=True)
        written = self._put(found, data, found.at)
        found.at += written
        return written

    def write_at(self, fd: int, data: Any, offset: int) -> int:
        """Simulate `os.pwrite`."""
        found = self._of(fd)
        self._call("write", found.path, room=offset + len(data) > len(found.node.data))
        return self._put(found, data, offset)

    def _put(self, found: Open, data: Any, offset: int) -> int:
        data = bytes(data)
        if len(data) > 1 and self.world.current is not None and self.world.random.random() < 0.05:
            data = data[: 1 + int(self.world.random.random() * (len(data) - 1))]  # the kernel may write a part
        content = found.node.data
        if offset > len(content):
            content.extend(bytes(offset - len(content)))
        content[offset : offset + len(data)] = data
        self._soil(found.node)
        return len(data)

    def copy_range(self, source: int, target: int, count: int, offset_src: int | None = None, *_: Any) -> int:
        """Simulate `os.copy_file_range`."""
        data = self.read_at(source, count, offset_src or 0)
        return self.write_fd(target, data) if data else 0

    def fsync_fd(self, fd: int) -> None:
        """Simulate `os.fsync`."""
        if fd < FIRST_FD:
            return
        found = self._of(fd)
        try:
            self._call("fsync", found.path)
        except OSError:
            self._refuse(found.node)
            raise
        self._sync(found.node)

    def _sync(self, node: Node) -> None:
        if node.is_dir:
            kept = []
            for change in self._pending:
                if change.parent is node or change.target is node:
                    _make_lasting(change)
                else:
                    kept.append(change)
            self._pending = kept
        elif not node.refused:
            node.synced, node.dirty = bytes(node.data), None

    def _refuse(self, node: Node) -> None:
        """Lose data that could not be written. The kernel may count it as written from now on.

        A local file system still reads it. On a network file system it is at the server with a lost answer, or nowhere.
        Data of other processes is not affected: the kernel reports to each writer what was lost since that writer
        opened the file.
        """
        if node.is_dir or node.dirty is None or node.writer is not self._process():
            return
        if self.world.random.random() < 0.5:
            node.refused = not self.network
            if self.network:
                node.data, node.dirty = bytearray(node.synced), None
        elif self.network:
            self._sync(node)

    def begin_writeback(self, fd: int, start: int, length: int) -> None:
        """Do nothing, because writeback promises nothing."""

    def truncate_fd(self, fd: int, length: int) -> None:
        """Simulate `os.ftruncate`."""
        found = self._of(fd)
        self._call("truncate", found.path)
        content = found.node.data
        if length < len(content):
            del content[length:]
        else:
            content.extend(bytes(length - len(content)))
        self._soil(found.node)

    def close_fd(self, fd: int) -> None:
        """Simulate `os.close`."""
        if fd < FIRST_FD:
            os.close(fd)
            return
        found = self._open.pop(fd, None)
        if found is None:
            raise _error(errno.EBADF, f"file descriptor {fd}")
        self.world.look()
        if self.network and found.node.dirty is not None:  # close-to-open: a closed file is at the server
            process = self._process() if found.flags & (os.O_WRONLY | os.O_RDWR) else None
            if process is not None and process.fails and "close" in process.fails[0][0]:
                self._refuse(found.node)
                self._fail(process, process.fails.popleft()[1], "close", found.path)
            self._sync(found.node)

    def stat_fd(self, fd: int) -> Any:
        """Simulate `os.fstat`."""
        if fd < FIRST_FD:
            return os.fstat(fd)
        self.world.look()
        return _status(self._of(fd).node)

    def append_from_now_on(self, fd: int) -> None:
        """Let each write go to the end of the file."""
        self._of(fd).flags |= os.O_APPEND

    def as_file(self, fd: int, mode: str = "rb", *_: Any, **__: Any) -> Any:
        """Simulate `os.fdopen` for a binary file."""
        if fd < FIRST_FD:
            return os.fdopen(fd, mode)
        raw = _File(self, fd, mode)
        if "+" in mode:
            return io.BufferedRandom(raw)
        return io.BufferedReader(raw) if mode.startswith("r") else io.BufferedWriter(raw)

    def open_file(self, path: Any, mode: str = "r", *rest: Any, **options: Any) -> Any:
        """Simulate `open`."""
        if self._parts(path) is None:
            if set(mode) & set("wax+"):
                raise _error(errno.EROFS, path)
            return open(path, mode, *rest, **options)
        base = {"r": 0, "w": os.O_CREAT | os.O_TRUNC, "a": os.O_CREAT | os.O_APPEND, "x": os.O_CREAT | os.O_EXCL}[
            next(letter for letter in mode if letter in "rwax")
        ]
        base |= os.O_RDWR if "+" in mode else os.O_RDONLY if "r" in mode else os.O_WRONLY
        file = self.as_file(self.open_fd(path, base, 0o666), mode.replace("b", "").replace("t", "") + "b")
        return file if "b" in mode else io.TextIOWrapper(file, encoding=options.get("encoding") or "utf-8")

    # ---- strikes

    def power_loss(self, host: Host) -> None:
        """Drop a random part of the data that a machine had not synced."""
        random = self.world.random
        if not self.network:
            changes, self._pending = self._pending, []
            if random.random() < 0.5:  # the first changes survive, as with a journal
                changes = changes[: random.randrange(len(changes) + 1)]
            else:
                share = random.random()
                changes = [change for change in changes if random.random() < share]
            for change in changes:
                _make_lasting(change)
            self._forget(self.root, set())
        for node in self._all_nodes(self.root):
            if node.dirty is host or (node.dirty is not None and not self.network):
                node.data = bytearray(node.synced if node.refused else self._survivor(node))
                node.synced, node.dirty, node.refused = bytes(node.data), None, False

    def _survivor(self, node: Node) -> bytes:
        """Return the surviving part of unsynced data."""
        old, new = node.synced, bytes(node.data)
        kind = self.world.random.randrange(4)
        if kind == 0:
            return old
        if kind == 1:
            return new
        if new.startswith(old):
            cut = len(old) + self.world.random.randrange(len(new) - len(old) + 1)
            return new[:cut] if kind == 2 else new[:cut] + bytes(len(new) - cut)
        cut = self.world.random.randrange(max(len(new), len(old)) + 1)
        return new[:cut] + old[cut:]

    def _forget(self, directory: Node, met: set[int]) -> None:
        met.add(directory.number)
        directory.entries = dict(directory.lasting)
        directory.version += 1
        for name, node in list(directory.entries.items()):
            if node.is_dir:
                if node.number in met:  # a directory has one name
                    del directory.entries[name], directory.lasting[name]
                else:
                    self._forget(node, met)

    def _all_nodes(self, directory: Node) -> Iterator[Node]:
        for node in directory.entries.values():
            if node.is_dir:
                yield from self._all_nodes(node)
            elif node.kind == modes.S_IFREG:
                yield node

    def close_all(self, process: Process) -> None:
        """Close the files of a process that has ended, as the kernel does."""
        for fd in [fd for fd, found in self._open.items() if found.process is process]:
            found = self._open.pop(fd)
            if self.network and found.node.dirty is not None:
                self._sync(found.node)

    def files_in(self, path: Any) -> dict[str, bytes]:
        """Return the content of each file in a directory by name, for looks from outside.

        Return {} without a directory.
        """
        try:
            entries = self._find(self._parts(path) or (), path).entries
        except OSError:
            return {}
        return {name: bytes(node.data) for name, node in sorted(entries.items()) if node.kind == modes.S_IFREG}

    def tree(self, directory: Node | None = None, prefix: str = ROOT) -> dict[str, bytes]:
        """Return the content of each file by path, for looks from outside."""
        found: dict[str, bytes] = {}
        for name, node in sorted((directory or self.root).entries.items()):
            if node.is_dir:
                found |= self.tree(node, f"{prefix}/{name}")
            elif node.kind == modes.S_IFREG:
                found[f"{prefix}/{name}"] = bytes(node.data)
        return found


@lru_cache(maxsize=20_000)
def _split(path: str | bytes) -> tuple[str, ...] | None:
    """Return the names on the way to a path, or None if it is not of this file system."""
    text = os.fsdecode(path)
    if not text.startswith(ROOT):
        return None
    return tuple(part for part in posixpath.normpath(text)[len(ROOT) :].split("/") if part)


def _make_lasting(change: Change) -> None:
    parent, name, node = change.parent, change.name, change.node
    if change.target is not None:
        if parent.lasting.get(name) is node:
            del parent.lasting[name]
        change.target.lasting[change.to] = node
    elif change.added:
        parent.lasting[name] = node
    elif parent.lasting.get(name) is node:
        del parent.lasting[name]


def _error(number: int, path: Any) -> OSError:
    return OSError(number, os.strerror(number), str(path))


def _short(path: Any) -> str:
    return str(path).removeprefix(ROOT)


def _status(node: Node) -> SimpleNamespace:
    return SimpleNamespace(
        st_mode=node.kind | node.mode,
        st_ino=node.number,
        st_dev=1,
        st_nlink=max(node.names, 0 if not node.is_dir else 2),
        st_uid=USER,
        st_gid=GROUP,
        st_size=len(node.data),
        st_blocks=(len(node.data) + 511) // 512,
        st_mtime=node.changed,
        st_atime=node.changed,
        st_ctime=node.changed,
        st_mtime_ns=int(node.changed * 1e9),
        st_ctime_ns=int(node.changed * 1e9),
    )


@dataclass
class _Entry:
    """An entry that `os.scandir` yields."""

    name: str
    path: str
    kind: int

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return self.kind == modes.S_IFREG

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self.kind == modes.S_IFDIR

    def is_symlink(self) -> bool:
        return self.kind == modes.S_IFLNK


class _Entries(list[_Entry]):
    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def close(self) -> None:
        pass


class _File(io.RawIOBase):
    """An open file under Python's buffers."""

    def __init__(self, disk: Disk, fd: int, mode: str) -> None:
        self._disk, self._fd, self._mode = disk, fd, mode
        self._owner = disk._process()
        self.name = disk._of(fd).path

    @property
    def _is_gone(self) -> bool:
        """Return whether the process has ended. Its buffers are flushed at collection, while another may run."""
        return self._owner is not None and self._owner.dead

    def readable(self) -> bool:
        return "r" in self._mode or "+" in self._mode

    def writable(self) -> bool:
        return "r" not in self._mode or "+" in self._mode

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = self._disk.read_fd(self._fd, len(view))
        view[: len(data)] = data
        return len(data)

    def write(self, data: Any) -> int:
        if self._is_gone:
            return len(data)
        return self._disk.write_fd(self._fd, memoryview(data).cast("B"))

    def seek(self, offset: int, whence: int = 0) -> int:
        found = self._disk._of(self._fd)
        base = {0: 0, 1: found.at, 2: len(found.node.data)}[whence]
        found.at = base + offset
        return found.at

    def tell(self) -> int:
        return self._disk._of(self._fd).at

    def truncate(self, size: int | None = None) -> int:
        length = self.tell() if size is None else size
        self._disk.truncate_fd(self._fd, length)
        return length

    def close(self) -> None:
        if not self.closed:
            try:
                super().close()
            finally:
                if not self._is_gone and self._fd in self._disk._open:
                    self._disk.close_fd(self._fd)
