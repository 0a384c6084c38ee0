"""How two runs differ, and from which step on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from composing import compose
from reported import write_run

from runner.__main__ import run as command
from runner.cli.start.relatives import nearest


def records(*losses: float, data: str = "same", start: int = 1) -> list[dict[str, Any]]:
    return [
        {"step": step, "loss": loss, "digest": f"{data}{step}", "loss_by_source": {"a": loss}}
        for step, loss in enumerate(losses, start)
    ]


def found(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert command(["diff", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_first_step_that_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = [*records(3.0, 2.0), {"step": 2, "eval_loss": 2.5}, *records(1.5, 1.25, data="other", start=3)]
    b = [*records(3.0, 2.5), {"step": 2, "eval_loss": 2.75}, *records(float("nan"), start=3)]
    one = write_run(tmp_path / "a", a, settings={"optimizer.lr": 0.1, "run.name": "a"})
    other = write_run(tmp_path / "b", b, settings={"optimizer.lr": 0.3, "run.name": "b"})
    for run, size, commit in ((one, 10, "1" * 40), (other, 12, "2" * 40)):
        (run / "order.json").write_text(json.dumps({"sizes": {"a": size, "b": 7}}))
        code = {"python": "3.11", "packages": {"torch": f"2.{size}"}, "modules": {"net.py": commit[:8], "data.py": "x"}}
        (run / "code.json").write_text(json.dumps({**code, "repositories": {"/code": {"commit": commit}}}))
    told = found(capsys, str(one), str(other))
    assert told["settings"] == {"optimizer.lr": [0.1, 0.3]}
    assert told["other_settings"] == {"run.name": ["a", "b"]}
    assert told["data"] == {"a": [10, 12]}
    assert told["code"] == {"commit of /code": ["1" * 12, "2" * 12], "net.py": ["1" * 8, "2" * 8]}
    assert told["environment"] == {"torch": ["2.10", "2.12"]}
    assert told["common_steps"] == 3
    assert told["first_difference"] == {"data": 3, "loss": 2, "loss_by_source/a": 2}
    assert told["metrics"] == {"loss": [1.5, None], "eval_loss": [2.5, 2.75]}
    assert command(["diff", str(one), str(other)]) == 0
    text = capsys.readouterr().out
    for words in (
        "optimizer.lr  0.1  →  0.3",
        "data: differ from step 3 on",
        "loss: differs from step 2 on",
        "3 steps",
    ):
        assert words in text


def test_equal_runs_differ_in_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Include a shorter run, and runs without anything to compare."""
    one, other = (write_run(tmp_path / name, records(*losses)) for name, losses in (("a", [3, 2, 1]), ("b", [3, 2])))
    told = found(capsys, str(one), str(other))
    assert (told["settings"], told["code"], told["environment"]) == ({}, {}, {})
    assert (told["common_steps"], told["first_difference"]) == (2, {"data": None, "loss": None})
    assert command(["diff", str(one), str(other)]) == 0
    assert "data: the same at all of them" in capsys.readouterr().out
    empty = write_run(tmp_path / "c", [])
    assert found(capsys, str(one), str(empty))["common_steps"] == 0
    for wrong in (tmp_path, tmp_path / "missing"):
        assert command(["diff", str(one), str(wrong)]) == 2
        assert "is no run directory" in capsys.readouterr().err


def test_a_new_run_names_the_one_that_it_is_most_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Other runs in the same directory do not matter."""
    monkeypatch.chdir(tmp_path)
    words = ["experiment=smoke", "launcher.dry_run=true"]
    for name, settings in (
        ("like", ["optimizer.lr=0.1"]),
        ("unlike", ["seed=7", "optimizer.lr=0.1", "train.clip_norm=2"]),
    ):
        job = compose(["experiment=smoke", *settings])
        folder = tmp_path / "outputs" / name
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(job.text)
    (tmp_path / "outputs" / "broken").mkdir()
    (tmp_path / "outputs" / "broken" / "config.yaml").write_text("run: [")
    (tmp_path / "outputs" / "file").write_text("")
    assert command([*words, "optimizer.lr=0.3"]) == 0
    assert "new: differs from outputs/like only in optimizer.lr (0.1 → 0.3)\n" in capsys.readouterr().out
    other = compose(
        ["experiment=smoke", "optimizer.lr=0.3", "model.width=8", "train.batch_size=2", "train.clip_norm=3"]
    )
    assert nearest(other) is None
    assert command(["-m", *words, "optimizer.lr=0.3,0.4"]) == 0
    assert "differs from" not in capsys.readouterr().out
