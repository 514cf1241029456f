"""The exact top-k of a decode step over the indexer's keys in a paged cache, in Triton: two launches.

The first scores. A program computes the scores of one token, or of some tokens of one sequence, for every n-th tile of
the sequence's keys, whose blocks its row of the block table names. It also writes a summary of the scores: the maxima
of groups and of blocks of keys. A group is the keys at one offset in the program's tiles. They are far apart, so that
similar neighbors are in different groups, and all programs have the same work whatever the length of a sequence. On
Hopper, fp8 keys in blocks of 64 and more are scored in Gluon (`gluon_paged_scores`), with the same bits, and selected
from in Gluon (`gluon_paged_select`) where rows have a summary.

The second selects (`triton_select`), one program per token: with the summary it reads a few percent of the scores. It
has many warps, because nothing else runs on the GPU where there are few tokens; for many tokens it is a small part of
the time. It is launched early, while the first ends. For few tokens in Gluon, a launch between both gathers candidates.

fp8 keys are multiplied as they are, and the sum over heads by their scale.
"""

from types import ModuleType

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnmesh.ops.decode.device_errors import INDEX_FAULT, error_record, raise_device_error
from attnmesh.ops.decode.triton_kernels import record_error
from attnmesh.ops.launch import Launch, Recent, cdiv, multiprocessors, repeat, starts_early
from attnmesh.ops.sparse import indexer_tiles
from attnmesh.ops.sparse.arguments import TopKIndices, empty_topk
from attnmesh.ops.sparse.indexer_tiles import NEIGHBORS, SPAN, IndexerTiles, head_tile
from attnmesh.ops.sparse.paged import IndexerStep
from attnmesh.ops.sparse.triton_indexer import final_score, load_queries, shape_of, sum_over_heads
from attnmesh.ops.sparse.triton_select import select_row
from attnmesh.ops.storage import Quantized, values_of

_WORKSPACE = 256 << 20  # bytes; more tokens are served in several turns
_MIN_SPAN = 128  # keys of a program
_MAX_GROUPS = 8192  # in registers
_PROGRAMS = 4  # that score at a time, per multiprocessor; two with many products
_REGISTERS = 128  # of a thread that scores, so that as many programs fit
_SELECT_WARPS = 16
_FAULTS = tl.constexpr(512)  # read at a time
_INDEX_FAULT = tl.constexpr(INDEX_FAULT)
_NEIGHBORS = tl.constexpr(NEIGHBORS)
_launches: Recent[Launch] = Recent()


def paged_topk(
    step: IndexerStep, gluon: ModuleType | None = None, *, tiles: IndexerTiles | None = None, span: int | None = None,
    block: int | None = None, workspace: int = _WORKSPACE, parts: int | None = None,
) -> TopKIndices:  # fmt: skip
    """`triton_topk.topk` for the tokens iq [B, T, heads, d] of a decode step, over keys first <= p < end [B, T].

    The result has the same bits for all tiles, spans, blocks and workspaces, and if the kernel of a module `gluon`
    scores.
    """
    iq, keys, w, topk, lo, hi, scale, relu, _ = step
    raise_device_error(iq.device)
    batch, tokens, heads, _ = iq.shape
    table, pool = keys.table, values_of(keys.pool)
    assert table is not None
    found = empty_topk(batch, tokens, topk=topk, device=iq.device)
    if batch * tokens == 0:
        return TopKIndices(*found)
    capacity = table.shape[1] * keys.block_size
    if tiles is None:  # rows of a group are tokens of one sequence
        tiles = indexer_tiles.TOPK[iq.element_size()]
        rows = min(tiles.rows, tokens & -tokens, indexer_tiles.MAX_COLUMNS // head_tile(heads))
        # A block is looked up before its keys are loaded: as many tiles are in flight with twice the stages.
        tiles = tiles._replace(rows=rows if heads <= head_tile(heads) else 1, stages=2 * tiles.stages - 1)
    groups = batch * tokens // tiles.rows
    small = tiles.rows * head_tile(heads) <= 64 and tiles.warps == 4
    if span is None:  # of equal parts, so that all programs end at the same time
        resident = (_PROGRAMS if small else 2) * multiprocessors(iq.device, 1)
        # Longer spans in Gluon, but there must be two groups per selected key.
        most = SPAN if gluon is None else max(SPAN, min(gluon.SPAN, capacity * tiles.keys // topk))
        programs = max(1, cdiv(groups * capacity, most * resident)) * resident
        span = max(_MIN_SPAN, cdiv(capacity, max(1, programs // groups)))
    items = max(1, cdiv(capacity, cdiv(span, tiles.keys) * tiles.keys))
    block = block or indexer_tiles.candidate_block(topk)
    # Every offset in a tile is a group; with half of the tiles each, where there would be few groups.
    of_item = tiles.keys if items * tiles.keys >= 4 * topk else 2 * tiles.keys
    wide = min(_MAX_GROUPS, 2 * block)
    if 2 * topk > (wide if capacity <= wide else min(wide, items * of_item)) or capacity <= block:
        wide = 0  # a summary would not help
    row_len = max(1, cdiv(capacity, tiles.keys)) * tiles.keys
    selects = gluon.select if gluon is not None and wide and block >= gluon.select.MIN_BLOCK else None
    if selects is None:
        parts = 0
    elif parts is None:  # where all of them run at once
        parts = selects.PARTS if selects.PARTS * batch * tokens <= multiprocessors(iq.device, 1) else 0
    while parts and of_item > 16 and items * of_item >= 8 * topk:
        of_item //= 2  # every program reads all of them
    maxima = items * of_item
    if parts:
        summary = row_len + 2 * parts * block + cdiv(parts, 16) * 16
        row_size = summary + cdiv(maxima, 16) * 16
    else:
        summary = row_len + 3 * block
        row_size = indexer_tiles.row_elements(row_len, block, maxima)
    at_once = min(groups, max(1, workspace // (4 * tiles.rows * row_size)))
    buffer = torch.empty(at_once * tiles.rows, row_size, dtype=torch.float32, device=iq.device)
    bits, registers = buffer.view(torch.int32), _REGISTERS if small else None
    faults = torch.empty(at_once, items, dtype=torch.int32, device=iq.device)
    scales: Tensor | None = None
    if isinstance(keys.pool, Quantized):
        descriptor = gluon.pool_descriptor(pool) if gluon is not None else None
        pool, scales = pool.view(torch.uint8), keys.pool.scales
    strides_of_scales = (0, 0) if scales is None else scales.stride()[:2]
    # Bounds are read without strides, and bounds of one token per sequence are flattened without a copy.
    iq, w, lo, hi = iq.flatten(0, 1), w.flatten(0, 1), lo.contiguous().flatten(), hi.contiguous().flatten()
    errors, early = error_record(iq.device), starts_early(iq.device)
    with torch.cuda.device_of(iq):
        for first in range(0, groups, at_once):
            count = min(at_once, groups - first)
            rows, first_row = count * tiles.rows, first * tiles.rows
            if gluon is not None:
                repeat(
                    _launches, gluon.score_kernel, (count * items,),
                    (
                        iq, iq.stride()[:2], descriptor, scales, strides_of_scales, table, table.stride(), errors,
                        faults, tokens, keys.num_blocks, w, w.stride(), lo, hi, buffer, row_size, summary, maxima,
                        capacity, heads, scale, first, items,
                    ),
                    SHAPE=gluon.shape_of(
                        tiles.rows, heads, relu, keys.block_size, of_item if wide else 0, wide > 0 and not parts, span
                    ), num_warps=4, maxnreg=registers,
                )  # fmt: skip
            else:
                repeat(
                    _launches, _score_kernel, (count * items,),
                    (
                        iq, iq.stride()[:2], pool, pool.stride()[:2], scales, strides_of_scales,
                        table, table.stride(), errors, faults, tokens, keys.num_blocks,
                        w, w.stride(), lo, hi, buffer, row_len, row_size, maxima,
                        batch * tokens, capacity, heads, scale, first, items,
                    ),
                    SHAPE=shape_of(iq, tiles.keys, tiles.rows, head_tile(heads), relu), BLOCK=block,
                    BLOCK_SIZE=keys.block_size, PARTS=of_item // tiles.keys if wide else 0, EARLY=early,
                    num_warps=tiles.warps, num_stages=tiles.stages, maxnreg=registers,
                )  # fmt: skip
            if selects is not None:
                if parts:
                    repeat(
                        _launches, selects.gather_kernel, (rows * parts,),
                        (lo, hi, buffer, bits, capacity, topk, row_len, row_size, summary, maxima, first_row),
                        SHAPE=selects.selection(tiles.rows, block, wide, parts, selects.PART_WARPS),
                        num_warps=selects.PART_WARPS, launch_pdl=True,
                    )  # fmt: skip
                repeat(
                    _launches, selects.select_kernel, (rows,),
                    (
                        lo, hi, found[0], found[1].view(torch.int32), found[2], buffer, bits, errors, faults, tokens,
                        capacity, topk, row_len, row_size, summary, maxima, first_row, items,
                    ),
                    SHAPE=selects.selection(tiles.rows, block, wide, parts), num_warps=selects.WARPS, launch_pdl=True,
                )  # fmt: skip
            else:
                repeat(
                    _launches, _select_kernel, (rows,),
                    (
                        lo, hi, *found, buffer, bits, errors, faults, tokens, capacity, topk, row_len, row_size,
                        maxima, first_row, items,
                    ),
                    KEYS=tiles.keys, ROWS=tiles.rows, BLOCK=block, WIDE=wide, EARLY=early,
                    num_warps=_SELECT_WARPS, **({"launch_pdl": True} if early else {}),
                )  # fmt: skip
    return TopKIndices(*found)


@triton.jit
def _bound(at, mask):
    """Bounds of a row's keys as int32, at least 0."""
    return tl.minimum(tl.maximum(tl.load(at, mask=mask, other=0), 0), 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _blocks_of(table, entry, read):
    """Entries of a row of the block table, and which of them are read and in the pool."""
    table_row, table_stride, num_blocks = table
    block = tl.load(table_row + entry.to(tl.int64) * table_stride, mask=read, other=0)
    return block, read & (block >= 0) & (block < num_blocks)


@triton.jit
def _load_tile(
    ik, ik_strides, table, keys, read, FP8: tl.constexpr, DTYPE: tl.constexpr, SHAPE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """A tile of keys of one sequence, which of them are in the pool, and words for those that are not."""
    entry = keys // BLOCK_SIZE
    block, there = _blocks_of(table, entry, read)
    word = ((entry + 1).to(tl.int64) << 32) | (block.to(tl.int64) & 0xFFFFFFFF)
    word = tl.where(read & ~there, word, 0)
    block, offset = block.to(tl.int64), (keys % BLOCK_SIZE).to(tl.int64)
    dims = tl.arange(0, SHAPE.block_d)
    at = ik + (block * ik_strides[0] + offset * ik_strides[1])[:, None] + dims[None, :]
    mask = there[:, None] & (dims < SHAPE.d)[None, :]
    if FP8:
        tile = tl.load(at, mask=mask, other=0).to(tl.float8e4nv, bitcast=True).to(tl.float16).to(DTYPE)
    else:
        tile = tl.load(at, mask=mask, other=0.0)
    return tile, there, word


@triton.jit
def _load_scales(key_scales, scale_strides, table, keys, read, BLOCK_SIZE: tl.constexpr):
    """The scales of a tile of keys of one sequence; 0 for those that are not in the pool."""
    block, there = _blocks_of(table, keys // BLOCK_SIZE, read)
    at = key_scales + block.to(tl.int64) * scale_strides[0] + (keys % BLOCK_SIZE).to(tl.int64) * scale_strides[1]
    return tl.load(at, mask=there, other=0.0)


@triton.jit(do_not_specialize=["tokens", "num_blocks", "s_q", "s_kv", "heads", "first_group", "items", "maxima"])
def _score_kernel(
    iq, iq_strides, ik, ik_strides, key_scales, scale_strides, table, table_strides, errors, faults, tokens, num_blocks,
    w, w_strides, lo, hi, buffer, row_len, row_size, maxima, s_q, s_kv, heads, scale, first_group, items,
    SHAPE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_SIZE: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The scores of ROWS rows for those keys of every `items`-th tile that any of them may select, and their maxima."""
    if EARLY:
        gdc_launch_dependents()  # the selection may be launched: it waits for the end of this kernel itself
    KEYS: tl.constexpr = SHAPE.keys
    ROWS: tl.constexpr = SHAPE.rows
    group, item = tl.program_id(0) // items, tl.program_id(0) % items
    row = (first_group + group) * ROWS
    rows = tl.arange(0, ROWS)
    lows, highs = _bound(lo + row + rows, row + rows < s_q), _bound(hi + row + rows, row + rows < s_q)
    highs = tl.minimum(highs, s_kv)
    lowest = tl.min(tl.where(lows < highs, lows, s_kv), 0)
    end = tl.max(tl.where(lows < highs, highs, 0), 0)
    step = items * KEYS
    begin = lowest // KEYS
    begin = (begin + (items - begin % items + item) % items) * KEYS
    of_rows = buffer + group.to(tl.int64) * ROWS * row_size + rows.to(tl.int64)[None, :] * row_size  # [1, ROWS]
    summary = row_len + 3 * BLOCK
    best = tl.full((KEYS, ROWS), float("-inf"), tl.float32)
    other = tl.full((KEYS, ROWS), float("-inf"), tl.float32)  # not `best`: Triton would not carry it through the loop
    found = tl.zeros((), tl.int64)
    if begin < end:
        of_sequence = table + (row // tokens).to(tl.int64) * table_strides[0], table_strides[1], num_blocks
        worst = tl.zeros((KEYS,), tl.int64)
        source = iq, iq_strides, w, w_strides
        queries, weights = load_queries(source, row, s_q, 0, heads, 0, SHAPE.block_d, SHAPE)
        if key_scales is not None:
            keys = begin + tl.arange(0, KEYS)
            read = (keys >= lowest) & (keys < end)
            factor = _load_scales(key_scales, scale_strides, of_sequence, keys, read, BLOCK_SIZE)
        for first in range(begin, end, step):
            keys = first + tl.arange(0, KEYS)
            tile, there, word = _load_tile(
                ik, ik_strides, of_sequence, keys, (keys >= lowest) & (keys < end),
                key_scales is not None, iq.dtype.element_ty, SHAPE, BLOCK_SIZE,
            )  # fmt: skip
            worst = tl.maximum(worst, word)
            total = sum_over_heads(tile, queries, weights, source, row, s_q, heads, SHAPE)
            if key_scales is not None:
                # Those of the next tile are loaded now: the compiler prefetches only what is multiplied.
                following = _load_scales(
                    key_scales, scale_strides, of_sequence, keys + step, keys + step < end, BLOCK_SIZE
                )
                total *= factor[:, None]
                factor = following
            score = final_score(total, scale)
            seen = (keys[:, None] >= lows[None, :]) & (keys[:, None] < highs[None, :]) & there[:, None]
            score = tl.where(seen & (score == score), score, float("-inf"))
            tl.store(of_rows + keys[:, None], score)
            if PARTS > 0:
                best = tl.maximum(best, score)
                if PARTS == 2:
                    best, other = other, best
                blocks = first // _NEIGHBORS + tl.arange(0, KEYS // _NEIGHBORS)
                of_blocks = tl.max(tl.reshape(score, (KEYS // _NEIGHBORS, _NEIGHBORS, ROWS)), 1)
                tl.store(of_rows + (summary + maxima + blocks)[:, None], of_blocks)
        found = tl.max(worst, 0)
        if found != 0:
            record_error(errors, (row // tokens).to(tl.int64), found)
    tl.store(faults + tl.program_id(0), (found != 0).to(tl.int32))
    if PARTS > 0:
        of_groups = of_rows + (summary + item * PARTS * KEYS + tl.arange(0, KEYS))[:, None]
        tl.store(of_groups, best)
        if PARTS == 2:
            tl.store(of_groups + KEYS, other)


@triton.jit(do_not_specialize=["tokens", "s_kv", "topk", "first_row", "items", "groups"])
def _select_kernel(
    lo, hi, indices, scores, length, buffer, buffer_keys, errors, faults, tokens,
    s_kv, topk, row_len, row_size, groups, first_row, items,
    KEYS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Selects from one row; nothing if one of its blocks is not in the pool or its keys do not fit in the table."""
    row = first_row + tl.program_id(0)
    begin, limit = _bound(lo + row, True), _bound(hi + row, True)
    beyond = limit > s_kv
    if beyond & (begin < limit):
        record_error(errors, row // tokens, (limit - 1).to(tl.int64) | _INDEX_FAULT)
    begin = tl.minimum(begin, s_kv)  # so that numbers of keys from there on fit in 32 bits
    if EARLY:
        gdc_wait()
    fault = tl.zeros((_FAULTS,), tl.int32)
    for at in range(0, items, _FAULTS):
        j = at + tl.arange(0, _FAULTS)
        fault |= tl.load(faults + tl.program_id(0) // ROWS * items + j, mask=j < items, other=0)
    end = tl.maximum(tl.minimum(limit, s_kv), begin)
    end = tl.where(beyond | (tl.max(fault, 0) != 0), begin, end)
    # Whole tiles: they have been scored, with -inf for keys that the row must not select. Written as differences, so
    # that the compiler does not learn that they are multiples of KEYS: see `triton_select`.
    first = begin - begin % KEYS
    stop = tl.where(begin < end, end + (KEYS - 1) - (end + KEYS - 1) % KEYS, first)
    at = tl.multiple_of(tl.program_id(0).to(tl.int64) * row_size, 16)
    out = row.to(tl.int64) * topk
    select_row(
        buffer + at, buffer_keys + at, row_len, first, stop, end - begin, topk, groups,
        indices + out, scores + out, length + row, BLOCK, WIDE,
    )  # fmt: skip
