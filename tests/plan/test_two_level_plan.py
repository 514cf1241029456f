"""A ring of rings, walked through without a process: nodes hand keys on once, ranks within a node pass them around."""

from collections import Counter
from functools import cache

import pytest
import torch
from test_ring_plan import every_mask, hull

from attnmesh.core import ranges
from attnmesh.core.layouts import Contiguous, Layout, Striped, Zigzag
from attnmesh.core.masks import Causal, Documents, Full, SlidingWindow
from attnmesh.plan.ring import RingPlan, ring_plan
from attnmesh.plan.shards import Shards, node_shards, shards
from attnmesh.plan.two_level import TwoLevelPlan, two_level_plan
from helpers.cases import allowed_pairs
from helpers.masks import covered

MESHES = [(3, 2), (2, 3)]  # (nodes, ranks a node)
SIDES = [(13, None), (13, 24), (24, 7), (9, 0)]  # lengths of queries and of keys
LAYOUTS = [Contiguous(), Zigzag(), Zigzag(2), Striped()]

every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)


class Walk:
    """The truth about queries and keys spread over ranks."""

    def __init__(self, problem: Shards) -> None:
        self.queries = [ranges.as_tensor(held) for held in problem.queries]
        self.keys = [ranges.as_tensor(held) for held in problem.keys]
        lengths = (sum(map(len, side)) for side in (self.queries, self.keys))
        self.allowed = allowed_pairs(problem.mask, *map(torch.arange, lengths))
        by_rank = [self.allowed[held].any(0) for held in self.queries]
        self._seen = [[set(sees[held].nonzero().flatten().tolist()) for held in self.keys] for sees in by_rank]

    def seen(self, ranks: range, block: int) -> set[int]:
        """The rows of the keys of `block` that some query of these ranks sees."""
        return set().union(*(self._seen[rank][block] for rank in ranks))


@cache
def spreads(layout: Layout, mask_for, world: int) -> list[Shards]:
    made = []
    for length, key_length in SIDES:
        key_layout = None if key_length is None else LAYOUTS[(LAYOUTS.index(layout) + 1) % len(LAYOUTS)]
        mask = mask_for(length if key_length is None else key_length)
        made.append(shards(mask, layout, length, world, key_layout, key_length))
    return made


@cache
def plans(layout: Layout, mask_for) -> list[tuple[TwoLevelPlan, Walk]]:
    """The plans chosen for forward and backward, for every mesh and length."""
    return [
        (plan, Walk(plan.shards))
        for nodes, ranks_per_node in MESHES
        for problem in spreads(layout, mask_for, nodes * ranks_per_node)[nodes - 2 :: 2]
        for plan in {two_level_plan(problem, ranks_per_node, grad_weight=weight) for weight in (0.0, 2.0)}
    ]


def node_of(plan: TwoLevelPlan, node: int) -> range:
    return range(node * plan.ranks_per_node, (node + 1) * plan.ranks_per_node)


@every_layout
@every_mask
def test_ranks_compute_every_visible_pair_exactly_once_with_keys_they_hold(layout, mask_for):
    for plan, walk in plans(layout, mask_for):
        count = torch.zeros(*walk.allowed.shape, dtype=torch.int8)
        for rank in range(plan.world):
            node, i = divmod(rank, plan.ranks_per_node)
            for at in range(len(plan.outer_offsets)):
                ring = plan.inner_ring(node, at)
                for stage in ring.stages(i):
                    # What turns within the node at an outer stage is what its ranks hold then, narrowed to `seen`.
                    outer = plan.outer(stage.block).stages(node)[at]
                    block = walk.keys[outer.block * plan.ranks_per_node + stage.block]
                    held = block[outer.seen.start : outer.seen.stop][stage.seen.start : stage.seen.stop]
                    assert set(outer.seen) <= set(outer.keys)
                    assert torch.equal(ranges.as_tensor(stage.patch.q), walk.queries[rank])
                    assert torch.equal(ranges.as_tensor(stage.patch.k), held)
                    count[walk.queries[rank][:, None], held] += covered(stage.patch)[0]
            assert plan.pairs(rank) == int(walk.allowed[walk.queries[rank]].sum())
        assert torch.equal(count, walk.allowed.to(torch.int8)), plan


@every_layout
@every_mask
def test_what_a_node_hands_on_is_what_the_next_one_expects_and_only_what_is_seen_further_on(layout, mask_for):
    for plan, walk in plans(layout, mask_for):
        for i in range(plan.ranks_per_node):
            ring = plan.outer(i)
            arriving = {n: (n, range(len(walk.keys[n * plan.ranks_per_node + i])), n) for n in range(plan.nodes)}
            for at in range(len(plan.outer_offsets)):
                sent = {}
                for node in range(plan.nodes):
                    stage = ring.stages(node)[at]
                    if node in arriving:
                        assert (stage.block, stage.keys, stage.came_from) == arriving[node]
                    else:
                        assert not stage.keys
                    block = stage.block * plan.ranks_per_node + i
                    later = [(stage.block + o) % plan.nodes for o in plan.outer_offsets[at + 1 :]]
                    further_on = set().union(*(walk.seen(node_of(plan, n), block) for n in later))
                    assert stage.next_keys == hull(further_on), (plan, i, node, at)
                    if at > 0:
                        assert stage.seen == hull(walk.seen(node_of(plan, node), block)), (plan, i, node, at)
                    if stage.next_keys:
                        sent[stage.next_rank] = (stage.block, stage.next_keys, node)
                arriving = sent
            assert not arriving


@every_layout
@every_mask
def test_what_nodes_found_for_a_block_comes_home_exactly_once(layout, mask_for):
    for plan, walk in plans(layout, mask_for):
        for i in range(plan.ranks_per_node):
            ring = plan.outer(i)
            for home in range(plan.nodes):
                block, found, grads = home * plan.ranks_per_node + i, Counter(), range(0)
                for at, offset in enumerate(plan.outer_offsets[1:], 1):
                    node = (home + offset) % plan.nodes
                    stage = ring.stages(node)[at]
                    if not stage.keys:
                        break
                    assert stage.grads_in == grads
                    found += Counter((row, node) for row in walk.seen(node_of(plan, node), block))
                    grads = stage.grads_out
                    assert {row for row, _ in found} <= set(grads)
                    if not stage.next_keys:
                        assert stage.next_rank == home
                        assert ring.returns(home) == (at, node, grads)
                others = [node for node in range(plan.nodes) if node != home]
                assert found == Counter((row, n) for n in others for row in walk.seen(node_of(plan, n), block))


@every_layout
@every_mask
def test_there_is_no_outer_stage_at_which_no_node_sees_anything(layout, mask_for):
    for plan, walk in plans(layout, mask_for):
        needed = {
            offset
            for offset in range(1, plan.nodes)
            for node in range(plan.nodes)
            for block in node_of(plan, (node - offset) % plan.nodes)
            if walk.seen(node_of(plan, node), block)
        }
        assert plan.outer_offsets[0] == 0
        assert sorted(plan.outer_offsets[1:]) == sorted(needed)


@every_layout
@every_mask
def test_all_outer_rings_turn_the_way_that_moves_fewer_rows(layout, mask_for):
    def moved(plan: TwoLevelPlan, weight: float) -> float:
        rings = [plan.outer(i) for i in range(plan.ranks_per_node)]
        return sum(
            ring.rows_sent(node) + weight * ring.grad_rows_sent(node) for ring in rings for node in range(plan.nodes)
        )

    for nodes, ranks_per_node in MESHES:
        for problem in spreads(layout, mask_for, nodes * ranks_per_node)[nodes - 2 :: 2]:
            for weight in (0.0, 2.0):
                chosen = two_level_plan(problem, ranks_per_node, grad_weight=weight)
                turned = TwoLevelPlan(problem, ranks_per_node, (0, *reversed(chosen.outer_offsets[1:])))
                assert moved(chosen, weight) <= moved(turned, weight)


@pytest.mark.parametrize(("nodes", "ranks_per_node"), MESHES)
def test_a_block_crosses_every_border_between_nodes_once(nodes, ranks_per_node):
    plan = two_level_plan(
        shards(Full(), Contiguous(), 8 * nodes * ranks_per_node, nodes * ranks_per_node), ranks_per_node
    )
    for i in range(ranks_per_node):
        assert [plan.outer(i).rows_sent(node) for node in range(nodes)] == [8 * (nodes - 1)] * nodes


def test_documents_within_nodes_make_no_outer_hop():
    plan = two_level_plan(shards(Causal() & Documents([32, 32]), Contiguous(), 64, 4), 2)
    assert plan.outer_offsets == (0,)
    assert [len(plan.inner_ring(node, 0).offsets) for node in (0, 1)] == [2, 2]


def test_a_window_hands_its_halo_to_the_next_node_once():
    plan = two_level_plan(shards(SlidingWindow(5), Contiguous(), 64, 4), 2)
    assert plan.outer_offsets == (0, 1)
    sent = {(i, node): plan.outer(i).rows_sent(node) for i in range(2) for node in range(2)}
    assert sent == {(0, 0): 0, (0, 1): 0, (1, 0): 5, (1, 1): 0}  # the last rank of node 0 has it


def test_the_same_plan_is_made_once():
    problem = shards(Causal(), Zigzag(), 100, 4)
    assert two_level_plan(problem, 2) is two_level_plan(problem, 2)


# A flat ring over queries and keys of two sequences: the same truths.


@every_layout
@every_mask
def test_a_ring_of_cross_attention_computes_every_visible_pair_exactly_once(layout, mask_for):
    for world in (2, 5):
        for problem in spreads(layout, mask_for, world)[world % 2 :: 2]:
            chosen, walk = ring_plan(problem), Walk(problem)
            for plan in (chosen, RingPlan(problem, (0, *reversed(chosen.offsets[1:])))):
                count = torch.zeros(*walk.allowed.shape, dtype=torch.int8)
                for rank in range(world):
                    for at, stage in enumerate(plan.stages(rank)):
                        held = walk.keys[stage.block][stage.seen.start : stage.seen.stop]
                        assert set(stage.seen) <= set(stage.keys)
                        assert at == 0 or stage.seen == hull(walk.seen(range(rank, rank + 1), stage.block))
                        count[walk.queries[rank][:, None], held] += covered(stage.patch)[0]
                assert torch.equal(count, walk.allowed.to(torch.int8)), plan


# Shards of a node taken together.


@every_layout
def test_the_shards_of_a_node_together_are_its_positions_in_order_or_refused(layout):
    for nodes, ranks_per_node in MESHES:
        for length in (0, 1, 5, 13, 30):
            problem = shards(Causal(), layout, length, nodes * ranks_per_node)
            between = node_shards(problem, ranks_per_node)
            if between is None:
                assert layout == Striped()
                assert length > nodes * ranks_per_node
                continue
            assert between.world == nodes
            for node in range(nodes):
                ranks = range(node * ranks_per_node, (node + 1) * ranks_per_node)
                held = sorted(p for rank in ranks for run in problem.queries[rank] for p in run)
                assert ranges.as_tensor(between.queries[node]).tolist() == held
                assert all(run.step == 1 for run in between.queries[node])
                assert between.keys[node] == between.queries[node]
