"""The commands in docs/forks.md do what the page says."""

from __future__ import annotations

from pathlib import Path

import docs_pages
import pytest
from docs_pages import ROOT


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_of_the_page(tmp_path: Path) -> None:
    printed = ""
    for block in docs_pages.blocks(ROOT / "docs" / "forks.md"):
        if block.language == "bash":
            done = docs_pages.shell(block.text, tmp_path, block.status)
            printed += done.stdout + done.stderr
    assert " at step 10 of 20 in " in printed
    assert " has no checkpoint of step 12: it has those of steps 5, 10, 15, 20\n" in printed
    names = sorted(each.name.rpartition("-")[0] for each in (tmp_path / "outputs").iterdir() if each.name != "trunk")
    expected = ["cooldown", "trunk-at10-lr0.0001-seed0", "trunk-at10-seed1", "trunk-at10-seed2"]
    assert [name for name in names if name[:1] not in (".", "")] == expected
