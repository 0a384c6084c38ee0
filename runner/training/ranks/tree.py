"""Sum values of a step's micro-batches in a fixed order, regardless of which rank computed them.

Floating-point addition is not associative, so the order affects the result. The order here is a binary tree over the
micro-batch numbers. Node (level, number) is the sum of the existing micro-batches from number * 2^level up to, but not
including, (number + 1) * 2^level. A rank with a range of micro-batches sums the nodes in its range, at most two per
level. A rank that has received the nodes of all ranks then sums these nodes. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Node(NamedTuple):
    """A node of the tree, given by its level above the leaves and its number within the level."""

    level: int
    number: int


class TreeSum(Generic[T]):
    """Sum values of adjacent nodes, which are pushed from left to right.

    Args:
        leaves: number of leaves of the complete tree, at least 1.
        add: function that returns the sum of (left, right). It may change and return `left`.
    """

    def __init__(self, leaves: int, add: Callable[[T, T], T]) -> None:
        self._leaves = leaves
        self._add = add
        self._found: list[tuple[Node, T]] = []

    def push(self, node: Node, value: T) -> None:
        """Add the value of the next node, directly to the right of the nodes pushed so far."""
        self._found.append((node, value))
        while self._grow():
            pass

    def _grow(self) -> bool:
        """Replace the last node with its parent if it completes the parent, and return True then."""
        (level, number), value = self._found[-1]
        above = Node(level + 1, number // 2)
        if number % 2 and len(self._found) > 1 and self._found[-2][0] == (level, number - 1):
            self._found.pop()
            self._found[-1] = above, self._add(self._found[-1][1], value)
            return True
        if number and not number % 2 and (number + 1) << level >= self._leaves:  # the node has no right sibling
            self._found[-1] = above, value
            return True
        return False

    @property
    def nodes(self) -> list[Node]:
        """Return the largest complete nodes, from left to right."""
        return [node for node, _ in self._found]

    @property
    def values(self) -> list[T]:
        """Return the sums of `nodes`."""
        return [value for _, value in self._found]

    def replace(self, place: int, value: T) -> None:
        """Replace one of `values`."""
        self._found[place] = self._found[place][0], value

    def total(self) -> T:
        """Return the sum of all leaves. Call this after every leaf was pushed."""
        ((_, value),) = self._found
        return value


def nodes_of(share: range, leaves: int) -> list[Node]:
    """Return the largest nodes within a range of leaves."""
    tree = TreeSum[None](leaves, lambda left, right: None)
    for leaf in share:
        tree.push(Node(0, leaf), None)
    return tree.nodes
