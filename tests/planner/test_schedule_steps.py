"""The steps of every schedule: each visible pair is computed once, with the messages and FLOPs of its loads."""

from itertools import product

import numpy as np
import pytest
import torch

from attnmesh.core.layouts import Contiguous, Striped, Zigzag
from attnmesh.core.masks import Causal, Documents, Full, Mask, SlidingWindow
from attnmesh.plan.shards import SCHEDULES, Shape, Workload, shards, why_not
from attnmesh.planner.schedules import loads, steps
from attnmesh.planner.sizes import RankSizes
from helpers.cases import allowed_pairs, sweep

SHAPE = Shape(batch=2, q_heads=6, kv_heads=3, head_dim=8, itemsize=2, sum_itemsize=4)
MASKS = [Full(), Causal(), Causal() & SlidingWindow(5), SlidingWindow(3, 4), Documents([1, 20, 13])]


def visible(mask: Mask, length: int) -> torch.Tensor:
    return allowed_pairs(mask, torch.arange(length), torch.arange(length))


def positions(workload: Workload, shards: range) -> torch.Tensor:
    held = [p for shard in shards for run in workload.shards.queries[shard] for p in run]
    return torch.tensor(held, dtype=torch.long)


def served(workload: Workload) -> list[str]:
    return [name for name in SCHEDULES if why_not(name, workload.shards, workload.ranks_per_node) is None]


@pytest.mark.parametrize(
    ("layout", "world", "ranks_per_node"),
    [
        (Zigzag(), 4, 2),
        sweep(Contiguous(), 6, 3),
        sweep(Striped(), 6, 3),
        sweep(Zigzag(), 3, 3),
        sweep(Striped(), 1, 1),
    ],
    ids=str,
)
def test_every_visible_pair_of_every_head_is_computed_by_one_rank_at_one_step(layout, world, ranks_per_node):
    length = 34
    for mask in MASKS:
        workload = Workload(shards(mask, layout, length, world), SHAPE, ranks_per_node)
        for name in served(workload):
            counts = torch.zeros(SHAPE.q_heads, length, length, dtype=torch.long)
            for tile in (tile for step in steps(name, workload) for tile in step.tiles):
                rows, keys = positions(workload, tile.queries), positions(workload, tile.keys)
                at = torch.zeros(length, length, dtype=torch.long)
                at[rows[:, None], keys] = 1
                at *= visible(mask, length)
                assert int(at.sum()) == tile.pairs, (name, mask)
                counts[tile.heads.start : tile.heads.stop] += at
            assert torch.equal(counts, visible(mask, length).long().expand_as(counts)), (name, mask)


@pytest.mark.parametrize(
    ("layout", "shape"),
    [(Zigzag(), SHAPE), sweep(Contiguous(), Shape(1, 8, 8, 4, 2, 4)), sweep(Striped(), Shape(1, 2, 1, 4, 4, 4))],
    ids=str,
)
def test_messages_and_flops_of_all_steps_are_those_of_the_loads(layout, shape):
    for mask, (world, ranks_per_node) in product(MASKS, ((4, 2), (6, 2), (5, 5))):
        workload = Workload(shards(mask, layout, 34, world), shape, ranks_per_node)
        for name in served(workload):
            found = steps(name, workload)
            messages, tiles = ([x for step in found for x in getattr(step, part)] for part in ("messages", "tiles"))
            for rank, load in enumerate(loads(name, workload, backward=False)):
                sent = [m for m in messages if m.source == rank]
                node = rank // ranks_per_node
                assert sum(m.nbytes for m in sent) == load.sent, (name, rank)
                assert sum(m.nbytes for m in sent if m.target // ranks_per_node != node) == load.inter_node, (
                    name,
                    rank,
                )
                pairs = sum(tile.pairs * len(tile.heads) for tile in tiles if tile.rank == rank)
                assert 4 * pairs * shape.batch * shape.head_dim == load.flops, (name, rank)
            assert not any(m.source == m.target or not m.nbytes for m in messages)


def test_a_ring_receives_keys_one_step_before_it_uses_them():
    for ranks_per_node, blocks in ((4, 1), (8, 4)):  # on one node, blocks are joined
        found = steps("ring", Workload(shards(Causal(), Zigzag(), 64, 8), SHAPE, ranks_per_node))
        assert len(found) == 1 + -(-7 // blocks)
        for at, step in enumerate(found):
            for tile in step.tiles:
                arrived = [m for m in found[at - 1].messages if m.target == tile.rank]
                here = [other for other in step.tiles if other.rank == tile.rank]
                assert tile.keys == tile.queries if at == 0 else len(arrived) == len(here) <= blocks


def test_the_last_merge_rounds_two_parts_and_leaves_one_alone():
    sizes = RankSizes.of([SHAPE] * 3, [5] * 3, mask=Causal())
    found = sizes.merge(np.array([0, 1, 2]), np.array([1, 2, 3]), last=True)
    read_and_written = sizes.out_row + sizes.out_sum_row + sizes.out_row  # the part that came, the total, the result
    assert found.size.tolist() == [0, *(5 * read_and_written)[1:].tolist()]
    assert found.calls.tolist() == [0, 1, 1]
    assert sizes.merge(np.array([0, 1, 2]), np.array([1, 2, 3])).calls.tolist() == [0, 0, 0]  # they wait for more
