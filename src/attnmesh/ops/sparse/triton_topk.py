"""The exact top-k of the indexer in Triton: scores pass through a workspace of a few rows.

One launch computes scores and selects. Programs draw tickets from a counter. Step t scores the rows of group t, some
keys per ticket, and then selects from the rows of group t - lag (here 1)::

    tickets   score 0 | score 1 | select 0 | score 2 | select 1 | score 3 | select 2 | ...
    workspace   A         B                    C                    A

A program waits only for tickets that were drawn before its own: a selection for the scores of its group, scores for
the selection that last read their part of the workspace. The holder of an earlier ticket is always running, so there is
no deadlock with any number of resident programs. While some programs select, the others keep the tensor cores busy.

The selection is exact, without sorting, and writes keys in ascending order. It reads a row of n scores twice. First it
computes the maxima of BLOCK groups of elements: if k of them are at least t, so are at least k scores. Only scores
above t are candidates, hardly more than k of them, and fit in registers, where bisection of the interval of values
finds the k-th. All scores above it are selected, and the first of those that equal it. The k-th score is a property of
the row, so the result does not depend on how it was found.

Values are compared as floats and bisected as integers of the same order. A score of -inf is never selected: it may be
that of a key that the row must not see.

The keys are a tensor, or in the blocks of a paged cache: the rows of a group are then tokens of one sequence, whose
blocks its row of the block table names. fp8 keys are multiplied as they are, and the sum over heads by their scale.
"""

# Kernels are written in Triton's language, whose names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.ops.decode.device_errors import INDEX_FAULT, error_record, raise_device_error
from attnmesh.ops.sparse.arguments import TopKIndices
from attnmesh.ops.sparse.paged import PagedKeys
from attnmesh.ops.sparse.triton_indexer import (
    LONG_ROW,
    MAX_COLUMNS,
    SPAN,
    TOPK,
    IndexerTiles,
    check_inputs,
    dot_products,
    final_score,
    head_sum,
    head_tile,
    load_queries,
    padded,
    pick_topk_tiles,
)
from attnmesh.ops.storage import Quantized, values_of

_MEMORY_FRACTION = 0.09  # size of the workspace, relative to inputs and outputs
_MIN_WORKSPACE = 4 << 20
_LONG_WORKSPACE = 64 << 20  # of long rows: 120 of 128k keys are selected from at a time
_MAX_CANDIDATES = 8192  # in registers; selection is slower for a top-k of more than 4096
_PAGED_WORKSPACE = 256 << 20  # at most: few rows of a decode step, each as long as the block table allows
_MIN_SPAN = 256
_INDEX_FAULT = tl.constexpr(INDEX_FAULT)


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
) -> TopKIndices:
    """The `topk` keys with the highest scores among lo[i] <= j < hi[i] of every row i; the lowest key wins a tie.

    iq [s_q, heads, d], ik [s_kv, d], w [s_q, heads]; lo and hi int32 [s_q]. A key whose score is NaN or -inf is never
    selected. One program scores `span` keys at a time; `workspace` is the size of the scores in bytes. The result has
    the same bits for all tiles, spans, workspaces and numbers of programs.
    """
    check_inputs(iq, ik, w)
    s_q, s_kv = iq.shape[0], ik.shape[0]
    if workspace is None:
        read = sum(x.numel() * x.element_size() for x in (iq, ik, w)) + s_q * (8 * topk + 4)
        least = _LONG_WORKSPACE if s_kv > LONG_ROW else _MIN_WORKSPACE
        workspace = max(least, int(_MEMORY_FRACTION * read))
    tiles = tiles or pick_topk_tiles(iq, s_kv)
    keys = (ik, (0, ik.stride(0)), None, (0, 0), None, (0, 0), None, 1, s_kv)
    return _launch(iq, keys, 0, s_kv, w, topk, lo, hi, scale, relu, tiles, span, block, workspace, programs)


def paged_topk(
    iq: Tensor,
    keys: PagedKeys,
    w: Tensor,
    topk: int,
    lo: Tensor,
    hi: Tensor,
    *,
    scale: float,
    relu: bool,
    tiles: IndexerTiles | None = None,
    span: int | None = None,
    block: int | None = None,
    programs: int | None = None,
) -> TopKIndices:
    """`topk` for the tokens iq [B, T, heads, d] of a decode step, over keys lo <= p < hi [B, T] of their sequences."""
    raise_device_error(iq.device)
    batch, tokens, heads, _ = iq.shape
    table, pool = keys.table, values_of(keys.pool)
    assert table is not None
    capacity = table.shape[1] * keys.block_size
    limits = torch.iinfo(torch.int32)
    lo, hi = (x.clamp(0, limits.max).flatten().int() for x in (lo, hi))
    if tiles is None:  # rows of a group are tokens of one sequence
        tiles = TOPK[iq.element_size()]
        rows = min(tiles.rows, tokens & -tokens, MAX_COLUMNS // head_tile(heads))
        # A block is looked up before its keys are loaded: as many tiles are in flight with twice the stages.
        tiles = tiles._replace(rows=rows if heads <= head_tile(heads) else 1, stages=2 * tiles.stages - 1)
    if span is None:  # a share for every program, where there are few tokens
        share = batch * tokens // tiles.rows * capacity // (2 * _resident(iq.device))
        span = max(_MIN_SPAN, min(SPAN, share))
    scales: Tensor | None = None
    if isinstance(keys.pool, Quantized):
        pool, scales = pool.view(torch.uint8), keys.pool.scales
    paged = (
        pool, pool.stride()[:2], scales, (0, 0) if scales is None else scales.stride()[:2],
        table, table.stride(), error_record(iq.device), tokens, keys.num_blocks,
    )  # fmt: skip
    found = _launch(
        iq.flatten(0, 1), paged, keys.block_size, capacity, w.flatten(0, 1), topk, lo, hi, scale, relu, tiles, span,
        block, _PAGED_WORKSPACE, programs,
    )  # fmt: skip
    indices, scores, lengths = found
    assert scores is not None
    shape = (batch, tokens, topk)
    return TopKIndices(indices.view(shape), scores.view(shape), lengths.view(batch, tokens))


def _launch(
    iq: Tensor, keys: tuple[Any, ...], block_size: int, s_kv: int, w: Tensor, topk: int, lo: Tensor, hi: Tensor,
    scale: float, relu: bool, tiles: IndexerTiles, span: int, block: int | None, workspace: int, programs: int | None,
) -> TopKIndices:  # fmt: skip
    s_q, heads, width = iq.shape
    indices = torch.empty(s_q, topk, dtype=torch.int32, device=iq.device)
    scores = torch.empty(s_q, topk, dtype=torch.float32, device=iq.device)
    lengths = torch.empty(s_q, dtype=torch.int32, device=iq.device)
    if s_q == 0:
        return TopKIndices(indices, scores, lengths)
    span = max(tiles.keys, span // tiles.keys * tiles.keys)
    block = block or min(_MAX_CANDIDATES, max(1024, 2 * int(triton.next_power_of_2(topk))))
    row_len = -(-max(s_kv, 1) // tiles.keys) * tiles.keys
    groups, items = -(-s_q // tiles.rows), -(-s_kv // span)
    ring = max(2, min(workspace // (4 * tiles.rows * (row_len + 2 * block)), groups))
    if programs is None:
        programs = min(_resident(iq.device), groups * (items + tiles.rows))
    # Select with a lag, so that the scores are ready: those drawn just before are still being computed.
    lag = min(ring - 1, -(-programs // (items + tiles.rows)) + 1)
    buffer = torch.empty(ring * tiles.rows, row_len + 2 * block, dtype=torch.float32, device=iq.device)
    # Tickets, the two counters of each group, and whether the keys of a group had a fault.
    counters = torch.zeros(1 + 3 * groups, dtype=torch.int32, device=iq.device)
    with torch.cuda.device_of(iq):
        _topk_kernel[(programs,)](
            iq, iq.stride()[:2], *keys, w, w.stride(), lo, hi, indices, scores, lengths,
            buffer, buffer.view(torch.int32), counters,
            s_q, s_kv, heads, topk, scale, row_len, groups, items, ring, lag, span,
            RELU=relu, KEYS=tiles.keys, ROWS=tiles.rows, HEADS=head_tile(heads), ONE_TILE=heads <= head_tile(heads),
            D=width, BLOCK_D=padded(width), BLOCK=block, BLOCK_SIZE=block_size,
            num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
    return TopKIndices(indices, scores, lengths)


@functools.cache
def _resident(device: torch.device) -> int:
    """The number of programs that run at a time."""
    return 2 * torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@triton.jit
def _wait_for(counter, target):
    """Waits until the counter reaches `target`, with acquire semantics."""
    seen = tl.atomic_add(counter, 0, sem="acquire")
    while seen < target:
        seen = tl.atomic_add(counter, 0, sem="acquire")


@triton.jit
def _signal(counter):
    """Increments a counter after all writes of the program, with release semantics."""
    tl.debug_barrier()
    tl.atomic_add(counter, 1, sem="release")


_NOT_SPECIALIZED = ["s_q", "s_kv", "heads", "topk", "row_len", "groups", "items", "ring", "lag", "span", "tokens"]


@triton.jit(do_not_specialize=[*_NOT_SPECIALIZED, "num_blocks"])
def _topk_kernel(
    iq, iq_strides, ik, ik_strides, key_scales, scale_strides, table, table_strides, errors, tokens, num_blocks,
    w, w_strides, lo, hi, indices, scores, length,
    buffer, buffer_keys, counters,
    s_q, s_kv, heads, topk, scale, row_len, groups, items, ring, lag, span,
    RELU: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, ONE_TILE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    scored, selected, faults = counters + 1, counters + 1 + groups, counters + 1 + 2 * groups
    buffer_len = (row_len + 2 * BLOCK).to(tl.int64)
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
                    iq, iq_strides, ik, ik_strides, key_scales, scale_strides, table, table_strides, errors,
                    faults + step, tokens, num_blocks, w, w_strides, lo, hi,
                    buffer + step % ring * ROWS * buffer_len, buffer_len,
                    s_q, s_kv, heads, scale, step * ROWS, item * span, span,
                    RELU, KEYS, ROWS, HEADS, ONE_TILE, D, BLOCK_D, BLOCK_SIZE,
                )  # fmt: skip
                _signal(scored + step)
        elif step >= lag:
            group = step - lag
            row = group * ROWS + item - items
            _wait_for(scored + group, items)
            if row < s_q:
                at = tl.multiple_of((group % ring * ROWS + item - items) * buffer_len, 16)
                out = row.to(tl.int64) * topk
                begin = tl.maximum(tl.load(lo + row), 0)
                end = tl.maximum(tl.minimum(tl.load(hi + row), s_kv), begin)
                if BLOCK_SIZE > 0:
                    bad = tl.load(faults + group, cache_modifier=".cg") != 0
                    beyond = tl.load(hi + row) > s_kv
                    if beyond & (tl.load(lo + row) < tl.load(hi + row)):
                        _record(errors, row // tokens, (tl.load(hi + row) - 1).to(tl.int64) | _INDEX_FAULT)
                    end = tl.where(bad | beyond, begin, end)
                # Whole tiles: they have been scored, with -inf for keys that are not visible. Written as differences,
                # so that the compiler does not learn that they are multiples of KEYS: see `_group_maxima`.
                first = begin - begin % KEYS
                stop = tl.where(begin < end, end + (KEYS - 1) - (end + KEYS - 1) % KEYS, first)
                select_row(
                    buffer + at, first, stop, end - begin, topk,
                    buffer + at + row_len, buffer_keys + at + row_len + BLOCK,
                    indices + out, scores + out, length + row, BLOCK,
                )  # fmt: skip
            _signal(selected + group)
        ticket = tl.atomic_add(counters, 1, sem="relaxed")


@triton.jit
def _record(errors, sequence, word):
    """Records an error in the words that the host reads."""
    tl.store(errors + 1 + sequence, word)
    tl.store(errors, tl.full((), 1, tl.int64))


@triton.jit
def _load_paged(
    ik, ik_strides, table_row, table_stride, num_blocks, keys, read,
    FP8: tl.constexpr, DTYPE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """A tile of keys of one sequence, which of them are in the pool, and words for those that are not."""
    entry = keys // BLOCK_SIZE
    block = tl.load(table_row + entry.to(tl.int64) * table_stride, mask=read, other=0)
    there = read & (block >= 0) & (block < num_blocks)
    word = ((entry + 1).to(tl.int64) << 32) | (block.to(tl.int64) & 0xFFFFFFFF)
    word = tl.where(read & ~there, word, 0)
    block, offset = block.to(tl.int64), (keys % BLOCK_SIZE).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    at = ik + (block * ik_strides[0] + offset * ik_strides[1])[:, None] + dims[None, :]
    mask = there[:, None] & (dims < D)[None, :]
    if FP8:
        tile = tl.load(at, mask=mask, other=0).to(tl.float8e4nv, bitcast=True).to(tl.float16).to(DTYPE)
    else:
        tile = tl.load(at, mask=mask, other=0.0)
    return tile, there, word


@triton.jit
def _load_scales(key_scales, scale_strides, table_row, table_stride, num_blocks, keys, read, BLOCK_SIZE: tl.constexpr):
    """The scales of a tile of keys of one sequence; 0 for those that are not in the pool."""
    block = tl.load(table_row + (keys // BLOCK_SIZE).to(tl.int64) * table_stride, mask=read, other=0)
    there = read & (block >= 0) & (block < num_blocks)
    at = key_scales + block.to(tl.int64) * scale_strides[0] + (keys % BLOCK_SIZE).to(tl.int64) * scale_strides[1]
    return tl.load(at, mask=there, other=0.0)


@triton.jit
def _score(
    iq, iq_strides, ik, ik_strides, key_scales, scale_strides, table, table_strides, errors, fault, tokens, num_blocks,
    w, w_strides, lo, hi, buffer, buffer_len, s_q, s_kv, heads, scale, row, key, span,
    RELU: tl.constexpr, KEYS: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr, ONE_TILE: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Computes the scores of ROWS rows for those of `span` keys that are visible to any of them."""
    rows = tl.arange(0, ROWS)
    lows = tl.load(lo + row + rows, mask=row + rows < s_q, other=0)
    highs = tl.minimum(tl.load(hi + row + rows, mask=row + rows < s_q, other=0), s_kv)
    begin = tl.maximum(tl.min(tl.where(lows < highs, lows, s_kv), 0), key)
    end = tl.minimum(tl.max(tl.where(lows < highs, highs, 0), 0), key + span)
    if begin < end:
        queries, weights = load_queries(
            iq, iq_strides, w, w_strides, row, s_q, 0, heads, 0, ROWS, HEADS, D, BLOCK_D
        )  # fmt: skip
        lowest = begin
        if BLOCK_SIZE > 0:
            table_row = table + (row // tokens).to(tl.int64) * table_strides[0]
            worst = tl.zeros((KEYS,), tl.int64)
        if key_scales is not None:
            keys = begin // KEYS * KEYS + tl.arange(0, KEYS)
            factor = _load_scales(
                key_scales, scale_strides, table_row, table_strides[1], num_blocks, keys,
                (keys >= lowest) & (keys < end), BLOCK_SIZE,
            )  # fmt: skip
        begin = begin // KEYS * KEYS  # the position of a key in its tile is the same for every item
        dims = tl.arange(0, BLOCK_D)
        at = ik + (begin + tl.arange(0, KEYS)).to(tl.int64)[:, None] * ik_strides[1] + dims[None, :]
        for first in range(begin, end, KEYS):
            keys = first + tl.arange(0, KEYS)
            if BLOCK_SIZE > 0:
                tile, there, word = _load_paged(
                    ik, ik_strides, table_row, table_strides[1], num_blocks, keys, (keys >= lowest) & (keys < end),
                    key_scales is not None, iq.dtype.element_ty, D, BLOCK_D, BLOCK_SIZE,
                )  # fmt: skip
                worst = tl.maximum(worst, word)
            else:
                tile = tl.load(at, mask=(keys < end)[:, None] & (dims < D)[None, :], other=0.0)
                at += KEYS * ik_strides[1]
            total = head_sum(dot_products(tile, queries), weights, RELU, KEYS, ROWS, HEADS)
            if not ONE_TILE:
                for head in range(HEADS, heads, HEADS):
                    more, more_weights = load_queries(
                        iq, iq_strides, w, w_strides, row, s_q, head, heads, 0, ROWS, HEADS, D, BLOCK_D
                    )
                    total += head_sum(dot_products(tile, more), more_weights, RELU, KEYS, ROWS, HEADS)
            if key_scales is not None:
                # Those of the next tile are loaded now: the compiler prefetches only what is multiplied.
                following = _load_scales(
                    key_scales, scale_strides, table_row, table_strides[1], num_blocks, keys + KEYS, keys + KEYS < end,
                    BLOCK_SIZE,
                )  # fmt: skip
                total *= factor[:, None]
                factor = following
            score = final_score(total, scale)
            seen = (keys[:, None] >= lows[None, :]) & (keys[:, None] < highs[None, :])
            if BLOCK_SIZE > 0:
                seen = seen & there[:, None]
            score = tl.where(seen & (score == score), score, float("-inf"))
            tl.store(buffer + rows.to(tl.int64)[None, :] * buffer_len + keys[:, None], score)
        if BLOCK_SIZE > 0:
            found = tl.max(worst, 0)
            if found != 0:
                _record(errors, (row // tokens).to(tl.int64), found)
                tl.store(fault, 1)


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
def _bisected(low, high, count, middle, k, slack):
    """The interval after counting `count` values of at least `middle`; closed if count is in [k, k + slack]."""
    enough = count >= k
    low = tl.where(enough, middle, low)
    high = tl.where(enough, tl.where(count <= k + slack, middle, high), middle - 1)
    return low, high


@triton.jit
def _middle(low, high):
    """Rounded up. In 64 bits, because the difference may overflow 32."""
    return (low + (high.to(tl.int64) - low + 1) // 2).to(tl.int32)


@triton.jit
def kth(values, k, low, slack):
    """The largest t such that at least k of `values` are >= t, given that k are >= `low`.

    With `slack`, any t that k to k + slack values reach. If fewer than k values reach `low`, the result is `low`.
    """
    low = order_of(low)
    high = tl.maximum(order_of(tl.max(values, 0)), low)
    while low < high:
        middle = _middle(low, high)
        count = tl.sum((values >= value_of(middle)).to(tl.int32), 0)
        low, high = _bisected(low, high, count, middle, k, slack)
    return value_of(low)


@triton.jit
def _load_block(row, at, end, BLOCK: tl.constexpr):
    """Scores [at, at + BLOCK) of a row, -inf from `end` on. Bypasses L1: other multiprocessors wrote them."""
    j = at + tl.arange(0, BLOCK)
    return tl.load(row + j, mask=j < end, other=float("-inf"), cache_modifier=".cg")


@triton.jit
def _kth_of_row(row, begin, end, k, low, BLOCK: tl.constexpr):
    """`kth` of a row in memory, which it reads repeatedly; used if there are too many candidates."""
    low = order_of(low)
    high = order_of(float("inf") + tl.zeros((), tl.float32))
    while low < high:
        middle = _middle(low, high)
        count = tl.zeros((BLOCK,), tl.int32)
        for at in range(begin, end, BLOCK):
            count += (_load_block(row, at, end, BLOCK) >= value_of(middle)).to(tl.int32)
        low, high = _bisected(low, high, tl.sum(count, 0), middle, k, 0)
    return value_of(low)


@triton.jit
def _group_maxima(row, begin, end, BLOCK: tl.constexpr):
    """The maxima of BLOCK groups of elements that are BLOCK apart: similar neighbors are in different groups."""
    # No change in value: tells the compiler that they are multiples of 16, for loads of 16 bytes per thread. Two blocks
    # at a time, to have a shape of its own: otherwise this layout would be used by the next loop, which writes singly.
    begin, end = begin // 16 * 16, end // 16 * 16
    offsets = tl.arange(0, 2)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    best = tl.full((2, BLOCK), float("-inf"), tl.float32)
    for at in range(begin, end, 2 * BLOCK):
        j = at + offsets
        best = tl.maximum(best, tl.load(row + j, mask=j < end, other=float("-inf"), cache_modifier=".cg"))
    return tl.max(best, 0)


@triton.jit
def _gather_candidates(row, begin, end, threshold, candidate_scores, candidate_keys, BLOCK: tl.constexpr):
    """Writes the first BLOCK scores above `threshold` and their keys, in order; returns the number of all of them."""
    count = tl.zeros((), tl.int32)
    value = _load_block(row, begin, end, BLOCK)
    for at in range(begin, end, BLOCK):
        after = _load_block(row, at + BLOCK, end, BLOCK)  # prefetch
        taken = (value > threshold).to(tl.int32)
        place = count + tl.cumsum(taken, 0) - 1
        written = (taken > 0) & (place < BLOCK)
        tl.store(candidate_scores + place, value, mask=written)
        tl.store(candidate_keys + place, at + tl.arange(0, BLOCK), mask=written)
        count += tl.sum(taken, 0)
        value = after
    return count


@triton.jit
def _write(value, keys, threshold, ties, tied, place, indices, scores):
    """Writes the selected of some values, in order; returns the numbers of ties seen and of values written so far."""
    tie = value == threshold
    tie_rank = tied + tl.cumsum(tie.to(tl.int32), 0)
    taken = (value > threshold) | (tie & (tie_rank <= ties))
    at = place + tl.cumsum(taken.to(tl.int32), 0) - 1
    tl.store(indices + at, keys, mask=taken)
    tl.store(scores + at, value, mask=taken)
    return tied + tl.sum(tie.to(tl.int32), 0), place + tl.sum(taken.to(tl.int32), 0)


@triton.jit
def select_row(
    row, begin, end, n, topk, candidate_scores, candidate_keys, out_indices, out_scores, out_count, BLOCK: tl.constexpr
):
    """Writes the top-k of row[begin:end]: keys ascending, then -1; their scores, then -inf; their number.

    `begin` and `end` are multiples of 16, and the row is aligned to 16 bytes. n elements may be selected; those before
    and after them are -inf. `candidate_scores` and `candidate_keys` are buffers of BLOCK elements each. With
    BLOCK below twice topk the result is correct, but slow.
    """
    PART: tl.constexpr = BLOCK // 4  # less code where speed does not matter
    k = tl.minimum(topk, n)
    place = tl.zeros((), tl.int32)
    candidates = n
    threshold = float("-inf") + tl.zeros((), tl.float32)
    short = end - begin <= BLOCK
    if not short:
        if k < BLOCK:  # at least k groups contain some of the n elements
            # Not exactly the k-th maximum: a few more candidates cost less than the last bisection steps.
            maxima = _group_maxima(row, begin, end, BLOCK)
            threshold = kth(maxima, k, tl.min(maxima, 0), k // 16)
        candidates = _gather_candidates(row, begin, end, threshold, candidate_scores, candidate_keys, BLOCK)
        tl.debug_barrier()  # threads read what other threads have written
    if short | ((candidates >= k) & (candidates <= BLOCK)):
        if short:
            value = _load_block(row, begin, end, BLOCK)
            keys = begin + tl.arange(0, BLOCK)
        else:
            value = _load_block(candidate_scores, 0, candidates, BLOCK)
            keys = tl.load(
                candidate_keys + tl.arange(0, BLOCK),
                mask=tl.arange(0, BLOCK) < candidates,
                other=0,
                cache_modifier=".cg",
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
        # Otherwise fewer than k are above the threshold and at least k reach it: it is the k-th score.
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
