"""Random masks from the whole grammar, and the pairs that plans compute, for brute force."""

from __future__ import annotations

from functools import reduce
from itertools import pairwise
from operator import and_, or_

import torch
from hypothesis import strategies as st
from torch import Tensor

from attnmesh.core import ranges
from attnmesh.core.masks import (
    SLICE_KINDS,
    BlockCausal,
    Causal,
    Chunked,
    Documents,
    Full,
    Global,
    Mask,
    Padding,
    PerSequence,
    Prefix,
    Slices,
    SlidingWindow,
)
from attnmesh.core.visibility import Kind, Patch

CPU = torch.device("cpu")


@st.composite
def documents(draw, length: int) -> Documents:
    edges = sorted([0, *draw(st.lists(st.integers(0, length), max_size=5)), length])
    lengths = [b - a for a, b in pairwise(edges)]
    return Documents(lengths, draw(st.none() | st.tuples(*(st.integers(0, n) for n in lengths))))


@st.composite
def slices(draw, length: int) -> Slices:
    def some_range() -> range:
        start = draw(st.integers(0, length - 1))
        return range(start, draw(st.integers(start + 1, length)))

    count = draw(st.integers(0, 4)) if length else 0
    return Slices([(some_range(), some_range(), draw(st.sampled_from(SLICE_KINDS))) for _ in range(count)])


def simple_masks(length: int) -> st.SearchStrategy[Mask]:
    """Masks that `&` and `|` combine."""
    few, some = st.integers(0, 6), st.integers(1, 12)
    return st.one_of(
        st.sampled_from([Full(), Causal()]), st.builds(SlidingWindow, st.integers(0, 12), few),
        documents(length), st.builds(Prefix, st.integers(0, length)), st.builds(Chunked, some),
        st.builds(BlockCausal, some), st.builds(Global, few, st.booleans()), slices(length),
    )  # fmt: skip


@st.composite
def masks(draw, length: int) -> Mask:
    """The mask of one sequence: up to three unions of up to two masks, intersected."""
    unions = [
        reduce(or_, draw(st.lists(simple_masks(length), min_size=1, max_size=2)))
        for _ in range(draw(st.integers(1, 3)))
    ]
    return reduce(and_, unions)


def falling_slices(length: int) -> Slices:
    """One key per query, from the last to the first: no two queries are in one chain."""
    return Slices([((i, i + 1), (length - 1 - i, length - i), "full") for i in range(length)])


def checkered_slices(tiles: int, size: int) -> Slices:
    """Square tiles of queries and keys, full and causal in turn: MagiAttention's `deterministic_sample`."""
    spans = [(i * size, (i + 1) * size) for i in range(tiles)]
    return Slices([(q, k, ("full", "causal")[i % 2]) for q in spans for i, k in enumerate(spans)])


@st.composite
def batch_masks(draw, length: int, batch: int) -> Mask:
    """A mask for a batch: one for all sequences, one for each, or padding."""
    lengths = st.lists(st.integers(0, length), min_size=batch, max_size=batch)
    of_each = st.lists(masks(length), min_size=batch, max_size=batch)
    padding = st.builds(Padding, lengths, st.sampled_from(["left", "right"]), st.just(length))
    chosen = draw(st.one_of(masks(length), st.builds(PerSequence, of_each), padding))
    return chosen & draw(masks(length)) if draw(st.booleans()) else chosen


def covered(patch: Patch) -> Tensor:
    """How often the blocks of a patch contain each pair, [sequences or 1, q, k]."""
    batch = patch.mask.sequences
    count = torch.zeros(1 if batch is None else batch, ranges.size(patch.q), ranges.size(patch.k), dtype=torch.int8)
    bounds = patch.bounds(CPU)
    for block in patch.blocks:
        assert block.q.step == block.k.step == 1
        assert 0 <= block.q.start < block.q.stop <= count.shape[1]
        assert 0 <= block.k.start < block.k.stop <= count.shape[2]
        q, k = slice(block.q.start, block.q.stop), slice(block.k.start, block.k.stop)
        for b in range(count.shape[0]) if block.sequences is None else block.sequences:
            target = count[b, q, k]
            if block.kind is Kind.FULL:
                target += 1
            elif block.kind is Kind.CAUSAL:
                assert len(block.q) == len(block.k)
                target += torch.ones_like(target).tril()
            else:
                first, end = (bound[block.part, b, q, None] for bound in bounds)
                keys = torch.arange(block.k.start, block.k.stop)
                target += (first <= keys) & (keys < end)
    return count


def visible_pairs(mask: Mask, q: ranges.Ranges, k: ranges.Ranges) -> Tensor:
    """The definition of a mask over some positions, [sequences or 1, q, k]."""
    visible = mask.visible(ranges.as_tensor(q)[:, None], ranges.as_tensor(k))
    return visible if mask.sequences is not None else visible[None]
