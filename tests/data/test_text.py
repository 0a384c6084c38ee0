"""Text as bytes: prepared once, atomically, the same for every process, with held-out text kept apart."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactdata import paths
from exactdata.errors import DataError
from runner.data import text
from runner.data.text import PythonText, TextFiles


def read(dataset: Any) -> bytes:
    return bytes(np.asarray(dataset.arrays[0].tokens))


@given(parts=st.lists(st.binary(max_size=3000), min_size=1, max_size=8), block=st.integers(1, 64))
def test_the_splits_share_no_byte_and_omit_none(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], block: int
) -> None:
    folder = tmp_path_factory.mktemp("text")
    whole = b"".join(parts)
    if not whole:
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "BLOCK", block)
        text.write_text(folder, parts, len(whole))
    meta = json.loads((folder / "meta.json").read_text())
    size = meta["block"]
    blocks = [whole[i : i + size] for i in range(0, len(whole), size)]
    written = bytes(np.load(folder / "tokens.npy"))
    train = b"".join(b for n, b in enumerate(blocks) if n % 20 != 19)
    held_out = b"".join(b for n, b in enumerate(blocks) if n % 20 == 19)
    assert (written[: meta["train"]], written[meta["train"] :]) == (train, held_out)


@pytest.mark.parametrize("source", text.SOURCES)
def test_python_provides_text(source: str, tmp_path: Path) -> None:
    train = PythonText(source, 64, "train", tmp_path)
    held_out = PythonText(source, 64, "eval", tmp_path)
    whole = PythonText(source, 64, "all", tmp_path)
    assert len(read(train)) + len(read(held_out)) == len(read(whole)) > 200_000
    assert 0.03 < len(read(held_out)) / len(read(whole)) < 0.06
    assert read(held_out)[: text.BLOCK] not in read(train)
    assert train.vocab_size == 256


def test_code_is_the_standard_library_without_its_tests() -> None:
    library = Path(os.__file__).parent
    names = {file.relative_to(library).as_posix() for file in text._library_files(library)}
    assert {"os.py", "asyncio/tasks.py", "json/decoder.py"} <= names
    assert not [name for name in names if {"test", "tests", "encodings", "site-packages"} & set(name.split("/"))]


def test_a_prepared_text_is_reopened_without_reading_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = PythonText("prose", 64, cache_dir=tmp_path)
    monkeypatch.setattr(text, "write_text", None)
    again = PythonText("prose", 64, cache_dir=tmp_path)
    assert first.fingerprint() == again.fingerprint()
    assert len(pickle.dumps(again)) < 1500
    assert pickle.loads(pickle.dumps(again)).fingerprint() == first.fingerprint()


def test_cache_directory_has_three_places_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUNNER_CACHE", str(tmp_path))
    assert paths.cache_directory() == tmp_path
    assert paths.cache_directory("/elsewhere") == Path("/elsewhere")
    monkeypatch.delenv("RUNNER_CACHE")
    assert paths.cache_directory() == Path.home() / ".cache" / "runner"


def test_text_files_are_joined(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    (corpus / "sub").mkdir(parents=True)
    for name, content in {"b.txt": "second", "a.txt": "first", "sub/c.txt": "third", "x.md": "left out"}.items():
        (corpus / name).write_text(content)
    whole = TextFiles(corpus, 4, cache_dir=tmp_path / "cache")
    assert sorted(read(whole).split(b"\0")) == [b"", b"first", b"second", b"third"]
    one = TextFiles([corpus / "b.txt", corpus / "x.md"], 4, cache_dir=tmp_path / "cache")
    assert sorted(read(one).split(b"\0")) == [b"", b"left out", b"second"]


def test_changed_text_gets_another_cache_entry(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("x" * 500)
    before = TextFiles(file, 4, cache_dir=tmp_path / "cache")
    file.write_text("y" * 500)
    os.utime(file, (1, 1))
    after = TextFiles(file, 4, cache_dir=tmp_path / "cache")
    assert b"y" not in read(before)
    assert b"x" not in read(after)
    assert before.fingerprint() != after.fingerprint()


def test_text_that_changes_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="changed while it was read"):
        text.write_text(tmp_path, [b"abc"], 5)
    with pytest.raises(OSError, match="changed while it was read"):
        text.write_text(tmp_path, [b"a" * 900], 500)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda d: PythonText("cod", 8, cache_dir=d), "source='cod' .*did you mean 'code'"),
        (lambda d: PythonText("code", 8, "evla", d), "split='evla' .*did you mean 'eval'"),
        (lambda d: TextFiles(d / "gone", 8, cache_dir=d), "gone: does not exist"),
        (lambda d: TextFiles(d / "short.txt", 8, cache_dir=d), "4 tokens are too few .*takes 9"),
        (lambda d: PythonText("prose", 64, cache_dir=d / "short.txt"), r"short\.txt.*data\.cache_dir or RUNNER_CACHE"),
        (
            lambda d: PythonText("prose", 64, cache_dir=d / ("x" * 300)),
            r"File name too long.*data\.cache_dir or RUNNER_CACHE",
        ),
    ],
)
def test_errors_are_one_line_with_a_remedy(tmp_path: Path, make: Any, message: str) -> None:
    (tmp_path / "short.txt").write_text("abc")
    with pytest.raises(DataError, match=message) as caught:
        make(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_corrupt_cache_is_reported(tmp_path: Path) -> None:
    PythonText("prose", 64, cache_dir=tmp_path)
    (file,) = tmp_path.glob("*/tokens.npy")
    os.truncate(file, 1000)
    with pytest.raises(DataError, match=r"this cache is corrupt .*delete it"):
        PythonText("prose", 64, cache_dir=tmp_path)


def test_old_leftovers_of_a_killed_preparation_are_deleted(tmp_path: Path) -> None:
    old, new = tmp_path / ".preparing-old", tmp_path / ".preparing-new"
    old.mkdir()
    new.mkdir()
    os.utime(old, (time.time() - 100_000,) * 2)
    PythonText("prose", 64, cache_dir=tmp_path)
    assert not old.exists()
    assert new.exists()


@pytest.mark.slow
def test_processes_that_prepare_concurrently_get_the_same_text(tmp_path: Path) -> None:
    code = (
        "import sys; from runner.data.text import PythonText;"
        "print(PythonText('encodings', 64, cache_dir=sys.argv[1]).fingerprint())"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = {process.communicate(timeout=400)[0] for process in both}
    assert [process.returncode for process in both] == [0, 0]
    assert len(outputs) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_equal_files_in_two_folders_are_two_texts(tmp_path: Path) -> None:
    """Such folders may be unpacked from two archives."""
    found = []
    for letter in "ab":
        (tmp_path / letter).mkdir()
        path = tmp_path / letter / "part.txt"
        path.write_text(letter * 40)
        os.utime(path, (1, 1))
        found.append(TextFiles(path, sequence_length=4, cache_dir=tmp_path / "cache")[0]["input_ids"].tolist())
    assert found == [[97] * 4, [98] * 4]
