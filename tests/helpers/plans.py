"""Masks, layouts and shards that plans are walked through with."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import strategies as st

from attnmesh.core.layouts import Balanced, Contiguous, Joint, Layout, Striped, Zigzag
from attnmesh.core.masks import Causal, Documents, Full, Global, Mask, PerSequence, SlidingWindow
from attnmesh.plan.shards import Shards, shards
from helpers.cases import first, in_turn
from helpers.masks import batch_masks

LAYOUTS = [Contiguous(), Zigzag(), Striped()]
LONG, WIDE = 131072, 32
EVEN = {n: Causal() & Documents([LONG // n] * n) for n in (32, 256, 1024)}


def split(length: int, *shares: int) -> Documents:
    """Documents of about `shares` of a sequence, adding up to its length."""
    edges = [length * sum(shares[:i]) // sum(shares) for i in range(len(shares) + 1)]
    return Documents(b - a for a, b in pairwise(edges))


MASKS = {
    "full": lambda length: Full(),
    "causal": lambda length: Causal(),
    "window": lambda length: SlidingWindow(3),
    "window to both sides": lambda length: SlidingWindow(2, 4),
    "itself": lambda length: SlidingWindow(0),
    "many documents": lambda length: split(length, *[2, 1, 3] * 4),
    "all three": lambda length: Causal() & SlidingWindow(6, 3) & split(length, 2, 0, 5),
    "window and global": lambda length: Causal() & (Global(2) | SlidingWindow(3)),
    "a batch": lambda length: PerSequence([Causal(), Global(1) | SlidingWindow(1)]),
}

layouts_and_masks = pytest.mark.parametrize(
    ("layout", "mask_for"), first(4, in_turn(LAYOUTS, list(MASKS.values())[::-1])), ids=list(MASKS)[::-1]
)


def layouts(mask: Mask, length: int) -> st.SearchStrategy[Layout]:
    """All kinds of layouts of one sequence."""
    two = st.sampled_from([Contiguous(), Zigzag(), Striped()])
    joint = st.integers(0, length).flatmap(lambda n: st.builds(lambda a, b: Joint((n, a), (length - n, b)), two, two))
    return st.one_of(two, st.just(Zigzag(2)), st.just(Balanced(mask)), joint)


@st.composite
def problems(draw, ranks=(1, 2, 3, 4, 5, 6, 7, 8)) -> Shards:
    """Shards under a random mask."""
    length, world = draw(st.integers(0, 32)), draw(st.sampled_from(ranks))
    mask = draw(batch_masks(length, draw(st.integers(1, 2))))
    return shards(mask, draw(layouts(mask, length)), length, world)
