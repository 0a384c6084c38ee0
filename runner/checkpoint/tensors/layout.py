"""Define the format of tensor files and of their index.

Each rank writes one file in safetensors format: a JSON header, then the bytes of one chunk of each tensor. The header
also has the offset of each chunk in the complete tensor, in the form that torch's HuggingFaceStorageReader expects. So
other programs can read the files on any number of ranks.

The index, `tensors.json`, lists the file and offset of each chunk of each tensor. Only numbers and names are read from
the header and the index, so reading them cannot execute code. Everything except the values depends only on the write
plan, which is the same for every save.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from runner.checkpoint.files.manifest import Manifest
from runner.errors import CheckpointError

INDEX = "tensors.json"

# Names of dtypes in safetensors. A dtype without a name (complex128) is stored as raw bytes, and the index has its
# dtype.
_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_LARGEST = 2**62


@dataclass(frozen=True)
class Part:
    """A chunk of a tensor that a rank writes.

    Attributes:
        name: flat name of the tensor.
        dtype: dtype of the tensor.
        shape: shape of the complete tensor.
        offsets: start of the chunk in the complete tensor, by dimension.
        sizes: shape of the chunk.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True)
class Chunk:
    """A stored part of a tensor.

    Attributes:
        offsets: start of the chunk in the complete tensor, by dimension.
        sizes: shape of the chunk.
        file: the file that contains it.
        start: offset in the file, in bytes.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int


@dataclass(frozen=True)
class Entry:
    """A tensor of the checkpoint: shape, dtype and chunks."""

    size: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[Chunk, ...]


def file_name(rank: int) -> str:
    """Return the name of the file that a rank writes, such as `rank_00000.safetensors`."""
    return f"rank_{rank:05d}.safetensors"


def arranged(parts: Iterable[Part]) -> list[Part]:
    """Sort the parts as in a file. Like in safetensors, the order aligns each chunk to its element size."""
    return sorted(parts, key=lambda part: -part.dtype.itemsize)


def header(parts: Sequence[Part]) -> bytes:
    """Return the first bytes of a file of arranged `parts`: the length of the JSON (8 bytes), then the JSON."""
    described: dict[str, Any] = {
        "__metadata__": {
            "format": "pt",
            "DCP_VERSION": "1.0",
            "DCP_SHARDING_INFO": json.dumps({part.name: {"saved_offsets": part.offsets} for part in parts}),
        }
    }
    end = 0
    for part in parts:
        begin, end = end, end + part.nbytes
        name = _NAMES.get(part.dtype)
        shape = part.sizes if name else (*part.sizes, part.dtype.itemsize)
        described[part.name] = {"dtype": name or "U8", "shape": shape, "data_offsets": (begin, end)}
    raw = json.dumps(described, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw


def index(parts_by_rank: Sequence[Sequence[Part]]) -> bytes:
    """Return the content of the index, from the arranged parts of every rank."""
    names: list[str] = []
    tensors: dict[str, tuple[str, tuple[int, ...], list[Any]]] = {}
    for rank, parts in enumerate(parts_by_rank):
        if not parts:
            continue
        start = len(header(parts))
        for part in parts:
            described = tensors.setdefault(part.name, (str(part.dtype).removeprefix("torch."), part.shape, []))
            described[2].append((len(names), start, part.offsets, part.sizes))
            start += part.nbytes
        names.append(file_name(rank))
    return json.dumps({"files": names, "tensors": tensors}, separators=(",", ":")).encode()


def entries(raw: bytes, manifest: Manifest) -> dict[str, Entry]:
    """Parse the index, the inverse of `index`. Check that each chunk is inside its tensor and its file.

    Raises:
        CheckpointError: a chunk is outside its tensor or file, or the index contains anything other than names and
            numbers.
    """
    try:
        body = json.loads(raw)
        for file in body["files"]:
            if file not in manifest.files:
                raise CheckpointError(f"it names {file!r:.80}, which is not a file of the checkpoint")
        return {name: _entry(name, described, body["files"], manifest) for name, described in body["tensors"].items()}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}") from error


def _entry(name: str, described: Any, names: list[str], manifest: Manifest) -> Entry:
    kind, shape, chunks = described
    dtype = getattr(torch, kind, None)
    if not isinstance(dtype, torch.dtype) or kind.startswith("q"):  # a quantized tensor also has scales
        raise CheckpointError(f"{name!r} has no dtype, but {kind!r:.80}")
    size = _sizes(name, shape)
    made = tuple(_chunk(name, size, dtype, chunk, names, manifest) for chunk in chunks)
    values = sum(math.prod(chunk.sizes) for chunk in made)
    if values < math.prod(size):
        raise CheckpointError(f"values of {name!r} are missing")
    if values > math.prod(size) or _overlap(made):  # overlapping chunks may hide missing values
        raise CheckpointError(f"values of {name!r} are there twice")
    return Entry(size, dtype, made)


def _chunk(
    name: str, size: tuple[int, ...], dtype: torch.dtype, described: Any, names: list[str], manifest: Manifest
) -> Chunk:
    number, start, *place = described
    offsets, sizes = (_sizes(name, values) for values in place)
    (start,) = _sizes(name, [start])
    file = names[number]
    if len(offsets) != len(size) or len(sizes) != len(size):
        raise CheckpointError(f"{name!r} has a chunk of other dimensions")
    if any(begin + length > whole for begin, length, whole in zip(offsets, sizes, size, strict=True)):
        raise CheckpointError(f"{name!r} has a chunk outside of it")
    if start + math.prod(sizes) * dtype.itemsize > manifest.files[file].size:
        raise CheckpointError(f"{name!r} should be beyond the end of {file!r}")
    return Chunk(offsets, sizes, file, start)


def _overlap(chunks: Sequence[Chunk]) -> bool:
    """Check whether any two chunks of a tensor overlap."""
    before: list[Chunk] = []  # chunks that overlap the next one in the first dimension
    for chunk in sorted((each for each in chunks if math.prod(each.sizes)), key=lambda each: each.offsets):
        before = [each for each in before if not each.offsets or each.offsets[0] + each.sizes[0] > chunk.offsets[0]]
        if any(_share(chunk, each) for each in before):
            return True
        before.append(chunk)
    return False


def _share(one: Chunk, two: Chunk) -> bool:
    return all(
        max(a, b) < min(a + along, b + across)
        for a, along, b, across in zip(one.offsets, one.sizes, two.offsets, two.sizes, strict=True)
    )


def _sizes(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or any(type(value) is not int or not 0 <= value <= _LARGEST for value in values):
        raise CheckpointError(f"{name!r} has {values!r:.80} where sizes should be")
    return tuple(values)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous CPU tensor as one-dimensional uint8."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.reshape(-1).view(torch.uint8)


def memory(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous CPU tensor, to be read or written."""
    return memoryview(flat_bytes(tensor).numpy())  # type: ignore[arg-type]
