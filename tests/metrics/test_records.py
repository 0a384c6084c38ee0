"""Check that a line of metrics.jsonl names the sources of its batch, and that reading in order completes every line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from here import trained

from runner.metrics import records
from runner.metrics.records import names_all, read_records

EVERY = 5
MIXTURE = ["data=mixture", "eval.every_steps=2", "checkpoint.every_steps=3", "scheduler.total_steps=14"]
NAMES = {"code", "encodings", "prose"}


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "ALL_EVERY_STEPS", EVERY)
    monkeypatch.setattr(records, "FEW", 2)


def lines(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if "loss" in line]


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["mixture", "elastic"])
def test_line_names_changes_and_at_intervals_everything(sampler: str, tmp_path: Path) -> None:
    """Check that the lines depend on the step alone: the bytes are the same for any attempts."""
    words = [*MIXTURE, f"sampler={sampler}", "train.batch_size=2", "train.steps=14"]
    whole = trained(tmp_path / "whole", *words)
    short, complete = lines(whole), [line for line in read_records(whole / "metrics.jsonl") if "loss" in line]
    before: dict[str, Any] = {}
    for line, found in zip(short, complete, strict=True):
        changed = {name for name, counts in found["sources"].items() if before.get(name) != counts}
        assert set(line["sources"]) == (NAMES if names_all(line["step"], len(NAMES)) else changed)
        assert set(line["loss_by_source"]) <= set(line["sources"])
        assert found["sources"].keys() == NAMES
        assert sum(counts["samples"] for counts in found["sources"].values()) == line["samples_seen"]
        before = found["sources"]
    assert any(len(line["sources"]) < len(NAMES) for line in short)
    for steps in (9, 14):
        trained(tmp_path / "parts", *words, f"train.steps={steps}")
    assert (tmp_path / "parts/metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_first_line_and_certain_steps_name_everything() -> None:
    assert [step for step in range(1, 12) if names_all(step, 3)] == [1, EVERY, 2 * EVERY]
    assert all(names_all(step, 2) for step in range(1, 12))


def test_the_reader_completes_each_step_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert list(read_records(path)) == []
    written: list[Any] = [
        {"step": 1, "loss": 1.0, "sources": {"a": {"samples": 1}, "b": {"samples": 0}}},
        {"step": 2, "loss": 1.0, "sources": {"b": {"samples": 2}}},
        {"step": 2, "eval_loss": 1.0},
        ["no record"],
        {"step": 3, "loss": 1.0, "sources": {}},
        {"step": 4, "loss": 1.0, "sources": 7},
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in written) + '{"step": 5, "lo')
    both = {"a": {"samples": 1}, "b": {"samples": 2}}
    assert list(read_records(path)) == [
        written[0],
        {**written[1], "sources": both},
        written[2],
        {**written[4], "sources": both},
        written[5],
    ]
