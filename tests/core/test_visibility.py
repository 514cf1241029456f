"""Patches cut into blocks: every visible pair exactly once, nothing else, in the shapes fused kernels serve."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmesh.core import ranges
from attnmesh.core.layouts import Contiguous, Striped, Zigzag
from attnmesh.core.masks import Causal, Documents, Full, Mask, SlidingWindow
from attnmesh.core.visibility import Block, Kind, Patch, bounds_of, key_hull
from helpers.cases import first, in_turn
from helpers.masks import batch_masks, covered, visible_pairs

CPU = torch.device("cpu")
LAYOUTS = [Contiguous(), Zigzag(), Striped()]

every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def check(patch: Patch) -> None:
    """All that is promised of a patch, against the definition of its mask."""
    visible = visible_pairs(patch.mask, patch.q, patch.k)
    assert torch.equal(covered(patch), visible.to(torch.int8)), patch
    assert patch.pairs == int(visible.sum()), patch

    first, end = patch.bounds(CPU)
    assert first.dtype == end.dtype == torch.int32
    assert first.shape == end.shape == (first.shape[0], visible.shape[0], ranges.size(patch.q))
    assert (first.diff() >= 0).all(), patch
    assert (end.diff() >= 0).all(), patch
    keys = torch.arange(ranges.size(patch.k))
    count = ((first[..., None] <= keys) & (keys < end[..., None])).sum(0)
    assert torch.equal(count, visible.long()), patch

    rows, unseen = patch.unseen(CPU)
    nobody = ~visible.any(2) if rows is None else rows
    assert torch.equal(nobody, ~visible.any(2)), patch
    reached = key_hull(patch.blocks)
    inside = (keys >= reached.start) & (keys < reached.stop)
    expected = ~visible.any(1) & inside
    assert torch.equal(torch.zeros_like(expected) if unseen is None else unseen, expected), patch

    needed = [row for rows in patch.seen for row in rows]
    assert needed == sorted(set(needed))
    assert {*keys[visible.any(1).any(0)].tolist()} <= {*needed}, patch


def split(length: int, *shares: int) -> Documents:
    """Documents of about `shares` of a sequence, adding up to its length."""
    edges = [length * sum(shares[:i]) // sum(shares) for i in range(len(shares) + 1)]
    return Documents(b - a for a, b in pairwise(edges))


def masks_for(length: int) -> list[Mask]:
    return [
        Full(),
        Causal(),
        SlidingWindow(3),
        SlidingWindow(2, 2),
        SlidingWindow(0, 5),
        split(length, 3, 0, 1, 4, 2),
        Documents([1] * length),
        Causal() & split(length, 5, 2, 0, 3),
        Causal() & SlidingWindow(4, 1),
        SlidingWindow(4, 2) & split(length, 1, 1, 3),
        Causal() & SlidingWindow(6, 3) & split(length, 2, 5),
    ]


@pytest.mark.parametrize(("layout", "world"), first(1, in_turn(LAYOUTS, [2, 3, 5])), ids=str)
def test_blocks_hold_every_visible_pair_of_every_two_ranks_exactly_once(layout, world):
    for length in (1, 4, 13, 31):
        for mask in masks_for(length):
            for rank in range(world):
                for other in range(world):
                    check(Patch(mask, layout.ranges(length, world, rank), layout.ranges(length, world, other)))


@pytest.mark.parametrize("mask", first(1, masks_for(10)), ids=str)
def test_blocks_of_any_two_runs_are_right(mask):
    runs = [range(start, stop, step) for step in (1, 2, 3) for start in (0, 1, 4) for stop in (5, 10)]
    for q in runs:
        for k in runs:
            check(Patch(mask, (q,), (k,)))


@st.composite
def some_spans(draw, length: int) -> ranges.Ranges:
    """Ascending runs inside 0..length-1, any steps."""
    made, at = [], draw(st.integers(0, 4))
    while at < length:
        step = draw(st.integers(1, 4))
        run = range(at, min(length, at + step * draw(st.integers(1, 8))), step)
        made.append(run)
        at = run[-1] + draw(st.integers(1, 10))
    return tuple(made)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_blocks_of_any_mask_over_any_spans_are_right(data):
    check_any_patch(data)


@pytest.mark.sweep
@settings(max_examples=200, deadline=None)
@given(st.data())
def test_blocks_of_many_masks(data):
    check_any_patch(data)


def check_any_patch(data):
    length = data.draw(st.integers(1, 40))
    q, k = data.draw(some_spans(length)), data.draw(some_spans(length))
    check(Patch(data.draw(batch_masks(length, 3)), q, data.draw(st.sampled_from([q, k]))))


def test_a_patch_without_queries_or_without_keys_has_no_blocks():
    for q, k in (((), (range(4),)), ((range(4),), ()), ((), ())):
        patch = Patch(Causal(), q, k)
        assert patch.blocks == ()
        assert patch.pairs == 0
        assert [x.tolist() for x in patch.bounds(CPU)] == [[[[0] * ranges.size(q)]]] * 2


def test_bounds_take_positions_that_are_no_spans():
    q, k = torch.tensor([1, 4, 4, 9]), torch.tensor([0, 2, 3, 7, 8, 9])
    first, end = bounds_of(SlidingWindow(2), q, k)
    assert first.tolist() == [0, 1, 1, 3]
    assert end.tolist() == [1, 3, 3, 6]


# The shapes that the module promises.


def shapes(mask: Mask, layout, length: int, world: int, rank: int, other: int) -> list[tuple[range, range, Kind]]:
    blocks = Patch(mask, layout.ranges(length, world, rank), layout.ranges(length, world, other)).blocks
    return [(block.q, block.k, block.kind) for block in blocks]


@pytest.mark.parametrize(("length", "world"), [(32, 2), (67, 2), (48, 3), (61, 4)])
def test_zigzag_blocks_have_the_promised_shapes(length, world):
    zigzag = Zigzag()

    def rows(rank: int) -> int:
        return zigzag.local_length(length, world, rank)

    def early(rank: int) -> int:
        """Rows of the early piece. (The last rank's two pieces touch; no test here asks for their border.)"""
        return len(zigzag.ranges(length, world, rank)[0])

    for rank in range(world):
        own = shapes(Causal(), zigzag, length, world, rank, rank)
        assert own == [(range(rows(rank)), range(rows(rank)), Kind.CAUSAL)]
        for other in range(rank):  # keys from an earlier rank: all rows meet its early piece
            met = shapes(Causal(), zigzag, length, world, rank, other)
            assert met == [(range(rows(rank)), range(early(other)), Kind.FULL)]
        for other in range(rank + 1, world):  # keys from a later rank: the late rows meet all of them
            met = shapes(Causal(), zigzag, length, world, rank, other)
            assert met == [(range(early(rank), rows(rank)), range(rows(other)), Kind.FULL)]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_striped_is_one_causal_square_whichever_two_ranks_meet(world):
    n = 8
    for rank in range(world):
        for other in range(world):
            met = shapes(Causal(), Striped(), n * world, world, rank, other)
            if other <= rank:
                assert met == [(range(n), range(n), Kind.CAUSAL)]
            else:  # a later rank's stripe starts past the first row: the square is one row down
                assert met == [(range(1, n), range(n - 1), Kind.CAUSAL)]


def test_contiguous_is_causal_full_or_nothing():
    assert shapes(Causal(), Contiguous(), 32, 4, 2, 2) == [(range(8), range(8), Kind.CAUSAL)]
    assert shapes(Causal(), Contiguous(), 32, 4, 2, 1) == [(range(8), range(8), Kind.FULL)]
    assert shapes(Causal(), Contiguous(), 32, 4, 1, 2) == []


def test_full_is_one_rectangle():
    for layout in LAYOUTS:
        for other in range(4):
            assert shapes(Full(), layout, 32, 4, 1, other) == [(range(8), range(8), Kind.FULL)]


def test_documents_are_one_square_each():
    lengths = [5, 3, 0, 8]
    squares = [range(5), range(5, 8), range(8, 16)]
    whole = (range(16),)
    causal = Patch(Causal() & Documents(lengths), whole, whole).blocks
    assert set(causal) == {Block(square, square, Kind.CAUSAL) for square in squares}
    full = Patch(Documents(lengths), whole, whole).blocks
    assert set(full) == {Block(square, square, Kind.FULL) for square in squares}


def test_a_shifted_diagonal_is_full_then_causal_then_full():
    patch = Patch(Causal(), (range(4, 12),), (range(2, 8),))  # chunked prefill: queries run ahead of the keys
    assert set(patch.blocks) == {
        Block(range(4), range(2), Kind.FULL),
        Block(range(4), range(2, 6), Kind.CAUSAL),
        Block(range(4, 8), range(6), Kind.FULL),
    }


def test_chunked_prefill_is_a_rectangle_and_a_square():
    patch = Patch(Causal(), (range(96, 128),), (range(128),))
    assert set(patch.blocks) == {
        Block(range(32), range(96), Kind.FULL),
        Block(range(32), range(96, 128), Kind.CAUSAL),
    }


def test_a_window_wider_than_the_sequence_is_plain_causal():
    assert Patch(SlidingWindow(100), (range(16),), (range(16),)).blocks == (Block(range(16), range(16), Kind.CAUSAL),)


@pytest.mark.parametrize(("layout", "world"), in_turn(LAYOUTS, [1, 2, 4, 7, 8]), ids=str)
def test_causal_work_has_no_partial_block_at_all(layout, world):
    for length in (1, world, 2 * world + 1, 64, 131, 1024):
        for mask in (Causal(), SlidingWindow(length)):
            for rank in range(world):
                for other in range(world):
                    met = shapes(mask, layout, length, world, rank, other)
                    assert all(kind is not Kind.PARTIAL for _, _, kind in met), (length, rank, other)


@every_layout
def test_causal_documents_have_no_partial_block_at_all(layout):
    mask = Causal() & Documents([40, 1, 0, 87, 128])
    for rank in range(4):
        for other in range(4):
            met = shapes(mask, layout, 256, 4, rank, other)
            assert all(kind is not Kind.PARTIAL for _, _, kind in met), (rank, other)


def test_a_causal_block_is_never_a_single_pair():
    for length in (1, 2, 3, 5):
        for kind in (block.kind for block in Patch(Causal(), (range(length),), (range(length),)).blocks):
            assert kind is (Kind.FULL if length == 1 else Kind.CAUSAL)
