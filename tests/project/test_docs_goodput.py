"""The commands in docs/goodput.md do what the page says."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import docs_pages
import pytest
from docs_pages import ROOT

from runner.cli import doctor
from runner.report import goodput

PAGE = ROOT / "docs" / "goodput.md"
BLOCKS = docs_pages.blocks(PAGE)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_killed_run_and_its_table(tmp_path: Path) -> None:
    commands = [block.text for block in BLOCKS if block.language == "bash"]
    kill, resume, as_json = commands[0], commands[1], commands[2]
    docs_pages.shell(kill, tmp_path, 0, 137)  # a fast machine finishes before
    assert goodput.BUCKETS["useful"] in docs_pages.shell(resume, tmp_path).stdout
    done = docs_pages.shell(as_json, tmp_path)
    found = json.loads(done.stdout)
    assert list(found["goodput"]) == list(goodput.BUCKETS) == list(found["runs"][0]["goodput"])
    assert {"weeks", "attempts_without_account"} <= found.keys()
    (line, *_) = (tmp_path / "outputs" / "often" / "attempts.jsonl").read_text().splitlines()
    assert {"seconds", "kept_s", "saves"} <= json.loads(line).keys()


def test_the_prediction_is_the_one_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command, shown = next(
        (block.text, answer.text) for block, answer in pairwise(BLOCKS) if "--kills-per-hour" in block.text
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    doctor.main(command.split()[4:])
    printed = capsys.readouterr().out.splitlines()
    assert [line.rstrip() for line in printed[-2:]] == shown.splitlines()


def test_every_bucket_is_explained() -> None:
    rows = [line.split("`")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert sorted(rows) == sorted(goodput.BUCKETS)
    table = next(block.text for block in BLOCKS if "steps that count" in block.text)
    for line in table.splitlines()[1:]:
        assert any(line.startswith(text) for text in goodput.BUCKETS.values())
