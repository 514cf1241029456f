"""Decode on the CPU: torch's flash kernel over the rows of one kv head, a few equal parts of the keys at a time.

The query heads of one kv head and their T tokens are the rows of one product, so each key is read once for all of them.
A float32 cache is read in place. Blocks of a pool and narrower dtypes are first gathered and widened, few enough keys
at a time to stay in the cores' caches. The cost of a sequence is proportional to its visible keys.

At the sizes of a decode step each torch call takes as long as reading a hundred keys. So one token over keys that are
adjacent in a pool of blocks is a single call of the kernel, without a copy (`AdjacentKeys`), and the short caches of a
batch are gathered for a single call (`ShortKeys`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import groupby
from math import gcd
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmesh.core.state import State, accumulation_dtype, add_sinks, merge_stacked
from attnmesh.ops.decode.call import DecodeCall, Splits
from attnmesh.ops.decode.cpu_keys import CacheReader, KeyPart, VisibleKeys, split_keys

_kernel = torch._scaled_dot_product_flash_attention_for_cpu
_MIN_PART = 256  # keys that are worth a separate task
_MAX_SINGLE_ROWS = 3
_MAX_PENDING = 64  # states waiting to be merged: memory stays small beside the cache however short the splits are
_CACHED_PART = 512  # keys of a head that stay in a core's cache while its few rows are processed one by one
_SHORT_BYTES = 512 << 10  # keys and values of a sequence, whose copy costs less than a call of its own
_ROWS_PER_TASK = 32  # query rows that one task of the kernel takes; more rows read the keys again


class Cpu:
    """Backend on torch's CPU flash kernel."""

    name = "cpu"

    def why_not(self, call: DecodeCall) -> str | None:
        """The reason why this backend cannot serve the call; None if it can."""
        if call.q.device.type != "cpu":
            return f"it computes on the CPU, q is on {call.q.device}"
        if call.softcap is not None:
            return "torch's flash kernel takes no softcap"
        return None

    def prepared(self) -> Callable[[DecodeCall, State | None], State]:
        """`run`."""
        return self.run

    def run(self, call: DecodeCall, into: State | None = None) -> State:
        """Out and lse. Skipped sequences cost nothing."""
        memo = {} if call.memo is None else call.memo
        if "short" not in memo:
            memo["short"] = short_keys(call)
        if memo["short"] is not None:
            return _short(call, memo["short"], into)
        if "adjacent" not in memo:
            memo["adjacent"] = adjacent_keys(call)
        if memo["adjacent"] is not None:
            return _adjacent(call, memo["adjacent"], into)
        cache = CacheReader(call)
        q = cache.query(call.q, call.scale)
        if "visible" not in memo:
            memo["visible"] = [(some, VisibleKeys(call, some, last)) for some, last in _batches(call, cache)]
        batches = memo["visible"]
        if into is None and len(batches) == 1 and len(batches[0][0]) == len(q):
            out, lse = _attention(call, cache, q, *batches[0])
            return State(out.to(call.out_dtype), lse)
        whole = call.empty_state() if into is None else into
        if sum(len(sequences) for sequences, _ in batches) < len(q):
            whole.out.zero_()
            whole.lse.fill_(-torch.inf)
        for sequences, visible in batches:
            part = _attention(call, cache, q, sequences, visible)
            whole.out[sequences.start : sequences.stop] = part.out
            whole.lse[sequences.start : sequences.stop] = part.lse
        return whole


class ShortKeys(NamedTuple):
    """The keys of several sequences of a pool, padded to the longest with the first key of each.

    `tokens` [B * N] are counted in the pool. `bias` [B, 1, 1, N] hides the padding. All layers of a step are `gathered`
    into the same memory, [2, Hkv, B * N, D], which stays in the cores' caches.
    """

    tokens: Tensor
    bias: Tensor
    gathered: Tensor


def short_keys(call: DecodeCall) -> ShortKeys | None:
    """The keys of all sequences, if a copy of them for one call of the kernel costs less than a call for each."""
    q, k, v, table = call.q, call.k, call.v, call.table
    if (
        table is None or table.shape[0] < q.shape[0] or q.shape[0] < 2 or q.shape[2] > 1 or call.mask is not None
        or call.tree is not None or call.splits != Splits() or not isinstance(k, Tensor) or not isinstance(v, Tensor)
        or k.shape != v.shape or not (_has_even_strides(k) and _has_even_strides(v))
    ):  # fmt: skip
        return None
    tasks, threads = q.shape[0] * k.shape[2], torch.get_num_threads()
    if tasks % threads and tasks < 4 * threads:
        return None
    first, end = _key_ranges(call)
    counts = end - first
    longest = int(counts.max())
    dtype = accumulation_dtype(q.dtype)
    if int(counts.min()) < 1 or 2 * longest * k.shape[2] * k.shape[3] * dtype.itemsize > _SHORT_BYTES:
        return None
    index = torch.arange(longest, device="cpu")
    hidden = index >= counts[:, None]
    positions = first[:, None] + torch.where(hidden, 0, index)
    blocks = table[: len(q)].long().gather(1, positions // k.shape[1])
    bias = torch.zeros(hidden.shape, dtype=dtype, device="cpu").masked_fill_(hidden, -torch.inf)
    tokens = (blocks * k.shape[1] + positions % k.shape[1]).view(-1)
    return ShortKeys(tokens, bias[:, None, None], k.new_empty(2, k.shape[2], len(tokens), k.shape[3]))


def _key_ranges(call: DecodeCall) -> tuple[Tensor, Tensor]:
    """The keys `first <= key < end` that the only token of each sequence attends to, int64 [B] each."""
    end = call.cur_pos.long() + 1
    first = torch.zeros_like(end) if call.window is None else (end - call.window).clamp(min=0)
    if call.key_range is None:
        return first, end
    own_first, own_end = (x[:, 0].long() for x in call.key_range)
    return own_first.clamp(min=0), torch.minimum(own_end, end)


def _short(call: DecodeCall, keys: ShortKeys, into: State | None) -> State:
    assert isinstance(call.k, Tensor)
    assert isinstance(call.v, Tensor)
    q, dtype = call.q, keys.bias.dtype
    batch, heads, _, width = q.shape
    for pool, gathered in zip((call.k, call.v), keys.gathered, strict=True):
        torch.index_select(pool.permute(2, 0, 1, 3).flatten(1, 2), 1, keys.tokens, out=gathered)
    k, v = keys.gathered.to(dtype).unflatten(2, (batch, -1)).transpose(1, 2)
    rows = q.to(dtype).contiguous()
    if call.group > _MAX_SINGLE_ROWS:
        rows = rows.view(batch, k.shape[1], -1, width)
    out, lse = _kernel(rows, k, v, 0.0, False, attn_mask=keys.bias, scale=call.scale)
    state = State(out.reshape(batch, heads, 1, width), lse.reshape(batch, heads, 1))
    if call.sinks is not None:
        state = add_sinks(state, call.sinks[:, None])
    if into is not None:
        return State(into.out.copy_(state.out), into.lse.copy_(state.lse))
    return State(state.out.to(call.out_dtype), state.lse)


@dataclass(frozen=True)
class AdjacentKeys:
    """The keys of one sequence: `parts` parts of `size` tokens each, which begin `step` tokens apart.

    Parts let the threads share a kv head. All have one size, so they may overlap: `bias` hides from each part the keys
    that the part before it has.
    """

    begin: int  # the first token, counted in the pool
    size: int
    step: int
    parts: int
    together: bool  # the query heads of a kv head are the rows of one product
    bias: Tensor | None

    @classmethod
    def of(cls, begin: int, count: int, parts: int, together: bool, dtype: torch.dtype) -> AdjacentKeys:
        """`count` keys from token `begin` of the pool on."""
        if parts == 1:
            return cls(begin, count, 0, 1, together, None)
        size = -(-count // parts)
        while (count - size) % (parts - 1):
            size += 1
        step = (count - size) // (parts - 1)
        bias = None
        if step < size:
            bias = torch.zeros(parts, 1, 1, size, dtype=dtype, device="cpu")
            bias[1:, ..., : size - step] = -torch.inf
        return cls(begin, size, step, parts, together, bias)

    def state(self, q: Tensor, k: Tensor, v: Tensor, scale: float, *, needs_lse: bool) -> State:
        """Out [1, Hq, 1, D] and lse [1, Hq, 1] of q [1, Hq, 1, D] over pools k and v [blocks, block_size, Hkv, D].

        Without `needs_lse` the lse is undefined.
        """
        shape = q.shape
        rows = q.reshape(1, k.shape[2], -1, shape[3]) if self.together else q
        keys, values = self._in_pool(k), self._in_pool(v)
        if self.parts == 1 and not needs_lse:  # the same kernel, by a shorter way
            out = F.scaled_dot_product_attention(rows, keys, values, scale=scale, enable_gqa=not self.together)
            return State(out.view(shape) if self.together else out, out)
        if self.parts > 1:
            rows = rows.expand(self.parts, -1, -1, -1)
        out, lse = _kernel(rows, keys, values, 0.0, False, attn_mask=self.bias, scale=scale)
        if self.parts > 1:
            out = (out * torch.softmax(lse, 0).unsqueeze(-1)).sum(0)
            lse = lse.logsumexp(0) if needs_lse else lse[0]
        return State(out.reshape(shape), lse.reshape(shape[:3]))

    def _in_pool(self, pool: Tensor) -> Tensor:
        """The keys or values of each part and head, [parts, Hkv, size, D], in place."""
        _, token, head, _ = pool.stride()
        return pool.as_strided(
            (self.parts, pool.shape[2], self.size, pool.shape[3]), (self.step * token, head, token, 1),
            pool.storage_offset() + self.begin * token,
        )  # fmt: skip


def adjacent_keys(call: DecodeCall) -> list[AdjacentKeys] | None:
    """The keys of each sequence, if these states are all that a call needs; else None."""
    q, k, v, table = call.q, call.k, call.v, call.table
    if (
        table is None or table.shape[0] < q.shape[0] or q.shape[2] > 1 or call.mask is not None or call.tree is not None
        or call.splits.size is not None or not isinstance(k, Tensor) or not isinstance(v, Tensor)
        or k.dtype != torch.promote_types(q.dtype, torch.float32) or k.shape != v.shape
        or not (_has_even_strides(k) and _has_even_strides(v))
    ):  # fmt: skip
        return None
    _, block_size, kv_heads, width = k.shape
    threads = torch.get_num_threads()
    # One by one, rows take the kernel's matrix-vector product, which is faster if the keys of a head are adjacent.
    together = q.shape[1] // kv_heads > _MAX_SINGLE_ROWS or k.stride(1) > width
    tasks = kv_heads if together else q.shape[1]
    wanted = 1 if tasks >= 2 * threads else threads // gcd(tasks, threads)  # merging parts costs more than uneven tasks
    found = []
    for sequence, last in enumerate(call.cur_pos.tolist()):
        first, end = 0 if call.window is None else max(0, last + 1 - call.window), last + 1
        if call.key_range is not None:
            first, end = max(0, int(call.key_range[0][sequence])), min(end, int(call.key_range[1][sequence]))
        if end <= first:
            return None
        slot = first // block_size
        blocks = table[sequence, slot : -(-end // block_size)].tolist()
        if blocks != list(range(blocks[0], blocks[0] + len(blocks))):
            return None
        parts = min(wanted, (end - first) // _MIN_PART, call.splits.max_count or wanted)
        begin = first + (blocks[0] - slot) * block_size
        found.append(AdjacentKeys.of(begin, end - first, max(1, parts), together, k.dtype))
    return found or None  # a rank may have no sequence


def _has_even_strides(pool: Tensor) -> bool:
    """Whether the tokens of adjacent blocks are equally far apart, and the numbers of a token's head adjacent."""
    return pool.stride(0) == pool.shape[1] * pool.stride(1) and (pool.stride(3) == 1 or pool.shape[3] == 1)


def _adjacent(call: DecodeCall, keys: list[AdjacentKeys], into: State | None) -> State:
    assert isinstance(call.k, Tensor)
    assert isinstance(call.v, Tensor)
    needs_lse = into is not None or not call.rounded or call.sinks is not None or call.memo is None  # no step
    q = call.q if call.q.dtype == call.k.dtype else call.q.to(call.k.dtype)
    if q.stride(3) != 1 and q.shape[3] > 1:
        q = q.contiguous()
    sequences = (q,) if len(keys) == 1 else q.split(1)
    states = [
        own.state(query, call.k, call.v, call.scale, needs_lse=needs_lse)
        for own, query in zip(keys, sequences, strict=True)
    ]
    if call.sinks is not None:
        states = [add_sinks(state, call.sinks[:, None]) for state in states]
    if into is not None:
        for sequence, state in enumerate(states):
            into.out[sequence] = state.out[0]
            into.lse[sequence] = state.lse[0]
        return into
    out, lse = states[0] if len(states) == 1 else map(torch.cat, zip(*states, strict=True))
    return State(out.to(call.dtype) if call.rounded else out, lse)  # computed in the accumulation dtype


def _batches(call: DecodeCall, cache: CacheReader) -> Iterator[tuple[range, int]]:
    """Consecutive sequences that are computed together, with the last position that they share."""
    at = 0
    ends = call.cur_pos.tolist()
    visible = ends if call.key_range is None else zip(ends, *(x.tolist() for x in call.key_range), strict=True)
    for _, members in groupby(visible):
        last = ends[at]
        sequences = range(at, at := at + len(list(members)))
        if last < 0:
            continue
        if _one_sequence_at_a_time(call, cache, len(sequences)):
            yield from ((range(one, one + 1), last) for one in sequences)
        else:
            yield sequences, last


def _one_sequence_at_a_time(call: DecodeCall, cache: CacheReader, count: int) -> bool:
    if call.splits.size is not None:
        return True  # the bits of a sequence must not depend on the rest of the batch
    if call.shared:
        return False  # more rows of the same product
    rows = call.group * call.q.shape[2]
    if not cache.in_place or call.mask is not None or call.tree is not None or _row_by_row(rows, call.paged):
        return True
    tasks, threads = count * call.kv_heads, torch.get_num_threads()
    return tasks % threads != 0 and tasks < 4 * threads  # split, the keys of each sequence keep all threads busy


def _attention(call: DecodeCall, cache: CacheReader, q: Tensor, sequences: range, visible: VisibleKeys) -> State:
    """The state of sequences with the same last position: out [n, Hq, T, Dv], lse [n, Hq, T]."""
    rows = visible.as_rows(q[sequences.start : sequences.stop])
    states: list[State] = []
    pending = 0
    parts = visible.parts
    if parts is None:
        parts = list(split_keys(visible.keys, visible.unmasked, *_split_sizes(call, cache, visible, rows)))
        visible.parts = parts
    for part in parts:
        states.append(_part_state(cache, visible, rows, part))
        pending += part.parts
        if pending >= _MAX_PENDING:
            states, pending = [merge_stacked(states, len(visible.owners))], 1
    if not states:  # a mask that ends before the window begins, or an empty key_range
        states = [State.identity(rows.shape, dtype=rows.dtype, device=rows.device)]
    out, lse = merge_stacked(states, len(visible.owners))
    out = cache.scaled_out(out[..., : call.value_dim] if cache.padded else out)
    state = State(visible.from_rows(out), visible.from_rows(lse.unsqueeze(-1)).squeeze(-1))
    return state if call.sinks is None else add_sinks(state, call.sinks[:, None])


def _part_state(cache: CacheReader, visible: VisibleKeys, q: Tensor, part: KeyPart) -> State:
    """The states of equal parts of the keys, [parts, Hkv, R, ...], or of one part of several sequences, [n, ...]."""
    k, v = cache.read(visible.owners, part.first, part.end)
    if part.unmasked:
        return _flash(q, k, v, part.parts, row_by_row=_row_by_row(q.shape[2], cache.paged))
    bias = visible.bias(part.first, part.end, q.dtype)  # [n, Hkv or 1, R, N]
    allowed = bias > -torch.inf
    if visible.may_have_gaps:
        used = allowed.flatten(0, 2).any(0)
        if not used.all():  # keys visible to no row may hold NaN, to which the kernel would add -inf
            chosen = used.nonzero().squeeze(1)
            if not len(chosen):
                return State.identity(q.shape, dtype=q.dtype, device=q.device)
            k, v, bias = k.index_select(2, chosen), v.index_select(2, chosen), bias.index_select(3, chosen)
    out, lse = _flash(q, k, v, 1, bias)
    empty = ~allowed.any(-1)  # the kernel gives such a row an lse of 0
    return State(out.masked_fill(empty.unsqueeze(-1), 0.0), lse.masked_fill(empty, -torch.inf))


def _split_sizes(call: DecodeCall, cache: CacheReader, visible: VisibleKeys, q: Tensor) -> tuple[int, int, int]:
    """Keys per part, the position that parts are counted from, and the maximum number of parts per kernel call."""
    if call.splits.size is not None:  # nothing here depends on the batch or on the number of threads
        size = min(call.splits.size, cache.chunk)
        return size, 0, _MAX_PENDING if cache.in_place else cache.chunk // size
    threads, tasks = torch.get_num_threads(), q.shape[0] * q.shape[1] * -(-q.shape[2] // _ROWS_PER_TASK)
    parts = 1 if q.shape[0] > 1 else threads // gcd(tasks, threads)
    length = len(visible.unmasked) if visible.unmasked else cache.chunk
    length = length if cache.in_place else min(length, cache.chunk)
    parts = max(1, min(parts, length // _MIN_PART))
    if _row_by_row(q.shape[2], call.paged):
        parts = max(parts, length // _CACHED_PART)
    parts = min(parts, call.splits.max_count or parts)
    if visible.unmasked:
        return length // parts, visible.unmasked.start, _MAX_PENDING if cache.in_place else parts
    return length // parts, 0, parts


def _row_by_row(rows: int, paged: bool) -> bool:
    """Whether the rows of a kv head go through the kernel one by one rather than as one product.

    The kernel's matrix-vector product reads keys in place. Its matrix product first copies them into its own layout,
    which pays off from four rows on, and from two in a pool, where the keys of a head are not adjacent.
    """
    return 1 < rows <= _MAX_SINGLE_ROWS and not paged


def _flash(
    q: Tensor, k: Tensor, v: Tensor, parts: int, bias: Tensor | None = None, *, row_by_row: bool = False
) -> State:
    """Out [n, Hkv, R, D] and lse [n, Hkv, R] of rows q [n, Hkv, R, D], already scaled, over k, v [n, Hkv, N, D].

    With `parts` > 1, the keys of one sequence are cut into equal parts, which take the place of n. The kernel's tasks
    are batch entries, heads and blocks of rows, never blocks of keys: parts in the batch let threads share a head.
    """
    _, heads, rows, width = q.shape
    if parts > 1:
        k, v = (x[0].unflatten(1, (parts, -1)).transpose(0, 1) for x in (k, v))
        q = q.expand(parts, -1, -1, -1)
    if row_by_row:
        q = q.reshape(-1, heads * rows, 1, width)
    out, lse = _kernel(q, k, v, 0.0, False, attn_mask=bias, scale=1.0)
    if row_by_row:
        out, lse = out.reshape(-1, heads, rows, width), lse.reshape(-1, heads, rows)
    return State(out, lse)
