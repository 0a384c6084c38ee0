"""Read samples in any order from tar files in WebDataset format."""

from __future__ import annotations

import os
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from torch.utils.data import Dataset

from exactdata.errors import DataError
from exactdata.order.arrays import I64
from exactdata.paths import cache_directory, expand
from exactdata.shards import with_more_files

FORMAT = 1
"""Version of the index format, which is part of the index's file name. Increase it when the format changes."""
BLOCK = 512
ENDS = 1 << 16
"""Maximum number of bytes of a file's first and last samples that the fingerprint covers."""
COMPRESSED = {b"\x1f\x8b": "gzip -d", b"BZh": "bzip2 -d", b"\xfd7zXZ": "xz -d", b"\x28\xb5\x2f\xfd": "zstd -d"}
NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
"""Key and extension of a member. As in WebDataset, the key ends at the first dot in the file name."""


class TarSamples(Dataset[Any]):
    """Samples in tar files in WebDataset format, where consecutive members with the same key form one sample.

    A sample is a dict such as `{"__key__": "train/0001", "jpg": bytes, "cls": bytes}`. Extensions are converted to
    lower case, and members without an extension are skipped. The headers of a file are read once and stored as an index
    in the cache.

    Example:
        ```python
        import tarfile
        from pathlib import Path

        from exactdata import StatefulDataLoader
        from exactdata.tar_samples import TarSamples

        with tarfile.open("train.tar", "w") as tar:
            for number in range(8):
                Path(f"{number:04d}.cls").write_text(str(number % 2))
                tar.add(f"{number:04d}.cls")
        data = TarSamples("train.tar", decode=lambda sample: int(sample["cls"]))
        loader = StatefulDataLoader(data, batch_size=4, shuffle=True)
        print([batch.tolist() for batch in loader])
        ```

    Args:
        paths: a file, a folder (of `*.tar`), a glob, or a list of these.
        decode: called with each dict, returns the sample. If None, the dict is the sample.
        cache_dir: directory of the indices. If None, $RUNNER_CACHE, or ~/.cache/runner if that is not set.

    Raises:
        DataError: a file is missing, compressed, damaged, empty or in an unknown format, or the cache cannot be
            written.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        decode: Callable[[dict[str, Any]], Any] | None = None,
        cache_dir: str | Path | None = None,
    ) -> None:
        self.files = [TarFile(file, cache_directory(cache_dir)) for file in expand(paths, "*.tar")]
        self.decode = decode
        self.ends: I64 = np.cumsum([len(file) for file in self.files])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, index: int) -> Any:
        """Read one sample.

        Raises:
            IndexError: there is no sample with this index.
            DataError: the file has changed.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside [0, {len(self)})")
        number = int(np.searchsorted(self.ends, index, side="right"))
        sample = self.files[number].read(index - int(self.ends[number]))
        return sample if self.decode is None else self.decode(sample)

    def fingerprint(self) -> dict[str, Any]:
        """Return a fingerprint of the names, sizes and order of all members, and the content of each file's ends."""
        digest = xxhash.xxh3_64()
        for file in self.files:
            digest.update(file.digest())
        return {"samples": len(self), "files": len(self.files), "content": digest.hexdigest()}


class TarFile:
    """A tar file, opened when it is first read.

    Args:
        path: the file.
        cache: the directory of its index.

    Raises:
        DataError: as for `TarSamples`.
    """

    def __init__(self, path: Path, cache: Path) -> None:
        self.path = path.absolute()
        self.cache = cache
        self.stat = _identity(os.stat(path))
        self._load()

    def _load(self) -> None:
        self._descriptor: int | None = None
        name = xxhash.xxh3_128_hexdigest(os.fsencode(f"{FORMAT} {self.stat} {self.path}"))
        index = load_index(self.path, self.cache / f"tar-{name}.npy")
        samples, members = index[:2].tolist()
        parts = np.split(index[2:], np.cumsum([samples + 1, members, members, members + 1]))
        self._firsts, self._offsets, self._sizes, self._name_ends = parts[:4]
        self._index, self._names = index, parts[4].view(np.uint8)

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "cache": self.cache, "stat": self.stat}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._load()

    def __del__(self) -> None:
        if getattr(self, "_descriptor", None) is not None:
            os.close(self._descriptor)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def read(self, sample: int) -> dict[str, Any]:
        """Read all members of a sample in one read, as they are adjacent. A negative number counts from the end."""
        first, stop = self._firsts[:-1][sample].item(), self._firsts[1:][sample].item()
        offsets, sizes = self._offsets[first:stop].tolist(), self._sizes[first:stop].tolist()
        content = self._read(offsets[0], offsets[-1] + sizes[-1] - offsets[0])
        ends = self._name_ends[first : stop + 1].tolist()
        found: dict[str, Any] = {}
        for begin, end, offset, size in zip(ends, ends[1:], offsets, sizes, strict=False):
            key, extension = split_name(_text(self._names[begin:end].tobytes()))
            found.setdefault("__key__", key)
            found[extension] = content[offset - offsets[0] :][:size]
        return found

    def _read(self, offset: int, size: int) -> bytes:
        if self._descriptor is None:
            descriptor = with_more_files(self.path, lambda: os.open(self.path, os.O_RDONLY | os.O_CLOEXEC))
            if _identity(os.fstat(descriptor)) != self.stat:
                os.close(descriptor)
                raise DataError(f"{self.path}: it has changed since it was opened: start again when it is complete")
            self._descriptor = descriptor
        parts = []
        while size > 0:  # one call reads at most 2 GiB
            part = os.pread(self._descriptor, size, offset)  # uses no file position, which forked processes would share
            if not part:
                raise DataError(f"{self.path}: ends at byte {offset}, {size} bytes too early: restore the file")
            parts.append(part)
            offset, size = offset + len(part), size - len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def digest(self) -> bytes:
        """Compute a digest of the index and of up to `ENDS` bytes each of the first and the last sample."""
        digest = xxhash.xxh3_64(self._index.tobytes())
        for first, last in ((0, self._firsts[1] - 1), (self._firsts[-2], -1)):
            begin, end = int(self._offsets[first]), int(self._offsets[last] + self._sizes[last])
            digest.update(self._read(begin, min(end - begin, ENDS)))
        return digest.digest()


def _identity(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_size, stat.st_mtime_ns


def _text(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


def split_name(name: str) -> tuple[str, str]:
    """Split the name of a member into a key and an extension. The extension may be empty."""
    found = NAME.fullmatch(name)
    return (found[1], found[2].lower()) if found else (name, "")


def load_index(path: Path, cached: Path) -> I64:
    """Memory-map the index of a tar file. Create the index first if it is missing or damaged.

    Several processes may create it at the same time, because each renames a complete file into place.

    Returns:
        An int64 array, which concatenates the numbers of samples and members, the first member of each sample and the
        end, the offset of each member's content, the size of each member's content, 0 and the end of each name, and the
        padded names.

    Raises:
        DataError: as for `TarSamples`.
    """
    try:
        mapped: I64 = with_more_files(path, lambda: np.load(cached, mmap_mode="r").view(np.ndarray))
        return mapped
    except DataError:
        raise
    except (OSError, ValueError, EOFError):
        index = make_index(path)
    temporary = None
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=".preparing-", dir=cached.parent)
        with open(descriptor, "wb") as file:
            np.save(file, index)
            file.flush()
            os.fsync(descriptor)
            os.fchmod(descriptor, 0o644)
        os.replace(temporary, cached)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise DataError(
            f"{cached.parent}: cannot write the index of {path} here ({error.strerror or error}): set cache_dir or "
            "RUNNER_CACHE to a folder that every node can read and write"
        ) from error
    return index


def make_index(path: Path) -> I64:
    """Read the headers of a tar file and create its index. Returns and raises the same as `load_index`."""
    firsts: list[int] = []
    places: list[tuple[int, int]] = []
    names: list[bytes] = []
    keys: set[str] = set()
    last: tuple[str, set[str]] = ("", set())
    for member in members(path):
        key, extension = split_name(member.name)
        if not extension:
            continue
        if key != last[0]:
            last = key, set()
            firsts.append(len(names))
        if extension in last[1] or (not last[1] and key in keys):
            raise DataError(
                f"{path}: at byte {member.offset} {member.name!r} belongs to a sample that already "
                + ("has this extension" if last[1] else "ended, because other members follow it")
                + ": write each member once, those of a sample one after the other (tar --sort=name)"
            )
        keys.add(key)
        last[1].add(extension)
        places.append((member.offset_data, member.size))
        names.append(member.name.encode("utf-8", "surrogateescape"))
    if not names:
        raise DataError(f"{path}: has no members with an extension in {path.stat().st_size} bytes: leave the file out")
    text = b"".join(names)
    padded = np.frombuffer(text + bytes(-len(text) % 8), np.int64)
    offsets, sizes = zip(*places, strict=True)
    ends = np.cumsum([0, *map(len, names)])
    parts = ([len(firsts), len(names)], firsts, [len(names)], offsets, sizes, ends, padded)
    return np.concatenate([np.asarray(part, np.int64) for part in parts])


def members(path: Path) -> Iterator[tarfile.TarInfo]:
    """Yield the regular members of a tar file. Only headers are read.

    Raises:
        DataError: the file is compressed, truncated or damaged, or has members whose content is not contiguous.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        head = file.read(8)
        for magic, command in COMPRESSED.items():
            if head.startswith(magic):
                raise DataError(f"{path}: is compressed, and so no member can be read by itself: unpack it ({command})")
        file.seek(0)
        at = 0
        try:
            archive = tarfile.TarFile(fileobj=file)
            while (member := archive.next()) is not None:
                at = member.offset
                if member.offset_data + member.size > size:
                    raise DataError(
                        f"{path}: is truncated: at byte {at} {member.name!r} has {member.size} bytes, of which "
                        f"{max(0, size - member.offset_data)} are there: copy the file again"
                    )
                if member.isreg() and not member.issparse():
                    yield member
                elif not member.isdir():
                    raise DataError(
                        f"{path}: at byte {at} {member.name!r} is a link, sparse or no file: pack the files themselves "
                        "(tar --dereference --hard-dereference)"
                    )
            at = archive.offset
        except (tarfile.TarError, ValueError, OSError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{path}: no tar header can be read after byte {at} ({error}): copy it again") from error
        file.seek(at)
        _check_end(file.read(), path, at)


def _check_end(rest: bytes, path: Path, at: int) -> None:
    """Check the bytes after the end that `tarfile` found, where it misses damage or a second archive."""
    if len(rest) < BLOCK:
        raise DataError(f"{path}: is truncated: it ends at byte {at + len(rest)} without an end mark: copy it again")
    if any(rest):
        raise DataError(
            f"{path}: what follows byte {at} is not the end of a tar file: copy it again, or if files were "
            "concatenated, use them one by one"
        )
