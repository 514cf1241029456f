"""Decode on the CPU: torch's flash kernel over the rows of a kv head, a few equal parts of the keys at a time.

The query heads of one kv head and their T tokens are rows of one product, so a key is read once for all of them. A
float32 cache is read where it lies; blocks of a pool and narrower numbers are first gathered and widened, as many keys
at a time as stay in the cores' caches. Each sequence costs the keys it sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from math import gcd

import torch
from torch import Tensor

from attnmesh.core.state import State
from attnmesh.ops.decode.call import DecodeCall
from attnmesh.ops.decode.cpu_keys import KeysAndValues, Piece, Sight, pieces

_MOST_PARTS = 64  # states that wait to be merged: memory stays small beside the cache however short the splits are
_LEAST_PART = 256  # keys that are worth a task of their own
_REUSED_PART = 512  # keys of a head that stay in a core's cache while its few rows come by one after the other


class Cpu:
    """Backend on torch's CPU kernels."""

    name = "cpu"

    def refusal(self, call: DecodeCall) -> str | None:
        """Why it cannot serve this call; None if it can."""
        return None if call.q.device.type == "cpu" else f"it computes on the CPU, q is on {call.q.device}"

    def run(self, call: DecodeCall, into: State | None = None) -> State:
        """Out and lse; sequences that are skipped cost nothing."""
        whole = call.room() if into is None else into
        whole.out.zero_()
        whole.lse.fill_(-torch.inf)
        keys = KeysAndValues(call)
        q = keys.query(call.q, call.scale)
        for sequences, last in _together(call, keys):
            part = _attention(call, keys, q, sequences, last)
            whole.out[sequences.start : sequences.stop] = part.out
            whole.lse[sequences.start : sequences.stop] = part.lse
        return whole


def _together(call: DecodeCall, keys: KeysAndValues) -> Iterator[tuple[range, int]]:
    """Sequences that are computed together, and the last position they have in common; they see the same keys."""
    at = 0
    ends = call.cur_pos.tolist()
    seen = ends if call.key_range is None else zip(ends, *(x.tolist() for x in call.key_range), strict=True)
    for _, members in groupby(seen):
        last = ends[at]
        sequences = range(at, at := at + len(list(members)))
        if last < 0:
            continue
        if _alone(call, keys, len(sequences)):
            yield from ((range(one, one + 1), last) for one in sequences)
        else:
            yield sequences, last


def _alone(call: DecodeCall, keys: KeysAndValues, count: int) -> bool:
    if call.splits.size is not None:
        return True  # what else is in the batch may not show in a sequence's bits
    if call.shared:
        return False  # more rows of the same product
    if not keys.in_place or call.mask is not None or call.tree is not None or one_by_one(call.group * call.q.shape[2]):
        return True
    tasks, threads = count * call.kv_heads, torch.get_num_threads()
    return tasks % threads != 0 and tasks < 4 * threads  # split, the keys of each keep all threads busy


def _attention(call: DecodeCall, keys: KeysAndValues, q: Tensor, sequences: range, last: int) -> State:
    """The state of sequences with one last position: out [n, Hq, T, Dv], lse [n, Hq, T]."""
    key_range = Sight(call, sequences, last)
    rows = key_range.as_rows(q[sequences.start : sequences.stop])
    states: list[State] = []
    waiting = 0
    for piece in pieces(key_range.span, key_range.plain, *_cut(call, keys, key_range, rows)):
        states.append(_piece_state(keys, key_range, rows, piece))
        waiting += piece.parts
        if waiting >= _MOST_PARTS:
            states, waiting = [merged(states, len(key_range.owners))], 1
    if not states:  # a mask ends before the window begins, or a key_range is empty
        states = [State.identity(rows.shape, dtype=rows.dtype)]
    out, lse = merged(states, len(key_range.owners))
    out = keys.scaled_out(out[..., : call.value_dim] if keys.padded else out)
    return _with_sinks(call, State(key_range.from_rows(out), key_range.from_rows(lse.unsqueeze(-1)).squeeze(-1)))


def _piece_state(keys: KeysAndValues, key_range: Sight, q: Tensor, piece: Piece) -> State:
    """The states of a piece's equal parts, [parts, Hkv, R, ...], or of one part of several sequences, [n, ...]."""
    k, v = keys.read(key_range.owners, piece.first, piece.end)
    if piece.plain:
        return attend(q, k, v, piece.parts)
    bias = key_range.bias(piece.first, piece.end, q.dtype)  # [n, Hkv or 1, R, N]
    seen = bias > -torch.inf
    if key_range.may_have_gaps:
        used = seen.flatten(0, 2).any(0)
        if not used.all():  # what nobody sees may hold anything, NaN too, and the kernel would add -inf to it
            chosen = used.nonzero().squeeze(1)
            if not len(chosen):
                return State.identity(q.shape, dtype=q.dtype)
            k, v, bias = k.index_select(2, chosen), v.index_select(2, chosen), bias.index_select(3, chosen)
    out, lse = attend(q, k, v, 1, bias)
    blind = ~seen.any(-1)  # the kernel gives such a row an lse of 0
    return State(out.masked_fill(blind.unsqueeze(-1), 0.0), lse.masked_fill(blind, -torch.inf))


def _cut(call: DecodeCall, keys: KeysAndValues, key_range: Sight, q: Tensor) -> tuple[int, int, int]:
    """How many keys a part has, the position that parts are counted from, and how many go into one call."""
    if call.splits.size is not None:  # nothing here depends on the batch or on the threads
        size = min(call.splits.size, keys.chunk)
        return size, 0, _MOST_PARTS if keys.in_place else keys.chunk // size
    threads, tasks = torch.get_num_threads(), q.shape[0] * q.shape[1] * -(-q.shape[2] // ROWS_A_TASK)
    parts = 1 if q.shape[0] > 1 else threads // gcd(tasks, threads)
    length = len(key_range.plain) if keys.in_place and key_range.plain else keys.chunk
    parts = max(1, min(parts, length // _LEAST_PART))
    if one_by_one(q.shape[2]):
        parts = max(parts, length // _REUSED_PART)
    parts = min(parts, call.splits.most or parts)
    if keys.in_place and key_range.plain:
        return length // parts, key_range.plain.start, _MOST_PARTS
    return length // parts, 0, parts


def _with_sinks(call: DecodeCall, state: State) -> State:
    """A sink is one more key whose value is 0."""
    if call.sinks is None:
        return state
    lse = torch.logaddexp(state.lse, call.sinks.to(state.lse.dtype)[:, None])
    share = torch.exp(state.lse - torch.where(lse == -torch.inf, 0.0, lse))
    return State(state.out * share.unsqueeze(-1), lse)


ROWS_A_TASK = 32  # query rows that one task of the kernel takes; more make another task, which reads the keys again
_FEW = 3


def one_by_one(rows: int) -> bool:
    """Whether the rows of a kv head go through the kernel one after the other rather than as one product.

    Its matrix-vector product reads keys where they lie, its product of matrices copies them into an order of its own
    first, which pays from four rows on.
    """
    return 1 < rows <= _FEW


def attend(q: Tensor, k: Tensor, v: Tensor, parts: int, bias: Tensor | None = None) -> State:
    """Rows q [n, Hkv, R, D], scaled, against k, v [n, Hkv, N, D]: out [n, Hkv, R, D] and lse [n, Hkv, R].

    Or the keys of one sequence in equal parts: then these take the place of n. The kernel's tasks are its batch, its
    heads and its blocks of rows, never blocks of keys, so parts in the batch are what lets threads share a head.
    """
    _, heads, rows, width = q.shape
    if parts > 1:
        k, v = (x[0].unflatten(1, (parts, -1)).transpose(0, 1) for x in (k, v))
        q = q.expand(parts, -1, -1, -1)
    apart = bias is None and one_by_one(rows)
    if apart:
        q = q.reshape(-1, heads * rows, 1, width)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=bias, scale=1.0
    )
    if apart:
        out, lse = out.reshape(-1, heads, rows, width), lse.reshape(-1, heads, rows)
    return State(out, lse)


def merged(states: list[State], n: int) -> State:
    """The state [n, ...] over all keys, of n sequences in one part each or of one sequence in parts, in their order."""
    if len(states) == 1 and states[0].lse.shape[0] == n:
        return states[0]
    joined = torch.cat if n == 1 else torch.stack
    out, lse = (joined(parts) for parts in zip(*states, strict=True))
    # A row that no part saw has a top and a total of nothing; any other total is at least 1, the largest part's own.
    top = lse.amax(0, keepdim=n == 1).clamp(min=torch.finfo(lse.dtype).min)
    weight = torch.exp(lse - top)
    total = weight.sum(0, keepdim=n == 1)
    weight = weight / total.clamp(min=1.0)
    # A product will do for parts that saw nothing: their out is 0, never NaN.
    return State((out * weight.unsqueeze(-1)).sum(0, keepdim=n == 1), top + torch.log(total))
