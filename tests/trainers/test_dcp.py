"""Check that scripts with torch.distributed.checkpoint resume exactly, on DDP and on fully_shard."""

from __future__ import annotations

from typing import Any

import pytest
from harness import CELLS, EXACT, EXAMPLES, TWO_TO_ONE, Shape, Trials, skip_without

skip_without("torch")
pytestmark = pytest.mark.xdist_group("dcp")


@pytest.fixture(scope="module")
def trials(tmp_path_factory: pytest.TempPathFactory) -> Trials:
    return Trials(EXAMPLES / "in_dcp.py", tmp_path_factory.mktemp("dcp"))


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "settings"), [*CELLS, TWO_TO_ONE])
def test_every_sample_comes_once_in_one_order(
    trials: Trials, before: Shape, after: Shape, settings: dict[str, Any]
) -> None:
    sharded = settings.get("mixed", False)
    assert trials.outcome(before, after, sharded=sharded, **settings) == EXACT
