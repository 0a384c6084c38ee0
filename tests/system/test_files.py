"""All access to the file system: atomic writes, and reads that neither block nor follow links."""

from __future__ import annotations

import errno
import os
import re
import socket
import stat
import struct
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.errors import SupersededError
from runner.system import files


def bind_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))


def link(path: Path) -> None:
    target = path.with_name("target")
    target.write_text("{}\n")
    path.symlink_to(target)


NOT_REGULAR: list[Callable[[Path], None]] = [os.mkfifo, bind_socket, link, Path.mkdir]
READERS: list[Callable[[Path], object]] = [
    files.read_object,
    lambda path: list(files.read_lines(path)),
    files.read_regular,
]


@pytest.mark.parametrize("make", NOT_REGULAR)
@pytest.mark.parametrize("read", READERS)
def test_only_regular_files_are_read(
    tmp_path: Path, make: Callable[[Path], None], read: Callable[[Path], object]
) -> None:
    """A FIFO without a writer would block, a link might lead anywhere."""
    path = tmp_path / "record"
    make(path)
    with pytest.raises(OSError, match="not a regular file"):
        read(path)


def test_a_link_is_followed_only_on_request(tmp_path: Path) -> None:
    link(tmp_path / "record")
    assert files.read_json(tmp_path / "record") == {}
    with pytest.raises(OSError, match="not a regular file"):
        files.read_json(tmp_path / "record", follow=False)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record"
    path.write_text("x" * 9)
    assert files.read_regular(path, limit=9) == b"x" * 9
    with pytest.raises(OSError, match="larger than 8 bytes"):
        files.read_regular(path, limit=8)
    path.write_text("1\n22\n" + "3" * 99)
    with pytest.raises(OSError, match="larger than 50 bytes"):
        list(files.read_lines(path, limit=50))
    monkeypatch.setattr(files, "MAX_RECORD_BYTES", 40)
    with pytest.raises(OSError, match="longer than 40 bytes"):
        list(files.read_lines(path))


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 100_000, b"\xff", b"1" * 5000])
def test_invalid_json_is_read_as_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "record"
    assert files.read_json(path) is None
    path.write_bytes(content)
    assert files.read_json(path) is None
    assert files.read_object(path) == {}
    path.write_bytes(b'{"a": 1}\n' + content + b'\n{"a": 2}\n{"a": 3')
    assert list(files.read_lines(path)) == [{"a": 1}, {"a": 2}]


def backwards(path: Path) -> list[tuple[int, bytes]]:
    with files.open_regular(path) as file:
        return list(files.lines_backwards(file.fileno()))


@given(
    lines=st.lists(st.binary(max_size=9).map(lambda line: line.replace(b"\n", b"."))),
    rest=st.binary(max_size=9).map(lambda line: line.replace(b"\n", b".")),
    block=st.integers(1, 8),
)
def test_lines_are_read_from_the_last_one_to_the_first(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], rest: bytes, block: int
) -> None:
    """Return each with its offset, under any alignment to blocks. A line that a kill left incomplete is skipped."""
    path = tmp_path_factory.mktemp("lines") / "record"
    path.write_bytes(b"".join(line + b"\n" for line in lines) + rest)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "TAIL_BYTES", block)
        found = backwards(path)
    assert [line for _, line in reversed(found)] == [line + b"\n" for line in lines]
    assert all(path.read_bytes()[at:].startswith(line) for at, line in found)


def test_only_the_end_of_a_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, read = tmp_path / "record", list[int]()
    path.write_bytes(b"".join(b"%06d\n" % number for number in range(200_000)))
    real = files.read_at

    def read_at(fd: int, size: int, at: int) -> bytes:
        read.append(size)
        return real(fd, size, at)

    monkeypatch.setattr(files, "read_at", read_at)
    with files.open_regular(path) as file:
        lines = files.lines_backwards(file.fileno())
        assert [next(lines)[1] for _ in range(100)][-1] == b"199900\n"
    assert sum(read) == files.TAIL_BYTES


@pytest.mark.parametrize("code", [None, errno.EXDEV, errno.ENOSYS])
def test_the_beginning_of_a_file_is_copied_to_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int | None
) -> None:
    """Include kernels that do not copy. Later writes come after the copy."""
    path = tmp_path / "record"
    path.write_bytes(b"0123456789")
    before = path.stat().st_ino
    monkeypatch.setattr(files, "COPY_BYTES", 3)
    if code is not None:
        monkeypatch.setattr(files, "copy_range", Mock(side_effect=OSError(code, os.strerror(code))))
    with files.open_regular(path) as source:
        fd = files.replace_by_part(path, source.fileno(), 7)
    files.write_all(fd, b"+")
    files.close_fd(fd)
    assert path.read_bytes() == b"0123456+"
    assert path.stat().st_ino != before


def test_a_file_is_overwritten_where_the_kernel_writes_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut short, the note that explains why a job is not requeued would be another note."""
    path = tmp_path / "note"
    path.write_bytes(b"3 because of this   \n")
    monkeypatch.setattr(files, "write_at", lambda fd, data, offset: os.pwrite(fd, data[:4], offset))
    with files.open_file(path, "r+b") as file:
        files.overwrite(file.fileno(), b"3 not requeued\n")
    assert path.read_bytes() == b"3 not requeued\nis   \n"


def test_a_file_that_is_too_short_to_be_copied_stays(tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.write_bytes(b"0123")
    with files.open_regular(path) as source, pytest.raises(OSError, match="3 bytes are missing"):
        files.replace_by_part(path, source.fileno(), 7)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"record": b"0123"}


@pytest.mark.parametrize("kind", ["missing", "link", "second name", "folder"])
def test_a_file_that_is_not_ours_alone_is_not_opened_in_place(tmp_path: Path, kind: str) -> None:
    """Another user may need it unchanged under its other name."""
    path = tmp_path / "record"
    if kind == "link":
        link(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "second name":
        path.touch()
        files.link(path, tmp_path / "backup")
    assert files.open_in_place(path) is None


def test_an_incomplete_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "attempts.jsonl"
    path.write_text('{"attempt": 1}\n{"attempt": 2, "cau')
    files.append_line(path, {"attempt": 3})
    files.append_line(path, {"attempt": 4})
    assert list(files.read_lines(path)) == [{"attempt": 1}, {"attempt": 3}, {"attempt": 4}]


@pytest.mark.parametrize("durable", [True, False])
def test_an_atomic_write_is_synced_if_it_must_be_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(files, "fsync_fd", synced.append)
    files.write_atomic(tmp_path / "record", "new", durable=durable)
    assert (tmp_path / "record").read_text() == "new"
    assert len(synced) == (2 if durable else 0)  # the file and the directory


def test_refused_write_leaves_the_old_file_only(tmp_path: Path) -> None:
    path = tmp_path / "record"
    path.write_text("old")

    def check() -> None:
        assert path.read_text() == "old"
        assert len(list(tmp_path.iterdir())) == 2  # all that remains to be done is the rename
        raise SupersededError("superseded")

    with pytest.raises(SupersededError):
        files.write_atomic(path, "new", guard=files.Guard("lease-00000001", check))
    assert [entry.name for entry in tmp_path.iterdir()] == ["record"]
    assert path.read_text() == "old"


def test_a_file_is_created_once_and_completely_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record"
    files.create(path, b"first")
    with pytest.raises(FileExistsError):
        files.create(path, b"second")
    assert path.read_bytes() == b"first"
    path.unlink()

    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "write_fd", full)
    with pytest.raises(OSError, match="No space left"):
        files.create(path, b"third")
    assert not path.exists()


class Holder:
    """A process that may be superseded."""

    def __init__(self, number: int) -> None:
        self.superseded = False
        self.guard = files.Guard(f"lease-{number:08d}", self._check)

    def _check(self) -> None:
        if self.superseded:
            raise SupersededError("superseded")


def test_late_rename_cannot_land_after_a_newer_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, older, newer = tmp_path / "record", Holder(1), Holder(2)
    real = files.rename

    def stopped(source: Path, target: Path) -> None:
        monkeypatch.setattr(files, "rename", real)
        older.superseded = True
        files.sweep(tmp_path, "lease", below=2)
        files.write_atomic(path, "newer", guard=newer.guard)
        real(source, target)

    monkeypatch.setattr(files, "rename", stopped)
    with pytest.raises(SupersededError):
        files.write_atomic(path, "older", guard=older.guard)
    assert path.read_text() == "newer"
    assert [entry.name for entry in tmp_path.iterdir()] == ["record"]


def test_late_appends_reach_no_current_file(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    older = files.replace(path, b"1\n")
    newer = files.replace(path, b"1\n")
    for fd, line in ((older, b"late\n"), (newer, b"2\n")):
        files.write_all(fd, line)
        files.close_fd(fd)
    assert path.read_text() == "1\n2\n"


def test_only_older_holders_temporary_files_are_swept(tmp_path: Path) -> None:
    both = Holder(2).guard.and_also(files.Guard("submission-00000007", lambda: None))
    left = ["a.json.tmp-lease-00000002-1-1", f"b.json.tmp-{both.tag}-1-1", "c\n.tmp-lease-00000001"]
    kept = ["a.json", "a.json.tmp-lease-00000003-1-1", "a.json.tmp-submission-00000001-1-1", "metrics.csv.tmp-2-1"]
    for name in (*left, *kept):
        (tmp_path / name).touch()
    files.sweep(tmp_path, "lease", below=3)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(kept)
    (tmp_path / f"b.json.tmp-{both.tag}-1-1").touch()
    files.sweep(tmp_path, "submission", below=8)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.json", kept[1], kept[3]]


def test_new_directories_are_synced_into_their_parents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sync each before the next is made, and the lowest existing one too: a kill may have come in between."""
    done: list[str] = []
    monkeypatch.setattr(files, "fsync_dir", lambda path: done.append(f"sync {path.name}"))
    real = files.make_dir

    def make(path: Path, *mode: int) -> None:
        done.append(f"make {path.name}")
        real(path, *mode)

    monkeypatch.setattr(files, "make_dir", make)
    files.make_dirs(tmp_path / "a" / "b")
    name = tmp_path.name
    assert done == [f"sync {tmp_path.parent.name}", "make a", f"sync {name}", "make b", "sync a"]
    done.clear()
    files.make_dirs(tmp_path / "a" / "b")
    assert done == ["sync a"]
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        files.make_dirs(tmp_path / "file" / "c")


def test_directory_made_at_the_same_moment_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two shells start the same run: the directory appears between the look that misses it and the next one."""
    real = files.is_taken

    def look(path: Path) -> bool:
        (tmp_path / "a").mkdir(exist_ok=True)
        return real(path)

    monkeypatch.setattr(files, "is_taken", look)
    files.make_dirs(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_file_system_without_directory_sync_is_written_to(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sync only its files. A refused sync of a file is an error."""

    def sync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files, "fsync_fd", sync)
    files.make_dirs(tmp_path / "a" / "b")
    files.write_atomic(tmp_path / "a" / "record", "new")
    files.create(tmp_path / "a" / "other", b"new")
    assert sorted(os.listdir(tmp_path / "a")) == ["b", "other", "record"]

    def refuse(fd: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files, "fsync_fd", refuse)
    with pytest.raises(OSError, match=os.strerror(code)):
        files.write_atomic(tmp_path / "a" / "record", "newer")
    assert (tmp_path / "a" / "record").read_text() == "new"


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.EACCES, errno.ENOTCONN])
def test_unsyncable_parent_does_not_block_a_directory(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files, "fsync_dir", refuse)
    files.make_dirs(tmp_path)
    with pytest.raises(OSError, match=os.strerror(code)) if code in (errno.EIO, errno.ENOTCONN) else nullcontext():
        files.make_dirs(tmp_path / "new")


def test_unremovable_leftover_does_not_keep_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the others could still be renamed by a process that wakes up later."""
    old = [tmp_path / f"{name}.json.tmp-lease-00000001-1-1" for name in "abcde"]
    newer = tmp_path / "a.json.tmp-lease-00000002-1-1"
    for path in (*old, newer):
        path.touch()
    remove = files.remove

    def refuses(path: Path) -> None:
        if path in old[1:4:2]:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        remove(path)

    monkeypatch.setattr(files, "remove", refuses)
    monkeypatch.setattr(files, "list_dir", lambda path: [each.name for each in (*old, newer)])
    with pytest.raises(OSError, match=re.escape(old[1].name)) as caught:
        files.sweep(tmp_path, "lease", 2)
    assert caught.value.errno == errno.EIO
    assert set(tmp_path.iterdir()) == {old[1], old[3], newer}


PLACES = (
    "file",
    "directory",
    "to file",
    "to directory",
    "to nothing",
    "circle",
    "fifo",
    "missing",
    "file/below",
    "a\0b",
)


@pytest.mark.parametrize("name", [*PLACES, "n" * 300])
@pytest.mark.parametrize(
    ("look", "as_path_does"),
    [
        (files.exists, Path.exists),
        (files.is_dir, Path.is_dir),
        (files.is_file, Path.is_file),
        (files.is_link, Path.is_symlink),
        (files.is_taken, lambda path: path.is_symlink() or path.exists()),
        (files.seems_dir, os.path.isdir),
        (files.resolve, Path.resolve),
    ],
)
def test_looks_at_a_path_agree_with_pathlib(
    tmp_path: Path, name: str, look: Callable[[Path], object], as_path_does: Callable[[Path], object]
) -> None:
    """Compare missing and unreadable paths as well: the errors are equal."""
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for link, target in (("file", "file"), ("directory", "directory"), ("nothing", "nowhere")):
        (tmp_path / f"to {link}").symlink_to(target)
    (tmp_path / "circle").symlink_to("circle")

    def told(function: Callable[[Path], object]) -> object:
        try:
            return function(tmp_path / name)
        except (OSError, ValueError, RuntimeError) as error:
            return type(error), str(error)

    assert told(look) == told(as_path_does)


def test_a_new_file_is_new_and_has_the_usual_mode(tmp_path: Path) -> None:
    with files.open_new(tmp_path / "new") as file:
        file.write(b"1")
    (tmp_path / "other").touch()
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "other").stat().st_mode
    with pytest.raises(FileExistsError):
        files.open_new(tmp_path / "new")
    assert (tmp_path / "new").read_bytes() == b"1"


def test_an_access_list_is_seen(tmp_path: Path) -> None:
    """An access list may let others write where the mode of the file does not."""
    path = tmp_path / "config.yaml"
    path.write_text("")
    assert not files.has_access_list(path)
    assert not files.has_access_list(tmp_path / "missing")
    owner, user, group, mask, others, nobody = 0x01, 0x02, 0x04, 0x10, 0x20, 0xFFFFFFFF
    entries = [(owner, 6, nobody), (user, 6, 12345), (group, 4, nobody), (mask, 6, nobody), (others, 4, nobody)]
    content = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    try:
        os.setxattr(path, "system.posix_acl_access", content)
    except (OSError, AttributeError) as error:
        pytest.skip(f"no access lists here: {error}")
    assert files.has_access_list(path)
