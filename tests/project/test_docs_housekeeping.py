"""The commands in docs/housekeeping.md do what the page says."""

from __future__ import annotations

import re
from pathlib import Path

import docs_pages
import pytest
from docs_pages import ROOT

PAGE = ROOT / "docs" / "housekeeping.md"


def told_runs(text: str) -> list[str]:
    """The lines about runs, without the hash, which every new setting changes."""
    return [re.sub(r"-[0-9a-f]{8}:", ":", line) for line in text.splitlines() if line.startswith("outputs/")]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_the_page(tmp_path: Path) -> None:
    """In the order of the page, each block in the directory that the one before left."""
    shown, *rest = [block for block in docs_pages.blocks(PAGE) if block.language in ("console", "bash")]
    command, _, answer = shown.text.removeprefix("$ ").partition("\n")
    printed = docs_pages.shell(command, tmp_path).stdout
    assert told_runs(printed) == told_runs(answer)
    assert not (tmp_path / "outputs").exists()
    for block in rest:
        if block.setup:
            docs_pages.shell(block.setup, tmp_path)
        printed = docs_pages.shell(block.text, tmp_path).stdout
        for told in re.findall(r"# (pinned: \d+)", block.text):
            assert told in printed
    assert "finished, all 20 steps" in printed
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["baseline-1a2b3c4d"]
