"""The indexer over ranks: the very top-k of one device, and scores with their gradients."""

import pytest
import torch

import attnmesh as am
from attnmesh.ops.sparse import reference
from helpers.cases import first, in_turn, sweep
from helpers.sparse_grid import (
    LAYOUTS,
    MASKS,
    ExactInputs,
    assert_exact,
    join_grid,
    random_problem,
    run_grid,
    same_bits,
)

GRIDS = [(1, 1), (3, 1), (1, 2), (1, 4), (2, 2), (3, 4)]
SCHEDULES = ["allgather", "ring"]


def spread_topk(place, iq, ik, w, topk, schedule, mask=None, **more):
    parallel = am.SparseParallel(
        tp=place.tp, cp=place.cp, length=iq.shape[0], key_length=ik.shape[0], layout=place.layout, schedule=schedule
    )
    mask = {name: place.rows(x) if isinstance(x, torch.Tensor) else x for name, x in (mask or {}).items()}
    return parallel.indexer_topk(
        place.rows(iq), place.rows(ik), place.rows(w), topk, mask=am.SparseMask(**mask), **more
    )


def assert_same_choice(tp, cp, layout, schedule, iq, ik, w, topk, mask=None, **more):
    alone = am.indexer_topk(iq, ik, w, topk, mask=am.SparseMask(**(mask or {})), **more)
    grid = run_grid(tp, cp, layout, lambda place: spread_topk(place, iq, ik, w, topk, schedule, mask, **more))
    for name in ("indices", "scores", "lengths"):
        assert same_bits(join_grid([[getattr(x, name) for x in row] for row in grid], layout), getattr(alone, name)), (
            name
        )
    return alone


def hidden(mask):
    """A mask without what top-k does not take."""
    return {name: x for name, x in mask.items() if name != "topk_length"}


@pytest.mark.parametrize(
    ("tp", "cp", "layout", "schedule"),
    first(4, [(*grid, *how) for grid, *how in in_turn(GRIDS, LAYOUTS, SCHEDULES)]),
)
def test_the_choice_is_that_of_one_device_to_the_last_bit(tp, cp, layout, schedule):
    mask = hidden(list(MASKS.values())[(tp + cp) % len(MASKS)](21))
    iq, ik, w = torch.randn(21, 3, 16), torch.randn(37, 16), torch.randn(21, 3)
    assert_same_choice(tp, cp, LAYOUTS[layout], schedule, iq, ik, w, 9, mask, scale=0.7, block_size=8)


@pytest.mark.parametrize(
    ("schedule", "dtype", "relu"),
    [("allgather", torch.float32, True), sweep("ring", torch.bfloat16, True), sweep("ring", torch.float64, False)],
)
def test_of_many_equal_scores_the_lowest_keys_win_wherever_they_are(schedule, dtype, relu):
    iq, ik = (torch.randint(-1, 2, shape).to(dtype) for shape in ((17, 2, 4), (40, 4)))
    w = torch.randint(-1, 2, (17, 2)).to(dtype)
    for layout in LAYOUTS.values():
        alone = assert_same_choice(2, 4, layout, schedule, iq, ik, w, 7, {"causal": True, "q_start": 20}, relu=relu)
    seen = torch.arange(40) <= torch.arange(20, 37)[:, None]
    scores = reference.index_scores(iq.double(), ik.double(), w.double(), relu=relu)
    assert max(len(row.unique()) for row in scores) < 15  # of up to 37 visible keys
    chosen = [[j for j in row if j >= 0] for row in alone.indices.tolist()]
    assert chosen == reference.topk_keys(scores, seen, 7)


@pytest.mark.parametrize(
    ("length", "key_length", "topk", "schedule"),
    [
        (2, 30, 5, "allgather"),
        (9, 3, 5, "ring"),
        (1, 1, 1, "ring"),
        sweep(0, 7, 2, "allgather"),
        sweep(3, 0, 2, "allgather"),
    ],
)
def test_fewer_rows_keys_and_candidates_than_asked_for(length, key_length, topk, schedule):
    iq, ik, w = torch.randn(length, 2, 8), torch.randn(key_length, 8), torch.randn(length, 2)
    layout = list(LAYOUTS.values())[(length + key_length) % 3]
    assert_same_choice(3, 4, layout, schedule, iq, ik, w, topk)


def test_keys_that_nobody_sees_may_hold_anything():
    iq, ik, w = torch.randn(8, 2, 8), torch.randn(20, 8), torch.randn(8, 2)
    ik[8:] = torch.nan
    alone = assert_same_choice(1, 4, am.Striped(), "ring", iq, ik, w, 4, {"causal": True})
    assert (alone.indices < 8).all()


@pytest.mark.parametrize(
    ("tp", "cp", "mask", "schedule"),
    [(*grid, *how) for grid, *how in in_turn([(2, 1), (1, 4), (2, 3)], MASKS, SCHEDULES)],
)
def test_scores_at_slots_and_their_gradients_are_exact(tp, cp, mask, schedule):
    problem = random_problem(**MASKS[mask](11))
    truth = ExactInputs.of(problem)
    iq, w = problem.leaves("iq", "w")
    ik = truth.ik.clone().requires_grad_()
    at = torch.where(truth.valid, problem.indices, 0).long()
    true = reference.index_scores(iq, ik, w, 0.7).gather(1, at)
    true_grads = torch.autograd.grad(true, (iq, ik, w), torch.where(truth.valid, problem.grad_scores, 0.0))
    layout = am.Zigzag()

    def program(place):
        mine = problem.shard(place)
        leaves = mine.leaves("iq", "ik", "w")
        parallel = am.SparseParallel(
            tp=place.tp, cp=place.cp, length=11, key_length=13, schedule=schedule, layout=layout
        )
        scores = parallel.indexer_scores_at(*leaves, mine.indices, scale=0.7, mask=mine.mask)
        grads = torch.autograd.grad(scores, leaves, mine.grad_scores.masked_fill(scores == -torch.inf, 0.0))
        return scores.detach(), *grads

    grid = run_grid(tp, cp, layout, program)
    scores, *grads = (join_grid([[rank[i] for rank in row] for row in grid], layout) for i in range(4))
    assert_exact(scores, true.masked_fill(~truth.valid, -torch.inf).detach())
    for found, grad in zip(grads, true_grads, strict=True):
        assert_exact(found, grad)
    if schedule == "allgather":
        alone = am.sparse.indexer_scores_at(
            problem.iq, problem.ik, problem.w, problem.indices, scale=0.7, mask=problem.mask
        )
        torch.testing.assert_close(scores, alone)


def test_each_tp_rank_scores_some_of_the_rows_only(monkeypatch):
    from attnmesh.ops.sparse import torch_backend

    scored = []
    plain = torch_backend.topk

    def counting(call, *args):
        scored.append(call.iq.shape[0])
        return plain(call, *args)

    monkeypatch.setattr(torch_backend, "topk", counting)
    iq, ik, w = torch.randn(10, 2, 8), torch.randn(12, 8), torch.randn(10, 2)
    run_grid(4, 1, am.Contiguous(), lambda place: spread_topk(place, iq, ik, w, 3, "allgather"))
    assert sorted(scored) == [2, 2, 3, 3]
