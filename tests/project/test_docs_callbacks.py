"""The examples in docs/callbacks.md, and the profile in docs/logging.md, do what the pages say."""

from __future__ import annotations

import json
from pathlib import Path

import docs_pages
import pytest
from docs_pages import ROOT


def run(page: str, number: int, folder: Path) -> Path:
    """Run a command of a page in `folder`; the run directory that it makes."""
    command = [block.text for block in docs_pages.blocks(ROOT / "docs" / page) if "-m runner exp" in block.text][number]
    done = docs_pages.shell(command, folder)
    assert "warning" not in done.stderr
    (made,) = (folder / "outputs").iterdir()
    return made


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_samples_and_pictures(tmp_path: Path) -> None:
    for name, text in docs_pages.modules(ROOT / "docs" / "callbacks.md").items():
        (tmp_path / name).write_text(text)
    made = run("callbacks.md", 0, tmp_path)
    records = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    evaluations = [record for record in records if "eval_loss" in record]
    assert evaluations
    for record in evaluations:
        assert 0 < record["predicted"] < 1
        assert (made / "artifacts" / f"sample-{record['step']}.txt").read_text().startswith("def ")
        assert (made / "artifacts" / f"predictions-{record['step']}.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_profile_and_timings(tmp_path: Path) -> None:
    made = run("logging.md", 0, tmp_path)
    (trace,) = (made / "profile").iterdir()
    assert trace.name == "attempt1-rank0.json"
    steps = {
        event["name"] for event in json.loads(trace.read_text())["traceEvents"] if event["name"].startswith("step ")
    }
    assert steps == {f"step {number}" for number in range(10, 16)}
    page = (ROOT / "docs" / "logging.md").read_text()
    for line in (made / "timings.jsonl").read_text().splitlines():
        record = json.loads(line)
        parts = sum(record[f"{part}_s"] for part in ("data_wait", "communication", "compute"))
        assert parts == pytest.approx(record["step_s"])
        assert 10**7 < record["memory_bytes"] < 10**11
        assert all(f"`{key}`" in page for key in record.keys() - {"time"})
