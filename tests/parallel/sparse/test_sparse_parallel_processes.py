"""The sparse family between real processes over gloo: heads spread, keys gathered, keys in a ring, and both."""

import re

import torch
from torch.distributed.device_mesh import init_device_mesh

import attnmesh as am
from attnmesh.testing.sparse import SCALE, GridRank
from helpers.processes import run_processes
from helpers.sparse_grid import assert_exact, join_grid, random_problem

LAYOUT = am.Zigzag()
# (tp, cp), then how tp ranks share rows and keys reach other cp ranks.
CASES = [
    ((2, 2), ("scattered", "ring")),
    ((4, 1), ("replicated", "allgather")),
    ((1, 4), ("replicated", "ring")),
]


def problem():
    return random_problem(10, 14, topk=5, causal=True, q_start=6, dtype=torch.float32)


def step(place: GridRank, rows: str, schedule: str) -> list[torch.Tensor]:
    """A layer's whole step: choose keys, attend, learn to choose. Rows first; what has heads, heads next."""
    mine = problem().shard(place)
    ik = mine.ik.nan_to_num(0.5)
    parallel = am.SparseParallel(
        tp=place.tp, cp=place.cp, length=10, key_length=14, layout=place.layout, schedule=schedule, loss_rows=rows
    )
    chosen = parallel.indexer_topk(mine.iq, ik, mine.w, 5, mask=mine.mask)
    q, kv = mine.q.clone().requires_grad_(), mine.kv.nan_to_num(0.5).requires_grad_()
    out, lse, dist = parallel.sparse_attention(
        q, kv, chosen.indices, scale=SCALE, d_v=8, mask=mine.mask, return_attn_sum=True
    )
    to_attention = torch.autograd.grad((out, lse), (q, kv), (mine.grad_out, mine.grad_lse))
    leaves = [x.clone().requires_grad_() for x in (mine.iq, ik, mine.w)]
    losses, grads = [], []
    target = am.sparse.AttentionTarget(mine.q, kv, lse, SCALE)
    for indices in (chosen.indices, None):
        loss = parallel.indexer_kl_loss(*leaves, indices, target, mask=mine.mask, reduction="mean_rows")
        losses.append(loss.detach().expand(mine.q.shape[0]))
        grads += torch.autograd.grad(loss, leaves)
    return [x.detach() for x in (out, lse, to_attention[0], dist, to_attention[1], chosen.indices, *losses, *grads)]


def whole(grid: list[list[list[torch.Tensor]]]) -> list[torch.Tensor]:
    return [join_grid([[rank[i] for rank in row] for row in grid], LAYOUT, heads=i < 3) for i in range(len(grid[0][0]))]


def step_on_mesh(tp: int, cp: int, rows: str, schedule: str) -> list[list[float]]:
    """A step on a mesh of processes; lists, to be sent back."""
    mesh = init_device_mesh("cpu", (cp, tp), mesh_dim_names=("cp", "tp"))
    place = GridRank(am.comm_from(mesh["tp"]), am.comm_from(mesh["cp"]), LAYOUT)
    return [x.tolist() for x in step(place, rows, schedule)]


def programs(comm: am.comm.Comm) -> list:
    return [step_on_mesh(*grid, *how) for grid, how in CASES] + [refused(comm)]


def refused(comm: am.comm.Comm) -> list[str]:
    """One rank of a grid gives what no other does: no group has all ranks, and yet all hear of it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
    parallel = am.SparseParallel(tp=mesh["tp"].get_group(), cp=mesh["cp"])
    q, kv, indices = torch.ones(2, 3, 4), torch.ones(2, 4), torch.zeros(2, 2, dtype=torch.int32)
    heard = []
    for wrong in ({"indices": indices.long()}, {"scale": 2.0}, {"indices": indices + 1}, {}):
        given = {"indices": indices, "scale": 1.0} | (wrong if comm.rank == 2 else {})
        try:
            parallel.sparse_attention(q, kv, **given)
            heard.append("nothing was raised")
        except ValueError as error:
            heard.append(str(error))
    return heard


def test_four_processes_do_a_whole_step_as_one_device_does_and_hear_of_one_rank_s_mistake():
    alone = [step(GridRank(*2 * [am.comm_from(None)], LAYOUT), "replicated", "allgather")]
    true = whole([alone])
    assert true[-1].any()
    found = run_processes(4, programs)
    for at, ((tp, cp), _) in enumerate(CASES):
        grid = [[list(map(torch.tensor, found[row * tp + column][at])) for column in range(tp)] for row in range(cp)]
        for x, y in zip(whole(grid), true, strict=True):
            assert_exact(x, y, 2e-5)
    words = [
        "indices must be an int32 tensor, got torch.int64",
        "scale is 2.0 on global rank 2 but 1.0 on global rank 3",
        r"those of tp rank 1 differ from tp rank 0's \(on cp rank 1\)",
        "nothing was raised",
    ]
    for *_, heard in found:
        for pattern, message in zip(words, heard, strict=True):
            assert re.search(pattern, message), message
