"""Read a Hugging Face dataset that was saved with `save_to_disk`, and use it as a source."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from exactdata.errors import DataError


class SavedDataset(Dataset[dict[str, Any]]):
    """Rows of a dataset that `datasets.Dataset.save_to_disk` wrote, memory-mapped. Numbers are returned as tensors.

    `datasets.load_from_disk` returns lists if the dataset was saved without a format, and provides no fingerprint that
    a resume could compare.

    Example:
        ```python
        import datasets

        from exactdata import StatefulDataLoader
        from exactdata.saved_dataset import SavedDataset

        datasets.Dataset.from_dict({"x": [0.0, 1.0, 2.0, 3.0], "y": [0, 1, 0, 1]}).save_to_disk("saved")
        data = SavedDataset("saved", columns=["x"])
        for batch in StatefulDataLoader(data, batch_size=2, shuffle=True):
            print(batch["x"])
        ```

    Args:
        path: the directory. For a `DatasetDict`, the directory of one split, such as `saved/train`.
        columns: names of the columns to read. If None, all columns.

    Raises:
        DataError: `path` is not a saved dataset or is a `DatasetDict`, a column is missing, or `datasets` is not
            installed.
    """

    draws_nothing = True

    def __init__(self, path: str | Path, columns: Sequence[str] | None = None) -> None:
        try:
            datasets = import_module("datasets")
        except ImportError as error:
            raise DataError(
                f"{path}: a saved dataset is read by datasets, which is missing: pip install datasets"
            ) from error
        try:
            found = datasets.load_from_disk(str(Path(path).expanduser()))
        except FileNotFoundError as error:
            raise DataError(f"{path}: no dataset is saved here: name a directory that save_to_disk wrote") from error
        if isinstance(found, datasets.DatasetDict):
            raise DataError(f"{path}: has the splits {', '.join(found)}: name one, such as {path}/{next(iter(found))}")
        unknown = sorted(set(columns or ()) - set(found.column_names))
        if unknown:
            raise DataError(f"{path}: has no column {unknown[0]!r}: it has {', '.join(found.column_names)}")
        self._content = found._fingerprint
        self.data = found.with_format("torch", columns=None if columns is None else list(columns))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self.data[index]
        return row

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """Read several rows at once."""
        rows: list[dict[str, Any]] = self.data.__getitems__(list(indices))
        return rows

    def fingerprint(self) -> dict[str, Any]:
        """Return the number of rows, and the fingerprint that `datasets` stored with the dataset."""
        return {"samples": len(self), "content": self._content}
