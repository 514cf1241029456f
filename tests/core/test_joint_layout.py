"""Sequences joined into one, each spread by a layout of its own."""

import itertools

import pytest
import torch

from attnmesh.core.layouts import Balanced, Contiguous, Joint, Layout, Striped, Zigzag
from attnmesh.core.masks import Causal, Documents, Full
from attnmesh.testing.attention import assert_attention_close, random_inputs, virtual_results
from helpers.cases import first, make_mask, sweep

LAYOUTS = [Contiguous(), Zigzag(), Striped(), Balanced(Causal())]
LENGTHS = (0, 1, 2, 7, 16)
WORLDS = range(1, 6)


def by_hand(parts: list[tuple[int, Layout]], world: int, rank: int) -> list[int]:
    """The positions of the rank's shards of the parts, one part after another."""
    begins = [sum(n for n, _ in parts[:i]) for i in range(len(parts))]
    return [
        begin + p
        for begin, (n, layout) in zip(begins, parts, strict=True)
        for p in layout.positions(n, world, rank).tolist()
    ]


@pytest.mark.parametrize(("one", "two"), first(9, list(itertools.product(LAYOUTS, LAYOUTS))), ids=str)
def test_a_rank_holds_its_shard_of_every_part_in_order(one, two):
    for a, b, world in itertools.product(LENGTHS, LENGTHS, WORLDS):
        parts = [(a, one), (b, two)]
        for rank in range(world):
            held = Joint(*parts).positions(a + b, world, rank).tolist()
            assert held == by_hand(parts, world, rank)
            assert held == sorted(held)


@pytest.mark.parametrize("layouts", list(itertools.permutations(LAYOUTS, 3)), ids=str)
def test_ranks_partition_three_parts_and_unshard_undoes_shard(layouts):
    layout = Joint(*zip((9, 0, 14), layouts, strict=True))
    x = torch.randn(2, 23)
    for world in WORLDS:
        held = [p for rank in range(world) for p in layout.positions(23, world, rank).tolist()]
        assert sorted(held) == list(range(23))
        assert torch.equal(layout.unshard([layout.shard(x, 1, world, rank) for rank in range(world)], 1), x)


def test_a_shard_is_the_shards_of_the_parts_one_after_another():
    image, text = torch.randn(10, 2), torch.randn(7, 2)
    layout = Joint((10, Zigzag()), (7, Striped()))
    for rank in range(3):
        parts = Zigzag().shard(image, 0, 3, rank), Striped().shard(text, 0, 3, rank)
        assert torch.equal(layout.shard(torch.cat([image, text]), 0, 3, rank), torch.cat(parts))


def test_the_picture_in_the_module_is_right():
    layout = Joint((8, Contiguous()), (4, Striped()))
    assert layout.positions(12, 2, 0).tolist() == [0, 1, 2, 3, 8, 10]
    assert layout.positions(12, 2, 1).tolist() == [4, 5, 6, 7, 9, 11]


def test_runs_that_touch_are_one():
    assert Joint((5, Contiguous()), (4, Zigzag()), (3, Striped())).ranges(12, 1, 0) == (range(12),)
    assert Joint((4, Contiguous()), (0, Zigzag()), (4, Zigzag())).ranges(8, 2, 1) == (range(2, 4), range(5, 7))
    assert Joint((4, Zigzag()), (2, Contiguous())).ranges(6, 2, 0) == (range(1), range(3, 5))


def test_joints_may_be_nested():
    flat = Joint((5, Contiguous()), (6, Zigzag()), (7, Striped()))
    nested = Joint((11, Joint((5, Contiguous()), (6, Zigzag()))), (7, Striped()))
    for rank in range(3):
        assert torch.equal(flat.positions(18, 3, rank), nested.positions(18, 3, rank))


def test_joints_compare_hash_and_print_by_value():
    one, same = Joint((5, Contiguous()), (6, Zigzag())), Joint((5, Contiguous()), (6, Zigzag()))
    assert one == same
    assert hash(one) == hash(same)
    assert one != Joint((6, Zigzag()), (5, Contiguous()))
    assert repr(one) == "Joint((5, Contiguous()), (6, Zigzag()))"
    assert eval(repr(one)) == one


@pytest.mark.parametrize(
    "part", [5, Zigzag(), (5,), (Zigzag(), 5), (-1, Zigzag()), (2.0, Zigzag()), (True, Zigzag()), (5, Zigzag), "ab"]
)
def test_what_is_no_part_is_refused(part):
    with pytest.raises(ValueError, match=r"Joint.parts must be \(length, layout\)"):
        Joint((3, Contiguous()), part)


def test_lengths_that_do_not_add_up_are_refused():
    layout = Joint((5, Contiguous()), (6, Zigzag()))
    with pytest.raises(ValueError, match=r"sequence length 12, but \[5, 6\] add up to 11"):
        layout.ranges(12, 2, 0)
    with pytest.raises(ValueError, match="sequence length 10"):
        layout.unshard([torch.zeros(5), torch.zeros(5)], 0)


def test_a_part_that_refuses_its_length_is_heard():
    with pytest.raises(ValueError, match=r"add up to the sequence length 5, but \(2, 2\) add up to 4"):
        Joint((5, Balanced(Documents([2, 2])))).ranges(5, 2, 0)


@pytest.mark.parametrize(
    ("mask", "world"), [("full", 1), ("window", 2), sweep("causal", 3), sweep("causal & documents", 5)]
)
def test_attention_is_exact(mask, world):
    inputs = random_inputs(67)
    sight = make_mask(mask, 67)
    layout = Joint((48, Zigzag()), (1, Contiguous()), (18, Striped()))
    assert_attention_close(virtual_results(world, inputs, sight, layout), inputs, sight)


def test_a_part_shorter_than_the_world_is_attended_to():
    inputs = random_inputs(42)
    assert_attention_close(virtual_results(4, inputs, Full(), Joint((40, Zigzag()), (2, Contiguous()))), inputs, Full())
