"""Sums over the micro-batches of a step whose additions have a fixed order, whichever rank has which micro-batches.

Floating-point addition is not associative, so the order is part of the result. Here it is that of a binary tree over
the numbers of the micro-batches: node (level, number) adds those from number * 2^level to below (number + 1) * 2^level,
as far as there are any. A rank with a range of them adds up the nodes that lie in its range, at most two in each level,
and whoever has the nodes of all ranks adds these. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """A part of the tree, by its level above the leaves and its number in that level."""

    level: int
    number: int


class TreeSum(Generic[T]):
    """Adds up values of neighbouring nodes, which are pushed from left to right.

    Args:
        leaves: of the whole tree, 1 or more.
        add: (left, right) -> their sum; may change and return `left`.
    """

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        self._leaves = leaves
        self._add = add
        self._found: list[tuple[Node, T]] = []

    def push(self, node: Node, value: T) -> None:
        """Add the value of the node that follows those pushed so far."""
        self._found.append((node, value))
        while self._grow():
            pass

    def _grow(self) -> bool:
        """Replace the last node by the one above it, if that has all its parts; whether it has."""
        (level, number), value = self._found[-1]
        above = Node(level + 1, number // 2)
        if number % 2 and len(self._found) > 1 and self._found[-2][0] == (level, number - 1):
            self._found.pop()
            self._found[-1] = above, self._add(self._found[-1][1], value)
            return True
        if number and not number % 2 and (number + 1) << level >= self._leaves:  # there is nothing to its right
            self._found[-1] = above, value
            return True
        return False

    @property
    def nodes(self) -> list[Node]:
        """The largest nodes that are complete, from left to right."""
        return [node for node, _ in self._found]

    @property
    def values(self) -> list[T]:
        """Their sums."""
        return [value for _, value in self._found]

    def replace(self, place: int, value: T) -> None:
        """Put another value in the place of one of `values`."""
        self._found[place] = self._found[place][0], value

    def total(self) -> T:
        """The sum of all leaves, every one of which was pushed."""
        ((_, value),) = self._found
        return value


def nodes_of(share: range, leaves: int) -> list[Node]:
    """The largest nodes within a range of leaves."""
    tree = TreeSum[None](leaves, lambda left, right: None)
    for leaf in share:
        tree.push(Node(0, leaf), None)
    return tree.nodes
