"""Gradients summed over micro-batches and ranks: the same sums under any grouping, order and communication."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
import torch
from hypothesis import strategies as st
from properties import given_in_tiers
from ranks import on_ranks
from torch import nn
from torch.utils.checkpoint import checkpoint

from exactdata.order.batch_shape import share_of
from runner.errors import UserError
from runner.system.distributed import World
from runner.training.ranks import gradient_sum
from runner.training.ranks.gradient_sum import GradientSum
from runner.training.ranks.tree import TreeSum, nodes_of

STEPS = 3
Sums = list[torch.Tensor | None]


class Model(nn.Module):
    """Layers of several sizes, called in another order than defined; one is not always used, one is frozen.

    Args:
        shared: call the first layer twice, in checkpoints with their own backward pass, so its gradient comes in parts.
    """

    def __init__(self, shared: bool = False) -> None:
        super().__init__()
        self.shared = shared
        self.last = nn.Linear(7, 1)
        self.sometimes = nn.Linear(5, 7, bias=False)
        self.first = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.second = nn.Linear(5, 7).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_(self.shared)
        for _ in range(2 if self.shared else 1):
            x = checkpoint(self.first, x, use_reentrant=True) if self.shared else self.first(x)
        y = self.second(self.frozen(x).double()).float()
        if x[0, 0] > 0:
            y = y + self.sometimes(x)
        loss: torch.Tensor = self.last(y.tanh()).square().mean()
        return loss


def batch(step: int, leaf: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + leaf))


def gradients(model: Model) -> Sums:
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def add(left: torch.Tensor | None, right: torch.Tensor | None) -> torch.Tensor | None:
    """Add two gradients; a missing one counts as 0."""
    if left is None and right is None:
        return None
    return (0.0 if left is None else left) + (torch.zeros(()) if right is None else right)


def expected(leaves: int, shared: bool = False) -> list[Sums]:
    """Return, by step, the sums of gradients that are computed one micro-batch after the other."""
    torch.manual_seed(0)
    model = Model(shared)
    steps = []
    for step in range(STEPS):
        trees = [TreeSum[torch.Tensor | None](leaves, add) for _ in model.parameters()]
        for leaf in range(leaves):
            model(batch(step, leaf)).backward()
            for tree, gradient in zip(trees, gradients(model), strict=True):
                tree.push(nodes_of(range(leaf, leaf + 1), leaves)[0], gradient)
        steps.append([tree.total() for tree in trees])
    return steps


def summed(world: World, leaves: int, early: bool, shared: Callable[[int], bool] = lambda step: False) -> list[Sums]:
    """Return the sums of a GradientSum over this rank's share of the micro-batches."""
    torch.manual_seed(0)
    model = Model()
    shares = [share_of(leaves, world.size, rank) for rank in range(world.size)]
    nodes = [nodes_of(share, leaves) for share in shares]
    whole = GradientSum([*model.parameters()], leaves, nodes, world, count(1), early)
    steps = []
    for step in range(STEPS):
        model.shared = shared(step)
        whole.clear()
        whole.begin_pass()
        for leaf in shares[world.rank]:
            whole.begin_micro_batch(leaf)
            model(batch(step, leaf)).backward()
            whole.end_micro_batch()
        whole.end_pass()
        world.sum(torch.zeros(1))  # as that of the values that were logged
        assert whole.whole()
        with torch.no_grad():
            whole.give_back()
        if step == 0:
            whole.end_first_step()
        steps.append(gradients(model))
    return steps


def assert_equal(found: list[Sums], wanted: list[Sums]) -> None:
    """Compare bit for bit. A parameter that no micro-batch used has no gradient."""
    for step, (one, other) in enumerate(zip(found, wanted, strict=True)):
        for place, (mine, its) in enumerate(zip(one, other, strict=True)):
            assert (mine is None) == (its is None), (step, place)
            if mine is not None and its is not None:
                assert mine.dtype == its.dtype
                assert torch.equal(mine, its), (step, place)


@given_in_tiers(leaves=st.integers(1, 7), group=st.sampled_from([1, 40, 10**6]), early=st.booleans(), few=12, many=100)
def test_gradients_added_as_they_come_have_the_same_sums(leaves: int, group: int, early: bool) -> None:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gradient_sum, "GROUP", group)
        assert_equal(summed(World(), leaves, early), expected(leaves))


@pytest.mark.parametrize("group", [1, 10**6])
def test_gradient_in_parts_is_added_when_complete(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint with a backward pass of its own sets its parameters' gradients at every call."""
    monkeypatch.setattr(gradient_sum, "GROUP", group)
    assert_equal(summed(World(), 5, True, lambda step: True), expected(5, shared=True))


def test_parts_that_come_after_the_first_step_only_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier sum may have been sent."""
    monkeypatch.setattr(gradient_sum, "GROUP", 1)
    with pytest.raises(UserError, match=r"in several parts.*use_reentrant=False.*train\.rank_invariant=false"):
        summed(World(), 2, True, lambda step: step > 0)


def sums_of_rank(rank: int, size: int, leaves: int, directory: str) -> None:
    method = f"file://{directory}/rendezvous"
    torch.distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=size)
    wanted = expected(leaves)
    for gradient_sum.GROUP, gradient_sum.BUCKET, gradient_sum.AT_ONCE in [
        (1, 1, 0),
        (1, 60, 0),
        (40, 10**6, 0),
        (1, 60, 10**6),
        (10**6, 10**6, 10**6),
    ]:
        for early in (True, False):
            assert_equal(summed(World(rank, size), leaves, early), wanted)
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize(("size", "leaves"), [(2, 2), (2, 5), (3, 2), (3, 8)])
def test_all_ranks_get_the_sums_of_one(size: int, leaves: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Sum in slices or at once, during the backward pass or after it, with more or fewer micro-batches than ranks."""
    on_ranks(sums_of_rank, size, size, leaves, str(tmp_path_factory.mktemp("sums")))
