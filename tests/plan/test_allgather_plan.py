"""All-gather plans, walked through without a process: who gathers what from whom, and what is computed with it."""

import time
from functools import cache

import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import Tensor

from attnmesh.core import ranges
from attnmesh.core.layouts import Contiguous, Layout, Striped, Zigzag
from attnmesh.core.mask import sequence_intervals
from attnmesh.core.masks import Causal, Documents, Full, SlidingWindow
from attnmesh.plan.allgather import GatherPlan, gather_plan, groups_that_fill, head_groups
from attnmesh.plan.shards import shards
from helpers.cases import in_turn
from helpers.masks import batch_masks, covered, visible_pairs
from helpers.plans import EVEN, LONG, MASKS, WIDE, layouts, split

# Queries and keys: layout and length of either. Some keys are more than the queries, some fewer, some none at all.
SIDES = [(length, None) for length in (0, 1, 13, 30)] + [(13, 30), (30, 13), (30, 2), (9, 0), (0, 9)]
WORLDS = (1, 2, 4, 7)
LAYOUTS = [Contiguous(), Zigzag(), Zigzag(2), Striped()]

layouts_and_masks = pytest.mark.parametrize(("layout", "mask_for"), in_turn(LAYOUTS, MASKS.values()), ids=list(MASKS))


def received(plan: GatherPlan) -> list[int]:
    """The rows that each rank gets from others."""
    ranks = range(plan.world)
    return [sum(plan.rows_sent(source, target) for source in ranks if source != target) for target in ranks]


class Workload:
    """A plan, where queries and keys lie, and who sees whom, [sequences or 1, q, k]."""

    def __init__(self, plan: GatherPlan, length: int, key_length: int) -> None:
        self.plan, self.ranks = plan, range(plan.world)
        self.queries = [ranges.as_tensor(held) for held in plan.shards.queries]
        self.keys = [ranges.as_tensor(held) for held in plan.shards.keys]
        self.allowed = visible_pairs(plan.shards.mask, (range(length),), (range(key_length),))

    def needed(self, rank: int) -> Tensor:
        return ranges.as_tensor(self.plan.needed(rank))

    def seen(self, rank: int) -> set[int]:
        """The keys that some query of the rank sees. Of plain masks, a run with a step counts as one without."""
        runs = self.plan.shards.queries[rank]
        if all(part.contains_query for _, parts in sequence_intervals(self.plan.shards.mask, 64) for part in parts):
            runs = tuple(range(run[0], run[-1] + 1) for run in runs)
        rows = [row for run in runs for row in run]
        return set(self.allowed[:, rows].any(1).any(0).nonzero().flatten().tolist())


@cache
def cases(layout: Layout, mask_for) -> list[Workload]:
    made = []
    for at, world in enumerate(WORLDS):
        for length, key_length in SIDES[at % 3 :: 3]:  # every size with some world
            keys = length if key_length is None else key_length
            # Keys of another sequence lie differently, too.
            key_layout = None if key_length is None else LAYOUTS[(LAYOUTS.index(layout) + 1) % len(LAYOUTS)]
            plan = gather_plan(shards(mask_for(keys), layout, length, world, key_layout, key_length))
            made.append(Workload(plan, length, keys))
    return made


@layouts_and_masks
def test_ranks_compute_every_visible_pair_exactly_once_with_keys_they_gathered(layout, mask_for):
    for workload in cases(layout, mask_for):
        count = torch.zeros(*workload.allowed.shape, dtype=torch.int8)
        for rank in workload.ranks:
            patch = workload.plan.patch(rank)
            assert torch.equal(ranges.as_tensor(patch.q), workload.queries[rank])
            assert torch.equal(ranges.as_tensor(patch.k), workload.needed(rank))
            count[:, workload.queries[rank][:, None], workload.needed(rank)] += covered(patch)
            assert workload.plan.pairs(rank) == int(workload.allowed[:, workload.queries[rank]].sum())
        assert torch.equal(count, workload.allowed.to(torch.int8)), workload.plan


@layouts_and_masks
def test_only_keys_that_the_rank_sees_are_gathered(layout, mask_for):
    for workload in cases(layout, mask_for):
        for rank in workload.ranks:
            needed = workload.needed(rank).tolist()
            assert all(run.step == 1 for run in workload.plan.needed(rank))
            assert needed == sorted(workload.seen(rank)), (workload.plan, rank)


@layouts_and_masks
def test_every_gathered_row_comes_once_from_the_rank_that_holds_it(layout, mask_for):
    for workload in cases(layout, mask_for):
        for target in workload.ranks:
            needed = workload.needed(target)
            arrived = torch.full_like(needed, -1)
            for source in workload.ranks:
                for piece in workload.plan.pieces(source, target):
                    assert piece.rows.step == 1
                    assert (arrived[list(piece.to)] == -1).all()
                    arrived[list(piece.to)] = workload.keys[source][list(piece.rows)]
            assert torch.equal(arrived, needed), (workload.plan, target)
            assert workload.plan.rows(target) == len(needed)


@layouts_and_masks
def test_ranks_send_what_others_need_of_theirs(layout, mask_for):
    for workload in cases(layout, mask_for):
        for source in workload.ranks:
            own = set(workload.keys[source].tolist())
            for target in workload.ranks:
                assert workload.plan.rows_sent(source, target) == len(own & set(workload.needed(target).tolist()))


@settings(max_examples=10, deadline=None)
@given(st.data(), st.integers(0, 32), st.integers(1, 8))
def test_random_masks_compute_every_pair_once_and_a_union_moves_at_most_what_its_parts_move(data, length, world):
    parts = [data.draw(batch_masks(length, 2)) for _ in range(2)]
    layout = data.draw(layouts(parts[0], length))
    try:
        plans = [gather_plan(shards(mask, layout, length, world)) for mask in (parts[0] | parts[1], *parts)]
        moved = [sum(received(plan)) for plan in plans]
    except ValueError:  # too many intervals per query
        reject()
    assert moved[0] <= moved[1] + moved[2]
    workload = Workload(plans[0], length, length)
    count = torch.zeros(*workload.allowed.shape, dtype=torch.int8)
    for rank in workload.ranks:
        needed = workload.needed(rank)
        count[:, workload.queries[rank][:, None], needed] += covered(workload.plan.patch(rank))
        own = workload.allowed[:, workload.queries[rank]].any(1).any(0).nonzero().flatten()
        assert set(own.tolist()) <= set(needed.tolist())
    assert torch.equal(count, workload.allowed.to(torch.int8))


# What masks make of it.


@pytest.mark.parametrize("left", [1, 5, 16, 40])
def test_a_window_gathers_its_halo_whatever_the_length(left):
    for rows in (40, 80, 160):
        plan = gather_plan(shards(SlidingWindow(left), Contiguous(), 4 * rows, 4))
        assert received(plan) == [0, left, left, left]
        plan = gather_plan(shards(SlidingWindow(left), Zigzag(), 8 * rows, 4))
        # Seven borders between eight pieces; the one in the middle lies within rank 3's shard.
        assert received(plan) == [left, 2 * left, 2 * left, left]


def test_documents_that_end_with_the_shards_move_nothing():
    for mask in (SlidingWindow(0), Documents([16] * 4), Causal() & Documents([8] * 8)):
        plan = gather_plan(shards(mask, Contiguous(), 64, 4))
        assert received(plan) == [0] * 4


@pytest.mark.parametrize("world", [2, 4, 8])
def test_a_causal_zigzag_gathers_three_quarters_of_all_keys(world):
    """Rank r sees all but the last r of 2 x world pieces."""
    plan = gather_plan(shards(Causal(), Zigzag(), 2 * world * 4, world))
    assert [plan.rows(rank) for rank in range(world)] == [(2 * world - rank) * 4 for rank in range(world)]
    assert sum(map(plan.rows, range(world))) / (world * 2 * world * 4) == pytest.approx(0.75, abs=1 / world)


def test_a_full_mask_gathers_everything():
    plan = gather_plan(shards(Full(), Striped(), 37, 4))
    assert [plan.needed(rank) for rank in range(4)] == [(range(37),)] * 4
    assert sum(received(plan)) == 3 * 37


def test_queries_beyond_all_documents_gather_nothing():
    plan = gather_plan(shards(split(10, 3, 2), Contiguous(), 40, 4, None, 10))
    assert [plan.rows(rank) for rank in range(4)] == [10, 0, 0, 0]


def test_the_same_plan_is_made_once():
    assert gather_plan(shards(Causal(), Zigzag(), 100, 4)) is gather_plan(shards(Causal(), Zigzag(), 100, 4))


def test_groups_hold_every_kv_head_once_are_as_many_as_asked_and_differ_by_one():
    for heads in range(1, 40):
        assert head_groups(heads) == head_groups(heads, 4)
        for most in range(1, 5):
            groups = head_groups(heads, most)
            assert [head for group in groups for head in group] == list(range(heads))
            assert len(groups) == min(most, heads)
            assert max(map(len, groups)) - min(map(len, groups)) <= 1


def test_long_sequences_travel_in_four_groups_and_short_ones_in_one():
    found = [
        groups_that_fill(shards(Causal(), Zigzag(), length, 8), 1, 32) for length in (0, 8, 8192, 16384, 24576, 131072)
    ]
    assert found == [1, 1, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("layout", "mask"),
    [(Contiguous(), Full()), (Zigzag(), Causal()), (Striped(), SlidingWindow(4096)), (Contiguous(), EVEN[32])],
    ids=str,
)
@pytest.mark.timeout(20)
def test_what_a_rank_pays_for_a_plan_over_131072_tokens_and_32_ranks_is_small(layout, mask):
    start = time.process_time()
    plan = gather_plan(shards(mask, layout, LONG, WIDE))
    for other in range(WIDE):
        plan.rows_sent(5, other)
    work = plan.pairs(5)
    seconds = time.process_time() - start
    assert work > 0
    assert seconds < 1.9
