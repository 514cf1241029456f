"""What schedules ask of ranks, which one is chosen and what `explain` says: figures held against brute force."""

import re
import time
from dataclasses import replace
from itertools import product

import pytest
import torch

from attnmesh import ContextParallel, run_virtual
from attnmesh.core.layouts import Balanced, Contiguous, Layout, Striped, Zigzag
from attnmesh.core.masks import Causal, Documents, Full, Mask, SlidingWindow
from attnmesh.plan.shards import SCHEDULES, Shape, Workload, shards, why_not
from attnmesh.planner.auto import Explanation, _seconds_of_rings, choose_schedule
from attnmesh.planner.catalog import default_cluster
from attnmesh.planner.cost import schedule_cost
from attnmesh.planner.program import Load
from attnmesh.planner.schedules import loads
from helpers.cases import sweep
from helpers.clusters import cluster
from helpers.masks import visible_pairs
from helpers.plans import EVEN, LONG, WIDE, layouts_and_masks

HYBRIDS = [name for name in SCHEDULES if "+" in name]
SHAPE = Shape(batch=2, q_heads=4, kv_heads=2, head_dim=8, itemsize=2, sum_itemsize=4)
USUAL = Shape(batch=1, q_heads=32, kv_heads=8, head_dim=128, itemsize=2, sum_itemsize=4)
FREE_TRAVEL = cluster()  # links cost nothing


def case_of(
    mask: Mask,
    layout: Layout,
    length: int,
    world: int,
    *,
    ranks_per_node: int | None = None,
    shape: Shape = SHAPE,
    **keys,
) -> Workload:
    return Workload(shards(mask, layout, length, world, **keys), shape, ranks_per_node or world)


def everywhere(workload: Workload, *, backward: bool = False) -> dict[str, list[Load]]:
    able = [name for name in SCHEDULES if why_not(name, workload.shards, workload.ranks_per_node) is None]
    return {name: loads(name, workload, backward=backward) for name in able}


# Work.


@layouts_and_masks
def test_every_schedule_does_the_work_of_all_visible_pairs_and_no_more(layout, mask_for):
    for length, key_length in ((30, None), (13, 22)):
        mask = mask_for(key_length or length)
        pairs = int(visible_pairs(mask, (range(length),), (range(key_length or length),)).sum())
        workload = case_of(mask, layout, length, 4, ranks_per_node=2, key_length=key_length)
        for backward, products in ((False, 2), (True, 5)):
            for name, ranks in everywhere(workload, backward=backward).items():
                assert (
                    sum(load.flops for load in ranks) == 2 * products * pairs * (2 // (mask.sequences or 1)) * 4 * 8
                ), name


def test_a_rank_works_on_its_own_queries_or_under_ulysses_on_its_own_heads():
    workload = case_of(Causal(), Contiguous(), 24, 3, shape=Shape(1, 4, 1, 8, 2, 4))
    assert [load.flops for load in loads("ring", workload, backward=False)] == [32 * n * 4 for n in (36, 100, 164)]
    assert [load.flops for load in loads("ulysses", workload, backward=False)] == [32 * 300 * n for n in (2, 1, 1)]


# Bytes. That ranks really send these is shown where they run.


def test_bytes_within_a_node_and_between_nodes_are_all_bytes():
    for mask in (Full(), Causal(), SlidingWindow(5)):
        for ranks_per_node in (1, 2, 3, 6):
            for name, ranks in everywhere(
                case_of(mask, Zigzag(), 48, 6, ranks_per_node=ranks_per_node), backward=True
            ).items():
                assert all(load.sent == load.intra_node + load.inter_node for load in ranks)
                if ranks_per_node == 6:
                    assert not any(load.inter_node for load in ranks), name
                if ranks_per_node == 1:
                    assert not any(load.intra_node for load in ranks), name


@pytest.mark.parametrize(("nodes", "ranks_per_node"), [(2, 4), (4, 2), (3, 3)])
def test_rings_within_nodes_cross_the_links_between_nodes_less_often_than_one_ring(nodes, ranks_per_node):
    """A block of a flat ring crosses a border at almost every stage, always on the same link; here once a node."""
    world, rows = nodes * ranks_per_node, 8
    workload = case_of(Full(), Contiguous(), rows * world, world, ranks_per_node=ranks_per_node)
    flat, rings = (loads(name, workload, backward=False) for name in ("ring", "ring+ring"))
    assert [load.inter_node for load in rings] == [rows * (nodes - 1) * SHAPE.key_row] * world
    at_the_border = [
        rows * (world - 1) * SHAPE.key_row if (rank + 1) % ranks_per_node == 0 else 0 for rank in range(world)
    ]
    turned = [at_the_border[-rank - 1] for rank in range(world)]
    assert [load.inter_node for load in flat] in (at_the_border, turned)
    assert max(load.inter_node for load in flat) > max(load.inter_node for load in rings)


@pytest.mark.parametrize("schedule", ["ring", "allgather"])
def test_bytes_of_a_window_are_those_of_the_window(schedule):
    def sent(length: int, left: int) -> int:
        workload = case_of(SlidingWindow(left), Contiguous(), length, 4)
        return sum(load.sent for load in loads(schedule, workload, backward=False))

    assert sent(256, 16) == sent(512, 16) == sent(1024, 16) == 3 * 16 * SHAPE.key_row
    assert sent(1024, 32) == 2 * sent(1024, 16)


@pytest.mark.parametrize("schedule", ["ring", "allgather", "ring+ring"])
def test_documents_within_ranks_cost_no_byte(schedule):
    workload = case_of(Documents([16] * 4), Contiguous(), 64, 4, ranks_per_node=2)
    assert [load.sent for load in loads(schedule, workload, backward=True)] == [0] * 4


def test_ulysses_moves_as_much_whatever_the_mask():
    sent = {
        mask: [load.sent for load in loads("ulysses", case_of(mask, Zigzag(), 64, 4), backward=True)]
        for mask in (Full(), Causal(), SlidingWindow(1), Documents([16] * 4))
    }
    assert len(set(map(tuple, sent.values()))) == 1


def test_kv_heads_that_several_ranks_read_go_to_each_and_their_gradients_come_back_in_float32():
    shared = case_of(Full(), Contiguous(), 8, 2, shape=Shape(1, 2, 1, 8, 2, 4))
    forward, backward = (loads("ulysses", shared, backward=way)[0] for way in (False, True))
    row = 8 * 2  # one head of one position
    assert forward.sent == 4 * row + 4 * 2 * row + 4 * row  # q; k and v; out
    assert backward.sent == 4 * row + 4 * row + 4 * 2 * 8 * 4  # the gradients of out and q; dk and dv in float32
    apart = case_of(Full(), Contiguous(), 8, 2, shape=Shape(1, 2, 2, 8, 2, 4))
    assert loads("ulysses", apart, backward=True)[0].sent == 4 * row + 4 * row + 4 * 2 * row


def test_an_lse_that_is_asked_for_travels_under_ulysses_and_so_does_its_gradient():
    workload = case_of(Full(), Contiguous(), 8, 4, ranks_per_node=2)
    for name, backward in product(SCHEDULES, (False, True)):
        without, with_it = (loads(name, replace(workload, lse=lse), backward=backward)[0].sent for lse in (False, True))
        traded = {"ulysses": 3 * 2 * 1, "ulysses+ring": 1 * 2 * 2, "ulysses+allgather": 1 * 2 * 2}  # ranks, rows, heads
        assert with_it - without == traded.get(name, 0) * 2 * 4


# Refusals.


@pytest.mark.parametrize("schedule", HYBRIDS)
def test_two_levels_want_a_mesh_of_two_dimensions(schedule):
    for ranks_per_node in (1, 4):
        why = why_not(schedule, shards(Causal(), Zigzag(), 16, 4), ranks_per_node)
        assert why.startswith(f"{schedule} requires a two-dimensional mesh")
    assert why_not(schedule, shards(Causal(), Zigzag(), 16, 4), 2) is None


def test_shards_that_interleave_are_refused_where_a_node_takes_them_together():
    for queries, keys in ((Striped(), None), (Zigzag(), Striped()), (Striped(), Zigzag())):
        problem = shards(Causal(), queries, 16, 4, keys)
        for schedule in SCHEDULES:
            why = why_not(schedule, problem, 2)
            if schedule in ("ulysses+ring", "ulysses+allgather"):
                assert "in this layout the shards of a node interleave" in why
            else:
                assert why is None


# The choice.


def test_the_choice_is_the_schedule_with_the_fewest_estimated_seconds():
    for machine in (default_cluster("cuda"), default_cluster("cpu")):
        for mask in (Full(), Causal(), SlidingWindow(100)):
            workload = case_of(mask, Zigzag(), 4096, 8, ranks_per_node=4)
            choice = choose_schedule(workload, machine)
            assert choice.seconds == {
                name: sum(schedule_cost(name, workload, machine, backward=way).seconds for way in (False, True))
                for name in SCHEDULES
            }
            assert choice.seconds[choice.schedule] == min(choice.seconds.values())
            assert choice.unsupported == {}


@pytest.mark.parametrize(
    ("mask", "layout", "length"),
    [
        (Causal(), Zigzag(), 9_000),
        sweep(Full(), Contiguous(), 1 << 20),
        sweep(SlidingWindow(900), Contiguous(), 65_536),
    ],
)
def test_what_is_left_early_is_slower_than_the_choice(mask, layout, length):
    workload, machine = case_of(mask, layout, length, 24, ranks_per_node=8, shape=USUAL), default_cluster("cuda")
    choice, whole = choose_schedule(workload, machine, all_costs=False), choose_schedule(workload, machine)
    assert choice.schedule == whole.schedule
    assert choice.costs == {name: whole.costs[name] for name in choice.costs}
    assert choice.slower
    assert {*choice.costs, *choice.slower} == set(whole.costs)
    assert all(whole.seconds[name] > whole.seconds[whole.schedule] for name in choice.slower)
    assert 0 < _seconds_of_rings(workload, machine) <= min(whole.seconds["ring"], whole.seconds["ring+ring"])
    assert f"{choice.slower[0]} more" in str(choice)


def test_rings_of_many_ranks_are_left_before_they_are_simulated(monkeypatch):
    monkeypatch.setattr("attnmesh.planner.vectorized.VectorizedRings._offsets_and_directions", None)
    workload = case_of(Causal(), Zigzag(), 1 << 18, 1024, ranks_per_node=64, shape=USUAL)
    assert choose_schedule(workload, default_cluster("cuda"), all_costs=False).slower[-2:] == ("ring", "ring+ring")


def test_where_links_cost_nothing_the_simplest_of_those_that_tie_is_chosen():
    choice = choose_schedule(case_of(Causal(), Zigzag(), 64, 4, ranks_per_node=2), FREE_TRAVEL)
    assert choice.schedule == "ring" == next(iter(SCHEDULES))


def test_where_ranks_wait_for_the_one_with_the_most_keys_heads_are_divided():
    assert choose_schedule(case_of(Causal(), Contiguous(), 64, 4), FREE_TRAVEL).schedule == "ulysses"


def test_a_short_window_is_not_paid_for_with_all_to_alls():
    workload = case_of(SlidingWindow(128), Contiguous(), 65536, 8, shape=USUAL)
    choice = choose_schedule(workload, default_cluster("cuda"))
    assert choice.schedule in ("ring", "allgather")
    assert choice.seconds["ulysses"] > choice.seconds[choice.schedule]


def test_slow_links_between_nodes_call_for_two_levels():
    slow = cluster(flops=5e14, intra_node=3e11, inter_node=1e9)  # two nodes far apart
    for mask in (Full(), Causal()):
        choice = choose_schedule(case_of(mask, Zigzag(), 65536, 8, ranks_per_node=4, shape=USUAL), slow)
        assert choice.schedule in HYBRIDS
    choice = choose_schedule(case_of(Full(), Zigzag(), 65536, 8, shape=USUAL), slow)
    assert choice.schedule not in HYBRIDS


def test_shards_of_many_runs_keep_rings_out_of_the_choice_and_it_says_so():
    choice = choose_schedule(case_of(Causal(), Zigzag(3), 240, 4, ranks_per_node=2), default_cluster("cuda"))
    assert set(choice.unsupported) == {"ring", "ulysses+ring", "ring+ring"}
    assert choice.unsupported["ring"] == "shards of 6 runs would make the blocks of a ring too small"
    assert set(choice.seconds) == {"allgather", "ulysses", "ulysses+allgather"}


def test_what_cannot_serve_is_refused_and_never_chosen():
    choice = choose_schedule(case_of(Causal(), Striped(), 64, 4), default_cluster("cpu"))
    assert set(choice.unsupported) == set(HYBRIDS)
    assert choice.schedule not in HYBRIDS


@pytest.mark.parametrize(
    ("layout", "mask"),
    [
        (Zigzag(), Causal()),
        sweep(Contiguous(), SlidingWindow(4096)),
        sweep(Striped(), Causal()),
        sweep(Zigzag(), EVEN[32]),
    ],
    ids=lambda x: str(x)[:40],
)
@pytest.mark.timeout(30)
def test_what_a_rank_pays_for_a_choice_over_131072_tokens_and_32_ranks_is_small(layout, mask):
    start = time.process_time()
    choice = choose_schedule(case_of(mask, layout, LONG, WIDE, ranks_per_node=8, shape=USUAL), default_cluster("cuda"))
    seconds = time.process_time() - start
    assert choice.schedule in SCHEDULES
    assert seconds < 4


# In words.


def explained(
    world: int, *, layout: Layout | None = None, schedule: str = "auto", ranks_per_node: int | None = None, **call
):
    """What every rank is told; it must be the same."""
    call = {"length": 64, "q_heads": 4, "kv_heads": 2, "head_dim": 8} | call

    def rank(comm) -> Explanation:
        cp = ContextParallel(comm, layout=layout or Zigzag(), schedule=schedule, ranks_per_node=ranks_per_node)
        told = cp.explain(**call)
        assert comm.traffic.bytes == 0
        return told

    told = run_virtual(world, rank)
    assert all(other == told[0] for other in told)
    return told[0]


def test_an_explanation_holds_the_loads_of_the_schedule():
    for schedule in SCHEDULES:
        told = explained(4, schedule=schedule, ranks_per_node=2, batch=3, dtype=torch.float32)
        workload = case_of(Causal(), Zigzag(), 64, 4, ranks_per_node=2, shape=Shape(3, 4, 2, 8, 4, 4))
        assert (told.schedule, told.workload, told.choice) == (schedule, workload, None)
        assert told.forward == loads(schedule, workload, backward=False)
        assert told.backward == loads(schedule, workload, backward=True)
        assert str(told).endswith("schedule given explicitly")


@pytest.mark.parametrize("world", [2, 4, 8])
def test_imbalance_is_the_busiest_rank_over_the_mean(world):
    work = [sum(p + 1 for p in Contiguous().positions(64, world, rank).tolist()) for rank in range(world)]
    for schedule in ("ring", "allgather"):
        told = explained(world, layout=Contiguous(), schedule=schedule)
        assert told.imbalance == pytest.approx(max(work) * world / sum(work))
        assert f"imbalance {told.imbalance:.4f}" in str(told).splitlines()
        assert explained(world, layout=Zigzag(), schedule=schedule).imbalance == 1.0
    assert explained(world, layout=Contiguous(), schedule="ulysses", q_heads=8, kv_heads=8).imbalance == 1.0


def test_heads_that_do_not_divide_show_as_imbalance():
    assert explained(3, schedule="ulysses", q_heads=4, kv_heads=4).imbalance == pytest.approx(2 / (4 / 3))


def test_nothing_to_do_is_even():
    assert explained(3, length=0).imbalance == 1.0


def test_packed_documents_are_uneven_under_a_zigzag_and_even_under_a_balanced_layout():
    mask = Causal() & Documents([3000, 100, 200, 400, 50, 250, 46, 50])
    uneven, even = (
        explained(4, layout=layout, schedule="allgather", mask=mask, length=4096)
        for layout in (Zigzag(), Balanced(mask))
    )
    assert uneven.imbalance > 1.1
    assert even.imbalance <= 1.011


def test_the_text_has_a_line_for_every_rank_with_its_positions_work_and_bytes():
    told = explained(2, schedule="ring", length=16, q_heads=2, kv_heads=1, head_dim=64, dtype=torch.float16)
    title, head, first, second, *_ = str(told).splitlines()
    assert title == "ring over 2 ranks"
    columns = ["rank", "queries", "visible keys", "GFLOP forward", "backward", "MB sent forward", "backward"]
    assert re.split(r" {2,}", head.strip()) == columns
    row = 2 * 64 * 2  # bytes of a key
    forward, backward = told.forward[0], told.backward[0]
    assert (forward.sent, told.forward[1].sent) in ((4 * row, 8 * row), (8 * row, 4 * row))
    for rank, (line, queries, keys) in enumerate(((first, "0..3, 12..15", "0..15"), (second, "4..11", "0..11"))):
        there, back = told.forward[rank], told.backward[rank]
        figures = [f"{x:.4g}" for x in (there.flops / 1e9, back.flops / 1e9, there.sent / 1e6, back.sent / 1e6)]
        assert re.split(r" {2,}", line.strip()) == [str(rank), queries, keys, *figures]
    assert forward.flops * 5 == backward.flops * 2


def test_the_text_says_what_goes_between_nodes():
    told = explained(4, schedule="ring+ring", ranks_per_node=2, mask=Full())
    for rank, line in enumerate(str(told).splitlines()[2:6]):
        assert f"({told.forward[rank].inter_node / 1e6:.4g} between nodes)" in line
    assert "between nodes" not in str(explained(4, schedule="ring", mask=Full()))


def test_the_text_of_a_choice_ranks_the_others_and_says_why_some_cannot_serve():
    told = explained(4, length=4096, device="cpu")
    said = str(told).splitlines()
    at = said.index("fastest by estimate for cpu, forward and backward:")
    ranked = [
        re.fullmatch(r"  (\S+): ([\d.]+) ms(?: \(tie\))?", line)
        for line in said[at + 1 : at + 1 + len(told.choice.seconds)]
    ]
    assert ranked[0][1] == told.schedule == told.choice.schedule
    assert {match[1]: float(match[2]) for match in ranked} == pytest.approx(
        {name: 1e3 * seconds for name, seconds in told.choice.seconds.items()}, abs=1e-3
    )
    times = [float(match[2]) for match in ranked]
    assert times == sorted(times)
    for name in HYBRIDS:
        assert f"  {name}: {told.choice.unsupported[name]}" in said
    assert "estimate for h200" in str(explained(4, length=4096))


@pytest.mark.parametrize("device", ["cpu", sweep("cuda")])
def test_auto_is_the_choice_by_cost_of_the_same_case(device):
    for world, ranks_per_node in ((4, None), (4, 2), (6, 3)):
        told = explained(world, ranks_per_node=ranks_per_node, length=4096, device=device)
        assert told.cluster == default_cluster(device)
        assert told.choice == choose_schedule(told.workload, told.cluster)
        assert told.schedule == told.choice.schedule


def test_ranks_with_stripes_with_many_runs_and_with_nothing_are_described_briefly():
    assert re.search(r"0  0\.\.60 step 4  ", str(explained(4, layout=Striped())))
    assert re.search(r" 0\.\.\d+, \.\.\. 6 runs, 16 positions  ", str(explained(4, layout=Zigzag(3), length=64)))
    last = str(explained(4, layout=Contiguous(), length=3, schedule="ring")).splitlines()[5]
    assert re.split(r" {2,}", last.strip())[:3] == ["3", "none", "none"]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ({"schedule": "ring+ring"}, r"schedule='ring\+ring' cannot serve this: .* two-dimensional mesh"),
        ({"schedule": "ulysses+ring", "ranks_per_node": 2, "layout": Striped()}, "cannot serve this: .* interleave"),
        ({"length": -1}, "length must be an integer >= 0, got -1"),
        ({"key_length": 2.5}, r"key_length must be an integer >= 0, got 2\.5"),
        ({"mask": "causal"}, "mask must be an attnmesh mask .* got 'causal'"),
        ({"mask": Documents([5])}, r"sequence length 64, but \(5\) add up to 5"),
    ],
)
def test_what_cannot_be_explained_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        explained(4, **call)
