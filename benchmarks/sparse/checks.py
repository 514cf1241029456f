"""Exact results of a few rows in float64 over all keys, and the errors that are allowed."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.state import State
from attnmesh.ops.sparse import reference
from benchmarks.sparse.cases import AttentionInputs, IndexerInputs


def named_keys(indices: Tensor, rows: Tensor, s_kv: int) -> Tensor:
    """[rows, s_kv] float64: 1 where the row names the key."""
    times = torch.zeros(rows.shape[0], s_kv, dtype=torch.float64, device=indices.device)
    return times.scatter_(1, indices[rows].long(), 1.0)


def attention(x: AttentionInputs, rows: Tensor, d_v: int) -> State:
    """Out and lse of the rows."""
    kv = x.kv.double()
    return reference.attend(x.q[rows].double(), kv, kv[:, :d_v], named_keys(x.indices, rows, kv.shape[0]), x.scale)


def attention_gradients(x: AttentionInputs, rows: Tensor, d_v: int, d_out: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the rows' queries, and what the rows give to that of all keys."""
    q, kv = (t.detach().double().requires_grad_() for t in (x.q[rows], x.kv))
    out = reference.attend(q, kv, kv[:, :d_v], named_keys(x.indices, rows, kv.shape[0]), x.scale).out
    d_q, d_kv = torch.autograd.grad(out, (q, kv), d_out[rows].double())
    return d_q, d_kv


def distribution(x: AttentionInputs, rows: Tensor, lse: Tensor) -> Tensor:
    """[rows, topk], from the lse that is given."""
    every = reference.distribution(x.q[rows].double(), x.kv.double(), lse[rows].double(), x.scale).sum(0)
    return every.gather(1, x.indices[rows].long())


def index_scores(x: IndexerInputs, rows: Tensor) -> Tensor:
    """[rows, s_kv]."""
    return reference.index_scores(x.iq[rows].double(), x.ik.double(), x.w[rows].double())


def loss_gradients(
    x: AttentionInputs, i: IndexerInputs, rows: Tensor, *, dense: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rows' loss, over the slots or all keys, and its gradients by the indexer's queries, keys and weights."""
    q, k = x.q[rows].double(), x.kv.double()
    times = torch.ones(q.shape[0], k.shape[0], dtype=k.dtype, device=k.device)
    if not dense:
        times = named_keys(x.indices, rows, k.shape[0])
    lse = reference.attend(q, k, k[:, :1], times, x.scale).lse
    p = reference.distribution(q, k, lse, x.scale).sum(0)
    iq, ik, w = (t.detach().double().requires_grad_() for t in (i.iq[rows], i.ik, i.w[rows]))
    loss = reference.kl(p, reference.index_scores(iq, ik, w), times > 0)
    d_iq, d_ik, d_w = torch.autograd.grad(loss.sum(), (iq, ik, w))
    return loss.detach(), d_iq, d_ik, d_w


SUMMED = 1e-3  # products of given numbers, summed in float32
ROUNDED = 2e-2  # what was rounded to bf16 on the way: some 3e-3; a wrong answer is many times as much


class Verdict(NamedTuple):
    """The largest relative error, and whether every result is as near as it must be."""

    error: float
    verdict: str


def judge(*findings: tuple[Tensor, Tensor, float]) -> Verdict:
    """Results, what is expected of them (float64), and how far each may be away."""
    return worst_error(*((relative_error(got, expected), allowed) for got, expected, allowed in findings))


def worst_error(*errors: tuple[float, float]) -> Verdict:
    """From errors and what each may be."""
    largest = max(math.inf if math.isnan(error) else error for error, _ in errors)
    return Verdict(largest, "ok" if all(error < allowed for error, allowed in errors) else "WRONG")


def relative_error(got: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of what is expected."""
    return float((got.double() - expected).norm() / expected.norm())


def topk_error(indices: Tensor, scores: Tensor) -> float:
    """How far rows of chosen keys are from the best ones, by the exact scores [rows, s_kv] (-inf: not to be seen).

    The worst of: a key chosen below the last of the best, and one left out above it; over the root mean square of the
    scores. Rounding may exchange keys whose scores are as near as that. Infinite if a row names a key twice, or none.
    """
    topk = indices.shape[1]
    if int(indices.min()) < 0 or int(indices.max()) >= scores.shape[1]:
        return math.inf
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, indices.long(), True)
    if not bool((chosen.sum(1) == topk).all()):
        return math.inf
    last = scores.topk(topk, 1).values[:, -1]
    below = last - scores.masked_fill(~chosen, math.inf).amin(1)
    above = scores.masked_fill(chosen, -math.inf).amax(1) - last
    size = scores[scores > -math.inf].square().mean().sqrt()
    return float(torch.maximum(below, above).clamp(min=0.0).max() / size)
