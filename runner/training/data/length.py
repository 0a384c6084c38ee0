"""The number of steps of a run whose length is set in epochs: known once the data are open."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

from runner.config.schema import Config, length_errors
from runner.data.order.batch_shape import BatchShape, position_at
from runner.errors import UserError
from runner.samplers import Kind


def with_steps(config: Config, sizes: Sequence[int], shapes: Sequence[BatchShape]) -> Config:
    """`config` with the number of steps that `train.epochs` requires; unchanged if `train.steps` sets the length.

    Args:
        config: of the run.
        sizes: the samples of each source.
        shapes: how the steps so far were split, with the shape of the next one last; after a change of shape, the
            steps that are left follow from the samples that are left.

    Raises:
        UserError: the epochs are less than one step, or something else in the config needs a longer run.
    """
    if config.train.epochs is None:
        return config
    last = shapes[-1]
    left = _samples(config, sum(sizes), last) - position_at(shapes, last.step)
    steps = last.step + max(left, 0) // last.global_batch_size
    if steps < 1:
        raise UserError(
            f"train.epochs={config.train.epochs:g} of {sum(sizes)} samples is less than one step "
            f"({last}): raise train.epochs, add data, or lower train.batch_size"
        )
    config = replace(config, train=replace(config.train, steps=steps))
    if errors := length_errors(config):
        raise UserError("\n".join(f"{error} (train.epochs={config.train.epochs:g})" for error in errors))
    return config


def _samples(config: Config, total: int, shape: BatchShape) -> int:
    """The samples that the epochs have, over all ranks."""
    epochs = Fraction(str(config.train.epochs))  # as it was written: 0.29 of 100 samples are 29
    kind: Kind = config.sampler.kind.value
    return kind.samples_of(epochs, total, shape.world_size, shape.batch_size, config.sampler.drop_last)
