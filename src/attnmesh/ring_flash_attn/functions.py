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

A call in the terms of ring_flash_attn, checked and computed by a `ContextParallel`.

Tensors are [batch, seq, heads, head_dim], or packed documents [tokens, heads, head_dim]; k and v, or all three, may be
one tensor with a dimension before the heads.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from inspect import Parameter, Signature, signature
from typing import Any, NamedTuple, TypeVar, get_type_hints

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import Comm, SoloComm, comm_from
from attnmesh.core.layouts import Contiguous, Joint, Layout, Striped, Zigzag
from attnmesh.core.masks import Causal, Documents, Full, Mask, SlidingWindow
from attnmesh.parallel.compiling import not_compiled
from attnmesh.parallel.context import ContextParallel, UnnumberedContext
from attnmesh.parallel.executor import BackendName
from attnmesh.plan.shards import ScheduleName
from attnmesh.utils.validation import (
    MAX_RANKS,
    check_bool,
    check_count,
    check_index,
    check_list,
    check_number,
    check_tensor,
    check_type,
    is_number,
    shown,
)

# A call in the terms of ring_flash_attn, checked and computed by a `ContextParallel`.


T = TypeVar("T")

Group = Comm | ProcessGroup | DeviceMesh | None
"""The ranks of a call. ring_flash_attn takes a ProcessGroup, or None for the default one."""
Result = Tensor | tuple[Tensor, Tensor, None]
"""Out, or (out, lse, None) with `return_attn_probs`."""
NOT_COMPILED = "functions of ring_flash_attn run eagerly: call ContextParallel.attention in a compiled graph"

_SOLO = SoloComm()


class Options(NamedTuple):
    """The arguments that all functions share, with FlashAttention's meanings."""

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False
    group: Group = None

    def check(self) -> None:
        """Raise ValueError for values that are invalid or not supported."""
        check_bool(causal=self.causal, deterministic=self.deterministic, return_attn_probs=self.return_attn_probs)
        if not is_number(self.dropout_p) or self.dropout_p != 0:
            raise ValueError(f"dropout_p must be 0: attention over ranks has no dropout, got {shown(self.dropout_p)}")
        if self.softmax_scale is not None:
            check_number("softmax_scale", self.softmax_scale)
        window = self.window_size
        widths = window if isinstance(window, tuple | list) else ()
        if len(widths) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n >= -1 for n in widths):
            raise ValueError(
                f"window_size must be two integers (left, right), each >= 0 or -1 for no limit, got {shown(window)}"
            )

    def mask(self, length: int, documents: tuple[int, ...] | None = None) -> Mask:
        """The mask of a sequence of `length` positions, which may consist of documents."""
        return _mask(self.causal, *self.window_size, length, documents)


@lru_cache(maxsize=256)
def _mask(causal: bool, left: int, right: int, length: int, documents: tuple[int, ...] | None) -> Mask:
    right = 0 if causal else right
    mask: Mask
    if left < 0 and right <= 0:
        mask = Full() if right < 0 else Causal()
    else:
        mask = SlidingWindow(length if left < 0 else left, length if right < 0 else right)
    return mask if documents is None else mask & Documents(documents)


def comm_of(group: Group) -> Comm:
    """The comm of a group; without torch.distributed, always the same single rank."""
    comm = comm_from(group)
    return _SOLO if type(comm) is SoloComm and group is None else comm


@lru_cache(maxsize=128)
def context(comm: Comm, layout: Layout, schedule: ScheduleName, backend: BackendName = "auto") -> ContextParallel:
    """The `ContextParallel` of a layout. It shares the comm with all others of the group and creates no group."""
    return UnnumberedContext(comm, layout=layout, schedule=schedule, backend=backend)


@contextmanager
def raised_on_all_ranks(comm: Comm, function: str) -> Iterator[None]:
    """Report a ValueError in the body, which checks arguments, to the other ranks, which then raise it too."""
    try:
        yield
    except ValueError as error:
        comm.agree(function, {}, str(error))
        raise


def split(tensors: Mapping[str, Tensor], *, varlen: bool) -> list[Tensor]:
    """Q, k and v as [batch, heads, seq, head_dim] from tensors named q, k, v, or packed as kv or qkv."""
    parts: list[Tensor] = []
    dim = 1 if varlen else 2
    for name, x in tensors.items():
        packed = len(name) > 1
        shape = ["tokens"] if varlen else ["batch", "seq"]
        shape += [str(len(name))] * packed + ["heads", "head_dim"]
        check_tensor(name, x)
        if x.ndim != len(shape) or (packed and x.shape[dim] != len(name)):
            raise ValueError(f"{name} must be [{', '.join(shape)}], got {shown(x)}")
        parts += x.unbind(dim) if packed else [x]
    return [x.transpose(0, 1)[None] if varlen else x.transpose(1, 2) for x in parts]


class Sharding(NamedTuple):
    """How a sequence of `length` positions lies on the ranks, and how they communicate."""

    layout: Layout
    length: int
    schedule: ScheduleName
    documents: tuple[int, ...] | None = None


def attend(comm: Comm, sharding: Sharding, qkv: list[Tensor], options: Options, *, varlen: bool) -> Result:
    """The result of a checked call."""
    q, k, v = qkv
    layout, length, schedule, documents = sharding
    # Of the backends for CUDA, only Triton's adds up gradients in a fixed order.
    backend = "triton" if options.deterministic and q.is_cuda else "auto"
    out, lse = context(comm, layout, schedule, backend).attention(
        q, k, v, mask=options.mask(length, documents), scale=options.softmax_scale, length=length,
        alibi_slopes=options.alibi_slopes, return_lse=True,
    )  # fmt: skip
    if varlen:
        out, lse = out[0].transpose(0, 1), lse[0]
    else:
        out = out.transpose(1, 2)
    out = out.contiguous()  # callers take a view of all heads
    return (out, lse, None) if options.return_attn_probs else out


# Cumulative lengths of packed documents, `cu_seqlens`: read once per tensor, and checked.


def once_per_tensor(x: Tensor, key: Hashable, compute: Callable[[], T]) -> T:
    """`compute()`, remembered with the tensor until its contents change: one read per batch, not one per layer."""
    if x.is_inference():  # has no version
        return compute()
    version, known = getattr(x, "_attnmesh_known", (None, None))
    if known is None or version != x._version:
        known = {}
        x._attnmesh_known = (x._version, known)  # type: ignore[attr-defined]
    if key not in known:
        known[key] = compute()
    value: T = known[key]
    return value


def bounds(name: str, cu_seqlens: Tensor) -> tuple[int, ...]:
    """The values of cu_seqlens; ValueError unless they ascend from 0."""
    check_tensor(name, cu_seqlens)
    if cu_seqlens.ndim != 1 or cu_seqlens.dtype not in (torch.int32, torch.int64) or not cu_seqlens.numel():
        raise ValueError(f"{name} must be int32 or int64 [documents + 1], got {shown(cu_seqlens)}")
    found: tuple[int, ...] = once_per_tensor(cu_seqlens, "values", lambda: tuple(cu_seqlens.tolist()))
    if found[0] != 0 or any(a > b for a, b in itertools.pairwise(found)):
        raise ValueError(f"{name} must begin with 0 and not decrease, got {shown(found)}")
    return found


def lengths_of(found: tuple[int, ...]) -> tuple[int, ...]:
    """The lengths of the documents between bounds."""
    return tuple(b - a for a, b in itertools.pairwise(found))


def check_max_seqlen(name: str, max_seqlen: int | Tensor, longest: int) -> None:
    """Raise ValueError unless `max_seqlen` is an integer that no document exceeds."""
    if isinstance(max_seqlen, Tensor) and not max_seqlen.numel() == 1:
        raise ValueError(f"{name} must be an integer, got {shown(max_seqlen)}")
    n = max_seqlen.item() if isinstance(max_seqlen, Tensor) else max_seqlen
    if check_count(name, n) < longest:
        raise ValueError(f"{name} must be at least the longest document of this rank, {longest}, got {n}")


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
