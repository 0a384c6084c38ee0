"""Check the arguments common to all samplers: weights, temperature, replicas. Does not import torch."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from numbers import Real
from typing import Any

from exactdata.errors import UserError, nearest
from exactdata.order.state_checks import LARGEST
from exactdata.ranks import current_ranks

Weights = Mapping[str, float] | Sequence[float]


class SamplerError(UserError, ValueError):
    """An argument of a sampler is invalid. The message states the value, the allowed values and the remedy."""


class SamplerStateError(UserError, ValueError):
    """A saved state does not match this sampler. The message states the saved value and the sampler's value."""


def integer(what: str, value: Any, lowest: int | None = None) -> int:
    """Return `value` as a Python integer. Accepts numpy and torch integers, but not floats.

    Args:
        what: name of the value in the error message.
        value: an integer.
        lowest: the minimum. The maximum is then 2^62, the largest count of samples. If None, any integer is allowed.

    Raises:
        SamplerError: `value` is not an integer, or is outside these bounds.
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise SamplerError(f"{what} {value!r}: it must be an integer") from None
    if lowest is not None and number < lowest:
        raise SamplerError(f"{what} {number}: it must be {lowest} or more")
    if lowest is not None and number > LARGEST:
        raise SamplerError(f"{what} {number}: it must be at most 2^62 ({LARGEST})")
    return number


def check_names(names: Iterable[Any], error: type[Exception] = SamplerError) -> None:
    """Check source names, which are used in states, in metrics and in exclusions.

    Raises:
        Exception: an `error` if a name is not a printable string, or is "positions".
    """
    for name in names:
        if not (isinstance(name, str) and name and name.isprintable()):
            raise error(f"source name {name!r}: it must be a text of printable characters on one line")
        if name == "positions":
            raise error(
                "source name 'positions': it must be another one, since exclude=positions:5-9 means those of the run"
            )


def is_finite(value: Any) -> bool:
    """Return whether a value is a finite real number, of Python or numpy, that fits in a float."""
    try:
        return isinstance(value, Real) and value is not True and value is not False and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def check_weights(weights: Sequence[float], temperature: float, names: Iterable[object] | None = None) -> None:
    """Check the arguments of `shares`.

    Args:
        weights: one weight per source.
        temperature: temperature of the mixture.
        names: names of the sources for error messages. If None, their indices are used.

    Raises:
        SamplerError: the temperature is not finite or not above 0, a weight is negative or not finite, or all weights
            are 0.
    """
    if not (is_finite(temperature) and temperature > 0):
        raise SamplerError(f"temperature {temperature!r}: it must be a finite number above 0 (1 keeps the weights)")
    labels = list(names) if names is not None else list(range(len(weights)))
    for label, weight in zip(labels, weights, strict=True):
        check_weight(label, weight)
    if not any(weights):
        raise SamplerError(f"the weights of all {len(weights)} sources are 0: give at least one a positive weight")


def check_weight(label: object, weight: Any) -> None:
    """Check the weight of one source.

    Raises:
        SamplerError: the weight is negative or not finite.
    """
    if not (is_finite(weight) and weight >= 0):
        raise SamplerError(f"weight {weight!r} of source {label!r}: weights must be finite numbers of 0 or more")


def weights_by_name(
    weights: Weights, sizes: Mapping[str, int], base: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Return weights by source name, in the order of `sizes`.

    Args:
        weights: weights by name, or one per source.
        sizes: sizes of the sources by name.
        base: weights for sources that `weights` does not name. If None, `weights` must name every source.

    Raises:
        SamplerError: a source is unknown or missing, the number of weights is wrong, or a weight is not finite.
    """
    given: Any = weights
    if isinstance(given, str) or not hasattr(given, "__len__"):
        raise SamplerError(f"weights {weights!r}: expected a mapping from source names, or a list of one per source")
    if not isinstance(weights, Mapping):
        if len(weights) != len(sizes):
            raise SamplerError(f"Expected {len(sizes)} weights (one per source), got {len(weights)}")
        weights = dict(zip(sizes, weights, strict=True))
    for name in weights:
        if name not in sizes:
            raise SamplerError(
                f"weight for unknown source {name!r}{nearest(name, sizes)}; the sources are {', '.join(sizes)}"
            )
    named = {**(base or {}), **weights}
    missing = [name for name in sizes if name not in named]
    if missing:
        raise SamplerError(f"no weight for source {missing[0]!r}: set one for every source (0 leaves it out)")
    for name in sizes:
        check_weight(name, named[name])
    return {name: float(named[name]) for name in sizes}


def shares(weights: Sequence[float], temperature: float = 1.0) -> list[float]:
    """Compute shares proportional to w^(1/T), i.e. temperature sampling (Arivazhagan et al., 2019, arXiv:1907.05019).

    A temperature above 1 flattens the mixture, and a temperature below 1 sharpens it. A source with weight 0 has share
    0 at any temperature. Extreme weights and temperatures do not overflow.

    Args:
        weights: finite weights >= 0, at least one above 0.
        temperature: T, above 0.

    Returns:
        One share per weight, summing to 1.
    """
    if temperature == 1.0:
        largest = max(weights)
        total = math.fsum(weight / largest for weight in weights) if math.isinf(sum(weights)) else 0.0
        if total:
            return [weight / largest / total for weight in weights]
        total = reduce(operator.add, weights)  # same on every platform: newer versions of `sum` compensate errors
        return [weight / total for weight in weights]
    logs = [math.log(weight) / temperature if weight > 0 else -math.inf for weight in weights]
    highest = max(logs)
    if math.isinf(highest):  # the temperature is near 0
        largest = max(weights)
        logs = [(math.log(weight) - math.log(largest)) / temperature if weight > 0 else -math.inf for weight in weights]
        highest = 0.0
    scaled = [math.exp(value - highest) for value in logs]
    total = sum(scaled)
    return [value / total for value in scaled]


def per_rank(size: int, num_replicas: int, drop_last: bool) -> int:
    """Return the number of samples of a source that a rank gets in each epoch of a seeded sampler."""
    return size // num_replicas if drop_last else -(-size // num_replicas)


def apportion(probabilities: Sequence[float], budget: int) -> list[int]:
    """Round p * budget for each p, and adjust by one in descending order of p until the sum is `budget`."""
    counts = [round(p * budget) for p in probabilities]
    difference = budget - sum(counts)
    by_share = sorted(range(len(counts)), key=lambda source: -probabilities[source])
    for i in range(abs(difference)):
        counts[by_share[i % len(counts)]] += 1 if difference > 0 else -1
    return counts


def replicas_and_rank(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """Return the arguments. Replace None with the value from torch.distributed, or with 1 and 0 if not initialized.

    Raises:
        SamplerError: `num_replicas` is below 1, or `rank` is outside [0, num_replicas).
    """
    current_rank, world_size = current_ranks()
    num_replicas = world_size if num_replicas is None else num_replicas
    rank = current_rank if rank is None else rank
    num_replicas, rank = integer("num_replicas", num_replicas, 1), integer("rank", rank)
    if not 0 <= rank < num_replicas:
        raise SamplerError(f"rank {rank}: it must be between 0 and {num_replicas - 1} for {num_replicas} replicas")
    return num_replicas, rank
