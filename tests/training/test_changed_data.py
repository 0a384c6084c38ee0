"""What a checkpoint and the run that loads it must have in common in their data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from exactdata.datasets import TokenDataset
from runner.checkpoint.tensors.checks import check_fingerprint
from runner.config.schema import Config
from runner.errors import MismatchError
from runner.training.data import sources


@pytest.mark.promise("data edited between a kill and the resume are refused, for your own datasets too")
def test_a_changed_file_of_a_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cover files of any size, of a dataset without a fingerprint."""
    monkeypatch.setattr(sources, "WHOLE_FILE_BYTES", 8)
    one, other = tmp_path / "one.jsonl", tmp_path / "other" / "one.jsonl"
    other.parent.mkdir()
    one.write_text("cat")
    other.write_bytes(b"0123456789abcdef")
    config = Config()
    config.data.sources = {"pairs": {"_target_": "mine.Pairs", "path": [str(one), str(other)], "split": "train"}}

    def present() -> dict[str, object]:
        return sources.fingerprint(config, {"pairs": [1, 2]})

    before = present()
    assert before["size of source pairs"] == 2
    check_fingerprint(before, present(), "x")
    for path, content, accepted in ((one, b"cow", False), (one, b"cat", True), (other, b"0123456789abcdeF", False)):
        path.write_bytes(content)
        if accepted:
            check_fingerprint(before, present(), "x")
            continue
        with pytest.raises(MismatchError, match=rf"x: the data have changed .*: file {path.name} \(data\.sources"):
            check_fingerprint(before, present(), "x")
    config.run.allow_data_change = True
    check_fingerprint(before, present(), "x")
    config.run.allow_data_change = False
    one.unlink()  # its dataset may not need it any more
    other.write_bytes(b"0123456789abcdef")
    check_fingerprint(before, present(), "x")


def test_the_fingerprint_of_a_dataset_is_trusted(tmp_path: Path) -> None:
    config = Config()
    config.data.sources = {"web": {"_target_": "x", "path": str(tmp_path / "tokens.npy")}}
    (tmp_path / "tokens.npy").touch()
    before = sources.fingerprint(config, {"web": TokenDataset(np.arange(100), 8)})
    assert set(before) == {"seed", "sampler", "size of source web", "content of source web"}
    after = sources.fingerprint(config, {"web": TokenDataset(np.arange(100) + 1, 8)})
    with pytest.raises(MismatchError, match=r"content of source web\.arrays\.0\.ends was .*allow_data_change=true"):
        check_fingerprint(before, after, "x")
