"""Plans by arrays: the figures of plans patch by patch, to the row."""

import tracemalloc
from itertools import zip_longest

import numpy as np
import pytest

from attnmesh.core.layouts import Contiguous, Striped, Zigzag
from attnmesh.core.masks import Causal, Documents, Full, SlidingWindow
from attnmesh.plan.shards import SCHEDULES, Shape, Workload, shards
from attnmesh.planner import program as programs
from attnmesh.planner import vectorized
from attnmesh.planner.program import MessageTotals
from attnmesh.planner.schedules import program
from attnmesh.planner.vectorized import VectorizedShards
from helpers.cases import first, in_turn, sweep

SHAPE = Shape(batch=2, q_heads=6, kv_heads=3, head_dim=8, itemsize=2, sum_itemsize=4)
MASKS = [Full(), Causal(), SlidingWindow(7), SlidingWindow(3, 5), Causal() & SlidingWindow(20, 4)]


def rounds(monkeypatch, most, schedule, workload, backward):
    monkeypatch.setattr(vectorized, "MAX_PLANNED_RANKS", most)
    return list(program(schedule, workload, backward=backward).rounds())


def moved(messages):
    order = np.lexsort((messages.target, messages.source))
    return [messages.source[order].tolist(), messages.target[order].tolist(), messages.nbytes[order].tolist()]


def assert_same(plain, wide):
    for a, b in zip_longest(plain, wide):
        assert a.name == b.name
        assert a.waits == b.waits
        assert list(a.starts) == list(b.starts)
        for name in a.starts:
            assert moved(a.starts[name]) == moved(b.starts[name]), name
        for one, other in zip_longest(a.work, b.work):
            assert one.kind == other.kind
            if one.kind not in ("copy", "relayout"):  # how often partial results are merged is estimated
                np.testing.assert_array_equal(one.size, other.size)


@pytest.mark.parametrize(
    ("layout", "mask", "backward"),
    first(4, in_turn([Contiguous(), Zigzag(), Zigzag(2)], [*MASKS, Causal()], [True, False, True, True])),
    ids=str,
)
def test_rings_and_gatherings_by_arrays_are_those_by_patches(layout, mask, backward, monkeypatch):
    for length in (96, 53, 9):
        workload = Workload(shards(mask, layout, length, 6), SHAPE, 6)
        for schedule in ("ring", "allgather", "ulysses"):
            assert_same(*(rounds(monkeypatch, most, schedule, workload, backward) for most in (64, 0)))


@pytest.mark.parametrize(
    ("nodes", "ranks_per_node", "mask", "backward"),
    [
        (2, 3, Full(), False),
        sweep(2, 3, Causal(), True),
        sweep(4, 2, Full(), False),
        sweep(4, 2, Causal(), True),
        sweep(3, 3, Full(), True),
        sweep(5, 2, Causal(), False),
    ],
    ids=str,
)
def test_two_levels_by_arrays_are_those_by_patches(nodes, ranks_per_node, mask, backward, monkeypatch):
    for layout, length in ((Zigzag(), 240), (Contiguous(), 240), (Zigzag(), 101)):
        workload = Workload(shards(mask, layout, length, nodes * ranks_per_node), SHAPE, ranks_per_node)
        for schedule in ("ring+ring", "ulysses+ring", "ulysses+allgather"):
            assert_same(*(rounds(monkeypatch, most, schedule, workload, backward) for most in (64, 0)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_by_the_million_are_kept_as_their_sums(schedule, monkeypatch):
    workload = Workload(shards(Causal(), Zigzag(), 128, 8), SHAPE, 4)
    plain = rounds(monkeypatch, 64, schedule, workload, True)
    for module in (vectorized, programs):
        monkeypatch.setattr(module, "MAX_LISTED_MESSAGES", 0)
    folded = rounds(monkeypatch, 0, schedule, workload, True)
    for a, b in zip_longest(plain, folded):
        for name, messages in a.starts.items():
            sums = b.starts[name]
            if not isinstance(sums, MessageTotals):
                assert moved(messages) == moved(sums)
                continue
            intra_node = messages.source // 4 == messages.target // 4
            for side, ranks, kept in (
                ("intra_node_out", messages.source, intra_node), ("intra_node_in", messages.target, intra_node),
                ("inter_node_out", messages.source, ~intra_node), ("inter_node_in", messages.target, ~intra_node),
            ):  # fmt: skip
                expected = np.bincount(ranks[kept], messages.nbytes[kept], 8)
                np.testing.assert_array_equal(getattr(sums, side), expected)


def test_totals_of_many_ranks_are_added_up_without_the_rows_of_all_pairs():
    held = VectorizedShards.of(shards(Causal(), Zigzag(), 4096, 600))
    assert held is not None
    tracemalloc.start()
    held.gathered([range(600)], 600, 8)
    assert tracemalloc.get_traced_memory()[1] < 600 * 600 * 8 / 4
    tracemalloc.stop()


def test_a_backward_has_the_offsets_of_its_forward(monkeypatch):
    workload = Workload(shards(Causal(), Zigzag(), 777, 24), SHAPE, 24)
    rounds(monkeypatch, 0, "ring", workload, False)
    monkeypatch.setattr(vectorized, "reported", None)  # the loop over all offsets
    assert len(rounds(monkeypatch, 0, "ring", workload, True)) == 25


def test_what_arrays_cannot_hold_stays_with_patches():
    assert VectorizedShards.of(shards(Causal(), Striped(), 64, 4)) is None
    assert VectorizedShards.of(shards(Documents([40, 24]), Zigzag(), 64, 4)) is None
    assert VectorizedShards.of(shards(Causal(), Zigzag(5), 640, 4)) is None


@pytest.mark.parametrize("mask", [Causal(), SlidingWindow(20)], ids=str)
def test_a_large_ring_keeps_the_positions_of_few_offsets(mask, monkeypatch):
    held = VectorizedShards.of(shards(mask, Zigzag(), 1000, 64))
    assert held is not None
    queries, keys = (vectorized._with_ring_dim(runs) for runs in (held.queries, held.keys))
    found = []
    for kept in (vectorized._KEPT_POSITIONS, 0):
        monkeypatch.setattr(vectorized, "_KEPT_POSITIONS", kept)
        ring = vectorized.VectorizedRings(held.band, queries, keys, np.arange(64)[None])
        found.append([tuple(column.tolist() for column in stage) for stage in ring.all_stages()])
    assert found[0] == found[1]
    assert len(ring._recent) <= 4
