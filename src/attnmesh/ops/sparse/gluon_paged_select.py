"""The selection of a decode step's top-k, on Hopper in Gluon: the launches of `triton_paged_topk` after the scores.

It does what `triton_select` does for rows with a summary. But every warp has a part of each tile, in order. So the
number of an element among those that are taken needs no more than sums within its warp, and one exchange of the counts
of all warps. A search exchanges one count of each warp per step, with one barrier.

With few rows, most of the GPU would be idle. Then a launch of its own gathers the candidates: several programs per row
find the same bound from its groups, and each reads a part of the scores.

Rows that have too many candidates, because they are all alike, are selected from by `gluon_select`.
"""

# mypy: disable-error-code="assignment"
import functools
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnmesh.ops.decode.device_errors import INDEX_FAULT
from attnmesh.ops.decode.gluon_common import add, group_barrier
from attnmesh.ops.sparse.gluon_select import fill_rest, select_row
from attnmesh.ops.sparse.gluon_topk import KEYS
from attnmesh.ops.sparse.indexer_tiles import NEIGHBORS

WARPS = 16
PART_WARPS = 8  # of a program that gathers from a part of a row
PARTS = 16  # of a row
MIN_BLOCK = WARPS * 128  # candidates: four per thread
_KEYS, _NEIGHBORS = gl.constexpr(KEYS), gl.constexpr(NEIGHBORS)
_BLOCK_QUADS = gl.constexpr(NEIGHBORS // 4)
_TILE_CHUNKS = gl.constexpr(4)  # as many as are counted in bytes
_INDEX_FAULT = gl.constexpr(INDEX_FAULT)
_NOTHING = gl.constexpr(float("-inf"))
_FLAT = gl.constexpr(gl.BlockedLayout([2], [32], [WARPS], [0]))
_FAULTS = gl.constexpr(32 * WARPS)  # read at a time


class Selection(NamedTuple):
    """The constants of a kernel."""

    rows: Any  # of a group that is scored together
    block: Any  # candidates in registers
    wide: Any  # groups of the summary in registers
    parts: Any  # of a row, whose candidates have been gathered; 0 if one program does it all
    warps: Any
    tile: Any  # layout: every thread has fours of neighbors, its warp some times 32 of them
    pairs: Any  # layout of pairs of warps


@functools.lru_cache  # layouts take the host some 10 us
def selection(rows: int, block: int, wide: int, parts: int = 0, warps: int = WARPS) -> Selection:
    """The constants of a kernel of so many warps."""
    tile = gl.BlockedLayout([1, 1, 1, 4], [1, 1, 32, 1], [warps, 1, 1, 1], [3, 2, 1, 0])
    pairs = gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])
    return Selection(rows, block, wide, parts, warps, tile, pairs)


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
def _quads(CHUNKS: gl.constexpr, SHAPE: gl.constexpr):
    """The numbers of the fours of a tile [warps, CHUNKS, 32, 4]."""
    quads: gl.constexpr = gl.SliceLayout(3, SHAPE.tile)
    warp = gl.arange(0, SHAPE.warps, layout=gl.SliceLayout(1, gl.SliceLayout(2, quads)))[:, None, None]
    chunk = gl.arange(0, CHUNKS, layout=gl.SliceLayout(0, gl.SliceLayout(2, quads)))[None, :, None]
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, quads)))[None, None, :]
    return (warp * CHUNKS + chunk) * 32 + lane


@gluon.jit
def _each(firsts, SHAPE: gl.constexpr):
    """The numbers of the elements of fours, from those of their first."""
    layout: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, SHAPE.tile)))
    return firsts[:, :, :, None] + gl.arange(0, 4, layout=layout)[None, None, None, :]


@gluon.jit
def _load(values, firsts, there, SHAPE: gl.constexpr):
    """Fours of values, -inf without `there`. Bypasses L1: other programs wrote them."""
    return gl.load(values + _each(firsts, SHAPE), mask=there[:, :, :, None], other=_NOTHING, cache_modifier=".cg")


@gluon.jit
def _count(taken, memory, SHAPE: gl.constexpr):
    """The sum of a tile. Consecutive calls need different `memory`: one barrier is enough then."""
    memory.store(gl.sum(gl.sum(gl.sum(taken, 3), 1), 1).to(gl.int32))  # those of each warp
    group_barrier()
    return gl.sum(memory.load(gl.SliceLayout(0, SHAPE.pairs)), 0).to(gl.int32)


@gluon.jit
def _numbers(taken, memory, CHUNKS: gl.constexpr, SHAPE: gl.constexpr):
    """How many elements of a tile are taken before each of them, and in all. A warp counts in bytes, of each chunk."""
    quads: gl.constexpr = gl.SliceLayout(3, SHAPE.tile)
    of_warps: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(1, quads))
    in_quad = gl.associative_scan(taken, 3, add) - taken
    of_quad = gl.sum(taken, 3)
    chunk = gl.arange(0, CHUNKS, layout=gl.SliceLayout(0, gl.SliceLayout(2, quads)))[None, :, None]
    packed = gl.convert_layout(gl.sum(of_quad << 8 * chunk, 1), SHAPE.pairs)
    through = gl.convert_layout(gl.associative_scan(packed, 1, add), gl.SliceLayout(1, quads))
    before = (through[:, None, :] >> 8 * chunk & 0xFF) - of_quad
    packed = gl.convert_layout(gl.sum(packed, 1), of_warps)
    of_warp = packed & 0xFF
    for i in gl.static_range(1, CHUNKS):
        before += gl.where(chunk == i, of_warp[:, None][:, None, :], 0)
        of_warp += packed >> 8 * i & 0xFF
    memory.store(of_warp.to(gl.int32))
    group_barrier()
    every = memory.load(gl.SliceLayout(0, SHAPE.pairs))
    warp = gl.arange(0, SHAPE.warps, layout=gl.SliceLayout(1, SHAPE.pairs))
    earlier = gl.arange(0, SHAPE.warps, layout=gl.SliceLayout(0, SHAPE.pairs))[None, :] < warp[:, None]
    base = gl.convert_layout(gl.sum(gl.where(earlier, every[None, :], 0), 1), of_warps)
    before = before + base[:, None][:, None, :]
    return (in_quad + before[:, :, :, None]).to(gl.int32), gl.sum(every, 0).to(gl.int32)


@gluon.jit
def _between(low, high, more, fewer, turn):
    """A number above `low`, at most `high`, near where the count of values is right if it falls evenly between them.

    It is `more` too many at `low`, and `fewer` too few beyond `high`. Every fourth number is the middle: then a search
    ends soon whatever the values are. In 64 bits, because the difference may overflow 32.
    """
    share = gl.maximum(more, 0).to(gl.float32) / gl.maximum(more + fewer, 1).to(gl.float32)
    share = gl.where(turn % 4 == 3, 0.5, share)
    width = high.to(gl.int64) - low
    step = (width.to(gl.float32) * share).to(gl.int64)
    return (low + gl.minimum(gl.maximum(step, 1), width)).to(gl.int32)


@gluon.jit
def _most(value):
    return gl.max(gl.max(gl.max(gl.max(value, 3), 1), 1), 0)


@gluon.jit
def _kth(value, size, k, slack, memory, SHAPE: gl.constexpr):
    """The largest t such that at least k of a tile are >= t; the least above -inf, if fewer than k are.

    With `slack`, any t that k to k + slack values reach. About `size` values are above -inf.
    """
    low = _order_of(-_most(gl.where(value > _NOTHING, -value, _NOTHING)))
    high = gl.maximum(low, _order_of(_most(value)))
    turn, aim = k * 0, k + slack // 2
    more, fewer = size - aim, aim
    while low < high:
        middle = _between(low, high, more, fewer, turn)
        count = _count((value >= _value_of(middle)).to(gl.int32), memory.index(turn % 2), SHAPE)
        enough = count >= k
        high = gl.where(enough, gl.where(count <= k + slack, middle, high), middle - 1)
        low = gl.where(enough, middle, low)
        more, fewer = gl.where(enough, count - aim, more), gl.where(enough, fewer, aim - count)
        turn += 1
    return _value_of(low)


@gluon.jit
def _lower_bound(values, end, k, memory, SHAPE: gl.constexpr):
    """A number that k to k + k / 16 of the maxima of groups of values [0, end) reach; -inf if fewer than k do."""
    WIDE: gl.constexpr = SHAPE.wide
    quads = _quads(WIDE // (128 * SHAPE.warps), SHAPE) * 4
    best = _load(values, quads, quads < end, SHAPE)
    for at in range(WIDE, end, 4 * WIDE):  # four loads at a time
        more = gl.maximum(
            _load(values + at, quads, quads < end - at, SHAPE),
            _load(values + (at + WIDE), quads, quads < end - at - WIDE, SHAPE),
        )
        last = gl.maximum(
            _load(values + (at + 2 * WIDE), quads, quads < end - at - 2 * WIDE, SHAPE),
            _load(values + (at + 3 * WIDE), quads, quads < end - at - 3 * WIDE, SHAPE),
        )
        best = gl.maximum(best, gl.maximum(more, last))
    bound = (k * 0).to(gl.float32) + _NOTHING
    size = _count((best > _NOTHING).to(gl.int32), memory.index(0), SHAPE)
    if size >= k:
        group_barrier()
        bound = _kth(best, size, k, k // 16, memory, SHAPE)
    group_barrier()
    return bound


@gluon.jit
def _load_chosen(row, chosen, quads, blocks, SHAPE: gl.constexpr):
    """The orders of the scores of chosen blocks, and the first key of every four."""
    there = quads < blocks * _BLOCK_QUADS
    block = gl.load(chosen + quads // _BLOCK_QUADS, mask=there, other=0, cache_modifier=".cg")
    keys = block * _NEIGHBORS + quads % _BLOCK_QUADS * 4
    return _load(row, keys, there, SHAPE), keys


@gluon.jit
def _gather(row, block_maxima, begin, end, threshold, chosen, candidates, candidate_keys, memory, SHAPE: gl.constexpr):
    """Writes the first scores above `threshold` and their keys; returns the number of all of them."""
    CHUNKS: gl.constexpr = SHAPE.wide // (128 * SHAPE.warps)
    quads = _quads(CHUNKS, SHAPE)
    blocks, turn = begin * 0, begin * 0
    for at in range(begin // _NEIGHBORS, end // _NEIGHBORS, SHAPE.wide):
        best = _load(block_maxima + at, quads * 4, quads * 4 < end // _NEIGHBORS - at, SHAPE)
        taken = best > threshold
        before, count = _numbers(taken.to(gl.int32), memory.index(turn), CHUNKS, SHAPE)
        write = taken & (blocks + before < SHAPE.block)
        gl.store(chosen + (blocks + before), at + _each(quads * 4, SHAPE), mask=write)
        blocks += count
        turn = 1 - turn
    group_barrier()  # threads read what other threads have written
    found = gl.where(blocks > SHAPE.block, blocks, 0)  # too many: the candidates are at least as many
    blocks = gl.where(blocks > SHAPE.block, 0, blocks)
    value, keys = _load_chosen(row, chosen, quads, blocks, SHAPE)
    for at in range(0, blocks * _BLOCK_QUADS, SHAPE.wide // 4):
        next_value, next_keys = _load_chosen(row, chosen, at + SHAPE.wide // 4 + quads, blocks, SHAPE)  # prefetch
        taken = value > threshold
        before, count = _numbers(taken.to(gl.int32), memory.index(turn), CHUNKS, SHAPE)
        write = taken & (found + before < SHAPE.block)
        gl.store(candidates + (found + before), value, mask=write)
        gl.store(candidate_keys + (found + before), _each(keys, SHAPE), mask=write)
        found += count
        turn = 1 - turn
        value, keys = next_value, next_keys
    group_barrier()
    return found


@gluon.jit
def _gather_part(row, value, begin, end, threshold, candidates, candidate_keys, out_count, memory, SHAPE: gl.constexpr):
    """Writes the first scores of [begin, end) from `threshold` on, their keys, and the number of all of them.

    Begins with the tile `value`.
    """
    TILE: gl.constexpr = _TILE_CHUNKS * 128 * SHAPE.warps
    quads = _quads(_TILE_CHUNKS, SHAPE) * 4
    found, turn = begin * 0, begin * 0
    for at in range(begin, end, TILE):
        after = _load(row + (at + TILE), quads, quads < end - at - TILE, SHAPE)  # prefetch
        taken = (value >= threshold) & (value > _NOTHING)
        before, count = _numbers(taken.to(gl.int32), memory.index(turn), _TILE_CHUNKS, SHAPE)
        write = taken & (found + before < SHAPE.block)
        gl.store(candidates + (found + before), value, mask=write)
        gl.store(candidate_keys + (found + before), at + _each(quads, SHAPE), mask=write)
        found += count
        turn = 1 - turn
        value = after
    # Candidates are read in fours.
    rest = found + gl.arange(0, 4, layout=gl.SliceLayout(0, SHAPE.pairs))
    nothing = gl.full([4], _NOTHING, gl.float32, gl.SliceLayout(0, SHAPE.pairs))
    gl.store(candidates + rest, nothing, mask=rest < gl.minimum((found + 3) // 4 * 4, SHAPE.block))
    gl.store(out_count, found)


@gluon.jit
def _locate(counts, firsts, SHAPE: gl.constexpr):
    """Where fours of the candidates of all parts are, by the number of their first; and the number of all, in fours."""
    PARTS: gl.constexpr = SHAPE.parts
    places = firsts
    end = gl.program_id(0) * 0
    for i in gl.static_range(PARTS):
        count = (gl.load(counts + i, cache_modifier=".cg") + 3) // 4 * 4
        end += count
        places = places + gl.where(firsts >= end, SHAPE.block - count, 0)
    return places, end


@gluon.jit
def _select(
    row, row_keys, row_len, begin, end, n, topk, summary, groups, fault, out_indices, out_scores, out_count, memory,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """`triton_select.select_row` with a summary. `out_scores` are the bits of float32, `row_keys` those of the row.

    With parts their candidates follow the row: scores and keys of up to `block` of each, and their numbers; then the
    summary. And nothing is selected if there is a `fault`, which need not have been loaded before the candidates.
    """
    CHUNKS: gl.constexpr = SHAPE.block // (128 * SHAPE.warps)
    k = gl.minimum(topk, n)
    threshold = (begin * 0).to(gl.float32) + _NOTHING
    size = end - begin
    short = size <= SHAPE.block
    firsts = _quads(CHUNKS, SHAPE) * 4
    number = _each(firsts, SHAPE)
    places = firsts  # of candidates
    if SHAPE.parts > 0:
        candidate_keys = row_keys + (row_len + SHAPE.parts * SHAPE.block)
        if not short:
            places, size = _locate(row_keys + (summary - SHAPE.parts), firsts, SHAPE)
    else:
        candidate_keys = row_keys + (row_len + SHAPE.block)
        if not short:
            own = size <= SHAPE.wide  # every score is a group
            threshold = _lower_bound(row + gl.where(own, begin, summary), gl.where(own, size, groups), k, memory, SHAPE)
            size = _gather(
                row, row + (summary + groups), begin, end, threshold, candidate_keys + SHAPE.block, row + row_len,
                candidate_keys, memory, SHAPE,
            )  # fmt: skip
    if short | ((size <= SHAPE.block) & ((size >= k) | (threshold == _NOTHING))):
        there = firsts < size
        value = _load(row + gl.where(short, begin, row_len), gl.where(short, firsts, places), there, SHAPE)
        keys = begin + number
        if not short:
            keys = gl.load(
                candidate_keys + _each(places, SHAPE), mask=there[:, :, :, None], other=0, cache_modifier=".cg"
            )
        if SHAPE.parts > 0:
            k = gl.where(gl.max(fault, 0) != 0, 0, k)
        value = gl.where(number < size, value, _NOTHING)
        if k < size:
            threshold = _kth(value, size, k, 0, memory, SHAPE)
            group_barrier()
        taken = ((value >= threshold) & (value > _NOTHING)).to(gl.int32)
        before, found = _numbers(taken, memory.index(0), CHUNKS, SHAPE)
        if found > k:  # without the last of those that equal the k-th
            is_tie = (value == threshold).to(gl.int32)
            before, ties = _numbers(is_tie, memory.index(1), CHUNKS, SHAPE)
            taken -= gl.where(before >= ties - (found - k), is_tie, 0)
            before, found = _numbers(taken, memory.index(0), CHUNKS, SHAPE)
        gl.store(out_indices + before, keys, mask=taken > 0)
        gl.store(out_scores + before, gl.cast(value, gl.int32, bitcast=True), mask=taken > 0)
        gl.store(out_count, found)
        fill_rest(found, topk, out_indices, out_scores, _FLAT)
    else:
        if SHAPE.parts > 0:
            failed = gl.max(fault, 0) != 0
            end, n = gl.where(failed, begin, end), gl.where(failed, 0, n)
        select_row(row_keys, row_len, begin, end, n, topk, out_indices, out_scores, out_count, SHAPE.block, _FLAT)


@gluon.jit
def bound(at):
    """Bounds of rows' keys as int32, at least 0."""
    return gl.minimum(gl.maximum(gl.load(at), 0), 0x7FFFFFFF).to(gl.int32)


@gluon.jit
def _tiles(begin, end):
    """The keys of whole tiles. They have been scored, with -inf for keys that the row must not select."""
    first = begin // _KEYS * _KEYS
    return first, gl.where(begin < end, (end + (_KEYS - 1)) // _KEYS * _KEYS, first)


@gluon.jit(do_not_specialize=["s_kv", "topk", "first_row"])
def gather_kernel(
    lo, hi, buffer, buffer_keys, s_kv, topk, row_len, row_size, summary, groups, first_row, SHAPE: gl.constexpr
):
    """Gathers the candidates of one part of a row that is not short."""
    gdc_launch_dependents()  # the selection may be launched: it waits for the end of this kernel itself
    memory = gl.allocate_shared_memory(gl.int32, [2, SHAPE.warps], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    index, part = gl.program_id(0) // SHAPE.parts, gl.program_id(0) % SHAPE.parts
    begin = gl.minimum(bound(lo + first_row + index), s_kv)
    end = gl.maximum(gl.minimum(bound(hi + first_row + index), s_kv), begin)
    first, stop = _tiles(begin, end)
    size = stop - first
    share = (size + (_KEYS * SHAPE.parts - 1)) // (_KEYS * SHAPE.parts) * _KEYS
    at = first + part * share
    end_of_part = gl.minimum(at + share, stop)
    gdc_wait()
    if size > SHAPE.block:
        row = buffer + index.to(gl.int64) * row_size
        row_keys = buffer_keys + index.to(gl.int64) * row_size
        quads = _quads(_TILE_CHUNKS, SHAPE) * 4
        value = _load(row + at, quads, quads < end_of_part - at, SHAPE)  # while the bound is searched for
        own = size <= SHAPE.wide  # every score is a group
        threshold = _lower_bound(
            row + gl.where(own, first, summary), gl.where(own, size, groups), gl.minimum(topk, end - begin), memory,
            SHAPE,
        )  # fmt: skip
        candidates = row_len + part * SHAPE.block
        _gather_part(
            row, value, at, end_of_part, threshold, row + candidates,
            row_keys + (candidates + SHAPE.parts * SHAPE.block), row_keys + (summary - SHAPE.parts + part), memory,
            SHAPE,
        )  # fmt: skip


@gluon.jit(do_not_specialize=["tokens", "s_kv", "topk", "first_row", "items"])
def select_kernel(
    lo, hi, indices, scores, length, buffer, buffer_keys, errors, faults, tokens, s_kv, topk, row_len, row_size,
    summary, groups, first_row, items, SHAPE: gl.constexpr,
):  # fmt: skip
    """Selects from one row; nothing if one of its blocks is not in the pool or its keys do not fit in the table."""
    memory = gl.allocate_shared_memory(gl.int32, [2, SHAPE.warps], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    row = first_row + gl.program_id(0)
    begin, limit = bound(lo + row), bound(hi + row)
    beyond = limit > s_kv
    if beyond & (begin < limit):
        gl.store(errors + 1 + row // tokens, (limit - 1).to(gl.int64) | _INDEX_FAULT)
        gl.store(errors, (begin * 0 + 1).to(gl.int64))
    begin = gl.minimum(begin, s_kv)  # so that numbers of keys from there on fit in 32 bits
    gdc_wait()
    faults += gl.program_id(0) // SHAPE.rows * items
    j = gl.arange(0, _FAULTS, layout=_FLAT)
    fault = gl.load(faults + j, mask=j < items, other=0)
    for at in range(_FAULTS, items, _FAULTS):
        fault |= gl.load(faults + (at + j), mask=at + j < items, other=0)
    end = gl.where(beyond, begin, gl.maximum(gl.minimum(limit, s_kv), begin))
    if SHAPE.parts == 0:
        end = gl.where(gl.max(fault, 0) != 0, begin, end)
    first, stop = _tiles(begin, end)
    out = row.to(gl.int64) * topk
    at = gl.program_id(0).to(gl.int64) * row_size
    _select(
        buffer + at, buffer_keys + at, row_len, first, stop, end - begin, topk, summary, groups, fault,
        indices + out, scores + out, length + row, memory, SHAPE,
    )  # fmt: skip
