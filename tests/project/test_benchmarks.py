"""Check that benchmark figures are kept, that worse ones are reported, and that the docs get their tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import results
from benchmarks.results import Figure, Table


def measured(name: str = "load", **values: float) -> Table:
    """Return a table of ratios (`stall`, less is better, and `speed`, more is better) and a time."""
    table = Table(name, "what")
    for row, value in values.items():
        at_least, at_most = (2.0 if row == "speed" else None), (1.2 if row not in {"speed", "time"} else None)
        table.figures.append(Figure(row, "ratio", value, "s" * (row == "time"), at_most, at_least))
    return table


def test_table_shows_its_goals_and_the_missed_ones() -> None:
    table = Table("a", "size")
    table.add("10 MB", "stall", 1.31, at_most=1.3)
    table.add("10 MB", "time", 0.0021, "s", at_most=1)
    table.add("500 MB", "stall", 0.214, at_most=0.25)
    table.add("500 MB", "speed", 2.5, at_least=2)
    assert table.markdown() == (
        "| size | stall | time | speed |\n"
        "| --- | --- | --- | --- |\n"
        "| 10 MB | 1.31 **missed** (at most 1.3) | 0.002 s (at most 1 s) |  |\n"
        "| 500 MB | 0.21 (at most 0.25) |  | 2.50 (at least 2) |\n"
    )


def test_goals_of_whole_rows_are_a_column() -> None:
    table = Table("a", "size")
    table.add("10 MB", "stall", 1.31, at_most=1.3)
    table.add("500 MB", "stall", 2.5, "s")
    assert table.markdown() == (
        "| size | stall | goal |\n"
        "| --- | --- | --- |\n"
        "| 10 MB | 1.31 **missed** | at most 1.3 |\n"
        "| 500 MB | 2.50 s |  |\n"
    )


def test_worse_ratio_is_named_until_accepted(tmp_path: Path) -> None:
    """Compare ratios in both directions, with a limit of 15 %. Times depend on the machine and do not count."""
    file = tmp_path / "results.json"
    assert results.keep([measured(stall=1.0, speed=2.0, time=1.0)], False, file) == []
    assert results.keep([measured(stall=1.14, speed=1.75, time=9.0)], False, file) == []  # 14 % each
    before = file.read_text()
    worse = results.keep([measured(stall=1.4, speed=1.4, time=1.0), measured("other", stall=1.0)], False, file)
    assert worse == [
        "load: stall, ratio: 1.40, was 1.14 (23 % worse)",
        "load: speed, ratio: 1.40, was 1.75 (25 % worse)",
    ]
    assert json.loads(file.read_text())["load"] == json.loads(before)["load"]
    assert "other" in json.loads(file.read_text())
    results.keep([measured(stall=1.4, speed=1.4, time=1.0)], True, file)
    kept = results.read(results.kept(file)["load"], "load")
    assert kept == measured(stall=1.4, speed=1.4, time=1.0)


def test_benchmark_changes_only_its_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Check that `python -m benchmarks NAME` keeps other figures, fills the page, and fails at a worse ratio."""
    from benchmarks import __main__ as command
    from benchmarks import loop

    monkeypatch.setattr(results, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(results, "FILE", tmp_path / "results.json")
    results.keep([measured("start", stall=1.0), measured("loop", stall=1.0)], False)
    results.PAGE.write_text("<!-- figures: loop -->\n<!-- end of figures -->\n")
    monkeypatch.setattr(loop, "main", lambda: results.table("loop", "what").add("stall", "ratio", 1.1, at_most=1.2))
    assert command.main(["loop"]) == 0
    assert "| stall | 1.10 | at most 1.2 |" in results.PAGE.read_text()
    assert set(results.kept()) == {"start", "loop"}
    monkeypatch.setattr(loop, "main", lambda: results.table("loop", "what").add("stall", "ratio", 1.3, at_most=1.2))
    assert command.main(["loop"]) == 1
    assert "regression: loop: stall, ratio: 1.30, was 1.10 (18 % worse)" in capsys.readouterr().out
    assert "| stall | 1.10 |" in results.PAGE.read_text()
    assert command.main(["loop", "--accept"]) == 0
    assert "| stall | 1.30 **missed** | at most 1.2 |" in results.PAGE.read_text()


def test_an_unknown_benchmark_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    from benchmarks.__main__ import main

    with pytest.raises(SystemExit):
        main(["lood"])
    assert "no benchmark lood; there are start, sweep" in capsys.readouterr().err
