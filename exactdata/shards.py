"""Read memory-mapped token shards on disk. Opening them reads only headers."""

from __future__ import annotations

import errno
import resource
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from exactdata.datasets import TokenDataset, Tokens
from exactdata.errors import DataError
from exactdata.paths import expand

T = TypeVar("T")


class TokenShards(TokenDataset):
    """Samples from `.npy` and `.bin` files of tokens. For the content of a sample, see `TokenDataset`.

    No sample spans two shards, so up to sequence_length tokens at the end of each shard are unused.

    Example:
        ```python
        import numpy as np

        from exactdata import StatefulDataLoader
        from exactdata.shards import TokenShards

        for number in range(2):
            np.save(f"shard-{number}.npy", np.arange(1000, dtype=np.uint16))
        data = TokenShards("shard-*.npy", sequence_length=64, vocab_size=1000, shards=2)
        loader = StatefulDataLoader(data, batch_size=4, shuffle=True)
        print(len(data), next(iter(loader))["input_ids"].shape)
        ```

    Args:
        paths: a file, a folder, a glob, or a list of these. Shards are in the order of the list, sorted by name within
            a folder or glob.
        sequence_length: T, the number of tokens per sample, at least 1.
        vocab_size: fetching a token outside [0, vocab_size) raises an error. If None, tokens are not checked.
        dtype: dtype of the tokens in `.bin` files, which do not record it, e.g. uint16, or >u2 for big-endian tokens. A
            `.npy` file records its dtype, which must then be the same.
        pattern: pattern of the shards in a folder. If None, `*.bin` if dtype is set, otherwise `*.npy`.
        shards: expected number of files. If None, it is not checked.

    Raises:
        DataError: a shard is missing or truncated, a dtype or shape is wrong, or there are too few tokens.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        sequence_length: int,
        vocab_size: int | None = None,
        dtype: str | None = None,
        pattern: str | None = None,
        shards: int | None = None,
    ) -> None:
        kind = token_type(dtype)
        files = expand(paths, pattern or ("*.npy" if kind is None else "*.bin"))
        if shards is not None and len(files) != shards:
            raise DataError(
                f"found {len(files)} shards, but shards={shards} (first {files[0].name}, last {files[-1].name}): "
                "add the missing files or correct the number"
            )
        super().__init__([open_shard(file, kind) for file in files], sequence_length, vocab_size)


def token_type(dtype: str | None) -> np.dtype[Any] | None:
    """Return the integer dtype with this name.

    Raises:
        DataError: there is no such integer dtype.
    """
    if dtype is None:
        return None
    try:
        kind = np.dtype(dtype)
    except TypeError:
        kind = np.dtype(object)
    if kind.kind not in "iu":
        raise DataError(
            f"dtype={dtype!r} is not an integer type: use uint16, uint32, int32, or >u2 for big-endian tokens"
        )
    return kind


def open_shard(path: Path, dtype: np.dtype[Any] | None) -> Tokens:
    """Open a `.npy` or `.bin` file of tokens as a read-only memory map of shape (n,), which keeps the file open.

    Args:
        path: the file.
        dtype: dtype of the tokens, required for `.bin`. For `.npy`, None or the dtype in the file.

    Raises:
        DataError: the file is missing or truncated, or its dtype is unknown or differs from `dtype`. Also raised if too
            many files are open even after raising the limit to its maximum.
    """
    return with_more_files(path, lambda: _open(path, dtype))


def with_more_files(path: Path, opened: Callable[[], T]) -> T:
    """Call `opened`, which opens `path`. If too many files are open, raise the limit and call it again.

    Raises:
        DataError: too many files are open even after raising the limit to its maximum.
    """
    try:
        return opened()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # many systems start with 1,024
    try:
        return opened()
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        raise DataError(
            f"{path}: a process may have {most:,} files open, and each shard is one: raise the "
            "limit (ulimit -Hn), or merge shards"
        ) from error


def _open(path: Path, dtype: np.dtype[Any] | None) -> Tokens:
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    if path.suffix == ".npy":
        return _open_npy(path, dtype)
    if path.suffix != ".bin":
        raise DataError(f"{path}: not a token shard: expected .npy (an array) or .bin (raw tokens, with dtype set)")
    if dtype is None:
        raise DataError(f"{path}: a .bin file does not record its dtype: set dtype, for example dtype=uint16")
    size = path.stat().st_size
    if size == 0 or size % dtype.itemsize:
        raise DataError(
            f"{path}: {size} bytes are not a whole number of {dtype.name} tokens ({dtype.itemsize} bytes each): "
            "the file is truncated, or dtype is wrong"
        )
    return cast(Tokens, np.memmap(path, dtype=dtype, mode="r"))


def _open_npy(path: Path, dtype: np.dtype[Any] | None) -> Tokens:
    try:
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.EMFILE:
            raise
        raise DataError(
            f"{path}: not a complete .npy file ({path.stat().st_size} bytes; {error}): copy it again"
        ) from error
    if dtype is not None and tokens.dtype != dtype:
        raise DataError(f"{path}: has {tokens.dtype} tokens, but dtype={dtype.name}: leave dtype out for .npy files")
    return cast(Tokens, tokens)
