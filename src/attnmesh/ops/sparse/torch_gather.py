"""Keys that slots name, a few rows of queries at a time: what the torch backend is made of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.core.state import accumulation_dtype
from attnmesh.ops.sparse.mask import Rows

_MOST_ELEMENTS = 1 << 22  # of the keys gathered at a time: beside inputs and outputs, memory stays bounded


@dataclass(frozen=True)
class Part:
    """Some rows: which slots are valid [rows, topk], the keys they name [rows, topk, d], zero where none, and where
    those lie [rows, topk].

    Where all rows name the same keys, `keys` is [topk, d] and `at` [topk]: one product serves all rows.
    """

    rows: slice
    valid: Tensor
    keys: Tensor
    at: Tensor

    def dots(self, x: Tensor) -> Tensor:
        """The products of x [rows, heads, d] with the keys, [rows, heads, topk]."""
        # Copied: oneDNN on ARM is up to a hundred times slower when it is handed a transposed operand.
        return torch.matmul(x, self.keys.mT.contiguous())

    def for_keys(self, weights: Tensor, x: Tensor) -> Tensor:
        """For each slot the sum over heads of weights [rows, heads, topk], 0 if not valid, times x [rows, heads, d]."""
        if self.keys.ndim == 3:
            return torch.matmul(weights.mT, x)
        x = x.masked_fill(~self.valid.any(1)[:, None, None], 0.0)  # a row that sees nothing may hold anything
        return weights.flatten(0, 1).mT @ x.flatten(0, 1)

    def add_to(self, total: Tensor, found: Tensor, deterministic: bool) -> None:
        """Add what was found for each slot to its key; `total` has one more row, for slots that name none."""
        at, found = self.at.flatten(), found.reshape(-1, found.shape[-1]).to(total.dtype)
        if deterministic and total.is_cuda:
            total.index_put_((at,), found, accumulate=True)
        else:
            total.index_add_(0, at, found)


def parts(k: Tensor, indices: Tensor, rows: Rows, per_slot: int) -> Iterator[Part]:
    """All rows, in parts. `per_slot`: elements that a row needs for each of its slots."""
    s_q, topk = indices.shape
    shared = indices.stride(0) == 0 and s_q > 1
    step = max(1, _MOST_ELEMENTS // max(1, topk * per_slot))
    for start in range(0, s_q, step):
        some = slice(start, min(s_q, start + step))
        valid = rows.part(some.start, some.stop).valid(indices[some])
        if shared:
            keys, at = _named(k, indices[start] - rows.k_offset, valid.any(0))
            if torch.isfinite(keys).all():  # or else zero times a key that a row must not see would be NaN
                yield Part(some, valid, keys, at)
                continue
        yield Part(some, valid, *_named(k, indices[some] - rows.k_offset, valid))


def _named(k: Tensor, at: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """The keys at these rows, zero where not used, and the rows, those not used past the last."""
    s_kv = k.shape[0]
    at = at.masked_fill(~used, s_kv).long()
    keys = k[at.clamp(max=s_kv - 1)] if s_kv else k.new_zeros(*at.shape, k.shape[1])
    # Filled, not multiplied by zero: memory that nobody names may hold anything.
    return keys.to(accumulation_dtype(k.dtype)).masked_fill(~used[..., None], 0.0), at
