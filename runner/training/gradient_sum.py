"""The gradients of one optimizer, added up over the micro-batches of a step and over the ranks, in the order of a tree.

They come in buckets: parameters whose gradients the backward pass computes one after the other. Once it has all those
of a bucket, they are added to the sums, while they are in the processor's cache. In a rank's last micro-batch they are
sent to the other ranks as well, while the backward pass computes the next ones.
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
from runner.training.parallel import alike
from runner.training.tree import Node, TreeSum

ADDED = 1 << 18
"""Elements of a bucket on one rank: they fit in a processor's cache. A larger parameter is a bucket by itself."""
SENT = 1 << 23
"""Elements of a bucket on several ranks: smaller ones take longer to send, altogether, than is saved by beginning."""
IN_FLIGHT = 3
"""Buckets whose exchange has begun and not ended."""

AT_ONCE = 1 << 20
"""Elements that a rank gets at most of a bucket that every rank adds up as a whole, unless that is no more anyway."""

Gradients = list[torch.Tensor | None]


class _Bucket:
    """Parameters whose gradients are added up and sent together.

    Args:
        parameters: of one type, on one device.
        tag: of its messages; the same on every rank.
        trained: whether they require gradients when training begins.
    """

    def __init__(self, parameters: list[torch.Tensor], tag: int, trained: bool) -> None:
        self.parameters = parameters
        self.tag = tag
        self.trained = trained
        self.sizes = [parameter.numel() for parameter in parameters]
        self.passes: list[TreeSum[Gradients | None]] = []
        self.pushed = False  # those of the present micro-batch
        self.rows = parameters[0].new_empty(0, 0)
        self._views: list[list[torch.Tensor]] = []

    def complete(self, nodes: Sequence[Node]) -> bool:
        """Whether it is trained, and has the sums of `nodes`."""
        return self.trained and self.passes[0].nodes == nodes

    def lay_out(self, parts: Sequence[Gradients | None], ranks: int) -> int:
        """Copy the gradients of this rank's nodes to `rows`, one row each; there is one at least, for the sum.

        A row ends with a 1 for each parameter that has a gradient, which tells a gradient of 0 from none at all.

        Returns:
            The width of a slice, of which a row has one per rank.
        """
        width = -(-(sum(self.sizes) + len(self.sizes)) // ranks)
        count = max(len(parts), 1)
        if len(self.rows) != count:  # kept from step to step: the system clears memory that it gives, each time
            self.rows = self.parameters[0].new_zeros(count, width * ranks)
            self._views = [
                [part.view_as(p) for part, p in zip(torch.split(values, self.sizes), self.parameters, strict=True)]
                for values in self.rows[:, : sum(self.sizes)]
            ]
        for row, views, gradients in zip(self.rows, self._views, parts, strict=False):
            known = gradients or [None] * len(views)
            _copy([(view, gradient) for view, gradient in zip(views, known, strict=True) if gradient is not None])
            marks = row[sum(self.sizes) :][: len(views)].fill_(1)
            for place, (view, gradient) in enumerate(zip(views, known, strict=True)):
                if gradient is None:
                    view.zero_()
                    marks[place] = 0
        return width

    def found(self, parts: Sequence[Gradients | None]) -> Gradients:
        """The sums of all ranks, from the first row, in the memory of the first of this rank's `parts`."""
        marks = self.rows[0, sum(self.sizes) :][: len(self.sizes)].tolist()
        own = (parts[0] if parts else None) or [None] * len(self.sizes)
        into: Gradients = [
            None if not mark else gradient if _fits(gradient, parameter) else torch.empty_like(parameter)
            for parameter, gradient, mark in zip(self.parameters, own, marks, strict=True)
        ]
        _copy([(gradient, view) for gradient, view in zip(into, self._views[0], strict=True) if gradient is not None])
        return into


class GradientSum:
    """Adds up the gradients of `parameters` over the micro-batches of a step, which are the leaves of a tree.

    Args:
        parameters: of one optimizer.
        leaves: how many there are.
        nodes: by rank, the nodes that it can add up by itself.
        world: the ranks.
        tags: numbers for messages, taken by all ranks in the same order.
        early: whether a gradient is complete once the backward pass has computed it, and no other sum is exchanged
            before this one, so that a bucket may be sent before others are known.
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
        self._world = world
        most = ADDED if world.size == 1 else SENT
        self._buckets = [
            _Bucket(group, next(tags), trained)
            for trained in (True, False)
            for group in alike([each for each in reversed(parameters) if each.requires_grad == trained], most)
        ]
        self._leaf: int | None = None  # present
        self._passes = 0
        self._begun: deque[Iterator[None]] = deque()
        self._next = 0  # the bucket whose exchange begins next
        self._spare: list[torch.Tensor] = []  # memory for what other ranks send
        self._early = early
        self._first_step = True
        gains = len(self._buckets) > 1 and max(leaves, world.size) > 1
        self._arrivals = _Arrivals(self._buckets, self._arrived) if early and gains else None

    def clear(self) -> None:
        """Forget all sums."""
        self._passes = 0
        for bucket in self._buckets:
            bucket.passes.clear()

    def begin_pass(self) -> None:
        """Begin a sum over all micro-batches, of which this rank has the next ones in their order."""
        self._passes += 1
        for bucket in self._buckets:
            bucket.passes.append(TreeSum(self._leaves, _add))

    def begin_micro_batch(self, leaf: int) -> None:
        """Before the gradients of a micro-batch are computed."""
        self._leaf = leaf
        for bucket in self._buckets:
            bucket.pushed = False

    def end_micro_batch(self) -> None:
        """Take the gradients of a micro-batch, which the parameters have no longer.

        Raises:
            UserError: some of a parameter came after it had been added.
        """
        for bucket in self._buckets:
            if not bucket.pushed:
                self._push(bucket)
            elif any(parameter.grad is not None for parameter in bucket.parameters):
                raise UserError(
                    "the backward pass computed the gradient of a parameter in several parts, as it does for shared "
                    "weights in reentrant checkpoints, and had not in the first step: pass use_reentrant=False to "
                    "torch.utils.checkpoint, or set train.rank_invariant=false"
                )
        if self._arrivals is not None:
            self._arrivals.end_micro_batch()
        self._leaf = None

    def end_first_step(self) -> None:
        """From now on gradients are taken and sent as they come."""
        self._first_step = False
        if self._arrivals is not None:
            self._arrivals.settle()

    def whole(self) -> bool:
        """Whether all gradients of this rank were taken in micro-batches, and all these micro-batches made."""
        own = self._nodes[self._world.rank]
        return all(
            all(tree.nodes == own for tree in bucket.passes)
            and all(parameter.grad is None for parameter in bucket.parameters)
            for bucket in self._buckets
        )

    def holds_gradients(self) -> bool:
        """Whether this rank has taken any that are in no sum yet."""
        trees = (tree for bucket in self._buckets for tree in bucket.passes)
        return any(value is not None for tree in trees for value in tree.values)

    def give_back(self) -> None:
        """Give the parameters their sums over all micro-batches, and over all passes.

        Raises:
            PeerError: another rank has ended or does not answer.
        """
        total: list[Gradients] | None = None
        for number in range(self._passes):
            found = self._of_all_ranks(number)
            total = found if total is None else [_add(*both) or [] for both in zip(total, found, strict=True)]
        self.clear()
        for bucket, gradients in zip(self._buckets, total or (), strict=False):
            for parameter, gradient in zip(bucket.parameters, gradients, strict=True):
                fits = gradient is None or _fits(gradient, parameter)
                parameter.grad = gradient if fits else torch.empty_like(parameter).copy_(cast(torch.Tensor, gradient))

    def _arrived(self, bucket: _Bucket) -> None:
        """The gradient of a bucket that comes last has been computed."""
        if self._leaf is None or bucket.pushed or any(parameter.grad is None for parameter in bucket.parameters):
            return
        self._push(bucket)

    def _push(self, bucket: _Bucket) -> None:
        """Add the gradients of the present micro-batch, and send the sums that are complete."""
        assert self._leaf is not None
        bucket.pushed = True
        bucket.passes[-1].push(Node(0, self._leaf), _taken(bucket.parameters))
        if self._world.size > 1 and self._early and not self._first_step:
            own = self._nodes[self._world.rank]
            while self._next < len(self._buckets) and self._buckets[self._next].complete(own):
                self._begin_exchange(0)

    def _of_all_ranks(self, number: int) -> list[Gradients]:
        """The sums of a pass, by bucket."""
        if self._world.size == 1:
            sums = ((bucket, bucket.passes[number].total()) for bucket in self._buckets)
            return [gradients or [None] * len(bucket.parameters) for bucket, gradients in sums]
        exchanged = [bucket.trained for bucket in self._buckets]
        if not all(exchanged):  # frozen parameters: some may train later, or in a part of the step
            found = [any(value is not None for value in bucket.passes[number].values) for bucket in self._buckets]
            anywhere = self._world.sum(torch.tensor(found, dtype=torch.int32)).tolist()
            exchanged = [bool(one or other) for one, other in zip(exchanged, anywhere, strict=True)]
        while self._next < len(self._buckets):
            if exchanged[self._next]:
                self._begin_exchange(number)
            else:
                self._next += 1
        while self._begun:
            self._advance()
        self._next = 0
        return [
            bucket.found(bucket.passes[number].values) if sent else [None] * len(bucket.parameters)
            for bucket, sent in zip(self._buckets, exchanged, strict=True)
        ]

    def _begin_exchange(self, number: int) -> None:
        """Begin that of the next bucket. They begin and advance in the same order on every rank, as NCCL needs."""
        bucket = self._buckets[self._next]
        exchange = self._exchange(bucket, bucket.passes[number].values)
        next(exchange)
        self._begun.append(exchange)
        self._next += 1
        while len(self._begun) > IN_FLIGHT:
            self._advance()

    def _advance(self) -> None:
        """Let the oldest exchange continue; it is the last one to end if it has another part."""
        exchange = self._begun.popleft()
        if next(exchange, True) is None:
            self._begun.append(exchange)

    def _exchange(self, bucket: _Bucket, parts: Sequence[Gradients | None]) -> Iterator[None]:
        """Add up a bucket; yields while it waits.

        Each rank adds up one slice, and then sends the sum to all. A small bucket, and any that is as little to send
        in this way, is added up as a whole by every rank, which saves the second exchange.

        Args:
            bucket: whose first row gets the sum.
            parts: of this rank, by node.
        """
        rank, size = self._world.rank, self._world.size
        width = bucket.lay_out(parts, size)
        rows = bucket.rows.view(len(bucket.rows), size, width)
        nodes = sum(map(len, self._nodes))
        at_once = nodes * width * size <= AT_ONCE or nodes == size == 2
        others = [other for other in range(size) if other != rank]
        mine, theirs = (bucket.rows, [bucket.rows] * size) if at_once else (rows[:, rank], list(rows.unbind(1)))
        memory = self._memory(mine, sum(len(self._nodes[other]) for other in others))
        received = iter(memory)
        values = {node: next(received)[: mine.shape[1]] for other in others for node in self._nodes[other]}
        values |= zip(self._nodes[rank], mine, strict=False)
        wait = self._world.exchange(
            [(other, values[node]) for other in others for node in self._nodes[other]],
            [(other, row) for other in others for row in theirs[other][: len(parts)]],
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
        """Memory of any values for `count` rows, each for those of `like` at least."""
        of_kind = [spare for spare in self._spare if (spare.dtype, spare.device) == (like.dtype, like.device)]
        fitting = [spare for spare in of_kind if spare.shape[1] >= like.shape[1]]
        used = next(iter(fitting or of_kind), None)
        self._spare = [spare for spare in self._spare if spare is not used]
        return fitting[0] if fitting else like.new_empty(count, like.shape[1])


class _Arrivals:
    """Tells when the backward pass has computed all gradients of a bucket.

    In the first step it finds out which comes last, and in which buckets a gradient comes in several parts: of these it
    tells nothing.

    Args:
        buckets: of which it tells.
        arrived: is called with a bucket.
    """

    def __init__(self, buckets: Sequence[_Bucket], arrived: Callable[[_Bucket], None]) -> None:
        self._arrived = arrived
        self._last: dict[_Bucket, torch.Tensor] = {}
        self._unsuitable: set[_Bucket] = set()
        self._seen: set[int] = set()
        self._hooks = [
            _hooked(parameter, partial(self._see, bucket))
            for bucket in buckets
            if bucket.trained
            for parameter in bucket.parameters
        ]

    def _see(self, bucket: _Bucket, parameter: torch.Tensor) -> None:
        if id(parameter) in self._seen:
            self._unsuitable.add(bucket)
        self._seen.add(id(parameter))
        self._last[bucket] = parameter

    def _tell(self, bucket: _Bucket, parameter: torch.Tensor) -> None:
        self._arrived(bucket)

    def end_micro_batch(self) -> None:
        self._seen.clear()

    def settle(self) -> None:
        """The first step is over."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            _hooked(parameter, partial(self._tell, bucket))
            for bucket, parameter in self._last.items()
            if bucket not in self._unsuitable
        ]


def _hooked(parameter: Any, hook: Callable[[torch.Tensor], None]) -> Any:
    """The handle of a hook that is called when a gradient was added to `parameter.grad`."""
    return parameter.register_post_accumulate_grad_hook(hook)


def _taken(parameters: Sequence[torch.Tensor]) -> Gradients | None:
    """The gradients of a micro-batch, which the parameters have no longer; None if there are none at all."""
    gradients = [parameter.grad for parameter in parameters]
    if all(gradient is None for gradient in gradients):
        return None
    for parameter in parameters:
        parameter.grad = None
    return gradients


def _add(left: Gradients | None, right: Gradients | None) -> Gradients | None:
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


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy the second tensor of each pair into the first."""
    if pairs:
        torch._foreach_copy_([into for into, _ in pairs], [values for _, values in pairs])


def _fits(gradient: torch.Tensor | None, parameter: torch.Tensor) -> bool:
    """Whether it has the strides of its parameter, which the backward pass gives it; a norm depends on them."""
    return gradient is not None and gradient.stride() == parameter.stride()
