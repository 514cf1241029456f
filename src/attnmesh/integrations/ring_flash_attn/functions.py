"""Ring attention with the signatures of ring_flash_attn: a layout per function, and packed forms of each.

    ring      contiguous chunks: `Contiguous()`
    zigzag    chunks i and 2N-1-i of 2N on rank i: `Zigzag()`
    stripe    position p on rank p mod N: `Striped()`
    varlen    packed documents, each sharded over all ranks: `Joint((length, layout), ...)`

Arguments have the meanings of FlashAttention. q, k, v are this rank's shards, [batch, seq, heads, head_dim], or
[tokens, heads, head_dim] of packed documents, whose `cu_seqlens` are the cumulative lengths of this rank's parts.
kv and qkv have a dimension of 2 or 3 before the heads. `group` is a ProcessGroup, a one-dimensional DeviceMesh, a comm,
or None for the default process group.

Returns out in the shape of q; with `return_attn_probs` (out, lse, None), lse [batch, heads, seq] or [heads, tokens].

All ranks hold equally many positions (of each document). If not, pass the length of the whole sequence as `length`, or
those of the whole documents as `document_lengths`, and shard by the layout.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from attnmesh.core.layouts import Contiguous, Joint, Layout, Striped, Zigzag
from attnmesh.integrations.ring_flash_attn.call import (
    NOT_COMPILED,
    Group,
    Options,
    Result,
    Sharding,
    attend,
    comm_of,
    raised_on_all_ranks,
    split,
)
from attnmesh.integrations.ring_flash_attn.cu_seqlens import bounds, check_max_seqlen, lengths_of
from attnmesh.parallel.compiling import not_compiled
from attnmesh.utils.validation import check_count, check_list, shown


def ring_flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Group = None, *, length: int | None = None,
) -> Result:  # fmt: skip
    """Attention of q, k and v [batch, seq, heads, head_dim], sharded by `Contiguous()`.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 16, 2, 8)  # [batch, seq, heads, head_dim]
        >>> layout = am.Contiguous()
        >>> def rank(comm):
        ...     shards = (layout.shard(x, 1, comm.world, comm.rank) for x in (q, k, v))
        ...     return ring_flash_attn.ring_flash_attn_func(*shards, causal=True, group=comm)
        >>> whole = am.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask=am.Causal()).transpose(1, 2)
        >>> torch.allclose(layout.unshard(am.run_virtual(2, rank), 1), whole, atol=1e-5)
        True
    """
    options = Options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs)
    return _batch("ring_flash_attn_func", Contiguous(), {"q": q, "k": k, "v": v}, options, group, length)


def ring_flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Group = None, *, length: int | None = None,
) -> Result:  # fmt: skip
    """Attention of q [batch, seq, heads, head_dim] and kv [batch, seq, 2, heads, head_dim], sharded by `Contiguous()`.

    Examples:
        >>> q, kv = torch.randn(1, 16, 4, 8), torch.randn(1, 16, 2, 2, 8)  # kv [batch, seq, 2, heads, head_dim]
        >>> ring_flash_attn.ring_flash_attn_kvpacked_func(q, kv, causal=True).shape
        torch.Size([1, 16, 4, 8])
    """
    options = Options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs)
    return _batch("ring_flash_attn_kvpacked_func", Contiguous(), {"q": q, "kv": kv}, options, group, length)


def ring_flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Group = None, *, length: int | None = None,
) -> Result:  # fmt: skip
    """Attention of qkv [batch, seq, 3, heads, head_dim], sharded by `Contiguous()`.

    Examples:
        >>> qkv = torch.randn(1, 16, 3, 4, 8)  # [batch, seq, 3, heads, head_dim]
        >>> ring_flash_attn.ring_flash_attn_qkvpacked_func(qkv, window_size=(4, 0)).shape
        torch.Size([1, 16, 4, 8])
    """
    options = Options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs)
    return _batch("ring_flash_attn_qkvpacked_func", Contiguous(), {"qkv": qkv}, options, group, length)


def ring_flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Group = None, *, document_lengths: Sequence[int] | None = None,
) -> Result:  # fmt: skip
    """Attention of packed documents, q, k and v [tokens, heads, head_dim], each sharded by `Contiguous()`.

    Examples:
        >>> q, k, v = torch.randn(3, 12, 2, 8)  # documents of 8 and 4 tokens: [tokens, heads, head_dim]
        >>> layout = am.Joint((8, am.Contiguous()), (4, am.Contiguous()))
        >>> cu_seqlens = torch.tensor([0, 4, 6], dtype=torch.int32)  # of a rank's halves of both
        >>> def rank(comm):
        ...     shards = (layout.shard(x, 0, comm.world, comm.rank) for x in (q, k, v))
        ...     attend = ring_flash_attn.ring_flash_attn_varlen_func
        ...     return attend(*shards, cu_seqlens, 4, causal=True, group=comm)
        >>> mask = am.Causal() & am.Documents([8, 4])
        >>> whole = am.attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), mask=mask)[0].transpose(0, 1)
        >>> torch.allclose(layout.unshard(am.run_virtual(2, rank), 0), whole, atol=1e-5)
        True
    """
    options = Options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs)
    packing = _Packing(cu_seqlens, max_seqlen, document_lengths)
    return _varlen("ring_flash_attn_varlen_func", Contiguous(), {"q": q, "k": k, "v": v}, packing, options, group)


def ring_flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Group = None, *, document_lengths: Sequence[int] | None = None,
) -> Result:  # fmt: skip
    """Attention of packed documents, q [tokens, heads, D] and kv [tokens, 2, heads, D], each sharded by `Contiguous()`.

    Examples:
        >>> q, kv = torch.randn(12, 4, 8), torch.randn(12, 2, 2, 8)
        >>> cu_seqlens = torch.tensor([0, 8, 12], dtype=torch.int32)
        >>> ring_flash_attn.ring_flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, 8, causal=True).shape
        torch.Size([12, 4, 8])
    """
    options = Options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs)
    packing = _Packing(cu_seqlens, max_seqlen, document_lengths)
    return _varlen("ring_flash_attn_varlen_kvpacked_func", Contiguous(), {"q": q, "kv": kv}, packing, options, group)


def ring_flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Group = None, *, document_lengths: Sequence[int] | None = None,
) -> Result:  # fmt: skip
    """Attention of packed documents, qkv [tokens, 3, heads, head_dim], each sharded by `Contiguous()`.

    Examples:
        >>> qkv = torch.randn(12, 3, 4, 8)
        >>> cu_seqlens = torch.tensor([0, 8, 12], dtype=torch.int32)
        >>> ring_flash_attn.ring_flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 8, causal=True).shape
        torch.Size([12, 4, 8])
    """
    options = Options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs)
    packing = _Packing(cu_seqlens, max_seqlen, document_lengths)
    return _varlen("ring_flash_attn_varlen_qkvpacked_func", Contiguous(), {"qkv": qkv}, packing, options, group)


def zigzag_ring_flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Group = None, *, length: int | None = None,
) -> Result:  # fmt: skip
    """Attention of q, k and v [batch, seq, heads, head_dim], sharded by `Zigzag()`.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 16, 2, 8)  # [batch, seq, heads, head_dim]
        >>> layout = am.Zigzag()
        >>> def rank(comm):
        ...     shards = (layout.shard(x, 1, comm.world, comm.rank) for x in (q, k, v))
        ...     return ring_flash_attn.zigzag_ring_flash_attn_func(*shards, causal=True, group=comm)
        >>> whole = am.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask=am.Causal()).transpose(1, 2)
        >>> torch.allclose(layout.unshard(am.run_virtual(2, rank), 1), whole, atol=1e-5)
        True
    """
    options = Options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs)
    return _batch("zigzag_ring_flash_attn_func", Zigzag(), {"q": q, "k": k, "v": v}, options, group, length)


def zigzag_ring_flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Group = None, *, length: int | None = None,
) -> Result:  # fmt: skip
    """Attention of q [batch, seq, heads, head_dim] and kv [batch, seq, 2, heads, head_dim], sharded by `Zigzag()`.

    Examples:
        >>> q, kv = torch.randn(1, 16, 4, 8), torch.randn(1, 16, 2, 2, 8)  # kv [batch, seq, 2, heads, head_dim]
        >>> ring_flash_attn.zigzag_ring_flash_attn_kvpacked_func(q, kv, causal=True).shape
        torch.Size([1, 16, 4, 8])
    """
    options = Options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs)
    return _batch("zigzag_ring_flash_attn_kvpacked_func", Zigzag(), {"q": q, "kv": kv}, options, group, length)


def zigzag_ring_flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Group = None, *, length: int | None = None,
) -> Result:  # fmt: skip
    """Attention of qkv [batch, seq, 3, heads, head_dim], sharded by `Zigzag()`.

    Examples:
        >>> qkv = torch.randn(1, 16, 3, 4, 8)  # [batch, seq, 3, heads, head_dim]
        >>> ring_flash_attn.zigzag_ring_flash_attn_qkvpacked_func(qkv, window_size=(4, 0)).shape
        torch.Size([1, 16, 4, 8])
    """
    options = Options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs)
    return _batch("zigzag_ring_flash_attn_qkvpacked_func", Zigzag(), {"qkv": qkv}, options, group, length)


def zigzag_ring_flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Group = None, *, document_lengths: Sequence[int] | None = None,
) -> Result:  # fmt: skip
    """Attention of packed documents, q, k and v [tokens, heads, head_dim], each sharded by `Zigzag()`.

    Examples:
        >>> q, k, v = torch.randn(3, 12, 2, 8)  # documents of 8 and 4 tokens: [tokens, heads, head_dim]
        >>> layout = am.Joint((8, am.Zigzag()), (4, am.Zigzag()))
        >>> cu_seqlens = torch.tensor([0, 4, 6], dtype=torch.int32)  # of a rank's halves of both
        >>> def rank(comm):
        ...     shards = (layout.shard(x, 0, comm.world, comm.rank) for x in (q, k, v))
        ...     attend = ring_flash_attn.zigzag_ring_flash_attn_varlen_func
        ...     return attend(*shards, cu_seqlens, 4, causal=True, group=comm)
        >>> mask = am.Causal() & am.Documents([8, 4])
        >>> whole = am.attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), mask=mask)[0].transpose(0, 1)
        >>> torch.allclose(layout.unshard(am.run_virtual(2, rank), 0), whole, atol=1e-5)
        True
    """
    options = Options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs)
    packing = _Packing(cu_seqlens, max_seqlen, document_lengths)
    return _varlen("zigzag_ring_flash_attn_varlen_func", Zigzag(), {"q": q, "k": k, "v": v}, packing, options, group)


def zigzag_ring_flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Group = None, *, document_lengths: Sequence[int] | None = None,
) -> Result:  # fmt: skip
    """Attention of packed documents, q [tokens, heads, D] and kv [tokens, 2, heads, D], each sharded by `Zigzag()`.

    Examples:
        >>> q, kv = torch.randn(12, 4, 8), torch.randn(12, 2, 2, 8)
        >>> cu_seqlens = torch.tensor([0, 8, 12], dtype=torch.int32)
        >>> ring_flash_attn.zigzag_ring_flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, 8, causal=True).shape
        torch.Size([12, 4, 8])
    """
    options = Options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs)
    packing = _Packing(cu_seqlens, max_seqlen, document_lengths)
    return _varlen("zigzag_ring_flash_attn_varlen_kvpacked_func", Zigzag(), {"q": q, "kv": kv}, packing, options, group)


def zigzag_ring_flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Group = None, *, document_lengths: Sequence[int] | None = None,
) -> Result:  # fmt: skip
    """Attention of packed documents, qkv [tokens, 3, heads, head_dim], each sharded by `Zigzag()`.

    Examples:
        >>> qkv = torch.randn(12, 3, 4, 8)
        >>> cu_seqlens = torch.tensor([0, 8, 12], dtype=torch.int32)
        >>> ring_flash_attn.zigzag_ring_flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, 8, causal=True).shape
        torch.Size([12, 4, 8])
    """
    options = Options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs)
    packing = _Packing(cu_seqlens, max_seqlen, document_lengths)
    return _varlen("zigzag_ring_flash_attn_varlen_qkvpacked_func", Zigzag(), {"qkv": qkv}, packing, options, group)


def stripe_flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Group = None, *, length: int | None = None,
) -> Result:  # fmt: skip
    """Attention of q, k and v [batch, seq, heads, head_dim], sharded by `Striped()`.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 16, 2, 8)  # [batch, seq, heads, head_dim]
        >>> layout = am.Striped()
        >>> def rank(comm):
        ...     shards = (layout.shard(x, 1, comm.world, comm.rank) for x in (q, k, v))
        ...     return ring_flash_attn.stripe_flash_attn_func(*shards, causal=True, group=comm)
        >>> whole = am.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask=am.Causal()).transpose(1, 2)
        >>> torch.allclose(layout.unshard(am.run_virtual(2, rank), 1), whole, atol=1e-5)
        True
    """
    options = Options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs)
    return _batch("stripe_flash_attn_func", Striped(), {"q": q, "k": k, "v": v}, options, group, length)


def stripe_flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Group = None, *, length: int | None = None,
) -> Result:  # fmt: skip
    """Attention of q [batch, seq, heads, head_dim] and kv [batch, seq, 2, heads, head_dim], sharded by `Striped()`.

    Examples:
        >>> q, kv = torch.randn(1, 16, 4, 8), torch.randn(1, 16, 2, 2, 8)  # kv [batch, seq, 2, heads, head_dim]
        >>> ring_flash_attn.stripe_flash_attn_kvpacked_func(q, kv, causal=True).shape
        torch.Size([1, 16, 4, 8])
    """
    options = Options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs)
    return _batch("stripe_flash_attn_kvpacked_func", Striped(), {"q": q, "kv": kv}, options, group, length)


def stripe_flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Group = None, *, length: int | None = None,
) -> Result:  # fmt: skip
    """Attention of qkv [batch, seq, 3, heads, head_dim], sharded by `Striped()`.

    Examples:
        >>> qkv = torch.randn(1, 16, 3, 4, 8)  # [batch, seq, 3, heads, head_dim]
        >>> ring_flash_attn.stripe_flash_attn_qkvpacked_func(qkv, window_size=(4, 0)).shape
        torch.Size([1, 16, 4, 8])
    """
    options = Options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs)
    return _batch("stripe_flash_attn_qkvpacked_func", Striped(), {"qkv": qkv}, options, group, length)


class _Packing(NamedTuple):
    cu_seqlens: Tensor
    max_seqlen: int
    document_lengths: Sequence[int] | None


@not_compiled(NOT_COMPILED)
def _batch(
    function: str, layout: Layout, tensors: Mapping[str, Tensor], options: Options, group: Group, length: int | None
) -> Result:  # fmt: skip
    comm = comm_of(group)
    with raised_on_all_ranks(comm, function):
        options.check()
        qkv = split(tensors, varlen=False)
        length = qkv[0].shape[2] * comm.world if length is None else check_count("length", length)
    return attend(comm, Sharding(layout, length, "ring"), qkv, options, varlen=False)


@not_compiled(NOT_COMPILED)
def _varlen(
    function: str, layout: Layout, tensors: Mapping[str, Tensor], packing: _Packing, options: Options, group: Group
) -> Result:  # fmt: skip
    comm = comm_of(group)
    cu_seqlens, max_seqlen, document_lengths = packing
    with raised_on_all_ranks(comm, function):
        options.check()
        qkv = split(tensors, varlen=True)
        local = lengths_of(bounds("cu_seqlens", cu_seqlens))
        if sum(local) != qkv[0].shape[2]:
            raise ValueError(f"cu_seqlens must end with the {qkv[0].shape[2]} tokens of this rank, got {sum(local)}")
        check_max_seqlen("max_seqlen", max_seqlen, max(local, default=0))
        if document_lengths is None:
            lengths = tuple(n * comm.world for n in local)
        else:
            lengths = tuple(check_list("document_lengths", document_lengths, "lengths"))
            for i, n in enumerate(lengths):
                check_count(f"document_lengths[{i}]", n)
        expected = _local_lengths(layout, lengths, comm.world, comm.rank)
        if local != expected:
            raise ValueError(
                f"cu_seqlens must be those of documents of {shown(list(expected))} positions: rank {comm.rank} of "
                f"{comm.world} holds so many of document_lengths {shown(list(lengths))} under {layout}, got "
                f"{shown(list(local))}"
            )
    sharding = Sharding(_joint(layout, lengths), sum(lengths), "ring", lengths)
    return attend(comm, sharding, qkv, options, varlen=True)


@lru_cache(maxsize=256)
def _joint(layout: Layout, lengths: tuple[int, ...]) -> Joint:
    return Joint(*((n, layout) for n in lengths))


@lru_cache(maxsize=256)
def _local_lengths(layout: Layout, lengths: tuple[int, ...], world: int, rank: int) -> tuple[int, ...]:
    return tuple(layout.local_length(n, world, rank) for n in lengths)
