"""The data ledger: its digest depends only on which sample was consumed at which position."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from exactdata.elastic import ElasticSampler
from exactdata.order.ledger import DataLedger
from exactdata.order.packed import pack_rows, unpack_rows
from exactdata.order.weights import SamplerStateError

SIZES = {"code": 30, "prose": 12}


def sampler(**changes: Any) -> ElasticSampler:
    return ElasticSampler(SIZES, [2, 1], **{"global_batch_size": 6, "num_replicas": 1, **changes})


def ledger() -> DataLedger:
    return DataLedger(list(SIZES), list(SIZES.values()))


def consumed(positions: np.ndarray, indices: np.ndarray, world: int = 1, step: int = 6) -> DataLedger:
    """Return a ledger after these samples, distributed over `world` ranks, in steps of `step` samples."""
    ranks = [ledger() for _ in range(world)]
    for first in range(0, len(positions), step):
        for rank, one in enumerate(ranks):
            part = slice(first + rank, first + step, world)
            one.consume(indices[part], positions[part])
        total = np.stack([one.local() for one in ranks]).sum(axis=0, dtype=np.uint64)
        for one in ranks:
            one.commit(total)
    return ranks[0]


@given(st.integers(1, 6), st.sampled_from([1, 4, 6, 11, 60]))
def test_the_digest_does_not_depend_on_ranks_or_steps(world: int, step: int) -> None:
    positions = np.arange(60)
    indices = sampler().indices_at(positions)
    one, other = consumed(positions, indices), consumed(positions, indices, world, step)
    assert (one.digest, one.counts, one.total) == (other.digest, other.counts, other.total)
    assert one.counts == {"code": int((indices < 30).sum()), "prose": int((indices >= 30).sum())}


@given(st.integers(0, 59), st.integers(1, 41))
def test_a_single_different_sample_changes_the_digest(where: int, shift: int) -> None:
    positions = np.arange(60)
    indices = sampler().indices_at(positions)
    changed = indices.copy()
    changed[where] = (changed[where] + shift) % 42
    assert consumed(positions, indices).digest != consumed(positions, changed).digest
    swapped = indices.copy()
    swapped[[0, where]] = swapped[[where, 0]]
    same = bool(np.array_equal(swapped, indices))
    assert (consumed(positions, indices).digest == consumed(positions, swapped).digest) is same


def test_resume_verifies_the_last_steps_of_the_order() -> None:
    mine = sampler()
    positions = np.arange(60)
    saved = consumed(positions, mine.indices_at(positions)).state_dict()
    again = ledger()
    again.load_state_dict(saved)
    assert again.verify(mine.locate) == 60
    assert again.state_dict() == saved
    with pytest.raises(SamplerStateError, match="positions 0 to 59: the run consumed samples with digest"):
        again.verify(sampler(seed=1).locate)


def test_the_verified_window_is_bounded() -> None:
    mine, big = sampler(), ledger()
    for first in range(0, 400_000, 50_000):
        positions = np.arange(first, first + 50_000)
        big.consume(mine.indices_at(positions), positions)
        big.commit(big.local())
    assert big.verify(mine.locate) == 50_000
    assert len(unpack_rows(big.state_dict()["anchors"], 4, 9)) == 1


@pytest.mark.parametrize("step", [pytest.param(1, marks=pytest.mark.slow), 7, 255, 256, 257, 1000])
def test_ledger_is_small_and_verifies_at_any_batch(step: int) -> None:
    """Steps of few samples share a digest. It is compared with the same samples all the same."""
    mine, one = sampler(), ledger()
    positions = np.arange(80_000 // step * step)
    indices = mine.indices_at(positions)
    for first in range(0, len(positions), step):
        one.consume(indices[first : first + step], positions[first : first + step])
        one.commit(one.local())
    again = ledger()
    state = one.state_dict()
    again.load_state_dict(state)
    assert len(state["anchors"]) < 12_000
    assert (1 << 16) - step - 256 <= again.verify(mine.locate) <= 1 << 16
    assert again.state_dict() == state
    with pytest.raises(SamplerStateError, match="the run consumed samples with digest"):
        again.verify(sampler(seed=1).locate)


def test_a_digest_is_of_one_epoch() -> None:
    """Earlier epochs cannot be recomputed. They must not prevent the verification of the current one."""
    mine, one = sampler(), ledger()
    for first in range(0, 60, 6):
        positions = np.arange(first, first + 6)
        one.consume(mine.indices_at(positions), positions)
        one.commit(one.local(), since=first // 20 * 20)
    assert one.verify(mine.locate, since=42) == 18  # steps that begin at 42, 48, 54; the one at 36 is in both epochs


@pytest.mark.parametrize("epoch", [1, 42, 250, 300])
def test_a_ledger_of_many_short_epochs_is_small_and_loads(epoch: int) -> None:
    """Only the current epoch can be recomputed, so the digests of earlier ones are not kept."""
    mine, one = sampler(), ledger()
    count = 800 if epoch == 1 else 300
    positions = np.arange(epoch * count)
    indices = mine.indices_at(positions)
    for first in range(0, len(positions), epoch):
        part = slice(first, first + epoch)
        one.consume(indices[part], positions[part])
        one.commit(one.local(), since=first)
    again = ledger()
    again.load_state_dict(one.state_dict())
    assert again.verify(mine.locate, since=len(positions) - epoch) == epoch
    assert len(one.state_dict()["anchors"]) < 100


@pytest.mark.parametrize("damage", ["", "x", "=", "AAAA", "\u00e9", pack_rows(np.ones((2, 4), np.uint64))])
def test_damaged_anchors_are_refused_in_one_line(damage: str) -> None:
    positions = np.arange(60)
    saved = consumed(positions, sampler().indices_at(positions)).state_dict()
    with pytest.raises(SamplerStateError, match=r"anchors|truncated or edited") as error:
        ledger().load_state_dict({**saved, "anchors": damage})
    assert "\n" not in str(error.value)


def test_retired_sources_keep_their_counts() -> None:
    positions = np.arange(60)
    saved = consumed(positions, sampler().indices_at(positions)).state_dict()
    later = DataLedger(["prose", "math"], [12, 5])
    later.load_state_dict(saved)
    assert later.counts == {**saved["counts"], "math": 0}
    assert later.verify(sampler().locate) == 60


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"digest": "xyz"}, "incomplete"),
        ({"counts": {"code": 1, "prose": 1}}, "counts 2 samples but its last step ends at position 60"),
        ({"sizes": {"code": 31, "prose": 12}}, "had 31 samples when the ledger was saved and has 30 now"),
    ],
)
def test_edited_ledgers_are_refused(change: dict[str, Any], message: str) -> None:
    positions = np.arange(60)
    saved = consumed(positions, sampler().indices_at(positions)).state_dict()
    with pytest.raises(SamplerStateError, match=message):
        ledger().load_state_dict({**saved, **change})
    with pytest.raises(SamplerStateError, match="incomplete"):
        ledger().load_state_dict({key: value for key, value in saved.items() if key not in change})


def test_golden_digest() -> None:
    """Digests are compared between program versions, so they must not change."""
    positions = np.arange(60)
    indices = np.arange(60) * 7 % 42
    assert consumed(positions, indices).digest == "db3b8b7f406f85f40f8e310f6e3154ba"


def measure(indices: np.ndarray) -> np.ndarray:
    """Sample i of a source has 10 + i tokens, and a document begins in every second sample."""
    return np.stack([10 + indices, indices % 2], axis=1)


def measuring(*names: str, sizes: dict[str, int] = SIZES) -> DataLedger:
    return DataLedger(list(sizes), list(sizes.values()), dict.fromkeys(names, measure))


@given(st.integers(1, 6), st.sampled_from([1, 7, 60]))
def test_tokens_and_documents_count_equally_on_any_ranks(world: int, step: int) -> None:
    positions = np.arange(60)
    indices = sampler().indices_at(positions)
    ranks = [measuring("prose") for _ in range(world)]
    for first in range(0, 60, step):
        for rank, one in enumerate(ranks):
            one.consume(indices[first + rank : first + step : world], positions[first + rank : first + step : world])
        total = np.stack([one.local() for one in ranks]).sum(axis=0, dtype=np.uint64)
        for one in ranks:
            one.commit(total)
    tokens, documents = measure(indices[indices >= 30] - 30).sum(axis=0).tolist()
    assert (ranks[0].measured(0), ranks[0].measured(1)) == ({}, {"tokens": tokens, "documents": documents})
    plain = consumed(positions, indices, step=step)
    state = ranks[0].state_dict()
    assert (state.pop("tokens"), state.pop("documents")) == ({"prose": tokens}, {"prose": documents})
    assert {**state, "seal": ""} == {**plain.state_dict(), "seal": ""}


def test_token_counts_survive_coming_and_going_sources() -> None:
    positions = np.arange(60)
    indices = sampler().indices_at(positions)
    unmeasured = consumed(positions, indices).state_dict()
    later = measuring("code")
    later.load_state_dict(unmeasured)
    assert later.measured(0) == {"tokens": 0, "documents": 0}
    later.consume(np.array([3, 4, 40]), np.array([60, 61, 62]))
    later.commit(later.local())
    assert later.measured(0) == {"tokens": 27, "documents": 1}
    other = measuring("math", sizes={"prose": 12, "math": 5})
    other.load_state_dict(later.state_dict())
    assert other.state_dict()["tokens"] == {"math": 0, "code": 27}
    back = measuring("code", "prose")
    back.load_state_dict(other.state_dict())
    assert [back.measured(number)["tokens"] for number in range(2)] == [27, 0]
    with pytest.raises(SamplerStateError, match="truncated or edited"):
        back.load_state_dict({**other.state_dict(), "tokens": {"code": 28}})
    with pytest.raises(SamplerStateError, match=r"documents\.code is -1"):
        back.load_state_dict({**other.state_dict(), "documents": {"code": -1}})
