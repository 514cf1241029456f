"""The selection of a decode step's top-k, on Hopper in Gluon: the second launch of `triton_paged_topk`.

It does what `triton_select` does for rows with a summary. But every warp has a part of each tile, in order. So the
number of an element among those that are taken needs no more than sums within its warp, and one exchange of the counts
of all warps. A search exchanges one count of each warp per step, with one barrier.

Rows that have too many candidates, because they are all alike, are selected from by `gluon_select`.
"""

# Kernels are written in Gluon's language, whose names have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls
# mypy: disable-error-code="assignment"
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_wait

from attnmesh.ops.decode.device_errors import INDEX_FAULT
from attnmesh.ops.decode.gluon_common import group_barrier
from attnmesh.ops.sparse.gluon_select import fill_rest, select_row
from attnmesh.ops.sparse.gluon_topk import KEYS
from attnmesh.ops.sparse.indexer_tiles import NEIGHBORS

WARPS = 16
MIN_BLOCK = WARPS * 128  # candidates: four per thread
_KEYS, _NEIGHBORS, _WARPS = gl.constexpr(KEYS), gl.constexpr(NEIGHBORS), gl.constexpr(WARPS)
_BLOCK_QUADS = gl.constexpr(NEIGHBORS // 4)
_INDEX_FAULT = gl.constexpr(INDEX_FAULT)
_NOTHING = gl.constexpr(float("-inf"))
# A tile: every thread has fours of neighbors, its warp some times 32 of them.
_TILE = gl.constexpr(gl.BlockedLayout([1, 1, 1, 4], [1, 1, 32, 1], [WARPS, 1, 1, 1], [3, 2, 1, 0]))
_QUADS = gl.constexpr(gl.SliceLayout(3, _TILE))
_OF_WARPS = gl.constexpr(gl.SliceLayout(1, gl.SliceLayout(1, _QUADS)))
_PAIRS = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [WARPS, 1], [1, 0]))  # of warps
_FLAT = gl.constexpr(gl.BlockedLayout([2], [32], [WARPS], [0]))
_FAULTS = gl.constexpr(32 * WARPS)  # read at a time


class Selection(NamedTuple):
    """The constants of the kernel."""

    rows: Any  # of a group that is scored together
    block: Any  # candidates in registers
    wide: Any  # groups of the summary in registers


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _order_of(value):
    """A float32 (neither NaN nor -0.0) as an int32 of the same order."""
    bits = gl.cast(value, gl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@gluon.jit
def _value_of(order):
    """The float32 of an order."""
    return gl.cast(order ^ ((order >> 31) & 0x7FFFFFFF), gl.float32, bitcast=True)


@gluon.jit
def _quads(CHUNKS: gl.constexpr):
    """The numbers of the fours of a tile [WARPS, CHUNKS, 32, 4]."""
    warp = gl.arange(0, _WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, _QUADS)))[:, None, None]
    chunk = gl.arange(0, CHUNKS, layout=gl.SliceLayout(0, gl.SliceLayout(2, _QUADS)))[None, :, None]
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, _QUADS)))[None, None, :]
    return (warp * CHUNKS + chunk) * 32 + lane


@gluon.jit
def _each(firsts):
    """The numbers of the elements of fours, from those of their first."""
    layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, _TILE)))
    return firsts[:, :, :, None] + gl.arange(0, 4, layout=layout)[None, None, None, :]


@gluon.jit
def _load(values, firsts, there):
    """Fours of values, -inf without `there`. Bypasses L1: other programs wrote them."""
    return gl.load(values + _each(firsts), mask=there[:, :, :, None], other=_NOTHING, cache_modifier=".cg")


@gluon.jit
def _of_warps(taken):
    """The sums of the parts of a tile that warps have."""
    return gl.sum(gl.sum(gl.sum(taken, 3), 1), 1).to(gl.int32)


@gluon.jit
def _count(taken, memory):
    """The sum of a tile. Consecutive calls need different `memory`: one barrier is enough then."""
    memory.store(_of_warps(taken))
    group_barrier()
    return gl.sum(memory.load(gl.SliceLayout(0, _PAIRS)), 0).to(gl.int32)


@gluon.jit
def _numbers(taken, memory, CHUNKS: gl.constexpr):
    """How many elements of a tile are taken before each of them, and in all. A warp counts in bytes, of each chunk."""
    in_quad = gl.associative_scan(taken, 3, _add) - taken
    of_quad = gl.sum(taken, 3)
    chunk = gl.arange(0, CHUNKS, layout=gl.SliceLayout(0, gl.SliceLayout(2, _QUADS)))[None, :, None]
    packed = gl.convert_layout(gl.sum(of_quad << 8 * chunk, 1), _PAIRS)
    through = gl.convert_layout(gl.associative_scan(packed, 1, _add), gl.SliceLayout(1, _QUADS))
    before = (through[:, None, :] >> 8 * chunk & 0xFF) - of_quad
    packed = gl.convert_layout(gl.sum(packed, 1), _OF_WARPS)
    of_warp = packed & 0xFF
    for i in gl.static_range(1, CHUNKS):
        before += gl.where(chunk == i, of_warp[:, None][:, None, :], 0)
        of_warp += packed >> 8 * i & 0xFF
    memory.store(of_warp.to(gl.int32))
    group_barrier()
    every = memory.load(gl.SliceLayout(0, _PAIRS))
    warp = gl.arange(0, _WARPS, layout=gl.SliceLayout(1, _PAIRS))
    earlier = gl.arange(0, _WARPS, layout=gl.SliceLayout(0, _PAIRS))[None, :] < warp[:, None]
    base = gl.convert_layout(gl.sum(gl.where(earlier, every[None, :], 0), 1), _OF_WARPS)
    before = before + base[:, None][:, None, :]
    return (in_quad + before[:, :, :, None]).to(gl.int32), gl.sum(every, 0).to(gl.int32)


@gluon.jit
def _middle(low, high):
    """Rounded up. In 64 bits, because the difference may overflow 32."""
    return (low + (high.to(gl.int64) - low + 1) // 2).to(gl.int32)


@gluon.jit
def _most(value):
    return gl.max(gl.max(gl.max(gl.max(value, 3), 1), 1), 0)


@gluon.jit
def _kth(value, k, slack, memory):
    """The largest t such that at least k of a tile are >= t; the least above -inf, if fewer than k are.

    With `slack`, any t that k to k + slack values reach.
    """
    low = _order_of(-_most(gl.where(value > _NOTHING, -value, _NOTHING)))
    high = gl.maximum(low, _order_of(_most(value)))
    turn = k * 0
    while low < high:
        middle = _middle(low, high)
        count = _count((value >= _value_of(middle)).to(gl.int32), memory.index(turn))
        enough = count >= k
        high = gl.where(enough, gl.where(count <= k + slack, middle, high), middle - 1)
        low = gl.where(enough, middle, low)
        turn = 1 - turn
    return _value_of(low)


@gluon.jit
def _lower_bound(values, end, k, memory, WIDE: gl.constexpr):
    """A number that k to k + k / 16 of the maxima of WIDE groups of values [0, end) reach; -inf if fewer than k do."""
    quads = _quads(WIDE // (128 * _WARPS)) * 4
    best = _load(values, quads, quads < end)
    for at in range(WIDE, end, 4 * WIDE):  # four loads at a time
        more = gl.maximum(
            _load(values + at, quads, quads < end - at), _load(values + (at + WIDE), quads, quads < end - at - WIDE)
        )
        last = gl.maximum(
            _load(values + (at + 2 * WIDE), quads, quads < end - at - 2 * WIDE),
            _load(values + (at + 3 * WIDE), quads, quads < end - at - 3 * WIDE),
        )
        best = gl.maximum(best, gl.maximum(more, last))
    bound = (k * 0).to(gl.float32) + _NOTHING
    if _count((best > _NOTHING).to(gl.int32), memory.index(0)) >= k:
        group_barrier()
        bound = _kth(best, k, k // 16, memory)
    group_barrier()
    return bound


@gluon.jit
def _load_chosen(row, chosen, quads, blocks):
    """The orders of the scores of chosen blocks, and the first key of every four."""
    there = quads < blocks * _BLOCK_QUADS
    block = gl.load(chosen + quads // _BLOCK_QUADS, mask=there, other=0, cache_modifier=".cg")
    keys = block * _NEIGHBORS + quads % _BLOCK_QUADS * 4
    return _load(row, keys, there), keys


@gluon.jit
def _gather(row, block_maxima, begin, end, threshold, chosen, candidates, candidate_keys, memory, SHAPE: gl.constexpr):
    """Writes the first scores above `threshold` and their keys; returns the number of all of them."""
    CHUNKS: gl.constexpr = SHAPE.wide // (128 * _WARPS)
    quads = _quads(CHUNKS)
    blocks, turn = begin * 0, begin * 0
    for at in range(begin // _NEIGHBORS, end // _NEIGHBORS, SHAPE.wide):
        best = _load(block_maxima + at, quads * 4, quads * 4 < end // _NEIGHBORS - at)
        taken = best > threshold
        before, count = _numbers(taken.to(gl.int32), memory.index(turn), CHUNKS)
        gl.store(chosen + (blocks + before), at + _each(quads * 4), mask=taken & (blocks + before < SHAPE.block))
        blocks += count
        turn = 1 - turn
    group_barrier()  # threads read what other threads have written
    found = gl.where(blocks > SHAPE.block, blocks, 0)  # too many: the candidates are at least as many
    blocks = gl.where(blocks > SHAPE.block, 0, blocks)
    value, keys = _load_chosen(row, chosen, quads, blocks)
    for at in range(0, blocks * _BLOCK_QUADS, SHAPE.wide // 4):
        next_value, next_keys = _load_chosen(row, chosen, at + SHAPE.wide // 4 + quads, blocks)  # prefetch
        taken = value > threshold
        before, count = _numbers(taken.to(gl.int32), memory.index(turn), CHUNKS)
        write = taken & (found + before < SHAPE.block)
        gl.store(candidates + (found + before), value, mask=write)
        gl.store(candidate_keys + (found + before), _each(keys), mask=write)
        found += count
        turn = 1 - turn
        value, keys = next_value, next_keys
    group_barrier()
    return found


@gluon.jit
def _select(
    row, row_keys, row_len, begin, end, n, topk, groups, out_indices, out_scores, out_count, memory,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """`triton_select.select_row` with a summary. `out_scores` are the bits of float32, `row_keys` those of the row."""
    CHUNKS: gl.constexpr = SHAPE.block // (128 * _WARPS)
    k = gl.minimum(topk, n)
    threshold = (begin * 0).to(gl.float32) + _NOTHING
    size = end - begin
    short = size <= SHAPE.block
    candidate_keys = row_keys + (row_len + SHAPE.block)
    if not short:
        maxima = row_len + 3 * SHAPE.block
        own = size <= SHAPE.wide  # every score is a group
        threshold = _lower_bound(row + gl.where(own, begin, maxima), gl.where(own, size, groups), k, memory, SHAPE.wide)
        size = _gather(
            row, row + (maxima + groups), begin, end, threshold, candidate_keys + SHAPE.block, row + row_len,
            candidate_keys, memory, SHAPE,
        )  # fmt: skip
    if short | ((size <= SHAPE.block) & ((size >= k) | (threshold == _NOTHING))):
        firsts = _quads(CHUNKS) * 4
        value = _load(row + gl.where(short, begin, row_len), firsts, firsts < size)
        number = _each(firsts)
        value = gl.where(number < size, value, _NOTHING)
        keys = begin + number
        if not short:
            there = (firsts < size)[:, :, :, None]
            keys = gl.load(candidate_keys + number, mask=there, other=0, cache_modifier=".cg")
        if k < size:
            threshold = _kth(value, k, 0, memory)
            group_barrier()
        is_above = (value > threshold).to(gl.int32)
        ties = gl.where(threshold == _NOTHING, 0, k - _count(is_above, memory.index(0)))
        is_tie = (value == threshold).to(gl.int32)
        before, _ = _numbers(is_tie, memory.index(1), CHUNKS)
        taken = is_above | gl.where(before < ties, is_tie, 0)
        before, found = _numbers(taken, memory.index(0), CHUNKS)
        gl.store(out_indices + before, keys, mask=taken > 0)
        gl.store(out_scores + before, gl.cast(value, gl.int32, bitcast=True), mask=taken > 0)
        gl.store(out_count, found)
        fill_rest(found, topk, out_indices, out_scores, _FLAT)
    else:
        select_row(row_keys, row_len, begin, end, n, topk, out_indices, out_scores, out_count, SHAPE.block, _FLAT)


@gluon.jit
def _bound(at):
    """A bound of a row's keys as int32, at least 0."""
    return gl.minimum(gl.maximum(gl.load(at), 0), 0x7FFFFFFF).to(gl.int32)


@gluon.jit(do_not_specialize=["tokens", "s_kv", "topk", "first_row", "items"])
def select_kernel(
    lo, hi, indices, scores, length, buffer, buffer_keys, errors, faults, tokens, s_kv, topk, row_len, row_size, groups,
    first_row, items, SHAPE: gl.constexpr,
):  # fmt: skip
    """Selects from one row; nothing if one of its blocks is not in the pool or its keys do not fit in the table."""
    memory = gl.allocate_shared_memory(gl.int32, [2, _WARPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    row = first_row + gl.program_id(0)
    begin, limit = _bound(lo + row), _bound(hi + row)
    beyond = limit > s_kv
    if beyond & (begin < limit):
        gl.store(errors + 1 + row // tokens, (limit - 1).to(gl.int64) | _INDEX_FAULT)
        gl.store(errors, (begin * 0 + 1).to(gl.int64))
    begin = gl.minimum(begin, s_kv)  # so that numbers of keys from there on fit in 32 bits
    gdc_wait()
    fault = gl.zeros([_FAULTS], gl.int32, _FLAT)
    for at in range(0, items, _FAULTS):
        j = at + gl.arange(0, _FAULTS, layout=_FLAT)
        fault |= gl.load(faults + gl.program_id(0) // SHAPE.rows * items + j, mask=j < items, other=0)
    end = gl.maximum(gl.minimum(limit, s_kv), begin)
    end = gl.where(beyond | (gl.max(fault, 0) != 0), begin, end)
    # Whole tiles: they have been scored, with -inf for keys that the row must not select.
    first = begin // _KEYS * _KEYS
    stop = gl.where(begin < end, (end + (_KEYS - 1)) // _KEYS * _KEYS, first)
    out = row.to(gl.int64) * topk
    at = gl.program_id(0).to(gl.int64) * row_size
    _select(
        buffer + at, buffer_keys + at, row_len, first, stop, end - begin, topk, groups,
        indices + out, scores + out, length + row, memory, SHAPE,
    )  # fmt: skip
