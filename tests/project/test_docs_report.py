"""The commands of docs/report.md run, and what the page says of their output is so."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import docs_pages
import pytest
from docs_pages import ROOT

from runner.cli.report import parser

PAGE = ROOT / "docs" / "report.md"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_commands_of_report_md_run(tmp_path: Path) -> None:
    commands = [block.text for block in docs_pages.blocks(PAGE) if block.language == "bash"]
    shown = "".join(docs_pages.shell(command, tmp_path).stdout for command in commands)
    asked = json.loads((tmp_path / "runs.json").read_text())
    keys = {*asked, *asked["runs"][0], *asked["groups"][0]} - {"runs", "groups"}
    assert all(f"`{key}`" in PAGE.read_text() for key in keys)
    assert len(list(csv.DictReader((tmp_path / "runs.csv").read_text().splitlines()))) == 4
    assert len(list(csv.DictReader((tmp_path / "steps.csv").read_text().splitlines()))) == 4 * 40
    assert (tmp_path / "told.txt").read_text() == "4 of 4 runs finished\n"
    for file in ("outputs/report.html", "sweep.html", "curves.png"):
        assert (tmp_path / file).stat().st_size > 1000
    (example,) = [block.text for block in docs_pages.blocks(PAGE) if block.language == "text"]
    for line in example.splitlines():
        if line and not re.search(r"\d", line):  # the heads of the tables
            assert re.search(r"\s+".join(map(re.escape, line.split())).replace("share", r".*share"), shown), line


def test_every_option_is_described() -> None:
    options = {name for action in parser()._actions for name in action.option_strings if name.startswith("--")}
    assert {name for name in options - {"--help"} if f"`{name}" not in PAGE.read_text()} == set()
