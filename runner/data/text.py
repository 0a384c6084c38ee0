"""Text as bytes (a vocabulary of 256), prepared once into a cache and memory-mapped from there.

Texts are joined with a zero byte after each. Of every 20 blocks of the joined text the last is held out: split
`eval` has those 5 %, split `train` the rest, and `all` both. What is held out depends on the text alone.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from runner.data.datasets import DataError, TokenDataset, Tokens, expand
from runner.errors import nearest
from runner.files import fsync_dir, read_json

FORMAT = 1  # part of every cache key: raised when the same text would be laid out otherwise
BLOCK = 8192  # bytes
HELD_OUT = 20  # the last of every 20 blocks
CHUNK = 1 << 24  # bytes read at a time
SPLITS = ("train", "eval", "all")
SOURCES = ("code", "encodings", "prose")
# Folders of the standard library that are no library source: tests, other people's packages, tools, data.
NOT_LIBRARY = {
    "__pycache__", "config", "dist-packages", "encodings", "ensurepip", "idle_test", "idlelib", "lib-dynload",
    "lib2to3", "pydoc_data", "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip


class TextDataset(TokenDataset):
    """One split of a text in the cache, which is prepared first if it is not there."""

    def _open(
        self, directory: Path, texts: Callable[[], Iterator[bytes]], total: int, split: str, sequence_length: int
    ) -> None:
        if split not in SPLITS:
            raise DataError(f"split={split!r}{nearest(split, SPLITS)}: one of {', '.join(SPLITS)}")
        meta: Any = read_json(directory / "meta.json")
        if meta is None:
            prepare(directory, lambda folder: write_text(folder, texts(), total))
            meta = read_json(directory / "meta.json")
        path = directory / "tokens.npy"
        try:
            tokens = cast(Tokens, np.load(path, mmap_mode="r", allow_pickle=False))
            train, self._content = int(meta["train"]), str(meta["blake2b"])
        except (OSError, ValueError, EOFError, TypeError, KeyError) as error:
            raise DataError(f"{directory}: this cache is damaged ({error}): delete it, it is made again") from error
        part = {"train": tokens[:train], "eval": tokens[train:], "all": tokens}[split]
        super().__init__(part, sequence_length, vocab_size=256)

    def fingerprint(self) -> dict[str, Any]:
        """As that of any tokens, with the checksum of the whole text from when it was prepared."""
        return {**super().fingerprint(), "text": self._content}


class TextFiles(TextDataset):
    """Bytes of text files; see `TokenDataset` for what a sample is, and this module for the splits.

    Args:
        paths: a file, a folder, a glob, or a list of them.
        sequence_length: T, at least 1.
        split: train, eval or all.
        pattern: which files of a folder are text.
        cache_dir: where the joined text is kept; None: see `cache_directory`.

    Raises:
        DataError: a path does not exist, there is too little text, or the cache cannot be written.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        sequence_length: int,
        split: str = "all",
        pattern: str = "**/*.txt",
        cache_dir: str | Path | None = None,
    ) -> None:
        files = expand(paths, pattern)
        sizes = [file.stat() for file in files]
        key = digest([[file.name, stat.st_size, stat.st_mtime_ns] for file, stat in zip(files, sizes, strict=True)])
        total = sum(stat.st_size + 1 for stat in sizes)
        directory = cache_directory(cache_dir) / f"text-{key}"
        self._open(directory, lambda: read_texts(files), total, split, sequence_length)


class PythonText(TextDataset):
    """Real text that every machine has: the sources of the Python that runs this.

    Args:
        source: `code` (the standard library, without tests), `encodings` (its character tables) or `prose` (the
            language reference as `pydoc` shows it).
        sequence_length: T, at least 1.
        split: train, eval or all; see this module.
        cache_dir: where the joined text is kept; None: see `cache_directory`.

    Raises:
        DataError: an unknown source or split, a Python without its sources, or a cache that cannot be written.
    """

    def __init__(
        self,
        source: str = "code",
        sequence_length: int = 256,
        split: str = "train",
        cache_dir: str | Path | None = None,
    ) -> None:
        if source not in SOURCES:
            raise DataError(f"source={source!r}{nearest(source, SOURCES)}: one of {', '.join(SOURCES)}")
        texts, total, key = python_topics() if source == "prose" else python_files(source)
        version = ".".join(map(str, sys.version_info[:3]))
        directory = cache_directory(cache_dir) / f"python-{version}-{source}-{key}"
        self._open(directory, texts, total, split, sequence_length)


def cache_directory(cache_dir: str | Path | None = None) -> Path:
    """`cache_dir`, or $RUNNER_CACHE, or ~/.cache/runner."""
    return Path(cache_dir or os.environ.get("RUNNER_CACHE") or "~/.cache/runner").expanduser()


def digest(value: Any) -> str:
    """A short hash of a JSON-serialisable value, for the name of a cache."""
    return hashlib.blake2b(json.dumps([FORMAT, BLOCK, HELD_OUT, value]).encode(), digest_size=8).hexdigest()


def read_texts(files: Iterable[Path]) -> Iterator[bytes]:
    """The bytes of `files` in chunks, a zero byte after each file."""
    for path in files:
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk
        yield b"\0"


def python_files(source: str) -> tuple[Callable[[], Iterator[bytes]], int, str]:
    """Python's own source files: how to read them, their length with separators, and a key of names and sizes."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(_library_files(library) if source == "code" else (library / "encodings").glob("*.py"))
    if not files:
        raise DataError(f"{library}: this Python has no source files ({source}): use other data, for example data=text")
    sizes = [file.stat().st_size for file in files]
    names = [file.relative_to(library).as_posix() for file in files]
    return lambda: read_texts(files), sum(sizes) + len(files), digest([names, sizes])


def _library_files(library: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(library):
        folders[:] = [name for name in folders if name not in NOT_LIBRARY and not name.startswith("config-")]
        for name in names:
            # _sysconfigdata describes the machine that built this Python
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield Path(folder, name)


def python_topics() -> tuple[Callable[[], Iterator[bytes]], int, str]:
    """The language reference of pydoc: as `python_files`."""
    try:
        module = importlib.import_module("pydoc_data.topics")
    except ImportError as error:
        raise DataError(
            "this Python comes without pydoc_data.topics: leave the source 'prose' out (~data.sources.prose) "
            "or use another Python"
        ) from error
    topics: dict[str, str] = module.topics
    texts = [topics[name].encode() + b"\0" for name in sorted(topics)]
    return lambda: iter(texts), sum(map(len, texts)), digest([sorted(topics), [len(text) for text in texts]])


def prepare(directory: Path, produce: Callable[[Path], None]) -> None:
    """Make `directory` whole or not at all: `produce` fills another one, which is renamed then.

    Several processes may prepare the same directory at once: the first to finish makes it, the others' work is
    thrown away. What a kill left behind is swept after a day.

    Raises:
        DataError: the file system refused.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        _sweep(directory.parent)
        folder = Path(tempfile.mkdtemp(prefix=".preparing-", dir=directory.parent))
        try:
            produce(folder)
            fsync_dir(folder)
            folder.chmod(0o755)
            try:
                folder.rename(directory)
            except OSError:
                if not (directory / "meta.json").is_file():
                    raise
            fsync_dir(directory.parent)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"{directory}: the text cannot be prepared here ({error.strerror or error}): set data.cache_dir or "
            "RUNNER_CACHE to a folder with space that you may write"
        ) from error


def _sweep(parent: Path) -> None:
    for leftover in parent.glob(".preparing-*"):
        try:
            old = time.time() - leftover.stat().st_mtime > 86400
        except FileNotFoundError:  # another process was just done with it
            continue
        if old:
            shutil.rmtree(leftover, ignore_errors=True)


def write_text(folder: Path, texts: Iterable[bytes], total: int) -> None:
    """Write `tokens.npy` (the training blocks, then the held-out ones) and `meta.json` into `folder`.

    Args:
        folder: an empty directory.
        texts: parts of a text of `total` bytes, cut anywhere.
        total: its length.

    Raises:
        OSError: the text is not as long as it was said to be, or the file system refused.
    """
    block = max(1, min(BLOCK, total // HELD_OUT))
    full, tail = divmod(total, block)
    held_out = full // HELD_OUT * block + (tail if full % HELD_OUT == HELD_OUT - 1 else 0)
    train = total - held_out
    content = hashlib.blake2b(digest_size=16)
    out = np.lib.format.open_memmap(folder / "tokens.npy", mode="w+", dtype=np.uint8, shape=(total,))
    done = 0
    for number, piece in enumerate(_blocks(texts, block)):
        before = number // HELD_OUT  # held-out blocks so far
        last = number % HELD_OUT == HELD_OUT - 1
        start = train + before * block if last else (number - before) * block
        if start + len(piece) > total:
            break
        out[start : start + len(piece)] = np.frombuffer(piece, np.uint8)
        content.update(piece)
        done += len(piece)
    if done != total:
        raise OSError(f"the text changed while it was read: {done} bytes where {total} were expected")
    out.flush()
    meta = {"bytes": total, "train": train, "eval": held_out, "block": block, "blake2b": content.hexdigest()}
    with open(folder / "meta.json", "w") as file:
        file.write(json.dumps(meta) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _blocks(texts: Iterable[bytes], size: int) -> Iterator[bytes]:
    """The same bytes cut into blocks of `size`, the last one shorter."""
    buffer = bytearray()
    for text in texts:
        buffer += text
        whole = len(buffer) // size * size
        for start in range(0, whole, size):
            yield bytes(buffer[start : start + size])
        del buffer[:whole]
    if buffer:
        yield bytes(buffer)
