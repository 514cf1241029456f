"""The indexer's exact top-k, in Triton: scores are streamed through a workspace that a few rows fit in.

One launch does both halves. Programs draw tickets. The work of step t is to score the rows of group t, some keys a
ticket, then to select from the rows of group t - lag (here 1)::

    tickets   score 0 | score 1 | select 0 | score 2 | select 1 | score 3 | select 2 | ...
    workspace   A         B                    C                    A

A program waits only for tickets that were drawn before its own: a selection for the scores of its group, scores for
the selection that last read their part of the workspace. Whoever holds an earlier ticket is running, so all goes on
however few programs run at a time. While some select, the others keep the matrix units busy.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.ops.sparse.triton_indexer import (
    SPAN,
    IndexerTiles,
    check_inputs,
    finished,
    head_sum,
    head_tile,
    load_queries,
    padded,
    pick_topk_tiles,
    products,
)

# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False


_SHARE_OF_MEMORY = 0.09  # of inputs and outputs: what the workspace may take
_LEAST_MEMORY = 4 << 20
_MOST_CANDIDATES = 8192  # in registers: a top-k of more than 4096 is selected more slowly


class Best(NamedTuple):
    """The best keys of every row in ascending order, then -1; their scores, then -inf; and how many."""

    indices: Tensor
    scores: Tensor
    length: Tensor


def topk(
    iq: Tensor,
    ik: Tensor,
    w: Tensor,
    topk: int,
    lo: Tensor,
    hi: Tensor,
    *,
    scale: float,
    relu: bool,
    tiles: IndexerTiles | None = None,
    span: int = SPAN,
    block: int | None = None,
    workspace: int | None = None,
    programs: int | None = None,
) -> Best:
    """The `topk` best keys lo[i] <= j < hi[i] of every row i; of equal scores the lowest key wins.

    iq [s_q, heads, d], ik [s_kv, d], w [s_q, heads]; lo and hi int32 [s_q]. A key whose score is NaN or -inf is never
    chosen. `span` keys are scored by one program at a time; `workspace` is how many bytes the scores may take. The
    result has the same bits whatever the tiles, the span, the workspace and the number of programs.
    """
    check_inputs(iq, ik, w)
    (s_q, heads, width), s_kv = iq.shape, ik.shape[0]
    indices = torch.empty(s_q, topk, dtype=torch.int32, device=iq.device)
    scores = torch.empty(s_q, topk, dtype=torch.float32, device=iq.device)
    length = torch.empty(s_q, dtype=torch.int32, device=iq.device)
    if s_q == 0:
        return Best(indices, scores, length)
    tiles = tiles or pick_topk_tiles(iq, s_kv)
    span = max(tiles.keys, span // tiles.keys * tiles.keys)
    block = block or min(_MOST_CANDIDATES, max(1024, 2 * int(triton.next_power_of_2(topk))))
    if workspace is None:
        tensors = (iq, ik, w, indices, scores, length)
        workspace = max(_LEAST_MEMORY, int(_SHARE_OF_MEMORY * sum(x.numel() * x.element_size() for x in tensors)))
    row_len = -(-max(s_kv, 1) // tiles.keys) * tiles.keys
    groups, items = -(-s_q // tiles.rows), -(-s_kv // span)
    ring = max(2, min(workspace // (4 * tiles.rows * (row_len + 2 * block)), groups))
    if programs is None:
        programs = min(_resident(iq.device), groups * (items + tiles.rows))
    # Whoever selects should find the scores ready: what is drawn just before is still being computed.
    lag = min(ring - 1, -(-programs // (items + tiles.rows)) + 1)
    room = torch.empty(ring * tiles.rows, row_len + 2 * block, dtype=torch.float32, device=iq.device)
    counters = torch.zeros(1 + 2 * groups, dtype=torch.int32, device=iq.device)
    with torch.cuda.device_of(iq):
        _topk_kernel[(programs,)](
            iq, iq.stride()[:2], ik, ik.stride(0), w, w.stride(), lo, hi, indices, scores, length,
            room, room.view(torch.int32), counters,
            s_q, s_kv, heads, topk, scale, row_len, groups, items, ring, lag, span,
            RELU=relu, KEYS=tiles.keys, ROWS=tiles.rows, HEADS=head_tile(heads), ONE_TILE=heads <= head_tile(heads),
            D=width, BLOCK_D=padded(width), BLOCK=block, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return Best(indices, scores, length)


@functools.cache
def _resident(device: torch.device) -> int:
    """How many programs run at a time."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@triton.jit
def _wait_for(counter, target):
    """Until the counter has reached `target`. What was written before it did is seen after."""
    seen = tl.atomic_add(counter, 0, sem="acquire")
    while seen < target:
        seen = tl.atomic_add(counter, 0, sem="acquire")


@triton.jit
def _tell(counter):
    """Adds one to a counter, once every thread of the program has written what it had to."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release")


@triton.jit(do_not_specialize=["s_q", "s_kv", "heads", "topk", "row_len", "groups", "items", "ring", "lag", "span"])
def _topk_kernel(
    iq, iq_strides, ik, ik_stride, w, w_strides, lo, hi, indices, scores, length,
    room, room_keys, counters,
    s_q, s_kv, heads, topk, scale, row_len, groups, items, ring, lag, span,
    RELU: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, ONE_TILE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    scored, selected = counters + 1, counters + 1 + groups
    room_len = (row_len + 2 * BLOCK).to(tl.int64)
    tickets = (groups + lag) * (items + ROWS)
    ticket = tl.atomic_add(counters, 1, sem="relaxed")
    while ticket < tickets:
        step = ticket // (items + ROWS)
        item = ticket % (items + ROWS)
        if item < items:
            if step < groups:
                if step >= ring:
                    _wait_for(selected + step - ring, ROWS)
                _score(
                    iq, iq_strides, ik, ik_stride, w, w_strides, lo, hi, room + step % ring * ROWS * room_len, room_len,
                    s_q, s_kv, heads, scale, step * ROWS, item * span, span,
                    RELU, KEYS, ROWS, HEADS, ONE_TILE, D, BLOCK_D,
                )  # fmt: skip
                _tell(scored + step)
        elif step >= lag:
            group = step - lag
            row = group * ROWS + item - items
            _wait_for(scored + group, items)
            if row < s_q:
                at = tl.multiple_of((group % ring * ROWS + item - items) * room_len, 16)
                out = row.to(tl.int64) * topk
                begin = tl.maximum(tl.load(lo + row), 0)
                end = tl.maximum(tl.minimum(tl.load(hi + row), s_kv), begin)
                # Whole tiles: they have been scored, and are -inf where the row sees nothing. Written as differences,
                # which tell the compiler nothing of multiples: see the selection.
                first = begin - begin % KEYS
                stop = tl.where(begin < end, end + (KEYS - 1) - (end + KEYS - 1) % KEYS, first)
                select_row(
                    room + at, first, stop, end - begin, topk, room + at + row_len, room_keys + at + row_len + BLOCK,
                    indices + out, scores + out, length + row, BLOCK,
                )  # fmt: skip
            _tell(selected + group)
        ticket = tl.atomic_add(counters, 1, sem="relaxed")


@triton.jit
def _score(
    iq, iq_strides, ik, ik_stride, w, w_strides, lo, hi, room, room_len,
    s_q, s_kv, heads, scale, row, key, span,
    RELU: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, ONE_TILE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Scores of ROWS rows for those of `span` keys that some of them sees."""
    rows = tl.arange(0, ROWS)
    lows = tl.load(lo + row + rows, mask=row + rows < s_q, other=0)
    highs = tl.minimum(tl.load(hi + row + rows, mask=row + rows < s_q, other=0), s_kv)
    begin = tl.maximum(tl.min(tl.where(lows < highs, lows, s_kv), 0), key)
    end = tl.minimum(tl.max(tl.where(lows < highs, highs, 0), 0), key + span)
    if begin < end:
        queries, weights = load_queries(
            iq, iq_strides, w, w_strides, row, s_q, 0, heads, 0, ROWS, HEADS, D, BLOCK_D
        )  # fmt: skip
        begin = begin // KEYS * KEYS  # a key's place in its tile is the same in every item
        dims = tl.arange(0, BLOCK_D)
        at = ik + (begin + tl.arange(0, KEYS)).to(tl.int64)[:, None] * ik_stride + dims[None, :]
        for first in range(begin, end, KEYS):
            keys = first + tl.arange(0, KEYS)
            tile = tl.load(at, mask=(keys < end)[:, None] & (dims < D)[None, :], other=0.0)
            at += KEYS * ik_stride
            total = head_sum(products(tile, queries), weights, RELU, KEYS, ROWS, HEADS)
            if not ONE_TILE:
                for head in range(HEADS, heads, HEADS):
                    more, more_weights = load_queries(
                        iq, iq_strides, w, w_strides, row, s_q, head, heads, 0, ROWS, HEADS, D, BLOCK_D
                    )
                    total += head_sum(products(tile, more), more_weights, RELU, KEYS, ROWS, HEADS)
            score = finished(total, scale)
            seen = (keys[:, None] >= lows[None, :]) & (keys[:, None] < highs[None, :])
            score = tl.where(seen & (score == score), score, float("-inf"))
            tl.store(room + rows.to(tl.int64)[None, :] * room_len + keys[:, None], score)


# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False


@triton.jit
def order_of(value):
    """A float32 (neither NaN nor -0.0) as an int32 of the same order."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(order):
    """The float32 of an order."""
    return (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _halved(low, high, count, middle, k, slack):
    """The interval after `count` values were seen to be at least `middle`; closed if count is k, or a little more."""
    enough = count >= k
    low = tl.where(enough, middle, low)
    high = tl.where(enough, tl.where(count <= k + slack, middle, high), middle - 1)
    return low, high


@triton.jit
def _middle(low, high):
    """Rounded up. In 64 bits: the two may be farther apart than 32 bits tell."""
    return (low + (high.to(tl.int64) - low + 1) // 2).to(tl.int32)


@triton.jit
def kth(values, k, low, slack):
    """The largest t that at least k of `values` reach (up to `slack` more: any such t), given that k reach `low`.

    If fewer than k do, it is `low`.
    """
    low = order_of(low)
    high = tl.maximum(order_of(tl.max(values, 0)), low)
    while low < high:
        middle = _middle(low, high)
        count = tl.sum((values >= value_of(middle)).to(tl.int32), 0)
        low, high = _halved(low, high, count, middle, k, slack)
    return value_of(low)


@triton.jit
def _load_block(row, at, end, BLOCK: tl.constexpr):
    """Scores [at, at + BLOCK) of a row, -inf from `end` on. Past the first-level cache: other processors wrote them."""
    j = at + tl.arange(0, BLOCK)
    return tl.load(row + j, mask=j < end, other=float("-inf"), cache_modifier=".cg")


@triton.jit
def _kth_of_row(row, begin, end, k, low, BLOCK: tl.constexpr):
    """The same over a row in memory, by reading it again and again: when there are too many candidates."""
    low = order_of(low)
    high = order_of(float("inf") + tl.zeros((), tl.float32))
    while low < high:
        middle = _middle(low, high)
        count = tl.zeros((BLOCK,), tl.int32)
        for at in range(begin, end, BLOCK):
            count += (_load_block(row, at, end, BLOCK) >= value_of(middle)).to(tl.int32)
        low, high = _halved(low, high, tl.sum(count, 0), middle, k, 0)
    return value_of(low)


@triton.jit
def _group_maxima(row, begin, end, BLOCK: tl.constexpr):
    """The maxima of BLOCK groups, of elements that lie BLOCK apart. Neighbours, often alike, are in different ones."""
    # As they are: written so that the compiler knows it, and reads 16 bytes a thread. Two blocks at a time, which is a
    # shape of its own: otherwise these reads would decide how the next loop reads, which must write one by one.
    begin, end = begin // 16 * 16, end // 16 * 16
    offsets = tl.arange(0, 2)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    best = tl.full((2, BLOCK), float("-inf"), tl.float32)
    for at in range(begin, end, 2 * BLOCK):
        j = at + offsets
        best = tl.maximum(best, tl.load(row + j, mask=j < end, other=float("-inf"), cache_modifier=".cg"))
    return tl.max(best, 0)


@triton.jit
def _gather_candidates(row, begin, end, threshold, found_scores, found_keys, BLOCK: tl.constexpr):
    """Writes the first BLOCK scores above `threshold`, and their keys, in order; returns how many there are in all."""
    count = tl.zeros((), tl.int32)
    value = _load_block(row, begin, end, BLOCK)
    for at in range(begin, end, BLOCK):
        after = _load_block(row, at + BLOCK, end, BLOCK)  # read ahead
        taken = (value > threshold).to(tl.int32)
        place = count + tl.cumsum(taken, 0) - 1
        written = (taken > 0) & (place < BLOCK)
        tl.store(found_scores + place, value, mask=written)
        tl.store(found_keys + place, at + tl.arange(0, BLOCK), mask=written)
        count += tl.sum(taken, 0)
        value = after
    return count


@triton.jit
def _write(value, keys, threshold, ties, tied, place, indices, scores):
    """Writes what is taken of some values, in order; returns how many ties and places are used now."""
    tie = value == threshold
    tie_rank = tied + tl.cumsum(tie.to(tl.int32), 0)
    taken = (value > threshold) | (tie & (tie_rank <= ties))
    at = place + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(indices + at, keys, mask=taken)
    tl.store(scores + at, value, mask=taken)
    return tied + tl.sum(tie.to(tl.int32), 0), place + tl.sum(taken.to(tl.int32), 0)


@triton.jit
def select_row(
    row, begin, end, n, topk, found_scores, found_keys, out_indices, out_scores, out_count, BLOCK: tl.constexpr
):
    """Writes the best `topk` of row[begin:end]: keys ascending, -1 last; their scores, -inf last; how many.

    `begin` and `end` are multiples of 16, and the row begins at one of 16 bytes. A run of n elements is meant; before
    and after it all are -inf. `found_scores` and `found_keys` are
    room for BLOCK elements each. With BLOCK below twice topk this is right, but slow.
    """
    PART: tl.constexpr = BLOCK // 4  # where speed does not matter, less code
    k = tl.minimum(topk, n)
    place = tl.zeros((), tl.int32)
    candidates = n
    threshold = float("-inf") + tl.zeros((), tl.float32)
    short = end - begin <= BLOCK
    if not short:
        if k < BLOCK:  # k groups or more have some of the run
            # Not quite the k-th maximum: a few more candidates cost less than the last halvings.
            maxima = _group_maxima(row, begin, end, BLOCK)
            threshold = kth(maxima, k, tl.min(maxima, 0), k // 16)
        candidates = _gather_candidates(row, begin, end, threshold, found_scores, found_keys, BLOCK)
        tl.debug_barrier()  # the threads read what others have written
    if short | ((candidates >= k) & (candidates <= BLOCK)):
        if short:
            value = _load_block(row, begin, end, BLOCK)
            keys = begin + tl.arange(0, BLOCK)
        else:
            value = _load_block(found_scores, 0, candidates, BLOCK)
            keys = tl.load(
                found_keys + tl.arange(0, BLOCK), mask=tl.arange(0, BLOCK) < candidates, other=0, cache_modifier=".cg"
            )
        if k < candidates:
            threshold = kth(value, k, tl.min(tl.where(value > float("-inf"), value, float("inf")), 0), 0)
        above = tl.sum((value > threshold).to(tl.int32), 0)
        ties = tl.where(threshold == float("-inf"), 0, k - above)
        _, place = _write(value, keys, threshold, ties, 0, place, out_indices, out_scores)
    else:
        if candidates > BLOCK:
            if k < n:
                threshold = _kth_of_row(row, begin, end, k, threshold, BLOCK)
            candidates = tl.zeros((), tl.int32)
            for at in range(begin, end, BLOCK):
                candidates += tl.sum((_load_block(row, at, end, BLOCK) > threshold).to(tl.int32), 0)
        # Otherwise fewer than k are above the threshold, and at least k reach it: it is the k-th score itself.
        ties = tl.where(threshold == float("-inf"), 0, k - candidates)
        tied = tl.zeros((), tl.int32)
        for at in range(begin, end, PART):
            value = _load_block(row, at, end, PART)
            keys = at + tl.arange(0, PART)
            tied, place = _write(value, keys, threshold, ties, tied, place, out_indices, out_scores)
    tl.store(out_count, place)
    for at in range(place, topk, PART):
        j = at + tl.arange(0, PART)
        tl.store(out_indices + j, tl.full((PART,), -1, tl.int32), mask=j < topk)
        tl.store(out_scores + j, tl.full((PART,), float("-inf"), tl.float32), mask=j < topk)
