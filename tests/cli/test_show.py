"""`runner show`: every setting."""

from __future__ import annotations

import json

import pytest

from runner import __main__ as entry
from runner.config.settings import settings
from runner.errors import ExitStatus


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert entry.run(["show", *words]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_settings_of_a_part_are_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    heading, *rows = shown(capsys, "--settings", "eval")
    assert heading.split("  ")[0] == "setting"
    assert [row.split()[0] for row in rows] == [each.key for each in settings("eval")]
    assert "1 to 2**40" in next(row for row in rows if row.startswith("eval.batches "))
    assert len(shown(capsys, "--settings")) == len(settings()) + 1


def test_a_narrow_terminal_gets_paragraphs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runner.cli.base.console.PIPED_WIDTH", 100)
    assert shown(capsys, "--settings", "checkpoint.keep_last") == [
        "checkpoint.keep_last=3  (whole number, 1 to 2**40; may change later: yes)",
        "    How many of the newest checkpoints to keep.",
    ]


def test_the_settings_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = json.loads("\n".join(shown(capsys, "--settings", "eval.at_end", "--json")))
    assert (row["key"], row["type"], row["default"], row["later"]) == ("eval.at_end", "true or false", "true", "yes")


def test_a_setting_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.run(["show", "--settings", "train.stps"]) == ExitStatus.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert "did you mean 'train.steps'?" in line
