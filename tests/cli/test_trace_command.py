"""`attnmesh trace`: what a real run's spans say is what its plan says, and bad input is refused with a message."""

from functools import partial
from itertools import pairwise, product

import pytest

from attnmesh import run_virtual
from attnmesh.cli.options import parse_mask
from attnmesh.cli.trace import LAYOUTS, TraceCase, record_attention
from attnmesh.comm import Comm
from attnmesh.plan.allgather import head_groups
from attnmesh.plan.ring import RingPlan, ring_plan
from attnmesh.plan.shards import SCHEDULES, Shape, Workload, node_shards, shards
from attnmesh.plan.two_level import two_level_plan
from attnmesh.plan.ulysses import head_share
from attnmesh.planner.recurrent import KINDS, RecurrentShape, RecurrentWorkload, recurrent_loads
from attnmesh.planner.schedules import loads
from attnmesh.trace.timeline import TRACKS, Span, read_trace, summarize_overlap
from helpers.cases import sweep
from helpers.cli import run as run_command
from helpers.processes import run_processes

LENGTH, HEADS, KV_HEADS, HEAD_DIM, WORLD = 67, 6, 3, 8, 4


def traced_case(schedule, **changed):
    ranks_per_node = 2 if "+" in schedule else None
    given = {
        "schedule": schedule,
        "length": LENGTH,
        "layout": "contiguous",
        "mask": "causal",
        "q_heads": HEADS,
        "kv_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "backward": True,
        "ranks_per_node": ranks_per_node,
        "device": "cpu",
        "dtype": "bf16",
    }
    return TraceCase(**{**given, **changed})


def workload(case: TraceCase, world: int) -> Workload:
    mask, shape = parse_mask(case.mask, case.length), Shape(1, case.q_heads, case.kv_heads, case.head_dim, 2, 4)
    positions, ranks_per_node = shards(mask, LAYOUTS[case.layout], case.length, world), case.ranks_per_node or world
    return Workload(positions, shape, ranks_per_node, device=case.device)


def working(plan: RingPlan, rank: int) -> int:
    return sum(bool(stage.patch.blocks) for stage in plan.stages(rank))


def kernels(schedule: str, workload: Workload, rank: int) -> int:
    """How many kernels the plan asks of a rank in a forward, and in a backward."""
    if schedule == "ring":
        return working(ring_plan(workload.shards), rank)
    if schedule == "allgather":
        return len(head_groups(workload.shape.kv_heads))
    node, i = divmod(rank, workload.ranks_per_node)
    if schedule == "ring+ring":
        plan = two_level_plan(workload.shards, workload.ranks_per_node)
        return sum(working(plan.inner_ring(node, stage), i) for stage in range(len(plan.outer_offsets)))
    share = head_share(workload.shape.q_heads, workload.shape.kv_heads, workload.ranks_per_node, i)
    between = Workload(node_shards(workload.shards, workload.ranks_per_node), workload.shape, 1, device=workload.device)
    if schedule == "ulysses+allgather":
        return sum(len(head_groups(len(kv))) for _, kv in share.segments)
    return len(share.segments) * kernels("ring", between, node)


def check_spans(spans: list[Span], workload: Workload, schedule: str) -> None:
    both = [loads(schedule, workload, backward=way) for way in (False, True)]
    for rank in range(workload.shards.world):
        mine = {
            track: [span for span in spans if span.rank == rank and span.track == track]
            for track in ("compute", "send", "receive", "wait")
        }
        names = [span.name for span in mine["compute"]]
        assert names.count("attention") == kernels(schedule, workload, rank)
        assert names.count("attention backward") == kernels(schedule, workload, rank)
        assert sum(span.args["bytes"] for span in mine["send"]) == sum(way[rank].sent for way in both)
        assert all(0 <= span.begin <= span.end for track in mine.values() for span in track)
        for track in ("compute", "wait"):  # a rank does one thing at a time; messages travel side by side
            in_order = sorted(mine[track], key=lambda span: span.begin)
            assert all(a.end <= b.begin for a, b in pairwise(in_order))
        for waited in mine["wait"]:
            assert not any(c.begin < waited.end and waited.begin < c.end for c in mine["compute"])
    sent, received = (sum(s.args["bytes"] for s in spans if s.track == track) for track in ("send", "receive"))
    assert sent == received > 0


@pytest.mark.parametrize(
    ("schedule", "layout", "mask"),
    [
        ("ring", "contiguous", "causal"),
        ("allgather", "zigzag", "causal"),
        sweep("ulysses", "zigzag", "window:9+global:2"),
        sweep("ulysses+ring", "zigzag", "causal"),
        sweep("ulysses+allgather", "contiguous", "causal"),
        sweep("ring+ring", "zigzag", "window:9+global:2"),
    ],
)
def test_virtual_ranks_do_what_their_plan_says(schedule, layout, mask):
    ask = traced_case(schedule, layout=layout, mask=mask)
    if layout == "zigzag" and schedule.startswith("ulysses+"):
        ask = traced_case(schedule, layout="contiguous", length=40, mask=mask)
    on_rank_0, *others = run_virtual(WORLD, partial(record_attention, case=ask))
    check_spans(on_rank_0, workload(ask, WORLD), schedule)
    assert others == [on_rank_0] * (WORLD - 1)


@pytest.mark.parametrize("layer", ["gated_delta_rule", "short_convolution"])
def test_recurrent_layers_send_what_their_plan_says(layer):
    ask = traced_case("ring", layer=layer, layout="zigzag")
    spans = run_virtual(WORLD, partial(record_attention, case=ask))[0]
    dims = (HEAD_DIM, 1) if layer == "short_convolution" else (HEAD_DIM, HEAD_DIM)
    workload = RecurrentWorkload(RecurrentShape(KINDS[layer], 1, HEADS, KV_HEADS, *dims), LENGTH, WORLD, WORLD)
    both = [recurrent_loads(workload, backward=way) for way in (False, True)]
    for rank in range(WORLD):
        sent = sum(span.args["bytes"] for span in spans if (span.rank, span.track) == (rank, "send"))
        assert sent == sum(way[rank].sent for way in both) > 0
        assert any(span.track == "compute" for span in spans if span.rank == rank)


def several(comm: Comm, asks: list[TraceCase]) -> list[tuple[list[Span], int]]:
    found = []
    for ask in asks:
        before = comm.traffic.by_op.get("exchange", (0, 0))[1]
        spans = record_attention(comm, ask)
        found.append((spans, comm.traffic.by_op["exchange"][1] - before))
    return found


@pytest.mark.sweep
def test_processes_do_what_their_plan_says():
    """The largest computes for much longer than its keys travel: some of that is seen to be hidden."""
    asks = [traced_case(schedule) for schedule in ("ring", "allgather", "ulysses")]
    asks.append(
        traced_case(
            "ring", length=2048, q_heads=8, kv_heads=8, head_dim=64, layout="zigzag", dtype="fp32", backward=False
        )
    )
    ranks = run_processes(2, several, asks)
    for at, ask in enumerate(asks[:3]):
        spans = ranks[0][at][0]
        check_spans(spans, workload(ask, 2), ask.schedule)
        for rank in range(2):  # as the comm itself counted, in the run before and in the recorded one
            sent = sum(span.args["bytes"] for span in spans if span.rank == rank and span.track == "send")
            assert ranks[rank][at][1] == 2 * sent
    assert sum(rank.overlap for rank in summarize_overlap(ranks[0][3][0])) > 0


def command(*words: object):
    return run_command("trace", *words)


@pytest.mark.parametrize("schedule", ["ring", "auto", sweep("ulysses+ring")])
def test_the_command_writes_a_file_and_says_what_ranks_did(tmp_path, schedule, monkeypatch):
    monkeypatch.setattr("attnmesh.cli.output._LINE_EVERY", 0.0)
    out = tmp_path / "trace.json"
    ranks_per_node = ("--ranks-per-node", 2) if "+" in schedule else ()
    done = command(
        "--out", out, "--virtual", "--schedule", schedule, "--length", 64, "--backward", *ranks_per_node,
        "--layout", "contiguous",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    assert f"1 of 2: tracing {schedule} on 4 ranks" in done.output
    assert "communication ms" in done.output
    assert "Virtual ranks take turns" in done.output
    assert schedule != "auto" or any(f"auto ({name})" in done.output for name in SCHEDULES)
    assert f"{out}: open it in" in done.output.replace("\n", "")
    assert all(f"│    {rank} │" in done.output for rank in range(4))
    spans = read_trace(out)
    assert {(span.rank, span.track) for span in spans} == set(product(range(4), TRACKS))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--schedule", "rong"), "schedule must be one of auto, ring"),
        (("--ranks", 0), "0 is not in the range"),
        (("--length", 0), "got '0'"),
        (("--schedule", "ring+ring"), "schedule='ring+ring'"),
        (("--schedule", "ulysses+ring", "--ranks-per-node", 2, "--layout", "striped"), "interleave"),
        (("--ranks-per-node", 3), "ranks_per_node must divide the 4 ranks, got 3"),
        (("--kv-heads", 3), "kv_heads must divide the 8 query heads, got 3"),
        (("--layout", "diagonal"), "diagonal"),
        (("--mask", "diagonal"), "got 'diagonal'"),
        (("--out", "no/such/folder/trace.json"), "--out must be in an existing folder"),
        (("--out", "."), "--out must be a file, got the folder"),
    ],
)
def test_bad_input_is_refused_before_any_rank_starts(tmp_path, monkeypatch, words, said):
    monkeypatch.setattr("attnmesh.launch.run", lambda *_, **__: pytest.fail("ranks were started"))
    given = words if "--out" in words else ("--out", tmp_path / "trace.json", *words)
    done = command(*given)
    assert done.exit_code == 2, done.output
    assert said in " ".join(done.output.replace("│", " ").split())
    assert "Traceback" not in done.output


def test_out_must_be_given():
    assert command().exit_code == 2


@pytest.mark.sweep
def test_the_command_starts_ranks(tmp_path):
    out = tmp_path / "trace.json"
    done = command("--out", out, "--ranks", 2, "--length", 256)
    assert done.exit_code == 0, done.output
    assert {span.rank for span in read_trace(out)} == {0, 1}
