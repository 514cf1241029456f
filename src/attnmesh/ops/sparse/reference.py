"""The specification in plain differentiable operations, with the scores of all keys in memory. For tests.

Sparsity is one matrix: `times[i, j]` is how often key j is in a valid slot of row i.
"""

from __future__ import annotations

import torch
from torch import Tensor

from attnmesh.core.state import State
from attnmesh.ops.sparse.arguments import SparseMask


def valid_slots(indices: Tensor, s_kv: int, mask: SparseMask) -> Tensor:
    """Whether each slot is valid, one slot at a time: bool [s_q, topk]."""
    valid = [[False] * indices.shape[1] for _ in range(indices.shape[0])]
    length, positions, start, end = (
        None if x is None else x.tolist() for x in (mask.topk_length, mask.q_positions, mask.k_start, mask.k_end)
    )
    for i, row in enumerate(indices.tolist()):
        for slot, j in enumerate(row):
            good = mask.k_offset <= j < mask.k_offset + s_kv
            if length is not None:
                good &= slot < length[i]
            if mask.causal:
                p = mask.q_start + i if positions is None else positions[i]
                good &= p >= (j + 1) * mask.k_stride - 1
            if start is not None:
                good &= j >= start[i]
            if end is not None:
                good &= j < end[i]
            valid[i][slot] = good
    return torch.tensor(valid, dtype=torch.bool, device=indices.device).view(indices.shape)


def key_counts(indices: Tensor, valid: Tensor, s_kv: int, k_offset: int = 0) -> Tensor:
    """How often each key is in a valid slot of each row, [s_q, s_kv]."""
    times = torch.zeros(indices.shape[0], s_kv, dtype=torch.float64, device=indices.device)
    at = torch.where(valid, indices - k_offset, 0).long()
    return times.scatter_add(1, at, valid.double()) if s_kv else times


def attend(q: Tensor, k: Tensor, v: Tensor, times: Tensor, scale: float, sinks: Tensor | None = None) -> State:
    """out [s_q, heads, d_v] and lse [s_q, heads]."""
    scores = torch.einsum("ihd,jd->ihj", q, k) * scale
    weight = times[:, None] * torch.exp(scores)
    total = weight.sum(-1)
    if sinks is not None:
        total = total + torch.exp(sinks)
    has_mass = total > 0
    out = torch.einsum("ihj,jv->ihv", weight, v) / torch.where(has_mass, total, 1.0)[..., None]
    return State(out, torch.where(has_mass, torch.where(has_mass, total, 1.0).log(), -torch.inf))


def paged_attend(
    q: Tensor, keys: Tensor, table: Tensor | None, indices: Tensor, scale: float, d_v: int,
    counts: Tensor | None = None, sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Out [B, T, H, d_v], lse and largest score [B, T, H], token by token, over a dequantized pool [blocks, size, D].

    Indices [B, T, topk] are positions, or slots without a `table`; negative ones and those past `counts` are ignored.
    """
    size = keys.shape[1]
    outs, lses, tops = [], [], []
    for b, (sequence, rows) in enumerate(zip(q, indices.tolist(), strict=True)):
        for t, (query, row) in enumerate(zip(sequence, rows, strict=True)):
            given = [i for i in row[: None if counts is None else max(0, int(counts[b, t]))] if i >= 0]
            blocks = [i // size if table is None else int(table[b, i // size]) for i in given]
            k = (
                torch.stack([keys[block, i % size] for block, i in zip(blocks, given, strict=True)])
                if given
                else keys[0, :0]
            )
            scores = query @ k.T * scale
            every = scores if sinks is None else torch.cat([scores, sinks[:, None].to(scores)], 1)
            lse = torch.logsumexp(every, 1) if every.shape[1] else every.new_full(every.shape[:1], -torch.inf)
            outs.append(torch.exp(scores - lse[:, None]) @ k[:, :d_v])
            lses.append(lse)
            tops.append(scores.amax(1) if given else torch.full_like(lse, -torch.inf))
    return tuple(torch.stack(x).unflatten(0, q.shape[:2]) for x in (outs, lses, tops))


def distribution(q: Tensor, k: Tensor, lse: Tensor, scale: float) -> Tensor:
    """The probability of every key per head, [heads, s_q, s_kv]."""
    scores = torch.einsum("ihd,jd->hij", q, k) * scale
    return torch.exp(scores - lse.T[..., None])


def index_scores(iq: Tensor, ik: Tensor, w: Tensor, scale: float = 1.0, relu: bool = True) -> Tensor:
    """[s_q, s_kv]."""
    dots = torch.einsum("ihd,jd->ihj", iq, ik)
    return scale * torch.einsum("ih,ihj->ij", w, dots.relu() if relu else dots)


def topk_keys(scores: Tensor, visible: Tensor, topk: int) -> list[list[int]]:
    """The top-k visible keys of every row in ascending order; of equal scores the lowest key."""
    selected = []
    for row, row_visible in zip(scores.tolist(), visible.tolist(), strict=True):
        keys = [j for j, ok in enumerate(row_visible) if ok]
        selected.append(sorted(sorted(keys, key=lambda j: (-row[j], j))[:topk]))
    return selected


def kl(p: Tensor, scores: Tensor, visible: Tensor) -> Tensor:
    """KL(p || softmax(scores of the visible keys)) [s_q]; normalizes p; 0 for a row without mass."""
    mass = (p * visible).sum(-1, keepdim=True)
    p = torch.where(visible, p / torch.where(mass > 0, mass, 1.0), 0.0)
    log_q = scores - torch.logsumexp(scores.masked_fill(~visible, -torch.inf), -1, keepdim=True)
    return torch.where(p > 0, p * (torch.where(p > 0, p, 1.0).log() - log_q), 0.0).sum(-1)
