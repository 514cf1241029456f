"""The exact top-k of the indexer in Triton: scores pass through a workspace of a few rows.

One launch computes scores and selects. Programs draw tickets from a counter. Step t scores the rows of group t, some
keys per ticket, and then selects from the rows of group t - lag (here 1)::

    tickets   score 0 | score 1 | select 0 | score 2 | select 1 | score 3 | select 2 | ...
    workspace   A         B                    C                    A

A program waits only for tickets that were drawn before its own: a selection for the scores of its group, scores for
the selection that last read their part of the workspace. The holder of an earlier ticket is always running, so there is
no deadlock with any number of resident programs. While some programs select, the others keep the tensor cores busy.

The selection from a row (`triton_select`) is by one program, which reads the row twice.
"""

import torch
import triton
import triton.language as tl

from attnmesh.ops.launch import Launch, Recent, multiprocessors, repeat
from attnmesh.ops.sparse import indexer_tiles
from attnmesh.ops.sparse.arguments import IndexerCall, TopKIndices, empty_topk
from attnmesh.ops.sparse.indexer_tiles import SPAN, IndexerTiles, head_tile
from attnmesh.ops.sparse.triton_indexer import final_score, load_queries, shape_of, sum_over_heads
from attnmesh.ops.sparse.triton_select import select_row

_MEMORY_FRACTION = 0.09  # size of the workspace, relative to inputs and outputs
_MIN_WORKSPACE = 4 << 20
_LONG_WORKSPACE = 64 << 20  # of long rows: 120 of 128k keys are selected from at a time
_launches: Recent[Launch] = Recent()


def topk(
    call: IndexerCall, topk: int, *, tiles: IndexerTiles | None = None, span: int = SPAN, block: int | None = None,
    workspace: int | None = None, programs: int | None = None,
) -> TopKIndices:  # fmt: skip
    """`dispatch.topk` of bounds without an offset. A key whose score is NaN or -inf is never selected.

    One program scores `span` keys at a time; `workspace` is the size of the scores in bytes. The result has the same
    bits for all tiles, spans, workspaces and numbers of programs.
    """
    iq, ik, w, _, (lo, hi, *_), scale, relu, *_ = call
    (s_q, heads, _), s_kv = iq.shape, ik.shape[0]
    found = empty_topk(s_q, topk=topk, device=iq.device)
    if s_q == 0:
        return TopKIndices(*found)
    if workspace is None:
        read = sum(x.numel() * x.element_size() for x in (iq, ik, w)) + s_q * (8 * topk + 4)
        least = _LONG_WORKSPACE if s_kv > indexer_tiles.LONG_ROW else _MIN_WORKSPACE
        workspace = max(least, int(_MEMORY_FRACTION * read))
    tiles = tiles or indexer_tiles.pick_topk_tiles(iq, s_kv)
    span = max(tiles.keys, span // tiles.keys * tiles.keys)
    block = block or indexer_tiles.candidate_block(topk)
    row_len = -(-max(s_kv, 1) // tiles.keys) * tiles.keys
    groups, items = -(-s_q // tiles.rows), -(-s_kv // span)
    row_size = indexer_tiles.row_elements(row_len, block)
    ring = max(2, min(workspace // (4 * tiles.rows * row_size), groups))
    if programs is None:  # as many as run at a time
        programs = min(2 * multiprocessors(iq.device, 1), groups * (items + tiles.rows))
    # Select with a lag, so that the scores are ready: those drawn just before are still being computed.
    lag = min(ring - 1, -(-programs // (items + tiles.rows)) + 1)
    buffer = torch.empty(ring * tiles.rows, row_size, dtype=torch.float32, device=iq.device)
    # Tickets, and the two counters of each group.
    counters = torch.zeros(1 + 2 * groups, dtype=torch.int32, device=iq.device)
    repeat(
        _launches, _topk_kernel, (programs,),
        (
            iq, iq.stride()[:2], ik, ik.stride(0), w, w.stride(), lo, hi, *found,
            buffer, buffer.view(torch.int32), counters,
            s_q, s_kv, heads, topk, scale, row_len, groups, items, ring, lag, span,
        ),
        SHAPE=shape_of(iq, tiles.keys, tiles.rows, head_tile(heads), relu), BLOCK=block,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return TopKIndices(*found)


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


_NOT_SPECIALIZED = ["s_q", "s_kv", "heads", "topk", "row_len", "groups", "items", "ring", "lag", "span"]


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _topk_kernel(
    iq, iq_strides, ik, ik_stride, w, w_strides, lo, hi, indices, scores, length,
    buffer, buffer_keys, counters,
    s_q, s_kv, heads, topk, scale, row_len, groups, items, ring, lag, span, SHAPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    source = iq, iq_strides, w, w_strides
    scored, selected = counters + 1, counters + 1 + groups
    buffer_len = (row_len + 2 * BLOCK).to(tl.int64)
    tickets = (groups + lag) * (items + SHAPE.rows)
    ticket = tl.atomic_add(counters, 1, sem="relaxed")
    while ticket < tickets:
        step = ticket // (items + SHAPE.rows)
        item = ticket % (items + SHAPE.rows)
        if item < items:
            if step < groups:
                if step >= ring:
                    _wait_for(selected + step - ring, SHAPE.rows)
                _score(
                    source, ik, ik_stride, lo, hi, buffer + step % ring * SHAPE.rows * buffer_len, buffer_len,
                    s_q, s_kv, heads, scale, step * SHAPE.rows, item * span, span, SHAPE,
                )  # fmt: skip
                _signal(scored + step)
        elif step >= lag:
            group = step - lag
            row = group * SHAPE.rows + item - items
            _wait_for(scored + group, items)
            if row < s_q:
                at = tl.multiple_of((group % ring * SHAPE.rows + item - items) * buffer_len, 16)
                out = row.to(tl.int64) * topk
                begin = tl.maximum(tl.load(lo + row), 0)
                end = tl.maximum(tl.minimum(tl.load(hi + row), s_kv), begin)
                # Whole tiles: they have been scored, with -inf for keys that are not visible. Written as differences,
                # so that the compiler does not learn that they are multiples of a tile: see `_group_maxima`.
                first = begin - begin % SHAPE.keys
                stop = tl.where(begin < end, end + (SHAPE.keys - 1) - (end + SHAPE.keys - 1) % SHAPE.keys, first)
                select_row(
                    buffer + at, buffer_keys + at, row_len, first, stop, end - begin, topk, 0,
                    indices + out, scores + out, length + row, BLOCK, 0,
                )  # fmt: skip
            _signal(selected + group)
        ticket = tl.atomic_add(counters, 1, sem="relaxed")


@triton.jit
def _score(
    source, ik, ik_stride, lo, hi, buffer, buffer_len, s_q, s_kv, heads, scale, row, key, span, SHAPE: tl.constexpr
):  # fmt: skip
    """Computes the scores of some rows for the keys of a `span` that are visible to any of these rows."""
    rows = tl.arange(0, SHAPE.rows)
    lows = tl.load(lo + row + rows, mask=row + rows < s_q, other=0)
    highs = tl.minimum(tl.load(hi + row + rows, mask=row + rows < s_q, other=0), s_kv)
    begin = tl.maximum(tl.min(tl.where(lows < highs, lows, s_kv), 0), key)
    end = tl.minimum(tl.max(tl.where(lows < highs, highs, 0), 0), key + span)
    if begin < end:
        queries, weights = load_queries(source, row, s_q, 0, heads, 0, SHAPE.block_d, SHAPE)
        begin = begin // SHAPE.keys * SHAPE.keys  # the position of a key in its tile is the same for every item
        dims = tl.arange(0, SHAPE.block_d)
        at = ik + (begin + tl.arange(0, SHAPE.keys)).to(tl.int64)[:, None] * ik_stride + dims[None, :]
        for first in range(begin, end, SHAPE.keys):
            keys = first + tl.arange(0, SHAPE.keys)
            tile = tl.load(at, mask=(keys < end)[:, None] & (dims < SHAPE.d)[None, :], other=0.0)
            at += SHAPE.keys * ik_stride
            score = final_score(sum_over_heads(tile, queries, weights, source, row, s_q, heads, SHAPE), scale)
            seen = (keys[:, None] >= lows[None, :]) & (keys[:, None] < highs[None, :])
            score = tl.where(seen & (score == score), score, float("-inf"))
            tl.store(buffer + rows.to(tl.int64)[None, :] * buffer_len + keys[:, None], score)
