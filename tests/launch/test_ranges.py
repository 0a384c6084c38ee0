"""Numbers of ranks and of nodes, as options have them."""

from typing import Any

import pytest

from exactdata.samplers import SamplerKind
from launch.ranges import parse
from runner.cli.base.launcher import rank_count_errors
from runner.config.schema import Config, SamplerConfig, TrainConfig
from runner.contracts import RankCounts
from runner.errors import UserError


@pytest.mark.parametrize(
    ("value", "numbers"), [(3, [3]), ("3", [3]), ("1-4", [1, 2, 3, 4]), (" 2 - 2 ", [2]), ("7-8", [7, 8])]
)
def test_a_number_or_a_range(value: object, numbers: list[int]) -> None:
    """Read a number as a range of one."""
    assert list(parse("launcher.ranks", value)) == numbers


@pytest.mark.parametrize(
    "value", [0, -1, True, None, 1.5, [1, 2], "", "x", "1-", "-4", "4-1", "0-4", "1-2-3", "9999999"]
)
def test_other_values_are_refused_in_one_line(value: object) -> None:
    """Name the option, the value and the allowed values."""
    with pytest.raises(UserError) as raised:
        parse("launcher.ranks", value)
    (line,) = str(raised.value).splitlines()
    assert line.startswith(f"launcher.ranks={value} must be a whole number from 1")
    assert "1-4" in line


def config(kind: SamplerKind = SamplerKind.elastic, rank_invariant: bool | None = False, **train: Any) -> Config:
    """Make a config of one source, with these settings of `train`."""
    options = TrainConfig(batch_size=2, rank_invariant=rank_invariant, **train)
    return Config(train=options, sampler=SamplerConfig(kind=kind))


def test_varying_ranks_need_the_same_batches() -> None:
    """Otherwise another number of ranks would train on other batches, and the run would not be the same."""
    several = RankCounts(range(1, 5), "launcher.ranks=1-4")
    assert rank_count_errors(several, config(global_batch_size=24)) == []
    # Rank-invariant training deals out micro-batches, and some ranks may have one more than others.
    assert rank_count_errors(several, config(rank_invariant=None, global_batch_size=16)) == []
    for wrong, remedy in [
        (config(), "set train.global_batch_size=N"),
        (config(global_batch_size=24, grad_accum_steps=3), "remove it"),
        (config(global_batch_size=16), "train.batch_size=2 x 3 ranks: set it to a multiple of 24"),
        (config(SamplerKind.mixture, global_batch_size=24), "choose sampler=elastic"),
    ]:
        (error,) = rank_count_errors(several, wrong)
        assert error.startswith("launcher.ranks=1-4: ")
        assert remedy in error
        assert "\n" not in error


def test_fixed_ranks_may_have_any_divisible_config() -> None:
    """A global batch that the ranks cannot share is found before anything starts."""
    three = RankCounts(range(3, 4), "launcher.ranks=3")
    assert rank_count_errors(three, config(SamplerKind.mixture)) == []
    assert rank_count_errors(three, config(global_batch_size=12, grad_accum_steps=2)) == []
    (error,) = rank_count_errors(three, config(global_batch_size=8))
    assert "launcher.ranks=3: train.global_batch_size=8 is not a multiple of train.batch_size=2 x 3 ranks" in error
