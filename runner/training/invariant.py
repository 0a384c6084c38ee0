"""Rank-invariant training: losses, metrics and weights that do not depend on how many ranks computed them.

A step is a fixed number of micro-batches, each a fixed range of positions. Each is computed with random generators that
are seeded by (seed, step, its number), and what is computed from them is added up in the order of a binary tree
(`runner.training.tree`), whoever computed which. A rank takes neighbouring micro-batches and adds up the parts of the
tree that it has by itself. Then each rank gets one slice of these parts from all ranks, adds them up, and sends the sum
to all: as much traffic as in a ring all-reduce, if a rank's micro-batches are one part of the tree.

What this needs is checked in the first step: nothing that a forward pass changes may reach the next micro-batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from runner.data.order.batch_shape import BatchShape, share_of
from runner.errors import UserError
from runner.system.distributed import World
from runner.training.generators import Generators, seed_of
from runner.training.optimizers import Optimizers
from runner.training.parallel import Computation, SharedBuffers
from runner.training.tasks import Task
from runner.training.tree import Node, TreeSum, nodes_of
from runner.training.unchanged import Unchanged, same

BUCKET = 1 << 23
"""Elements that are exchanged at a time; a larger parameter goes by itself."""
IN_FLIGHT = 3
"""Buckets whose exchange has begun and not ended."""

OUTSIDE = -1
Gradients = list[torch.Tensor | None] | None
OFF = "or set train.rank_invariant=false"


class FixedMicroBatches:
    """This rank's part in rank-invariant steps (a `runner.training.division.Division`).

    Args:
        world: the ranks.
        model: on its device; gets the parameters of rank 0.
        task: for messages, and its state.
        optimizers: over the parameters of `model`.
        shape: how a step is split; with `micro_batches`.
        seed: of the run.
        device: of the model.

    Raises:
        UserError: the task takes whole steps, and some ranks would have no micro-batch.
    """

    in_loop = (
        "while step.batches is iterated, and another rank may have more micro-batches: make the call after the loop, "
        f"{OFF}"
    )

    def __init__(
        self,
        world: World,
        model: nn.Module,
        task: Task,
        optimizers: Optimizers,
        shape: BatchShape,
        seed: int,
        device: torch.device,
    ) -> None:
        self._world = world
        self._task = task
        self._optimizers = optimizers
        self._seed = seed
        self._share = share_of(shape.micro_batches, world.size, world.rank)
        self._nodes = [
            nodes_of(share_of(shape.micro_batches, world.size, rank), shape.micro_batches) for rank in range(world.size)
        ]
        self.count, self.parts = len(self._share), shape.micro_batches
        if task.take_step is not None and world.size > self.parts:
            error = UserError(
                f"{task.name} has take_step, which needs a micro-batch on each rank, and a step has {self.parts} for "
                f"{world.size} ranks: use fewer ranks, lower train.batch_size={shape.batch_size}, {OFF}"
            )
            error.everywhere = True
            raise error
        self._generators = Generators(device)
        self._passes: dict[str, list[TreeSum[Gradients]]] = {name: [] for name in optimizers.names}
        self._index = self._number_of_passes = 0
        self._unchanged: Unchanged | None = Unchanged(model)  # in the first step
        SharedBuffers(world, model).synchronize()
        for bucket in _buckets([p.detach() for p in model.parameters()]):
            self._equalize(bucket)

    def _equalize(self, tensors: list[torch.Tensor]) -> None:
        """Give all ranks the values of rank 0: a model may have drawn its weights from what is not seeded."""
        if self._world.size > 1:
            flat = self._world.send_tensor(torch.cat([tensor.reshape(-1) for tensor in tensors]))
            for tensor, part in zip(tensors, torch.split(flat, [each.numel() for each in tensors]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def wrap(self, computation: Computation, device: torch.device) -> nn.Module:
        return computation

    def begin(self, index: int) -> None:
        self._index, self._number_of_passes = index, 0
        for passes in self._passes.values():
            passes.clear()
        self._draw_as(OUTSIDE)

    @contextmanager
    def iteration(self) -> Iterator[None]:
        for passes in self._passes.values():
            passes.append(TreeSum(self.parts, _add))
        if self._unchanged is not None:
            self._unchanged.remember()
        yield
        if self._unchanged is not None:
            self._unchanged.compare()
        self._number_of_passes += 1
        self._draw_as(OUTSIDE)

    @contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        self._draw_as(self._share[number])
        yield
        for name, passes in self._passes.items():
            passes[-1].push(Node(0, self._share[number]), _taken(self._optimizers.parameters(name)))

    def _draw_as(self, micro_batch: int) -> None:
        """Seed the generators for a micro-batch of the present pass, or for what is computed outside of them.

        Outside of them are a task's own lines, and an optimizer that draws, as for Langevin dynamics.
        """
        self._generators.seed(seed_of(self._seed, self._index, self._number_of_passes, micro_batch))

    def sum(self, rows: np.ndarray, outside: np.ndarray) -> np.ndarray:
        tree = TreeSum[np.ndarray](self.parts, np.add)
        for micro_batch, row in zip(self._share, rows, strict=True):
            tree.push(Node(0, micro_batch), row)
        if self._world.size > 1:
            own = torch.from_numpy(np.concatenate([*tree.values, np.zeros(0)]))
            received = [own.new_empty(len(nodes) * len(outside)) for nodes in self._nodes]
            self._world.exchange(received, [own] * self._world.size)()
            tree = TreeSum[np.ndarray](self.parts, np.add)
            for nodes, values in zip(self._nodes, received, strict=True):
                for node, row in zip(nodes, values.numpy().reshape(len(nodes), len(outside)), strict=True):
                    tree.push(node, row)
        total: np.ndarray = tree.total() + outside
        return total

    def everywhere(self, values: np.ndarray, single: np.ndarray) -> np.ndarray:
        """All ranks' values, sorted as a sum depends on their order; what is not per sample is that of rank 0."""
        found = self._world.gather((values, single))
        return np.concatenate([np.sort(np.concatenate([values for values, _ in found])), found[0][1]])

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        everywhere = torch.cat([part for part in self._world.gather(values.cpu()) if len(part)])
        return everywhere.double().sort(0).values.mean(0)  # a task may have collected them in several passes

    @torch.no_grad()
    def reduce_gradients(self, name: str) -> None:
        parameters, passes = self._optimizers.parameters(name), self._passes[name]
        total: Gradients = None
        for tree in passes:
            found = self._of_all_ranks(parameters, tree)
            total = found if total is None else _add(total, found)
        passes.clear()
        for parameter, gradient in zip(parameters, total or [None] * len(parameters), strict=True):
            parameter.grad = None if gradient is None else _laid_out_as(parameter, gradient)

    def check(self, name: str) -> None:
        if self._unchanged is None:
            self._check_passes(name)
            return

        def check() -> None:
            unchanged.check()
            self._check_passes(name)

        unchanged = self._unchanged
        self._world.run_on_all(check)

    def _check_passes(self, name: str) -> None:
        whole = all(tree.nodes == self._nodes[self._world.rank] for tree in self._passes[name])
        if not whole or any(parameter.grad is not None for parameter in self._optimizers.parameters(name)):
            raise UserError(
                f"{self._task.name}: call step.backward only while step.batches is iterated, and iterate all of it, so "
                f"that gradients do not depend on the number of ranks, {OFF}"
            )

    def holds_gradients(self) -> bool:
        if len(self._passes) == 1:
            return False
        held = any(value is not None for passes in self._passes.values() for tree in passes for value in tree.values)
        return bool(self._world.sum(torch.tensor([held], dtype=torch.int32)).any())

    def _of_all_ranks(self, parameters: Sequence[torch.Tensor], tree: TreeSum[Gradients]) -> Gradients:
        """The gradients of a pass over all micro-batches."""
        if self._world.size == 1:
            return tree.total() or [None] * len(parameters)
        parts = [value or [None] * len(parameters) for value in tree.values]
        present = [any(part[place] is not None for part in parts) for place in range(len(parameters))]
        used = self._world.sum(torch.tensor(present, dtype=torch.int32)).nonzero().reshape(-1).tolist()
        found: list[torch.Tensor | None] = [None] * len(parameters)
        begun: deque[Iterator[None]] = deque()
        places = {id(parameters[place]): place for place in used}
        for bucket in _buckets([parameters[place] for place in used]):
            where = [places[id(parameter)] for parameter in bucket]
            exchange = self._exchanged([[part[place] for place in where] for part in parts], bucket, where, found)
            next(exchange)
            begun.append(exchange)
            while len(begun) > IN_FLIGHT:
                _advance(begun)
        while begun:
            _advance(begun)
        return found

    def _exchanged(
        self, parts: list[list[torch.Tensor | None]], bucket: list[torch.Tensor], where: list[int], into: list[Any]
    ) -> Iterator[None]:
        """Add up a bucket of gradients in two exchanges; yields while each is under way.

        Args:
            parts: for each node of this rank, the gradients of `bucket`.
            bucket: parameters.
            where: their places in `into`, which gets the sums.
        """
        size, sizes = self._world.size, [parameter.numel() for parameter in bucket]
        width = -(-sum(sizes) // size)  # of a slice
        flat = bucket[0].new_zeros(len(parts), width * size)
        for row, gradients in zip(flat, parts, strict=True):
            for place, gradient in zip(torch.split(row[: sum(sizes)], sizes), gradients, strict=True):
                if gradient is not None:
                    place.copy_(gradient.reshape(-1))
        send = [flat[:, rank * width : (rank + 1) * width].contiguous() for rank in range(size)]
        receive = [flat.new_empty(len(nodes), width) for nodes in self._nodes]
        wait = self._world.exchange(receive, send)
        yield
        wait()
        tree = TreeSum[torch.Tensor](self.parts, torch.Tensor.add_)
        for nodes, rows in zip(self._nodes, receive, strict=True):
            for node, row in zip(nodes, rows, strict=True):
                tree.push(node, row)
        whole = flat.new_empty(width * size)
        wait = self._world.exchange(list(torch.split(whole, width)), [tree.total()] * size)
        yield
        wait()
        for at, parameter, gradient in zip(where, bucket, torch.split(whole[: sum(sizes)], sizes), strict=True):
            into[at] = gradient.view_as(parameter)

    def end(self) -> None:
        """Check, after the first step, that the ranks' tasks have kept the same."""
        if self._unchanged is not None and self._task.state is not None:
            states = self._world.gather(self._task.state.state_dict())
            if not all(same(states[0], state) for state in states):
                error = UserError(
                    f"{self._task.name}: its state differs from rank to rank: compute it from step.mean after the loop "
                    f"over step.batches, {OFF}"
                )
                error.everywhere = True
                raise error
        self._unchanged = None


class StateOfMain:
    """The loader's state as all ranks save it: that of rank 0, which depends on the position in the run alone."""

    def __init__(self, world: World, loader: Any) -> None:
        self._world = world
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        return self._world.broadcast(self._loader.state_dict() if self._world.is_main else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loader.load_state_dict(state)


def _taken(parameters: Sequence[torch.Tensor]) -> Gradients:
    """The gradients of a micro-batch, which the parameters have no longer; None if there are none at all."""
    gradients = [parameter.grad for parameter in parameters]
    if all(gradient is None for gradient in gradients):
        return None
    for parameter in parameters:
        parameter.grad = None
    return gradients


def _add(left: Gradients, right: Gradients) -> Gradients:
    """The sum of two lists of gradients, in place. One that is missing counts as 0, as in an exchange."""
    if left is None or right is None:
        found = right if left is None else left
        if found is not None and (present := [gradient for gradient in found if gradient is not None]):
            torch._foreach_add_(present, 0.0)  # -0.0 becomes 0.0
        return found
    both = [(one, other) for one, other in zip(left, right, strict=True) if one is not None and other is not None]
    if both:
        ones, others = map(list, zip(*both, strict=True))
        torch._foreach_add_(ones, others)
    if len(both) < len(left):
        for place, (one, other) in enumerate(zip(left, right, strict=True)):
            if (one is None) != (other is None):
                left[place] = cast(torch.Tensor, other if one is None else one).add_(0.0)
    return left


def _laid_out_as(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """`gradient` with the strides of its parameter, which the backward pass gives it; a norm depends on them."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _buckets(tensors: Sequence[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """`tensors` in groups of one type and device that are exchanged together."""
    for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
        bucket: list[torch.Tensor] = []
        for tensor in tensors:
            if (tensor.dtype, tensor.device) == kind:
                if bucket and sum(each.numel() for each in bucket) + tensor.numel() > BUCKET:
                    yield bucket
                    bucket = []
                bucket.append(tensor)
        if bucket:
            yield bucket


def _advance(begun: deque[Iterator[None]]) -> None:
    """Let the oldest exchange go on; it is the last one to end if it has another part."""
    exchange = begun.popleft()
    if next(exchange, True) is None:
        begun.append(exchange)
