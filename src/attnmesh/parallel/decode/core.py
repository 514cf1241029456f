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
import torch.nn.functional as F
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.core.merge import discount_sinks_batch_invariant, scale_for_sum, unpack_state
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.kv_cache.sharded import ShardedCache, Step
from attnmesh.ops.decode.api import paged_decode_attention
from attnmesh.ops.decode.device_errors import MAX_SEQUENCES
from attnmesh.ops.merge import merge_packed
from attnmesh.plan.decode import Combine, DecodeSharding


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
        scaled, total = scale_for_sum(State(out, lse), lses)
        if way == "reduce_scatter":
            mine = self.comm.reduce_scatter(scaled.split(self.heads))
        else:
            mine = self.comm.all_reduce(scaled, reuse=True)[self.own]
        if sinks is not None:
            mine = discount_sinks_batch_invariant(mine, total[self.own], sinks[:, None, None])
        return mine.transpose(0, 1).to(dtype)

    def trade(self, packed: Tensor) -> Tensor:
        """Everybody's states of the own heads, [cp, h, ...], from this rank's of all heads, [H, ...]."""
        shapes = [(self.heads[self.comm.rank], *packed.shape[1:])] * len(self.heads)
        arrived = self._room((len(self.heads), *shapes[0]), packed)
        self.comm.all_to_all(packed.split(self.heads), shapes, into=arrived)
        return arrived

    def _room(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        return self.comm.buffer(shape, dtype=like.dtype, device=like.device)


@dataclass(frozen=True)
class ShardAttention:
    """What is the same for every step of a layer. `sinks` [H] are those of all heads that attend here."""

    sharding: DecodeSharding
    cp: Cp
    scale: float | None
    window: int | None
    sinks: Tensor | None
    split_size: int | None
    backend: str

    def __call__(self, q: Tensor, cache: ShardedCache, step: Step, layer: int, combine: Combine) -> Tensor:
        """Out [B, h, S, D] of the own heads, from q [H, B, S, D] of all heads and the own sequences."""
        if self.split_size is not None:
            return self._in_pieces(q, cache, step, layer, self.split_size)
        by_row = q.transpose(0, 1)
        pools = cache.keys(layer), cache.values(layer), cache.block_table
        if self.sharding.cp == 1:
            return paged_decode_attention(
                by_row, *pools, cur_pos=step.cur_pos, scale=self.scale, window=self.window, sinks=self.sinks,
                backend=self.backend,
            )  # fmt: skip
        packed = _packed_like(q)
        # One token without a window sees all that its rank holds, and the kernel need not be told.
        key_range = step.key_range(self.window) if step.tokens > 1 or self.window is not None else None
        paged_decode_attention(
            by_row, *pools, cur_pos=step.cur_pos, scale=self.scale, key_range=key_range, into=unpack_state(packed),
            backend=self.backend,
        )  # fmt: skip
        return self.cp.combine(packed, self._own_sinks, q.dtype, combine)

    @property
    def _own_sinks(self) -> Tensor | None:
        return None if self.sinks is None else self.sinks[self.cp.own]

    def _in_pieces(self, q: Tensor, cache: ShardedCache, step: Step, layer: int, size: int) -> Tensor:
        """The same bits for any number of CP ranks: states of pieces of `size` positions, merged in their order.

        A piece is a run of whole blocks, so a row of the table in pieces is a table of its own. Its state depends on
        its keys only, and which rank has computed it does not show in the merge.
        """
        heads, rows, tokens, dim = q.shape
        table, pieces, in_a_run = self._pieces_of(cache, size)
        start = torch.arange(0, pieces * size, size, dtype=torch.int32, device=q.device)[:, None]
        first, end = ((x[:, None] - start).clamp(0, size).flatten(0, 1) for x in step.key_range(self.window))
        packed = _packed_like(q.new_empty(heads, rows * pieces, tokens, dim))
        queries = q.transpose(0, 1).repeat_interleave(pieces, 0)
        for at in range(0, rows * pieces, MAX_SEQUENCES):  # every piece is a sequence to the kernel
            some = slice(at, at + MAX_SEQUENCES)
            paged_decode_attention(
                queries[some], cache.keys(layer), cache.values(layer), table[some], cur_pos=end[some, -1] - 1,
                scale=self.scale, key_range=(first[some], end[some]), split_size=size, into=unpack_state(packed[:, some]),
                backend=self.backend,
            )  # fmt: skip
        packed = packed.view(heads, rows, pieces, tokens, dim + 1)
        everybodys = self.cp.trade(packed) if self.sharding.cp > 1 else packed[None]
        by_run = everybodys.unflatten(3, (-1, in_a_run))  # [cp, h, B, runs, in a run, S, D + 1]
        in_order = by_run.permute(3, 0, 4, 1, 2, 5, 6).flatten(0, 2)
        return merge_packed(in_order, self._own_sinks, q.dtype)

    def _pieces_of(self, cache: ShardedCache, size: int) -> tuple[Tensor, int, int]:
        """A table of pieces [rows * pieces, blocks a piece], pieces a row, and how many are a run of positions."""
        in_a_run = self.sharding.interleave // size if self.sharding.cp > 1 else 1
        blocks = size // cache.block_size
        table = cache.block_table
        slots = -(-table.shape[1] // (blocks * in_a_run)) * blocks * in_a_run
        table = F.pad(table, (0, slots - table.shape[1]), value=-1)
        return table.reshape(-1, blocks), slots // blocks, in_a_run


def _packed_like(q: Tensor) -> Tensor:
    """Room for the states of rows q [H, B, S, D], as they are sent: [H, B, S, D + 1]."""
    return torch.empty(*q.shape[:-1], q.shape[-1] + 1, dtype=accumulation_dtype(q.dtype), device=q.device)
