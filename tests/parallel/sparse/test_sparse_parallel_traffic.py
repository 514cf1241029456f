"""What every rank sends, to the byte: exactly what the ways to share heads and keys promise."""

import pytest
import torch

import attnmesh as am
from attnmesh.testing.sparse import SCALE
from helpers.cases import sweep
from helpers.sparse_grid import LAYOUTS, WIDTH, random_problem, run_grid

N, M, TOPK, HEADS, IDX_HEADS, IDX_WIDTH = 11, 13, 6, 7, 3, 5
PROBLEM = random_problem(N, M, dtype=torch.bfloat16)
KEY, SUM = WIDTH * 2, WIDTH * 4  # bytes of a key, and of its gradient on the way
CHECKSUM = 8


def sent(comm: am.comm.Comm, work) -> dict[str, int]:
    comm.traffic.reset()
    work()
    return {verb: nbytes for verb, (_, nbytes) in comm.traffic.by_op.items() if nbytes}


def all_reduced(nbytes: int, world: int) -> int:
    return round(2 * (world - 1) / world * nbytes)


@pytest.mark.parametrize("check", [True, False])
def test_tp_ranks(check):
    tp = 3

    def program(place):
        mine = PROBLEM.shard(place)
        parallel = am.SparseParallel(tp=place.tp, check_indices=check)
        q, kv = mine.leaves("q", "kv")
        found = {}
        found["forward"] = sent(place.tp, lambda: found.update(state=parallel.sparse_attention(
            q, kv, mine.indices, scale=SCALE)))  # fmt: skip
        found["backward"] = sent(place.tp, lambda: found.pop("state")[0].sum().backward())
        found["distribution"] = sent(place.tp, lambda: parallel.attention_distribution(
            mine.q, mine.kv, mine.indices, mine.grad_lse, scale=SCALE))  # fmt: skip
        found["topk"] = sent(place.tp, lambda: parallel.indexer_topk(mine.iq, mine.ik, mine.w, TOPK))
        for rows in ("replicated", "scattered"):
            leaves, target = (
                mine.leaves("iq", "ik", "w"),
                am.sparse.AttentionTarget(mine.q, mine.kv, mine.grad_lse, SCALE),
            )
            parallel = am.SparseParallel(tp=place.tp, check_indices=check, loss_rows=rows)
            found[f"{rows} loss"] = sent(place.tp, lambda leaves=leaves, target=target, parallel=parallel: found.update(
                loss=parallel.indexer_kl_loss(*leaves, mine.indices, target)))  # fmt: skip
            found[f"{rows} gradient"] = sent(place.tp, lambda: found.pop("loss").backward())
        return found

    (grid,) = run_grid(tp, 1, am.Contiguous(), program)
    shares = [len(range(rank, N, tp)) for rank in range(tp)]
    checked = {"all_gather": (tp - 1) * CHECKSUM} if check else {}
    for rank, found in enumerate(grid):
        mine = shares[rank]
        assert found["forward"] == checked
        assert found["backward"] == {"all_reduce": all_reduced(M * SUM, tp)}
        assert found["distribution"] == checked | {"all_reduce": all_reduced(N * TOPK * 4, tp)}
        assert found["topk"] == {"all_gather": (tp - 1) * mine * TOPK * (4 + 4)}
        assert found["replicated loss"] == checked | {"all_reduce": all_reduced(N * TOPK * 4, tp)}
        assert found["replicated gradient"] == {}
        assert found["scattered loss"] == {
            "reduce_scatter": (N - mine) * TOPK * 4,
            "all_gather": checked.get("all_gather", 0) + (tp - 1) * mine * 4,
        }
        assert found["scattered gradient"] == {
            "all_gather": (tp - 1) * mine * (IDX_HEADS * IDX_WIDTH * 2 + IDX_HEADS * 2),
            "all_reduce": all_reduced(M * IDX_WIDTH * 4, tp),
        }


@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        ("allgather", "contiguous"),
        sweep("allgather", "zigzag"),
        ("allgather", "striped"),
        sweep("ring", "contiguous"),
        sweep("ring", "zigzag"),
        sweep("ring", "striped"),
    ],
)
def test_cp_ranks(schedule, layout):
    cp = 4

    def program(place):
        mine = PROBLEM.shard(place)
        parallel = am.SparseParallel(cp=place.cp, length=N, key_length=M, layout=place.layout, schedule=schedule)
        q, kv = mine.leaves("q", "kv")
        found = {}
        found["forward"] = sent(place.cp, lambda: found.update(state=parallel.sparse_attention(
            q, kv, mine.indices, scale=SCALE)))  # fmt: skip
        found["backward"] = sent(place.cp, lambda: found.pop("state")[0].sum().backward())
        found["topk"] = sent(place.cp, lambda: parallel.indexer_topk(mine.iq, mine.ik, mine.w, TOPK))
        leaves = mine.leaves("iq", "ik", "w")
        found["dense loss"] = sent(place.cp, lambda: found.update(loss=parallel.indexer_kl_loss(
            *leaves, None, am.sparse.AttentionTarget(mine.q, mine.kv, mine.grad_lse, SCALE))))  # fmt: skip
        found["dense gradient"] = sent(place.cp, lambda: found.pop("loss").backward())
        return found

    held = [LAYOUTS[layout].local_length(M, cp, rank) for rank in range(cp)]
    index_key, index_sum = IDX_WIDTH * 2, IDX_WIDTH * 4
    for rank, (found,) in enumerate(run_grid(1, cp, LAYOUTS[layout], program)):
        mine = held[rank]
        met = [held[(rank - step) % cp] for step in range(cp)]
        loss_sum = {"all_reduce": all_reduced(4, cp)}
        if schedule == "allgather":
            assert found["forward"] == {"all_gather": (cp - 1) * mine * KEY}
            assert found["backward"] == found["forward"] | {"reduce_scatter": (M - mine) * SUM}
            assert found["topk"] == {"all_gather": (cp - 1) * mine * index_key}
            assert found["dense loss"] == {"all_gather": (cp - 1) * mine * (index_key + KEY)} | loss_sum
            assert found["dense gradient"] == {
                "all_gather": (cp - 1) * mine * (index_key + KEY), "reduce_scatter": (M - mine) * index_sum,
            }  # fmt: skip
        else:  # all but the last block met are passed on; the gradients of all but the own follow
            assert found["forward"] == {"exchange": sum(met[:-1]) * KEY}
            assert found["backward"] == {"exchange": sum(met[:-1]) * KEY + sum(met[1:]) * SUM}
            assert found["topk"] == {"exchange": sum(met[:-1]) * index_key}
            assert found["dense loss"] == {"exchange": sum(met[:-1]) * (index_key + KEY)} | loss_sum
            assert found["dense gradient"] == {
                "exchange": sum(met[:-1]) * (index_key + KEY) + sum(met[1:]) * index_sum,
            }
