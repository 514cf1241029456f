"""The indexer's loss step as it is written down first: every score of every head and key in memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.sparse.inputs import Attended, Indexed

Step = tuple[Tensor, Tensor, Tensor, Tensor]  # each row's loss, and the gradients by iq, ik and w


def naive_step(x: Attended, i: Indexed, grad: Tensor, *, dense: bool, at_once: int) -> Step:
    """Over the slots or all keys, `at_once` rows at a time."""
    parts = []
    d_ik = torch.zeros_like(i.ik)
    for start in range(0, x.q.shape[0], at_once):
        some = slice(start, start + at_once)
        hidden = None if dense else _hidden(x.indices[some], i.ik.shape[0])
        p = _target(x, some, hidden)
        leaves = [t.detach().requires_grad_() for t in (i.iq[some], i.ik, i.w[some])]
        loss = _row_loss(Indexed(*leaves), p, hidden)
        d_iq, of_keys, d_w = torch.autograd.grad(loss, leaves, grad[some])
        d_ik += of_keys
        parts.append((loss.detach(), d_iq, d_w))
    losses, d_iqs, d_ws = zip(*parts, strict=True)
    return torch.cat(losses), torch.cat(d_iqs), d_ik, torch.cat(d_ws)


def rows_that_fit(s_q: int, run: Callable[[int], object]) -> int:
    """How many rows at a time there is memory for: all, or half of them as often as it takes."""
    rows = s_q
    while not _fits(run, rows):
        if rows == 1:
            raise RuntimeError("not even one row of the naive computation fits into memory")
        rows = -(-rows // 2)
        torch.cuda.empty_cache()
    return rows


def _fits(run: Callable[[int], object], rows: int) -> bool:
    try:
        run(rows)
    except torch.OutOfMemoryError:
        return False
    return True


def _hidden(indices: Tensor, s_kv: int) -> Tensor:
    hidden = torch.ones(indices.shape[0], s_kv, dtype=torch.bool, device=indices.device)
    return hidden.scatter_(1, indices.long(), False)


@torch.no_grad()
def _target(x: Attended, some: slice, hidden: Tensor | None) -> Tensor:
    """[rows, s_kv]: the mean over heads of softmax."""
    q = x.q[some]
    scores = (q.flatten(0, 1) @ x.kv.T).view(q.shape[0], q.shape[1], -1).mul_(x.scale)
    if hidden is not None:
        scores.masked_fill_(hidden[:, None], -torch.inf)
    return torch.softmax(scores, -1, dtype=torch.float32).mean(1)


def _row_loss(i: Indexed, p: Tensor, hidden: Tensor | None) -> Tensor:
    rows, heads, d = i.iq.shape
    dots = (i.iq.reshape(-1, d) @ i.ik.T).view(rows, heads, -1).relu()
    scores = (i.w[:, None].to(dots.dtype) @ dots).squeeze(1).float()
    if hidden is not None:
        scores = scores.masked_fill(hidden, -torch.inf)
    log_q = torch.log_softmax(scores, -1)
    if hidden is not None:
        log_q = log_q.masked_fill(hidden, 0.0)
    loss: Tensor = (torch.special.xlogy(p, p) - p * log_q).sum(-1)
    return loss
