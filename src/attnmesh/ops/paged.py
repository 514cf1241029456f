"""Attention of many queries over a paged KV cache on one device, as in the prefill of a prompt that continues a prefix.

Attention over a disjoint union of keys is the merge of the states over its parts. So K and V are gathered from the
pools, and dequantized, for a part of the keys at a time, and a prefix of any length needs the memory of one part. The
dense kernels of `attention` compute each part.

`paged_prefill_attention`: any number of new tokens per sequence over a paged KV cache, on one device.

A decode step reads the cache with kernels for a few rows. From a few dozen new tokens on, operations dominate, and the
dense kernels of `attention` over parts of the cache (`paged_attention`) are faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from typing import Literal, Unpack, overload

import torch
from torch import Tensor

from attnmesh.core.mask import IntervalMask
from attnmesh.core.masks import Causal, Mask, Prefix, SlidingWindow
from attnmesh.core.ranges import InterleavedShard, Ranges
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.core.visibility import InterleavedPatch, Patch, Visibility
from attnmesh.ops.decode.call import check_storages
from attnmesh.ops.dense.call import (
    Call,
    ScoreOptions,
    Scores,
    check_score_terms,
    contiguous_last_dim,
    kernel_span,
    resolve_scores,
)
from attnmesh.ops.dense.dispatch import choose_fused
from attnmesh.ops.merge import StateAccumulator
from attnmesh.ops.storage import Quantized, Stored, dequantize, values_of
from attnmesh.trace.timeline import Recorder
from attnmesh.utils.validation import (
    check_bool,
    check_count,
    check_number,
    check_options,
    check_positive,
    check_tensor,
    check_type,
    shown,
)

_PART_BYTES = 64 << 20  # of gathered K and V: long enough that merging a state costs little beside computing it
_UNSHARDED = InterleavedShard()


@dataclass(frozen=True)
class PagedKV:
    """Pools k [num_blocks, block_size, Hkv, D] and v [..., Dv], and a block table int32 [B, slots].

    Position p of sequence b is in block `block_table[b, p // block_size]` at offset `p % block_size`. With a `shard`
    that is the place of `shard.position(p)`: this is then the cache of one of several ranks.
    """

    k: Stored
    v: Stored
    block_table: Tensor
    first: int = 0  # the number of the first sequence, for messages
    shard: InterleavedShard = _UNSHARDED

    @property
    def block_size(self) -> int:
        """Positions per block."""
        return values_of(self.k).shape[1]

    @property
    def capacity(self) -> int:
        """Maximum number of positions per sequence."""
        return self.block_table.shape[1] * self.block_size

    def sequences(self, some: range) -> PagedKV:
        """The cache of some sequences."""
        table = self.block_table[some.start : some.stop]
        return PagedKV(self.k, self.v, table, self.first + some.start, self.shard)

    def blocks(self, keys: range) -> Tensor:
        """The entries of the block table for some positions, [B, n]."""
        return self.block_table[:, keys.start // self.block_size : -(-keys.stop // self.block_size)]

    def invalid(self, keys: range) -> Tensor:
        """Which entries of the block table for some positions are outside the pool, [B, n]."""
        blocks = self.blocks(keys)
        return (blocks < 0) | (blocks >= values_of(self.k).shape[0])

    def read(self, keys: range, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V of some positions in `dtype`, [B, Hkv, len(keys), D]; arbitrary where a block is outside the pool."""
        blocks = self.blocks(keys).clamp(0, values_of(self.k).shape[0] - 1)
        begin = keys.start % self.block_size

        def gathered(pool: Stored) -> Tensor:
            return _gathered(pool, blocks, dtype)[:, begin : begin + len(keys)].transpose(1, 2)

        if self._has_latents:
            latents = gathered(self.k)
            return latents, latents[..., : values_of(self.v).shape[-1]]
        return gathered(self.k), gathered(self.v)

    @property
    def _has_latents(self) -> bool:
        """Whether values are features of the keys."""
        if isinstance(self.k, Tensor) and isinstance(self.v, Tensor):
            is_view = self.v.data_ptr() == self.k.data_ptr() and self.v.stride() == self.k.stride()
            return is_view and self.v.shape[3] <= self.k.shape[3]
        return isinstance(self.v, Quantized) and self.v.rope is not None

    def positions_per_part(self, dtype: torch.dtype) -> int:
        """The number of positions to read at a time: whole blocks."""
        k, v = values_of(self.k), values_of(self.v)
        wide = dtype.itemsize if isinstance(self.k, Tensor) else accumulation_dtype(dtype).itemsize
        block = max(1, self.block_table.shape[0]) * self.block_size * k.shape[2] * (k.shape[3] + v.shape[3]) * wide
        return max(1, _PART_BYTES // block) * self.block_size


def paged_attention(
    q: Tensor, positions: Ranges, kv: PagedKV, *, mask: Mask, scores: Scores, sinks: Tensor | None = None,
    backend: str = "auto", recorder: Recorder | None = None, rounded: bool = True,
) -> State:  # fmt: skip
    """The state of q [B,Hq,n,D], the queries at `positions`, over the keys that they attend to. No autograd.

    Out has the dtype of q, or the accumulation dtype if it is not `rounded`. A block outside the pool is never read. On
    the CPU `check_calls` raises ValueError; on a GPU out and lse of the sequence are NaN.
    """
    total = StateAccumulator(q, values_of(kv.v).shape[3], sinks=sinks)
    invalid = torch.zeros(q.shape[0], dtype=torch.bool, device=q.device)
    parts = _parts(mask, positions, kv.shard, kv.positions_per_part(q.dtype))
    for at, (keys, patch) in enumerate(parts):
        total.last_call = rounded and at == len(parts) - 1
        call = Call(q, *kv.read(keys, q.dtype), patch, scores)
        chosen = choose_fused(call, backend)
        with kernel_span(recorder, "attention", chosen, call):
            chosen.forward(call, total)
        if q.is_cuda:
            invalid |= kv.invalid(keys).any(1)
    out, lse = total.finish(q.dtype if rounded else accumulation_dtype(q.dtype))
    if q.is_cuda:
        out.masked_fill_(invalid[:, None, None, None], torch.nan)
        lse.masked_fill_(invalid[:, None, None], torch.nan)
    return State(out, lse)


def check_paged(
    q: Tensor, kv: PagedKV, scale: float | None, sinks: Tensor | None = None, pools: tuple[str, str] = ("k", "v")
) -> None:
    """Raise ValueError for invalid inputs of attention over a paged cache. Does not read tensors on a device."""
    check_tensor("q", q)
    if q.ndim != 4 or not q.dtype.is_floating_point or not q.shape[3]:
        raise ValueError(f"q must be floating point [batch, heads, seq, head_dim], got {shown(q)}")
    _refuse_gradient("q", q)
    if isinstance(sinks, Tensor):
        _refuse_gradient("sinks", sinks)
    table = check_tensor("block_table", kv.block_table, "int32 [batch, slots]")
    if table.dtype != torch.int32 or table.ndim != 2 or table.shape[0] != q.shape[0] or table.device != q.device:
        raise ValueError(
            f"block_table must be int32 [{q.shape[0]}, slots] on {q.device}, one row per sequence, got {shown(table)}"
        )
    for name, stored in zip(pools, (kv.k, kv.v), strict=True):
        check_type(name, stored, (Tensor, Quantized), "a pool of blocks, a tensor or Quantized, with block_table")
        values = check_tensor(name, values_of(stored))
        if values.ndim != 4 or not values.shape[0] or not values.shape[1]:
            raise ValueError(
                f"{name} must be a pool [num_blocks, block_size, kv heads, head_dim] with block_table, got "
                f"{list(values.shape)}"
            )
        if values.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {values.device}")
        _refuse_gradient(name, values)
        if isinstance(stored, Quantized):
            _refuse_gradient(f"the scales of {name}", stored.scales)
    check_storages(q, kv.k, kv.v, pools, axis=2)
    if scale is not None:
        check_number("scale", scale)


def _refuse_gradient(name: str, x: Tensor) -> None:
    if torch.is_grad_enabled() and x.requires_grad:
        raise ValueError(
            f"{name} must not require a gradient with block_table (a cache has no backward): use no_grad()"
        )


def check_calls(q: Tensor, positions: Ranges, kv: PagedKV, mask: Mask, scores: Scores, backend: str) -> None:
    """Raise ValueError if no backend serves this `paged_attention` or, on the CPU, if a block is outside the pool."""
    batch, heads = q.shape[0], values_of(kv.k).shape[2]
    for keys, patch in _parts(mask, positions, kv.shard, kv.positions_per_part(q.dtype)):
        k, v = (q.new_empty(()).expand(batch, heads, len(keys), values_of(x).shape[3]) for x in (kv.k, kv.v))
        choose_fused(Call(q, k, v, patch, scores), backend)
        if q.device.type != "cpu":  # free to read
            continue
        for sequence, slot in kv.invalid(keys).nonzero():
            at = int(slot) + keys.start // kv.block_size
            name, value = f"block_table[{kv.first + int(sequence)}, {at}]", int(kv.block_table[sequence, at])
            raise ValueError(f"{name} is {value}, but the pool has blocks 0 to {values_of(kv.k).shape[0] - 1}")


@lru_cache(maxsize=128)
def _parts(mask: Mask, q: Ranges, shard: InterleavedShard, size: int) -> tuple[tuple[range, Visibility], ...]:
    """The keys stored here that some query attends to, cut at multiples of `size`, each part with its visibility."""
    # Cached: every layer of a model uses the same parts, and a patch caches its blocks.
    if shard.ranks == 1:
        seen = Patch(mask, q, (range(q[-1].stop),)).seen if q else ()
        return tuple((keys, Patch(mask, q, (keys,))) for keys in _cut(seen, size))
    if not isinstance(mask, IntervalMask) or len(q) > 1:
        raise ValueError(f"mask must be one interval per query, of consecutive queries, on a shard, got {mask!r}")
    (run,) = q
    first, end = shard.length(max(0, mask.key_range(run[0])[0])), shard.length(run.stop)
    return tuple((keys, InterleavedPatch(mask, run, shard, keys)) for keys in _cut([range(first, end)], size))


def _cut(seen: Iterable[range], size: int) -> Iterator[range]:
    for run in filter(None, seen):
        for start in range(run.start // size * size, run.stop, size):
            yield range(max(start, run.start), min(start + size, run.stop))


def _gathered(pool: Stored, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """The positions in the given blocks [B, n] of a pool, in `dtype`: [B, n * block_size, Hkv, D]."""
    values = _selected(values_of(pool), blocks)
    if isinstance(pool, Quantized):
        scales = pool.scales if pool.storage == "fp8" else _selected(pool.scales, blocks)
        rope = None if pool.rope is None else _selected(pool.rope, blocks)
        values = dequantize(Quantized(values, scales, rope), dtype, head_axis=2)
    return values.view(blocks.shape[0], blocks.shape[1] * values.shape[1], *values.shape[2:])


def _selected(pool: Tensor, blocks: Tensor) -> Tensor:
    if pool.dtype.itemsize == 1:  # index_select does not take float8
        return pool.view(torch.int8).index_select(0, blocks.flatten()).view(pool.dtype)
    return pool.index_select(0, blocks.flatten())


# `paged_prefill_attention`: any number of new tokens per sequence over a paged KV cache, on one device.


@overload
def paged_prefill_attention(
    q: Tensor, k_pool: Stored, v_pool: Stored, block_table: Tensor, *, cur_pos: Sequence[int] | Tensor,
    query_lengths: Sequence[int] | Tensor | None = ..., causal: bool = ..., scale: float | None = ...,
    window: int | None = ..., return_lse: Literal[False] = ..., **options: Unpack[ScoreOptions],
) -> Tensor: ...  # fmt: skip
@overload
def paged_prefill_attention(
    q: Tensor, k_pool: Stored, v_pool: Stored, block_table: Tensor, *, cur_pos: Sequence[int] | Tensor,
    query_lengths: Sequence[int] | Tensor | None = ..., causal: bool = ..., scale: float | None = ...,
    window: int | None = ..., return_lse: Literal[True], **options: Unpack[ScoreOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def paged_prefill_attention(
    q: Tensor,
    k_pool: Stored,
    v_pool: Stored,
    block_table: Tensor,
    *,
    cur_pos: Sequence[int] | Tensor,
    query_lengths: Sequence[int] | Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    return_lse: bool = False,
    **options: Unpack[ScoreOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """`paged_decode_attention` for any number T of new tokens, at prefill speed: q [B,Hq,T,D] to out [B,Hq,T,Dv].

    The pools, k_pool [num_blocks, block_size, Hkv, D] and v_pool [..., Dv], already contain the new tokens. K and V are
    gathered through the table, int32 [B, slots], and dequantized, at most 64 MiB at a time. There is no backward. A
    block outside the pool is never read: it raises ValueError on the CPU, and makes out and lse of the sequence NaN on
    a GPU.

    Args:
        cur_pos: position of the last of the T tokens of each sequence. Token t is at `cur_pos - T + 1 + t` and attends
            to the keys up to its own position. A sequence with fewer than T tokens has them in its last rows: rows
            before position 0 have out 0 and lse -inf (or their sink). -1 skips a sequence: out 0, lse -inf. The host
            needs the numbers: it waits for a tensor on a GPU.
        query_lengths: number of new tokens of each sequence, 0 to T, in its last rows; T by default. The rows before
            are as those before position 0, and 0 skips a sequence. The host needs these numbers, too.
        causal: False lets every new token attend to all keys up to `cur_pos`, also to the new tokens after it.
        scale: multiplies the scores; 1 / sqrt(D) by default.
        window: number of last keys up to a token's own position, itself included, that it attends to. Needs `causal`.
        sinks: [Hq] scores of keys without a value.
        softcap, alibi_slopes: as for `attention`.
        return_lse: also return the float32 lse [B,Hq,T], natural log.
        backend: as for `attention`, except "reference".

    Examples:
        >>> k_pool, v_pool = torch.randn(2, 8, 16, 2, 64)  # 8 blocks of 16 tokens
        >>> table = torch.tensor([[5, 0, 2]], dtype=torch.int32)
        >>> q = torch.randn(1, 8, 30, 64)  # the last 30 of 40 tokens
        >>> out = am.decode.paged_prefill_attention(q, k_pool, v_pool, table, cur_pos=[39])
        >>> k, v = (pool[[5, 0, 2]].flatten(0, 1)[:40].transpose(0, 1)[None] for pool in (k_pool, v_pool))
        >>> whole = am.attention(q, k, v, mask=am.Causal(), q_positions=torch.arange(10, 40))
        >>> torch.allclose(out, whole, atol=1e-5)
        True
    """
    check_options("paged_prefill_attention", options, ScoreOptions)
    softcap, sinks, alibi_slopes = options.get("softcap"), options.get("sinks"), options.get("alibi_slopes")
    backend = options.get("backend", "auto")
    kv = PagedKV(k_pool, v_pool, check_tensor("block_table", block_table, "int32 [batch, slots]"))
    check_paged(q, kv, scale, sinks, ("k_pool", "v_pool"))
    check_bool(return_lse=return_lse, causal=causal)
    check_score_terms(q, softcap, sinks, alibi_slopes)
    scores = resolve_scores(q, scale, softcap, alibi_slopes)
    if not causal and window is not None:
        raise ValueError(f"window must be None with causal=False, got {shown(window)}")
    masked = prefill_mask(window)
    tokens = q.shape[2]
    counts = [tokens] * q.shape[0]
    if query_lengths is not None:
        counts = _checked_numbers("query_lengths", query_lengths, q, least=0, most=tokens, what="number")
    lasts = _checked_numbers("cur_pos", cur_pos, q, least=-1, most=kv.capacity - 1, what="position")
    runs = [range(max(0, last + 1 - count), last + 1) for last, count in zip(lasts, counts, strict=True)]
    # Without causality: all keys before the end of the positions, where the mask of the new tokens is a prefix.
    groups = [(run, some, masked if causal else Prefix(run.stop)) for run, some in equal_runs(runs) if run]
    for positions, some, mask in groups:
        check_calls(_rows(q, some, positions), (positions,), kv.sequences(some), mask, scores, backend)
    out = q.new_zeros(*q.shape[:3], values_of(v_pool).shape[3])
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=accumulation_dtype(q.dtype))
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        for positions, some, mask in groups:
            state = paged_attention(
                contiguous_last_dim(_rows(q, some, positions)), (positions,), kv.sequences(some), mask=mask,
                scores=scores, sinks=sinks, backend=backend,
            )  # fmt: skip
            if sinks is not None:
                lse[some.start : some.stop] = sinks[:, None]
            _rows(out, some, positions).copy_(state.out)
            _rows(lse, some, positions).copy_(state.lse)
    return (out, lse) if return_lse else out


def prefill_state(
    q: Tensor, begins: Sequence[int], kv: PagedKV, *, scale: float | None, softcap: float | None, window: int | None,
    sinks: Tensor | None, alibi_slopes: Tensor | None, rounded: bool,
) -> State:  # fmt: skip
    """The state of the tokens of checked arguments q [B,Hq,T,D], at `begins[b]` and the positions after it.

    `kv` may be the cache of one rank; out is then to be merged with that of others, and not `rounded`.
    """
    tokens, mask, scores = q.shape[2], prefill_mask(window), resolve_scores(q, scale, softcap, alibi_slopes)
    states = [
        paged_attention(
            contiguous_last_dim(_rows(q, some, positions)), (positions,), kv.sequences(some), mask=mask, scores=scores,
            sinks=sinks, rounded=rounded,
        )
        for positions, some in equal_runs([range(begin, begin + tokens) for begin in begins])
    ]  # fmt: skip
    return states[0] if len(states) == 1 else State(*(torch.cat(parts) for parts in zip(*states, strict=True)))


def prefill_mask(window: int | None) -> Mask:
    """The mask of a causal model whose layer may have a window."""
    if window is None:
        return Causal()
    check_positive(window=window)
    return SlidingWindow(window - 1)


def equal_runs(runs: Sequence[range]) -> Iterator[tuple[range, range]]:
    """Positions, and the consecutive sequences that have them: they share the calls of kernels."""
    groups = [(positions, len(list(same))) for positions, same in groupby(runs)]
    edges = accumulate((count for _, count in groups), initial=0)
    for (positions, _), (start, stop) in zip(groups, pairwise(edges), strict=True):
        yield positions, range(start, stop)


def _rows(x: Tensor, sequences: range, positions: range) -> Tensor:
    """The last rows of some sequences of x [B, H, T, ...]: the rows of the given positions."""
    return x[sequences.start : sequences.stop, :, x.shape[2] - len(positions) :]


def _checked_numbers(name: str, numbers: object, q: Tensor, *, least: int, most: int, what: str) -> list[int]:
    """A number for every sequence, from a list or a tensor."""
    given = numbers
    if isinstance(given, Tensor):
        check_tensor(name, given)
        if given.ndim != 1 or given.dtype not in (torch.int32, torch.int64) or given.is_meta:
            raise ValueError(f"{name} must be a list, or an int32 or int64 tensor [{q.shape[0]}], got {shown(given)}")
        given = given.tolist()
    if not isinstance(given, list | tuple) or len(given) != q.shape[0]:
        raise ValueError(f"{name} must have one {what} for each of {q.shape[0]} sequences, got {shown(numbers)}")
    for i, number in enumerate(given):
        check_count(f"{name}[{i}]", number, least=least, most=most)
    return list(given)
