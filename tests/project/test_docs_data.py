"""The examples in docs/data.md and docs/logging.md do what they say."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from runner.rundir.paths import RunDir

DOCS = Path(__file__).parents[2] / "docs"


def code(page: str, language: str) -> str:
    """All blocks of `language` of a page, joined."""
    return "\n".join(re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE))


def test_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code("data.md", "python"), "docs/data.md", "exec"), {})


def test_a_logger_of_ones_own(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(compile(code("logging.md", "python"), "docs/logging.md", "exec"), names)
    logger = names["LastLoss"](RunDir(tmp_path), 0, print, digits=2)
    logger.write({"step": 3, "loss": 1.23456})
    logger.write({"step": 3, "eval_loss": 2.0})
    logger.close()
    assert (tmp_path / "last_loss.txt").read_text() == "3 1.23"


def test_the_sources_of_a_run(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(compile(code("logging.md", "python"), "docs/logging.md", "exec"), names)
    first = '{"step": 1, "loss": 1.0, "sources": {"a": {"samples": 2}, "b": {"samples": 0}}}'
    second = '{"step": 2, "loss": 1.0, "sources": {"b": {"samples": 3}}}'
    (tmp_path / "metrics.jsonl").write_text(f'{first}\n{second}\n{{"step": 2, "eval_loss": 1.0}}\n')
    assert names["samples_by_source"](tmp_path) == {"a": 2, "b": 3}


def test_the_table_of_costs_can_be_repeated(tmp_path: Path) -> None:
    """The script behind the table in docs/data.md runs; its figures are not asserted."""
    names: dict[str, Any] = {"__name__": "gather"}
    source = (DOCS / "examples" / "gather.py").read_text()
    exec(compile(source, "gather.py", "exec"), names)
    figures = names["measure"](tmp_path, count=40_000, batches=8)
    assert len(figures) == 6
    assert all(value > 0 for value in figures.values())
