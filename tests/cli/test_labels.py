"""A user's tags, notes and values: shown, used as filters, and no part of a run's identity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from composing import compose
from reported import write_run

import runner
from runner.__main__ import run as command
from runner.errors import UserError


def out(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert command(words) == 0
    return capsys.readouterr().out


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    code = {"code.json": "{}"}
    for name, tags, note in (("a", ["paper", "lr sweep"], "the first try"), ("b", ["paper"], None), ("c", [], None)):
        write_run(tmp_path / name, settings={"run.tags": tags, "run.notes": note})
        for file, text in code.items():
            (tmp_path / name / file).write_text(text)
    return tmp_path


def test_runs_are_shown_with_their_tags_and_found_by_them(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = out(capsys, "status", ".")
    assert "paper, lr sweep" in table
    assert "a: note: the first try" in table
    for tags, names in ((["paper"], ["a", "b"]), (["paper", "lr sweep"], ["a"]), (["pape"], []), ([], ["a", "b", "c"])):
        words = [word for tag in tags for word in ("--tag", tag)]
        rows = json.loads(out(capsys, "status", ".", "--json", *words))
        assert [row["run"] for row in rows] == names
        if names:
            assert [run["run"] for run in json.loads(out(capsys, "report", ".", "--json", *words))["runs"]] == names
    assert "no runs in . with the tags pape" in out(capsys, "status", ".", "--tag", "pape")
    assert command(["report", ".", "--tag", "pape"]) == 2


def test_a_note_is_added_while_a_run_trains_and_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("it diverges", "no, it does not"):
        out(capsys, "note", "a", text)
    assert [note["text"] for note in json.loads(out(capsys, "note", "a", "--json"))] == [
        "it diverges",
        "no, it does not",
    ]
    assert "a: note: it diverges" in out(capsys, "status", ".")
    out(capsys, "report", ".", "--html", "page.html")
    assert "the first try; it diverges; no, it does not" in (folder / "page.html").read_text()
    found = runner.Run("a")
    assert (found.tags, found.notes) == (["paper", "lr sweep"], ["the first try", "it diverges", "no, it does not"])
    assert "no notes" in out(capsys, "note", "b")
    assert command(["note", "a", "x" * 2001]) == 2
    assert command(["note", ".", "text"]) == 2
    assert "a note of 2001 characters" in capsys.readouterr().err


def test_whatever_is_in_a_run_directory_its_notes_hide_no_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a" / "added_notes").mkdir()
    for name, text in (("1.json", "{"), ("2.json", '{"text": 3, "time": 1}'), ("3.json", "[]"), ("x", "")):
        (folder / "a" / "added_notes" / name).write_text(text)
    (folder / "b" / "added_notes").symlink_to(folder / "c")
    (folder / "c" / "config.yaml").write_text("run: {tags: 3, notes: [1]}\n")
    write_run(folder / "d")
    (folder / "d" / "config.yaml").write_text('run:\n  notes: "a & b\n')
    rows = {row["run"]: row for row in json.loads(out(capsys, "status", ".", "--json"))}
    assert rows["a"]["notes"] == ["the first try"]
    assert rows["b"]["state"] == "unreadable"
    for name in "cd":
        assert (rows[name]["state"], rows[name]["tags"]) == ("finished", [])


def test_labels_identify_a_run_only_where_referenced() -> None:
    usual = compose(["experiment=smoke"])
    labels = ["run.tags=[a,b]", "run.notes=why", "user.dim=64", "user.more={x: [1]}"]
    labeled = compose(["experiment=smoke", *labels])
    assert labeled.digest == usual.digest
    assert labeled.config.user == {"dim": 64, "more": {"x": [1]}}
    one, other = (compose(["experiment=smoke", f"user.dim={dim}", "model.width=${user.dim}"]) for dim in (16, 32))
    assert (one.config.model["width"], other.config.model["width"]) == (16, 32)
    assert one.digest != other.digest
    with pytest.raises(UserError, match="a tag must be printable"):
        compose(['run.tags=["a,b"]'])
