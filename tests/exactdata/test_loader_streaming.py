"""The examples of docs/loader.md: they yield all data once, and resume exactly."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from loading import identity
from resume import assert_same
from shards import played

from exactdata import StatefulDataLoader

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def example(name: str) -> ModuleType:
    """Load the module of an example, registered so that forked workers find it."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def jsonl(tmp_path: Path) -> Callable[[], Any]:
    files = [tmp_path / f"{part}.jsonl" for part in range(3)]
    for part, file in enumerate(files):
        file.write_text("".join(json.dumps({"id": 7 * part + line}) + "\n" for line in range(7)))
    return lambda: example("streaming_jsonl").JsonLines(files)


def tar(tmp_path: Path) -> Callable[[], Any]:
    files = [tmp_path / f"{part}.tar" for part in range(3)]
    for part, file in enumerate(files):
        with tarfile.open(file, "w") as archive:
            for number in range(7 * part, 7 * part + 7):
                for extension, content in (("txt", b"text"), ("id", str(number).encode())):
                    member = tarfile.TarInfo(f"{number:04}.{extension}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return lambda: example("streaming_tar").TarSamples(files)


def parquet(tmp_path: Path) -> Callable[[], Any]:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    files = [tmp_path / f"{part}.parquet" for part in range(3)]
    for part, file in enumerate(files):
        table = pyarrow.table({"id": list(range(7 * part, 7 * part + 7)), "text": ["x"] * 7})
        parquet.write_table(table, file, row_group_size=3)
    return lambda: example("streaming_parquet").ParquetRows(files, columns=["id"])


def tokens(text: str) -> list[int]:
    return list(text.encode())


def hugging_face(tmp_path: Path) -> Callable[[], Any]:
    datasets = pytest.importorskip("datasets")
    files = [str(tmp_path / f"{part}.jsonl") for part in range(2)]
    for part, file in enumerate(files):
        Path(file).write_text("".join(json.dumps({"text": chr(65 + part) * 5 + chr(97 + n)}) + "\n" for n in range(9)))

    def make() -> Any:
        stream = datasets.load_dataset("json", data_files=files, split="train", streaming=True)
        return example("streaming_hugging_face").PackedText(stream, tokens, length=8)

    return make


def numbers(batches: list[Any]) -> list[int]:
    return [int(sample["id"]) for batch in batches for sample in batch]


def loader(data: Any, workers: int) -> Any:
    return StatefulDataLoader(data, batch_size=2, num_workers=workers, collate_fn=identity)


STREAMS = [jsonl, tar, parquet, hugging_face]


@pytest.mark.filterwarnings("ignore")  # from datasets and pyarrow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.__name__)
@pytest.mark.slow
def test_examples_resume_exactly(stream: Callable[..., Any], workers: int, tmp_path: Path) -> None:
    make = stream(tmp_path)
    whole_loader = loader(make(), workers)
    first_epoch, second_epoch = list(whole_loader), list(whole_loader)
    assert first_epoch
    assert_same(first_epoch, second_epoch)
    if stream is not hugging_face:
        assert sorted(numbers(first_epoch)) == list(range(21))
    for cut in (0, 1, 4, len(first_epoch)):
        one = loader(make(), workers)
        found = [batch for _, batch in zip(range(cut), one, strict=False)]
        state = one.state_dict()
        other = loader(make(), workers)
        other.load_state_dict(state if stream is hugging_face else json.loads(json.dumps(state)))
        assert_same(found + list(other), first_epoch)
        assert_same(list(other), first_epoch)


@pytest.mark.filterwarnings("ignore")  # from datasets and pyarrow
@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.__name__)
def test_examples_are_dealt_out_to_other_workers(stream: Callable[..., Any], tmp_path: Path) -> None:
    make = stream(tmp_path)

    def items(batches: list[Any]) -> list[str]:
        return sorted(str(sample) for batch in batches for sample in batch)

    with played(0, 1):
        whole = items(list(loader(make(), 0)))
        for cut in (0, 2):
            state, found = None, []
            for workers in (2, 0, 3, 1):
                part = loader(make(), workers)
                if state is not None:
                    part.load_state_dict(state)
                found += [batch for _, batch in zip(range(cut), part, strict=False)] if cut else []
                state = part.state_dict()
            last = loader(make(), 2)
            last.load_state_dict(state)
            rest = list(last)
            if len(found) == 4 * cut:  # otherwise an epoch has ended in between
                assert items(found + rest) == whole
            assert items(list(last)) == whole


@pytest.mark.parametrize("plan", [(0, 2), (2, 1)])
def test_row_groups_are_dealt_out_to_other_worker_processes(plan: tuple[int, int], tmp_path: Path) -> None:
    make = parquet(tmp_path)
    before, after = plan
    for cut in (0, 1):
        one = loader(make(), before)
        found = numbers([batch for _, batch in zip(range(cut), one, strict=False)]) if cut else []
        other = loader(make(), after)
        other.load_state_dict(one.state_dict())
        assert sorted(found + numbers(list(other))) == list(range(21))
