"""Arguments that all samplers share: weights, temperature, replicas. No torch."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

from runner.errors import UserError


class SamplerError(UserError, ValueError):
    """Arguments of a sampler that cannot be met, with the value, what is allowed and the remedy."""


class SamplerStateError(UserError, ValueError):
    """A saved state that does not belong to this sampler; the message says both sides."""


def _is_number(value: object) -> bool:
    return isinstance(value, Real)  # numpy's are, whatever their width


def integer(what: str, value: Any, lowest: int | None = None) -> int:
    """`value` as a Python integer, whosever integer it is; a SamplerError unless it is one, of `lowest` or more."""
    try:
        number = operator.index(value)
    except TypeError:
        raise SamplerError(f"{what} {value!r}: it must be an integer") from None
    if lowest is not None and number < lowest:
        raise SamplerError(f"{what} {number}: it must be {lowest} or more")
    return number


def check_temperature(temperature: float) -> None:
    """Raise a SamplerError unless 0 < temperature < infinity."""
    if not (_is_number(temperature) and 0 < temperature < math.inf):
        raise SamplerError(f"temperature {temperature!r}: it must be a finite number above 0 (1 keeps the weights)")


def check_weights(weights: Sequence[float], names: Iterable[object] | None = None) -> None:
    """Raise a SamplerError unless every weight is finite and not negative, and one is positive."""
    labels = list(names) if names is not None else list(range(len(weights)))
    for label, weight in zip(labels, weights, strict=True):
        if not (_is_number(weight) and math.isfinite(weight) and weight >= 0):
            raise SamplerError(f"weight {weight!r} of source {label!r}: weights must be finite numbers of 0 or more")
    if not any(weights):
        raise SamplerError(f"the weights of all {len(weights)} sources are 0: give at least one a positive weight")


def shares(weights: Sequence[float], temperature: float = 1.0) -> list[float]:
    """p proportional to w^(1/T), summing to 1; a weight of 0 has share 0 at any temperature.

    T above 1 evens the mixture out, T below 1 sharpens it. Logarithms keep extreme weights and
    temperatures from overflowing.
    """
    if temperature == 1.0:
        largest = max(weights)
        total = math.fsum(weight / largest for weight in weights) if math.isinf(sum(weights)) else 0.0
        if total:
            return [weight / largest / total for weight in weights]
        total = sum(weights)
        return [weight / total for weight in weights]
    logs = [math.log(weight) / temperature if weight > 0 else -math.inf for weight in weights]
    highest = max(logs)
    scaled = [math.exp(value - highest) for value in logs]
    total = sum(scaled)
    return [value / total for value in scaled]


def replicas_and_rank(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """The given ones, else torch.distributed's where it is initialised, else 1 and 0.

    Raises:
        SamplerError: a rank outside [0, num_replicas).
    """
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is None or not (distributed.is_available() and distributed.is_initialized()):
        distributed = None
    if num_replicas is None:
        num_replicas = distributed.get_world_size() if distributed else 1
    if rank is None:
        rank = distributed.get_rank() if distributed else 0
    num_replicas, rank = integer("num_replicas", num_replicas, 1), integer("rank", rank)
    if not 0 <= rank < num_replicas:
        raise SamplerError(f"rank {rank}: it must be between 0 and {num_replicas - 1} for {num_replicas} replicas")
    return num_replicas, rank
