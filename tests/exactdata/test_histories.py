"""Random histories of one run lose nothing, repeat nothing, and leave out exactly what they should."""

from __future__ import annotations

import pytest
from histories import POOL, History, Recount, Streams, check_history


@pytest.mark.parametrize("seed", [0, 2, 3, 4])
def test_random_histories(seed: int) -> None:
    check_history(seed, actions=10)


SHOWN = pytest.mark.promise("ten random histories of the data order: nothing is lost or repeated")


@pytest.mark.parametrize(
    "first", [pytest.param(1000, marks=SHOWN), *(pytest.param(n, marks=pytest.mark.slow) for n in (1010, 1020))]
)
def test_many_random_histories(first: int) -> None:
    for seed in range(first, first + 10):
        check_history(seed, actions=20)


@pytest.mark.parametrize("damage", ["lost", "repeated", "another source"])
def test_the_recount_notices(damage: str) -> None:
    """Check that the recount can fail: on a sample out of order, or of a source that is not drawn."""
    history = History(3)
    settings = history.recount.settings
    settings.weights = dict.fromkeys(settings.sizes, 0.0) | {next(iter(settings.sizes)): 1.0}
    settings.caps, settings.exclude, settings.segments = {}, [], []
    recount = Recount(settings, Streams(0, True))
    name = next(iter(settings.sizes))
    stream = [(name, recount.streams.sample(name, key)) for key in range(3)]
    recount.consume(stream[0])
    other = next(one for one in POOL if one != name)
    wrong = {"lost": stream[2], "repeated": stream[0], "another source": (other, 0)}[damage]
    with pytest.raises(AssertionError, match="position 1: "):
        recount.consume(wrong)
    recount.consume(stream[1])
