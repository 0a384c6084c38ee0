"""Check that torchft replicas, killed and restarted, train on every committed sample once and in order."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from harness import EXAMPLES, skip_without
from replicas import BATCH, Replicas, in_order, participants, samples

skip_without("torchft")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 40


@pytest.mark.parametrize(("kills", "kill_all_at"), [(2, None), (0, 17)], ids=["some", "all at once"])
def test_committed_steps_take_the_first_samples_in_order(kills: int, kill_all_at: int | None, tmp_path: Path) -> None:
    replicas = Replicas(EXAMPLES / "in_torchft.py", tmp_path, STEPS, options=["--seconds", "0.6"])
    try:
        replicas.train(kills, random.Random(1), kill_all_at)
    finally:
        replicas.stop()
    records = replicas.all_records()
    expected = samples(STEPS * 3 * BATCH)
    for one in records:
        if "ids" in one:  # whether the step was committed or not
            first = (one["committed"] + one["number"]) * BATCH
            assert one["ids"] == expected[first : first + BATCH]
    finals = [one for one in records if "counts" in one]
    assert finals
    for final in finals:
        # The weights of the model are the number of times that each sample was trained on.
        assert in_order(final), f"{final['committed']} batches; logs in {tmp_path}"
        assert sum(final["counts"]) == final["committed"] * BATCH
        assert len(participants(records, final["committed"])) == STEPS
    of = {one["of"] for one in records if "step" in one}
    assert of == {1, 2, 3} or (3 in of and kill_all_at), of
