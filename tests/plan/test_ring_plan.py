"""Ring plans, walked through without a process: what travels, who computes what, and how gradients come home."""

import time
from collections import Counter
from functools import cache
from itertools import pairwise

import pytest
import torch

from attnmesh.core import ranges
from attnmesh.core.layouts import Contiguous, Layout, Striped, Zigzag
from attnmesh.core.masks import Causal, Documents, Full, SlidingWindow
from attnmesh.plan.ring import RingPlan, ring_plan
from attnmesh.plan.shards import shards
from helpers.cases import allowed_pairs
from helpers.masks import covered

CPU = torch.device("cpu")
SIZES = [(1, 13), (2, 0), (2, 30), (3, 1), (3, 13), (5, 30), (8, 13)]  # (ranks, length)
LAYOUTS = [Contiguous(), Zigzag(), Striped()]


def split(length: int, *shares: int) -> Documents:
    """Documents of about `shares` of a sequence, adding up to its length."""
    edges = [length * sum(shares[:i]) // sum(shares) for i in range(len(shares) + 1)]
    return Documents(b - a for a, b in pairwise(edges))


MASKS = {
    "full": lambda length: Full(),
    "causal": lambda length: Causal(),
    "window": lambda length: SlidingWindow(3),
    "window to both sides": lambda length: SlidingWindow(2, 4),
    "window ahead": lambda length: SlidingWindow(0, 2),
    "itself": lambda length: SlidingWindow(0),
    "documents": lambda length: split(length, 3, 0, 1, 4, 2),
    "many documents": lambda length: split(length, *[2, 1, 3] * 4),
    "causal and documents": lambda length: Causal() & split(length, 5, 2, 0, 3),
    "causal and window": lambda length: Causal() & SlidingWindow(5, 2),
    "all three": lambda length: Causal() & SlidingWindow(6, 3) & split(length, 2, 5),
}

every_mask = pytest.mark.parametrize("mask_for", MASKS.values(), ids=MASKS.keys())
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


class Walk:
    """The truth about a plan's problem: which rows of a shard a rank's queries see."""

    def __init__(self, plan: RingPlan) -> None:
        self.plan = plan
        self.positions = [ranges.as_tensor(held) for held in plan.shards.keys]
        everything = torch.arange(sum(map(ranges.size, plan.shards.keys)))
        self.allowed = allowed_pairs(plan.shards.mask, everything, everything)
        ranks = range(plan.world)
        self._seen = {(rank, block): self._sees(rank, block) for rank in ranks for block in ranks}

    def _sees(self, rank: int, block: int) -> set[int]:
        sees = self.allowed[self.positions[rank]][:, self.positions[block]].any(0)
        return set(sees.nonzero().flatten().tolist())

    def seen(self, rank: int, block: int) -> set[int]:
        """The rows of `block`'s shard that some query of `rank` sees."""
        return self._seen[rank, block]

    def visitors(self, block: int, after: int) -> list[int]:
        """The ranks that hold `block`'s keys at the stages later than `after`."""
        return [(block + offset) % self.plan.world for offset in self.plan.offsets[after + 1 :]]

    def seen_after(self, block: int, after: int) -> set[int]:
        """The rows of `block` seen at the stages later than `after`."""
        return set().union(*(self.seen(rank, block) for rank in self.visitors(block, after)))

    def seen_until(self, block: int, until: int) -> set[int]:
        """The rows of `block` seen by visitors up to and at stage `until`; the owner, at stage 0, is none."""
        visitors = self.visitors(block, 0)[:until]
        return set().union(*(self.seen(rank, block) for rank in visitors))


def hull(rows: set[int]) -> range:
    return range(min(rows), max(rows) + 1) if rows else range(0)


@cache
def plans(layout: Layout, mask_for) -> list[tuple[RingPlan, Walk]]:
    """The plans chosen for forward and backward, and the ring turning the other way, for every world and length."""
    made = []
    for world, length in SIZES:
        mask = mask_for(length)
        chosen = ring_plan(shards(mask, layout, length, world))
        turned = RingPlan(chosen.shards, (0, *reversed(chosen.offsets[1:])))
        assert ring_plan(shards(mask, layout, length, world), grad_weight=2.0) in (chosen, turned)
        made += [(plan, Walk(plan)) for plan in dict.fromkeys((chosen, turned))]
    return made


@every_layout
@every_mask
def test_ranks_compute_every_visible_pair_exactly_once_with_keys_they_hold(layout, mask_for):
    for plan, walk in plans(layout, mask_for):
        count = torch.zeros(*walk.allowed.shape, dtype=torch.int8)
        for rank in range(plan.world):
            for stage in plan.stages(rank):
                assert set(stage.seen) <= set(stage.keys)
                held = walk.positions[stage.block][stage.seen.start : stage.seen.stop]
                assert torch.equal(ranges.as_tensor(stage.patch.q), walk.positions[rank])
                assert torch.equal(ranges.as_tensor(stage.patch.k), held)
                count[walk.positions[rank][:, None], held] += covered(stage.patch)[0]
        assert torch.equal(count, walk.allowed.to(torch.int8)), plan


@every_layout
@every_mask
def test_what_a_rank_sends_is_what_the_next_one_expects(layout, mask_for):
    for plan, walk in plans(layout, mask_for):
        arriving = {rank: (rank, range(len(held)), rank) for rank, held in enumerate(walk.positions)}
        for at in range(len(plan.offsets)):
            sent = {}
            for rank in range(plan.world):
                stage = plan.stages(rank)[at]
                if rank in arriving:
                    assert (stage.block, stage.keys, stage.came_from) == arriving[rank], (plan, rank, at)
                else:
                    assert not stage.keys, (plan, rank, at)
                assert set(stage.next_keys) <= set(stage.keys), (plan, rank, at)
                if stage.next_keys:
                    assert stage.next_rank not in sent, "two blocks at one rank"
                    assert stage.next_rank != rank
                    sent[stage.next_rank] = (stage.block, stage.next_keys, rank)
            arriving = sent
        assert not arriving, "the last stage sends nothing on"


@every_layout
@every_mask
def test_only_rows_that_somebody_further_on_sees_travel(layout, mask_for):
    for plan, walk in plans(layout, mask_for):
        for rank in range(plan.world):
            for at, stage in enumerate(plan.stages(rank)):
                assert stage.next_keys == hull(walk.seen_after(stage.block, at)), (plan, rank, at)
                if at > 0:
                    assert stage.seen == hull(walk.seen(rank, stage.block)), (plan, rank, at)


@every_layout
@every_mask
def test_there_is_no_stage_at_which_no_rank_sees_anything(layout, mask_for):
    for plan, walk in plans(layout, mask_for):
        needed = {
            offset
            for offset in range(1, plan.world)
            if any(walk.seen(rank, (rank - offset) % plan.world) for rank in range(plan.world))
        }
        assert plan.offsets[0] == 0
        assert sorted(plan.offsets[1:]) == sorted(needed)


@every_layout
@every_mask
def test_gradients_travel_with_their_block_and_come_home_exactly_once(layout, mask_for):
    for plan, walk in plans(layout, mask_for):
        home = {block: Counter() for block in range(plan.world)}  # (row, rank that found it) -> how often it came
        came_home = Counter()
        travelling: dict[int, tuple] = {}  # receiver -> (block, rows, sender, what is in it)
        for at in range(len(plan.offsets)):
            sent = {}
            for rank in range(plan.world):
                stage = plan.stages(rank)[at]
                block, rows, sender, found = travelling.get(rank, (stage.block, range(0), stage.came_from, Counter()))
                assert (block, rows, sender) == (stage.block, stage.grads_in, stage.came_from), (plan, rank, at)
                if at == 0:
                    assert not stage.grads_out  # the owner's share stays at home
                    continue
                assert stage.grads_out == hull(walk.seen_until(block, at)) if stage.keys else not stage.grads_out
                assert set(stage.grads_in) | set(stage.seen) <= set(stage.grads_out)
                if not stage.grads_out:
                    continue
                found = found + Counter((row, rank) for row in walk.seen(rank, block))
                if stage.next_keys:
                    assert stage.next_rank not in sent
                    sent[stage.next_rank] = (block, stage.grads_out, rank, found)
                else:
                    assert stage.next_rank == block
                    assert plan.returns(block) == (at, rank, stage.grads_out), (plan, rank, at)
                    came_home[block] += 1
                    home[block] += found
            travelling = sent
        assert not travelling
        for block in range(plan.world):
            visitors = [rank for rank in range(plan.world) if rank != block]
            assert home[block] == Counter((row, rank) for rank in visitors for row in walk.seen(rank, block)), plan
            assert came_home[block] == bool(home[block])
            if not home[block]:
                assert plan.returns(block) == (0, block, range(0))


@every_layout
@every_mask
def test_the_totals_are_those_of_the_stages_and_never_more_than_a_plain_ring_moves(layout, mask_for):
    for plan, walk in plans(layout, mask_for):
        ranks = range(plan.world)
        for rank in ranks:
            stages = plan.stages(rank)
            assert plan.rows_sent(rank) == sum(len(stage.next_keys) for stage in stages)
            assert plan.grad_rows_sent(rank) == sum(len(stage.grads_out) for stage in stages)
        received = [sum(len(stage.keys) for stage in plan.stages(rank)[1:]) for rank in ranks]
        assert sum(received) == sum(plan.rows_sent(rank) for rank in ranks) <= (plan.world - 1) * len(walk.allowed)
        assert sum(plan.pairs(rank) for rank in ranks) == int(walk.allowed.sum())


@every_layout
@every_mask
def test_the_ring_turns_the_way_that_moves_fewer_rows(layout, mask_for):
    for weight in (0.0, 1.0, 2.0):

        def moved(plan: RingPlan, weight: float = weight) -> float:
            return sum(plan.rows_sent(r) + weight * plan.grad_rows_sent(r) for r in range(plan.world))

        for world in (2, 3, 5, 8):
            chosen = ring_plan(shards(mask_for(30), layout, 30, world), grad_weight=weight)
            turned = RingPlan(chosen.shards, (0, *reversed(chosen.offsets[1:])))
            assert moved(chosen) <= moved(turned)


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("left", [1, 5, 16])
def test_a_contiguous_window_makes_one_hop_of_its_halo(world, left):
    plan = ring_plan(shards(SlidingWindow(left), Contiguous(), 16 * world, world))
    assert plan.offsets == (0, 1)
    assert [plan.rows_sent(rank) for rank in range(world)] == [left] * (world - 1) + [0]
    for rank in range(world - 1):
        assert plan.stages(rank)[0].next_keys == range(16 - left, 16)


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
    assert [plan.returns(rank) for rank in range(4)] == [(0, rank, range(0)) for rank in range(4)]


def test_a_document_across_one_border_moves_only_its_own_rows():
    plan = ring_plan(shards(Causal() & Documents([12, 10, 42]), Contiguous(), 64, 4))  # shards of 16
    assert plan.stages(0)[0].next_keys == range(12, 16)
    assert plan.stages(1)[0].next_keys == range(6, 16)


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
    assert (stage.block, stage.keys, stage.seen, stage.next_keys) == (0, range(10), range(10), range(0))
    assert plan.pairs(0) == 55


def test_the_same_plan_is_made_once():
    assert ring_plan(shards(Causal(), Zigzag(), 100, 4)) is ring_plan(shards(Causal(), Zigzag(), 100, 4))


LONG, WIDE = 131072, 32
EVEN = {n: Causal() & Documents([LONG // n] * n) for n in (32, 256, 1024)}


@pytest.mark.parametrize(
    ("layout", "mask"),
    [
        *((layout, mask) for layout in LAYOUTS for mask in (Full(), Causal(), SlidingWindow(4096), EVEN[32])),
        (Contiguous(), EVEN[1024]),
        (Zigzag(), EVEN[1024]),
        (Striped(), EVEN[256]),
    ],
    ids=lambda x: str(x)[:40],
)
@pytest.mark.timeout(20)
def test_what_a_rank_pays_for_a_plan_over_131072_tokens_and_32_ranks_is_small(layout, mask):
    start = time.process_time()
    plan = ring_plan(shards(mask, layout, LONG, WIDE), grad_weight=2.0)
    work = plan.pairs(5)
    seconds = time.process_time() - start
    assert work > 0
    assert seconds < 1.9
