"""docs/warm-start.md, docs/evaluate.md and docs/load.md: their commands run, and give what the pages show."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import docs_pages
import here
import pytest
from docs_pages import ROOT

DOCS = ROOT / "docs"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(page: str) -> None:
    """Every `runner` command of a page, in this process."""
    for block in docs_pages.blocks(DOCS / page):
        if block.language != "bash" or block.skip:
            continue
        for line in block.text.splitlines():
            words = re.findall(r"'[^']*'|\S+", line.partition("  #")[0])
            assert words[0] == "runner"
            assert here.command(*(word.strip("'") for word in words[1:])) == 0, line


def shown(page: str, beginning: str) -> str:
    """The block of a page that begins so."""
    return next(block.text for block in docs_pages.blocks(DOCS / page) if block.text.startswith(beginning))


def test_warm_start(folder: Path, capsys: Any) -> None:
    run("warm-start.md")
    out = capsys.readouterr().out
    assert shown("warm-start.md", "initial weights").replace("/home/me", str(folder)) in out
    assert f"initial weights from {folder}/outputs/base at step 20:\n  loaded 28 tensors" in out
    other = ("data.sequence_length=64", "init_from=base.safetensors", "run.dir=outputs/longer")
    assert here.command("experiment=smoke", *other) == 2
    assert capsys.readouterr().err.replace(f"{folder}/", "") == shown("warm-start.md", "error: ")
    assert not (folder / "outputs" / "longer").exists()


def test_evaluate(folder: Path, capsys: Any) -> None:
    run("evaluate.md")
    out = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    expected = re.sub(r"\d\.\d{4}", r"\\d\\.\\d{4}", re.escape(shown("evaluate.md", "step")).replace(r"\.", "."))
    assert re.search(expected, out), out
    assert '"overrides": [\n      "eval.batches=8"\n    ]' in out


def test_load(folder: Path) -> None:
    run("load.md")
    assert (folder / "base.safetensors").is_file()
    names: dict[str, Any] = {}
    (code,) = [block.text for block in docs_pages.blocks(DOCS / "load.md") if block.language == "python"]
    exec(compile(code, "docs/load.md", "exec"), names)
    assert names["loaded"].step in (10, 20)
    assert names["loaded"].config.model["width"] == 32
