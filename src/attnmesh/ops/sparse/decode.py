"""`paged_sparse_decode_attention`: sparse attention of a decode step over latents in a paged cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnmesh.core.ranges import InterleavedShard
from attnmesh.core.state import State, accumulation_dtype, add_sinks
from attnmesh.ops.sparse import dispatch, torch_backend
from attnmesh.ops.sparse.arguments import IndexerCall, RowBounds, SparseCall, TopKIndices
from attnmesh.ops.sparse.attention import MAX_DEFAULT_D_V
from attnmesh.ops.sparse.paged import (
    IndexerStep,
    PagedKeys,
    SparseDecodeCall,
    check_per_row,
    check_pool,
    check_shard,
    check_table,
    refuse_gradient,
)
from attnmesh.ops.storage import Stored
from attnmesh.utils.validation import check_bool, check_number, check_positive, check_tensor, shown

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_GATHERED = 1 << 22  # elements of the keys gathered at a time


def paged_sparse_decode_attention(
    q: Tensor, pool: Stored, block_table: Tensor | None, indices: Tensor | TopKIndices, *, scale: float,
    d_v: int | None = None, sinks: Tensor | None = None, shard: InterleavedShard | None = None,
    split_size: int | None = None, out_dtype: torch.dtype | None = None, return_max_logits: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, ...]:  # fmt: skip
    """Attention of new tokens over the keys that `indices` select in a paged cache of latents: `(out, lse)`.

    Args:
        q: [B, T, heads, D], T new tokens of each of B sequences.
        pool: [num_blocks, block_size, 1, D], the keys of a `BlockCache` of latents: in the dtype of q, or fp8_ds_mla,
            which is dequantized in the kernel. The value of a key is its first `d_v` features.
        block_table: int32 [B, blocks]: position p of sequence b is in block `block_table[b, p // block_size]`. None if
            `indices` are slots of the pool, block * block_size + offset, as FlashMLA takes them.
        indices: int32 [B, T, topk], in any order; negative ones are padding. A key that occurs twice counts twice. Of
            `TopKIndices`, only the leading `lengths` [B, T] of a token are read.
        scale: the factor of the scores.
        d_v: features of a value; min(D, 512) by default, or the quantized part of fp8_ds_mla.
        sinks: [heads]; scores of one more key per head, which has no value. Of states to be merged, give it to one.
        shard: the positions that this cache holds, as `BlockCache` takes it: `indices` are positions of the whole
            sequence, and indices of other ranks are treated as padding.
        split_size: fixed number of indices per part of the work. The bits of a token then depend on that token only; by
            default the indices are split into enough parts to fill the device.
        out_dtype: torch.float32 returns the unrounded out, for states that will be merged; the dtype of q by default.
        return_max_logits: also return the largest scaled score, [B, T, heads] like lse, without sinks.
        backend: "auto", "gluon", "triton" or "torch".

    Returns:
        out [B, T, heads, d_v] and lse [B, T, heads] float32, natural log, sinks included. A token without a key has
        out 0, lse -inf (or its sink) and a max logit of -inf. There is no backward.

    An index outside the table or the pool, or in a block outside the pool, is never read. On the CPU it raises
    ValueError. On a GPU, out and lse of the token become NaN, and a later decode call, or `check_decode_errors()`,
    raises the ValueError.

    Examples:
        >>> pool = torch.randn(4, 16, 1, 96)  # 4 blocks of 16 tokens
        >>> table = torch.tensor([[3, 0]], dtype=torch.int32)
        >>> indices = torch.tensor([[[0, 17, 30, -1]]], dtype=torch.int32)  # positions; -1 is padding
        >>> q = torch.randn(1, 1, 4, 96)
        >>> out, lse = am.sparse.paged_sparse_decode_attention(q, pool, table, indices, scale=0.1, d_v=64)
        >>> kv = pool[[3, 0]].reshape(32, 96)
        >>> torch.allclose(out[0], am.sparse_attention(q[0], kv, indices[0], scale=0.1, d_v=64)[0], atol=1e-5)
        True
    """
    check_bool(return_max_logits=return_max_logits)
    call = decode_call(q, pool, block_table, indices, scale, d_v, sinks, shard, split_size, out_dtype)
    out, lse, top = attend(call, backend)
    return (out, lse, top) if return_max_logits else (out, lse)


def attend(call: SparseDecodeCall, backend: str) -> tuple[Tensor, Tensor, Tensor]:
    """Out, lse and largest scores of a validated call."""
    if dispatch.choose_paged("decode", call.q, call.keys, backend, call.d_v) == "torch":
        return _on_torch(call)
    from attnmesh.ops.sparse import decode_kernels

    return decode_kernels.run(call, backend=backend)


def _on_torch(call: SparseDecodeCall) -> tuple[Tensor, Tensor, Tensor]:
    """Out, lse and largest scores by torch operations, on any device: some tokens at a time."""
    batch, tokens, heads, width = call.q.shape
    topk, wide = call.indices.shape[2], accumulation_dtype(call.q.dtype)
    q, slots = call.q.flatten(0, 1), call.keys.slots(call.indices, call.used).flatten(0, 1)
    step = max(1, _MAX_GATHERED // max(1, topk * (width + heads)))
    parts = []
    for start in range(0, q.shape[0], step):
        some = slots[start : start + step]
        rows = some.shape[0]
        keys = call.keys.gather(some, wide).flatten(0, 1)
        at = torch.arange(rows * topk, dtype=torch.int32, device=q.device).view(rows, topk).masked_fill(some < 0, -1)
        zero = torch.zeros(rows, dtype=torch.int32, device=q.device)
        bounds = RowBounds(zero, zero + rows * topk, zero + topk, 0)
        some_q = q[start : start + step]
        over = SparseCall(some_q, keys, None, at, bounds, call.scale, call.d_v, False, "torch")
        parts.append(torch_backend.forward(over, wide, max_logits=True))
    empty = (q.new_empty(0, heads, call.d_v, dtype=wide), *(q.new_empty(0, heads, dtype=wide) for _ in range(2)))
    out, lse, top = (torch.cat(each).unflatten(0, (batch, tokens)) for each in zip(empty, *parts, strict=True))
    if call.sinks is not None:
        out, lse = add_sinks(State(out, lse), call.sinks)
    return out.to(call.out_dtype), lse, top


def decode_call(
    q: Tensor, pool: Stored, block_table: Tensor | None, indices: Tensor | TopKIndices, scale: float, d_v: int | None,
    sinks: Tensor | None, shard: InterleavedShard | None, split_size: int | None, out_dtype: torch.dtype | None,
) -> SparseDecodeCall:  # fmt: skip
    """Validates the arguments. Does not read tensors on a device."""
    q = check_tokens("q", q)
    counts = None
    if isinstance(indices, TopKIndices):
        counts = check_per_row("indices.lengths", indices.lengths, q)
        indices = indices.indices
    pool = check_pool("pool", pool, q, "fp8_ds_mla")
    table = None if block_table is None else check_table(block_table, q)
    keys = PagedKeys(pool, table, check_shard(shard, table))
    if d_v is None:
        d_v = min(keys.width, MAX_DEFAULT_D_V) if isinstance(pool, Tensor) else pool.values.shape[-1]
    check_positive(d_v=d_v)
    most = keys.width if isinstance(pool, Tensor) else pool.values.shape[-1]
    if d_v > most:
        raise ValueError(f"d_v must be at most {most}, the features of a key that may be values, got {d_v}")
    if split_size is not None:
        check_positive(split_size=split_size)
    wide = accumulation_dtype(q.dtype)
    if out_dtype is not None and (not isinstance(out_dtype, torch.dtype) or out_dtype not in (q.dtype, wide)):
        raise ValueError(f"out_dtype must be None, {q.dtype} or {wide}, got {shown(out_dtype)}")
    return SparseDecodeCall(
        q, keys, _check_indices(indices, q), counts, check_number("scale", scale),
        d_v, _check_sinks(sinks, q), split_size, out_dtype or q.dtype,
    )  # fmt: skip


def check_tokens(name: str, q: object) -> Tensor:
    """`q` as [B, T, heads, D]."""
    q = check_tensor(name, q, "[batch, tokens, heads, head_dim]")
    if q.ndim != 4 or not all(q.shape[1:]) or q.dtype not in _DTYPES:
        raise ValueError(
            f"{name} must be [batch, tokens, heads, head_dim] in float16, bfloat16, float32 or float64, got {shown(q)}"
        )
    refuse_gradient(name, q)
    return q if q.stride(-1) == 1 or q.shape[-1] == 1 else q.contiguous()


def _check_indices(indices: object, q: Tensor) -> Tensor:
    indices = check_tensor("indices", indices, "[batch, tokens, topk]")
    if indices.dtype != torch.int32 or indices.shape[:2] != q.shape[:2] or indices.ndim != 3 or not indices.shape[2]:
        raise ValueError(
            f"indices must be int32 [{q.shape[0]}, {q.shape[1]}, topk] with topk >= 1, got {shown(indices)}"
        )
    if indices.device != q.device:
        raise ValueError(f"indices must be on the device of q, {q.device}, got {indices.device}")
    return indices


def _check_sinks(sinks: object, q: Tensor) -> Tensor | None:
    if sinks is None:
        return None
    sinks = check_tensor("sinks", sinks, "[heads]")
    if sinks.shape != q.shape[2:3] or not sinks.is_floating_point() or sinks.device != q.device:
        raise ValueError(f"sinks must be floating point [{q.shape[2]}] on {q.device}, got {shown(sinks)}")
    refuse_gradient("sinks", sinks)
    return sinks


# `paged_indexer_topk`: the exact top-k keys of a decode step, from an indexer's keys in a paged cache.


KeyRange = tuple[Tensor, Tensor]
_BLOCK_SIZE = 4096  # keys that are scored at a time on a CPU


def paged_indexer_topk(
    iq: Tensor, pool: Stored, block_table: Tensor, w: Tensor, topk: int, *,
    cur_pos: Sequence[int] | Tensor | None = None, key_range: KeyRange | None = None, scale: float = 1.0,
    relu: bool = True, backend: str = "auto",
) -> TopKIndices:  # fmt: skip
    """The exact top-k keys of the new tokens of a decode step: `indices` int32 [B, T, topk], positions in the cache.

    As `indexer_topk`: ascending, then -1; of equal scores the lowest position; a key whose score is NaN is never
    selected; `scores` [B, T, topk] and `lengths` [B, T]. There is no gradient.

    Args:
        iq: [B, T, heads, D], the queries of T new tokens of each of B sequences.
        pool: [num_blocks, block_size, 1, D], the `index_keys` of a `BlockCache`: in the dtype of iq, or fp8_token.
        block_table: int32 [B, blocks]; position p of sequence b is in block `block_table[b, p // block_size]`.
        w: [B, T, heads], the weights of the heads.
        cur_pos: position of the last of the T tokens of each sequence, a list or a tensor on the device of iq; token t
            selects among the positions up to its own. -1 skips a sequence.
        key_range: (first, end), integers [B, T] each, instead: token t of sequence b selects among
            `first[b, t] <= p < end[b, t]`, as needed where the cache holds only a part of the sequence.
        scale, relu: as in `indexer_topk`.
        backend: "auto", "gluon", "triton" or "torch".

    Only keys that some token selects among are read. A block outside the pool, or a position beyond the table, is never
    read. On the CPU it raises ValueError. On a GPU the sequence selects nothing, and a later decode call, or
    `check_decode_errors()`, raises the ValueError.

    Examples:
        >>> pool, table = torch.randn(4, 16, 1, 8), torch.tensor([[3, 0]], dtype=torch.int32)
        >>> iq, w = torch.randn(1, 1, 2, 8), torch.rand(1, 1, 2)
        >>> top = am.sparse.paged_indexer_topk(iq, pool, table, w, topk=4, cur_pos=[2])
        >>> top.indices.tolist()  # three keys up to position 2
        [[[0, 1, 2, -1]]]
    """
    return select(indexer_step(iq, pool, block_table, w, topk, cur_pos, key_range, scale, relu, backend))


def indexer_step(
    iq: Tensor, pool: Stored, block_table: Tensor, w: Tensor, topk: int, cur_pos: Sequence[int] | Tensor | None,
    key_range: KeyRange | None, scale: float, relu: bool, backend: str,
) -> IndexerStep:  # fmt: skip
    """Validates the arguments. Does not read tensors on a device."""
    iq = check_tokens("iq", iq)
    keys = PagedKeys(check_pool("pool", pool, iq, "fp8_token"), check_table(block_table, iq))
    check_positive(topk=topk)
    check_bool(relu=relu)
    bounds = _bounds(cur_pos, key_range, iq)
    return IndexerStep(
        iq,
        keys,
        _check_weights(w, iq),
        topk,
        *bounds,
        check_number("scale", scale),
        relu,
        dispatch.choose_paged("paged_topk", iq, keys, backend),
    )


def select(step: IndexerStep) -> TopKIndices:
    """The top-k of a validated call."""
    if step.backend == "torch":
        return _topk_on_torch(step)
    from attnmesh.ops.sparse import gluon_paged_scores, triton_paged_topk

    return triton_paged_topk.paged_topk(step, gluon_paged_scores if step.backend == "gluon" else None)


def slots_read(step: IndexerStep) -> tuple[Tensor, Tensor]:
    """The slots of the positions that each sequence reads, [B, longest], and their ends. Raises ValueError for a fault.

    Reads tensors on the host: for the CPU.
    """
    iq, keys, batch = step.iq, step.keys, step.iq.shape[0]
    first, end = step.first.clamp(min=0), step.end
    begins = torch.where(first < end, first, torch.iinfo(torch.int32).max).amin(1)
    ends = torch.where(first < end, end, 0).amax(1)
    longest = int(ends.max()) if batch else 0
    assert keys.table is not None
    capacity = keys.table.shape[1] * keys.block_size
    for sequence in (ends > capacity).nonzero():
        raise ValueError(
            f"cur_pos, or the end of key_range, of sequence {int(sequence)} needs position {int(ends[sequence]) - 1}, "
            f"but the block table has space for {capacity}"
        )
    positions = torch.arange(longest, dtype=torch.int32, device=iq.device)[None, None]
    read = (positions >= begins[:, None, None]) & (positions < ends[:, None, None])
    return keys.slots(positions.expand(batch, 1, -1), read)[:, 0], ends


def _topk_on_torch(step: IndexerStep) -> TopKIndices:
    """Sequence by sequence, over its keys in order: the bits equal `indexer_topk` over the same keys."""
    iq, keys, w, topk, first, end, scale, relu, _ = step
    batch, tokens = iq.shape[:2]
    slots, ends = slots_read(step)
    first = first.clamp(min=0)
    wide = accumulation_dtype(iq.dtype)
    found = []
    for b in range(batch):
        length = int(ends[b])
        own = keys.gather(slots[b, :length], wide).masked_fill(slots[b, :length, None] < 0, 0.0)
        bounds = RowBounds(first[b].int(), end[b].clamp(0, length).int(), torch.full_like(first[b], topk).int(), 0)
        call = IndexerCall(iq[b], own, w[b], None, bounds, scale, relu, False, "torch")
        with torch.no_grad():
            found.append(torch_backend.topk(call, topk, _BLOCK_SIZE))
    if not found:
        scores = iq.new_empty(0, tokens, topk, dtype=wide)
        return TopKIndices(scores.int(), scores, scores[..., 0].int())
    indices, scores, lengths = (torch.stack(each) for each in zip(*found, strict=True))
    return TopKIndices(indices, scores, lengths)


def _check_weights(w: object, iq: Tensor) -> Tensor:
    w = check_tensor("w", w, "[batch, tokens, heads]")
    if w.shape != iq.shape[:3] or not w.is_floating_point() or w.device != iq.device:
        raise ValueError(f"w must be floating point {list(iq.shape[:3])} on {iq.device}, got {shown(w)}")
    refuse_gradient("w", w)
    return w


def _bounds(cur_pos: object, key_range: object, iq: Tensor) -> tuple[Tensor, Tensor]:
    """The keys [first, end) of every token, integers [B, T]. Does not read tensors on a device."""
    batch, tokens = iq.shape[:2]
    if (cur_pos is None) == (key_range is None):
        raise ValueError(
            f"exactly one of cur_pos and key_range must be given, got cur_pos={shown(cur_pos)} and "
            f"key_range={shown(key_range)}"
        )
    if key_range is not None:
        if not isinstance(key_range, tuple) or len(key_range) != 2:
            raise ValueError(f"key_range must be a tuple of two tensors, (first, end), got {shown(key_range)}")
        first, end = (
            check_per_row(f"key_range {name}", x, iq) for name, x in zip(("first", "end"), key_range, strict=True)
        )
        return first, end
    if isinstance(cur_pos, Tensor):
        if (
            cur_pos.dtype not in (torch.int32, torch.int64)
            or list(cur_pos.shape) != [batch]
            or cur_pos.device != iq.device
        ):
            raise ValueError(f"cur_pos must be int32 or int64 [{batch}] on {iq.device}, got {shown(cur_pos)}")
        last = check_tensor("cur_pos", cur_pos).long()
    else:
        if not isinstance(cur_pos, Sequence) or len(cur_pos) != batch or not all(type(at) is int for at in cur_pos):
            raise ValueError(f"cur_pos must be {batch} integers, one per sequence, got {shown(cur_pos)}")
        if any(not -1 <= at < 2**31 - 1 for at in cur_pos):
            raise ValueError(f"cur_pos must be positions below {2**31 - 1}, or -1, got {shown(cur_pos)}")
        if iq.is_cuda and torch.cuda.is_current_stream_capturing():  # a replay would copy from freed memory
            raise ValueError("cur_pos must be a tensor on the device while a CUDA graph is captured, got a list")
        last = torch.tensor(list(cur_pos), dtype=torch.int64, device="cpu").to(iq.device, non_blocking=True)
    end = last[:, None] + torch.arange(2 - tokens, 2, device=iq.device)  # at most 0 for a sequence that is skipped
    return torch.zeros_like(end), end
