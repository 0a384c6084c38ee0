"""Sum one optimizer's gradients over the micro-batches of a step and over the ranks, in the order of a tree.

As soon as the backward pass has computed the gradients of a group of parameters, they are added to the sums, while they
are still in the processor's cache. In a rank's last micro-batch, the sums of a bucket of several groups are also sent
to the other ranks while the backward pass continues.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from typing import Any, cast

import torch

from runner.errors import UserError
from runner.system.distributed import World
from runner.training.ranks.parallel import alike, packed
from runner.training.ranks.tree import Node, TreeSum

GROUP = 1 << 18
"""Maximum number of elements of a group, which fit in a processor's cache. A larger parameter is a separate group."""
BUCKET = 1 << 23
"""Maximum number of elements of a bucket, unless a single group has more. With smaller buckets, the additional sends
cost more time than starting earlier saves."""
IN_FLIGHT = 3
"""Maximum number of buckets whose exchange is in progress."""

AT_ONCE = 1 << 20
"""Maximum size, in elements over all nodes, of a bucket that every rank sums completely. A larger bucket is summed
completely only if this does not increase the traffic."""

Gradients = list[torch.Tensor | None]


class _Group:
    """Parameters whose gradients are summed together.

    Args:
        parameters: parameters of one dtype, on one device.
        trained: True if they require gradients when training begins.

    Attributes:
        passes: the sums on this rank, one per pass over the micro-batches.
        pushed: True if the sums already include the current micro-batch.
    """

    def __init__(self, parameters: list[torch.Tensor], trained: bool) -> None:
        self.parameters = parameters
        self.trained = trained
        self.size = sum(parameter.numel() for parameter in parameters)
        self.passes: list[TreeSum[Gradients | None]] = []
        self.pushed = False

    def push(self, leaf: int) -> None:
        """Add the gradients of micro-batch `leaf` to the sums."""
        self.pushed = True
        self.passes[-1].push(Node(0, leaf), _taken(self.parameters))


class _Bucket:
    """Groups whose sums are sent together.

    Args:
        groups: groups of one dtype, on one device.
        tag: tag of the messages, the same on every rank.

    Attributes:
        trained: True if its parameters require gradients when training begins.
        rows: the gradients of this rank, one row per tree node. The first row, which always exists, receives the sum
            over all ranks. A row ends with one mark per parameter: 1 if the parameter has a gradient (which may be 0),
            otherwise 0.
    """

    def __init__(self, groups: Sequence[_Group], tag: int) -> None:
        self.groups = groups
        self.tag = tag
        self.trained = groups[0].trained
        self.rows = groups[0].parameters[0].new_empty(0, 0)
        self._places: dict[_Group, list[tuple[list[torch.Tensor], torch.Tensor]]] = {}
        self._laid_out: dict[_Group, int] = {}  # number of rows filled so far

    def reserve(self, nodes: int, ranks: int) -> None:
        """Allocate zeroed rows for `nodes`, with a width that is a multiple of `ranks`.

        The rows are reused in every step, because the operating system clears newly allocated memory.
        """
        if len(self.rows) == max(nodes, 1):
            return
        parameters = [parameter for group in self.groups for parameter in group.parameters]
        width = -(-(sum(group.size for group in self.groups) + len(parameters)) // ranks) * ranks
        self.rows = parameters[0].new_zeros(max(nodes, 1), width)
        for row in self.rows:
            at = 0
            for group in self.groups:
                sizes = [*(parameter.numel() for parameter in group.parameters), len(group.parameters)]
                *values, marks = torch.split(row[at : at + sum(sizes)], sizes)
                views = [each.view_as(parameter) for each, parameter in zip(values, group.parameters, strict=True)]
                self._places.setdefault(group, []).append((views, marks))
                at += sum(sizes)

    def lay_out(self, group: _Group, number: int, nodes: Sequence[Node]) -> None:
        """Copy a group's sums of pass `number` to the rows, for complete nodes that are not in the rows yet."""
        tree = group.passes[number]
        while (at := self._laid_out.get(group, 0)) < len(tree.nodes) and tree.nodes[at] == nodes[at]:
            self._laid_out[group] = at + 1
            (views, marks), gradients = self._places[group][at], tree.values[at]
            known = gradients or [None] * len(views)
            _copy_all([(view, gradient) for view, gradient in zip(views, known, strict=True) if gradient is not None])
            marks.fill_(1)
            for place, (view, gradient) in enumerate(zip(views, known, strict=True)):
                if gradient is None:
                    view.zero_()
                    marks[place] = 0
            if at:  # keep the first node's tensors, which are reused
                tree.replace(at, None)

    def found(self, number: int) -> Iterator[Gradients]:
        """Yield each group's all-rank gradient sums, written into this rank's gradient tensors."""
        self._laid_out.clear()
        marks = iter(torch.cat([self._places[group][0][1] for group in self.groups]).tolist())  # wait only once
        for group in self.groups:
            (views, _), *_ = self._places[group]
            own = next(iter(group.passes[number].values), None) or [None] * len(views)
            into: Gradients = [
                None if not mark else gradient if _fits(gradient, parameter) else torch.empty_like(parameter)
                for parameter, gradient, mark in zip(group.parameters, own, marks, strict=False)
            ]
            _copy_all([(gradient, view) for gradient, view in zip(into, views, strict=True) if gradient is not None])
            yield into


class GradientSum:
    """Sum the gradients of `parameters` over the micro-batches of a step, which are the leaves of a tree.

    Args:
        parameters: parameters of one optimizer.
        leaves: number of leaves.
        nodes: for each rank, the nodes that it can sum without other ranks.
        world: the ranks.
        tags: numbers for messages, drawn by all ranks in the same order.
        early: True if a gradient is complete once the backward pass has computed it, and if no other sum is exchanged
            before this one. Then a bucket may be sent before the remaining buckets are complete.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        leaves: int,
        nodes: Sequence[Sequence[Node]],
        world: World,
        tags: Iterator[int],
        early: bool,
    ) -> None:
        self._leaves = leaves
        self._nodes = nodes
        self._own = nodes[world.rank]
        self._world = world
        self._groups: list[_Group] = []
        self._buckets: list[_Bucket] = []
        for trained in (True, False):
            some = [parameter for parameter in reversed(parameters) if parameter.requires_grad == trained]
            for kind in alike(some):
                groups = [_Group(group, trained) for group in packed(kind, GROUP, torch.Tensor.numel)]
                self._groups += groups
                self._buckets += [
                    _Bucket(bucket, next(tags)) for bucket in packed(groups, BUCKET, lambda group: group.size)
                ]
        self._bucket_of = {group: bucket for bucket in self._buckets for group in bucket.groups}
        self._leaf: int | None = None  # number of the current micro-batch
        self._passes = 0
        self._begun: deque[Iterator[None]] = deque()
        self._next = 0  # index of the bucket whose exchange begins next
        self._spare: list[torch.Tensor] = []  # memory for rows from other ranks
        self._early = early
        self._first_step = True
        gains = len(self._groups) > 1 and max(leaves, world.size) > 1
        self._arrivals = _Arrivals(self._groups, self._arrived) if early and gains else None

    def clear(self) -> None:
        self._passes = 0
        for group in self._groups:
            group.passes.clear()

    def begin_pass(self) -> None:
        """Begin a sum over all micro-batches. This rank adds its micro-batches in order."""
        self._passes += 1
        for group in self._groups:
            group.passes.append(TreeSum(self._leaves, _add))

    def begin_micro_batch(self, leaf: int) -> None:
        """Begin micro-batch `leaf`. Call this before its gradients are computed."""
        self._leaf = leaf
        for group in self._groups:
            group.pushed = False

    def end_micro_batch(self) -> None:
        """Move the gradients of a micro-batch from the parameters into the sums.

        Raises:
            UserError: a part of a gradient was computed after the gradient had been added to the sum.
        """
        for group in self._groups:
            if not group.pushed:
                self._push(group)
            elif any(parameter.grad is not None for parameter in group.parameters):
                raise UserError(
                    "the backward pass computed the gradient of a parameter in several parts, as it does for shared "
                    "weights in reentrant checkpoints, and had not in the first step: pass use_reentrant=False to "
                    "torch.utils.checkpoint, or set train.rank_invariant=false"
                )
        if self._arrivals is not None:
            self._arrivals.end_micro_batch()
        self._leaf = None

    def end_pass(self) -> None:
        """End the sum of a pass. Call this before the ranks exchange anything else.

        Another rank may be waiting in its backward pass for a bucket from this rank. So this begins the exchange of all
        remaining buckets of trained parameters, even on a rank without micro-batches.
        """
        while self._sends_early and self._next < len(self._buckets) and self._buckets[self._next].trained:
            self._begin_exchange(0)

    @property
    def _sends_early(self) -> bool:
        return self._early and not self._first_step and self._world.size > 1

    def end_first_step(self) -> None:
        """Take and send gradients as soon as they are computed, from the second step on."""
        self._first_step = False
        if self._arrivals is not None:
            self._arrivals.settle()

    def whole(self) -> bool:
        """Check that this rank computed all its micro-batches, and that all gradients were added to the sums."""
        return all(
            all(tree.nodes == self._own for tree in group.passes)
            and all(parameter.grad is None for parameter in group.parameters)
            for group in self._groups
        )

    def holds_gradients(self) -> bool:
        """Check whether this rank has gradients that are not in an all-rank sum yet."""
        return any(_holds(tree) for group in self._groups for tree in group.passes)

    def give_back(self) -> None:
        """Set each parameter's gradient to the sum over all ranks, micro-batches and passes.

        Raises:
            PeerError: another rank has exited or does not respond.
        """
        total: list[Gradients] | None = None
        for number in range(self._passes):
            found = self._of_all_ranks(number)
            total = found if total is None else [_add(*both) or [] for both in zip(total, found, strict=True)]
        self.clear()
        for group, gradients in zip(self._groups, total or (), strict=False):
            for parameter, gradient in zip(group.parameters, gradients, strict=True):
                fits = gradient is None or _fits(gradient, parameter)
                parameter.grad = gradient if fits else torch.empty_like(parameter).copy_(cast(torch.Tensor, gradient))

    def _arrived(self, group: _Group) -> None:
        """Add the gradients of a group after the backward pass has computed the last of them."""
        if self._leaf is None or group.pushed or any(parameter.grad is None for parameter in group.parameters):
            return
        self._push(group)

    def _push(self, group: _Group) -> None:
        """Add the gradients of the current micro-batch, and send complete sums."""
        assert self._leaf is not None
        group.push(self._leaf)
        if self._sends_early and group.trained:
            bucket = self._bucket_of[group]
            bucket.reserve(len(self._own), self._world.size)
            bucket.lay_out(group, 0, self._own)
            while self._next < len(self._buckets) and all(map(self._is_complete, self._buckets[self._next].groups)):
                self._begin_exchange(0)

    def _is_complete(self, group: _Group) -> bool:
        """Check that a group is trained and has the gradients of all micro-batches on this rank."""
        return group.trained and group.passes[0].nodes == self._own

    def _of_all_ranks(self, number: int) -> list[Gradients]:
        """Return the all-rank sums of a pass, by group."""
        if self._world.size == 1:
            sums = ((group, group.passes[number].total()) for group in self._groups)
            return [gradients or [None] * len(group.parameters) for group, gradients in sums]
        exchanged = [bucket.trained for bucket in self._buckets]
        if not all(exchanged):  # frozen parameters may be trained later, or in a part of the step
            held = [any(_holds(group.passes[number]) for group in bucket.groups) for bucket in self._buckets]
            anywhere = self._world.sum(torch.tensor(held, dtype=torch.int32)).tolist()
            exchanged = [bool(one or other) for one, other in zip(exchanged, anywhere, strict=True)]
        while self._next < len(self._buckets):
            if exchanged[self._next]:
                self._begin_exchange(number)
            else:
                self._next += 1
        while self._begun:
            self._advance()
        self._next = 0
        found: list[Gradients] = []
        for bucket, sent in zip(self._buckets, exchanged, strict=True):
            found += bucket.found(number) if sent else ([None] * len(group.parameters) for group in bucket.groups)
        return found

    def _begin_exchange(self, number: int) -> None:
        """Begin the exchange of the next bucket, in the same order on every rank, as NCCL needs."""
        bucket = self._buckets[self._next]
        bucket.reserve(len(self._own), self._world.size)
        for group in bucket.groups:
            bucket.lay_out(group, number, self._own)
        exchange = self._exchange(bucket)
        next(exchange)
        self._begun.append(exchange)
        self._next += 1
        while len(self._begun) > IN_FLIGHT:
            self._advance()

    def _advance(self) -> None:
        """Continue the oldest exchange. If it is not complete, append it to the end of the queue."""
        exchange = self._begun.popleft()
        if next(exchange, True) is None:
            self._begun.append(exchange)

    def _exchange(self, bucket: _Bucket) -> Iterator[None]:
        """Sum the rows of a bucket over all ranks into the first row. Each `yield` is a point at which to wait.

        Usually, each rank sums one slice, then sends the sum to all ranks. A small bucket is summed completely on every
        rank instead, which saves the second exchange. So is a bucket for which this does not increase the traffic.
        """
        rank, size = self._world.rank, self._world.size
        rows = bucket.rows.view(len(bucket.rows), size, -1)
        nodes = sum(map(len, self._nodes))
        at_once = nodes * bucket.rows.shape[1] <= AT_ONCE or nodes == size == 2
        others = self._world.others
        mine, theirs = (bucket.rows, [bucket.rows] * size) if at_once else (rows[:, rank], list(rows.unbind(1)))
        memory = self._memory(mine, sum(len(self._nodes[other]) for other in others))
        received = iter(memory)
        values = {node: next(received)[: mine.shape[1]] for other in others for node in self._nodes[other]}
        values |= zip(self._own, mine, strict=False)
        wait = self._world.exchange(
            [(other, values[node]) for other in others for node in self._nodes[other]],
            [(other, row) for other in others for row in theirs[other][: len(self._own)]],
            bucket.tag,
        )
        yield
        wait()
        tree = TreeSum[torch.Tensor](self._leaves, torch.Tensor.add_)
        for node in chain.from_iterable(self._nodes):
            tree.push(node, values[node])
        total = tree.total()
        if not at_once:
            wait = self._world.exchange(
                [(other, theirs[other][0]) for other in others], [(other, total) for other in others], bucket.tag
            )
            yield
            wait()
        mine[0].copy_(total)
        self._spare.append(memory)

    def _memory(self, like: torch.Tensor, count: int) -> torch.Tensor:
        """Return uninitialized memory for `count` rows, each at least as wide as the rows of `like`."""
        of_kind = [spare for spare in self._spare if (spare.dtype, spare.device) == (like.dtype, like.device)]
        fitting = [spare for spare in of_kind if spare.shape[1] >= like.shape[1]]
        used = next(iter(fitting or of_kind), None)
        self._spare = [spare for spare in self._spare if spare is not used]
        return fitting[0] if fitting else like.new_empty(count, like.shape[1])


class _Arrivals:
    """Call a function when the backward pass has computed all gradients of a group.

    The first step shows which gradient of a group is computed last, and which groups have a gradient that is computed
    in several parts. The latter groups are never reported.

    Args:
        groups: groups to report.
        arrived: function called with a group when its gradients are complete.
    """

    def __init__(self, groups: Sequence[_Group], arrived: Callable[[_Group], None]) -> None:
        self._arrived = arrived
        self._last: dict[_Group, torch.Tensor] = {}
        self._unsuitable: set[_Group] = set()
        self._seen: set[int] = set()
        self._hooks = [
            _hooked(parameter, partial(self._see, group))
            for group in groups
            if group.trained
            for parameter in group.parameters
        ]

    def _see(self, group: _Group, parameter: torch.Tensor) -> None:
        if id(parameter) in self._seen:
            self._unsuitable.add(group)
        self._seen.add(id(parameter))
        self._last[group] = parameter

    def _tell(self, group: _Group, parameter: torch.Tensor) -> None:
        self._arrived(group)

    def end_micro_batch(self) -> None:
        self._seen.clear()

    def settle(self) -> None:
        """End the first step. From now on, hook only the last gradient of each group."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            _hooked(parameter, partial(self._tell, group))
            for group, parameter in self._last.items()
            if group not in self._unsuitable
        ]


def _hooked(parameter: Any, hook: Callable[[torch.Tensor], None]) -> Any:
    """Call `hook` whenever a gradient is added to `parameter.grad`. Return the hook's handle."""
    return parameter.register_post_accumulate_grad_hook(hook)


def _taken(parameters: Sequence[torch.Tensor]) -> Gradients | None:
    """Take the gradients of a micro-batch from the parameters. Return None if no parameter has a gradient."""
    gradients = [parameter.grad for parameter in parameters]
    if all(gradient is None for gradient in gradients):
        return None
    for parameter in parameters:
        parameter.grad = None
    return gradients


def _add(left: Gradients | None, right: Gradients | None) -> Gradients | None:
    """Add two lists of gradients in place. A missing gradient is treated as 0, as in an exchange."""
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


def _holds(tree: TreeSum[Gradients | None]) -> bool:
    return any(value is not None for value in tree.values)


def _copy_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair to the first."""
    if pairs:
        torch._foreach_copy_([into for into, _ in pairs], [values for _, values in pairs])


def _fits(gradient: torch.Tensor | None, parameter: torch.Tensor) -> bool:
    """Check that a gradient has the strides of its parameter, because norms depend on the strides."""
    return gradient is not None and gradient.stride() == parameter.stride()
