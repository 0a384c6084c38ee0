"""The weights of a mixture that the sizes of its sources decide: known once the data are open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from runner.config.schema import Config, WeightsBy, source_weights
from runner.errors import UserError
from runner.training.data.sources import tokens_per_sample


def with_weights(config: Config, datasets: dict[str, Any]) -> Config:
    """Return `config` with a number for every weight that `sampler.weights_by` leaves to the data.

    Args:
        config: of the run.
        datasets: the sources by name.

    Raises:
        UserError: a source does not say how many tokens its samples have, or all are empty.
    """
    if not any(isinstance(weight, WeightsBy) for weight in source_weights(config).values()):
        return config
    tokens = tokens_per_sample(datasets)

    def number(name: str, weight: Any) -> Any:
        if weight is WeightsBy.tokens and name not in tokens:
            raise UserError(
                f"sampler.weights_by=tokens: data.sources.{name} does not say how many tokens a sample has (its class "
                f"needs an attribute tokens_per_sample): set sampler.weights.{name}, or sampler.weights_by=sizes"
            )
        if isinstance(weight, WeightsBy):
            return float(len(datasets[name]) * (tokens[name] if weight is WeightsBy.tokens else 1))
        return weight

    sampler = replace(
        config.sampler,
        weights={name: number(name, weight) for name, weight in source_weights(config).items()},
        weights_by=None,
    )
    sampler.options.update(config.sampler.options)
    if not any(sampler.weights.values()):
        raise UserError("sampler.weights_by: the sources are empty, and so have no weight; add data")
    phases = {
        name: replace(phase, weights={source: number(source, weight) for source, weight in phase.weights.items()})
        for name, phase in config.phases.items()
    }
    return replace(config, sampler=sampler, phases=phases)
