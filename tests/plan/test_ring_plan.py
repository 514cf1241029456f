"""Ring plans, walked through without a process: what travels, who computes what, and how gradients come home."""

import time

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from attnmesh.core.layouts import Contiguous, Striped, Zigzag
from attnmesh.core.masks import Causal, Documents, Full, Global, Padding, SlidingWindow
from attnmesh.plan.ring import RingPlan, joined_blocks, packed_once, ring_plan
from attnmesh.plan.shards import shards
from helpers.cases import first
from helpers.masks import batch_masks
from helpers.plans import EVEN, LAYOUTS, LONG, MASKS, WIDE, layouts, layouts_and_masks, problems
from helpers.ring_walk import Truth, check_pairs, check_route

SIZES = [(1, 13), (2, 0), (2, 30), (3, 1), (3, 13), (5, 30), (8, 13)]  # (ranks, length)


every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


def reversed_ring(plan: RingPlan) -> RingPlan:
    return RingPlan(plan.shards, (0, *reversed(plan.offsets[1:])), plan.joined)


def check(plan: RingPlan, truth: Truth) -> None:
    """Every visible pair once, on a rank that has the keys; every row to exactly the ranks that need it."""
    ranks = range(plan.world)
    needed = truth.all_needed()
    check_route(plan, needed)
    count = torch.zeros(*truth.visible.shape, dtype=torch.int8)
    check_pairs(plan, count)
    for rank in ranks:
        assert plan.pairs(rank) == int(truth.visible[:, truth.queries[rank]].sum())
        assert plan.grad_rows_sent(rank) == sum(stage.size for stage in plan.stages(rank)[1:])
    assert torch.equal(count, truth.visible.to(torch.int8)), plan
    assert sum(map(plan.rows_sent, ranks)) == sum(len(needed[r, b]) for r in ranks for b in ranks if r != b)
    offsets = {o for o in range(1, plan.world) if any(truth.seen(r, (r - o) % plan.world) for r in ranks)}
    assert plan.offsets[0] == 0
    assert set(plan.offsets[1:]) == offsets


@layouts_and_masks
def test_every_pair_is_computed_once_and_every_row_is_sent_to_the_ranks_that_see_it(layout, mask_for):
    for world, length in SIZES:
        plan = ring_plan(shards(mask_for(length), layout, length, world))
        truth = Truth(plan.shards)
        for each in dict.fromkeys((plan, reversed_ring(plan))):
            check(each, truth)


JOINED = [(Contiguous(), "all three"), (Zigzag(), "causal"), (Zigzag(), "a batch"), (Zigzag(2), "window and global")]


@pytest.mark.parametrize(("layout", "mask"), first(3, JOINED), ids=str)
def test_the_same_of_joined_blocks(layout, mask):
    for world, length, blocks in [(3, 13, 2), (4, 30, 2), (5, 30, 4), (8, 33, 3), (8, 32, 4), (8, 13, 7)]:
        problem = shards(MASKS[mask](length), layout, length, world)
        plan, single, truth = ring_plan(problem, blocks), ring_plan(problem), Truth(problem)
        assert plan.count == 1 + -(-(single.count - 1) // blocks)
        assert rows_moved(plan) == rows_moved(single)
        for each in dict.fromkeys((plan, reversed_ring(plan))):
            check(each, truth)


def test_blocks_whose_positions_interleave_are_not_joined():
    problem = shards(Causal(), Striped(), 64, 8)
    assert ring_plan(problem, 4) == ring_plan(problem)
    assert ring_plan(problem, 4).count == 8


def test_joined_blocks_of_a_causal_zigzag_are_two_runs_of_positions_and_own_rows_are_packed_once():
    plan = ring_plan(shards(Causal(), Zigzag(), 16 * 8, 8), 4)
    assert [plan.count, plan.joined] == [3, 4]
    for rank in range(8):
        first_stage, *others = plan.stages(rank)
        assert all(len(stage.patch.k) <= 3 for stage in others)
        assert all(not stage.from_owner for stage in others[1:])
        _, copies = packed_once(first_stage.own_sent)
        assert sum(len(to) for _, to in copies) == (16 if rank else 8)  # nobody sees the last rows but their owner
        assert not any(stage.own_sent for stage in others)


@pytest.mark.parametrize(
    ("length", "world", "key_row", "ranks_per_node", "device", "joined"),
    [
        (32768, 8, 4096, 8, "cuda", (4, 2)),
        (16384, 6, 4096, 8, "cuda", (4, 2)),
        (16384, 4, 4096, 4, "cuda", (4, 2)),
        (4096, 3, 4096, 3, "cuda", (4, 1)),
        (32768, 4, 4096, 4, "cuda", (1, 1)),  # blocks of 8192 rows
        (32768, 8, 8192, 8, "cuda", (1, 1)),  # as many bytes
        (32768, 8, 4096, 4, "cuda", (1, 1)),  # several nodes
        (32768, 16, 4096, 16, "cuda", (1, 1)),
        (32768, 8, 4096, 8, "cpu", (1, 1)),
    ],
)
def test_small_blocks_are_joined_on_the_gpus_of_a_node(length, world, key_row, ranks_per_node, device, joined):
    problem = shards(Causal(), Zigzag(), length, world)
    assert joined_blocks(problem, key_row, ranks_per_node, device) == joined


@settings(max_examples=6, deadline=None)
@given(problems())
def test_the_same_of_random_masks_and_layouts(problem):
    plan, truth = ring_plan(problem), Truth(problem)
    for each in (plan, reversed_ring(plan), ring_plan(problem, 3)):
        check(each, truth)


@pytest.mark.sweep
@pytest.mark.timeout(900)
@settings(max_examples=60, deadline=None)
@given(problems())
def test_the_same_of_many_random_masks_and_layouts(problem):
    plan, truth = ring_plan(problem), Truth(problem)
    for each in (plan, reversed_ring(plan), ring_plan(problem, 2), ring_plan(problem, 4)):
        check(each, truth)


def rows_moved(plan: RingPlan) -> tuple[int, int]:
    return sum(map(plan.rows_sent, range(plan.world))), sum(map(plan.grad_rows_sent, range(plan.world)))


@settings(max_examples=6, deadline=None)
@given(st.data(), st.integers(0, 32), st.integers(1, 8))
def test_a_union_moves_at_most_what_its_parts_move(data, length, world):
    parts = [data.draw(batch_masks(length, 2)) for _ in range(2)]
    layout = data.draw(layouts(parts[0], length))
    masks = parts[0] | parts[1], *parts
    try:
        whole, *of_parts = (rows_moved(ring_plan(shards(mask, layout, length, world))) for mask in masks)
    except ValueError:  # too many intervals per query
        reject()
    for mine, others in zip(whole, zip(*of_parts, strict=True), strict=True):
        assert mine <= sum(others)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_sinks_beside_a_window_add_only_the_sinks(world):
    length, sinks, window = 64 * world, 4, 9
    plans = [
        ring_plan(shards(Causal() & mask, Zigzag(), length, world))
        for mask in (SlidingWindow(window), Global(sinks) | SlidingWindow(window))
    ]
    alone, both = (rows_moved(plan) for plan in plans)
    assert alone == (window * (2 * world - 2),) * 2  # a halo for every chunk but the first; the middle two are together
    assert both == (alone[0] + sinks * (world - 1),) * 2


@layouts_and_masks
def test_the_ring_turns_the_way_that_takes_fewer_messages(layout, mask_for):
    def connections(plan: RingPlan) -> int:
        stages = [stage for rank in range(plan.world) for stage in plan.stages(rank)]
        keys = sum(bool(stage.sent) + bool(stage.own_sent) for stage in stages)
        return 2 * keys + sum(bool(stage.sent) + bool(stage.returned) for stage in stages)

    for world in (2, 3, 5, 8):
        chosen = ring_plan(shards(mask_for(30), layout, 30, world))
        turned = reversed_ring(chosen)
        assert chosen.connections == connections(chosen) <= connections(turned) == turned.connections


@pytest.mark.parametrize("layout", [Contiguous(), Zigzag()], ids=str)
@pytest.mark.parametrize("mask", [Full(), Causal(), SlidingWindow(20)], ids=str)
def test_a_stage_of_a_plain_mask_is_one_message(mask, layout):
    plan = ring_plan(shards(mask, layout, 128, 8))
    for rank in range(8):
        for stage in plan.stages(rank):
            assert len(stage.sent) + len(stage.own_sent) <= (1 if mask != SlidingWindow(20) else 2)


def test_many_ranges_of_rows_travel_with_the_smallest_gaps_between_them():
    many = Documents([3] * 100) & (Causal() | SlidingWindow(1))
    plan = ring_plan(shards(many, Striped(), 300, 4))
    truth = Truth(plan.shards)
    for rank in range(4):
        for stage in plan.stages(rank)[1:]:
            (block,) = stage.blocks
            assert len(block.rows) <= 16
            assert truth.seen(rank, block.owner) <= {row for run in block.rows for row in run}


@pytest.mark.parametrize(("world", "left"), [(2, 1), (8, 1), (3, 5), (4, 16)])
def test_a_contiguous_window_makes_one_hop_of_its_halo(world, left):
    plan = ring_plan(shards(SlidingWindow(left), Contiguous(), 16 * world, world))
    assert plan.offsets == (0, 1)
    assert [plan.rows_sent(rank) for rank in range(world)] == [left] * (world - 1) + [0]
    for rank in range(world - 1):
        assert [t.rows for t in plan.stages(rank)[0].own_sent] == [(range(16 - left, 16),)]


def test_a_contiguous_window_wider_than_a_shard_makes_as_many_hops_as_it_reaches():
    for left, hops in ((16, 1), (17, 2), (32, 2), (33, 3), (1000, 7)):
        plan = ring_plan(shards(SlidingWindow(left), Contiguous(), 128, 8))
        assert plan.offsets == tuple(range(hops + 1))
        assert max(plan.rows_sent(rank) for rank in range(8)) <= left


@pytest.mark.parametrize("mask", [SlidingWindow(0), Documents([16] * 4), Causal() & Documents([8] * 8)], ids=str)
def test_documents_that_end_with_the_shards_make_no_hop_at_all(mask):
    plan = ring_plan(shards(mask, Contiguous(), 64, 4))
    assert plan.offsets == (0,)
    assert [plan.rows_sent(rank) for rank in range(4)] == [0] * 4
    assert [plan.grad_rows_sent(rank) for rank in range(4)] == [0] * 4


def test_a_document_across_one_border_moves_only_its_own_rows():
    plan = ring_plan(shards(Causal() & Documents([12, 10, 42]), Contiguous(), 64, 4))  # shards of 16
    assert [t.rows for t in plan.stages(0)[0].own_sent] == [(range(12, 16),)]
    assert [t.rows for t in plan.stages(1)[0].own_sent] == [(range(6, 16),)]


@pytest.mark.parametrize("world", [2, 3, 4, 8, 16])
def test_a_causal_zigzag_moves_three_quarters_of_the_rows_of_a_plain_ring(world):
    for length in (2 * world * 8, 2 * world * 8 + 1, 2 * world * 8 + world, 2 * world * 9 - 1):
        plan = ring_plan(shards(Causal(), Zigzag(), length, world))
        share = sum(plan.rows_sent(rank) for rank in range(world)) / ((world - 1) * length)
        assert share == pytest.approx(0.75, abs=0.04 if length % (2 * world) else 1e-12)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_contiguous_causal_ring_moves_half_the_rows_of_a_plain_ring(world):
    plan = ring_plan(shards(Causal(), Contiguous(), 16 * world, world))
    assert sum(plan.rows_sent(rank) for rank in range(world)) == (world - 1) * 16 * world // 2


@every_layout
def test_a_full_ring_moves_every_row_to_every_other_rank(layout):
    plan = ring_plan(shards(Full(), layout, 37, 4))
    assert sum(plan.rows_sent(rank) for rank in range(4)) == 3 * 37


def test_a_world_of_one_stays_at_home():
    plan = ring_plan(shards(Causal(), Zigzag(), 10, 1))
    assert plan.offsets == (0,)
    (stage,) = plan.stages(0)
    ((owner, rows, _),) = stage.blocks
    assert (owner, rows, stage.own_sent) == (0, (range(10),), ())
    assert plan.pairs(0) == 55


def test_the_same_plan_is_made_once():
    assert ring_plan(shards(Causal(), Zigzag(), 100, 4)) is ring_plan(shards(Causal(), Zigzag(), 100, 4))


@pytest.mark.parametrize(
    ("layout", "mask"),
    first(
        3,
        [
            (Contiguous(), Full()),
            (Zigzag(), Causal()),
            (Striped(), SlidingWindow(4096)),
            (Zigzag(), EVEN[1024]),
            (Striped(), EVEN[256]),
            (Contiguous(), EVEN[32]),
            (Zigzag(), Causal() & (Global(4) | SlidingWindow(4095))),
            (Zigzag(), Causal() & Padding([LONG // 2, LONG, LONG // 3, 1000], "left", LONG)),
        ],
    ),
    ids=lambda x: str(x)[:40],
)
@pytest.mark.timeout(20)
def test_what_a_rank_pays_for_a_plan_over_131072_tokens_and_32_ranks_is_small(layout, mask):
    start = time.process_time()
    plan = ring_plan(shards(mask, layout, LONG, WIDE))
    work = plan.pairs(5)
    seconds = time.process_time() - start
    assert work > 0
    assert seconds < 1.9
