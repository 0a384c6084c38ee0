"""Check that metrics are read as they were written, for any number of them and any other content of the file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from properties import given_in_tiers

from runner.report.runs import is_shown
from runner.report.series import Columns, Series, read_series
from runner.system import files

numbers = st.integers(-(2**53), 2**53) | st.floats() | st.none()
values = numbers | st.booleans() | st.text(max_size=4) | st.lists(st.integers(), max_size=2)
names = st.sampled_from(["loss", "eval_loss", "a", "b", "x y", "é", 'quote"', "back\\slash"])
records = st.dictionaries(names, values | st.dictionaries(names, values, max_size=3), max_size=5)


def plainly(lines: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Return (step, number) by name, read line by line."""
    found: dict[str, list[tuple[int, float]]] = {}

    def add(step: int, record: dict[str, Any], prefix: str) -> None:
        for name, value in record.items():
            if isinstance(value, dict):
                add(step, value, f"{prefix}{name}/")
            elif (value is None or type(value) in (int, float)) and prefix + name != "step":
                found.setdefault(prefix + name, []).append((step, math.nan if value is None else float(value)))

    for line in lines:
        add(line["step"], line, "")
    return found


def assert_reads(path: Path, lines: list[dict[str, Any]]) -> None:
    expected = plainly(lines)
    read = read_series(path)
    assert set(read) <= set(expected)
    for name, points in expected.items():
        if name not in read:  # only if it never was a number
            assert all(math.isnan(value) for _, value in points)
            continue
        found = zip(read[name].steps.tolist(), read[name].values.tolist(), strict=True)
        assert sorted(map(repr, found)) == sorted(map(repr, points))


@given_in_tiers(shapes=st.lists(records, min_size=1, max_size=4), cut=st.booleans(), data=st.data(), few=15, many=200)
def test_blocks_of_lines_are_read_like_single_lines(
    tmp_path: Path, shapes: list[dict[str, Any]], cut: bool, data: st.DataObject
) -> None:
    """Compare the reader of blocks with a line-by-line reader: texts, lists, gaps, escapes, NaN."""
    lines = [{"step": step, **data.draw(st.sampled_from(shapes)), "digest": f"{step:08x}"} for step in range(1, 80)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + ('{"step": 80, "loss"' if cut else ""))
    assert_reads(path, lines)


@given_in_tiers(st.lists(numbers, min_size=40, max_size=60), few=15, many=100)
def test_numbers_are_read_to_the_last_bit(tmp_path: Path, column: list[float | None]) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "loss": value, "by": {"a": value}} for step, value in enumerate(column)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert_reads(path, lines)


def test_lines_with_other_names_of_equal_length_are_distinct(tmp_path: Path) -> None:
    """Use batches with changing sources whose names have the same length."""
    lines = [{"step": step, "by": {"ab" if step % 3 else "cd": step / 7}, "x": 1} for step in range(200)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert_reads(path, lines)


def test_lines_with_mostly_different_names_are_read(tmp_path: Path) -> None:
    """Use batches with a few of many sources, so that lines rarely share their names."""
    lines = [
        {"step": step, "loss": 1 / step, "by": {f"s{(step * k) % 97:02}": step / k for k in (1, 7, 11)}, "on": True}
        for step in range(1, 400)
    ]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert_reads(path, lines)


@pytest.mark.parametrize("count", [3, 60])
def test_source_that_is_not_named_keeps_its_value(tmp_path: Path, count: int) -> None:
    """Check the points before each change and at the end, because a plot draws straight lines between points."""
    path, steps, given = tmp_path / "metrics.jsonl", 300, dict.fromkeys(range(count), 0)
    lines: list[dict[str, Any]] = []
    at: dict[int, dict[int, Any]] = {number: {} for number in given}
    for step in range(1, steps + 1):
        batch = {step % count, step * step % count} - {count - 1 if step < 100 else -1}  # the last one comes later
        for number in batch:
            given[number] += 1
        lines.append({"step": step, "sources": {f"s{number}": {"samples": given[number]} for number in sorted(batch)}})
        for number in given:
            at[number][step] = given[number]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    read = read_series(path, is_shown)
    for number in given:
        one = read[f"sources/s{number}/samples"]
        assert (np.diff(one.steps) > 0).all()
        assert np.interp(list(at[number]), one.steps, one.values).tolist() == list(at[number].values())
        assert one.steps[-1] == steps


@pytest.mark.parametrize("odd", ["", "7", "[1]", '{"loss": 1}', '{"step": -1}', '{"step": 1.5}', '{"step": true}', "{"])
def test_line_that_is_not_a_record_is_reported(tmp_path: Path, odd: str) -> None:
    path = tmp_path / "metrics.jsonl"
    for before in (0, 50):
        path.write_text("".join(f'{{"step": {step}, "loss": 1.0}}\n' for step in range(before)) + odd + "\n")
        with pytest.raises(ValueError, match="is not"):
            read_series(path)


def test_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_series(path) == {}
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.')
    assert read_series(path)["loss"].steps.tolist() == [1]
    path.write_text('{"step": 1, "lo')
    assert read_series(path) == {}


def test_a_line_without_an_end_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_RECORD_BYTES", 3 << 20)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"0" * (5 << 20))
    with pytest.raises(ValueError, match="a line of more than"):
        read_series(path)


def test_numbers_that_no_view_shows_are_not_kept() -> None:
    columns = Columns(is_shown)
    columns.add(
        [{"step": 1, "loss": 1.0, "sources": {"a": {"samples": 1, "epochs": 0.1}}, "lr_by_optimizer": {"x": 1}}]
    )
    assert set(columns.series()) == {"loss", "sources/a/samples"}


floats = st.floats(allow_nan=True, allow_infinity=True, width=64)


@given(st.lists(floats, min_size=1, max_size=700), st.integers(12, 200))
def test_thinning_keeps_the_extremes_the_ends_and_a_gap(column: list[float], points: int) -> None:
    whole = Series(np.arange(len(column)), np.array(column))
    thin = whole.thinned(points)
    assert len(thin) <= max(points * 1.5, 12)
    assert {0, len(column) - 1} <= set(thin.steps.tolist())
    assert (whole.values[thin.steps] == thin.values)[~np.isnan(thin.values)].all()
    for lowest in (True, False):
        best, kept = whole.best(lowest), thin.best(lowest)
        assert (best is None) == (kept is None)
        assert best is None or kept is None or best[0] == kept[0]
    assert np.isfinite(whole.values).all() == np.isfinite(thin.values).all()


def test_thinning_keeps_a_peak_of_one_step() -> None:
    for at in range(0, 5000, 37):
        column = np.sin(np.arange(5000.0))
        column[at] = 9.0
        assert Series(np.arange(5000), column).thinned(100).best(False) == (9.0, at)
