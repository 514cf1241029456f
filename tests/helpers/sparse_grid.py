"""Sparse problems over a grid of virtual ranks: run, join the shards, and compare with float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import attnmesh as am
from attnmesh.ops.sparse import reference
from attnmesh.testing.sparse import SCALE, GridRank, Reference, SparseProblem, random_sparse_problem

LAYOUTS = {"contiguous": am.Contiguous(), "zigzag": am.Zigzag(), "striped": am.Striped()}
WIDTH, D_V = 12, 8

MASKS: dict[str, Callable[[int], dict[str, Any]]] = {
    "full": lambda n: {},
    "causal": lambda n: {"causal": True, "q_start": 2},
    "strided": lambda n: {"causal": True, "k_stride": 3, "q_positions": torch.arange(n).flip(0) * 3},
    "ranges": lambda n: {
        "k_start": torch.arange(n) // 3, "k_end": torch.arange(n) + 5, "topk_length": torch.arange(n) % 7,
    },
}  # fmt: skip


def random_problem(*lengths: int, **how: Any) -> SparseProblem:
    """Return a random problem with NaN in the keys that no row reads. Arguments of `random_sparse_problem`."""
    return random_sparse_problem(*lengths, **how).poisoned()


def run_grid(tp: int, cp: int, layout: am.Layout, fn: Callable[[GridRank], Any]) -> list[list[Any]]:
    """Run `fn` on every rank of tp x cp virtual ranks; returns results [cp][tp]."""
    results = am.run_virtual(tp * cp, lambda comm: fn(GridRank.of(comm, tp, layout)), timeout=120)
    return [results[row * tp : (row + 1) * tp] for row in range(cp)]


def join_grid(grid: list[list[Tensor]], layout: am.Layout, *, heads: bool = False) -> Tensor:
    """Return the whole of a sharded result. What all tp ranks hold must be equal, except for the last bits of BLAS."""
    if not heads:
        for row in grid:
            for x in row[1:]:
                torch.testing.assert_close(x, row[0])
    return layout.unshard([torch.cat(row, 1) if heads else row[0] for row in grid], 0)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@dataclass(frozen=True)
class ExactInputs:
    """The keys of a problem in float64 without poison, and which indices are valid."""

    valid: Tensor
    times: Tensor
    kv: Tensor
    v: Tensor
    ik: Tensor

    @classmethod
    def of(cls, problem: SparseProblem) -> ExactInputs:
        valid = reference.valid_slots(problem.indices, problem.key_length, problem.mask)
        times = reference.key_counts(problem.indices, valid, problem.key_length)
        kv, v, ik = (getattr(problem, name).double().nan_to_num(0.0) for name in ("kv", "v", "ik"))
        return cls(valid, times, kv, v, ik)


def exact_attention(problem: SparseProblem, *, values: bool, sink: bool) -> dict[str, Tensor]:
    """Return out, lse, dist and all gradients in float64."""
    problem = problem.to(torch.float64).change(lambda _, x: x.nan_to_num(0.0, -torch.inf, torch.inf))
    leaves = dict(zip(("q", "kv", "v", "sink"), problem.leaves("q", "kv", "v", "sinks"), strict=True))
    out, lse, dist = Reference.sparse_attention(
        leaves["q"], leaves["kv"], problem.indices, scale=SCALE, mask=problem.mask, d_v=D_V,
        v=leaves["v"] if values else None, sinks=leaves["sink"] if sink else None, return_attn_sum=True,
    )  # fmt: skip
    wanted = {name: x for name, x in leaves.items() if (name != "v" or values) and (name != "sink" or sink)}
    finite = torch.where(lse == -torch.inf, 0.0, lse)
    grads = torch.autograd.grad(
        (out * problem.grad_out).sum() + (finite * problem.grad_lse).sum(), list(wanted.values())
    )
    return {"out": out.detach(), "lse": lse.detach(), "dist": dist} | {
        f"d_{name}": grad for name, grad in zip(wanted, grads, strict=True)
    }


def assert_exact(actual: Tensor, exact: Tensor, tolerance: float = 1e-11) -> None:
    assert actual.shape == exact.shape
    torch.testing.assert_close(actual.double(), exact.double(), rtol=tolerance, atol=tolerance)
