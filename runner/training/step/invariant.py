"""Train rank-invariantly: losses, metrics and weights do not depend on the number of ranks.

A step has a fixed number of micro-batches, each with a fixed range of positions. Each micro-batch is computed with
random generators seeded from (seed, step, micro-batch). The results are summed in the order of a binary tree
(`runner.training.ranks.tree`), regardless of which rank computed them. A rank computes consecutive micro-batches and
sums the tree nodes for which it has all leaves. Then each rank receives one slice of these nodes from all ranks, sums
it, and sends the sum to all ranks. The traffic equals that of a ring all-reduce if each rank's micro-batches form a
single node.

This requires that a forward pass does not change state that the next micro-batch uses. This is checked in the first
step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import nn

from exactdata import generators
from exactdata.order.batch_shape import BatchShape, share_of
from runner.checkpoint.tensors.compare import nested_differences
from runner.checkpoint.tensors.staging import snapshot
from runner.errors import UserError
from runner.system.distributed import World, shared
from runner.training.model.optimizers import Optimizers
from runner.training.ranks.gradient_sum import GradientSum
from runner.training.ranks.parallel import Computation, SharedBuffers, broadcast_tensors
from runner.training.ranks.tree import Node, TreeSum, nodes_of
from runner.training.step.division import Division
from runner.training.step.tasks import Task

OUTSIDE = -1
OFF = "or set train.rank_invariant=false"
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class FixedMicroBatches(Division):
    """A rank's share of each rank-invariant step.

    Args:
        world: the ranks.
        model: the model on its device. Its parameters are set to the parameters of rank 0.
        task: the task, whose name is used in messages and whose state is compared.
        optimizers: optimizers of the model's parameters.
        shape: batch shape of a step, with `micro_batches`.
        seed: seed of the run.
        device: device of the model.

    Raises:
        UserError: the task defines `take_step`, and some ranks would have no micro-batch.
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
        self._seed = seed
        self._share = share_of(shape.micro_batches, world.size, world.rank)
        self._nodes = [
            nodes_of(share_of(shape.micro_batches, world.size, rank), shape.micro_batches) for rank in range(world.size)
        ]
        self.count, self.parts = len(self._share), shape.micro_batches
        self.total = self.parts
        if task.take_step is not None and world.size > self.parts:
            raise shared(
                UserError(
                    f"{task.name} has take_step, which needs a micro-batch on each rank, and a step has {self.parts} "
                    f"for {world.size} ranks: use fewer ranks, lower train.batch_size={shape.batch_size}, {OFF}"
                )
            )
        _check_running_statistics(model)
        tags = count(1)
        self._gradients = {
            name: GradientSum(
                optimizers.parameters(name),
                self.parts,
                self._nodes,
                world,
                tags,
                early=task.take_step is None and len(optimizers.names) == 1,
            )
            for name in optimizers.names
        }
        self._index = self._number_of_passes = 0
        self._unchanged: Unchanged | None = Unchanged(model)  # only in the first step
        SharedBuffers(world, model).synchronize()
        # The model may have drawn its weights from an unseeded generator.
        broadcast_tensors([*model.parameters()], world)

    def wrap(self, computation: Computation, device: torch.device) -> nn.Module:
        return computation

    def begin(self, index: int) -> None:
        self._index, self._number_of_passes = index, 0
        for gradients in self._gradients.values():
            gradients.clear()
        if self._task.take_step is not None:  # otherwise, no code draws random numbers before the first micro-batch
            self._draw_as(OUTSIDE)

    @contextmanager
    def iteration(self) -> Iterator[None]:
        for gradients in self._gradients.values():
            gradients.begin_pass()
        if self._unchanged is not None:
            self._unchanged.remember()
        yield
        for gradients in self._gradients.values():
            gradients.end_pass()
        if self._unchanged is not None:
            self._unchanged.compare()
        self._number_of_passes += 1
        self._draw_as(OUTSIDE)

    @contextmanager
    def micro_batch(self, number: int) -> Iterator[None]:
        self._draw_as(self._share[number])
        for gradients in self._gradients.values():
            gradients.begin_micro_batch(self._share[number])
        yield
        for gradients in self._gradients.values():
            gradients.end_micro_batch()

    def _draw_as(self, micro_batch: int) -> None:
        """Seed the generators for a micro-batch of the current pass, or for code outside of micro-batches.

        Code outside of micro-batches is a task's code, or an optimizer that draws random numbers, e.g. for Langevin
        dynamics.
        """
        generators.seed(generators.seed_of(self._seed, self._index, self._number_of_passes, micro_batch), gpus=True)

    def sum(self, rows: np.ndarray, outside: np.ndarray) -> np.ndarray:
        tree = TreeSum[np.ndarray](self.parts, np.add)
        for micro_batch, row in zip(self._share, rows, strict=True):
            tree.push(Node(0, micro_batch), row)
        if self._world.size > 1:
            own = torch.from_numpy(np.concatenate([*tree.values, np.zeros(0)]))
            others = self._world.others
            received = [own.new_empty(len(nodes) * len(outside)) for nodes in self._nodes]
            received[self._world.rank] = own
            self._world.exchange([(rank, received[rank]) for rank in others], [(rank, own) for rank in others])()
            tree = TreeSum[np.ndarray](self.parts, np.add)
            for nodes, values in zip(self._nodes, received, strict=True):
                for node, row in zip(nodes, values.numpy().reshape(len(nodes), len(outside)), strict=True):
                    tree.push(node, row)
        total: np.ndarray = tree.total() + outside
        return total

    def everywhere(self, values: np.ndarray, single: np.ndarray) -> np.ndarray:
        """Return all ranks' values, sorted because a sum depends on their order, and rank 0's single numbers."""
        found = self._world.gather((values, single))
        return np.concatenate([np.sort(np.concatenate([values for values, _ in found])), found[0][1]])

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        everywhere = torch.cat([part for part in self._world.gather(values.cpu()) if len(part)])
        return everywhere.double().sort(0).values.mean(0)  # sorted, so that the order of samples has no effect

    @torch.no_grad()
    def reduce_gradients(self, name: str) -> None:
        self._gradients[name].give_back()

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
        if not self._gradients[name].whole():
            raise UserError(
                f"{self._task.name}: call step.backward only while step.batches is iterated, and iterate all of it, so "
                f"that gradients do not depend on the number of ranks, {OFF}"
            )

    def holds_gradients(self) -> bool:
        if len(self._gradients) == 1:
            return False
        held = any(gradients.holds_gradients() for gradients in self._gradients.values())
        return bool(self._world.sum(torch.tensor([held], dtype=torch.int32)).any())

    def end(self) -> None:
        """After the first step, check that the task has the same state on all ranks."""
        if self._unchanged is None:
            return
        self._unchanged = None
        if self._task.state is not None:
            first, *others = self._world.gather(snapshot(self._task.state.state_dict(), "state of the task"))
            if any(any(nested_differences(first, other, "")) for other in others):
                raise shared(
                    UserError(
                        f"{self._task.name}: its state differs from rank to rank: compute it from step.mean after the "
                        f"loop over step.batches, {OFF}"
                    )
                )
        for gradients in self._gradients.values():
            gradients.end_first_step()


def _check_running_statistics(model: nn.Module) -> None:
    """Reject layers with running statistics, before a step finds that these change.

    Raises:
        UserError: such a layer is in training mode.
    """
    model.train()
    for name, module in model.named_modules():
        if module.training and getattr(module, "track_running_stats", False):
            raise shared(UserError(_changes(f"layer {name} ({type(module).__name__})")))


def _changes(what: str) -> str:
    return (
        f"the model's {what} changes in the forward pass, as running statistics of a batch norm do, so that training "
        "would depend on which rank computed which micro-batch: use a layer without (a group norm or layer norm, or "
        f"track_running_stats=False), keep that layer in eval mode, {OFF}"
    )


class StateOfMain:
    """The loader state that all ranks save. It is rank 0's state, which depends only on the position in the run."""

    def __init__(self, world: World, loader: Any) -> None:
        self._world = world
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        return self._world.broadcast(self._loader.state_dict() if self._world.is_main else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loader.load_state_dict(state_dict)


class Unchanged:
    """Detect whether a step's forward passes change state that `model` keeps for the next step.

    This state consists of the weights, the persistent buffers, and the extra state of modules (`get_extra_state`).
    State that is not saved in a checkpoint is ignored, because e.g. a cache may grow. A run that depends on such state
    would not resume exactly either.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._before: dict[str, Any] = {}
        self._changed: str | None = None

    def remember(self) -> None:
        """Store the state before the first forward pass."""
        self._before = self._kept()

    def compare(self) -> None:
        """Compare the state after the last forward pass with the stored state."""
        now = self._kept()
        changed = (name for name, value in self._before.items() if any(nested_differences(value, now.get(name), name)))
        self._changed = self._changed or next(changed, None)

    def check(self) -> None:
        """Check that the state has not changed.

        Raises:
            UserError: the state has changed.
        """
        if self._changed is not None:
            raise UserError(_changes(self._changed))

    def _kept(self) -> dict[str, Any]:
        """Return the state by name. Weights are replaced by checksums, because memory may not suffice for a copy."""
        found: dict[str, Any] = {f"parameter {name}": _checksum(p) for name, p in self._model.named_parameters()}
        parameters = dict(self._model.named_parameters(remove_duplicate=False))
        for name, value in self._model.state_dict().items():
            *path, last = name.split(".")
            if last == "_extra_state":
                prefix = ".".join(path)
                found[f"extra state of {prefix or type(self._model).__name__}"] = snapshot(value, name)
            elif name not in parameters:
                found[f"buffer {name}"] = snapshot(value, name)
        return found


def _checksum(parameter: torch.Tensor) -> int:
    """Return the sum of a parameter's values, with their bits interpreted as integers."""
    values = parameter.detach().reshape(-1)
    return int(values.view(_WORDS.get(values.element_size(), torch.int64)).sum())
