"""Check that scripts with accelerate resume exactly. The script asserts that prepare() leaves the loader alone."""

from __future__ import annotations

from typing import Any

import pytest
from harness import CELLS, EXACT, EXAMPLES, TWO_TO_ONE, Shape, Trials, skip_without

skip_without("accelerate")
pytestmark = pytest.mark.xdist_group("accelerate")


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(EXAMPLES / "in_accelerate.py", tmp_path_factory.mktemp("accelerate"))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "settings"), [*CELLS, TWO_TO_ONE])
def test_every_sample_comes_once_in_one_order(
    trials: Trials, before: Shape, after: Shape, settings: dict[str, Any]
) -> None:
    assert trials.outcome(before, after, **settings) == EXACT
