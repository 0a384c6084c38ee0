"""Check that scripts with Lightning resume exactly, also when a script asks for the estimated number of steps."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import CELLS, EXACT, EXAMPLES, MIXTURE, Shape, Trials, skip_without

from exactdata.inspection import main

skip_without("lightning")
EPOCHS = {"steps": -1, "epochs": 2}  # a trainer that ends by the number of its epochs

pytestmark = pytest.mark.xdist_group("lightning")


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(EXAMPLES / "in_lightning.py", tmp_path_factory.mktemp("lightning"))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "settings"), CELLS)
def test_every_sample_comes_once_in_one_order(
    trials: Trials, before: Shape, after: Shape, settings: dict[str, Any]
) -> None:
    assert trials.outcome(before, after, **settings) == EXACT


@pytest.mark.promise("inside Lightning, every sample once after a kill, on 2 ranks and then 1")
def test_every_sample_comes_once_on_2_ranks_and_then_1(trials: Trials, capsys: pytest.CaptureFixture[str]) -> None:
    assert trials.outcome(Shape(2), Shape(1), **MIXTURE) == EXACT
    folder, steps = trials.killed(Shape(2), MIXTURE)
    (checkpoint,) = folder.glob("*.ckpt")
    assert main(["inspect", str(checkpoint), "--positions", "0-79", "--json"]) == 0
    (rows,) = json.loads(capsys.readouterr().out)
    assert [row["index"] + 150 * (row["source"] == "b") for row in rows] == [one for step in steps for one in step]
    assert main(["inspect", str(checkpoint)]) == 0
    assert capsys.readouterr().out.startswith("position 80: samples read by all ranks")


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(Shape(2), Shape(1)), (Shape(1), Shape(1))], ids=str)
def test_a_checkpoint_after_the_last_batch_of_an_epoch(trials: Trials, before: Shape, after: Shape) -> None:
    assert trials.outcome(before, after, save_at=25, **EPOCHS) == EXACT


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(Shape(2), Shape(2)), (Shape(2), Shape(1, 4))], ids=str)
def test_a_run_without_passes(trials: Trials, before: Shape, after: Shape) -> None:
    assert trials.outcome(before, after, epoch_samples=None, more={"fetched_ahead": 1}) == EXACT


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(Shape(2), Shape(1, 4)), (Shape(1, 4), Shape(2))], ids=str)
@pytest.mark.parametrize("save_at", [10, 25])
def test_epochs_end_in_place_at_another_global_batch(trials: Trials, before: Shape, after: Shape, save_at: int) -> None:
    more = {"fetched_ahead": 1, "has_length": False}
    assert trials.outcome(before, after, save_at=save_at, more=more, **EPOCHS) == EXACT
