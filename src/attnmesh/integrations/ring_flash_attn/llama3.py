"""Attention of packed documents over contiguous shards: ring_flash_attn's `llama3` functions.

The concatenation of all documents is sharded by `Contiguous()`, so that a document may begin on one rank and end on
another. Each rank gathers the keys that its queries attend to, a few heads at a time.

FlashAttention needs the lengths of the parts of documents on this rank; ranks that agree on a mask need those of whole
documents. `llama3_flash_attn_prepare_cu_seqlens` leaves them with the tensor that it returns. For other tensors, ranks
exchange what they know of the documents, once per tensor.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.core.layouts import Contiguous
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
from attnmesh.integrations.ring_flash_attn.cu_seqlens import bounds, check_max_seqlen, lengths_of, once_per_tensor
from attnmesh.parallel.compiling import not_compiled
from attnmesh.utils.validation import MAX_RANKS, check_bool, check_count, check_index, check_type, shown

_WHOLE = "bounds of whole documents"  # what is remembered with a tensor


class _LocalDocuments(NamedTuple):
    """The documents that this rank's queries belong to."""

    cu_seqlens_q: tuple[int, ...]  # of this rank's rows
    cu_seqlens_k: tuple[int, ...]  # of the keys that they attend to
    keys: slice  # where these keys are in the whole sequence

    def without_empty(self) -> _LocalDocuments:
        """The same without documents that have no rows."""
        q, k = [0], [0]
        for i in range(1, len(self.cu_seqlens_q)):
            if (self.cu_seqlens_q[i], self.cu_seqlens_k[i]) != (q[-1], k[-1]):
                q.append(self.cu_seqlens_q[i])
                k.append(self.cu_seqlens_k[i])
        return _LocalDocuments(tuple(q), tuple(k), self.keys)


def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: Tensor, causal: bool, rank: int, world_size: int
) -> tuple[Tensor, Tensor, int, int, slice]:
    """The arguments `cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, local_k_slice` of this rank.

    `cu_seqlens` are the cumulative lengths of all documents, the same on every rank. Their sum need not be divisible:
    ranks hold what `Contiguous()` gives them.

    Examples:
        >>> cu_seqlens = torch.tensor([0, 8, 12], dtype=torch.int32)  # of all documents; rank 1 has tokens 6 to 11
        >>> ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, causal=True, rank=1, world_size=2)
        (tensor([0, 2, 6], dtype=torch.int32), tensor([ 0,  8, 12], dtype=torch.int32), 4, 8, slice(0, 12, None))
    """
    check_bool(causal=causal)
    check_count("world_size", world_size, least=1, most=MAX_RANKS)
    check_index("rank", rank, world_size)
    whole = bounds("cu_seqlens", cu_seqlens)
    local = _local_documents(whole, causal, rank, world_size)
    q, k = (
        torch.tensor(values, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
        for values in (local.cu_seqlens_q, local.cu_seqlens_k)
    )
    once_per_tensor(q, _WHOLE, lambda: whole)
    longest = [max(lengths_of(values)) for values in (local.cu_seqlens_q, local.cu_seqlens_k)]
    return q, k, longest[0], longest[1], local.keys


def _local_documents(whole: tuple[int, ...], causal: bool, rank: int, world: int) -> _LocalDocuments:
    ranges = Contiguous().ranges(whole[-1], world, rank)
    if not ranges:  # fewer positions than ranks
        return _LocalDocuments((0, 0), (0, 0), slice(whole[-1], whole[-1]))
    (rows,) = ranges
    first = bisect.bisect_left(whole, rows.start)
    first -= whole[first] != rows.start
    last = bisect.bisect_left(whole, rows.stop)
    inside = whole[first + 1 : last]
    end = rows.stop if causal else whole[last]
    return _LocalDocuments(
        (0, *(n - rows.start for n in inside), len(rows)),
        (0, *(n - whole[first] for n in inside), end - whole[first]),
        slice(whole[first], end),
    )


def llama3_flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    heads_k_stride: int, local_k_slice: slice, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Group = None,
) -> Result:  # fmt: skip
    """Attention of packed documents, q [tokens, heads, head_dim], k and v, sharded by `Contiguous()`.

    The five arguments from `cu_seqlens_q` on are those that `llama3_flash_attn_prepare_cu_seqlens` returns.
    `heads_k_stride` must divide the kv heads; how many heads are gathered at a time is decided by the executor.

    Examples:
        >>> q, k, v = torch.randn(12, 4, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8)
        >>> cu_seqlens = torch.tensor([0, 8, 12], dtype=torch.int32)
        >>> def rank(comm):
        ...     *lengths, k_slice = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(
        ...         cu_seqlens, True, comm.rank, comm.world)
        ...     shards = [x.tensor_split(comm.world)[comm.rank] for x in (q, k, v)]
        ...     attend = ring_flash_attn.llama3_flash_attn_varlen_func
        ...     return attend(*shards, *lengths, 1, k_slice, causal=True, group=comm)
        >>> mask = am.Causal() & am.Documents([8, 4])
        >>> whole = am.attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), mask=mask)[0].transpose(0, 1)
        >>> torch.allclose(torch.cat(am.run_virtual(2, rank)), whole, atol=1e-5)
        True
    """
    options = Options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs)
    packing = _Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice)
    return _attend("llama3_flash_attn_varlen_func", {"q": q, "k": k, "v": v}, packing, options, group)


def llama3_flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    heads_k_stride: int, local_k_slice: slice, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Group = None,
) -> Result:  # fmt: skip
    """`llama3_flash_attn_varlen_func` of q and packed k and v.

    Examples:
        >>> q, kv = torch.randn(12, 4, 8), torch.randn(12, 2, 2, 8)
        >>> cu_seqlens = torch.tensor([0, 8, 12], dtype=torch.int32)
        >>> *lengths, k_slice = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, 0, 1)
        >>> ring_flash_attn.llama3_flash_attn_varlen_kvpacked_func(q, kv, *lengths, 1, k_slice, causal=True).shape
        torch.Size([12, 4, 8])
    """
    options = Options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs)
    packing = _Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice)
    return _attend("llama3_flash_attn_varlen_kvpacked_func", {"q": q, "kv": kv}, packing, options, group)


def llama3_flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    heads_k_stride: int, local_k_slice: slice, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: tuple[int, int] = (-1, -1), alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False, group: Group = None,
) -> Result:  # fmt: skip
    """`llama3_flash_attn_varlen_func` of packed q, k and v.

    Examples:
        >>> qkv = torch.randn(12, 3, 4, 8)
        >>> cu_seqlens = torch.tensor([0, 8, 12], dtype=torch.int32)
        >>> *lengths, k_slice = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens(cu_seqlens, True, 0, 1)
        >>> ring_flash_attn.llama3_flash_attn_varlen_qkvpacked_func(qkv, *lengths, 1, k_slice, causal=True).shape
        torch.Size([12, 4, 8])
    """
    options = Options(dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic, return_attn_probs)
    packing = _Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, heads_k_stride, local_k_slice)
    return _attend("llama3_flash_attn_varlen_qkvpacked_func", {"qkv": qkv}, packing, options, group)


class _Packing(NamedTuple):
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    heads_k_stride: int
    local_k_slice: slice

    def check(self, qkv: list[Tensor]) -> _LocalDocuments:
        """The documents of this rank; ValueError for values that cannot be those of any."""
        q, k = bounds("cu_seqlens_q", self.cu_seqlens_q), bounds("cu_seqlens_k", self.cu_seqlens_k)
        keys, tokens, kv_heads = self.local_k_slice, qkv[0].shape[2], qkv[1].shape[1]
        check_type("local_k_slice", keys, slice)
        if not isinstance(keys.start, int) or not isinstance(keys.stop, int) or keys.step is not None:
            raise ValueError(f"local_k_slice must be a slice of two integers, got {keys}")
        if q[-1] != tokens:
            raise ValueError(f"cu_seqlens_q must end with the {tokens} tokens of this rank, got {q[-1]}")
        check_max_seqlen("max_seqlen_q", self.max_seqlen_q, max(lengths_of(q), default=0))
        check_max_seqlen("max_seqlen_k", self.max_seqlen_k, max(lengths_of(k), default=0))
        if check_count("heads_k_stride", self.heads_k_stride, least=1) and kv_heads % self.heads_k_stride:
            raise ValueError(f"heads_k_stride must divide the {kv_heads} kv heads, got {self.heads_k_stride}")
        if len(q) != len(k) or keys.stop - keys.start != k[-1]:
            raise ValueError(
                "cu_seqlens_k and local_k_slice must have the documents of cu_seqlens_q and as many keys as each "
                f"other, got {shown(q)}, {shown(k)} and {keys}"
            )
        return _LocalDocuments(q, k, keys)


@not_compiled(NOT_COMPILED)
def _attend(
    function: str, tensors: Mapping[str, Tensor], packing: _Packing, options: Options, group: Group
) -> Result:  # fmt: skip
    comm = comm_of(group)
    with raised_on_all_ranks(comm, function):
        options.check()
        qkv = split(tensors, varlen=True)
        local = packing.check(qkv)
    whole = once_per_tensor(packing.cu_seqlens_q, _WHOLE, lambda: _exchanged(comm, function, local, qkv[0].device))
    with raised_on_all_ranks(comm, function):
        expected = _local_documents(whole, options.causal, comm.rank, comm.world)
        if local.without_empty() != expected.without_empty():
            raise ValueError(
                "cu_seqlens_q, cu_seqlens_k and local_k_slice must be those of llama3_flash_attn_prepare_cu_seqlens "
                f"for causal={options.causal}, rank={comm.rank} and world_size={comm.world}, {shown(tuple(expected))}, "
                f"got {shown(tuple(local))}"
            )
    sharding = Sharding(Contiguous(), whole[-1], "allgather", lengths_of(whole))
    return attend(comm, sharding, qkv, options, varlen=True)


def _exchanged(comm: Comm, function: str, local: _LocalDocuments, device: torch.device) -> tuple[int, ...]:
    """The bounds of whole documents, from what all ranks know of theirs."""
    comm.agree(f"{function}: exchange of cu_seqlens", {"device": device.type})
    mine = torch.tensor([local.keys.start, *local.cu_seqlens_q], dtype=torch.int64, device=device)
    count = torch.tensor([mine.numel()], dtype=torch.int64, device=device)
    counts = [int(n) for n in comm.all_gather(count, [(1,)] * comm.world)]
    found, begin = {0}, 0
    for values in comm.all_gather(mine, [(n,) for n in counts]):
        start, _, *ends = values.tolist()
        # A document that begins on an earlier rank has its begin in `start`; the last one may end on a later rank.
        found |= {start, *(begin + end for end in ends[:-1])}
        begin += ends[-1]
    return (*sorted(found - {begin}), begin) if begin else (0, 0)
