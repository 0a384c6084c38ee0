"""Reads the tensors of a checkpoint without running anything that is in it.

The files are what torch.distributed.checkpoint writes: `.metadata`, a pickle that says which piece of
which tensor lies where, and `.distcp` files, in which each piece is a small torch.save archive. torch's
own reader unpickles `.metadata` freely, which runs whatever a stranger put there. Here an unpickler that
knows a dozen names makes plain records of it, and pieces are read with `weights_only=True`.

Pieces are matched by their place in the whole tensor, so a checkpoint of any number of ranks fills a
model on any other number.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from runner.checkpoint.manifest import Manifest, open_regular
from runner.errors import CheckpointError

METADATA = ".metadata"
TRAIN_STATE = "train_state.pt"


class _Record:
    """Stands for an object of torch.distributed.checkpoint: its fields, none of its code."""

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
        raise CheckpointError(f"it asks for {module}.{name}, which no checkpoint needs; it was not run")


@dataclass(frozen=True)
class Chunk:
    """A piece of a tensor: where it begins in the whole, its shape, and where its bytes are."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


@dataclass(frozen=True)
class Entry:
    """A tensor of the checkpoint: shape, dtype, and its pieces."""

    size: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


class Archive:
    """The tensors of one checkpoint directory, by flat name (`model.…`, `optimizer.state.…`).

    Raises:
        CheckpointError: what is in the files is not what a checkpoint holds.
    """

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self._files = manifest.files
        self._open: dict[str, int] = {}
        try:
            with open(self._descriptor(METADATA), "rb") as file:
                self.entries = _entries(_Unpickler(file).load(), manifest)
        except CheckpointError as error:
            raise CheckpointError(f"{directory / METADATA} is refused: {error}") from error
        except Exception as error:  # a crafted pickle can fail in any way it likes
            raise CheckpointError(f"{directory / METADATA} is refused: {type(error).__name__}: {error}") from error

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *exception: object) -> None:
        for descriptor in self._open.values():
            os.close(descriptor)
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
        """Fill `target` with the part of the tensor `name` that begins at `offsets` and has its shape.

        Raises:
            CheckpointError: the pieces do not cover it, or are not what `.metadata` says.
        """
        missing = target.numel()
        for chunk in self.entries[name].chunks:
            overlap = _overlap(chunk, offsets, target.shape)
            if overlap is None:
                continue
            into, source = overlap
            piece = self._piece(name, chunk)
            target[into].copy_(piece[source])
            missing -= target[into].numel()
        if missing:
            raise CheckpointError(f"{self.directory}: {missing} values of {name!r} are in no file")

    def _piece(self, name: str, chunk: Chunk) -> torch.Tensor:
        if chunk.file not in self._open:
            self._open[chunk.file] = self._descriptor(chunk.file)
        view = _View(self._open[chunk.file], chunk.start, chunk.length)
        try:
            piece = torch.load(io.BufferedReader(view), map_location="cpu", weights_only=True)
        except Exception as error:
            raise CheckpointError(
                f"{self.directory / chunk.file} is refused: {name!r} is no plain tensor there ({_first_line(error)})"
            ) from error
        if not isinstance(piece, torch.Tensor) or tuple(piece.shape) != chunk.sizes:
            raise CheckpointError(f"{self.directory / chunk.file}: {name!r} is not the tensor that .metadata describes")
        return piece

    def _descriptor(self, name: str) -> int:
        if name not in self._files:
            raise CheckpointError(f"{name!r} is not in the manifest")
        return open_regular(self.directory / name)


def load_train_state(directory: Path) -> dict[str, Any]:
    """The contents of train_state.pt: plain values and tensors, nothing that runs.

    Raises:
        CheckpointError: it holds anything else.
    """
    path = directory / TRAIN_STATE
    try:
        with open(open_regular(path), "rb") as file:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} is refused: it is not made of numbers, strings and tensors alone ({_first_line(error)}); "
            "nothing in it was run"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is refused: it holds a {type(state).__name__}, not a train state")
    return state


def _first_line(error: Exception) -> str:
    """torch's advice on `weights_only` runs over many lines; the offending name is what helps."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "GLOBAL" in line or "WeightsUnpickler error" in line]
    return " ".join([*named, *lines, type(error).__name__][0].split())[:160]


def _entries(metadata: Any, manifest: Manifest) -> dict[str, Entry]:
    """Records as entries, each piece checked to lie within a file of the checkpoint."""
    places = {index.key(): info for index, info in metadata.storage_data.items()}
    entries = {}
    for name, described in metadata.state_dict_metadata.items():
        if not hasattr(described, "chunks"):
            raise CheckpointError(f"{name!r} is a pickled object, not a tensor; it was not loaded")
        size, dtype = tuple(described.size), described.properties.state[0]
        if not isinstance(dtype, torch.dtype):
            raise CheckpointError(f"{name!r} has no dtype")
        chunks = tuple(_chunk(name, piece, places, manifest) for piece in described.chunks)
        entries[str(name)] = Entry(size, dtype, chunks)
    return entries


def _chunk(name: str, piece: Any, places: dict[Any, Any], manifest: Manifest) -> Chunk:
    offsets, sizes = tuple(piece.offsets), tuple(piece.sizes)
    place = places[name, offsets]
    file, start, length = place.relative_path, int(place.offset), int(place.length)
    if file not in manifest.files:
        raise CheckpointError(f"{name!r} is said to be in {file!r}, which is not a file of the checkpoint")
    if not 0 <= start <= start + length <= manifest.files[file].size:
        raise CheckpointError(f"{name!r} is said to be beyond the end of {file!r}")
    return Chunk(offsets, sizes, file, start, length)


def _overlap(
    chunk: Chunk, offsets: Sequence[int], sizes: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Where a wanted region and a piece meet: slices of the region, and of the piece."""
    into, source = [], []
    for wanted, size, have, extent in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True):
        start, stop = max(wanted, have), min(wanted + size, have + extent)
        if start >= stop:
            return None
        into.append(slice(start - wanted, stop - wanted))
        source.append(slice(start - have, stop - have))
    return tuple(into), tuple(source)


class _View(io.RawIOBase):
    """A stretch of a file, as a file."""

    def __init__(self, descriptor: int, start: int, length: int) -> None:
        super().__init__()
        self._fd = descriptor
        self._start = start
        self._length = length
        self._position = 0

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
        count = os.preadv(self._fd, [view], self._start + self._position) if view else 0
        self._position += count
        return count


def tensors(directory: Path, manifest: Manifest, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors whose name starts with `prefix`, one at a time, by the rest of the name."""
    with Archive(directory, manifest) as archive:
        for name in archive.names(prefix):
            yield name, archive.read(prefix + name)
