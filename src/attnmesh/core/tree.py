"""Sums over positions whose bits do not depend on who adds which positions.

A leaf is a fixed number of consecutive positions, aligned to multiples of it. Leaves are added in a binary tree
that is aligned in the same way: node (level, index) is the sum of leaves `index << level` to `(index + 1) << level`. A
rank adds the leaves that it has to the largest nodes that lie within them, and whoever has the nodes of all ranks adds
these to the whole. Every addition has the same two operands at any number of ranks, so every result has the same bits.

A node that nobody has is zero: it is left out, which changes no bit of a sum but the sign of a zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar


class Sum(Protocol):
    """A tensor, or what is added like one."""

    def add_(self, other: Any, /) -> Any:
        """Add in place, and return the sum."""


T = TypeVar("T", bound=Sum)


@dataclass(frozen=True, slots=True)
class Node:
    """The leaves `index << level` to `(index + 1) << level`."""

    level: int
    index: int

    @property
    def parent(self) -> Node:
        """The node of twice the size that contains this one."""
        return Node(self.level + 1, self.index >> 1)

    @property
    def leaves(self) -> range:
        """The leaves of this node."""
        return range(self.index << self.level, (self.index + 1) << self.level)


def cover(leaves: range) -> list[Node]:
    """The fewest nodes that together have these consecutive leaves, in ascending order.

    Examples:
        >>> cover(range(3, 8))
        [Node(level=0, index=3), Node(level=2, index=1)]
    """
    nodes, start = [], leaves.start
    while start < leaves.stop:
        level = (leaves.stop - start).bit_length() - 1
        if start:
            level = min(level, (start & -start).bit_length() - 1)
        nodes.append(Node(level, start >> level))
        start += 1 << level
    return nodes


class TreeSum(Generic[T]):
    """The sum of leaves that arrive in any order.

    In ascending or descending order it holds one value per level of the tree at most, and one per gap between leaves.
    """

    def __init__(self) -> None:
        self.nodes: dict[Node, T] = {}

    def add(self, leaf: int, value: T) -> None:
        """Add a leaf. The value belongs to the sum from here on."""
        node, nodes = Node(0, leaf), self.nodes
        while (neighbor := nodes.pop(Node(node.level, node.index ^ 1), None)) is not None:
            value, node = neighbor.add_(value), node.parent  # a + b has the bits of b + a
        nodes[node] = value

    def covered(self, leaves: range) -> dict[Node, T]:
        """The sums of the nodes that cover `leaves`, without those that have no leaf. All leaves must have arrived."""
        found = {}
        for node in cover(leaves):
            parts = {part: x for part, x in self.nodes.items() if part.leaves.start in node.leaves}
            if parts:
                found[node] = total(parts, node)
        return found


def total(nodes: Mapping[Node, T], root: Node | None = None) -> T:
    """The sum of nodes that do not overlap: nodes of all ranks, or all that lie within `root`. Values may change."""
    level, found = 0, dict(nodes)
    if not found:
        raise ValueError("nodes must not be empty")
    while len(found) > 1 or (root is not None and level < root.level):
        found = _next_level(level, found.items())
        level += 1
    return next(iter(found.values()))


def _next_level(level: int, nodes: Iterable[tuple[Node, T]]) -> dict[Node, T]:
    found: dict[Node, T] = {}
    for node, value in sorted(nodes, key=lambda item: item[0].leaves.start):
        if node.level > level:
            found[node] = value
        elif (left := found.get(node.parent)) is not None:
            found[node.parent] = left.add_(value)
        else:
            found[node.parent] = value
    return found
