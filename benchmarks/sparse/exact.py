"""What a few rows of every operation must give: the specification in float64, over all keys."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmesh.core.state import State
from attnmesh.ops.sparse import reference
from benchmarks.sparse.inputs import Attended, Indexed


def named(indices: Tensor, rows: Tensor, s_kv: int) -> Tensor:
    """[rows, s_kv] float64: 1 where the row names the key."""
    times = torch.zeros(rows.shape[0], s_kv, dtype=torch.float64, device=indices.device)
    return times.scatter_(1, indices[rows].long(), 1.0)


def attention(x: Attended, rows: Tensor, d_v: int) -> State:
    """Out and lse of the rows."""
    kv = x.kv.double()
    return reference.attend(x.q[rows].double(), kv, kv[:, :d_v], named(x.indices, rows, kv.shape[0]), x.scale)


def attention_gradients(x: Attended, rows: Tensor, d_v: int, d_out: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of the rows' queries, and what the rows give to that of all keys."""
    q, kv = (t.detach().double().requires_grad_() for t in (x.q[rows], x.kv))
    out = reference.attend(q, kv, kv[:, :d_v], named(x.indices, rows, kv.shape[0]), x.scale).out
    d_q, d_kv = torch.autograd.grad(out, (q, kv), d_out[rows].double())
    return d_q, d_kv


def distribution(x: Attended, rows: Tensor, lse: Tensor) -> Tensor:
    """[rows, topk], from the lse that is given."""
    every = reference.distribution(x.q[rows].double(), x.kv.double(), lse[rows].double(), x.scale).sum(0)
    return every.gather(1, x.indices[rows].long())


def index_scores(x: Indexed, rows: Tensor) -> Tensor:
    """[rows, s_kv]."""
    return reference.index_scores(x.iq[rows].double(), x.ik.double(), x.w[rows].double())


def loss_gradients(x: Attended, i: Indexed, rows: Tensor, *, dense: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rows' loss, over the slots or all keys, and its gradients by the indexer's queries, keys and weights."""
    q, k = x.q[rows].double(), x.kv.double()
    times = torch.ones(q.shape[0], k.shape[0], dtype=k.dtype, device=k.device)
    if not dense:
        times = named(x.indices, rows, k.shape[0])
    lse = reference.attend(q, k, k[:, :1], times, x.scale).lse
    p = reference.distribution(q, k, lse, x.scale).sum(0)
    iq, ik, w = (t.detach().double().requires_grad_() for t in (i.iq[rows], i.ik, i.w[rows]))
    loss = reference.kl(p, reference.index_scores(iq, ik, w), times > 0)
    d_iq, d_ik, d_w = torch.autograd.grad(loss.sum(), (iq, ik, w))
    return loss.detach(), d_iq, d_ik, d_w
