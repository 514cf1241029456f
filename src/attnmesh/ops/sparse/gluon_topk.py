"""The exact top-k of the indexer on Hopper in Gluon: scores pass through a workspace of a few rows.

One launch computes scores and selects. Programs draw units of work: scores of ROWS rows for every n-th tile of the keys
that any of them may select. Rows are selected from as soon as they are scored, and then their part of the workspace is
used again. Keys are the rows of the matrix product, and the heads of ROWS queries its columns: sums over heads have the
order of the Triton kernels, and so scores have the same bits.

The warps of a program have five roles:

- two groups of four warps, the consumers, have 64 keys of every tile each. While one applies ReLU and weights, sums
  over heads, and writes, the other multiplies;
- one warp, the producer, lets the copy engine (TMA) fetch queries and tiles of keys, a few ahead;
- one warp, the planner, draws the units, a few ahead, and reports those that are done;
- two warps, the selector, draw rows and select (`gluon_select`).

Counters in memory order programs: `scored` of a group of rows counts its units that are done, and `selected` the rows
that have been selected from. A selector waits until all units of a row's group are done, a planner until the rows that
were last in a unit's part of the workspace are selected from. Units and rows are drawn in order, and both wait only for
what comes before. It has been drawn by programs that run, or will be: there is no deadlock with any number of programs.

Barriers in shared memory: `planned` of a unit, when its record is written; `ready`, which the copy engine completes,
and `free`, at which both consumers arrive, of queries (of the whole unit) and of every stage of keys. All are waited
for by the parity of their phase, counted over all units.
"""

# mypy: disable-error-code="assignment"
from collections import namedtuple
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnmesh.ops.decode.gluon_common import group_barrier
from attnmesh.ops.gluon_barriers import invalidate_barriers, new_barriers
from attnmesh.ops.gluon_descriptor import descriptor
from attnmesh.ops.launch import Launch, Recent, is_hopper, repeat
from attnmesh.ops.sparse.arguments import IndexerCall, TopKIndices, empty_topk
from attnmesh.ops.sparse.gluon_common import processors
from attnmesh.ops.sparse.gluon_select import FLAT, select_row
from attnmesh.ops.sparse.indexer_tiles import LONG_ROW, candidate_block, head_tile, padded, row_elements

CONSUMERS = 2
KEYS = 64  # of a consumer at a time: the rows of one matrix instruction
COLUMNS = 256  # heads of all queries of a unit
TILE = CONSUMERS * KEYS
STAGES = 3  # of keys; with two of queries, they fill shared memory
_CONSUMERS, _KEYS, _COLUMNS, _TILE = (gl.constexpr(x) for x in (CONSUMERS, KEYS, COLUMNS, TILE))
_STAGES = gl.constexpr(STAGES)
_NAN_STAYS = gl.constexpr(tl.PropagateNan.ALL)
_RECORD = gl.constexpr(4)  # integers: the first row of a unit, that in the workspace, its first key, where keys end
# Registers per thread of the second consumer, and of the other roles, which are one group of four warps. The first
# consumer has what is left.
_CONSUMER_REGISTERS, _HELPER_REGISTERS = gl.constexpr(192), gl.constexpr(128)
_ONE_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
_UNIT_TILES = 8  # of a unit, about: few, so that few rows are scored at a time
_WORKSPACE = 128 << 20  # 240 rows of 128k keys: two warps select slowly, so that many rows wait for them
_MIN_QUERIES = 1024
_launches: Recent[Launch] = Recent()


# The constants of the kernel; `block` is the candidates of a selection, `layout` that of the scores of a consumer.
Shape = namedtuple("Shape", "rows heads relu block layout")
# Lengths; the groups of rows, the units of a group, the groups that the workspace holds, and the size of a row.
Sizes = namedtuple("Sizes", "s_q s_kv heads topk groups items ring row_len row_size")
Memory = namedtuple("Memory", "queries keys weights bounds records")  # in shared memory, as the barriers
Barriers = namedtuple("Barriers", "planned q_ready q_free k_ready k_free")
# Counters in memory: the next unit, the next row, and of every group.
Counters = namedtuple("Counters", "unit row scored selected")


NEEDS = "17 to 128 heads of 40 to 128 elements in 16 bits, rows aligned to 16 bytes, up to 2,048 keys, on Hopper"


def supports(iq: Tensor, ik: Tensor, topk: int) -> bool:
    """Whether the kernel can serve the call: it has what it NEEDS.

    A selection of more than 2,048 keys needs more registers than there are.
    """
    return (
        is_hopper(iq.device)
        and iq.dtype == ik.dtype
        and iq.dtype in (torch.bfloat16, torch.float16)
        and head_tile(iq.shape[1]) >= 32
        and iq.shape[1] <= 128
        and padded(iq.shape[2]) in (64, 128)
        and ik.shape[0] > 0
        and topk <= 2048
        # The copy engine moves 16 bytes at a time.
        and all(x.stride(-1) == 1 and x.data_ptr() % 16 == 0 for x in (iq, ik))
        and all(stride > 0 and stride % 8 == 0 for stride in (*iq.stride()[:2], ik.stride(0), iq.shape[2]))
    )


def is_faster(iq: Tensor, ik: Tensor, topk: int) -> bool:
    """Whether the kernel serves the call, and in less time than Triton's: many queries of many heads over long rows."""
    many = iq.shape[0] >= _MIN_QUERIES and ik.shape[0] > LONG_ROW
    return many and head_tile(iq.shape[1]) >= 64 and iq.shape[2] > 64 and supports(iq, ik, topk)


def topk(
    call: IndexerCall, topk: int, *, block: int | None = None, workspace: int = _WORKSPACE,
    programs: int | None = None, unit_tiles: int = _UNIT_TILES,
) -> TopKIndices:  # fmt: skip
    """`triton_topk.topk` of a call that the kernel supports. The result has the same bits."""
    iq, ik, w, _, (lo, hi, *_), scale, relu, *_ = call
    (s_q, heads, width), s_kv = iq.shape, ik.shape[0]
    indices, scores, lengths = empty_topk(s_q, topk=topk, device=iq.device)
    if s_q == 0:
        return TopKIndices(indices, scores, lengths)
    rows = COLUMNS // head_tile(heads)
    block = block or candidate_block(topk)
    tiles = -(-s_kv // TILE)
    row_len, groups = tiles * TILE, -(-s_q // rows)
    row_size = row_elements(row_len, block)
    ring = max(2, min(workspace // (4 * rows * row_size), groups))
    items = -(-tiles // unit_tiles)
    programs = min(programs or processors(iq), groups * max(items, rows))
    buffer = torch.empty(ring * rows, row_size, dtype=torch.float32, device=iq.device)
    counters = torch.zeros(2 + 2 * groups, dtype=torch.int32, device=iq.device)
    repeat(
        _launches, _topk_kernel, (programs,),
        (
            descriptor(iq, [rows, head_tile(heads), padded(width)]), descriptor(ik, [KEYS, padded(width)]),
            w, w.stride(), lo.contiguous(), hi.contiguous(), indices, scores.view(torch.int32), lengths,
            buffer, buffer.view(torch.int32), counters,
            s_q, s_kv, heads, topk, groups, items, ring, row_len, row_size, scale,
        ),
        SHAPE=Shape(rows, head_tile(heads), relu, block, score_layout(rows)), num_warps=4,
    )  # fmt: skip
    return TopKIndices(indices, scores, lengths)


def score_layout(rows: int) -> Any:
    """The layout of scores [KEYS, rows] that sums over heads leave: four neighboring threads have the same."""
    of_rows = [[0, 1 << i] for i in range(rows.bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[8, 0], *of_rows], lanes, [[16, 0], [32, 0]], [], [KEYS, rows])


@gluon.jit
def _wait_for(counter, target):
    """Waits until a counter in memory reaches `target`, with acquire semantics."""
    seen = gl.atomic_add(counter, 0, sem="acquire")
    while seen < target:
        seen = gl.atomic_add(counter, 0, sem="acquire")


@gluon.jit
def _plan(w, w_strides, lo, hi, counters, memory, barriers, sizes, SHAPE: gl.constexpr):
    """Draws units, publishes their records, weights and bounds, and counts those that are done."""
    column = gl.arange(0, _COLUMNS, layout=_ONE_WARP)
    field = gl.arange(0, _RECORD, layout=_ONE_WARP)
    units = sizes.groups * sizes.items
    count = 0  # units so far
    before = -1  # the group of the unit before, -1 without or if it has been counted
    last = -1  # and of the tile before the last
    unit = gl.atomic_add(counters.unit, 1, sem="relaxed")
    while unit < units:
        group = unit // sizes.items
        row = group * SHAPE.rows
        rows = row + gl.arange(0, SHAPE.rows, layout=_ONE_WARP)
        lows = gl.maximum(gl.load(lo + rows, mask=rows < sizes.s_q, other=0), 0)
        highs = gl.minimum(gl.load(hi + rows, mask=rows < sizes.s_q, other=0), sizes.s_kv)
        begin = gl.min(gl.where(lows < highs, lows, sizes.s_kv), 0) // _TILE
        end = gl.max(gl.where(lows < highs, highs, 0), 0)
        begin += (sizes.items - begin % sizes.items + unit % sizes.items) % sizes.items
        of_row, head = row + column // SHAPE.heads, column % SHAPE.heads
        weights = gl.load(
            w + of_row.to(gl.int64) * w_strides[0] + head * w_strides[1],
            mask=(of_row < sizes.s_q) & (head < sizes.heads), other=0.0,
        ).to(gl.float32)  # fmt: skip
        slot = count % 2
        mbarrier.wait(barriers.q_free.index(slot), (count // 2 & 1) ^ 1)
        if last >= 0:
            gl.atomic_add(counters.scored + last, 1, sem="release")
        if group >= sizes.ring:
            if (before >= 0) & (before <= group - sizes.ring):
                # Rows that this unit waits for may wait for the unit before.
                mbarrier.wait(barriers.q_free.index(1 - slot), (count + 1) // 2 & 1 ^ 1)
                gl.atomic_add(counters.scored + before, 1, sem="release")
                before = -1
            _wait_for(counters.selected + (group - sizes.ring), SHAPE.rows)
        fields = gl.where(field == 0, row, gl.where(field == 1, group % sizes.ring * SHAPE.rows, end))
        memory.records.index(slot).store(gl.where(field == 2, begin * _TILE, fields))
        memory.bounds.index(2 * slot).store(lows)
        memory.bounds.index(2 * slot + 1).store(highs)
        memory.weights.index(slot).store(weights)
        mbarrier.arrive(barriers.planned.index(slot), count=1)
        last = before
        before = group
        count += 1
        unit = gl.atomic_add(counters.unit, 1, sem="relaxed")
    slot = count % 2
    mbarrier.wait(barriers.q_free.index(slot), (count // 2 & 1) ^ 1)
    if last >= 0:
        gl.atomic_add(counters.scored + last, 1, sem="release")
    memory.records.index(slot).store(field * 0 - 1)
    mbarrier.arrive(barriers.planned.index(slot), count=1)
    if before >= 0:
        mbarrier.wait(barriers.q_free.index(1 - slot), (count + 1) // 2 & 1 ^ 1)
        gl.atomic_add(counters.scored + before, 1, sem="release")


@gluon.jit
def _read(memory, barriers, count, WARPS: gl.constexpr):
    """The fields of the record of a unit: its first row, that in the workspace, its keys."""
    layout: gl.constexpr = gl.BlockedLayout([_RECORD], [32], [WARPS], [0])  # each thread has all fields
    mbarrier.wait(barriers.planned.index(count % 2), count // 2 & 1)
    values = memory.records.index(count % 2).load(layout)
    field = gl.arange(0, _RECORD, layout=layout)
    return [gl.sum(gl.where(field == i, values, 0), 0) for i in (0, 1, 2, 3)]


@gluon.jit
def _load(iq, ik, memory, barriers, sizes):
    """Fetches the queries and keys of the units."""
    step = 0  # tiles so far
    count = 0  # units so far
    row, _, begin, end = _read(memory, barriers, count, 1)
    while row >= 0:
        slot = count % 2
        if begin < end:
            mbarrier.expect(barriers.q_ready.index(slot), iq.block_type.nbytes)
            tma.async_copy_global_to_shared(iq, [row, 0, 0], barriers.q_ready.index(slot), memory.queries.index(slot))
        else:
            mbarrier.arrive(barriers.q_ready.index(slot), count=1)
        for key in range(begin, end, sizes.items * _TILE):
            stage = step % _STAGES
            mbarrier.wait(barriers.k_free.index(stage), (step // _STAGES & 1) ^ 1)
            mbarrier.expect(barriers.k_ready.index(stage), _CONSUMERS * ik.block_type.nbytes)
            for i in gl.static_range(_CONSUMERS):
                tma.async_copy_global_to_shared(
                    ik, [key + i * _KEYS, 0], barriers.k_ready.index(stage), memory.keys.index(_CONSUMERS * stage + i)
                )
            step += 1
        count += 1
        row, _, begin, end = _read(memory, barriers, count, 1)


@gluon.jit
def _score(INDEX: gl.constexpr, buffer, scale, memory, barriers, sizes, SHAPE: gl.constexpr):
    """Writes the scores of the units for 64 keys of every tile; -inf for keys that a row may not select, and NaN."""
    grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _COLUMNS, 16])
    of_row: gl.constexpr = gl.SliceLayout(0, SHAPE.layout)
    keys = INDEX * _KEYS + gl.arange(0, _KEYS, layout=gl.SliceLayout(1, SHAPE.layout))
    rows = gl.arange(0, SHAPE.rows, layout=of_row).to(gl.int64)
    step = 0  # tiles so far
    count = 0  # units so far
    row, first_row, begin, end = _read(memory, barriers, count, 4)
    while row >= 0:
        slot = count % 2
        lows = memory.bounds.index(2 * slot).load(of_row)
        highs = memory.bounds.index(2 * slot + 1).load(of_row)
        out = buffer + (first_row + rows) * sizes.row_size
        mbarrier.wait(barriers.q_ready.index(slot), count // 2 & 1)
        for key in range(begin, end, sizes.items * _TILE):
            stage = step % _STAGES
            mbarrier.wait(barriers.k_ready.index(stage), step // _STAGES & 1)
            dots = warpgroup_mma(
                memory.keys.index(_CONSUMERS * stage + INDEX),
                memory.queries.index(slot).reshape([_COLUMNS, memory.keys.shape[2]]).permute([1, 0]),
                gl.zeros([_KEYS, _COLUMNS], gl.float32, grid), use_acc=False, is_async=True,
            )  # fmt: skip
            dots = warpgroup_mma_wait(0, [dots])
            mbarrier.arrive(barriers.k_free.index(stage), count=1)
            weights = memory.weights.index(slot).load(gl.SliceLayout(0, grid))
            score = final_score(dots, weights, None, scale, SHAPE)
            at = key + keys
            seen = (at[:, None] >= lows[None, :]) & (at[:, None] < highs[None, :])
            gl.store(out[None, :] + at[:, None], gl.where(seen & (score == score), score, float("-inf")))
            step += 1
        mbarrier.arrive(barriers.q_free.index(slot), count=1)
        count += 1
        row, first_row, begin, end = _read(memory, barriers, count, 4)


@gluon.jit
def final_score(dots, weights, factor, scale, SHAPE: gl.constexpr):
    """The scores of a tile from its products. -0.0 becomes 0.0, so that equal scores have equal bits.

    `factor`: None, or a scale of each key.
    """
    if SHAPE.relu:
        dots = gl.maximum(dots, 0.0, propagate_nan=_NAN_STAYS)
    total = gl.sum((dots * weights[None, :]).reshape([_KEYS, SHAPE.rows, SHAPE.heads]), 2)
    total = gl.convert_layout(total, SHAPE.layout)
    if factor is not None:
        total = total * factor[:, None]
    score = total * scale
    return gl.where(score == 0.0, 0.0, score)


@gluon.jit
def _select(lo, hi, indices, scores, lengths, buffer, counters, sizes, SHAPE: gl.constexpr):
    """Draws rows and selects from them."""
    row = gl.atomic_add(counters.row, 1, sem="relaxed")
    while row < sizes.s_q:
        group = row // SHAPE.rows
        begin = gl.maximum(gl.load(lo + row), 0)
        end = gl.maximum(gl.minimum(gl.load(hi + row), sizes.s_kv), begin)
        _wait_for(counters.scored + group, sizes.items)
        # Whole tiles: they have been scored, with -inf for keys that are not visible.
        first = begin // _TILE * _TILE
        stop = gl.where(begin < end, (end + _TILE - 1) // _TILE, begin // _TILE) * _TILE
        offset = (group % sizes.ring * SHAPE.rows + row % SHAPE.rows).to(gl.int64) * sizes.row_size
        out = row.to(gl.int64) * sizes.topk
        select_row(
            buffer + offset, sizes.row_len, first, stop, end - begin, sizes.topk,
            indices + out, scores + out, lengths + row, SHAPE.block, FLAT,
        )  # fmt: skip
        group_barrier()
        gl.atomic_add(counters.selected + group, 1, sem="release")
        row = gl.atomic_add(counters.row, 1, sem="relaxed")


_NOT_SPECIALIZED = ["s_q", "s_kv", "heads", "topk", "groups", "items", "ring"]


@gluon.jit(do_not_specialize=_NOT_SPECIALIZED)
def _topk_kernel(
    iq, ik, w, w_strides, lo, hi, indices, scores, lengths, buffer, buffer_bits, counters,
    s_q, s_kv, heads, topk, groups, items, ring, row_len, row_size, scale,
    SHAPE: gl.constexpr,
):  # fmt: skip
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    memory = Memory(
        gl.allocate_shared_memory(iq.dtype, [2] + iq.block_type.shape, iq.layout),  # noqa: RUF005 - no starred elements
        gl.allocate_shared_memory(ik.dtype, [_CONSUMERS * _STAGES] + ik.block_type.shape, ik.layout),  # noqa: RUF005
        gl.allocate_shared_memory(gl.float32, [2, _COLUMNS], plain),
        gl.allocate_shared_memory(gl.int32, [4, SHAPE.rows], plain),
        gl.allocate_shared_memory(gl.int32, [2, _RECORD], plain),
    )
    barriers = Barriers(
        new_barriers(2, 1), new_barriers(2, 1), new_barriers(2, _CONSUMERS), new_barriers(_STAGES, 1),
        new_barriers(_STAGES, _CONSUMERS),
    )  # fmt: skip
    fence_async_shared()
    sizes = Sizes(s_q, s_kv, heads, topk, groups, items, ring, row_len, row_size)
    count = Counters(counters, counters + 1, counters + 2, counters + 2 + groups)
    gl.warp_specialize(
        [(_score, (0, buffer, scale, memory, barriers, sizes, SHAPE)),
         (_score, (1, buffer, scale, memory, barriers, sizes, SHAPE)),
         (_select, (lo, hi, indices, scores, lengths, buffer_bits, count, sizes, SHAPE)),
         (_load, (iq, ik, memory, barriers, sizes)),
         (_plan, (w, w_strides, lo, hi, count, memory, barriers, sizes, SHAPE))],
        [4, 2, 1, 1], [_CONSUMER_REGISTERS, _HELPER_REGISTERS, _HELPER_REGISTERS, _HELPER_REGISTERS],
    )  # fmt: skip
    invalidate_barriers(barriers)
