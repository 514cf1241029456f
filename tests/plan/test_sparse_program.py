"""The sparse family as programs: bytes are those of real ranks, seconds those that an H200 took."""

import pytest
import torch

import attnmesh as am
from attnmesh.plan.load import loads_of
from attnmesh.plan.sparse_program import sparse_program
from attnmesh.plan.sparse_shape import SparseGrid, SparseShape, SparseShares
from attnmesh.planner.cost import cost
from attnmesh.planner.hardware_catalog.catalog import cluster
from spreading import D_V, LAYOUTS, SCALE, WIDTH, drawn, on_grid

N, M, TOPK = 11, 13, 6
SMALL = SparseShape(N, M, 7, WIDTH, D_V, TOPK, 3, 5)
MEASURED = SparseShape(4096, 32768, 128, 576, 512, 2048, 64, 128)
EIGHTH = SparseShape(4096, 32768, 16, 576, 512, 2048, 64, 128)


def really_sent(tp, cp, layout, *, keys="gathered", check=True, values=False):
    """By step, direction and rank."""
    problem = drawn(N, M, dtype=torch.bfloat16)

    def program(place):
        mine = problem.shard(place)
        parallel = am.SparseParallel(
            tp=place.tp, cp=place.cp, length=N, key_length=M, layout=place.layout, keys=keys, check_indices=check
        )
        found = {}

        def both(name, forward):
            for comm in (place.tp, place.cp):
                comm.traffic.reset()
            result = forward()
            found[name, False] = place.tp.traffic.bytes + place.cp.traffic.bytes
            if isinstance(result, torch.Tensor) and result.requires_grad:
                result.backward()
                found[name, True] = place.tp.traffic.bytes + place.cp.traffic.bytes - found[name, False]

        q, kv, v = mine.leaves("q", "kv", "v")
        how = {"scale": SCALE, "v": v if values else None, "d_v": None if values else D_V}
        both("attention", lambda: parallel.sparse_attention(q, kv, mine.indices, **how)[0].sum())
        both("distribution", lambda: parallel.attention_distribution(
            mine.q, mine.kv, mine.indices, mine.d_lse, scale=SCALE))  # fmt: skip
        both("topk", lambda: parallel.indexer_topk(mine.iq, mine.ik, mine.w, TOPK))
        target = {"q": mine.q, "k": mine.kv, "lse": mine.d_lse, "attn_scale": SCALE}
        for rows in ("replicated", "scattered"):
            leaves = mine.leaves("iq", "ik", "w")
            both(f"loss {rows}", lambda leaves=leaves, rows=rows: parallel.indexer_kl_loss(
                *leaves, mine.indices, **target, rows=rows))  # fmt: skip
            leaves = mine.leaves("iq", "ik", "w")
            both(f"dense loss {rows}", lambda leaves=leaves, rows=rows: parallel.indexer_kl_loss(
                *leaves, **target, mode="dense", rows=rows))  # fmt: skip
        return found

    grid = [found for row in on_grid(tp, cp, LAYOUTS[layout], program) for found in row]
    return {key: [found[key] for found in grid] for key in grid[0]}


@pytest.mark.parametrize(
    ("tp", "cp", "how"),
    [
        (3, 1, {}),
        (3, 1, {"check": False}),
        (1, 4, {}),
        (1, 4, {"keys": "sharded"}),
        (1, 3, {"keys": "sharded", "layout": "striped", "values": True}),
        (2, 2, {"layout": "zigzag", "values": True}),
        (2, 3, {"layout": "zigzag", "keys": "sharded"}),
    ],
)
def test_ranks_send_what_the_programs_say(tp, cp, how):
    layout, keys = how.get("layout", "contiguous"), how.get("keys", "gathered")
    shape = SparseShape(N, M, 7, WIDTH, D_V, TOPK, 3, 5, own_values=how.get("values", False))
    grid = SparseGrid(tp, cp, LAYOUTS[layout], keys)
    for (name, backward), sent in really_sent(tp, cp, **{"layout": layout} | how).items():
        step = name.removesuffix(" scattered").removesuffix(" replicated")
        whole = sparse_program(
            step, shape, grid, backward=backward, scattered=name.endswith("scattered"),
            check_indices=how.get("check", True),
        )  # fmt: skip
        assert [each.sent for each in loads_of(whole, grid.world)] == sent, (name, backward)


def test_the_work_is_what_the_benchmarks_count():
    s, n, h, d, dv, hi, di = 4096, 2048, 128, 576, 512, 64, 128

    def flops(step, backward=False):
        return loads_of(sparse_program(step, MEASURED, SparseGrid(), backward=backward), 1)[0].flops

    assert flops("attention") == 2 * s * h * n * (d + dv)
    assert flops("attention", True) == 2 * s * h * n * (3 * d + 2 * dv)
    assert flops("distribution") == 2 * s * h * n * d
    assert flops("topk") == 2 * hi * di * s * 32768
    assert flops("loss") + flops("loss", True) == 2 * s * n * (h * d + 3 * hi * di)


@pytest.mark.parametrize("keys", ["gathered", "sharded"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_share_the_work_of_one(layout, causal, keys):
    shape = SparseShape(90, 70, 5, 16, 8, 12, 3, 4, causal=causal)
    for step, backward in (("attention", False), ("attention", True), ("topk", False)):
        alone = loads_of(sparse_program(step, shape, SparseGrid(), backward=backward), 1)
        grid = SparseGrid(3, 4, LAYOUTS[layout], keys)
        together = loads_of(sparse_program(step, shape, grid, backward=backward), 12)
        assert sum(each.flops for each in together) == pytest.approx(alone[0].flops, abs=12)


def test_slots_of_causal_rows_are_as_many_as_they_see_at_most():
    for layout in LAYOUTS.values():
        shares = SparseShares(SparseShape(41, 29, 1, 4, 4, 7, causal=True), SparseGrid(1, 3, layout))
        rows = [layout.positions(41, 3, place).tolist() for place in range(3)]
        assert shares.named.sum(1).tolist() == pytest.approx([sum(min(p + 1, 7) for p in held) for held in rows])
        held = [layout.positions(29, 3, place).tolist() for place in range(3)]
        assert shares.seen.tolist() == [[sum(k <= p for p in q for k in keys) for keys in held] for q in rows]


@pytest.mark.parametrize(
    ("step", "backward", "shape", "ms"),
    [
        ("attention", False, MEASURED, 4.39),
        ("attention", False, EIGHTH, 1.99),
        ("attention", True, MEASURED, 25.3),
        ("attention", True, EIGHTH, 14.2),
        ("distribution", False, MEASURED, 2.21),
        ("topk", False, MEASURED, 5.27),
    ],
)
def test_an_h200_took_as_long(step, backward, shape, ms):
    """docs/benchmarks.md, 32k keys. 16 heads have an eighth of the work of 128, and gather as many bytes."""
    found = cost(sparse_program(step, shape, SparseGrid(), backward=backward), cluster("h200"))
    assert found.seconds == pytest.approx(ms / 1e3, rel=0.15)


@pytest.mark.parametrize(("step", "ms"), [("loss", 5.31), ("dense loss", 111.9)])
def test_an_h200_took_as_long_for_a_step_of_the_loss(step, ms):
    """docs/benchmarks.md, 32k keys: over 2048 chosen ones, and over all of them."""
    ways = (sparse_program(step, MEASURED, SparseGrid(), backward=backward) for backward in (False, True))
    assert sum(cost(way, cluster("h200")).seconds for way in ways) == pytest.approx(ms / 1e3, rel=0.15)


def test_a_thousand_ranks():
    shape = SparseShape(1 << 20, 1 << 20, 128, 576, 512, 2048, 64, 128, causal=True)
    for keys in ("gathered", "sharded"):
        grid = SparseGrid(8, 128, am.Zigzag(), keys, node=8)
        each = loads_of(sparse_program("attention", shape, grid, check_indices=False), 8)
        assert {load.far for load in each} == {127 * (1 << 13) * 576 * 2}


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"step must be one of attention, .*, got 'attend'"):
        sparse_program("attend", SMALL, SparseGrid())
    with pytest.raises(ValueError, match="backward must be False for step='topk'"):
        sparse_program("topk", SMALL, SparseGrid(), backward=True)
    with pytest.raises(ValueError, match="topk must be at least 1, got 0"):
        SparseShape(1, 1, 1, 1, 1, 0)
    with pytest.raises(ValueError, match="cp must be at least 1, got 0"):
        SparseGrid(1, 0)
    with pytest.raises(ValueError, match=r"keys must be .gathered. or .sharded., got 'all'"):
        SparseGrid(1, 2, keys="all")
