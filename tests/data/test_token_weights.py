"""With `sampler.weights_by=tokens` a weight is a share of tokens, for any number of tokens per sample."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packed_rows import Rows

from exactdata.datasets import TokenDataset
from exactdata.elastic import ElasticSampler
from exactdata.order.ledger import DataLedger
from runner.config.schedule import Phase
from runner.config.schema import Config, DataConfig, ForkConfig, SamplerConfig, WeightsBy, phase_schedule
from runner.errors import UserError
from runner.training.data.sources import mean_tokens, measures, with_weights


def sources(root: Path) -> dict[str, Any]:
    """Make sources of rows with at most 3 and 30 tokens, and of samples with 16."""
    return {
        "web": Rows(str(root / "web"), 400, 3),
        "books": Rows(str(root / "books"), 300, 30),
        "code": TokenDataset(np.zeros(16 * 500 + 1, np.uint8), 16),
    }


def config(weights: dict[str, float], by: WeightsBy | None = WeightsBy.tokens, **changes: Any) -> Config:
    data = DataConfig(sources={"web": {}, "books": {}, "code": {}})
    temperature = changes.pop("temperature", 1.0)
    sampler = SamplerConfig(weights=weights, weights_by=by, temperature=temperature)
    return replace(Config(data=data, sampler=sampler), **changes)


@pytest.mark.parametrize(
    ("weights", "temperature", "wanted"),
    [
        ({"web": 1, "books": 1, "code": 2}, 1.0, (1, 1, 2)),
        ({"web": 1, "books": 16, "code": 4}, 2.0, (1, 4, 2)),
        ({"web": 3, "books": 0, "code": 1}, 0.5, (9, 0, 1)),
        ({}, 1.0, None),  # each source's own tokens
    ],
)
def test_the_shares_of_tokens_of_a_run_are_the_weights(
    tmp_path: Path, weights: dict[str, float], temperature: float, wanted: tuple[int, ...] | None
) -> None:
    data = sources(tmp_path)
    sizes = {name: len(source) for name, source in data.items()}
    made = with_weights(config(weights, temperature=temperature), data)
    state = phase_schedule(made).at(0)
    sampler = ElasticSampler(
        sizes, state.weights, temperature=state.temperature, global_batch_size=100, num_replicas=1, rank=0
    )
    ledger = DataLedger(list(sizes), list(sizes.values()), measures(data))
    positions = np.arange(20_000)
    ledger.consume(sampler.indices_at(positions), positions)
    ledger.commit(ledger.local())
    tokens = np.array([ledger.measured(0)["tokens"], ledger.measured(1)["tokens"], 16 * ledger.count(2)])
    expected = np.array(wanted or [data["web"].total_tokens, data["books"].total_tokens, 8000])
    assert tokens / tokens.sum() == pytest.approx(expected / expected.sum(), abs=0.01)


def test_a_phase_has_shares_of_tokens_of_its_own_temperature(tmp_path: Path) -> None:
    data = sources(tmp_path)
    means = mean_tokens(data)
    phases = {
        "even": Phase(10, temperature=2.0),
        "late": Phase(20, weights={"web": 100.0}),
        "slow": Phase(30, lr_scale=0.1),
    }
    made = with_weights(config({"web": 1, "books": 16, "code": 4}, phases=phases), data)
    schedule = phase_schedule(made)
    for step, wanted in ((0, (1, 16, 4)), (10, (1, 4, 2)), (20, (100, 16, 4)), (30, (1, 16, 4))):
        state = schedule.at(step)
        shares = np.array([state.weights[name] * means[name] for name in data])
        assert state.temperature == 1
        assert shares / shares.sum() == pytest.approx(np.array(wanted) / sum(wanted))
    assert schedule.at(30).lr_scale == 0.1


def test_samples_of_equal_tokens_keep_their_weights(tmp_path: Path) -> None:
    data = {name: TokenDataset(np.zeros(16 * size + 1, np.uint8), 16) for name, size in (("web", 5), ("books", 7))}
    given = config({"web": 3.0}, temperature=2.0)
    given = replace(given, data=DataConfig(sources={"web": {}, "books": {}}))
    made = with_weights(given, data).sampler
    assert (made.weights, made.temperature) == ({"web": 3.0, "books": 112.0}, 2.0)


def test_sources_without_token_counts_cannot_be_weighed(tmp_path: Path) -> None:
    data = sources(tmp_path)
    with pytest.raises(UserError, match=r"data\.sources\.code does not say how many tokens a sample has"):
        with_weights(config({"web": 1, "books": 1, "code": 1}), {**data, "code": [1, 2]})
    other_unit = ForkConfig(was={"sampler.weights_by": "tokens"})
    with pytest.raises(UserError, match="it is tokens in the trunk"):
        with_weights(config({}, by=WeightsBy.equal, fork=other_unit), data)
