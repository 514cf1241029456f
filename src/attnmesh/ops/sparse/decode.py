"""`paged_sparse_decode_attention`: sparse attention of a decode step over latents in a paged cache."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmesh.core.ranges import InterleavedShard
from attnmesh.core.state import State, accumulation_dtype, add_sinks
from attnmesh.ops.sparse import dispatch, torch_backend
from attnmesh.ops.sparse.arguments import RowBounds, TopKIndices
from attnmesh.ops.sparse.attention import MAX_DEFAULT_D_V
from attnmesh.ops.sparse.call import SparseCall
from attnmesh.ops.sparse.paged import (
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
            sequence, and those of other ranks are treated as padding.
        split_size: fixed number of indices per part of the work. The bits of a token then depend on that token only; by
            default the indices are split into as many parts as fill the device.
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
