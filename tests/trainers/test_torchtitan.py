"""Check that a torchtitan run resumes on any number of ranks and with any batch."""

from __future__ import annotations

from typing import Any

import pytest
from harness import CELLS, EXACT, EXAMPLES, Shape, Trials, skip_without

skip_without("torchtitan", "tyro", "spmd_types")  # the last two may be missing next to an installed torchtitan
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("torchtitan")]


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(EXAMPLES / "in_torchtitan.py", tmp_path_factory.mktemp("torchtitan"))


@pytest.mark.parametrize(("before", "after", "settings"), CELLS)
def test_every_sample_comes_once_in_one_order(
    trials: Trials, before: Shape, after: Shape, settings: dict[str, Any]
) -> None:
    assert trials.outcome(before, after, **settings) == EXACT
