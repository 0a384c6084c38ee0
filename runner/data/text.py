"""Datasets of text as bytes (a vocabulary of 256), prepared once in a cache and memory-mapped.

Texts are concatenated, each followed by a zero byte. Of every 20 blocks of the result, the last is held out. The split
`eval` has these 5 %, `train` has the rest, and `all` has both. The split depends only on the text.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from exactdata.datasets import TokenDataset, Tokens
from exactdata.errors import DataError
from exactdata.paths import cache_directory, expand, usable_cache
from runner.errors import nearest
from runner.system import clock
from runner.system.files import fsync_dir, read_json

FORMAT = 1  # part of every cache key; increase it when the layout of the cache changes
BLOCK = 8192  # bytes
HELD_OUT = 20  # the last of every 20 blocks
CHUNK = 1 << 24  # bytes read at a time
SPLITS = ("train", "eval", "all")
SOURCES = ("code", "encodings", "prose")
# Folders of the standard library without library source: tests, installed packages, tools, data.
NOT_LIBRARY = {
    "__pycache__", "config", "dist-packages", "encodings", "ensurepip", "idle_test", "idlelib", "lib-dynload",
    "lib2to3", "pydoc_data", "site-packages", "test", "tests", "turtledemo",
}  # fmt: skip


class TextDataset(TokenDataset):
    """One split of a cached text. The cache is prepared first if it is missing."""

    def _open(
        self, directory: Path, texts: Callable[[], Iterator[bytes]], total: int, split: str, sequence_length: int
    ) -> None:
        if split not in SPLITS:
            raise DataError(f"split={split!r}{nearest(split, SPLITS)}: one of {', '.join(SPLITS)}")
        with usable_cache(directory, "the text"):
            meta: Any = read_json(directory / "meta.json")
            if meta is None:
                prepare(directory, lambda folder: write_text(folder, texts(), total))
                meta = read_json(directory / "meta.json")
            try:
                tokens = cast(Tokens, np.load(directory / "tokens.npy", mmap_mode="r", allow_pickle=False))
                train, self._content = int(meta["train"]), str(meta["blake2b"])
            except (FileNotFoundError, ValueError, EOFError, TypeError, KeyError) as error:
                raise DataError(
                    f"{directory}: this cache is corrupt ({error}): delete it to have it recreated"
                ) from error
        part = {"train": tokens[:train], "eval": tokens[train:], "all": tokens}[split]
        super().__init__(part, sequence_length, vocab_size=256)

    def fingerprint(self) -> dict[str, Any]:
        """Return the fingerprint of the tokens, with the checksum that was computed when the text was prepared."""
        return {**super().fingerprint(), "text": self._content}


class TextFiles(TextDataset):
    """Bytes of text files. See `TokenDataset` for the samples.

    Texts are concatenated, each followed by a zero byte. Split `eval` has the last of every 20 blocks, and `train` has
    the rest.

    Args:
        paths: a file, a folder, a glob, or a list of them.
        sequence_length: T, at least 1.
        split: train, eval or all.
        pattern: glob of the text files in a folder.
        cache_dir: where the concatenated text is cached; None: $RUNNER_CACHE or ~/.cache/runner.

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
        key = digest(
            [[str(file.absolute()), stat.st_size, stat.st_mtime_ns] for file, stat in zip(files, sizes, strict=True)]
        )
        total = sum(stat.st_size + 1 for stat in sizes)
        directory = cache_directory(cache_dir) / f"text-{key}"
        self._open(directory, lambda: read_texts(files), total, split, sequence_length)


class PythonText(TextDataset):
    """Real text that every machine has: source code and documentation of the running Python.

    Args:
        source: `code` (the standard library, without tests), `encodings` (its character tables) or `prose` (the
            language reference, as shown by `pydoc`).
        sequence_length: T, at least 1.
        split: train, eval or all; as for `TextFiles`.
        cache_dir: where the text is cached; None: $RUNNER_CACHE or ~/.cache/runner.

    Raises:
        DataError: an unknown source or split, a Python without source files, or a cache that cannot be written.
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


def digest(value: Any) -> str:
    """Return a short hash of a JSON-serializable value, for the name of a cache."""
    return hashlib.blake2b(json.dumps([FORMAT, BLOCK, HELD_OUT, value]).encode(), digest_size=8).hexdigest()


def read_texts(files: Iterable[Path]) -> Iterator[bytes]:
    """Yield the bytes of `files` in chunks, with a zero byte after each file."""
    for path in files:
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk
        yield b"\0"


def python_files(source: str) -> tuple[Callable[[], Iterator[bytes]], int, str]:
    """Return a function that reads Python's source files, their total size with separators, and their cache key."""
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
            # _sysconfigdata depends on the machine that built this Python
            if name.endswith(".py") and not name.startswith("_sysconfigdata"):
                yield Path(folder, name)


def python_topics() -> tuple[Callable[[], Iterator[bytes]], int, str]:
    """Return, for pydoc's language reference, the same values as `python_files`."""
    try:
        module = importlib.import_module("pydoc_data.topics")
    except ImportError as error:
        raise DataError(
            "this Python has no pydoc_data.topics: remove the source 'prose' (~data.sources.prose) "
            "or use another Python"
        ) from error
    topics: dict[str, str] = module.topics
    texts = [topics[name].encode() + b"\0" for name in sorted(topics)]
    return lambda: iter(texts), sum(map(len, texts)), digest([sorted(topics), [len(text) for text in texts]])


def prepare(directory: Path, produce: Callable[[Path], None]) -> None:
    """Create `directory` atomically: `produce` fills a temporary directory, which is then renamed.

    Several processes may prepare the same directory at once. The first to finish wins, and the others discard their
    work. Temporary directories of killed processes are deleted after a day.

    Args:
        directory: the cache entry to create.
        produce: fills an empty directory, including `meta.json`.

    Raises:
        DataError: the file system returned an error.
    """
    with usable_cache(directory, "the text"):
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


def _sweep(parent: Path) -> None:
    for leftover in parent.glob(".preparing-*"):
        try:
            old = clock.wall() - leftover.stat().st_mtime > 86400
        except FileNotFoundError:  # another process has just finished with it
            continue
        if old:
            shutil.rmtree(leftover, ignore_errors=True)


def write_text(folder: Path, texts: Iterable[bytes], total: int) -> None:
    """Write `tokens.npy` (training blocks, then held-out blocks) and `meta.json` into `folder`.

    Args:
        folder: an empty directory.
        texts: the text in chunks of any size.
        total: its size in bytes.

    Raises:
        OSError: the text does not have `total` bytes, or the file system returned an error.
    """
    block = max(1, min(BLOCK, total // HELD_OUT))
    full, tail = divmod(total, block)
    held_out = full // HELD_OUT * block + (tail if full % HELD_OUT == HELD_OUT - 1 else 0)
    train = total - held_out
    content = hashlib.blake2b(digest_size=16)
    out = np.lib.format.open_memmap(folder / "tokens.npy", mode="w+", dtype=np.uint8, shape=(total,))
    done = 0
    for number, part in enumerate(_blocks(texts, block)):
        before = number // HELD_OUT  # held-out blocks so far
        is_held_out = number % HELD_OUT == HELD_OUT - 1
        start = train + before * block if is_held_out else (number - before) * block
        if start + len(part) > total:
            break
        out[start : start + len(part)] = np.frombuffer(part, np.uint8)
        content.update(part)
        done += len(part)
    if done != total:
        raise OSError(f"the text changed while it was read: expected {total} bytes, read {done}")
    out.flush()
    meta = {"bytes": total, "train": train, "eval": held_out, "block": block, "blake2b": content.hexdigest()}
    with open(folder / "meta.json", "w") as file:
        file.write(json.dumps(meta) + "\n")
        file.flush()
        os.fsync(file.fileno())


def _blocks(texts: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Yield the same bytes in blocks of `size`. The last one may be shorter."""
    buffer = bytearray()
    for text in texts:
        buffer += text
        whole = len(buffer) // size * size
        for start in range(0, whole, size):
            yield bytes(buffer[start : start + size])
        del buffer[:whole]
    if buffer:
        yield bytes(buffer)
