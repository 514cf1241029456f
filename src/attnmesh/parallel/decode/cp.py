"""Context parallelism of a KV cache: every peer attends over its positions, and the partial states are merged.

The CP peers hold the same kv heads of the same sequences, each for its own positions. Shapes at every arrow, with S
tokens a sequence, B sequences, h_c heads of peer c, and H heads in all:

    in                        [h, B, S, D]  --->  [H, B, S, D]                 (nothing, where queries are replicated)
    attention over a shard    a state of all heads: out [H, B, S, D], lse [H, B, S], float32
    out, all_to_all           [c][h_c, B, S, D + 1]  --->  [cp, h, B, S, D + 1]  ->  merged [B, h, S, D]
    out, reduce_scatter       lse [H, B, S]  --->  [cp, H, B, S];  out x exp(lse - total)  --->  sum [h, B, S, D]
    out, all_reduce           the same, but everybody gets the sum of all heads and keeps its own

The positions a token sees on a rank are an interval of what the rank holds, so the kernel knows nothing of ranks. A new
token is written by the owner of its position before anybody attends: it is attended once, where it lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.ops.packed import merge_packed, with_sinks
from attnmesh.plan.decode import Combine


@dataclass(frozen=True)
class Cp:
    """What the peers of `comm` exchange: `heads[c]` query heads of peer c."""

    comm: Comm
    heads: tuple[int, ...]

    @property
    def own(self) -> slice:
        """The own heads among all."""
        ends = list(accumulate(self.heads))
        return slice(ends[self.comm.rank] - self.heads[self.comm.rank], ends[self.comm.rank])

    def gather_heads(self, q: Tensor) -> Tensor:
        """All heads, [H, B, S, D], from the own, [h, B, S, D]."""
        if len(self.heads) == 1:
            return q
        shapes = [(heads, *q.shape[1:]) for heads in self.heads]
        gathered = self._room((sum(self.heads), *q.shape[1:]), q)
        self.comm.all_gather(q, shapes, into=gathered)
        return gathered

    def combine(self, packed: Tensor, sinks: Tensor | None, dtype: torch.dtype, way: Combine) -> Tensor:
        """The out of the own heads over all positions, [B, h, S, D], from this rank's states [H, B, S, D + 1]."""
        if way == "all_to_all":
            return merge_packed(self.trade(packed), sinks, dtype)
        out, lse = packed[..., :-1], packed[..., -1].contiguous()
        lses = self._room((len(self.heads), *lse.shape), lse)
        self.comm.all_gather(lse, [lse.shape] * len(self.heads), into=lses)
        total = torch.logsumexp(lses, 0)
        # A row that nobody saw has a total of -inf and an out of 0 everywhere.
        scaled = out * torch.exp(lse - torch.where(total == -torch.inf, 0.0, total)).unsqueeze(-1)
        if way == "reduce_scatter":
            mine = self.comm.reduce_scatter(scaled.split(self.heads))
        else:
            mine = self.comm.all_reduce(scaled, reuse=True)[self.own]
        return with_sinks(mine, total[self.own], sinks).transpose(0, 1).to(dtype)

    def trade(self, packed: Tensor) -> Tensor:
        """Everybody's states of the own heads, [cp, h, ...], from this rank's of all heads, [H, ...]."""
        shapes = [(self.heads[self.comm.rank], *packed.shape[1:])] * len(self.heads)
        arrived = self._room((len(self.heads), *shapes[0]), packed)
        self.comm.all_to_all(packed.split(self.heads), shapes, into=arrived)
        return arrived

    def _room(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return self.comm.buffer(shape, dtype=like.dtype, device=like.device)
