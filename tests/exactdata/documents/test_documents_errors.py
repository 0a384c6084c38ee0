"""An error of the user or of the disk is one line with the file and the remedy."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from exactdata.documents import preparing
from exactdata.documents.dataset import Documents, spec_of
from exactdata.errors import DataError


def source(folder: Path) -> Path:
    path = folder / "a.jsonl"
    path.write_text('{"content": "abc", "id": 1}\n{"content": "defg", "id": 2}\n')
    return path


def opened(path: Path, **options: Any) -> Documents:
    names = ("text", "messages", "tokenizer", "end_token", "chat_template")
    spec = spec_of(path, **{name: options[name] for name in names if name in options})
    preparing.prepare(spec, path.parent / "cache", workers=0)
    return Documents(path, **{"sequence_length": 4, "cache_dir": path.parent / "cache", **options})


def raised(act: Callable[[], Any]) -> str:
    with pytest.raises(DataError) as caught:
        act()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_wrong_column_names_the_existing_ones(tmp_path: Path) -> None:
    message = raised(lambda: opened(source(tmp_path)))
    assert "a.jsonl:1" in message
    assert "it has content, id" in message
    assert "text=COLUMN" in message


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_a_wrong_column_of_a_table_names_the_existing_ones(tmp_path: Path, kind: str) -> None:
    pa, path = pytest.importorskip("pyarrow"), tmp_path / f"a.{kind}"
    table = pa.table({"content": ["x"], "id": [1]})
    if kind == "parquet":
        pytest.importorskip("pyarrow.parquet").write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    assert "it has content, id" in raised(lambda: opened(path))
    path.write_bytes(path.read_bytes()[:40])
    assert "damaged file" in raised(lambda: opened(path))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tokenizer": "no.json"}, "no such file"),
        ({"tokenizer": "bytes", "end_token": "</s>"}, "auto"),
        ({"chat_template": "no.jinja", "messages": "m"}, "check the path"),
        ({"sequence_length": 0}, "at least 1"),
        ({"packing": "bestfit"}, "best_fit"),
        ({"packing": "stream", "long": "drop"}, "long=split"),
        ({"long": "drop", "sequence_length": 2}, "long=split"),
        ({"vocab_size": 100}, "raise vocab_size"),
    ],
)
def test_a_wrong_option_is_named_with_the_allowed_values(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    assert words in raised(lambda: opened(source(tmp_path), **{"text": "content", **options}))


def test_missing_unknown_and_empty_files_are_named(tmp_path: Path) -> None:
    assert "check the path" in raised(lambda: opened(tmp_path / "none.jsonl"))
    (tmp_path / "a.csv").write_text("x")
    assert ".jsonl.zst, .jsonl.gz, .parquet" in raised(lambda: opened(tmp_path / "a.csv"))
    (tmp_path / "empty.jsonl").touch()
    assert "no document in it" in raised(lambda: opened(tmp_path / "empty.jsonl"))


def test_a_damaged_tokenizer_is_named(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    path, folder = source(tmp_path), tmp_path / "model"
    folder.mkdir()
    for name, content in (("tokenizer.json", b"{"), ("tokenizer.json", b"\xff"), ("tokenizer_config.json", b"{")):
        (folder / name).write_bytes(content)
        assert str(folder) in raised(lambda: opened(path, text="content", tokenizer=folder))
    vocabulary = {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    message = raised(lambda: opened(path, text="content", tokenizer=folder / "tokenizer.json", end_token="</s>"))
    assert "'</s>'" in message
    assert "name one of its tokens, or none" in message


def test_a_file_that_changes_while_it_is_read_is_named(tmp_path: Path) -> None:
    path = source(tmp_path)
    spec = spec_of(path, text="content")
    path.write_text('{"content": "other"}\n')
    assert "start again when it is complete" in raised(lambda: preparing.prepare(spec, tmp_path / "cache", workers=0))
    path.unlink()
    assert str(path) in raised(lambda: preparing.prepare(spec, tmp_path / "cache", workers=0))


def test_a_preparation_with_a_torn_spec_is_completed(tmp_path: Path) -> None:
    path = source(tmp_path)
    spec = spec_of(path, text="content")
    store = preparing.store_of(spec, tmp_path / "cache")
    store.directory.mkdir(parents=True)
    store.spec_path.write_text(json.dumps(spec.to_json())[:50])
    index = preparing.prepare(spec_of(path, text="content"), tmp_path / "cache", workers=0)
    assert index.store.directory == store.directory
    assert index.find("a.jsonl", 2) == 1


def test_equal_files_in_two_folders_are_two_sources(tmp_path: Path) -> None:
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        path = tmp_path / name / "part.jsonl"
        path.write_text(json.dumps({"content": name}) + "\n")
        os.utime(path, (1, 1))
        preparing.prepare(spec_of(path, text="content"), tmp_path / "cache", workers=0)
        data = Documents(path, 4, text="content", cache_dir=tmp_path / "cache")
        found.append(bytes(data[0]["input_ids"][:3].tolist()))
    assert found == [b"one", b"two"]


def read_everything(path: Path) -> None:
    data = opened(path, text="content")
    data.__getitems__(range(len(data)))
    assert data.packed.find("a.jsonl", 1) == 0


@pytest.mark.parametrize("how", ["gone", "empty", "cut"])
@pytest.mark.parametrize(
    "name", ["parts/*/tokens.bin", "index/*.npy", "index/meta.json", "plans/*/*.npy", "plans/*/meta.json"]
)
def test_a_damaged_store_names_the_files_to_delete(tmp_path: Path, name: str, how: str) -> None:
    path = source(tmp_path)
    read_everything(path)
    store = next((tmp_path / "cache").iterdir())
    for file in sorted(store.glob(name)):
        if file.name == "held.npy":  # is read for a new plan only
            continue
        content = file.read_bytes()
        if how == "gone":
            file.unlink()
        else:
            os.truncate(file, len(content) // 2 if how == "cut" else 0)
        message = raised(lambda: read_everything(path))
        assert str(file.parent) in message
        assert "delete" in message
        deleted = message.split("delete ")[1].split(" to ")[0]
        assert deleted in ("it", str(file.parent), str(store)), message
        file.write_bytes(content)
        read_everything(path)
