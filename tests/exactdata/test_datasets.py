"""Token datasets, shards and mixtures: samples, batches equal to samples, one-line errors."""

from __future__ import annotations

import json
import os
import pickle
import resource
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

from exactdata import StatefulDataLoader
from exactdata.datasets import MixtureDataset, TokenDataset, collate
from exactdata.errors import DataError
from exactdata.loading.randomness import sample_rng
from exactdata.shards import TokenShards


def tokens(count: int, start: int = 0, dtype: Any = np.uint16) -> Any:
    return np.arange(start, start + count, dtype=dtype)


class Numbers(Dataset[Any]):
    """A user's map-style dataset."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


class RandomNumbers(Numbers):
    """A dataset with random samples."""

    def __getitem__(self, index: int) -> Any:
        return {"x": int(sample_rng().integers(1 << 30))}


class Collated(Numbers):
    """A user's dataset that fetches whole batches."""

    collated = True

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.tensor([index, -index])}

    def __getitems__(self, indices: Any) -> Any:
        return {"x": np.stack([indices, -np.asarray(indices)], axis=1)}


def same(a: Any, b: Any) -> bool:
    return a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)


def test_sample_has_tokens_and_the_next_tokens_as_labels() -> None:
    data = TokenDataset(tokens(33), sequence_length=8)
    assert len(data) == 4
    assert data[1]["input_ids"].tolist() == list(range(8, 16))
    assert data[3]["labels"].tolist() == list(range(25, 33))
    assert data[0]["input_ids"].dtype == torch.int64


@pytest.mark.parametrize(("count", "samples"), [(9, 1), (16, 1), (17, 2), (24, 2), (25, 3)])
def test_every_token_has_a_label(count: int, samples: int) -> None:
    assert len(TokenDataset(tokens(count), 8)) == samples


@given(
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=4),
    length=st.integers(1, 9),
    picks=st.lists(st.integers(0, 10_000), max_size=12),
)
def test_a_batch_equals_its_samples_and_never_crosses_arrays(sizes: list[int], length: int, picks: list[int]) -> None:
    parts = [tokens(size, 100 * number) for number, size in enumerate(sizes)]
    if all(size <= length for size in sizes):
        with pytest.raises(DataError):
            TokenDataset(parts, length)
        return
    data = TokenDataset(parts, length)
    expected = [part[i : i + length + 1] for part in parts for i in range(0, len(part) - length, length)]
    assert len(data) == len(expected)
    indices = [pick % len(data) for pick in picks]
    batch = data.__getitems__(indices)
    assert batch["input_ids"].shape == (len(indices), length)
    for row, index in enumerate(indices):
        window = torch.from_numpy(expected[index].astype(np.int64))
        assert torch.equal(batch["input_ids"][row], window[:-1])
        assert torch.equal(batch["labels"][row], window[1:])


@pytest.mark.parametrize("bad", [-1, 4, 10**9])
def test_an_index_out_of_range_is_an_index_error(bad: int) -> None:
    data = TokenDataset(tokens(33), 8)
    with pytest.raises(IndexError, match="4 samples"):
        data[bad]
    with pytest.raises(IndexError):
        data.__getitems__(np.array([0, bad]))
    with pytest.raises(IndexError, match="4 samples"):
        MixtureDataset([data], ["a"])[bad]


def test_a_token_outside_the_vocabulary_is_reported(tmp_path: Path) -> None:
    good, bad = tokens(40), tokens(40)
    bad[21] = 999
    np.save(tmp_path / "a.npy", good)
    np.save(tmp_path / "b.npy", bad)
    data = TokenShards(tmp_path, 8, vocab_size=64)
    data.__getitems__(list(range(6)))
    with pytest.raises(DataError, match=r"b\.npy: token 999 at position 21 .*\(0 to 63\).*at least 1000"):
        data.__getitems__(list(range(len(data))))
    mixture = MixtureDataset([data], ["code"])
    with pytest.raises(DataError, match=r"source 'code': .*token 999"):
        mixture.__getitems__([6])
    with pytest.raises(DataError, match=r"source 'code': .*token 999"):
        mixture[6]


def test_a_negative_token_is_reported() -> None:
    data = TokenDataset(np.array([1, 2, -5, 3], dtype=np.int32), 3, vocab_size=10, name="mine")
    with pytest.raises(DataError, match="mine: token -5 at position 2"):
        data[0]


def test_dtypes_of_several_arrays_may_differ() -> None:
    data = TokenDataset([tokens(10), tokens(10, dtype=np.int32)], 4)
    assert data.__getitems__([0, 2])["labels"].tolist() == [[1, 2, 3, 4]] * 2


@pytest.mark.parametrize("wrong", [np.zeros((4, 4), np.int32), np.zeros(20, np.float32)])
def test_anything_but_tokens_is_refused(wrong: Any) -> None:
    with pytest.raises(DataError, match="1-D array of integers"):
        TokenDataset(wrong, 4)


def test_too_few_tokens_are_reported_with_both_lengths() -> None:
    with pytest.raises(DataError, match=r"8 tokens .* sequence_length 8, which takes 9"):
        TokenDataset(tokens(8), 8)
    with pytest.raises(DataError, match="sequence_length is 0"):
        TokenDataset(tokens(8), 0)


@pytest.mark.parametrize("cut", [slice(None), slice(100, None), slice(7, 5000)])
def test_a_memory_map_is_pickled_as_its_path(tmp_path: Path, cut: slice) -> None:
    np.save(tmp_path / "t.npy", tokens(20_000))
    mapped = np.load(tmp_path / "t.npy", mmap_mode="r")[cut]
    data = TokenDataset(mapped, 16)
    pickled = pickle.dumps(data)
    assert len(pickled) < 1000
    again = pickle.loads(pickled)
    assert isinstance(again.arrays[0].tokens, np.memmap)
    assert np.array_equal(again.arrays[0].tokens, mapped)
    assert same(again[len(data) - 1], data[len(data) - 1])


def test_reopening_a_map_whose_file_is_missing_names_the_file(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", tokens(100))
    pickled = pickle.dumps(TokenShards(tmp_path / "t.npy", 8))
    (tmp_path / "t.npy").unlink()
    with pytest.raises(DataError, match=r"t\.npy"):
        pickle.loads(pickled)


def test_tokens_in_memory_are_pickled_by_value() -> None:
    data = TokenDataset(tokens(100), 8, name="mine")
    assert same(pickle.loads(pickle.dumps(data))[3], data[3])


def test_fingerprints_differ_for_different_data() -> None:
    one = TokenDataset(tokens(5000), 8).fingerprint()
    assert one == TokenDataset(tokens(5000), 8).fingerprint()
    assert one != TokenDataset(tokens(5000, 1), 8).fingerprint()
    assert one != TokenDataset(tokens(4999), 8).fingerprint()
    assert one != TokenDataset(tokens(5000), 4).fingerprint()
    mixture = MixtureDataset([TokenDataset(tokens(5000), 8), Numbers(3)], ["a", "b"])
    assert mixture.fingerprint() == {"a": {"samples": 624, **one}, "b": {"samples": 3}}


# ---- shards on disk


def test_bin_and_npy_shards_hold_the_same_samples(tmp_path: Path) -> None:
    tokens(100).tofile(tmp_path / "a.bin")
    np.save(tmp_path / "a.npy", tokens(100))
    tokens(100).astype(">u2").tofile(tmp_path / "big.bin")
    plain = TokenShards(str(tmp_path / "a.npy"), 8)
    for other in (
        TokenShards(tmp_path / "a.bin", 8, dtype="uint16"),
        TokenShards(tmp_path / "big.bin", 8, dtype=">u2"),
    ):
        assert same(plain[5], other[5])


def test_more_shards_than_open_files_are_possible(tmp_path: Path) -> None:
    """Many systems begin with a limit of 1,024 files, which a process may raise. 10^12 tokens need more shards."""
    for number in range(200):
        np.save(tmp_path / f"{number:03}.npy", np.arange(20, dtype=np.uint16))

    def opened(limit: int) -> str:
        """Return what a process with this hard limit finds."""
        found = tmp_path / "found"
        if (child := os.fork()) == 0:
            resource.setrlimit(resource.RLIMIT_NOFILE, (100, limit))
            with suppress(Exception):
                try:
                    result = str(len(TokenShards(tmp_path, 8)))
                except DataError as error:
                    result = str(error)
                found.write_text(result)
            os._exit(0)
        os.waitpid(child, 0)
        return found.read_text()

    assert opened(1000) == "400"
    assert "a process may have 150 files open, and each shard is one: raise the limit" in opened(150)


def test_shards_by_folder_glob_and_list_in_a_fixed_order(tmp_path: Path) -> None:
    for number in (2, 0, 1):
        np.save(tmp_path / f"s{number}.npy", tokens(17, 1000 * number))
    for paths in (tmp_path, str(tmp_path / "s*.npy"), [tmp_path / f"s{n}.npy" for n in range(3)]):
        data = TokenShards(paths, 8)
        assert data.__getitems__(range(6))["input_ids"][:, 0].tolist() == [0, 8, 1000, 1008, 2000, 2008]
    assert TokenShards([tmp_path / "s1.npy", tmp_path / "s0.npy"], 8)[0]["input_ids"][0] == 1000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: TokenShards(d / "nothing.npy", 8), r"nothing\.npy: does not exist"),
        (lambda d: TokenShards([d / "whole.npy", d / "gone.npy"], 8), r"gone\.npy: does not exist"),
        (lambda d: TokenShards(d / "zz*.npy", 8), r"zz\*\.npy: does not exist"),
        (lambda d: TokenShards(d / "empty", 8), r"has no file that matches '\*\.npy'"),
        (lambda d: TokenShards([], 8), "paths is empty"),
        (lambda d: TokenShards(d / "cut.npy", 8), r"cut\.npy: not a complete \.npy file \(\d+ bytes"),
        (lambda d: TokenShards(d / "none.npy", 8), r"none\.npy: not a complete \.npy file \(0 bytes"),
        (lambda d: TokenShards(d / "text.npy", 8), r"text\.npy: not a complete \.npy file"),
        (lambda d: TokenShards(d / "square.npy", 8), r"square\.npy: .*\(4, 4\).*1-D"),
        (lambda d: TokenShards(d / "float.npy", 8), r"float\.npy: .*float64.*integers"),
        (lambda d: TokenShards(d / "odd.bin", 8), r"odd\.bin: .*set dtype"),
        (lambda d: TokenShards(d / "odd.bin", 8, dtype="uint16"), r"odd\.bin: 33 bytes .*truncated"),
        (lambda d: TokenShards(d / "odd.bin", 8, dtype="float32"), "dtype='float32' is not an integer"),
        (lambda d: TokenShards(d / "odd.bin", 8, dtype="unit16"), "dtype='unit16' is not an integer"),
        (lambda d: TokenShards(d / "whole.npy", 8, dtype="uint32"), r"whole\.npy: has uint16 .*dtype=uint32"),
        (lambda d: TokenShards(d / "odd.csv", 8), r"odd\.csv: not a token shard"),
        (lambda d: TokenShards(d / "whole*.npy", 8, shards=2), "found 1 shards, but shards=2"),
    ],
)
def test_an_invalid_shard_is_reported_in_one_line(tmp_path: Path, make: Any, message: str) -> None:
    np.save(tmp_path / "whole.npy", tokens(100))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "whole.npy").read_bytes()[:-20])
    (tmp_path / "none.npy").touch()
    (tmp_path / "text.npy").write_text("not an array at all")
    np.save(tmp_path / "square.npy", np.zeros((4, 4), np.int32))
    np.save(tmp_path / "float.npy", np.zeros(40))
    (tmp_path / "odd.bin").write_bytes(b"x" * 33)
    (tmp_path / "odd.csv").write_bytes(b"x" * 33)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=message) as caught:
        make(tmp_path)
    assert "\n" not in str(caught.value)


# ---- mixtures


def mixture() -> MixtureDataset:
    return MixtureDataset([TokenDataset(tokens(33), 8), TokenDataset(tokens(65, 500), 8)], ["a", "b"])


def test_a_mixture_concatenates_its_sources() -> None:
    both = mixture()
    assert (len(both), both.cumulative_sizes, both.names) == (12, [0, 4, 12], ["a", "b"])
    assert both[3]["dataset_idx"] == 0
    assert both[4]["dataset_idx"] == 1
    assert both[4]["input_ids"][0] == 500


@given(picks=st.lists(st.integers(0, 11), min_size=1, max_size=20))
def test_a_batch_of_a_mixture_keeps_the_requested_order(picks: list[int]) -> None:
    for both in (mixture(), MixtureDataset([Collated(4), Collated(8)], ["a", "b"])):
        batch = both.__getitems__(np.array(picks))
        assert batch["dataset_idx"].dtype == torch.int64
        for row, pick in enumerate(picks):
            assert same({key: value[row] for key, value in batch.items()}, both[pick])


def test_an_empty_batch_has_its_shape() -> None:
    assert mixture().__getitems__([])["input_ids"].shape == (0, 8)


def test_samples_that_are_not_dicts_are_paired_with_their_source() -> None:
    both = MixtureDataset([Numbers(2), Numbers(3)], ["a", "b"])
    assert both[4] == (torch.tensor(2), 1)
    assert not both.collated
    assert not hasattr(both, "__getitems__")
    assert both[0][1] == 0


def test_a_users_dataset_can_be_mixed_with_tokens() -> None:
    class Single(Numbers):
        def __getitem__(self, index: int) -> Any:
            return {"input_ids": torch.full((8,), index), "labels": torch.full((8,), index)}

    both = MixtureDataset([TokenDataset(tokens(33), 8), Single(3)], ["tokens", "mine"])
    batches = list(DataLoader(both, batch_size=7, collate_fn=collate))
    assert batches[0]["dataset_idx"].tolist() == [0] * 4 + [1] * 3
    assert batches[0]["input_ids"].shape == (7, 8)


def test_randomness_is_keyed_by_the_sample_within_a_mixture() -> None:
    from exactdata.loading.fetch import MapFetcher

    both = MixtureDataset([RandomNumbers(5), Collated(5)], ["random", "other"])
    fetcher = MapFetcher(both, list, batched=True, own_collate=True)
    keys = np.array([11, 22], dtype=np.uint64)
    batch = fetcher.fetch([0, 1], keys)
    expected = [int(np.random.Generator(np.random.Philox(key=int(key))).integers(1 << 30)) for key in keys]
    assert [sample["x"] for sample in batch] == expected
    assert expected[0] != expected[1]


def test_a_subclass_that_overrides_fetching_is_respected() -> None:
    class Reversed(TokenDataset):
        def __getitems__(self, indices: Any) -> Any:
            return {key: value.flip(1) for key, value in super().__getitems__(indices).items()}

    both = MixtureDataset([Reversed(tokens(33), 8), TokenDataset(tokens(33), 8)], ["a", "b"])
    assert both.__getitems__([4, 0])["input_ids"].tolist() == [list(range(8)), list(range(8))[::-1]]


def test_torchs_own_loader_accepts_finished_batches() -> None:
    loader = DataLoader(mixture(), batch_size=4, collate_fn=collate)
    assert [batch["dataset_idx"].tolist() for batch in loader] == [[0] * 4, [1] * 4, [1] * 4]


@pytest.mark.parametrize(
    ("datasets", "names", "message"),
    [
        ([], [], "At least one"),
        ([Numbers(2)], ["a", "b"], "same length: 1 datasets, 2 names"),
        ([Numbers(2), Numbers(2)], ["a", "a"], "duplicate source name 'a'"),
        ([Numbers(2), Numbers(0)], ["a", "b"], "source 'b' is empty"),
        ([Numbers(2), iter([])], ["a", "b"], "source 'b' .* has no length"),
    ],
)
def test_an_invalid_mixture_is_refused(datasets: Any, names: Any, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        MixtureDataset(datasets, names)
    assert isinstance(caught.value, ValueError)


def test_sources_of_unequal_shape_are_reported() -> None:
    both = MixtureDataset([TokenDataset(tokens(33), 8), TokenDataset(tokens(33), 4)], ["long", "short"])
    with pytest.raises(DataError, match=r"'long' has input_ids \(8,\) int64.*'short' has input_ids \(4,\)"):
        both.__getitems__([0, 5])


def test_mixtures_can_be_pickled(tmp_path: Path) -> None:
    both = mixture()
    assert same(pickle.loads(pickle.dumps(both)).__getitems__([1, 7]), both.__getitems__([1, 7]))


class Counted(Numbers):
    """A source that counts the samples requested from it; the count is its state."""

    asked = 0

    def __getitem__(self, index: int) -> Any:
        self.asked += 1
        return self.asked

    def state_dict(self) -> dict[str, Any]:
        return {"asked": self.asked}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.asked = state["asked"]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_states_of_sources_are_restored_with_the_loader(workers: int) -> None:
    def make() -> StatefulDataLoader[Any]:
        both = MixtureDataset([Numbers(2), Counted(4), Counted(3)], ["a", "b", "c"])
        return StatefulDataLoader(both, batch_size=None, num_workers=workers)

    whole = list(make())
    first = make()
    stream = iter(first)
    taken = [next(stream) for _ in range(5)]
    state = first.state_dict()
    assert json.loads(state["dataset"])[0]["dataset"] == {
        "dataset_0": {},
        "dataset_1": {"asked": 3},
        "dataset_2": {"asked": 0},
    }
    second = make()
    second.load_state_dict(state)
    assert taken + list(second) == whole


def test_state_of_other_sources_is_refused_by_a_mixture() -> None:
    plain = StatefulDataLoader(MixtureDataset([Numbers(2), Numbers(3)], ["a", "b"]))
    next(iter(plain))
    assert plain.state_dict()["dataset"] is None
    with pytest.raises(DataError, match="has dataset_0, its sources are dataset_0, dataset_1"):
        MixtureDataset([Counted(2), Numbers(3)], ["a", "b"]).load_state_dict({"dataset_0": {"asked": 1}})
