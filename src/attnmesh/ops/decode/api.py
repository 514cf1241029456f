"""`decode_attention` and `paged_decode_attention`: validation and choice of the backend."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.decode import reference
from attnmesh.ops.decode.call import (
    Backend,
    DecodeCall,
    build_call,
    check_into,
    checked_key_range,
    checked_per_head,
    checked_positions,
    signature_of,
)
from attnmesh.ops.decode.cpu import Cpu
from attnmesh.ops.decode.device_errors import check_positions
from attnmesh.ops.decode.gluon import Gluon, GluonGQA
from attnmesh.ops.decode.triton import Triton
from attnmesh.ops.launch import Recent
from attnmesh.ops.storage import Stored
from attnmesh.utils.log import log_choice, wants_choices
from attnmesh.utils.text import explained_in
from attnmesh.utils.validation import check_bool, check_choice, check_options, check_tensor

_LOG = logging.getLogger(__name__)

Positions = Sequence[int] | Tensor
KeyRange = tuple[Tensor, Tensor]


class DecodeOptions(TypedDict, total=False):
    """Arguments of `decode_attention` that few calls need, by keyword."""

    tree: Tensor | None
    alibi_slopes: Tensor | None
    share_cache: bool
    max_splits: int | None
    split_size: int | None
    key_range: KeyRange | None
    out_dtype: torch.dtype | None
    backend: str


class PagedDecodeOptions(DecodeOptions, total=False):
    """Arguments of `paged_decode_attention` that few calls need, by keyword."""

    into: State | None


@overload
def decode_attention(
    q: Tensor, k_cache: Stored, v_cache: Stored, *, cur_pos: Positions | None = ..., mask: Tensor | None = ...,
    scale: float | None = ..., window: int | None = ..., sinks: Tensor | None = ..., softcap: float | None = ...,
    return_lse: Literal[False] = ..., **options: Unpack[DecodeOptions],
) -> Tensor: ...  # fmt: skip
@overload
def decode_attention(
    q: Tensor, k_cache: Stored, v_cache: Stored, *, cur_pos: Positions | None = ..., mask: Tensor | None = ...,
    scale: float | None = ..., window: int | None = ..., sinks: Tensor | None = ..., softcap: float | None = ...,
    return_lse: Literal[True], **options: Unpack[DecodeOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def decode_attention(
    q: Tensor,
    k_cache: Stored,
    v_cache: Stored,
    *,
    cur_pos: Positions | None = None,
    mask: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    **options: Unpack[DecodeOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a few new tokens over a long KV cache: q [B,Hq,T,D], T = 1..8, to out [B,Hq,T,Dv].

    `k_cache` [B,Hkv,L,D] and `v_cache` [B,Hkv,L,Dv] already contain the new tokens. They have the dtype of q, or are
    float32, or `Quantized`, which the kernel dequantizes. There is no backward.

    Args:
        cur_pos: position of the last of the T tokens of each sequence, a list or a tensor on the device of q; L - 1 by
            default. Token t attends to the keys up to its own position; keys beyond cur_pos are not read. -1 skips a
            sequence: out 0, lse -inf. A device tensor is never read on the host.
        mask: boolean, or added to the scores, [B or 1, Hq or 1, T or 1, up to L]; replaces the causal mask.
        tree: boolean [T,T] or [B,T,T]; replaces the causal mask among the T new tokens.
        scale: multiplies the scores; 1 / sqrt(D) by default.
        window: a token does not attend to keys before the last `window` up to its own position, itself included.
        sinks: [Hq] scores of keys without a value.
        softcap: bounds the scores to `softcap * tanh(score / softcap)`, before `mask` and `alibi_slopes` are added.
        alibi_slopes: [Hq], adds `-slope * |token's position - key's position|` to the scores. It becomes a `mask`, in
            memory of a number per score. Excludes `key_range`.
        share_cache: the caches have batch size 1, and all sequences read them.
        max_splits: maximum number of parts that the keys of a sequence and head are split into. By default enough
            to fill the device.
        split_size: fixed number of keys per part instead. The bits of a sequence then depend on that sequence only.
        key_range: (first, end), integers [B,T] each, on the device of q; replaces the causal mask and `window`. Token t
            of sequence b attends to the keys `first[b,t] <= k < end[b,t]` up to cur_pos, as needed where the cache
            holds only a part of the sequence. Neither may decrease from token to token; only `[first[b,0], end[b,T-1])`
            is read, where all keys must be finite on a GPU. Excludes `mask`, `tree`, `window` and `share_cache`. A
            token without a key: out 0, lse -inf (or its sink).
        out_dtype: torch.float32 returns the unrounded out, for states that will be merged; the dtype of q by default.
        return_lse: also return the float32 lse [B,Hq,T], natural log.
        backend: "auto", "gluon", "gluon_gqa", "triton", "cpu", "reference". One that cannot serve the call raises
            ValueError.

    Examples:
        >>> q, k, v = torch.randn(2, 8, 1, 64), torch.randn(2, 2, 500, 64), torch.randn(2, 2, 500, 64)
        >>> out, lse = am.decode_attention(q, k, v, cur_pos=[499, -1], return_lse=True)  # -1: an empty slot
        >>> out.shape, lse.shape
        (torch.Size([2, 8, 1, 64]), torch.Size([2, 8, 1]))
        >>> bool(out[1].any()), lse[1, 0].tolist()
        (False, [-inf])
    """
    return _decode((q, k_cache, v_cache, None, cur_pos, mask), sinks, (scale, window, softcap, return_lse), options)


@overload
def paged_decode_attention(
    q: Tensor, k_pool: Stored, v_pool: Stored, block_table: Tensor, *, cur_pos: Positions, mask: Tensor | None = ...,
    scale: float | None = ..., window: int | None = ..., sinks: Tensor | None = ..., softcap: float | None = ...,
    return_lse: Literal[False] = ..., **options: Unpack[PagedDecodeOptions],
) -> Tensor: ...  # fmt: skip
@overload
def paged_decode_attention(
    q: Tensor, k_pool: Stored, v_pool: Stored, block_table: Tensor, *, cur_pos: Positions, mask: Tensor | None = ...,
    scale: float | None = ..., window: int | None = ..., sinks: Tensor | None = ..., softcap: float | None = ...,
    return_lse: Literal[True], **options: Unpack[PagedDecodeOptions],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def paged_decode_attention(
    q: Tensor,
    k_pool: Stored,
    v_pool: Stored,
    block_table: Tensor,
    *,
    cur_pos: Positions,
    mask: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
    **options: Unpack[PagedDecodeOptions],
) -> Tensor | tuple[Tensor, Tensor]:
    """`decode_attention` over a paged KV cache: k_pool [num_blocks, block_size, Hkv, D], v_pool [..., Dv].

    Position p of sequence b is in block `block_table[b, p // block_size]` at offset `p % block_size`. The table is
    int32 [B, slots], padded with -1; blocks may be in any order and shared between sequences. Slots beyond cur_pos,
    before a window or outside a `key_range` are not read. With `share_cache` the table has one row, which all sequences
    read. A latent pool of storage `fp8_ds_mla` is passed as both: the values are its features before the rope part.

    `into` is a `State` of preallocated tensors that results are written to, and that is returned: out [B,Hq,T,Dv] in
    the dtype of q or float32, lse [B,Hq,T] in float32. Strides are arbitrary except that the last dimension of out is
    contiguous, so both may be views of a message buffer.

    A block outside the pool, or a position beyond the table, is never read. On the CPU it raises ValueError. On a GPU,
    out and lse of the sequence become NaN, and a later decode call, or `check_decode_errors()`, raises the ValueError
    that names sequence, slot and value.

    Examples:
        >>> k_pool, v_pool = torch.randn(2, 8, 16, 2, 64)  # 8 blocks of 16 tokens
        >>> table = torch.tensor([[5, 0], [3, -1]], dtype=torch.int32)  # 20 and 7 tokens
        >>> q = torch.randn(2, 8, 1, 64)
        >>> out = am.paged_decode_attention(q, k_pool, v_pool, table, cur_pos=[19, 6])
        >>> k, v = (pool[[5, 0]].flatten(0, 1)[:20].transpose(0, 1)[None] for pool in (k_pool, v_pool))
        >>> torch.allclose(out[:1], am.decode_attention(q[:1], k, v), atol=1e-5)
        True
    """
    if block_table is None or cur_pos is None:
        check_tensor("block_table", block_table, "int32 [batch, slots]")
        raise ValueError("cur_pos must be given for a paged cache, got None")
    given = q, k_pool, v_pool, block_table, cur_pos, mask
    return _decode(given, sinks, (scale, window, softcap, return_lse), options)


_Given = tuple[
    Tensor, Stored, Stored, Tensor | None, Positions | None, Tensor | None, Tensor | None, KeyRange | None,
    Tensor | None,
]  # fmt: skip


class PreparedCall:
    """The options of calls with one signature, and the backend that runs them. Keeps no tensors.

    Its launches serve all calls with the signature, unless it does not `repeat` them.
    """

    def __init__(self, call: DecodeCall, backend: Backend, *, repeats: bool = True) -> None:
        tensors = ("q", "k", "v", "table", "cur_pos", "mask", "tree", "key_range", "sinks", "memo")
        self._options = {name: x for name, x in vars(call).items() if name not in tensors}
        self._dtype, self.capacity = call.q.dtype, call.capacity
        self.run = backend.prepared() if repeats else backend.run
        self.on_host = call.q.device.type == "cpu"  # where positions are free to read
        self.reads_positions = self.on_host or backend.name == "reference"

    def call(
        self, memo: dict[Any, Any] | None, q: Tensor, k: Stored, v: Stored, table: Tensor | None,
        cur_pos: Sequence[int] | Tensor | None, mask: Tensor | None, tree: Tensor | None,
        key_range: tuple[Tensor, Tensor] | None, sinks: Tensor | None,
    ) -> DecodeCall:  # fmt: skip
        """A call with this signature. Checks values, as far as the host can read them.

        With a `memo` it is one of a step, whose values have been checked.
        """
        if memo is None:
            if self.on_host or not isinstance(cur_pos, Tensor):
                cur_pos = checked_positions(cur_pos, q, self.capacity)
            if self.on_host and key_range is not None:
                checked_key_range(key_range, q)
        call = object.__new__(DecodeCall)
        vars(call).update(
            self._options, q=q if q.dtype == self._dtype else q.to(self._dtype), k=k, v=v, table=table, cur_pos=cur_pos,
            mask=mask, tree=tree[None] if tree is not None and tree.ndim == 2 else tree, key_range=key_range,
            sinks=sinks, memo=memo,
        )  # fmt: skip
        return call


_prepared: Recent[PreparedCall] = Recent()


def _decode(
    given: tuple[Tensor, Stored, Stored, Tensor | None, Positions | None, Tensor | None], sinks: Tensor | None,
    settings: tuple[float | None, int | None, float | None, bool], options: Any,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Out, or out and lse. Checks and choices that depend only on the signature of a call are made once."""
    tree = key_range = slopes = into = None
    kept: tuple[object, ...] = (_LOG.isEnabledFor(logging.INFO), *settings)
    if options:
        if "tree" in options:
            tree = options.pop("tree")
        if "key_range" in options:
            key_range = options.pop("key_range")
        if "alibi_slopes" in options:
            slopes = options.pop("alibi_slopes")
        if "into" in options and given[3] is not None:
            into = options.pop("into")
        kept += (*options, *options.values())
    tensors: _Given = (*given, tree, key_range, sinks)
    key = signature_of(*tensors, slopes, into, kept)
    try:
        known = None if key is None else _prepared.get(key)
    except TypeError:  # an option that is no number
        known = None
    if known is None:
        call, chosen = _checked(tensors, slopes, into, *settings, options)
        known = PreparedCall(call, chosen)
        if key is not None:
            _prepared.add(key, known)
    else:
        call = _with_slopes(known.call(None, *tensors), slopes)
    if known.reads_positions:
        check_positions(call)
    state = known.run(call, into)
    return (state.out, state.lse) if settings[-1] else state.out


def _checked(
    given: _Given, slopes: Tensor | None, into: State | None, scale: float | None, window: int | None,
    softcap: float | None, return_lse: bool, options: dict[str, Any],
) -> tuple[DecodeCall, Backend]:  # fmt: skip
    """The call and its backend; raises ValueError."""
    q, k, v, table, cur_pos, mask, tree, key_range, sinks = given
    check_options("decode_attention" if table is None else "paged_decode_attention", options, DecodeOptions)
    if table is not None:
        check_tensor("block_table", table, "int32 [batch, slots]")
    call = build_call(
        q, k, v, table, cur_pos=cur_pos, mask=mask, tree=tree, scale=scale, window=window, sinks=sinks,
        key_range=key_range, softcap=softcap, **{name: x for name, x in options.items() if name != "backend"},
    )  # fmt: skip
    call = _with_slopes(call, slopes)
    if into is not None:
        call = check_into(into, call, options.get("out_dtype"))
    if return_lse is not False and return_lse is not True:
        check_bool(return_lse=return_lse)  # raises
    return call, choose(call, options.get("backend", "auto"))


def _with_slopes(call: DecodeCall, slopes: Tensor | None) -> DecodeCall:
    """The call with ALiBi slopes, as a mask that is added to the scores."""
    if slopes is None:
        return call
    checked_per_head("alibi_slopes", slopes, call.q)
    if call.key_range is not None:
        raise ValueError("key_range and alibi_slopes are mutually exclusive, got both")
    keys, tokens = (torch.arange(n, device=call.q.device) for n in (call.capacity, call.q.shape[2]))
    bias = alibi_bias(slopes, call.cur_pos.long()[:, None] - (len(tokens) - 1) + tokens, keys, call.q.dtype)
    if call.mask is not None and call.mask.dtype != torch.bool:
        bias[..., : call.mask.shape[3]] += call.mask
    bias = bias.masked_fill(~reference.visible_pairs(call), -torch.inf)
    return replace(call, mask=bias, tree=None)


def alibi_bias(slopes: Tensor, positions: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """The terms that ALiBi adds to the scores of tokens at `positions` [B,T] and keys at `keys` [N]: [B,Hq,T,N]."""
    distance = (positions[:, None, :, None] - keys).abs().to(accumulation_dtype(dtype))
    return -slopes.to(distance.dtype)[:, None, None] * distance


class PagedStep:
    """`paged_decode_attention` for the layers of one step: they share a block table and positions, checked once.

    Neither may change between the calls. A layer whose shapes or options differ from those before is checked again.
    `advance` goes on to another step, whose layers are not checked again.
    """

    def __init__(self, block_table: Tensor, cur_pos: Tensor) -> None:
        self._checked: Recent[PreparedCall] = Recent()  # on the host; those on a GPU are in `_prepared`
        self.advance(block_table, cur_pos)

    def advance(self, block_table: Tensor, cur_pos: Tensor) -> None:
        """Go on to a step with a valid table and valid positions, as a cache has them, of the same dtype and device."""
        self.block_table, self.cur_pos = block_table, cur_pos
        self._memos: dict[object, tuple[KeyRange | None, dict[Any, Any]]] = {}  # what backends derive from both

    def __call__(
        self, q: Tensor, k_pool: Stored, v_pool: Stored, *, scale: float | None, window: int | None = None,
        sinks: Tensor | None = None, softcap: float | None = None, mask: Tensor | None = None,
        key_range: KeyRange | None = None, partial: bool = False, into: State | None = None, backend: str = "auto",
    ) -> State:  # fmt: skip
        """Out and lse of one layer. Arguments are the same as of `paged_decode_attention`.

        A `partial` state is one to be merged with others: out is not rounded. Otherwise only out is defined.
        """
        given: _Given = (q, k_pool, v_pool, self.block_table, self.cur_pos, mask, None, key_range, sinks)
        key: Hashable
        if q.is_cuda:
            options = (_LOG.isEnabledFor(logging.INFO), scale, window, softcap, partial, backend)
            key = signature_of(*given, None, into, options)
        else:  # no launch is repeated, and what else a backend does not depend on strides
            key = (
                q.shape, q.dtype, k_pool.shape, v_pool.shape, type(k_pool), scale, window, softcap, backend,
                sinks is None, id(mask), key_range is None, partial, self.block_table.shape[1],
                None if into is None else (into.out.dtype, into.out.shape),
            )  # fmt: skip
        prepared = _prepared if q.is_cuda else self._checked
        known = prepared.get(key)
        if known is None:
            call = build_call(
                q, k_pool, v_pool, self.block_table, cur_pos=self.cur_pos, mask=mask, tree=None, scale=scale,
                window=window, sinks=sinks, key_range=key_range, softcap=softcap,
            )  # fmt: skip
            call = replace(call, rounded=not partial) if into is None else check_into(into, call, None)
            known = PreparedCall(call, choose(call, backend), repeats=q.is_cuda)
            if q.device.type == "cpu":
                check_positions(call)
            if key is not None:
                prepared.add(key, known)
        _, memo = self._memos.setdefault((key, id(key_range)), (key_range, {}))
        return known.run(known.call(memo, *given), into)


class Reference:
    """Backend over `reference.run`."""

    name = "reference"

    def why_not(self, call: DecodeCall) -> str | None:
        """None: it serves every call."""
        return None

    def prepared(self) -> Callable[[DecodeCall, State | None], State]:
        """`run`."""
        return self.run

    def run(self, call: DecodeCall, into: State | None = None) -> State:
        """Out and lse, with every score in memory."""
        state = reference.run(call)
        return state if into is None else State(into.out.copy_(state.out), into.lse.copy_(state.lse))


# "auto" takes the first that serves a call; GluonGQA only where it is faster than Triton, which serves its calls, too.
_BACKENDS: tuple[Backend, ...] = (Cpu(), Gluon(), GluonGQA(), Triton(), Reference())
_NAMES = ("auto", *(known.name for known in _BACKENDS))


@explained_in("decode.md#backends")
def check_backend(backend: str) -> None:
    """Raises ValueError unless `backend` is \"auto\" or the name of a backend."""
    check_choice("backend", backend, _NAMES)


@explained_in("decode.md#backends")
def choose(call: DecodeCall, backend: str) -> Backend:
    """The backend for a call: by name, or the first that serves it. Raises ValueError if it cannot."""
    check_backend(backend)
    why_not = {}
    for known in _BACKENDS:
        why_not[known.name] = known.why_not(call)
        is_wanted = backend == known.name
        if backend == "auto":
            is_wanted = not isinstance(known, GluonGQA) or known.is_faster(call)
        if why_not[known.name] is None and is_wanted:
            if backend == "auto" and wants_choices(_LOG):
                cannot = "".join(f"; {name} cannot: {why}" for name, why in why_not.items() if why is not None)
                of = f"q {tuple(call.q.shape)}, {call.kv_heads} KV heads, {'paged' if call.paged else 'contiguous'}"
                log_choice(_LOG, "decode of %s, %s on %s: %s%s", of, call.q.dtype, call.q.device, known.name, cannot)
            return known
    raise ValueError(f"backend={backend!r} cannot serve this call: {why_not[backend]}")
