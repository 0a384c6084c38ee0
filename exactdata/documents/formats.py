"""Read documents from JSON lines (plain or compressed), Parquet, Arrow and text files.

Files are read in slices, so that several processes can share a large file. For a document that cannot be read, a
`Broken` with the reason is yielded, and reading continues with the next document.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from exactdata.errors import DataError

WHOLE = -1
"""The `stop` of a slice that covers the complete file."""
JSON_LINES = (".jsonl", ".jsonl.zst", ".jsonl.gz")
SUFFIXES = (*JSON_LINES, ".parquet", ".arrow", ".txt")
TOO_MUCH = 200
"""The maximum number of characters of an error message that are reported."""


@dataclass(frozen=True)
class Broken:
    """The reason why a document cannot be used. Yielded in place of the document."""

    reason: str
    detail: str = ""


Found = tuple[int, Any]
"""Line or row number in the slice, counted from 1, and the value of the column, or `Broken`."""


def kind_of(path: Path) -> str:
    """Return the file suffix that determines how to read the file.

    Raises:
        DataError: the suffix is not in `SUFFIXES`, or the library for such files is not installed.
    """
    found = next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None)
    if found is None:
        raise DataError(f"{path}: unknown kind of file: documents are in {', '.join(SUFFIXES)}")
    needs = {".jsonl.zst": "zstandard", ".parquet": "pyarrow", ".arrow": "pyarrow"}.get(found)
    if needs is not None:
        imported(needs, str(path))
    return found


def imported(library: str, what_for: str) -> Any:
    """Import an optional library.

    Raises:
        DataError: the library is not installed.
    """
    from importlib import import_module

    try:
        return import_module(library)
    except ImportError as error:
        raise DataError(
            f"{what_for} needs the library {library.partition('.')[0]}, which is not installed: "
            "pip install 'exactdata[documents]'"
        ) from error


def slices_of(path: Path, size: int, most: int) -> list[tuple[int, int, int]]:
    """Split a file into slices of about `most` bytes.

    Args:
        path: the file.
        size: size of the file in bytes.
        most: approximate size of a slice in bytes.

    Returns:
        Start, stop and size in bytes of each slice. Start and stop are byte offsets for JSON lines, and row groups for
        Parquet. A file that can only be read sequentially is one slice, whose stop is `WHOLE`.
    """
    kind = kind_of(path)
    if kind == ".jsonl":
        count = max(1, -(-size // most))
        bounds = [size * number // count for number in range(count + 1)]
        return [(start, stop, stop - start) for start, stop in pairwise(bounds)]
    if kind == ".parquet" and size > most:
        try:
            groups = imported("pyarrow.parquet", str(path)).ParquetFile(path).metadata.num_row_groups
        except (OSError, ValueError):  # `read` will report the error
            groups = 1
        each = max(1, groups * most // size)
        starts = range(0, groups, each)
        return [(start, min(groups, start + each), size * each // groups) for start in starts]
    return [(0, WHOLE, size)]


def read(path: Path, start: int, stop: int, column: str) -> Iterator[Found]:
    """Yield the documents of a slice.

    Args:
        path: the file.
        start: start of the slice.
        stop: stop of the slice.
        column: the key or column that contains the text or the messages.

    Raises:
        OSError: the file cannot be read.
    """
    kind = kind_of(path)
    if kind in JSON_LINES:
        for number, line in enumerate(_lines(path, kind, start, stop), start=1):
            yield number, line if isinstance(line, Broken) else _value(line, column)
    elif kind == ".txt":
        yield 1, _text(path)
    else:
        rows = _parquet(path, start, stop, column) if kind == ".parquet" else _arrow(path, column)
        yield from enumerate(rows, start=1)


def _lines(path: Path, kind: str, start: int, stop: int) -> Iterator[bytes | Broken]:
    with open(path, "rb") as file:
        if kind == ".jsonl":
            yield from _lines_between(file, start, stop)
            return
        unpacked: Any = file
        errors: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
        if kind == ".jsonl.gz":
            unpacked = gzip.GzipFile(fileobj=file)
        else:
            library = imported("zstandard", str(path))
            errors = (library.ZstdError,)
            unpacked = io.BufferedReader(_Zstandard(file, library))
        try:
            yield from unpacked
        except errors as error:
            yield Broken("compressed data end or are damaged: the rest is lost", str(error)[:TOO_MUCH])


class _Zstandard(io.RawIOBase):
    """Decompress a file of zstandard frames. Raises an error if the last frame is incomplete."""

    def __init__(self, file: BinaryIO, library: Any) -> None:
        self._file, self._library = file, library
        self._content = self._frames()
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._rest or next(self._content, b"")
        part, self._rest = data[: len(buffer)], data[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)

    def _frames(self) -> Iterator[bytes]:
        frame = None
        while packed := self._file.read(1 << 17):
            while packed:
                frame = frame or self._library.ZstdDecompressor().decompressobj()
                if content := frame.decompress(packed):
                    yield content
                packed = frame.unused_data if frame.eof else b""
                frame = None if frame.eof else frame
        if frame is not None:
            raise self._library.ZstdError("the last frame is incomplete")


def _lines_between(file: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
    """Yield the lines that begin at a byte offset from `start` up to `stop`."""
    position = start
    if start:  # drops a partial line; a line that begins at `start` is kept
        file.seek(start - 1)
        position += len(file.readline()) - 1
    while position < stop and (line := file.readline()):
        position += len(line)
        yield line


def _value(line: bytes, column: str) -> Any:
    text = line.removeprefix(b"\xef\xbb\xbf").strip()
    if not text:
        return Broken("blank line")
    try:
        record = orjson.loads(text)
    except ValueError as error:
        try:  # json accepts NaN and integers of any size
            record = json.loads(text)
            json.dumps(record, ensure_ascii=False).encode()  # raises if the text contains an unpaired surrogate
        except (ValueError, RecursionError):
            return Broken("broken line: no JSON", str(error)[:TOO_MUCH])
    if not isinstance(record, dict):
        return Broken("wrong type: no JSON object", type(record).__name__)
    return record[column] if column in record else _without(column, list(record))


def _without(column: str, names: list[str]) -> Broken:
    return Broken(f"no column {column!r}", f"it has {', '.join(names[:20]) or 'none'}"[:TOO_MUCH])


def _text(path: Path) -> str | Broken:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return Broken("broken text: not UTF-8", f"at byte {error.start}")


def _parquet(path: Path, start: int, stop: int, column: str) -> Iterator[Any]:
    library = imported("pyarrow.parquet", str(path))
    try:
        file = library.ParquetFile(path)
        groups = range(start, file.metadata.num_row_groups if stop == WHOLE else stop)
        if column not in file.schema_arrow.names:
            rows = sum(file.metadata.row_group(group).num_rows for group in groups)
            yield from [_without(column, file.schema_arrow.names)] * rows
            return
        for batch in file.iter_batches(batch_size=1024, row_groups=list(groups), columns=[column]):
            yield from batch.column(0).to_pylist()
    except (ValueError, OSError) as error:  # pyarrow's errors are subclasses of these two
        if isinstance(error, OSError) and error.errno is not None:
            raise
        yield Broken("damaged file: the rest is lost", str(error).splitlines()[0][:TOO_MUCH])


def _arrow(path: Path, column: str) -> Iterator[Any]:
    arrow = imported("pyarrow", str(path))
    ipc = imported("pyarrow.ipc", str(path))
    try:
        with arrow.memory_map(str(path)) as mapped:
            try:
                batches: Any = ipc.open_stream(mapped)
            except ValueError:
                file = ipc.open_file(mapped)
                batches = (file.get_batch(number) for number in range(file.num_record_batches))
            for batch in batches:
                if column in batch.schema.names:
                    yield from batch.column(column).to_pylist()
                else:
                    yield from [_without(column, batch.schema.names)] * batch.num_rows
    except (ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        yield Broken("damaged file: the rest is lost", str(error).splitlines()[0][:TOO_MUCH])
