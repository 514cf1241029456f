"""The indexer's loss over ranks: the loss and the gradients of one device, on every rank."""

import itertools
from dataclasses import replace

import pytest
import torch

import attnmesh as am
from attnmesh.ops.sparse import reference
from attnmesh.testing.sparse import SCALE, GridRank, SparseProblem
from helpers.cases import first, sweep
from helpers.sparse_grid import LAYOUTS, MASKS, ExactInputs, assert_exact, join_grid, random_problem, run_grid

GRIDS = [(1, 1), (2, 1), (3, 1), (1, 4), (2, 2), (3, 2)]
HOW = [("replicated", "allgather"), ("scattered", "allgather"), ("replicated", "ring"), ("scattered", "ring")]
ROW_MASK = torch.tensor([True, True, False, True, False, False, True, True, True, True, False])


def problem_for(mode: str, mask: str = "causal", **how) -> SparseProblem:
    """An lse of its own for every head, so that heads differ in the mass that their slots have."""
    problem = random_problem(**MASKS[mask](11), **how)
    if mode == "dense":
        sight = replace(problem.mask, topk_length=None)
        kv, ik = (torch.randn_like(x) for x in (problem.kv, problem.ik))
        problem = replace(problem, mask=sight, kv=kv, ik=ik)
    return replace(problem, grad_lse=torch.randn(11, 7, dtype=problem.q.dtype) + 2)


def true_rows(problem: SparseProblem, mode: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The loss of every row in float64, and what it is made of."""
    iq, ik, w = problem.to(torch.float64).leaves("iq", "ik", "w")
    if mode == "sparse":
        truth = ExactInputs.of(problem)
        ik = truth.ik.clone().requires_grad_()
        valid, kv = truth.valid, truth.kv
        at = torch.where(valid, problem.indices, 0).long()
    else:
        at = torch.arange(problem.key_length).expand(problem.length, -1)
        valid = reference.valid_slots(at.int(), problem.key_length, problem.mask)
        kv = problem.kv.double()
    p = reference.distribution(problem.q.double(), kv, problem.grad_lse.double(), SCALE).sum(0).gather(1, at)
    scores = reference.index_scores(iq, ik, w, 0.7).gather(1, at)
    return reference.kl(p.detach(), scores, valid), [iq, ik, w]


def loss_here(
    place: GridRank, whole: SparseProblem, mode: str, rows: str, schedule: str, weight, row_mask=None, **more
):
    """This rank's loss and gradients."""
    mine = whole.shard(place)
    leaves = mine.leaves("iq", "ik", "w")
    parallel = am.SparseParallel(
        tp=place.tp,
        cp=place.cp,
        length=whole.length,
        key_length=whole.key_length,
        layout=place.layout,
        schedule=schedule,
        loss_rows=rows,
    )
    loss = parallel.indexer_kl_loss(
        *leaves, None if mode == "dense" else mine.indices,
        am.sparse.AttentionTarget(mine.q, mine.kv, mine.grad_lse, SCALE),
        mask=mine.mask, scale=0.7, row_mask=None if row_mask is None else place.rows(row_mask), **more,
    )  # fmt: skip
    weight = torch.as_tensor(weight, dtype=loss.dtype)
    grads = torch.autograd.grad(loss, leaves, place.rows(weight) if weight.ndim else weight)
    return loss.detach(), *grads


# Where nothing is spread, there are not two ways.
SPREAD = [
    (*grid, *how)
    for grid, how in itertools.product(GRIDS, HOW)
    if (grid[0] > 1 or how[0] == "replicated") and (grid[1] > 1 or how[1] == "allgather")
]


@pytest.mark.parametrize(
    ("tp", "cp", "rows", "schedule", "mode"),
    first(
        4,
        [(*case, ("sparse", "dense")[i % 2]) for i, case in enumerate(SPREAD)],
    ),
)
def test_loss_and_gradients_are_those_of_one_device_on_every_rank(tp, cp, rows, schedule, mode):
    at = GRIDS.index((tp, cp)) + HOW.index((rows, schedule))
    layout = list(LAYOUTS.values())[at % 3]
    problem = problem_for(mode, list(MASKS)[at % 4])
    each, leaves = true_rows(problem, mode)
    weight = torch.randn(11, dtype=torch.float64)
    losses = {
        ("sum", at % 2 == 0): each[ROW_MASK].sum() if at % 2 == 0 else each.sum(),
        ("mean_rows", False): each.mean(), ("mean_rows", True): each[ROW_MASK].mean(),
        ("none", at % 2 == 1): torch.where(ROW_MASK, each, 0.0) if at % 2 == 1 else each,
    }  # fmt: skip
    grads = {case: weight if case[0] == "none" else torch.tensor(1.7).double() for case in losses}

    def program(place: GridRank):
        return [
            loss_here(
                place, problem, mode, rows, schedule, grads[case], ROW_MASK if case[1] else None, reduction=case[0]
            )
            for case in losses
        ]  # fmt: skip

    found = run_grid(tp, cp, layout, program)
    for at, (case, true) in enumerate(losses.items()):
        grid = [[rank[at] for rank in row] for row in found]
        if case[0] == "none":
            assert_exact(join_grid([[rank[0] for rank in row] for row in grid], layout), true.detach(), 1e-10)
        for loss in [rank[0] for row in grid for rank in row] if case[0] != "none" else []:
            torch.testing.assert_close(loss, grid[0][0][0])
            assert_exact(loss, true.detach(), 1e-10)
        for i, true_grad in enumerate(torch.autograd.grad(true, leaves, grads[case], retain_graph=True), 1):
            assert_exact(join_grid([[rank[i] for rank in row] for row in grid], layout), true_grad, 1e-10)


def test_the_problems_tell_normalizing_before_the_sum_over_heads_from_after():
    problem = problem_for("sparse")
    truth = ExactInputs.of(problem)
    p = reference.distribution(problem.q, truth.kv, problem.grad_lse, SCALE)[:, 5] * truth.times[5]
    early, late = (p / p.sum(-1, keepdim=True)).sum(0), p.sum(0)
    assert ((early / early.sum() - late / late.sum()).abs() > 1e-3).any()


@pytest.mark.parametrize(("rows", "schedule"), first(2, HOW))
def test_a_target_given_is_of_all_heads(rows, schedule):
    problem = problem_for("sparse")
    target = torch.rand(11, 6, dtype=torch.float64)
    target[5] = 0.0
    iq, ik, w = problem.leaves("iq", "ik", "w")
    alone = am.indexer_kl_loss(iq, ik, w, problem.indices, target, mask=problem.mask)
    true_grads = torch.autograd.grad(alone, (iq, ik, w))

    def program(place):
        mine = problem.shard(place)
        leaves = mine.leaves("iq", "ik", "w")
        parallel = am.SparseParallel(
            tp=place.tp, cp=place.cp, length=11, key_length=13, schedule=schedule, loss_rows=rows
        )
        loss = parallel.indexer_kl_loss(*leaves, mine.indices, place.rows(target), mask=mine.mask)
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    grid = run_grid(2, 3, am.Contiguous(), program)
    assert_exact(grid[2][1][0], alone.detach())
    for i, true_grad in enumerate(true_grads, 1):
        assert_exact(join_grid([[rank[i] for rank in row] for row in grid], am.Contiguous()), true_grad)


@pytest.mark.parametrize(
    ("rows", "schedule", "mode"),
    [
        ("replicated", "allgather", "sparse"),
        ("scattered", "allgather", "sparse"),
        sweep("replicated", "ring", "dense"),
        sweep("scattered", "ring", "dense"),
    ],
)
def test_fewer_rows_than_ranks(rows, schedule, mode):
    problem = random_problem(2, 9)
    problem = replace(problem, kv=torch.randn(9, 12).double(), ik=torch.randn(9, 5).double())
    each, leaves = true_rows(problem, mode)
    true = each.mean()
    case = HOW.index((rows, schedule)) + (mode == "dense")
    layout = list(LAYOUTS.values())[case % 3]
    grid = run_grid(
        2, 3, layout, lambda place: loss_here(place, problem, mode, rows, schedule, 1.0, reduction="mean_rows")
    )
    assert_exact(grid[1][1][0], true.detach())
    for i, true_grad in enumerate(torch.autograd.grad(true, leaves), 1):
        assert_exact(join_grid([[rank[i] for rank in row] for row in grid], layout), true_grad)


@pytest.mark.parametrize("mode", ["sparse", sweep("dense")])
def test_long_keys_are_computed_in_chunks(mode, monkeypatch):
    from attnmesh.ops.sparse import indexer_loss

    monkeypatch.setattr(indexer_loss, "_MAX_CHUNK_SLOTS", 1)  # 128 keys per chunk
    problem = random_problem(11, 300, topk=40, causal=True, q_start=250)
    problem = replace(problem, kv=torch.randn(300, 12).double(), ik=torch.randn(300, 5).double())
    each, leaves = true_rows(problem, mode)
    true_grads = torch.autograd.grad(each.sum(), leaves)
    for rows, schedule in HOW[1:3]:
        grid = run_grid(
            2, 2, am.Zigzag(), lambda place, how=(rows, schedule): loss_here(place, problem, mode, *how, 1.0)
        )
        assert_exact(grid[0][0][0], each.sum().detach(), 1e-10)
        for i, true_grad in enumerate(true_grads, 1):
            assert_exact(join_grid([[rank[i] for rank in row] for row in grid], am.Zigzag()), true_grad, 1e-10)


@pytest.mark.parametrize(
    ("rows", "schedule", "mode"), [(*how, ("sparse", "dense")[i % 2]) for i, how in enumerate(HOW)]
)
def test_the_error_of_sixteen_bits_does_not_grow_with_the_ranks(rows, schedule, mode):
    problem = problem_for(mode, "full", dtype=torch.bfloat16)
    each, leaves = true_rows(problem, mode)
    true_grads = torch.autograd.grad(each.sum(), leaves)
    alone = loss_here(
        GridRank(*2 * [am.comm_from(None)], am.Contiguous()), problem, mode, "replicated", "allgather", 1.0
    )
    grid = run_grid(2, 4, am.Striped(), lambda place: loss_here(place, problem, mode, rows, schedule, 1.0))
    assert_exact(grid[0][0][0], each.sum().detach(), 1e-5)
    for i, true_grad in enumerate(true_grads, 1):
        found = join_grid([[rank[i] for rank in row] for row in grid], am.Striped())
        assert found.dtype == torch.bfloat16
        error, plain = ((x.double() - true_grad).abs() for x in (found, alone[i]))
        assert error.max() <= 1.2 * plain.max() + 1e-6
        assert error.mean() <= 1.2 * plain.mean() + 1e-6
