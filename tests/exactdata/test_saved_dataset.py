"""A dataset that was written by `save_to_disk`, as a source."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from resume import assert_resumes_exactly

from exactdata import ElasticSampler, StatefulDataLoader
from exactdata.errors import DataError
from exactdata.saved_dataset import SavedDataset

datasets = pytest.importorskip("datasets")


def saved(folder: Path, first: int = 0) -> Any:
    rows = range(first, first + 18)
    data = datasets.Dataset.from_dict(
        {
            "ids": [[row, row + 1] for row in rows],
            "weight": [row / 2 for row in rows],
            "text": [str(row) for row in rows],
        }
    )
    data.save_to_disk(str(folder), num_shards=2)
    return data


def test_rows_are_those_that_were_saved_as_tensors(tmp_path: Path) -> None:
    saved(tmp_path / "one")
    data = pickle.loads(pickle.dumps(SavedDataset(tmp_path / "one")))
    assert len(data) == 18
    rows = data.__getitems__([17, 0])
    assert [row["ids"].tolist() for row in rows] == [[17, 18], [0, 1]]
    assert (rows[0]["ids"].dtype, rows[0]["weight"].item(), rows[0]["text"]) == (torch.int64, 8.5, "17")
    assert SavedDataset(tmp_path / "one", ["weight"])[3] == {"weight": torch.tensor(1.5)}


def test_a_fingerprint_is_that_of_the_content(tmp_path: Path) -> None:
    data = saved(tmp_path / "one")
    saved(tmp_path / "other", first=1)
    datasets.DatasetDict({"train": data}).save_to_disk(str(tmp_path / "splits"))
    one, again, other = (SavedDataset(tmp_path / name).fingerprint() for name in ("one", "splits/train", "other"))
    assert one == again != other


@pytest.mark.parametrize("workers", [0, 2])
def test_a_resume_gives_the_rows_of_an_uninterrupted_run(tmp_path: Path, workers: int) -> None:
    saved(tmp_path / "one")

    def make() -> Any:
        data = SavedDataset(tmp_path / "one", ["ids"])
        sampler = ElasticSampler({"saved": len(data)}, [1], global_batch_size=4)
        return StatefulDataLoader(data, batch_size=4, sampler=sampler, num_workers=workers)

    batches = assert_resumes_exactly(make, [1, 2], total=4)
    assert len({row for batch in batches for row in batch["ids"][:, 0].tolist()}) == 16


def test_other_folders_are_refused_as_a_saved_dataset(tmp_path: Path) -> None:
    data = saved(tmp_path / "one")
    datasets.DatasetDict({"train": data}).save_to_disk(str(tmp_path / "splits"))
    for path, columns, message in (
        ("none", None, "no dataset is saved here"),
        ("splits", None, r"has the splits train: name one, such as .*splits/train"),
        ("one", ["idx"], "has no column 'idx': it has ids, weight, text"),
    ):
        with pytest.raises(DataError, match=message):
            SavedDataset(tmp_path / path, columns)
