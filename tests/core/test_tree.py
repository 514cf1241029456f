"""Sums in an aligned tree: the same bits for every division of the leaves among ranks."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnmesh.core.tree import Node, TreeSum, cover, total


def leaves_of(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(5, generator=generator) * 10.0 ** (i % 7) for i in range(count)]


def expected(values: list[torch.Tensor]) -> torch.Tensor:
    """The tree from its definition: pairs of neighbors, level by level; a last one without a neighbor stays."""
    while len(values) > 1:
        values = [sum(values[i + 1 : i + 2], values[i]) for i in range(0, len(values), 2)]
    return values[0]


@given(st.integers(0, 200), st.integers(0, 200))
def test_a_cover_has_every_leaf_once_in_aligned_nodes_none_of_which_could_be_joined(start, count):
    nodes = cover(range(start, start + count))
    assert [leaf for node in nodes for leaf in node.leaves] == list(range(start, start + count))
    assert not any(a.parent == b.parent and a.level == b.level for a, b in pairwise(nodes))
    assert all(node.leaves.start % len(node.leaves) == 0 for node in nodes)


@given(st.integers(1, 40), st.integers(1, 9), st.randoms(use_true_random=False))
def test_the_sum_has_the_same_bits_for_every_division_among_ranks(count, world, random_: random.Random):
    values = leaves_of(count)
    cuts = sorted(random_.choices(range(count + 1), k=world - 1))
    nodes: dict[Node, torch.Tensor] = {}
    for start, stop in zip([0, *cuts], [*cuts, count], strict=True):
        own = TreeSum()
        leaves = range(start, stop)
        for leaf in leaves if random_.random() < 0.5 else reversed(leaves):
            own.add(leaf, values[leaf].clone())
        assert len(own.nodes) <= 2 * count.bit_length()
        nodes |= own.covered(range(start, stop))
    assert torch.equal(total(nodes), expected(values))


def test_leaves_that_nobody_has_count_as_zero():
    values = leaves_of(11)
    own = TreeSum()
    for leaf in (1, 2, 3, 6, 10):
        own.add(leaf, values[leaf].clone())
    zero = torch.zeros(5)
    whole = expected([value if leaf in (1, 2, 3, 6, 10) else zero for leaf, value in enumerate(values)])
    assert torch.equal(total(own.covered(range(11))), whole)
    assert Node(2, 1) in own.covered(range(4, 11))  # one node for leaves 4 to 7, though only one of these arrived


def test_another_order_has_other_bits():
    values = leaves_of(8)
    assert not torch.equal(sum(values[1:], values[0]), expected(values))  # else the tests above would prove nothing


def test_a_sum_of_nothing_is_refused():
    with pytest.raises(ValueError, match="nodes must not be empty"):
        total({})
