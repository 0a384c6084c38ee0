"""Reads the tensors of a checkpoint without running anything it contains.

The files are those of torch.distributed.checkpoint: `.metadata`, a pickle that names the file and offset of each chunk
of each tensor, and `.distcp` files, in which each chunk is a small torch.save archive. torch's own reader unpickles
`.metadata` without restrictions, which runs any code in it. Here an unpickler that knows a dozen names turns it into
plain records, and chunks are read with `weights_only=True`.

Chunks are matched by their offset in the whole tensor, so a checkpoint saved on any number of ranks can be loaded on
any other number.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from runner.checkpoint.manifest import TRAIN_STATE, Manifest
from runner.checkpoint.reading import patiently, unreadable
from runner.errors import CheckpointError
from runner.system import files

METADATA = ".metadata"


class _Record:
    """In place of an object of torch.distributed.checkpoint: its fields without its code."""

    def __init__(self, *values: Any) -> None:
        self.values = values

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __getattr__(self, name: str) -> Any:
        state = self.__dict__.get("state")
        if isinstance(state, dict) and name in state:
            return state[name]
        raise AttributeError(name)

    def key(self) -> tuple[Any, ...]:
        """(name, offset) of a MetadataIndex."""
        return self.fqn, tuple(self.offset or ())

    def __hash__(self) -> int:
        return hash(self.key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Record) and self.key() == other.key()


_RECORDS = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath"},
    "torch.serialization": {"_get_layout"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _RECORDS.get(module, ()):
            return _Record
        if module == "torch":
            value = getattr(torch, name, None) if name != "Size" else tuple
            if value is tuple or isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
                return value
        raise CheckpointError(f"it refers to {module}.{name}, which no checkpoint needs; it was not run")


@dataclass(frozen=True)
class Chunk:
    """A stored part of a tensor.

    Attributes:
        offsets: where it begins in the whole tensor, by dimension.
        sizes: its shape.
        file: the file that contains it.
        start: offset in the file, in bytes.
        length: length in the file, in bytes.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Entry:
    """A tensor of the checkpoint: shape, dtype and chunks."""

    size: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class CheckpointReader:
    """The tensors of one checkpoint directory, by flat name (`model.…`, `optimizer.state.…`); a context manager.

    Raises:
        CheckpointError: a file contains something that does not belong in a checkpoint.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self._open: dict[str, _Source] = {}
        if METADATA not in manifest.files:
            raise CheckpointError(f"{directory / METADATA} is refused: it is not in the manifest")
        raw = read_whole(directory / METADATA)
        try:
            self.entries = _entries(_Unpickler(io.BytesIO(raw)).load(), manifest)
        except CheckpointError as error:
            raise CheckpointError(f"{directory / METADATA} is refused: {error}") from error
        except Exception as error:  # a crafted pickle can raise anything
            raise CheckpointError(f"{directory / METADATA} is refused: {type(error).__name__}: {error}") from error

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exception: object) -> None:
        for file in self._open.values():
            file.close()
        self._open = {}

    def names(self, prefix: str) -> dict[str, Entry]:
        """Entries whose name starts with `prefix`, by the rest of the name."""
        return {name[len(prefix) :]: entry for name, entry in self.entries.items() if name.startswith(prefix)}

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU."""
        entry = self.entries[name]
        target = torch.empty(entry.size, dtype=entry.dtype)
        self.read_into(name, target, (0,) * len(entry.size))
        return target

    @torch.no_grad()
    def read_into(self, name: str, target: torch.Tensor, offsets: Sequence[int]) -> None:
        """Fill `target` with the part of the tensor `name` that begins at `offsets`.

        Raises:
            CheckpointError: the chunks do not cover it, or do not match `.metadata`.
        """
        missing = target.numel()
        for chunk in self.entries[name].chunks:
            overlap = _overlap(chunk, offsets, target.shape)
            if overlap is None:
                continue
            into, source = overlap
            target[into].copy_(self._read_chunk(name, chunk)[source])
            missing -= target[into].numel()
        if missing:
            raise CheckpointError(f"{self.directory}: {missing} values of {name!r} are missing from its files")

    def _read_chunk(self, name: str, chunk: Chunk) -> torch.Tensor:
        if chunk.file not in self._open:
            self._open[chunk.file] = _Source(self.directory / chunk.file)
        view = _View(self._open[chunk.file], chunk.start, chunk.length)
        try:
            tensor = torch.load(io.BufferedReader(view), map_location="cpu", weights_only=True)
        except Exception as error:
            if view.error is not None:
                raise view.error from None
            raise CheckpointError(
                f"{self.directory / chunk.file} is refused: {name!r} is not a plain tensor ({_first_line(error)})"
            ) from error
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != chunk.sizes:
            raise CheckpointError(f"{self.directory / chunk.file}: {name!r} is not the tensor that .metadata describes")
        return tensor


def read_whole(path: Path) -> bytes:
    """The content of a file of a checkpoint that has been verified.

    Raises:
        CheckpointError: it is not readable.
    """

    def read() -> bytes:
        with files.open_regular(path) as file:
            return file.read()

    try:
        return patiently(path, read)
    except OSError as error:
        raise unreadable(path, error) from error


def load_train_state(directory: Path) -> dict[str, Any]:
    """The content of train_state.pt: plain values and tensors.

    Raises:
        CheckpointError: it contains anything else, or is not readable.
    """
    path = directory / TRAIN_STATE
    raw = read_whole(path)
    try:
        state = torch.load(io.BytesIO(raw), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} is refused: it contains something other than numbers, strings and tensors ({_first_line(error)}); "
            "nothing in it was run"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is refused: it contains a {type(state).__name__} instead of a train state")
    return state


def _first_line(error: Exception) -> str:
    """The line of torch's long advice on `weights_only` that names the offending class, or the first one."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "GLOBAL" in line or "WeightsUnpickler error" in line]
    return " ".join([*named, *lines, type(error).__name__][0].split())[:160]


def _entries(metadata: Any, manifest: Manifest) -> dict[str, Entry]:
    """Records as entries; every chunk is checked to be inside a file of the checkpoint."""
    locations = {index.key(): info for index, info in metadata.storage_data.items()}
    entries = {}
    for name, described in metadata.state_dict_metadata.items():
        if not hasattr(described, "chunks"):
            raise CheckpointError(f"{name!r} is a pickled object, not a tensor; it was not loaded")
        size, dtype = tuple(described.size), described.properties.state[0]
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{name!r} has no dtype")
        chunks = tuple(_chunk(name, chunk, locations, manifest) for chunk in described.chunks)
        entries[str(name)] = Entry(size, dtype, chunks)
    return entries


def _chunk(name: str, record: Any, locations: dict[Any, Any], manifest: Manifest) -> Chunk:
    offsets, sizes = tuple(record.offsets), tuple(record.sizes)
    location = locations[name, offsets]
    file, start, length = location.relative_path, int(location.offset), int(location.length)
    if file not in manifest.files:
        raise CheckpointError(f"{name!r} should be in {file!r}, which is not a file of the checkpoint")
    if not 0 <= start <= start + length <= manifest.files[file].size:
        raise CheckpointError(f"{name!r} should be beyond the end of {file!r}")
    return Chunk(offsets, sizes, file, start, length)


def _overlap(
    chunk: Chunk, offsets: Sequence[int], sizes: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where a region of a tensor and a chunk overlap: slices of the region and of the chunk; None if nowhere."""
    into, source = [], []
    for begin, size, chunk_begin, chunk_size in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True):
        start, stop = max(begin, chunk_begin), min(begin + size, chunk_begin + chunk_size)
        if start >= stop:
            return None
        into.append(slice(start - begin, stop - begin))
        source.append(slice(start - chunk_begin, stop - chunk_begin))
    return tuple(into), tuple(source)


class _Source:
    """A file of a checkpoint that is opened when it is first read, and anew after an error."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None

    def read_into(self, start: int, view: memoryview) -> int:
        """Fill `view` with what begins at `start`; returns the number of bytes.

        Raises:
            CheckpointError: it is not readable.
        """
        try:
            return patiently(self._path, lambda: self._read_into(start, view))
        except OSError as error:
            raise unreadable(self._path, error) from error

    def _read_into(self, start: int, view: memoryview) -> int:
        try:
            if self._file is None:
                self._file = files.open_regular(self._path)
            self._file.seek(start)
            count: int = self._file.readinto(view)  # type: ignore[attr-defined]
            return count
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()


class _View(io.RawIOBase):
    """A range of a file, as a file of its own."""

    def __init__(self, source: _Source, start: int, length: int) -> None:
        super().__init__()
        self._source = source
        self._start = start
        self._length = length
        self._position = 0
        self.error: CheckpointError | None = None
        """Why the file could not be read: torch.load replaces it by an error of its own."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        self._position = max(base + offset, 0)
        return self._position

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        view = view[: max(self._length - self._position, 0)]
        try:
            count = self._source.read_into(self._start + self._position, view)
        except CheckpointError as error:
            self.error = error
            raise
        self._position += count
        return count


def tensors(directory: Path, manifest: Manifest, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors whose name starts with `prefix`, one at a time, with the rest of the name."""
    with CheckpointReader(directory, manifest) as reader:
        for name in reader.names(prefix):
            yield name, reader.read(prefix + name)
