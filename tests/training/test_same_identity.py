"""Runs with one identity: the shorter run's records are the beginning of the longer one's, byte for byte."""

from __future__ import annotations

import json
from pathlib import Path

import here
import pytest

TINY = [word for word in here.SHORT if not word.startswith(("train.steps", "scheduler"))]


def runs(root: Path) -> dict[str, bytes]:
    """Return the metrics of the runs in `root`, by name."""
    return {path.name: (path / "metrics.jsonl").read_bytes() for path in sorted(root.iterdir())}


def trained(root: Path, *words: str) -> dict[str, bytes]:
    assert here.command(*TINY, f"run.root={root}", *words) == 0
    return runs(root)


@pytest.mark.promise("the records of a shorter run are the beginning of a longer one's with the same identity")
@pytest.mark.parametrize("schedule", ["scheduler=cosine", "scheduler=constant", "scheduler.total_steps=6"])
def test_the_shorter_run_is_the_beginning_of_the_longer_one(tmp_path: Path, schedule: str) -> None:
    """Train 3 steps as a trial, then the real run: it equals a run without the trial."""
    trained(tmp_path / "tried", schedule, "train.steps=3")
    tried = trained(tmp_path / "tried", schedule, "train.steps=7")
    fresh = trained(tmp_path / "fresh", schedule, "train.steps=7")
    short = trained(tmp_path / "short", schedule, "train.steps=3")
    ((name, whole),) = fresh.items()
    assert tried[name] == whole
    if schedule == "scheduler=cosine":  # which follows the length
        assert len(tried) == 2
    else:
        assert whole.startswith(short[name])
        assert len(whole) > len(short[name]) > 0
        assert len(tried) == 1


@pytest.mark.slow
def test_last_evaluation_is_recorded_with_those_of_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = here.trained(tmp_path / "run", "train.steps=5")  # evaluations at 2 and 4
    metrics = (run / "metrics.jsonl").read_text()
    assert [line["step"] for line in map(json.loads, metrics.splitlines()) if "eval_loss" in line] == [2, 4]
    (file,) = (run / "evaluations").iterdir()
    last = json.loads(file.read_text())
    assert last["step"] == 5
    capsys.readouterr()
    assert here.command("evaluate", run) == 0
    assert "0 evaluated now, 1 before" in capsys.readouterr().out
    file.unlink()
    assert here.command("evaluate", run) == 0
    assert json.loads(file.read_text()) == last
    without = here.trained(tmp_path / "without", "train.steps=5", "eval.at_end=false")
    assert not (without / "evaluations").exists()
    assert (without / "metrics.jsonl").read_text() == metrics


@pytest.mark.slow
def test_sizes_decide_the_shares_once_the_data_are_open(tmp_path: Path) -> None:
    def counts(*words: str) -> dict[str, int]:
        path = tmp_path / words[-1].rpartition("=")[2]
        run = here.trained(path, "data=mixture", "sampler=elastic", "train.batch_size=50", *words)
        last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-2])
        return {name: found["samples"] for name, found in last["sources"].items()}

    sizes = counts("sampler.weights_by=sizes")
    tokens = counts("sampler.weights_by=tokens")
    cold = counts("sampler.weights_by=sizes", "sampler.temperature=4")
    assert sizes == tokens  # all have as many tokens per sample
    order = json.loads((tmp_path / "sizes/order.json").read_text())
    total = sum(order["sizes"].values())
    for name, size in order["sizes"].items():
        assert abs(sizes[name] - 300 * size / total) <= 2
        assert abs(cold[name] - 300 * size**0.25 / sum(n**0.25 for n in order["sizes"].values())) <= 2


@pytest.mark.slow
def test_callback_that_changes_weights_silently_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    here.trained(tmp_path / "run", "+callbacks.clip._target_=recorders.Clip")
    assert (
        "callbacks.clip.on_step_end changed weights at step 1: set changes_training = True" in capsys.readouterr().err
    )
