"""The data of a report compared with brute force: every pair once, every position once, the bytes of the plans."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmesh.core.layouts import Balanced, Contiguous, Layout, Striped, Zigzag
from attnmesh.core.masks import (
    BlockCausal,
    Causal,
    Chunked,
    Documents,
    Global,
    Mask,
    Padding,
    PerSequence,
    Prefix,
    Slices,
    SlidingWindow,
)
from attnmesh.plan.shards import SCHEDULES, Shape, shards
from attnmesh.planner.catalog import default_cluster
from attnmesh.planner.schedules import loads
from attnmesh.report import schedule_report
from attnmesh.report.data import RankGroups, default_ranks_per_node, hardware_name, in_words
from attnmesh.report.page import bands, drawing_data, pair_counts
from attnmesh.report.page import visible_pairs as visible_pair_count
from attnmesh.trace.timeline import Span
from helpers.cases import first, sweep
from helpers.masks import batch_masks, visible_pairs

SHAPE = Shape(batch=2, q_heads=6, kv_heads=3, head_dim=8, itemsize=2, sum_itemsize=4)
LAYOUTS = [Contiguous(), Zigzag(), Striped()]


def visible_mask(mask: Mask, length: int) -> torch.Tensor:
    """Which pairs are visible, [sequences or 1, length, length]."""
    return visible_pairs(mask, (range(length),), (range(length),))


@settings(max_examples=5, deadline=None)
@given(st.sampled_from(LAYOUTS), st.integers(1, 50), st.integers(1, 9), st.data())
def test_bands_hold_every_position_once_and_tiles_every_pair(layout: Layout, length: int, world: int, data):
    mask = data.draw(batch_masks(length, 2))
    workload = shards(mask, layout, length, world)
    cut = bands(workload.queries)
    assert sorted(p for band in cut for p in band.positions) == list(range(length))
    assert all(p in {p for run in workload.queries[band.rank] for p in run} for band in cut for p in band.positions)
    visible = visible_mask(mask, length)
    rows = [torch.tensor(list(band.positions)) for band in cut]
    counted = [[int(visible[:, q[:, None], k].sum()) for k in rows] for q in rows]
    assert pair_counts(workload, cut, cut) == counted


@pytest.mark.parametrize(
    ("mask", "layout"),
    [
        (Causal() & (Global(3) | SlidingWindow(6)), Zigzag()),
        sweep(Global(3, both=True) | SlidingWindow(4, 4), Contiguous()),
        sweep(Prefix(30), Zigzag()),
        sweep(BlockCausal(16), Zigzag()),
        sweep(Causal() & Padding([50, 97], side="left", length=97), Zigzag()),
        sweep(PerSequence([Prefix(20), Documents([40, 57]) & Causal()]), Striped()),
    ],
    ids=str,
)
def test_pairs_operations_and_bytes_are_those_of_brute_force(mask: Mask, layout: Layout):
    length, world = 97, 4
    report = schedule_report(mask, layout, length, world, SHAPE, ranks_per_node=2)
    drawn, visible = drawing_data(report), visible_mask(mask, length)
    pairs = int(visible.sum())
    assert sum(map(sum, drawn["pairs"])) == pairs
    flops = pairs * (1 if mask.sequences else SHAPE.batch) * SHAPE.q_heads * 2 * 2 * SHAPE.head_dim
    for view in report.schedules:
        assert sum(tile.pairs * len(tile.heads) for step in view.steps for tile in step.tiles) == pairs * SHAPE.q_heads
        assert sum(load.flops for load in view.forward) == flops
        assert 2 * sum(load.flops for load in view.backward) == 5 * flops
    # Keys that a rank attends to and does not hold, of any sequence: a message has the rows of the whole batch.
    at = [torch.tensor([p for run in layout.ranges(length, world, r) for p in run]) for r in range(world)]
    seen = [visible[:, rows].any(1).any(0) for rows in at]
    missing = sum(int(keys.sum() - keys[rows].sum()) for rows, keys in zip(at, seen, strict=True))
    sent = {view.name: sum(load.sent for load in view.forward) for view in report.schedules}
    assert sent["allgather"] == sent["ring"] == missing * SHAPE.key_row


def test_a_long_sequence_costs_no_more_than_a_short_one():
    n = 10**8
    assert visible_pair_count(Causal(), range(n // 2, n), range(n // 2)) == (n // 2) ** 2
    assert visible_pair_count(Causal(), range(n // 2), range(n // 2, n)) == 0


@pytest.mark.parametrize("layout", first(1, LAYOUTS), ids=str)
def test_the_strips_hold_every_position_once(layout):
    drawn = drawing_data(schedule_report(Causal(), layout, 101, 4, SHAPE))
    held = [p for shard in drawn["shards"] for run in shard["runs"] for p in range(*run)]
    assert sorted(held) == list(range(101))
    assert [shard["count"] for shard in drawn["shards"]] == [layout.local_length(101, 4, r) for r in range(4)]
    assert drawn["strip"] == (32 if layout == Striped() else 101)


def test_drawing_data_has_the_loads_and_the_selected_schedule():
    report = schedule_report(Causal(), Zigzag(), 64, 4, SHAPE, ranks_per_node=2)
    drawn = drawing_data(report)
    assert [each["name"] for each in drawn["schedules"]] == list(SCHEDULES)
    for each in drawn["schedules"]:
        for way in ("forward", "backward"):
            due = loads(each["name"], report.workload, backward=way == "backward")
            assert each[way]["flops"] == [load.flops for load in due]
            sent = zip(each[way]["intra_node"], each[way]["inter_node"], strict=True)
            assert [a + b for a, b in sent] == [load.sent for load in due]
    assert drawn["selected"] == report.choice.schedule


def test_an_uneven_layout_has_its_imbalance():
    views = {view.name: view for view in schedule_report(Causal(), Contiguous(), 4, 2, SHAPE).schedules}
    assert views["ring"].imbalance == pytest.approx(7 / 5)  # pairs: 3 and 7
    assert views["ulysses"].imbalance == 1


def test_timelines_begin_at_zero_and_are_cut_where_they_are_too_long():
    ranges = [Span(0, "compute", "a", 5.0 + i, 5.5 + i, {"step": i, "bytes": 7}) for i in range(8001)]
    report = replace(schedule_report(Causal(), Zigzag(), 8, 2, SHAPE), timelines={"measured": ranges[::-1]})
    (timeline,) = drawing_data(report)["timelines"]
    assert (timeline["left_out"], len(timeline["spans"])) == (1, 8000)
    assert timeline["spans"][1] == [0, "compute", "a", 1.0, 1.5, 1, "bytes 7"]


def test_nodes_are_divided_in_the_middle():
    assert [default_ranks_per_node(world) for world in (1, 2, 3, 4, 6, 8, 16, 7)] == [1, 2, 3, 2, 3, 4, 4, 7]


@pytest.mark.parametrize(
    ("world", "ranks_per_node", "rows", "size", "noun"),
    [
        (16, 8, 16, 1, "rank"),
        (32, 8, 4, 8, "node"),
        (64, 2, 16, 4, "group"),
        (32, 32, 16, 2, "group"),
        (17, 17, 9, 2, "group"),
    ],
)
def test_ranks_beyond_16_are_grouped_by_node(world, ranks_per_node, rows, size, noun):
    groups = RankGroups.of(world, ranks_per_node)
    assert (len(groups.ranks), groups.size, groups.noun) == (rows, size, noun)
    assert [rank for ranks in groups.ranks for rank in ranks] == list(range(world))


def test_a_grouped_report_draws_the_first_rank_of_every_node():
    timelines = {str(world): [Span(rank, "send", "a", 0, 1) for rank in range(world)] for world in (3, 20)}
    report = schedule_report(Causal(), Zigzag(), 160, 20, SHAPE, ranks_per_node=5, timelines=timelines)
    drawn = drawing_data(report)
    assert (drawn["group_size"], drawn["group_noun"]) == (5, "node")
    for each in drawn["schedules"]:
        assert {span[0] for span in each["timeline"]["spans"]} == {0, 5, 10, 15}
    assert [[span[0] for span in each["spans"]] for each in drawn["timelines"]] == [[0, 1, 2], [0, 5, 10, 15]]


def test_estimates_name_device_and_links():
    assert hardware_name(default_cluster("cuda"), nodes=1) == "h200, nvlink4 (450 GB/s)"
    report = schedule_report(Causal(), Zigzag(), 64, 4, SHAPE, ranks_per_node=2)
    assert report.hardware == "h200, nvlink4 (450 GB/s) within a node, infiniband (50 GB/s) between nodes"
    assert all(report.hardware == each["timeline"]["hardware"] for each in drawing_data(report)["schedules"])
    on_cpu = schedule_report(Causal(), Zigzag(), 64, 2, SHAPE, device="cpu")
    assert on_cpu.hardware.startswith("cpu, loopback (")


def test_masks_in_words():
    assert in_words(Causal() & SlidingWindow(4095)) == "causal and window of 4,095 before"
    assert in_words(Documents([3, 4])) == "2 documents"
    assert in_words(Documents([3, 4], prefixes=[1, 0])) == "2 documents, causal after a prefix"
    union = Causal() & (Global(4) | SlidingWindow(1023))
    assert in_words(union) == "causal and (4 global tokens or window of 1,023 before)"
    assert in_words(Global(4, both=True) | union) == f"4 global tokens in both directions or ({in_words(union)})"
    assert in_words(Padding([3, 5], side="left", length=8)) == "2 sequences padded on the left"
    assert in_words(PerSequence([Prefix(2), Causal()])) == "2 masks, one per sequence"
    assert [in_words(mask) for mask in (Prefix(2000), Chunked(8192), BlockCausal(32), Slices([]))] == [
        "causal after a prefix of 2,000", "causal in chunks of 8,192", "causal by blocks of 32", "0 slices"
    ]  # fmt: skip
    assert in_words(Balanced(union)) == "balanced for the mask"
    assert [in_words(layout) for layout in LAYOUTS] == ["contiguous", "zigzag", "striped"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"world": 65}, "world must be 1 to 64 ranks for a report, got 65"),
        ({"world": 0}, "world must be 1 to 64"),
        ({"length": 0}, "length must be a positive integer, got 0"),
        ({"ranks_per_node": 3}, "ranks_per_node must divide the 4 ranks, got 3"),
        ({"shape": replace(SHAPE, kv_heads=4)}, "kv_heads must divide the 6 query heads, got 4"),
        ({"shape": replace(SHAPE, head_dim=0)}, "head_dim must be a positive integer, got 0"),
        ({"mask": Documents([3])}, "must add up to the sequence length"),
        ({"layout": Zigzag(200)}, "layout must give at most 256 runs"),
    ],
)
def test_invalid_arguments_are_refused(given, message):
    usual = {"mask": Causal(), "layout": Zigzag(), "length": 4096, "world": 4, "shape": SHAPE}
    with pytest.raises(ValueError, match=message):
        schedule_report(**usual | given)
