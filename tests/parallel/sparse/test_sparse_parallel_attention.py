"""Sparse attention over ranks is that of one device: outputs and all gradients, in every way keys can come."""

from dataclasses import replace

import pytest
import torch

import attnmesh as am
from attnmesh.testing.sparse import SCALE, GridRank, SparseProblem
from helpers.cases import first, in_turn
from helpers.sparse_grid import (
    D_V,
    LAYOUTS,
    MASKS,
    assert_exact,
    exact_attention,
    join_grid,
    random_problem,
    run_grid,
    same_bits,
)

KEYS = ["allgather", "ring"]
OF_HEADS = ("out", "lse", "d_q")


def results(
    place: GridRank, whole: SparseProblem, schedule: str, *, values: bool, sink: bool, **more
) -> dict[str, torch.Tensor]:
    """out, lse, dist and gradients of this rank."""
    mine = whole.shard(place)
    parallel = am.SparseParallel(
        tp=place.tp,
        cp=place.cp,
        length=whole.length,
        key_length=whole.key_length,
        layout=place.layout,
        schedule=schedule,
    )
    return attended(parallel.sparse_attention, mine, values=values, sink=sink, **more)


def attended(attention, mine: SparseProblem, *, values: bool, sink: bool, **more) -> dict[str, torch.Tensor]:
    q, kv, v, sinks = mine.leaves("q", "kv", "v", "sinks")
    out, lse, dist = attention(
        q, kv, mine.indices, scale=SCALE, d_v=D_V, v=v if values else None, mask=mine.mask,
        sinks=sinks if sink else None, return_attn_sum=True, **more,
    )  # fmt: skip
    leaves = {"q": q, "kv": kv} | ({"v": v} if values else {}) | ({"sink": sinks} if sink else {})
    grads = torch.autograd.grad((out, lse), list(leaves.values()), (mine.grad_out, mine.grad_lse.to(lse.dtype)))
    return {"out": out.detach(), "lse": lse.detach(), "dist": dist} | {
        f"d_{name}": grad for name, grad in zip(leaves, grads, strict=True)
    }


def whole_results(grid, layout, names) -> dict[str, torch.Tensor]:
    found = {}
    for name in names:
        parts = [[rank[name] for rank in row] for row in grid]
        if name == "d_sink":  # the whole gradient on every cp rank
            assert all(same_bits(part, first) for row in parts for part, first in zip(row, parts[0], strict=True))
            found[name] = torch.cat(parts[0])
        else:
            found[name] = join_grid(parts, layout, heads=name in OF_HEADS)
    return found


@pytest.mark.parametrize(
    ("mask", "schedule"), [("full", "allgather"), ("ranges", "allgather"), ("causal", "ring"), ("strided", "ring")]
)
def test_every_mask_speaks_of_the_whole_sequence(mask, schedule):
    problem = random_problem(key_length=11, **MASKS[mask](11), seed=1)
    true = exact_attention(problem, values=False, sink=False)
    layout = am.Balanced(am.Documents([4, 7])) if mask == "ranges" else am.Zigzag((2, 0, 1))
    grid = run_grid(1, 3, layout, lambda place: results(place, problem, schedule, values=False, sink=False))
    for name, x in whole_results(grid, layout, true).items():
        assert_exact(x, true[name])


@pytest.mark.parametrize(
    ("length", "key_length", "schedule"),
    first(
        3,
        [(*lengths, schedule) for lengths, schedule in in_turn([(2, 13), (11, 3), (1, 1), (0, 5), (5, 0)], KEYS)],
    ),
)
def test_fewer_rows_and_keys_than_ranks(length, key_length, schedule):
    problem = random_problem(length, key_length)
    true = exact_attention(problem, values=True, sink=True)
    layout = list(LAYOUTS.values())[(length + key_length) % 3]
    grid = run_grid(2, 4, layout, lambda place: results(place, problem, schedule, values=True, sink=True))
    for name, x in whole_results(grid, layout, true).items():
        assert_exact(x, true[name])


@pytest.mark.parametrize(("layout", "dtype"), zip(LAYOUTS, (torch.float32, torch.bfloat16, torch.float32), strict=True))
def test_gathered_keys_give_what_one_device_gives(layout, dtype):
    """To the bit, but for BLAS, which may go another way for another number of rows."""
    problem = random_problem(23, 40, dtype=dtype, topk=15, causal=True, q_start=9)
    for cp, sink in ((2, False), (4, True)):
        alone = attended(am.sparse_attention, problem, values=False, sink=sink)
        grid = run_grid(
            1, cp, LAYOUTS[layout],
            lambda place, sink=sink: results(place, problem, "allgather", values=False, sink=sink),
        )  # fmt: skip
        found = whole_results(grid, LAYOUTS[layout], alone)
        for name in ("out", "lse", "dist", "d_q"):
            torch.testing.assert_close(found[name], alone[name], rtol=4 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize(("tp", "cp", "schedule"), [(3, 1, "allgather"), (1, 4, "ring"), (2, 4, "allgather")])
def test_the_error_does_not_grow_with_the_ranks(tp, cp, schedule):
    problem = random_problem(24, 16, heads=6, topk=12, dtype=torch.bfloat16)
    true = exact_attention(problem, values=True, sink=True)
    alone = attended(am.sparse_attention, problem, values=True, sink=True)
    grid = run_grid(tp, cp, am.Striped(), lambda place: results(place, problem, schedule, values=True, sink=True))
    for name, x in whole_results(grid, am.Striped(), true).items():
        assert x.dtype == alone[name].dtype
        x, one, exact = (y.double().nan_to_num(neginf=0.0) for y in (x, alone[name], true[name]))
        for norm in (torch.amax, lambda y: y.square().mean().sqrt()):
            assert norm((x - exact).abs()) <= 1.2 * norm((one - exact).abs()) + 1e-6, name


@pytest.mark.parametrize("schedule", ["allgather", "ring"])
def test_only_some_gradients_are_asked_for(schedule):
    problem = random_problem()
    true = exact_attention(problem, values=False, sink=True)

    def wanted(place, *names):
        mine = problem.shard(place)
        leaves = dict(zip(("q", "kv", "sink"), mine.leaves("q", "kv", "sinks"), strict=True))
        leaves = {name: x if name in names else x.detach() for name, x in leaves.items()}
        parallel = am.SparseParallel(tp=place.tp, cp=place.cp, length=11, key_length=13, schedule=schedule)
        out, lse = parallel.sparse_attention(
            leaves["q"], leaves["kv"], mine.indices, scale=SCALE, d_v=D_V, sinks=leaves["sink"]
        )
        grads = torch.autograd.grad((out, lse), [leaves[name] for name in names], (mine.grad_out, mine.grad_lse))
        return {f"d_{name}": grad for name, grad in zip(names, grads, strict=True)}, place.cp.traffic.bytes

    sent = {}
    for names in (("q",), ("kv",), ("sink",)):
        grid = run_grid(2, 2, am.Contiguous(), lambda place, names=names: wanted(place, *names))
        found = whole_results([[rank[0] for rank in row] for row in grid], am.Contiguous(), [f"d_{names[0]}"])
        assert_exact(found[f"d_{names[0]}"], true[f"d_{names[0]}"])
        sent[names[0]] = grid[0][0][1]
    assert sent["sink"] < sent["q"] < sent["kv"]  # nothing travels that nobody asked for


def test_without_gradients_nothing_is_kept_and_the_same_comes_out():
    problem = random_problem(dtype=torch.float32)

    def both(place):
        mine = problem.shard(place)
        parallel = am.SparseParallel(cp=place.cp, length=11, key_length=13, schedule="ring")
        with torch.no_grad():
            quiet = parallel.sparse_attention(mine.q, mine.kv, mine.indices, scale=SCALE)
        return quiet, parallel.sparse_attention(*mine.leaves("q", "kv"), mine.indices, scale=SCALE)

    for ((quiet, kept),) in run_grid(1, 3, am.Contiguous(), both):
        assert not quiet[0].requires_grad
        assert kept[0].requires_grad
        torch.testing.assert_close(quiet, tuple(x.detach() for x in kept))


@pytest.mark.parametrize(
    ("tp", "cp", "normalize", "schedule", "layout"),
    [(1, 4, False, "ring", "zigzag"), (1, 4, True, "allgather", "striped"), (3, 1, True, "allgather", "contiguous"),
     (2, 3, True, "ring", "contiguous"), (2, 3, False, "allgather", "zigzag")],
)  # fmt: skip
def test_the_distribution_is_summed_over_heads_and_normalized_after_that(tp, cp, normalize, schedule, layout):
    problem = random_problem(**MASKS["ranges"](11))
    lse = torch.randn(11, 7, dtype=torch.float64)  # of more keys than the slots name: heads differ in mass
    lse[0], lse[1, :3] = torch.inf, -torch.inf
    alone = am.attention_distribution(
        problem.q, problem.kv, problem.indices, lse / torch.log(torch.tensor(2.0)), scale=SCALE, mask=problem.mask,
        lse_base="2", normalize=normalize,
    )  # fmt: skip

    def program(place):
        mine, own_lse = problem.shard(place), replace(problem, grad_lse=lse).shard(place).grad_lse
        parallel = am.SparseParallel(
            tp=place.tp, cp=place.cp, length=11, key_length=13, schedule=schedule, layout=place.layout
        )
        return parallel.attention_distribution(
            mine.q, mine.kv, mine.indices, own_lse, scale=SCALE, mask=mine.mask, normalize=normalize
        )

    assert_exact(join_grid(run_grid(tp, cp, LAYOUTS[layout], program), LAYOUTS[layout]), alone, 1e-6)
    assert alone[2:].any()
    assert not alone[0].any()


def test_groups_of_heads_where_heads_are_not_spread():
    problem = random_problem(dtype=torch.float32)
    lse = torch.randn(11, 7)
    alone = am.attention_distribution(problem.q, problem.kv, problem.indices, lse, scale=SCALE, head_group=3)
    for schedule in ("allgather", "ring"):

        def program(place, schedule=schedule):
            mine = problem.shard(place)
            return am.SparseParallel(cp=place.cp, length=11, key_length=13, schedule=schedule).attention_distribution(
                mine.q, mine.kv, mine.indices, place.rows(lse), scale=SCALE, head_group=3
            ).transpose(0, 1)  # fmt: skip

        found = join_grid(run_grid(1, 4, am.Contiguous(), program), am.Contiguous()).transpose(0, 1)
        assert found.shape == (3, 11, 6)
        assert_exact(found, alone, 0.0 if schedule == "allgather" else 1e-6)
