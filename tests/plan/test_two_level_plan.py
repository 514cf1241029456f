"""A ring of rings, walked through without a process: nodes hand keys on once, ranks within a node pass them around."""

import pytest
import torch
from hypothesis import given, settings

from attnmesh.core import ranges
from attnmesh.core.layouts import Contiguous, Layout, Striped, Zigzag
from attnmesh.core.masks import Causal, Documents, Full, SlidingWindow
from attnmesh.plan.ring import RingPlan, ring_plan
from attnmesh.plan.shards import Shards, node_shards, shards
from attnmesh.plan.two_level import TwoLevelPlan, two_level_plan
from helpers.cases import first, in_turn
from helpers.plans import MASKS, problems
from helpers.ring_walk import Truth, check_pairs, check_route, rows_in

MESHES = [(3, 2), (2, 3)]  # (nodes, ranks a node)
SIDES = [(13, None), (13, 24), (24, 7), (9, 0)]  # lengths of queries and of keys
LAYOUTS = [Contiguous(), Zigzag(), Zigzag(2), Striped()]

every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=str)
layouts_and_masks = pytest.mark.parametrize(
    ("layout", "mask_for"), first(4, in_turn(LAYOUTS, list(MASKS.values())[::-1])), ids=list(MASKS)[::-1]
)


def spreads(layout: Layout, mask_for, world: int) -> list[Shards]:
    made = []
    for length, key_length in SIDES:
        key_layout = None if key_length is None else LAYOUTS[(LAYOUTS.index(layout) + 1) % len(LAYOUTS)]
        mask = mask_for(length if key_length is None else key_length)
        made.append(shards(mask, layout, length, world, key_layout, key_length))
    return made


def check(plan: TwoLevelPlan) -> None:
    """Every row to exactly the nodes that need it, there to exactly the ranks that do, and every pair once."""
    truth, per_node = Truth(plan.shards), plan.ranks_per_node
    nodes = range(plan.nodes)
    ranks_of = [range(node * per_node, (node + 1) * per_node) for node in nodes]
    offsets = set()
    for i in range(per_node):
        outer = plan.outer(i)
        check_route(outer, Truth(outer.shards).all_needed())
        offsets |= {
            offset
            for offset in range(1, plan.nodes)
            for node in nodes
            if any(truth.seen(rank, ranks_of[(node - offset) % plan.nodes][i]) for rank in ranks_of[node])
        }
    assert plan.outer_offsets[0] == 0
    assert set(plan.outer_offsets[1:]) == offsets
    count = torch.zeros(*truth.visible.shape, dtype=torch.int8)
    for node in nodes:
        for at in range(len(plan.outer_offsets)):
            inner = plan.inner_ring(node, at)
            stages = [plan.outer(i).stages(node)[at] for i in range(per_node)]
            for i, (stage, keys) in enumerate(zip(stages, inner.shards.keys, strict=True)):
                held = truth.keys[stage.blocks[0].owner * per_node + i][rows_in(stage.blocks[0].rows)]
                assert torch.equal(ranges.as_tensor(keys), held)
            check_route(inner, Truth(inner.shards).all_needed())
            check_pairs(inner, count)
    assert torch.equal(count, truth.visible.to(torch.int8))
    for rank in range(plan.world):
        assert plan.pairs(rank) == int(truth.visible[:, truth.queries[rank]].sum())


@layouts_and_masks
def test_every_pair_is_computed_once_and_every_row_is_sent_to_the_nodes_and_ranks_that_see_it(layout, mask_for):
    for nodes, ranks_per_node in MESHES:
        for problem in spreads(layout, mask_for, nodes * ranks_per_node)[nodes - 2 :: 2]:
            chosen = two_level_plan(problem, ranks_per_node)
            turned = TwoLevelPlan(problem, ranks_per_node, (0, *reversed(chosen.outer_offsets[1:])))
            for plan in dict.fromkeys((chosen, turned)):
                check(plan)
            outer = [[plan.outer(i).connections for i in range(ranks_per_node)] for plan in (chosen, turned)]
            assert sum(outer[0]) <= sum(outer[1])


@settings(max_examples=5, deadline=None)
@given(problems(ranks=(4, 6, 8)))
def test_the_same_of_random_masks_and_layouts(problem):
    check(two_level_plan(problem, 2))


@pytest.mark.sweep
@settings(max_examples=40, deadline=None)
@given(problems(ranks=(4, 6, 8)))
def test_the_same_of_many_random_masks_and_layouts(problem):
    check(two_level_plan(problem, 2))


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


# A flat ring over queries and keys of two sequences.


@layouts_and_masks
def test_a_ring_of_cross_attention_computes_every_visible_pair_exactly_once(layout, mask_for):
    for world in (2, 5):
        for problem in spreads(layout, mask_for, world)[world % 2 :: 2]:
            chosen, truth = ring_plan(problem), Truth(problem)
            for plan in (chosen, RingPlan(problem, (0, *reversed(chosen.offsets[1:])))):
                check_route(plan, truth.all_needed())
                count = torch.zeros(*truth.visible.shape, dtype=torch.int8)
                check_pairs(plan, count)
                assert torch.equal(count, truth.visible.to(torch.int8)), plan


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
