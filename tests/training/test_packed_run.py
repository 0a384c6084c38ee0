"""A run on rows of packed documents counts their tokens and documents, across a kill as well."""

from __future__ import annotations

import json
from pathlib import Path

import here
import numpy as np
import pytest
from packed_rows import Rows

from exactdata.queries import order_queries
from runner.data import order_file


@pytest.mark.slow
def test_a_run_counts_the_tokens_and_documents_of_its_rows_also_when_it_is_resumed(tmp_path: Path) -> None:
    words = ["data=own", "sampler=elastic", "sampler.weights_by=tokens", "sampler.weights={web:1,books:1}"]
    for name, rows in (("web", 40), ("books", 30)):
        node = f"{{_target_:packed_rows.Rows,directory:{tmp_path / name},rows:{rows},sequence_length:16}}"
        words.append(f"+data.sources.{name}={node}")
    whole = here.trained(tmp_path / "whole", *words)
    parted = here.trained(tmp_path / "parted", *words, "train.steps=3")
    here.trained(parted, *words)
    texts = [(run / "metrics.jsonl").read_text() for run in (whole, parted)]
    assert texts[0] == texts[1]
    last = json.loads(texts[0].splitlines()[-1])
    record = order_file.read(whole / "order.json")
    consumed = [row for step in range(1, 7) for row in order_queries.samples_of_step(record, step)]
    for name, size in (("web", 40), ("books", 30)):
        source = Rows(str(tmp_path / name), size, 16)
        counts = last["sources"][name]
        assert list(counts) == ["samples", "tokens", "documents", "epochs"]
        mine = np.array([row["index"] for row in consumed if row["source"] == name])
        assert [counts["tokens"], counts["documents"]] == source.measure(mine).sum(axis=0).tolist()
        assert record.packed[name] == str(tmp_path / name)
        assert record.tokens_per_sample[name] == source.total_tokens / size
    assert last["tokens_seen"] == sum(counts["tokens"] for counts in last["sources"].values()) > 0
