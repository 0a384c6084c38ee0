"""Provide map-style datasets with fixed-length samples from arrays of tokens, and mixtures of several sources.

A *source* is a dataset with a name. A token *sample* is a dict of `input_ids` and `labels`, int64 tensors of shape
(T,), where the label of a token is the next token. A dataset is *collated* (`collated = True`) if its
`__getitems__(indices)` returns a finished batch, a dict of tensors of shape (B, ...), from a single numpy gather. Any
other map-style dataset also works, and is read sample by sample.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from exactdata.errors import DataError
from exactdata.loading.collation import disagreement
from exactdata.loading.fetch import is_stateful
from exactdata.loading.global_draws import draws_nothing
from exactdata.order.arrays import I64
from exactdata.order.weights import check_names

Tokens = npt.NDArray[np.integer[Any]]
Batch = dict[str, Tensor]


class TokenArray:
    """A 1-D array of tokens, in memory or memory-mapped, read as samples of `sequence_length` tokens.

    A memory map is pickled as its path and reopened, so that worker processes share its memory pages and do not receive
    copies.
    """

    def __init__(self, tokens: Tokens, sequence_length: int) -> None:
        self.where = describe(tokens)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataError(
                f"{self.where}: an array of shape {tokens.shape} and type {tokens.dtype} is not tokens: "
                "pass a 1-D array of integers"
            )
        self.sequence_length = sequence_length
        self._set(tokens)

    def _set(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.samples = max(0, (len(tokens) - 1) // self.sequence_length)
        # A plain np.ndarray is cheaper to index than its subclass np.memmap. Its `base` keeps the np.memmap alive.
        plain = tokens.view(np.ndarray)
        step = plain.strides[0] if plain.ndim else 0
        # Row i covers tokens [i*T, i*T + T]. Gathering rows is a single call, four times as fast as using an index
        # matrix.
        self.windows: Tokens = np.lib.stride_tricks.as_strided(
            plain,
            shape=(self.samples, self.sequence_length + 1),
            strides=(step * self.sequence_length, step),
            writeable=False,
        )

    def __getstate__(self) -> dict[str, Any]:
        state = {"where": self.where, "sequence_length": self.sequence_length}
        mapped = map_arguments(self.tokens)
        return state | ({"map": mapped} if mapped else {"tokens": np.asarray(self.tokens)})

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.where = state["where"]
        self.sequence_length = state["sequence_length"]
        self._set(open_map(**state["map"]) if "map" in state else state["tokens"])

    def fingerprint(self) -> dict[str, Any]:
        """Return a fingerprint that is cheap to compute: length, dtype, and a checksum of both ends."""
        ends = np.concatenate([self.tokens[:2048], self.tokens[-2048:]])
        return {
            "tokens": len(self.tokens),
            "dtype": self.tokens.dtype.str,
            "ends": hashlib.blake2b(ends.tobytes(), digest_size=8).hexdigest(),
        }


def describe(tokens: Tokens) -> str:
    """Return the file name of a memory map, or "tokens in memory" for any other array."""
    name = getattr(tokens, "filename", None)
    return str(name) if name else "tokens in memory"


def map_arguments(tokens: Tokens) -> dict[str, Any] | None:
    """Return the arguments with which `open_map` reopens the same part of the same file, or None if it cannot."""
    if not isinstance(tokens, np.memmap) or getattr(tokens, "filename", None) is None or tokens.mode == "c":
        return None
    root: Any = tokens
    while isinstance(root.base, np.ndarray):
        root = root.base
    if not isinstance(root.base, mmap.mmap) or tokens.strides != root.strides:
        return None
    # Every slice of a memory map reports the `offset` of the full map, so the distance is computed from the addresses.
    behind = tokens.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    return {
        "path": str(tokens.filename),
        "dtype": tokens.dtype.str,
        "offset": root.offset + behind,
        "count": len(tokens),
    }


def open_map(path: str, dtype: str, offset: int, count: int) -> Tokens:
    """Memory-map `count` numbers of type `dtype` in `path`, starting at byte `offset`, read-only.

    Raises:
        DataError: the file is missing, or has become too short.
    """
    try:
        return cast(Tokens, np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,)))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot reopen {count} tokens of type {dtype} ({error}): restore the file") from error


class TokenDataset(Dataset[Batch]):
    """Samples of `sequence_length` tokens with next-token labels, from one or more arrays of tokens.

    Sample i of an array covers its tokens [i*T, i*T + T], both ends included. An array of n tokens therefore has (n -
    1) // T samples, and every token has a label. No sample spans two arrays.

    Example:
        ```python
        import numpy as np

        from exactdata.datasets import TokenDataset

        tokens = np.arange(100, dtype=np.uint16)  # or np.memmap("tokens.bin", np.uint16, "r")
        data = TokenDataset(tokens, sequence_length=8, vocab_size=100)
        print(len(data), data[0]["input_ids"], data[0]["labels"])
        batch = data.__getitems__([0, 5, 2])  # one gather
        assert batch["input_ids"].shape == (3, 8)
        ```

    Args:
        tokens: a 1-D integer array or memory map, or a sequence of them.
        sequence_length: T, the number of tokens per sample, at least 1.
        vocab_size: fetching a token outside [0, vocab_size) raises an error. Tokens are checked when they are fetched,
            not when the dataset is opened. If None, they are not checked.
        name: name of this source in error messages, used for arrays in memory.

    Raises:
        DataError: an array is not a 1-D integer array, or no array is long enough for one sample.
    """

    collated = True

    def __init__(
        self,
        tokens: Tokens | Sequence[Tokens],
        sequence_length: int,
        vocab_size: int | None = None,
        name: str | None = None,
    ) -> None:
        if sequence_length < 1:
            raise DataError(f"sequence_length is {sequence_length}: it must be at least 1")
        if vocab_size is not None and vocab_size < 1:
            raise DataError(f"vocab_size is {vocab_size}: it must be at least 1, or null to skip the check")
        arrays = [tokens] if isinstance(tokens, np.ndarray) else list(tokens)
        if not arrays:
            raise DataError(f"{name or 'tokens'}: no arrays of tokens: pass at least one")
        self.sequence_length = sequence_length
        self.vocab_size = vocab_size
        self.name = name
        self.arrays = [TokenArray(array, sequence_length) for array in arrays]
        self._starts = np.cumsum([0] + [array.samples for array in self.arrays])
        self._samples = int(self._starts[-1])
        if self._samples == 0:
            longest = max(self.arrays, key=lambda array: len(array.tokens))
            raise DataError(
                f"{self._where(longest)}: {len(longest.tokens)} tokens are too few for one sample of sequence_length "
                f"{sequence_length}, which takes {sequence_length + 1}: add data or reduce sequence_length"
            )
        kinds = {array.tokens.dtype for array in self.arrays}
        self.dtype: np.dtype[Any] = kinds.pop() if len(kinds) == 1 else np.dtype(np.int64)
        # Tokens are compared with the vocabulary only if their type can hold values outside it.
        limits = np.iinfo(self.dtype)
        self._check_high = vocab_size is not None and limits.max >= vocab_size
        self._check_low = vocab_size is not None and limits.min < 0

    @property
    def tokens_per_sample(self) -> int | None:
        """Return T, for the metrics, or None if a subclass overrides `__getitems__` (samples may be padded)."""
        return self.sequence_length if is_plain_tokens(self) else None

    @property
    def prefetch(self) -> str | None:
        """Return `thread`, because samples are not random, or None if a subclass overrides `__getitems__`."""
        return "thread" if is_plain_tokens(self) else None

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Batch:
        batch = self.__getitems__([index])
        return {key: value[0] for key, value in batch.items()}

    def __getitems__(self, indices: Sequence[int] | I64) -> Batch:
        """Fetch a batch.

        Args:
            indices: sample indices, shape (B,).

        Returns:
            `input_ids` and `labels`, int64 tensors of shape (B, T).

        Raises:
            IndexError: an index is outside [0, len).
            DataError: a token is outside the vocabulary.
        """
        wanted = np.asarray(indices, dtype=np.int64)
        check_bounds(wanted, self._samples, "dataset")
        return token_batch(self.gather(wanted))

    def gather(self, indices: I64) -> Tokens:
        """Return the T + 1 tokens of each sample, in the dtype of the arrays.

        Args:
            indices: int64 of shape (B,). They must be in [0, len), which is not checked.

        Returns:
            Tokens of shape (B, T + 1).

        Raises:
            DataError: a token is outside the vocabulary.
        """
        windows = self.arrays[0].windows[indices] if len(self.arrays) == 1 else self._gather_arrays(indices)
        if self.vocab_size is not None and len(indices):
            high = self._check_high and np.maximum.reduce(windows, axis=None) >= self.vocab_size
            if high or (self._check_low and np.minimum.reduce(windows, axis=None) < 0):
                raise self._outside_vocabulary(windows, indices, self.vocab_size)
        return windows

    def _gather_arrays(self, indices: I64) -> Tokens:
        windows = np.empty((len(indices), self.sequence_length + 1), dtype=self.dtype)
        which = np.searchsorted(self._starts, indices, side="right") - 1
        for number in np.unique(which):
            rows = np.nonzero(which == number)[0]
            windows[rows] = self.arrays[number].windows[indices[rows] - self._starts[number]]
        return windows

    def _outside_vocabulary(self, windows: Tokens, indices: I64, vocab_size: int) -> DataError:
        row, column = np.argwhere((windows >= vocab_size) | (windows < 0))[0]
        number = int(np.searchsorted(self._starts, indices[row], side="right")) - 1
        position = int(indices[row] - self._starts[number]) * self.sequence_length + int(column)
        value = int(windows[row, column])
        remedy = f"set vocab_size to at least {value + 1} or " if value >= 0 else ""
        return DataError(
            f"{self._where(self.arrays[number])}: token {value} at position {position} is not in the vocabulary "
            f"(0 to {vocab_size - 1}): {remedy}use tokens of this model's tokenizer"
        )

    def _where(self, array: TokenArray) -> str:
        named = self.name is not None and array.where == "tokens in memory"
        return str(self.name) if named else array.where

    def fingerprint(self) -> dict[str, Any]:
        """Return a JSON-serializable fingerprint of the data without reading all of it."""
        return {
            "sequence_length": self.sequence_length,
            "arrays": [array.fingerprint() for array in self.arrays],
        }


class MixtureDataset(Dataset[Any]):
    """Concatenate named sources, where index i of the mixture is index i - cumulative_sizes[s] of source s.

    A sample that is a dict gets a key `dataset_idx`, the number of its source. Any other sample becomes a tuple
    (sample, dataset_idx). If every source is collated, the mixture is too. It then gathers a batch source by source,
    restores the requested order, and adds `dataset_idx` as an int64 tensor of shape (B,).

    Example:
        ```python
        import numpy as np

        from exactdata import ElasticSampler, MixtureDataset, StatefulDataLoader
        from exactdata.datasets import TokenDataset

        code, prose = (TokenDataset(np.arange(n, dtype=np.uint16), sequence_length=8) for n in (800, 400))
        data = MixtureDataset([code, prose], ["code", "prose"])
        sizes = {"code": len(code), "prose": len(prose)}
        sampler = ElasticSampler(sizes, {"code": 3, "prose": 1}, global_batch_size=16, samples=64)
        for batch in StatefulDataLoader(data, batch_size=16, sampler=sampler):
            print(batch["input_ids"].shape, batch["dataset_idx"].tolist())
        ```

    Args:
        datasets: the sources, as map-style datasets.
        names: a unique name for each dataset. Weights and phases refer to sources by name.
        tagged: whether to add `dataset_idx` to samples. If False, samples are returned unchanged, and a
            `StatefulDataLoader` adds `dataset_idx` to each batch that is a dict.
        gathers: if False, fetch sample by sample even from collated sources.

    Attributes:
        cumulative_sizes: [0, n_0, n_0 + n_1, ...].
        collated: whether `__getitems__` returns finished batches.
        marks_batches: whether the loader must call `mark` on each batch.

    Raises:
        DataError: there are no sources, the numbers of sources and names differ, a name is repeated, or a source is
            empty or has no length.
    """

    def __init__(
        self, datasets: Sequence[Any], names: Sequence[str], *, tagged: bool = True, gathers: bool = True
    ) -> None:
        self.datasets = list(datasets)
        self.names = list(names)
        self.tagged = tagged
        if not self.datasets:
            raise DataError("At least one source is needed: the mixture has none")
        check_names(self.names, DataError)
        if len(self.datasets) != len(self.names):
            raise DataError(
                f"datasets and names must have the same length: {len(self.datasets)} datasets, "
                f"{len(self.names)} names ({', '.join(self.names)})"
            )
        twice = sorted({name for name in self.names if self.names.count(name) > 1})
        if twice:
            raise DataError(f"duplicate source name {twice[0]!r}: every source needs a name of its own")
        sizes = [source_size(*pair) for pair in zip(self.names, self.datasets, strict=True)]
        self.cumulative_sizes: list[int] = [0, *np.cumsum(sizes).tolist()]
        self._starts = np.asarray(self.cumulative_sizes, dtype=np.int64)
        lengths = {d.sequence_length if is_plain_tokens(d) else None for d in self.datasets}
        # Tokens from several sources are gathered in their narrow dtype, then widened to int64 in a single conversion.
        self._sequence_length = lengths.pop() if len(lengths) == 1 else None
        kinds = {d.dtype for d in self.datasets} if self._sequence_length is not None else set()
        self._dtype: np.dtype[Any] = kinds.pop() if len(kinds) == 1 else np.dtype(np.int64)
        self.collated = gathers and all(getattr(dataset, "collated", False) for dataset in self.datasets)
        self.marks_batches = not (tagged or self.collated) and len(self.names) > 1
        self.prefetch = "thread" if all(getattr(d, "prefetch", None) == "thread" for d in self.datasets) else None
        self.draws_nothing = all(map(draws_nothing, self.datasets))
        self.has_state = any(map(is_stateful, self.datasets))

    def __len__(self) -> int:
        return self.cumulative_sizes[-1]

    def locate(self, indices: I64) -> I64:
        """Return, for each index, the number of the source it belongs to.

        Raises:
            IndexError: an index is not in [0, len).
        """
        check_bounds(indices, len(self), "mixture")
        return self._starts.searchsorted(indices, side="right") - 1

    def __getitem__(self, index: int) -> Any:
        source = int(self.locate(np.asarray([index], dtype=np.int64))[0])
        try:
            sample = self.datasets[source][index - self.cumulative_sizes[source]]
        except DataError as error:
            raise self._named(source, error) from error
        if not self.tagged:
            return sample
        if isinstance(sample, dict):
            return {**sample, "dataset_idx": source}
        return sample, source

    def mark(self, batch: Any, indices: Sequence[int]) -> Any:
        """Add `dataset_idx` (int64 of shape (B,)) to `batch` if the batch is a dict, and return the batch."""
        if isinstance(batch, dict):
            batch["dataset_idx"] = torch.from_numpy(self.locate(np.asarray(indices, dtype=np.int64)))
        return batch

    @property
    def __getitems__(self) -> Callable[[Sequence[int] | I64], Batch]:
        """Fetch the samples at the given indices, of shape (B,), as a batch.

        The attribute exists only if `collated` is true. Otherwise loaders must fetch sample by sample, so that
        `exactdata.sample_rng` knows which sample is being fetched.
        """
        if not self.collated:
            raise AttributeError("a mixture with a source that is not collated has no __getitems__")
        return self._fetch_batch

    def _fetch_batch(self, indices: Sequence[int] | I64) -> Batch:
        wanted = np.asarray(indices, dtype=np.int64)
        sources = self.locate(wanted)
        first = int(sources[0]) if len(sources) else 0
        if self._sequence_length is not None:
            batch = token_batch(self._gather(wanted, sources, self._sequence_length))
        elif (sources == first).all():
            batch = self._fetch(first, wanted)
        else:
            batch = self._interleave(wanted, sources)
        batch["dataset_idx"] = torch.from_numpy(sources)
        return batch

    def _gather(self, wanted: I64, sources: I64, sequence_length: int) -> Tokens:
        """Return windows of tokens of shape (B, T + 1). All sources must be token datasets."""
        windows: Tokens | None = None
        for source in np.flatnonzero(np.bincount(sources)).tolist():
            rows = np.flatnonzero(sources == source)
            try:
                part = self.datasets[source].gather(wanted[rows] - self.cumulative_sizes[source])
            except DataError as error:
                raise self._named(source, error) from error
            if len(rows) == len(wanted):
                return cast(Tokens, part)
            if windows is None:
                windows = np.empty((len(wanted), sequence_length + 1), dtype=self._dtype)
            windows[rows] = part
        return windows if windows is not None else np.empty((0, sequence_length + 1), dtype=self._dtype)

    def _fetch(self, source: int, wanted: I64) -> Batch:
        try:
            batch = self.datasets[source].__getitems__(wanted - self.cumulative_sizes[source])
        except DataError as error:
            raise self._named(source, error) from error
        return {key: torch.as_tensor(value) for key, value in batch.items()}

    def _interleave(self, wanted: I64, sources: I64) -> Batch:
        batch: Batch = {}
        for source in np.flatnonzero(np.bincount(sources)).tolist():
            rows = np.flatnonzero(sources == source)
            part = self._fetch(source, wanted[rows])
            if not batch:
                batch = {key: value.new_empty((len(wanted), *value.shape[1:])) for key, value in part.items()}
            samples = [{key: value[0] for key, value in each.items()} for each in (batch, part)]
            if line := disagreement(samples, [f"of source {self.names[i]!r}" for i in (sources.min(), source)]):
                raise DataError(line)
            for key, value in part.items():
                batch[key][torch.from_numpy(rows)] = value
        return batch

    def _named(self, source: int, error: DataError) -> DataError:
        return DataError(f"source {self.names[source]!r}: {error}")

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the sources as `dataset_0`, `dataset_1`, ...; a source without a state has {}."""
        return {
            f"dataset_{source}": dataset.state_dict() if is_stateful(dataset) else {}
            for source, dataset in enumerate(self.datasets)
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the states of the sources.

        Raises:
            DataError: the state was saved with a different number of sources.
        """
        keys = [f"dataset_{source}" for source in range(len(self.datasets))]
        if sorted(state) != sorted(keys):
            raise DataError(
                f"the saved state of this mixture has {', '.join(map(str, state)) or 'nothing'}, its sources are "
                f"{', '.join(keys)}: use the sources that it was saved with"
            )
        for key, dataset in zip(keys, self.datasets, strict=True):
            if is_stateful(dataset):
                dataset.load_state_dict(state[key])

    def fingerprint(self) -> dict[str, Any]:
        """Return a JSON-serializable mapping of source names to sizes and, where available, fingerprints."""
        return {
            name: {"samples": len(dataset), **(dataset.fingerprint() if hasattr(dataset, "fingerprint") else {})}
            for name, dataset in zip(self.names, self.datasets, strict=True)
        }


def check_bounds(indices: I64, size: int, what: str) -> None:
    """Raise IndexError unless all `indices` are in [0, size)."""
    # As an unsigned number, a negative index is huge, so a single comparison detects both errors. `argmax` takes half
    # the time of `max`.
    unsigned = indices.view(np.uint64)
    if len(indices) and unsigned.item(unsigned.argmax()) >= size:
        bad = next(int(index) for index in indices if not 0 <= index < size)
        raise IndexError(f"sample {bad} is not in this {what} of {size} samples")


def token_batch(windows: Tokens) -> Batch:
    """Return `input_ids` and `labels`, int64 tensors of shape (B, T), from windows of tokens of shape (B, T + 1)."""
    return {
        "input_ids": torch.from_numpy(windows[:, :-1].astype(np.int64)),
        "labels": torch.from_numpy(windows[:, 1:].astype(np.int64)),
    }


def source_size(name: str, dataset: Any) -> int:
    """Return the number of samples of a source.

    Raises:
        DataError: the source is empty or has no length.
    """
    try:
        size = len(dataset)
    except TypeError as error:
        raise DataError(
            f"source {name!r} ({type(dataset).__name__}) has no length: a mixture takes map-style datasets only"
        ) from error
    if size < 1:
        raise DataError(f"source {name!r} is empty: add data, or remove it")
    return size


def is_plain_tokens(dataset: Any) -> bool:
    """Return whether `dataset` fetches batches with the method of `TokenDataset`, which a subclass may override."""
    return isinstance(dataset, TokenDataset) and type(dataset).__getitems__ is TokenDataset.__getitems__


def collate(samples: Any) -> Any:
    """Collate samples, but return a finished batch unchanged. Use it as `collate_fn` of torch's DataLoader."""
    return samples if isinstance(samples, dict) else default_collate(samples)
