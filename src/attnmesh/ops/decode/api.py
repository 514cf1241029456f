"""`decode_attention` and `paged_decode_attention`: validate, then dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from attnmesh.core.state import State
from attnmesh.ops.decode import reference
from attnmesh.ops.decode.call import Backend, DecodeCall, build_call, check_into
from attnmesh.ops.decode.cpu import Cpu
from attnmesh.ops.decode.device_errors import check_positions
from attnmesh.ops.decode.triton import Triton
from attnmesh.ops.storage import Stored

Positions = Sequence[int] | Tensor
Intervals = tuple[Tensor, Tensor]


@overload
def decode_attention(
    q: Tensor,
    k_cache: Stored,
    v_cache: Stored,
    *,
    cur_pos: Positions | None = ...,
    mask: Tensor | None = ...,
    tree: Tensor | None = ...,
    scale: float | None = ...,
    window: int | None = ...,
    sinks: Tensor | None = ...,
    share_cache: bool = ...,
    max_splits: int | None = ...,
    split_size: int | None = ...,
    key_range: Intervals | None = ...,
    out_dtype: torch.dtype | None = ...,
    return_lse: Literal[False] = ...,
    backend: str = ...,
) -> Tensor: ...
@overload
def decode_attention(
    q: Tensor,
    k_cache: Stored,
    v_cache: Stored,
    *,
    cur_pos: Positions | None = ...,
    mask: Tensor | None = ...,
    tree: Tensor | None = ...,
    scale: float | None = ...,
    window: int | None = ...,
    sinks: Tensor | None = ...,
    share_cache: bool = ...,
    max_splits: int | None = ...,
    split_size: int | None = ...,
    key_range: Intervals | None = ...,
    out_dtype: torch.dtype | None = ...,
    return_lse: Literal[True],
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...
def decode_attention(
    q: Tensor,
    k_cache: Stored,
    v_cache: Stored,
    *,
    cur_pos: Positions | None = None,
    mask: Tensor | None = None,
    tree: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    share_cache: bool = False,
    max_splits: int | None = None,
    split_size: int | None = None,
    key_range: Intervals | None = None,
    out_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The attention of a few new tokens over a long cache: q [B,Hq,T,D], T = 1..8, to out [B,Hq,T,Dv].

    `k_cache` [B,Hkv,L,D] and `v_cache` [B,Hkv,L,Dv] hold the new tokens already; `Quantized` ones are dequantized in
    the kernel. `cur_pos[b]`, a list or a tensor on q's device, is the position of the last of the T tokens (all of L by
    default). Token t sees the keys up to its own position; keys past cur_pos are not read. -1 skips a sequence: out 0,
    lse -inf. A device tensor is never read on the host.

    `mask`, boolean or added to the scores, [B or 1, Hq or 1, T or 1, up to L], replaces causality among the keys up to
    cur_pos; `tree` [T,T] or [B,T,T] replaces it among the T new tokens only. `window` keeps the last so many keys up to
    a token's own position, itself among them. `sinks` [Hq] are scores of keys without a value. `share_cache`: the
    caches have a batch of 1, which all sequences read.

    `key_range`, (first, end), int32 [B,T] each on q's device, replaces causality and `window`: token t of sequence b sees
    the keys `first[b,t] <= k < end[b,t]` up to cur_pos, as it must where the cache holds only some of the sequence.
    Neither may decrease from token to token; `[first[b,0], end[b,T-1])` is read, gaps and all, and nothing else. It
    goes without `mask`, `tree`, `window` and `share_cache`. A token that sees nothing: out 0, lse -inf (or its sink).

    By default the keys are split to fill the device, at most into `max_splits` parts a sequence and head. `split_size`
    fixes the length of a split instead: then a sequence's bits depend on nothing but the sequence.
    `return_lse` adds the float32 lse [B,Hq,T], natural log. `out_dtype` torch.float32 leaves out as it was summed,
    for states that are yet to be merged; by default it is q's. There is no backward.
    `backend` is "auto", "triton", "cpu" or "reference"; one that cannot serve the call raises ValueError.
    """
    call = build_call(
        q,
        k_cache,
        v_cache,
        None,
        cur_pos=cur_pos,
        mask=mask,
        tree=tree,
        scale=scale,
        window=window,
        sinks=sinks,
        share_cache=share_cache,
        max_splits=max_splits,
        split_size=split_size,
        key_range=key_range,
        out_dtype=out_dtype,
    )
    return _run(call, backend, return_lse)


@overload
def paged_decode_attention(
    q: Tensor,
    k_pool: Stored,
    v_pool: Stored,
    block_table: Tensor,
    *,
    cur_pos: Positions,
    mask: Tensor | None = ...,
    tree: Tensor | None = ...,
    scale: float | None = ...,
    window: int | None = ...,
    sinks: Tensor | None = ...,
    share_cache: bool = ...,
    max_splits: int | None = ...,
    split_size: int | None = ...,
    key_range: Intervals | None = ...,
    out_dtype: torch.dtype | None = ...,
    into: State | None = ...,
    return_lse: Literal[False] = ...,
    backend: str = ...,
) -> Tensor: ...
@overload
def paged_decode_attention(
    q: Tensor,
    k_pool: Stored,
    v_pool: Stored,
    block_table: Tensor,
    *,
    cur_pos: Positions,
    mask: Tensor | None = ...,
    tree: Tensor | None = ...,
    scale: float | None = ...,
    window: int | None = ...,
    sinks: Tensor | None = ...,
    share_cache: bool = ...,
    max_splits: int | None = ...,
    split_size: int | None = ...,
    key_range: Intervals | None = ...,
    out_dtype: torch.dtype | None = ...,
    into: State | None = ...,
    return_lse: Literal[True],
    backend: str = ...,
) -> tuple[Tensor, Tensor]: ...
def paged_decode_attention(
    q: Tensor,
    k_pool: Stored,
    v_pool: Stored,
    block_table: Tensor,
    *,
    cur_pos: Positions,
    mask: Tensor | None = None,
    tree: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    sinks: Tensor | None = None,
    share_cache: bool = False,
    max_splits: int | None = None,
    split_size: int | None = None,
    key_range: Intervals | None = None,
    out_dtype: torch.dtype | None = None,
    into: State | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """`decode_attention` over a pool of blocks: k_pool [num_blocks, block_size, Hkv, D], v_pool [..., Dv].

    Position p of sequence b lies in block `block_table[b, p // block_size]` at `p % block_size`. The table is int32
    [B, slots], padded with -1, blocks in any order and shared at will; slots past cur_pos are not read, nor are those
    that a window has left behind or a `key_range` leaves out. With `share_cache` the table has one row, which all read.

    `into` is where results are to lie, and what is returned: out [B,Hq,T,Dv] in q's dtype or float32, lse [B,Hq,T] in
    float32, strided at will but for out's last dimension. So they may be parts of a message, for one.

    A table entry outside the pool, or a position past the table, is never followed. On the CPU it raises ValueError.
    On a GPU the sequence's out and lse are NaN, and the ValueError, which names sequence, slot and value, comes from
    the next decode call that finds the report, or at once from `check_decode_errors()`.
    """
    call = build_call(
        q, k_pool, v_pool, block_table, cur_pos=cur_pos, mask=mask, tree=tree, scale=scale, window=window, sinks=sinks,
        share_cache=share_cache, max_splits=max_splits, split_size=split_size, key_range=key_range, out_dtype=out_dtype,
    )  # fmt: skip
    if into is not None:
        call = check_into(into, call, out_dtype)
    return _run(call, backend, return_lse, into)


def _run(call: DecodeCall, backend: str, return_lse: bool, into: State | None = None) -> Tensor | tuple[Tensor, Tensor]:
    chosen = choose(call, backend)
    if call.q.device.type == "cpu" or chosen.name == "reference":
        check_positions(call)
    state = chosen.run(call, into)
    return (state.out, state.lse) if return_lse else state.out


class Reference:
    """The specification, as a backend."""

    name = "reference"

    def refusal(self, call: DecodeCall) -> str | None:
        """Serves everything."""
        return None

    def run(self, call: DecodeCall, into: State | None = None) -> State:
        """Every score in memory."""
        state = reference.run(call)
        return state if into is None else State(into.out.copy_(state.out), into.lse.copy_(state.lse))


_BACKENDS: tuple[Backend, ...] = (Cpu(), Triton(), Reference())


def check_backend(backend: str) -> None:
    """Raise ValueError unless there is a backend of this name."""
    names = ("auto", *(known.name for known in _BACKENDS))
    if backend not in names:
        raise ValueError(f"backend must be one of {', '.join(names)}, got {backend!r}")


def choose(call: DecodeCall, backend: str) -> Backend:
    """The backend for a call: by name, or the first that serves it. One that cannot raises ValueError."""
    check_backend(backend)
    refusals = {}
    for known in _BACKENDS:
        refusals[known.name] = known.refusal(call)
        if refusals[known.name] is None and backend in ("auto", known.name):
            return known
    raise ValueError(f"backend={backend!r} cannot serve this call: {refusals[backend]}")
