"""`runner inspect` finds documents in the rows that hold them: compare its answers with the steps' samples."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from packed_rows import Plan, Rows

from exactdata.elastic import ElasticSampler
from exactdata.order.batch_shape import BatchShape
from exactdata.order.segments import Segment
from exactdata.queries import order_queries
from exactdata.queries.order_record import OrderRecord
from runner.cli.look import inspect
from runner.data import order_file
from runner.errors import UserError

STEPS, DONE = 40, 20
SIZES = {"web": 30, "code": 50}


@pytest.fixture(autouse=True)
def plans(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("exactdata.documents.packed")
    module.PackedRows = Plan  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "exactdata.documents", ModuleType("exactdata.documents"))
    monkeypatch.setitem(sys.modules, "exactdata.documents.packed", module)


def made(root: Path, kind: str) -> tuple[str, Plan]:
    """Make a run of 40 steps, 20 of them done, on rows of documents and on other samples."""
    source = Rows(str(root / "plan"), SIZES["web"], 16)
    others: dict[str, Any] = {
        "steps": STEPS,
        "batch_shapes": (BatchShape(0, 2, 2),),
        "tokens_per_sample": {"web": source.total_tokens / SIZES["web"]},
        "packed": {"web": str(root / "plan")},
    }
    if kind == "elastic":
        sampler = ElasticSampler(SIZES, [1, 1], global_batch_size=4, num_replicas=1, rank=0, seed=3)
        record = OrderRecord.of_elastic(sampler.state_dict(), SIZES, **others)
    else:
        record = OrderRecord(kind, 3, SIZES, segments=(Segment(0, {"web": 1, "code": 1}),), **others)
    run = root / "run"
    run.mkdir()
    order_file.write(record, run / "order.json")
    (run / "status.json").write_text(json.dumps({"step": DONE}))
    assert order_file.read(run / "order.json") == record
    return str(run), source.packed


def asked(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert inspect.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("kind", ["elastic", "mixture", "distributed"])
def test_document_is_found_whenever_its_rows_are_consumed(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run, plan = made(tmp_path, kind)
    record = order_file.read(Path(run) / "order.json")
    expected: dict[int, list[tuple[int, ...]]] = {document: [] for document in range(plan.documents)}
    for step in range(1, STEPS + 1):
        for row in order_queries.samples_of_step(record, step):
            if row["source"] == "web":
                _, *pieces = plan.pieces(np.array([row["index"]]))
                for document, first, length in zip(*(part.tolist() for part in pieces), strict=True):
                    expected[document].append((step, row["rank"], row["epoch"], row["index"], first, length))
    for document in (0, 1, plan.documents - 1):
        file, line = plan.where(np.array([document]))[0]
        found = asked(capsys, run, "--document", f"web:{document}")
        assert found == asked(capsys, run, "--document", f"web:{file}:{line}")
        assert [found[key] for key in ("source", "document", "file", "line")] == ["web", document, file, line]
        keys = "step", "rank", "epoch", "sample", "first", "length"
        assert sorted(tuple(row[key] for key in keys) for row in found["times"]) == sorted(expected[document])
        assert all(row["consumed"] == (row["step"] <= DONE) for row in found["times"])
    assert len({row[3] for row in expected[0]}) == 2


def test_a_step_names_the_documents_of_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, plan = made(tmp_path, "elastic")
    for step in range(1, 9):
        rows = asked(capsys, run, "--step", str(step))
        for row in rows:
            if row["source"] == "code":
                assert row["documents"] == []
                continue
            _, documents, first, length = (part.tolist() for part in plan.pieces(np.array([row["index"]])))
            got = [(each["document"], each["first"], each["length"]) for each in row["documents"]]
            assert got == list(zip(documents, first, length, strict=True))
            assert [(each["file"], each["line"]) for each in row["documents"]] == plan.where(np.array(documents))
        assert inspect.main([run, "--step", str(step)]) == 0
        text = capsys.readouterr().out.splitlines()
        assert len({line.index("part-") for line in text if "part-" in line} | {text[1].index("documents")}) == 1
        for row, line in zip(rows, text[2:], strict=True):
            pieces = row["documents"]
            assert line.count("tokens") == min(len(pieces), 3)
            assert (f"and {len(pieces) - 3} more" in line) == (len(pieces) > 3)


def test_without_prepared_files_a_document_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = made(tmp_path, "elastic")
    (tmp_path / "plan/plan.json").unlink()
    assert inspect.main([run, "--step", "1"]) == 0
    output = capsys.readouterr()
    assert "documents" not in output.out
    assert output.err.startswith("warning: without documents: source 'web': its prepared documents cannot be read")
    assert output.err.count("\n") == 1
    with pytest.raises(UserError, match=r"put back .*/plan, or resume the run, which prepares them anew"):
        inspect.main([run, "--document", "web:0"])
    Rows(str(tmp_path / "plan"), 31, 16)
    with pytest.raises(UserError, match="has 31 samples, and the run has 30"):
        inspect.main([run, "--document", "web:0"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("web:x", "expected SOURCE:NUMBER or SOURCE:FILE:LINE, for example web:12"),
        ("code:1", "sources with documents: web"),
        ("web:100000", "this source has documents 0 to"),
        ("web:part-0.jsonl:2", "no document was read from this line"),
    ],
)
def test_an_invalid_document_is_refused(tmp_path: Path, words: str, message: str) -> None:
    run, _ = made(tmp_path, "elastic")
    with pytest.raises(UserError, match=message):
        inspect.main([run, "--document", words])


def test_a_run_without_documents_imports_nothing_of_them(tmp_path: Path) -> None:
    run, _ = made(tmp_path, "elastic")
    order = json.loads((Path(run) / "order.json").read_text())
    del order["packed"]
    (Path(run) / "order.json").write_text(json.dumps(order))
    code = (
        "import sys; from runner.cli.look.inspect import main; "
        f"status = any(main([{run!r}, *asked]) for asked in (['--step', '3'], ['--sample', 'web:0'], ['--plan'])); "
        "sys.exit(status or any(name.startswith('exactdata.documents') or name == 'torch' for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    with pytest.raises(UserError, match="no source of this run has packed documents: ask for --sample SOURCE:INDEX"):
        inspect.main([run, "--document", "web:0"])


def test_the_output_about_documents_in_the_docs_is_real(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("outputs").mkdir()
    Path(made(tmp_path, "elastic")[0]).rename("outputs/web")
    page = (Path(__file__).parents[2] / "docs" / "inspect.md").read_text()
    shown = "".join(block for block in page.split("```") if block.startswith("\n$ "))
    examples = [each for each in shown.split("\n$ python -m runner inspect ")[1:] if each.startswith("outputs/web ")]
    assert len(examples) == 2
    for example in examples:
        command, _, output = example.partition("\n")
        assert inspect.main(command.split()) == 0
        assert capsys.readouterr().out == f"{output.rstrip()}\n"
