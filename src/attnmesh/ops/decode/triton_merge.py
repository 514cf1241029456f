"""The second kernel of decode: every head's pieces merged into its state, in the order of their keys.

It starts while the first kernel runs, and looks for faults meanwhile: positions past the cache, and table entries
outside the pool. (The first kernel reads no such memory; a row with a fault becomes NaN here.)
"""

# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from attnmesh.ops.decode.triton_schedule import NUMBERS, at_rows, before, cut, line_of, picked, row_tiles, rows_of

_LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = tl.constexpr(1.4426950408889634)
_NOWHERE = tl.constexpr(2**31 - 1)  # later than any slot


@triton.jit
def finished(acc, total, peak, sink):
    """A state [values, rows] in base 2, its rows' sinks (-inf: none) merged in, as (out, lse in natural log)."""
    top = tl.maximum(peak, sink)
    shift = tl.where(top == float("-inf"), 0.0, top)
    decay = tl.exp2(peak - shift)
    total = total * decay + tl.exp2(sink - shift)
    weight = decay / tl.where(total == 0.0, 1.0, total)
    return acc * weight[None, :], (shift + tl.log2(total)) * _LN_2


@triton.jit(do_not_specialize=NUMBERS)
def merge_kernel(
    part_out, part_lse, table, table_stride, cur_pos, sight_first, sight_end, sinks,
    out, out_strides, lse, lse_strides, faults, fault_base,
    batch, kv_heads, num_blocks, capacity, window, shares, most,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DV: tl.constexpr,
    PIECES: tl.constexpr, SOME_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, UNIT: tl.constexpr, FIXED: tl.constexpr, SHARED: tl.constexpr,
    BATCH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program for each head of each sequence (even a skipped one), and for some of its rows and columns."""
    index, firsts, ends, _, counts = line_of(
        cur_pos, sight_first, sight_end, batch, window, capacity, UNIT, TOKENS, SHARED, BATCH
    )
    row_count, tiles = row_tiles(batch, TOKENS, GROUP, ROWS, SHARED)
    heads = kv_heads * tiles
    sequence = tl.program_id(0) // heads
    head_tile = tl.program_id(0) % heads
    units = picked(counts, index, sequence)
    begin = before(counts, index, sequence)
    if FIXED:
        first = begin
        pieces = units
    else:
        total, shares = cut(counts, shares, most)
        total = tl.maximum(total, 1)
        first = ((begin + 1) * shares - 1) // total  # the share that begin lies in
        pieces = (((begin + units) * shares - 1) // total - first + 1).to(tl.int32)

    place = tl.program_id(1) * SOME_ROWS + tl.arange(0, SOME_ROWS)
    rows = head_tile % tiles * ROWS + place
    real, row_sequence, row_head, row_token = rows_of(
        rows, row_count, head_tile // tiles, sequence, TOKENS, GROUP, SHARED
    )
    row_last = tl.load(cur_pos + row_sequence, mask=real, other=-1)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)

    fault = row_last >= capacity
    whose = tl.max(tl.where(fault, row_sequence, -1), 0)
    if whose >= 0:
        _report(faults, fault_base + whose, -1 - tl.load(cur_pos + whose).to(tl.int64))
    if BLOCK_SIZE > 0:
        table_row = table
        if not SHARED:
            table_row += sequence.to(tl.int64) * table_stride
        slot = _bad_slot(
            table_row, picked(firsts, index, sequence), picked(ends, index, sequence), num_blocks, BLOCK_SIZE
        )
        if (slot != _NOWHERE) & (whose < 0):  # a position past the cache has no slots to speak of
            entry = tl.load(table_row + slot).to(tl.int64) & 0xFFFFFFFF
            _report(faults, fault_base + sequence, (tl.cast(slot + 1, tl.int64) << 32) | entry)
        # Of sequences that share a table, those that reach the slot.
        fault = fault | ((row_last >= 0) & (slot <= row_last // BLOCK_SIZE))

    whole_head = (pieces == 1) & (units > 0)  # the first kernel has written it
    faulty = tl.max(fault.to(tl.int32), 0) > 0
    alone = (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (tl.program_id(2) == 0)
    # Programs with nothing to merge leave without waiting; one waits always, or this kernel could end first.
    if EARLY and ((not whole_head) | faulty | alone):
        gdc_wait()
    if (not whole_head) | faulty:
        acc = tl.zeros((COLUMNS, SOME_ROWS), tl.float32)
        whole = tl.zeros((SOME_ROWS,), tl.float32)
        peak = tl.full((SOME_ROWS,), float("-inf"), tl.float32)
        if units > 0:  # sequences without a fault share these rows with one that has it
            for at in range(0, pieces, PIECES):
                piece = at + tl.arange(0, PIECES)
                if FIXED:
                    slots = first + piece
                else:
                    # A share's first piece begins in the middle of a sequence; its last one at the beginning.
                    slots = 2 * (first + piece) + (piece == 0)
                where = (slots * heads + head_tile)[:, None] * ROWS + place[None, :]
                some = (piece < pieces)[:, None] & real[None, :]
                lses = tl.load(part_lse + where, mask=some, other=float("-inf"))
                outs = tl.load(
                    part_out + where[:, None, :] * DV + columns[None, :, None],
                    mask=some[:, None, :] & (columns < DV)[None, :, None], other=0.0,
                )  # fmt: skip
                top = tl.maximum(peak, tl.max(lses, 0))
                shift = tl.where(top == float("-inf"), 0.0, top)
                weights = tl.exp2(lses - shift[None, :])
                decay = tl.exp2(peak - shift)
                whole = whole * decay + tl.sum(weights, 0)
                acc = acc * decay[None, :] + tl.sum(weights[:, None, :] * outs, 0)
                peak = top
        sink = tl.full((SOME_ROWS,), float("-inf"), tl.float32)
        if sinks is not None:
            sink = tl.load(sinks + row_head, mask=real & (row_last >= 0), other=float("-inf")).to(tl.float32) * _LOG2_E
        result, natural = finished(acc, whole, peak, sink)
        result = tl.where(fault[None, :], float("nan"), result)
        natural = tl.where(fault, float("nan"), natural)
        # Of a head that was whole, only what is faulty is written anew.
        writes = real & (fault | (not whole_head))
        out_rows = at_rows(out_strides, row_sequence, row_head, row_token)
        inside = writes[None, :] & (columns < DV)[:, None]
        tl.store(out + out_rows[None, :] + columns[:, None], result.to(out.dtype.element_ty), mask=inside)
        if tl.program_id(2) == 0:
            lse_rows = at_rows(lse_strides, row_sequence, row_head, row_token)
            tl.store(lse + lse_rows, natural, mask=writes)


@triton.jit
def _bad_slot(table_row, first, end, num_blocks, BLOCK_SIZE: tl.constexpr):
    """The first slot of a sequence's own whose entry is not in the pool."""
    worst = tl.full((512,), _NOWHERE, tl.int32)
    stop = tl.cdiv(end, BLOCK_SIZE)
    for begin in range(first // BLOCK_SIZE, stop, 512):
        slots = begin + tl.arange(0, 512)
        blocks = tl.load(table_row + slots, mask=slots < stop, other=0)
        wrong = (blocks < 0) | (blocks >= num_blocks)
        worst = tl.minimum(worst, tl.where(wrong, slots, _NOWHERE))
    return tl.min(worst, 0)


@triton.jit
def _report(faults, sequence, word):
    """Tell the host: a word for the sequence, (slot + 1) << 32 | entry or -1 - position, then the flag."""
    tl.store(faults + 1 + sequence, word)
    tl.store(faults, tl.full((), 1, tl.int64))
