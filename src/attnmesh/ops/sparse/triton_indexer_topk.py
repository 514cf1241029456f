"""The indexer's exact top-k, in Triton: scores are streamed through a workspace that a few rows fit in.

One launch does both halves. Programs draw tickets. The work of step t is to score the rows of group t, some keys a
ticket, then to select from the rows of group t - lag (here 1)::

    tickets   score 0 | score 1 | select 0 | score 2 | select 1 | score 3 | select 2 | ...
    workspace   A         B                    C                    A

A program waits only for tickets that were drawn before its own: a selection for the scores of its group, scores for
the selection that last read their part of the workspace. Whoever holds an earlier ticket is running, so all goes on
however few programs run at a time. While some select, the others keep the matrix units busy.
"""

# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.ops.sparse.triton_indexer_tiles import (
    SPAN,
    Tiles,
    check_inputs,
    finished,
    head_sum,
    head_tile,
    load_queries,
    padded,
    pick_topk_tiles,
    products,
)
from attnmesh.ops.sparse.triton_select import select_row

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
    tiles: Tiles | None = None,
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
