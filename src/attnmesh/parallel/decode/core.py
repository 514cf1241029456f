"""The decode core: attention over a KV cache whose positions are sharded over the ranks of a CP group.

Every rank attends over the positions that it stores, which gives a partial state (out, lse) of every query. The ranks
exchange these states and merge them. `AttentionBlock` and `Generator` both decode this way.

A state travels packed, out and lse side by side in float32: [heads, sequences, tokens, D + 1]. Shapes, with T tokens
per sequence, B sequences, h_c query heads of rank c, h of this rank, and H of all ranks:

    gather_heads      q [h, B, T, D]  ->  [H, B, T, D]                   (not needed where queries are replicated)
    attention         q [B, H, T, D]  ->  packed state [H, B, T, D + 1]
    all_to_all        [c][h_c, B, T, D + 1]  ->  [cp, h, B, T, D + 1]  ->  merged [B, h, T, D]
    reduce_scatter    lse [H, B, T]  ->  [cp, H, B, T];  out * exp(lse - total)  ->  sum [h, B, T, D]
    all_reduce        as reduce_scatter, but every rank receives the sum of all heads and keeps its own
    all_gather        [H, B, T, D + 1]  ->  [cp, H, B, T, D + 1]  ->  merged [B, H, T, D] on every rank

The keys that a token attends to on one rank are a contiguous range of the keys stored there (`key_range`), so kernels
know nothing of ranks. A new token is written by the rank that stores its position before any rank attends, and is
attended to there, once. Sinks are added once, after the merge. ALiBi is a mask of the true distances, in place of the
range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.core import ranges
from attnmesh.core.masks import Mask
from attnmesh.core.ranges import Ranges
from attnmesh.core.state import (
    State,
    accumulation_dtype,
    discount_sinks_batch_invariant,
    merge_stacked,
    scale_for_sum,
    unpack_state,
)
from attnmesh.ops.decode.api import PagedStep, alibi_bias, paged_decode_attention
from attnmesh.ops.decode.device_errors import MAX_SEQUENCES
from attnmesh.ops.dense.api import attention_state
from attnmesh.ops.merge import merge_packed
from attnmesh.ops.paged import PagedKV, prefill_state
from attnmesh.ops.storage import Stored, values_of
from attnmesh.parallel.decode.exchange import part_of, receive_buffer
from attnmesh.plan.decode import Combine


class LocalKV(NamedTuple):
    """The keys and values of one layer that this rank stores, for B sequences.

    `step` has the block table, int32 [B, blocks], and `cur_pos`, int32 [B], the index of the last key stored here; the
    layers of a step share it. `key_range` returns, for a window, the keys stored here that each new token attends to:
    `first` and `end`, int32 [B, T]. `positions`, which ALiBi needs, are the positions of the new tokens [B, T] and of
    all keys that a row of the block table can hold [n], in the whole sequence.
    """

    keys: Stored
    values: Stored
    step: PagedStep
    key_range: Callable[[int | None], tuple[Tensor, Tensor]]
    positions: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class StateExchange:
    """The exchange of partial states among the ranks of `comm`; `heads[c]` are the query heads of rank c."""

    comm: Comm
    heads: tuple[int, ...]

    @property
    def own(self) -> slice:
        """The heads of this rank among all heads."""
        return part_of(self.heads, self.comm.rank)

    def gather_heads(self, q: Tensor) -> Tensor:
        """Queries of all heads, [H, B, T, D], from the queries of this rank, [h, B, T, D]."""
        if self.comm.world == 1:
            return q
        shapes = [(heads, *q.shape[1:]) for heads in self.heads]
        gathered = receive_buffer(self.comm, (sum(self.heads), *q.shape[1:]), q)
        self.comm.all_gather(q, shapes, into=gathered)
        return gathered

    def combine(
        self, packed: Tensor, sinks: Tensor | None, dtype: torch.dtype, collective: Combine | Literal["all_gather"]
    ) -> Tensor:
        """The output over all positions, [B, h, T, D], from this rank's packed state of all heads [H, B, T, D + 1].

        `sinks` are for all heads, [H]. With all_gather the output has all heads, [B, H, T, D].
        """
        if collective == "all_gather":
            gathered = all_gather_states(self.comm, packed)
            return merge_packed(gathered, sinks, dtype) if packed.is_cuda else _merge_on_cpu(gathered, sinks, dtype)
        own_sinks = None if sinks is None else sinks[self.own]
        if collective == "all_to_all":
            return merge_packed(self.all_to_all(packed), own_sinks, dtype)
        out, lse = packed[..., :-1], packed[..., -1].contiguous()
        scaled, total = scale_for_sum(State(out, lse), all_gather_states(self.comm, lse))
        if collective == "reduce_scatter":
            own = self.comm.reduce_scatter(scaled.split(self.heads))
        else:
            own = self.comm.all_reduce(scaled, reuse=True)[self.own]
        if own_sinks is not None:
            own = discount_sinks_batch_invariant(own, total[self.own], own_sinks[:, None, None])
        return own.transpose(0, 1).to(dtype)

    def all_to_all(self, packed: Tensor) -> Tensor:
        """The states of this rank's heads over every rank's keys, [cp, h, ...], from packed states [H, ...]."""
        return all_to_all_states(self.comm, packed.split(self.heads))


@dataclass(frozen=True)
class DecodeAttention:
    """Attention of new tokens over the positions of all ranks of a CP group: a few per sequence, or `prefill`.

    `sinks` and `alibi_slopes` [H] are for all heads that attend here. With `split_size` the bits do not depend on
    the number of ranks; `interleave` is then the number of consecutive positions per rank, a multiple of it.
    """

    states: StateExchange
    scale: float | None = None
    window: int | None = None
    sinks: Tensor | None = None
    split_size: int | None = None
    interleave: int = 1
    backend: str = "auto"
    softcap: float | None = None
    alibi_slopes: Tensor | None = None
    chunked: bool = False  # `window` is the size of chunks: a token attends to its chunk only, as `key_range` has it

    def __call__(self, q: Tensor, kv: LocalKV, combine: Combine | Literal["all_gather"]) -> Tensor:
        """The output [B, h, T, D] of this rank's heads (of all heads with all_gather), from q [B, H, T, D]."""
        if self.split_size is not None:
            return self._with_fixed_splits(q, kv, self.split_size)
        mask = None if self.alibi_slopes is None else self._alibi_mask(self.alibi_slopes, q, kv)
        if self.states.comm.world == 1:
            return kv.step(
                q, kv.keys, kv.values, scale=self.scale, window=None if self.chunked else self.window,
                sinks=self.sinks, softcap=self.softcap, mask=mask, backend=self.backend,
                key_range=kv.key_range(self.window) if self.chunked else None,
            ).out  # fmt: skip
        # One token without a window attends to all keys stored here: the kernel needs no range.
        ranged = mask is None and (q.shape[2] > 1 or self.window is not None)
        key_range = kv.key_range(self.window) if ranged else None
        packed = _empty_packed(q, kv) if q.is_cuda else None  # on the CPU, packing a state costs less than views of it
        state = kv.step(
            q, kv.keys, kv.values, scale=self.scale, softcap=self.softcap, mask=mask, key_range=key_range, partial=True,
            into=None if packed is None else unpack_state(packed), backend=self.backend,
        )  # fmt: skip
        packed = pack_state(state) if packed is None else packed
        return self.states.combine(packed, self.sinks, q.dtype, combine)

    def prefill(self, q: Tensor, begins: Sequence[int], kv: PagedKV, combine: Combine) -> Tensor:
        """As a call, for any number of new tokens: tokens of sequence b are at `begins[b]` and the positions after it.

        Dense kernels attend over the cache a part at a time. There are no fixed splits.
        """
        sharded = self.states.comm.world > 1
        state = prefill_state(
            q, begins, kv, scale=self.scale, softcap=self.softcap, window=self.window,
            sinks=None if sharded else self.sinks, alibi_slopes=self.alibi_slopes, rounded=not sharded,
        )  # fmt: skip
        return self.states.combine(pack_state(state), self.sinks, q.dtype, combine) if sharded else state.out

    def _alibi_mask(self, slopes: Tensor, q: Tensor, kv: LocalKV) -> Tensor:
        """The terms that ALiBi adds to the scores, [B, H, T, n]; -inf for keys that a token does not attend to."""
        assert kv.positions is not None
        first, end = (x[:, None, :, None] for x in kv.key_range(self.window))
        index = torch.arange(len(kv.positions[1]), device=q.device)
        bias = alibi_bias(slopes, *kv.positions, q.dtype)
        return bias.masked_fill_((index < first) | (index >= end), -torch.inf)

    def _with_fixed_splits(self, q: Tensor, kv: LocalKV, size: int) -> Tensor:
        """The same bits for any number of ranks: states of splits of `size` positions, merged in position order.

        A split is whole blocks, so the block table can be cut into one row per split. The state of a split depends on
        its keys only, and the merge does not depend on the rank that computed it.
        """
        rows, heads, tokens, _ = q.shape
        table, splits, per_run = self._split_table(kv, size)
        start = torch.arange(0, splits * size, size, dtype=torch.int32, device=q.device)[:, None]
        first, end = ((x[:, None] - start).clamp(0, size).flatten(0, 1) for x in kv.key_range(self.window))
        queries = q.repeat_interleave(splits, 0)
        mask = None
        if self.alibi_slopes is not None:
            mask = self._alibi_mask(self.alibi_slopes, q, kv)
            mask = F.pad(mask, (0, splits * size - mask.shape[3]), value=-torch.inf)
            mask = mask.unflatten(3, (splits, size)).movedim(3, 1).flatten(0, 1)
        packed = _empty_packed(queries, kv)
        for at in range(0, rows * splits, MAX_SEQUENCES):  # to the kernel, every split is a sequence
            some = slice(at, at + MAX_SEQUENCES)
            paged_decode_attention(
                queries[some], kv.keys, kv.values, table[some], cur_pos=end[some, -1] - 1, scale=self.scale,
                softcap=self.softcap, mask=None if mask is None else mask[some],
                key_range=(first[some], end[some]) if mask is None else None, split_size=size,
                into=unpack_state(packed[:, some]), backend=self.backend,
            )  # fmt: skip
        packed = packed.view(heads, rows, splits, tokens, packed.shape[-1])
        sharded = self.states.comm.world > 1
        states = self.states.all_to_all(packed) if sharded else packed[None]
        runs = states.unflatten(3, (-1, per_run))  # [cp, h, B, runs, splits per run, T, D + 1]
        in_order = runs.permute(3, 0, 4, 1, 2, 5, 6).flatten(0, 2)
        return merge_packed(in_order, None if self.sinks is None else self.sinks[self.states.own], q.dtype)

    def _split_table(self, kv: LocalKV, size: int) -> tuple[Tensor, int, int]:
        """A block table [B * splits, blocks per split], the splits per sequence, and the splits per `interleave`."""
        per_run = self.interleave // size if self.states.comm.world > 1 else 1
        blocks = size // values_of(kv.keys).shape[1]
        table = kv.step.block_table
        width = -(-table.shape[1] // (blocks * per_run)) * blocks * per_run
        table = F.pad(table, (0, width - table.shape[1]), value=-1)
        return table.reshape(-1, blocks), width // blocks, per_run


def prefill_attention(
    comm: Comm, q: Tensor, q_positions: Sequence[Ranges], k: Tensor, v: Tensor, k_positions: Tensor, *, mask: Mask,
    scale: float, sinks: Tensor | None, softcap: float | None = None,
) -> Tensor:  # fmt: skip
    """Attention of a chunk of a prompt over a KV cache sharded over `comm`: [1, H, n, D] for this rank's queries.

    `q` [1, H, n, D] are this rank's queries, `q_positions[r]` the positions of rank r's. `k` and `v` [1, Hkv, m, D] are
    the keys and values that this rank stores, at `k_positions`. Queries are gathered, every rank attends for all of
    them over its keys, and the states return to the rank of the query. So the bytes sent grow with the chunk and not
    with the context.
    """
    _, heads, _, dim = q.shape
    gathered = comm.all_gather(q.contiguous(), [(1, heads, ranges.size(part), dim) for part in q_positions])
    attend = partial(attention_state, k=k, v=v, mask=mask, scale=scale, softcap=softcap, k_positions=k_positions)
    states = [
        attend(queries, q_positions=ranges.as_tensor(part)) for queries, part in zip(gathered, q_positions, strict=True)
    ]
    return merge_packed(all_to_all_states(comm, [pack_state(state) for state in states]), sinks, q.dtype)


def pack_state(state: State) -> Tensor:
    """A packed copy [H, B, T, D + 1] of a state with out [B, H, T, D]."""
    return torch.cat([state.out, state.lse.unsqueeze(-1)], -1).transpose(0, 1).contiguous()


def all_to_all_states(comm: Comm, parts: Sequence[Tensor]) -> Tensor:
    """The states of this rank's part over every rank's keys, [world, ...], where `parts[r]` is sent to rank r."""
    shape = parts[comm.rank].shape
    received = receive_buffer(comm, (comm.world, *shape), parts[comm.rank])
    comm.all_to_all(parts, [shape] * comm.world, into=received)
    return received


def all_gather_states(comm: Comm, packed: Tensor) -> Tensor:
    """The states (or lse) of every rank, [world, ...], all of the same shape."""
    shapes = [packed.shape] * comm.world
    if not packed.is_cuda:
        return torch.stack(comm.all_gather(packed, shapes))
    received = receive_buffer(comm, (comm.world, *packed.shape), packed)
    comm.all_gather(packed, shapes, into=received)
    return received


def _merge_on_cpu(packed: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """As `merge_packed`, in few torch calls: the same bits on every rank, but not for every number of ranks."""
    if sinks is None:
        out, lse = packed.split_with_sizes([packed.shape[-1] - 1, 1], -1)
        weight = torch.softmax(lse, 0)
        if math.isfinite(weight.sum().item()):  # no row is empty on all ranks or has an infinite lse
            merged = (out * weight).sum(0).transpose(0, 1)
            return merged if merged.dtype == dtype else merged.to(dtype)
    out, lse = merge_stacked([State(packed[..., :-1], packed[..., -1])], 1)
    if sinks is not None:
        out = discount_sinks_batch_invariant(out, lse, sinks[:, None, None])
    return out[0].transpose(0, 1).to(dtype)


def _empty_packed(q: Tensor, kv: LocalKV) -> Tensor:
    """An empty packed state [H, B, T, Dv + 1] for queries [B, H, T, D]."""
    batch, heads, tokens, _ = q.shape
    width = values_of(kv.values).shape[-1] + 1
    return torch.empty(heads, batch, tokens, width, dtype=accumulation_dtype(q.dtype), device=q.device)
