"""Check that scripts with transformers.Trainer resume exactly."""

from __future__ import annotations

from typing import Any

import pytest
from harness import CELLS, EXACT, EXAMPLES, TWO_TO_ONE, Shape, Trials, skip_without

skip_without("transformers", "accelerate")
pytestmark = pytest.mark.xdist_group("transformers")


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(EXAMPLES / "in_transformers.py", tmp_path_factory.mktemp("transformers"))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "settings"), [*CELLS, TWO_TO_ONE])
def test_every_sample_comes_once_in_one_order(
    trials: Trials, before: Shape, after: Shape, settings: dict[str, Any]
) -> None:
    assert trials.outcome(before, after, **settings) == EXACT


@pytest.mark.slow
def test_a_checkpoint_after_the_last_batch_of_a_pass(trials: Trials) -> None:
    assert trials.outcome(Shape(2), Shape(1), save_at=25) == EXACT
