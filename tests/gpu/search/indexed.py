"""Attention of rows over the keys that their indices name, in float64 and by the plain computation.

The reference of dense attention computes it: every row is a sequence of its own, whose keys are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

import attnmesh as am
from attnmesh.ops.dense import reference
from attnmesh.testing.attention import forward_backward
from attnmesh.testing.errors import assert_close

from .cases import rounding_of

GATHERED = 1 << 24  # numbers gathered, or scored, at a time


def valid_slots(indices: Tensor, s_kv: int, mask: am.SparseMask) -> Tensor:
    """Return whether each slot counts, bool [s_q, topk], by the definition of a mask."""
    j = indices.long()
    good = (j >= mask.k_offset) & (j < mask.k_offset + s_kv)

    def per_row(x: Tensor) -> Tensor:
        return x.to(j.device, torch.long)[:, None]

    if mask.topk_length is not None:
        good &= torch.arange(j.shape[1], device=j.device) < per_row(mask.topk_length)
    if mask.causal:
        at = torch.arange(j.shape[0]) + mask.q_start if mask.q_positions is None else mask.q_positions
        good &= (j + 1) * mask.k_stride - 1 <= per_row(at)
    if mask.k_start is not None:
        good &= j >= per_row(mask.k_start)
    if mask.k_end is not None:
        good &= j < per_row(mask.k_end)
    return good


class _Shown(NamedTuple):
    """Has what the reference asks of a mask: which keys each row of the batch sees."""

    valid: Tensor

    def visible(self, q: Tensor, k: Tensor) -> Tensor:
        return self.valid[:, None]


def some_rows(rows: int, numbers: int) -> Iterator[slice]:
    """Yield slices of rows that have so many numbers each."""
    step = max(1, GATHERED // max(1, numbers))
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def attention_results(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    at: Tensor,
    valid: Tensor,
    scale: float,
    d_v: int,
    sinks: Tensor | None = None,
    grads: tuple[Tensor, Tensor] | None = None,
    *,
    keep: Tensor | None = None,
    plain: bool = False,
) -> dict[str, Tensor]:
    """Return out, lse, the largest score, and with `grads` of out and lse the gradients dq, dk, dv and dsinks.

    Without `v`, values are the first `d_v` features of the keys, and dk includes their gradient. `at` [rows, topk] are
    rows of k; it holds anything where a slot is not `valid`. Of results by row, only the rows `keep` are returned.
    """
    parts: dict[str, list[Tensor]] = {}
    wide = torch.float32 if plain else torch.float64
    sums: dict[str, Tensor] = {}
    if grads is not None:
        sums = {"dk": torch.zeros(k.shape, dtype=wide, device=k.device)}
        if v is not None:
            sums["dv"] = torch.zeros(v.shape, dtype=wide, device=k.device)
    for rows in some_rows(q.shape[0], at.shape[1] * (k.shape[1] + 2 * q.shape[1])):
        shown, keys = valid[rows], torch.where(valid[rows], at[rows], 0).long()
        own_q = torch.where(shown.any(1)[:, None, None], q[rows], 0.0)[:, :, None]
        own_k = torch.where(shown[..., None], k[keys], 0.0)[:, None]
        own_v = own_k[..., :d_v] if v is None else torch.where(shown[..., None], v[keys], 0.0)[:, None]
        if not plain:
            own_q, own_k, own_v = (x.double() for x in (own_q, own_k, own_v))

        def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, seen: Tensor = shown) -> am.State:
            zero = torch.zeros(1, dtype=torch.long, device=q.device)
            return reference.attention(
                q, k, v, _Shown(seen), scale, zero, torch.arange(seen.shape[1], device=q.device), sinks=sinks,
                plain=plain,
            )  # fmt: skip

        own_sinks = None if sinks is None else sinks if plain else sinks.double()
        if grads is None:
            found = dict(zip(("out", "lse"), attend(own_q, own_k, own_v, own_sinks), strict=True))
        else:
            inputs = [own_q, own_k, own_v, *(x[rows, :, None].to(wide) for x in grads)]
            names = ("out", "lse", "dq", "dk", "dv", "dsinks")
            found = dict(zip(names, forward_backward(attend, inputs, own_sinks), strict=False))
            grad_k, grad_v = found.pop("dk").to(wide)[:, 0], found.pop("dv").to(wide)[:, 0]
            if v is None:
                grad_k[..., :d_v] += grad_v
            else:
                sums["dv"].index_add_(0, keys.flatten(), grad_v.flatten(0, 1))
            sums["dk"].index_add_(0, keys.flatten(), grad_k.flatten(0, 1))
            if "dsinks" in found:
                sums["dsinks"] = sums.get("dsinks", 0.0) + found.pop("dsinks").to(wide)
        found = {name: x[:, :, 0] for name, x in found.items()}
        scores = own_q[:, :, 0].to(wide) @ own_k[:, 0].to(wide).transpose(1, 2) * scale
        if plain:
            scores = scores.to(q.dtype).to(wide)
        found["max_logits"] = scores.masked_fill(~shown[:, None], -torch.inf).amax(-1)
        for name, x in found.items():
            parts.setdefault(name, []).append(x if keep is None else x[keep[rows]])
    results = {name: torch.cat(x) for name, x in parts.items()}
    return results | {name: x.to(q.dtype) if plain and name != "dsinks" else x for name, x in sums.items()}


def distribution_results(
    q: Tensor, k: Tensor, at: Tensor, valid: Tensor, lse: Tensor, scale: float, group: int, *, plain: bool = False
) -> Tensor:
    """Return the probabilities of the slots, summed over each group of heads: [groups, rows, topk]."""
    wide = torch.float32 if plain else torch.float64

    def rounded(x: Tensor) -> Tensor:
        return x.to(q.dtype).to(wide) if plain else x

    parts = []
    for rows in some_rows(q.shape[0], at.shape[1] * (k.shape[1] + 2 * q.shape[1])):
        keys = torch.where(valid[rows], at[rows], 0).long()
        own_k = torch.where(valid[rows][..., None], k[keys], 0.0).to(wide)
        own_q = torch.where(valid[rows].any(1)[:, None, None], q[rows], 0.0).to(wide)
        scores = rounded(own_q @ own_k.transpose(1, 2) * scale)
        mass = lse[rows].to(wide)[..., None]
        p = torch.where(valid[rows][:, None] & mass.isfinite(), rounded(torch.exp(scores - mass)), 0.0)
        parts.append(torch.stack([x.sum(1) for x in p.split(group, 1)]))
    return torch.cat(parts, 1)


def index_scores(
    iq: Tensor, ik: Tensor, w: Tensor, scale: float, relu: bool, rounded: Callable[[Tensor], Tensor] = lambda x: x
) -> Tensor:
    """Return the indexer's scores [rows, keys] of keys [keys, d], or of keys of each row [rows, keys, d]."""
    dots = rounded(iq @ ik.transpose(-1, -2))
    return rounded(scale * torch.einsum("ih,ihj->ij", w, dots.relu() if relu else dots))


def best_keys(scores: Tensor, visible: Tensor, topk: int) -> Tensor:
    """Return the top-k of each row in ascending order, then -1; of equal scores the lowest key."""
    order = scores.masked_fill(~visible, -torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :topk]
    chosen = torch.where(visible.gather(1, order), order, torch.iinfo(torch.int64).max).sort(dim=1).values
    chosen = chosen.masked_fill(chosen == torch.iinfo(torch.int64).max, -1)
    return torch.nn.functional.pad(chosen, (0, topk - chosen.shape[1]), value=-1).int()


def assert_rows_close(name: str, actual: Tensor, plain: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Assert the error rule, with a position for each row. `dsinks` are a sum over all rows."""
    rounding = rounding_of(dtype, exact.shape[0]) * (4 if name == "dsinks" else 1)
    assert_close(name, actual[None, None], plain[None, None], exact[None, None], rounding=rounding)
