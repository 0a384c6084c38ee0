"""Read the tensors of a checkpoint without running code from it. Only names and numbers are read; see `layout`.

Chunks are matched by their offset in the complete tensor, so a checkpoint can be loaded on a different number of ranks.
They are read directly into the target memory, without an intermediate copy. Files can be verified in the same pass.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import torch

from runner.checkpoint.files import manifest as manifests
from runner.checkpoint.files.manifest import TRAIN_STATE, CorruptionError, Manifest
from runner.checkpoint.files.reading import patiently, unreadable
from runner.checkpoint.files.store import BLOCK_BYTES, FileRecord, Stored, new_hash
from runner.checkpoint.tensors import layout, plain
from runner.checkpoint.tensors.layout import INDEX, Chunk, Entry
from runner.errors import CheckpointError

_DIRECT_BYTES = 1 << 18
"""Chunks of at least this size are read directly into their target. Smaller ones are read together and copied."""

_STAGED_BYTES = 16 << 20
"""Number of bytes read at once for targets that need a copy, e.g. on a GPU."""

_OPEN_FILES = 64
"""Maximum number of files kept open for later reads. A checkpoint has one file for each rank that saved it."""


@dataclass(frozen=True)
class _Piece:
    """A range of bytes in a file, and the tensor that they fill.

    Attributes:
        start: offset in the file, in bytes.
        length: number of bytes.
        target: tensor to fill, with any layout and on any device.
        memory: memory of the target, if the bytes can be read directly into it.
        dtype: dtype of the values in the file.
        shape: shape of the values in the file, which are complete rows of a chunk.
        part: slices of these rows that `target` receives; empty if it receives all.
    """

    start: int
    length: int
    target: torch.Tensor
    memory: memoryview | None
    dtype: torch.dtype
    shape: tuple[int, ...]
    part: tuple[slice, ...]

    @property
    def stop(self) -> int:
        return self.start + self.length

    def put(self, content: memoryview) -> None:
        """Copy content, which was read into a separate buffer, to the target."""
        if self.memory is not None:
            self.memory[:] = content
            return
        held = torch.empty(self.shape, dtype=self.dtype)
        layout.memory(held)[:] = content
        self.target.copy_(held[self.part] if self.part else held)


class CheckpointReader:
    """Read the tensors of one checkpoint by flat name (`model.…`, `optimizer.state.…`), as a context manager.

    Raises:
        CorruptionError: the index differs from what was written.
        CheckpointError: the index contains an object that does not belong in a checkpoint, or is not readable.
    """

    def __init__(self, at: Stored, manifest: Manifest) -> None:
        self._at = at
        self._manifest = manifest
        self._open: dict[str, _Source] = {}
        self._wanted: dict[str, list[_Piece]] = {}
        raw = manifests.read_verified(at, INDEX, manifest)
        try:
            self.entries = layout.entries(raw, manifest)
        except CheckpointError as error:
            raise CheckpointError(f"{at.path / INDEX} is refused: {error}") from error

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def _close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open = {}

    def names(self, prefix: str) -> dict[str, Entry]:
        """Return the entries whose name starts with `prefix`, keyed by the rest of the name."""
        return {name[len(prefix) :]: entry for name, entry in self.entries.items() if name.startswith(prefix)}

    def read(self, name: str) -> torch.Tensor:
        """Read a complete tensor to the CPU."""
        entry = self.entries[name]
        target = torch.empty(entry.size, dtype=entry.dtype)
        self.want(name, target, (0,) * len(entry.size))
        self.fetch()
        return target

    def want(self, name: str, target: torch.Tensor, offsets: Sequence[int]) -> None:
        """Request the part of tensor `name` that begins at `offsets`. The next `fetch` reads it into `target`.

        Raises:
            CheckpointError: the chunks do not cover that part.
        """
        target = target.detach()
        missing = target.numel()
        for chunk in self.entries[name].chunks:
            overlap = _overlap(chunk, offsets, target.shape)
            if overlap is None:
                continue
            into, source = overlap
            part = target[into] if into else target
            missing -= part.numel()
            self._wanted.setdefault(chunk.file, []).extend(_pieces(chunk, self.entries[name].dtype, part, source))
        if missing > 0:
            raise CheckpointError(f"{self._at.path}: {missing} values of {name!r} are missing from its files")

    @torch.no_grad()
    def fetch(self, verified: Collection[str] = ()) -> None:
        """Read all requested parts.

        Args:
            verified: names of files to read completely and compare with the manifest. A file that differs is read a
                second time.

        Raises:
            CorruptionError: one of the `verified` files differs from what was written. The contents of the targets are
                then undefined.
            CheckpointError: a file is not readable.
        """
        wanted, self._wanted = self._wanted, {}
        for name in sorted({*wanted, *verified}):
            if len(self._open) >= _OPEN_FILES:
                self._close()
            pieces = sorted(wanted.get(name, ()), key=lambda piece: piece.start)
            if name in verified:
                manifests.twice(partial(self._read_verified, name, pieces))
            else:
                for piece in pieces:
                    _read_piece(self._source(name), piece)

    def _source(self, name: str) -> _Source:
        if name not in self._open:
            self._open[name] = _Source(self._at, name)
        return self._open[name]

    def _read_verified(self, name: str, pieces: Sequence[_Piece]) -> None:
        """Read a complete file once, sequentially, and fill the pieces from it."""
        expected, source = self._manifest.files[name], self._source(name)
        try:
            size = source.size()
            digest = _Sweep(source, pieces).run(size) if size == expected.size else ""
            manifests.compare(name, FileRecord(size, digest), expected)
        except CorruptionError:
            source.close()  # so that the second check opens it again
            raise
        except OSError as error:
            raise CorruptionError(f"{name} cannot be read ({error.strerror})") from error


def load_train_state(at: Stored, manifest: Manifest) -> dict[str, Any]:
    """Load train_state.pt, which contains plain values and tensors.

    Raises:
        CorruptionError: the file differs from what was written.
        CheckpointError: the file contains anything else, or is not readable.
    """
    path = at.path / TRAIN_STATE
    raw = manifests.read_verified(at, TRAIN_STATE, manifest)
    try:
        state = plain.load(raw)
    except ValueError as error:
        raise CheckpointError(f"{path} is refused: {_first_line(error)}; nothing in it was run") from error
    except Exception as error:
        raise CheckpointError(
            f"{path} is refused: it contains something other than numbers, strings and tensors ({_first_line(error)}); "
            "nothing in it was run"
        ) from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} is refused: it contains {type(state).__name__!r} instead of a train state")
    return state


def _first_line(error: Exception) -> str:
    """Return the line of torch's `weights_only` error that names the rejected class, or else the first line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "GLOBAL" in line or "WeightsUnpickler error" in line]
    return " ".join([*named, *lines, type(error).__name__][0].split())[:160]


def _overlap(
    chunk: Chunk, offsets: Sequence[int], sizes: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """Return the overlap of a region of a tensor and a chunk, as slices of each, or None if they do not overlap."""
    into, source = [], []
    for begin, size, chunk_begin, chunk_size in zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True):
        start, stop = max(begin, chunk_begin), min(begin + size, chunk_begin + chunk_size)
        if start >= stop:
            return None
        into.append(slice(start - begin, stop - begin))
        source.append(slice(start - chunk_begin, stop - chunk_begin))
    return tuple(into), tuple(source)


def _pieces(chunk: Chunk, dtype: torch.dtype, target: torch.Tensor, source: tuple[slice, ...]) -> Iterator[_Piece]:
    """Yield the pieces of a file that hold the part `source` of a chunk, to be read into `target`."""
    if not target.numel():
        return
    rows, others = (source[0], chunk.sizes[1:]) if source else (slice(0, 1), ())
    whole_rows = all(part == slice(0, size) for part, size in zip(source[1:], others, strict=True))
    part = () if whole_rows else (slice(None), *source[1:])
    length = math.prod(others) * dtype.itemsize  # bytes per row
    start, count = chunk.start + rows.start * length, rows.stop - rows.start
    memory = _memory(target, dtype) if whole_rows else None
    if memory is not None or not source:
        yield _Piece(start, count * length, target, memory, dtype, (count, *others) if source else (), part)
        return
    step = max(_STAGED_BYTES // length, 1)
    for begin in range(0, count, step):
        some = target[begin : begin + step]
        yield _Piece(start + begin * length, len(some) * length, some, None, dtype, (len(some), *others), part)


def _memory(target: torch.Tensor, dtype: torch.dtype) -> memoryview | None:
    """Return the memory of a tensor if file content can be read directly into it, or None."""
    plain = target.is_cpu and target.dtype == dtype and target.is_contiguous()
    return layout.memory(target) if plain and not target.is_conj() and not target.is_neg() else None


class _Source:
    """A file of a checkpoint, opened at the first read and again after an error."""

    def __init__(self, at: Stored, name: str) -> None:
        self._at = at
        self._name = name
        self._path = at.path / name
        self._file: BinaryIO | None = None
        self._size = self._position = 0

    def size(self) -> int:
        """Return the size of the file in bytes.

        Raises:
            CheckpointError: the file is not readable.
            OSError: the file is missing or not a regular file.
        """
        patiently(self._path, self._opened)
        return self._size

    def read(self, start: int, view: memoryview) -> None:
        """Fill `view` with the bytes that begin at `start`.

        Raises:
            CheckpointError: the file is not readable.
            CorruptionError: the file is too short.
        """
        try:
            count = patiently(self._path, lambda: self._read(start, view))
        except OSError as error:
            raise unreadable(self._path, error) from error
        if count < len(view):
            raise CorruptionError(f"{self._name} ends at byte {start + count}")

    def _opened(self) -> BinaryIO:
        if self._file is None:
            (self._file, self._size), self._position = self._at.open(self._name), 0
        return self._file

    def _read(self, start: int, view: memoryview) -> int:
        try:
            file = self._opened()
            if self._position != start:
                file.seek(start)
            count: int = file.readinto(view)  # type: ignore[attr-defined]
            self._position = start + count
            return count
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()


def _read_piece(source: _Source, piece: _Piece) -> None:
    try:
        if piece.memory is not None:
            source.read(piece.start, piece.memory)
        else:
            held = memoryview(bytearray(piece.length))
            source.read(piece.start, held)
            piece.put(held)
    except CorruptionError as error:  # the file is not verified in this pass
        raise CheckpointError(f"{error}: it was changed while it was read") from error


class _Sweep:
    """Read a file once, sequentially, hashing every byte and filling pieces."""

    def __init__(self, source: _Source, pieces: Sequence[_Piece]) -> None:
        self._source = source
        self._large = [piece for piece in pieces if piece.length >= _DIRECT_BYTES]
        self._small = deque(piece for piece in pieces if piece.length < _DIRECT_BYTES)
        self._late: list[_Piece] = []
        self._hash = new_hash()
        self._block = memoryview(bytearray(BLOCK_BYTES))

    def run(self, size: int) -> str:
        """Fill the pieces and return the hash of the file, which has `size` bytes."""
        position = 0
        for piece in self._large:
            if piece.start < position:  # its bytes overlap a piece that was already read
                self._late.append(piece)
                continue
            self._pass_over(position, piece.start)
            self._fill(piece)
            position = piece.stop
        self._pass_over(position, size)
        for piece in [*self._late, *self._small]:
            _read_piece(self._source, piece)
        digest: str = self._hash.hexdigest()
        return digest

    def _fill(self, piece: _Piece) -> None:
        """Read a large piece into its target."""
        held = memoryview(bytearray(piece.length)) if piece.memory is None else piece.memory
        for start in range(0, piece.length, BLOCK_BYTES):
            self._read(piece.start + start, held[start : start + BLOCK_BYTES])
        if piece.memory is None:
            piece.put(held)

    def _pass_over(self, start: int, stop: int) -> None:
        """Read the bytes between two large pieces and fill the small pieces there.

        Small pieces that cross a block boundary are read later.
        """
        for begin in range(start, stop, BLOCK_BYTES):
            end = min(begin + BLOCK_BYTES, stop)
            block = self._block[: end - begin]
            self._read(begin, block)
            while self._small and self._small[0].stop <= end:
                piece = self._small.popleft()
                if piece.start >= begin:
                    piece.put(block[piece.start - begin : piece.stop - begin])
                else:
                    self._late.append(piece)

    def _read(self, start: int, block: memoryview) -> None:
        self._source.read(start, block)
        self._hash.update(block)


def tensors(at: Stored, manifest: Manifest, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors whose name starts with `prefix`, one at a time, as (rest of the name, tensor)."""
    with CheckpointReader(at, manifest) as reader:
        for name in reader.names(prefix):
            yield name, reader.read(prefix + name)
