"""One order for the slots of a row, so that ranks which chose the same keys add the same slots."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.ops.sparse.check import check_indices


class Slots(NamedTuple):
    """Chosen keys: `indices` [s_q, topk] int32, ascending, -1 last; `scores` (None: not known); `length` [s_q]."""

    indices: Tensor
    scores: Tensor | None
    length: Tensor


def canonicalize(
    indices: Tensor, scores: Tensor | None = None, *, s_kv: int | None = None, unique: bool = False
) -> Slots:
    """The slots of every row in ascending order of their keys, what names none as -1 at the end; scores go along.

    An index names no key when it is negative or, if `s_kv` is given, past it. `unique` keeps the first slot that names
    a key, in the order given, and drops the others. Scores of dropped and unused slots are -inf.
    """
    indices = check_indices(indices)
    if scores is not None and (not isinstance(scores, Tensor) or scores.shape != indices.shape):
        got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"scores must be {list(indices.shape)}, one a slot, got {got}")
    if s_kv is not None and (isinstance(s_kv, bool) or not isinstance(s_kv, int) or s_kv < 0):
        raise ValueError(f"s_kv must be a non-negative integer, got {s_kv!r}")
    limit = torch.iinfo(torch.int32).max
    named = (indices >= 0) & (indices < (limit if s_kv is None else s_kv))
    keys, order = indices.masked_fill(~named, limit).sort(dim=1, stable=True)
    if unique:
        again = torch.zeros_like(named)
        again[:, 1:] = keys[:, 1:] == keys[:, :-1]
        keys, second = keys.masked_fill(again, limit).sort(dim=1, stable=True)
        order = order.gather(1, second)
    used = keys < limit
    if scores is not None:
        scores = scores.gather(1, order).masked_fill(~used, -torch.inf)
    return Slots(keys.masked_fill(~used, -1), scores, used.sum(1, dtype=torch.int32))
