"""Ring attention with the signatures of ring_flash_attn: a layout per function, and packed forms of each.

    ring      contiguous chunks: `Contiguous()`
    zigzag    chunks i and 2N-1-i of 2N on rank i: `Zigzag()`
    stripe    position p on rank p mod N: `Striped()`
    varlen    packed documents, each sharded over all ranks: `Joint((length, layout), ...)`
    llama3    packed documents, whose concatenation is sharded by `Contiguous()`: a document may begin on one rank and
              end on another. Each rank gathers the keys that its queries attend to, a few heads at a time

Arguments have the meanings of FlashAttention. q, k, v are this rank's shards, [batch, seq, heads, head_dim], or
[tokens, heads, head_dim] of packed documents, whose `cu_seqlens` are the cumulative lengths of this rank's parts.
kv and qkv have a dimension of 2 or 3 before the heads. `group` is a ProcessGroup, a one-dimensional DeviceMesh, a comm,
or None for the default process group.

Returns out in the shape of q; with `return_attn_probs` (out, lse, None), lse [batch, heads, seq] or [heads, tokens].

All ranks hold equally many positions (of each document). If not, pass the length of the whole sequence as `length`, or
the lengths of the whole documents as `document_lengths`, and shard by the layout.

FlashAttention needs the lengths of the parts of documents on this rank; ranks that agree on a mask need the lengths of
whole documents. `llama3_flash_attn_prepare_cu_seqlens` leaves them with the tensor that it returns. For other tensors,
ranks exchange what they know of the documents, once per tensor.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from inspect import Parameter, Signature, signature
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.core.layouts import Contiguous, Joint, Layout, Striped, Zigzag
from attnmesh.parallel.compiling import not_compiled
from attnmesh.ring_flash_attn.call import (
    NOT_COMPILED,
    Options,
    Result,
    Sharding,
    attend,
    bounds,
    check_max_seqlen,
    comm_of,
    lengths_of,
    once_per_tensor,
    raised_on_all_ranks,
    split,
)
from attnmesh.utils.validation import MAX_RANKS, check_bool, check_count, check_index, check_list, check_type, shown

_Function = Callable[..., Result]

_WHOLE = "bounds of whole documents"  # what is remembered with a tensor

_FORMS = {
    "func": (("q", "k", "v"), "q, k and v [TOKENS, heads, head_dim]"),
    "kvpacked_func": (("q", "kv"), "q [TOKENS, heads, head_dim] and kv [TOKENS, 2, heads, head_dim]"),
    "qkvpacked_func": (("qkv",), "qkv [TOKENS, 3, heads, head_dim]"),
}


class _Batch(NamedTuple):
    """Attention of TENSORS, sharded by `LAYOUT`.

    Examples:
        >>> q, k, v = torch.randn(3, 1, 16, 2, 8)  # [batch, seq, heads, head_dim]
        >>> layout = am.LAYOUT
        >>> def rank(comm):
        ...     q_, k_, v_ = (layout.shard(x, 1, comm.world, comm.rank) for x in (q, k, v))
        ...     return ring_flash_attn.FUNCTION(ARGUMENTS, causal=True, group=comm)
        >>> whole = am.attention(*(x.transpose(1, 2) for x in (q, k, v)), mask=am.Causal()).transpose(1, 2)
        >>> torch.allclose(layout.unshard(am.run_virtual(2, rank), 1), whole, atol=1e-5)
        True
    """

    length: int | None = None

    def check(self, comm: Comm, layout: Layout, qkv: list[Tensor]) -> Sharding:
        """The sharding of the sequence; ValueError for a length that is none."""
        length = qkv[0].shape[2] * comm.world if self.length is None else check_count("length", self.length)
        return Sharding(layout, length, "ring")


class _Varlen(NamedTuple):
    """Attention of packed documents, TENSORS, each document sharded by `LAYOUT`.

    Examples:
        >>> q, k, v = torch.randn(3, 12, 2, 8)  # documents of 8 and 4 tokens: [tokens, heads, head_dim]
        >>> layout = am.Joint((8, am.LAYOUT), (4, am.LAYOUT))
        >>> cu_seqlens = torch.tensor([0, 4, 6], dtype=torch.int32)  # of a rank's halves of both
        >>> def rank(comm):
        ...     q_, k_, v_ = (layout.shard(x, 0, comm.world, comm.rank) for x in (q, k, v))
        ...     return ring_flash_attn.FUNCTION(ARGUMENTS, cu_seqlens, 4, causal=True, group=comm)
        >>> mask = am.Causal() & am.Documents([8, 4])
        >>> whole = am.attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), mask=mask)[0].transpose(0, 1)
        >>> torch.allclose(layout.unshard(am.run_virtual(2, rank), 0), whole, atol=1e-5)
        True
    """

    cu_seqlens: Tensor
    max_seqlen: int
    document_lengths: Sequence[int] | None = None

    def check(self, comm: Comm, layout: Layout, qkv: list[Tensor]) -> Sharding:
        """The sharding of the documents; ValueError for lengths that this rank's tokens do not have."""
        tokens, local = qkv[0].shape[2], lengths_of(bounds("cu_seqlens", self.cu_seqlens))
        if sum(local) != tokens:
            raise ValueError(f"cu_seqlens must end with the {tokens} tokens of this rank, got {sum(local)}")
        check_max_seqlen("max_seqlen", self.max_seqlen, max(local, default=0))
        if self.document_lengths is None:
            lengths = tuple(n * comm.world for n in local)
        else:
            lengths = tuple(check_list("document_lengths", self.document_lengths, "lengths"))
            for i, n in enumerate(lengths):
                check_count(f"document_lengths[{i}]", n)
        expected = _local_lengths(layout, lengths, comm.world, comm.rank)
        if local != expected:
            raise ValueError(
                f"cu_seqlens must have documents of {shown(list(expected))} positions, which rank {comm.rank} of "
                f"{comm.world} holds of document_lengths {shown(list(lengths))} under {layout}, got "
                f"{shown(list(local))}"
            )
        return Sharding(_joint(layout, lengths), sum(lengths), "ring", lengths)


class _Llama3(NamedTuple):
    """Attention of packed documents, TENSORS, whose concatenation is sharded by `LAYOUT`.

    `llama3_flash_attn_prepare_cu_seqlens` returns the arguments `cu_seqlens_q`, `cu_seqlens_k`, `max_seqlen_q`,
    `max_seqlen_k` and `local_k_slice`. `heads_k_stride` must divide the kv heads; how many heads are gathered at a time
    is decided by the executor.

    Examples:
        >>> q, k, v = torch.randn(3, 12, 2, 8)  # documents of 8 and 4 tokens: [tokens, heads, head_dim]
        >>> cu_seqlens = torch.tensor([0, 8, 12], dtype=torch.int32)
        >>> def rank(comm):
        ...     prepare = ring_flash_attn.llama3_flash_attn_prepare_cu_seqlens
        ...     *lengths, k_slice = prepare(cu_seqlens, True, comm.rank, comm.world)
        ...     q_, k_, v_ = (x.tensor_split(comm.world)[comm.rank] for x in (q, k, v))
        ...     return ring_flash_attn.FUNCTION(ARGUMENTS, *lengths, 1, k_slice, causal=True, group=comm)
        >>> mask = am.Causal() & am.Documents([8, 4])
        >>> whole = am.attention(*(x.transpose(0, 1)[None] for x in (q, k, v)), mask=mask)[0].transpose(0, 1)
        >>> torch.allclose(torch.cat(am.run_virtual(2, rank)), whole, atol=1e-5)
        True
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    heads_k_stride: int
    local_k_slice: slice

    def check(self, comm: Comm, layout: Layout, qkv: list[Tensor]) -> _LocalDocuments:
        """The documents of this rank; ValueError for values that no documents have."""
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
                "cu_seqlens_k and local_k_slice must have the documents of cu_seqlens_q and the same number of "
                f"keys, got {shown(q)}, {shown(k)} and {keys}"
            )
        return _LocalDocuments(q, k, keys)

    def sharding(
        self, comm: Comm, function: str, local: _LocalDocuments, causal: bool, device: torch.device
    ) -> Sharding:
        """The sharding of the whole documents, which ranks exchange where they do not know them."""
        whole = once_per_tensor(self.cu_seqlens_q, _WHOLE, lambda: _exchanged(comm, function, local, device))
        with raised_on_all_ranks(comm, function):
            expected = _local_documents(whole, causal, comm.rank, comm.world)
            if local.without_empty() != expected.without_empty():
                raise ValueError(
                    "cu_seqlens_q, cu_seqlens_k and local_k_slice must be what "
                    f"llama3_flash_attn_prepare_cu_seqlens returns for causal={causal}, rank={comm.rank} and "
                    f"world_size={comm.world}, {shown(tuple(expected))}, got {shown(tuple(local))}"
                )
        return Sharding(Contiguous(), whole[-1], "allgather", lengths_of(whole))


@not_compiled(NOT_COMPILED)
def _attend(
    function: str, layout: Layout, tensors: Mapping[str, Tensor], own: _Batch | _Varlen | _Llama3, options: Options
) -> Result:
    comm, varlen = comm_of(options.group), not isinstance(own, _Batch)
    with raised_on_all_ranks(comm, function):
        options.check()
        qkv = split(tensors, varlen=varlen)
        found: Any = own.check(comm, layout, qkv)
    if isinstance(own, _Llama3):
        found = own.sharding(comm, function, found, options.causal, qkv[0].device)
    return attend(comm, found, qkv, options, varlen=varlen)


def _functions(
    name: str, layout: Layout, kind: type[_Batch | _Varlen | _Llama3]
) -> tuple[_Function, _Function, _Function]:
    """The functions of q, k and v, of packed k and v, and of packed q, k and v.

    A function takes the tensors and the fields of `kind` and of `Options`. Optional fields of `kind` are keywords.
    """
    own, shared = (
        [p.replace(annotation=get_type_hints(each)[p.name]) for p in signature(each).parameters.values()]
        for each in (kind, Options)
    )
    required = [p for p in own if p.default is p.empty]
    keywords = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.default is not p.empty]
    made = []
    for form, (names, _) in _FORMS.items():
        tensors = [Parameter(each, Parameter.POSITIONAL_OR_KEYWORD, annotation=Tensor) for each in names]
        declared = Signature([*tensors, *required, *shared, *keywords], return_annotation=Result)
        made.append(_function(name, form, layout, kind, declared))
    q_k_v, kv_packed, qkv_packed = made
    return q_k_v, kv_packed, qkv_packed


def _function(
    prefix: str, form: str, layout: Layout, kind: type[_Batch | _Varlen | _Llama3], declared: Signature
) -> _Function:
    name, (tensors, described) = f"{prefix}_{form}", _FORMS[form]
    parameters = declared.parameters.values()
    positional = [p.name for p in parameters if p.kind is not p.KEYWORD_ONLY]
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}

    def function(*args: Any, **kwargs: Any) -> Result:
        given = {**dict(zip(positional, args, strict=False)), **kwargs}
        if len(given) != len(args) + len(kwargs) or (given := defaults | given).keys() != declared.parameters.keys():
            declared.bind(*args, **kwargs)  # raises TypeError
        own = kind(**{field: given[field] for field in kind._fields})
        options = Options(**{field: given[field] for field in Options._fields})
        return _attend(name, layout, {each: given[each] for each in tensors}, own, options)

    function.__name__ = function.__qualname__ = name
    function.__signature__ = declared  # type: ignore[attr-defined]
    tokens, dim = ("batch, seq", 2) if kind is _Batch else ("tokens", 1)
    arguments = [
        f"torch.stack(({', '.join(f'{x}_' for x in each)}), {dim})" if each[1:] else f"{each}_" for each in tensors
    ]
    words = {"FUNCTION": name, "LAYOUT": str(layout), "ARGUMENTS": ", ".join(arguments), "TENSORS": described}
    function.__doc__ = kind.__doc__
    for word, text in (words | {"TOKENS": tokens}).items():
        function.__doc__ = (function.__doc__ or "").replace(word, text)
    return function


ring_flash_attn_func, ring_flash_attn_kvpacked_func, ring_flash_attn_qkvpacked_func = _functions(
    "ring_flash_attn", Contiguous(), _Batch
)
zigzag_ring_flash_attn_func, zigzag_ring_flash_attn_kvpacked_func, zigzag_ring_flash_attn_qkvpacked_func = _functions(
    "zigzag_ring_flash_attn", Zigzag(), _Batch
)
stripe_flash_attn_func, stripe_flash_attn_kvpacked_func, stripe_flash_attn_qkvpacked_func = _functions(
    "stripe_flash_attn", Striped(), _Batch
)
ring_flash_attn_varlen_func, ring_flash_attn_varlen_kvpacked_func, ring_flash_attn_varlen_qkvpacked_func = _functions(
    "ring_flash_attn_varlen", Contiguous(), _Varlen
)
(
    zigzag_ring_flash_attn_varlen_func,
    zigzag_ring_flash_attn_varlen_kvpacked_func,
    zigzag_ring_flash_attn_varlen_qkvpacked_func,
) = _functions("zigzag_ring_flash_attn_varlen", Zigzag(), _Varlen)
llama3_flash_attn_varlen_func, llama3_flash_attn_varlen_kvpacked_func, llama3_flash_attn_varlen_qkvpacked_func = (
    _functions("llama3_flash_attn_varlen", Contiguous(), _Llama3)
)


@lru_cache(maxsize=256)
def _joint(layout: Layout, lengths: tuple[int, ...]) -> Joint:
    return Joint(*((n, layout) for n in lengths))


@lru_cache(maxsize=256)
def _local_lengths(layout: Layout, lengths: tuple[int, ...], world: int, rank: int) -> tuple[int, ...]:
    return tuple(layout.local_length(n, world, rank) for n in lengths)


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


def _exchanged(comm: Comm, function: str, local: _LocalDocuments, device: torch.device) -> tuple[int, ...]:
    """The bounds of whole documents, from what every rank knows of its documents."""
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
