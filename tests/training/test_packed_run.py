"""A run on rows of packed documents counts their tokens and documents, also across resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import here
import numpy as np
import pytest

from exactdata.documents.packed import PackedRows
from exactdata.queries import order_queries
from runner.data import order_file


def run_on_documents(root: Path) -> list[str]:
    """Train on two sources with equal numbers of tokens: short documents and long ones."""
    words = ["data=own", "sampler=elastic", "sampler.weights_by=tokens", "sampler.weights={web:1,books:1}"]
    for name, longest in (("web", 9), ("books", 50)):
        lengths = np.random.default_rng(longest).integers(1, longest, 60).tolist()
        lines = [json.dumps({"text": "x" * length}) for length in lengths]
        (root / f"{name}.jsonl").write_text("\n".join(lines))
        node = f"_target_:runner.data.documents.dataset.Documents,paths:{root / name}.jsonl,sequence_length:16"
        words.append(f"+data.sources.{name}={{{node},cache_dir:{root / 'cache'}}}")
    return words


@pytest.mark.slow
def test_run_counts_tokens_and_documents_after_a_resume_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = run_on_documents(tmp_path)
    whole = here.trained(tmp_path / "whole", *words)
    parted = here.trained(tmp_path / "parted", *words, "train.steps=3")
    here.trained(parted, *words)
    assert (whole / "metrics.jsonl").read_text() == (parted / "metrics.jsonl").read_text()
    last = json.loads((whole / "metrics.jsonl").read_text().splitlines()[-1])
    record = order_file.read(whole / "order.json")
    consumed = [{**row, "step": n} for n in range(1, 7) for row in order_queries.samples_of_step(record, n)]
    for name, counts in last["sources"].items():
        packed = PackedRows.open(Path(record.packed[name]))
        assert list(counts) == ["samples", "tokens", "documents", "epochs"]
        assert record.tokens_per_sample[name] == packed.tokens / len(packed)
        mine = [row for row in consumed if row["source"] == name]
        rows = np.array([row["index"] for row in mine])
        assert [counts["tokens"], counts["documents"]] == packed.measure(rows).sum(axis=0).tolist()
        which, documents, *_ = packed.pieces(rows)
        capsys.readouterr()
        for line in (1, 30):
            assert here.command("inspect", whole, "--json", "--document", f"{name}:{name}.jsonl:{line}") == 0
            found: dict[str, Any] = json.loads(capsys.readouterr().out)
            times = [(mine[at]["step"], rows[at]) for at in which[documents == found["document"]].tolist()]
            assert sorted((time["step"], time["sample"]) for time in found["times"]) == sorted(times)
    assert last["tokens_seen"] == sum(counts["tokens"] for counts in last["sources"].values()) > 0
