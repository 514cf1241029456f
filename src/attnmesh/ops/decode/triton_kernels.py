"""The second kernel of decode: every head's pieces merged into its state, in the order of their keys.

It starts while the first kernel runs, and looks for faults meanwhile: positions past the cache, and table entries
outside the pool. (The first kernel reads no such memory; a row with a fault becomes NaN here.)
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnmesh.ops.decode.triton_keys import (
    blocks_at,
    halves,
    head_of,
    in_fp16,
    join_pairs,
    load_across,
    load_rows,
    offsets_at,
    places_at,
    powers_of_rows,
    readable,
    split_pairs,
)
from attnmesh.ops.decode.triton_schedule import (
    NUMBERS,
    at_rows,
    before,
    cut,
    interval_of,
    line_of,
    picked,
    row_tiles,
    rows_of,
    seen,
    sound,
)

# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False


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


# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False


@triton.jit(do_not_specialize=NUMBERS)
def split_kernel(
    q, q_strides, k, v, k_strides, k_scales, k_scale_strides, v_strides, v_scales, v_scale_strides,
    table, table_stride, cur_pos, sight_first, sight_end, mask, mask_strides, mask_width, tree, tree_strides, sinks,
    out, out_strides, lse, lse_strides, part_out, part_lse,
    batch, kv_heads, num_blocks, capacity, window, shares, most, scale_log2,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    STORAGE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    FIXED: tl.constexpr, SHARED: tl.constexpr, BATCH: tl.constexpr, V_IN_K: tl.constexpr, PAIRED: tl.constexpr,
    COMPILED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Attend over this program's share of the line; write whole heads to out, and pieces of heads aside."""
    if EARLY:
        gdc_launch_dependents()  # the merge may get ready: it waits for the end of this kernel by itself
    index, firsts, ends, first_units, counts = line_of(
        cur_pos, sight_first, sight_end, batch, window, capacity, UNIT, TOKENS, SHARED, BATCH
    )
    BOUNDED: tl.constexpr = (window is not None) or (sight_first is not None)  # keys may begin anywhere
    row_count, tiles = row_tiles(batch, TOKENS, GROUP, ROWS, SHARED)
    heads = kv_heads * tiles
    head_tile = tl.program_id(0) % heads
    head = head_tile // tiles
    share = (tl.program_id(0) // heads).to(tl.int64)
    total, shares = cut(counts, shares, most)
    at = share * total // shares
    stop = tl.minimum((share + 1) * total // shares, total)

    while at < stop:
        # Which sequence this unit is of, and how far that lies in this share.
        sequence = tl.sum((tl.cumsum(counts, 0) <= at).to(tl.int32), 0)
        units = picked(counts, index, sequence)
        from_unit = (at - before(counts, index, sequence)).to(tl.int32)
        until = from_unit + 1
        if not FIXED:
            until = tl.minimum(units, from_unit + (stop - at)).to(tl.int32)
        first_unit = picked(first_units, index, sequence)
        key_begin = (first_unit + from_unit) * UNIT
        key_stop = tl.minimum((first_unit + until) * UNIT, picked(ends, index, sequence))
        first = key_begin
        if BOUNDED:  # they may begin in the middle of a unit: the tiles before are not visited
            first = tl.maximum(picked(firsts, index, sequence), key_begin)
            key_begin += (first - key_begin) // KEYS * KEYS

        rows = head_tile % tiles * ROWS + tl.arange(0, ROWS)
        real, row_sequence, row_head, row_token = rows_of(rows, row_count, head, sequence, TOKENS, GROUP, SHARED)
        row_last = sound(tl.load(cur_pos + row_sequence, mask=real, other=-1), capacity)
        # The last key that a row sees; none for rows that are not there.
        row_first = sight_first
        if sight_first is not None:
            row_first, own = interval_of(sight_first, sight_end, row_sequence, row_token, row_last, TOKENS)
        else:
            own = tl.where(row_last >= 0, row_last - (TOKENS - 1) + row_token, -1)

        q_rows = q + at_rows(q_strides, row_sequence, row_head, row_token)
        main = tl.arange(0, MAIN)
        q_main = tl.load(q_rows[None, :] + main[:, None], mask=real[None, :] & (main < D)[:, None], other=0.0)
        q_tail = q_main
        if TAIL > 0:
            tail = MAIN + tl.arange(0, TAIL)
            q_tail = tl.load(q_rows[None, :] + tail[:, None], mask=real[None, :] & (tail < D)[:, None], other=0.0)

        score_scale = scale_log2
        value_scale = 1.0
        if STORAGE == "fp8":
            score_scale *= tl.load(k_scales + head * k_scale_strides[0])
            value_scale = tl.load(v_scales + head * v_scale_strides[0])

        if PAIRED:
            q_main, row_scale = in_fp16(q_main)
            q_main, q_odd = split_pairs(q_main, MAIN // 2, ROWS)
            score_scale *= row_scale[None, :]
        # The carry: `acc / sum of whole` is the output so far, `peak + log2(that sum)` its log-sum-exp in base 2.
        acc = tl.zeros((BLOCK_DV // 2 if PAIRED else BLOCK_DV, ROWS), tl.float32)
        acc_odd = acc
        whole = tl.zeros((KEYS, ROWS), tl.float32)  # summed over the keys at the end only
        peak = tl.full((ROWS,), float("-inf"), tl.float32)

        table_row = table
        if (BLOCK_SIZE > 0) and (not SHARED):
            table_row += sequence.to(tl.int64) * table_stride
        OWN: tl.constexpr = (BLOCK_SIZE == 0) and (not SHARED)
        k_head = head_of(k, k_strides, head, sequence, OWN)
        v_head = head_of(v, v_strides, head, sequence, OWN)
        k_scale_head = k_scales
        v_scale_head = v_scales
        if (STORAGE == "int8") | (STORAGE == "bfp8"):
            k_scale_head = head_of(k_scales, k_scale_strides, head, sequence, OWN)
            v_scale_head = head_of(v_scales, v_scale_strides, head, sequence, OWN)

        blocks = blocks_at(table_row, key_begin, key_stop, BLOCK_SIZE, ALIGNED, KEYS)
        for key in range(key_begin, key_stop, KEYS):
            keys = key + tl.arange(0, KEYS)
            places = places_at(key, BLOCK_SIZE, ALIGNED, KEYS)
            there = readable(blocks, keys, first, key_stop, num_blocks, BOUNDED, BLOCK_SIZE)
            k_offsets = offsets_at(blocks, places, k_strides, WIDE)
            v_offsets = offsets_at(blocks, places, v_strides, WIDE)
            if PAIRED:
                k_main, k_odd = halves(load_rows(k_head, k_offsets, there, 0, D // 2, MAIN // 2), STORAGE, COMPILED)
            else:
                k_main = load_rows(k_head, k_offsets, there, 0, D, MAIN)
            if STORAGE == "bfp8":
                k_powers = offsets_at(blocks, places, k_scale_strides, WIDE)
                steps = powers_of_rows(k_scale_head, k_scale_strides, k_powers, there, 0, D, KEYS, MAIN)
                k_main = k_main.to(tl.float32) * steps
            k_main = k_main.to(q_main.dtype)
            scores = tl.dot(k_main, q_main, input_precision="ieee")
            if PAIRED:
                scores = tl.dot(k_odd, q_odd, scores)
            if TAIL > 0:
                k_tail = load_rows(k_head, k_offsets, there, MAIN, D, TAIL)
                if STORAGE == "bfp8":
                    steps = powers_of_rows(k_scale_head, k_scale_strides, k_powers, there, MAIN, D, KEYS, TAIL)
                    k_tail = k_tail.to(tl.float32) * steps
                scores = tl.dot(k_tail.to(q_main.dtype), q_tail, scores, input_precision="ieee")
            scores *= score_scale
            if STORAGE == "int8":
                at_scale = offsets_at(blocks, places, k_scale_strides, WIDE)
                scores *= tl.load(k_scale_head + at_scale, mask=there, other=0.0)[:, None]

            scores, visible = seen(
                scores, keys, row_last, row_first, own, row_sequence, row_head, row_token, window,
                mask, mask_strides, mask_width, tree, tree_strides, TOKENS,
            )  # fmt: skip
            if UNIT % KEYS != 0:  # a split may end in the middle of a tile
                visible = visible & (keys < key_stop)[:, None]
            scores = tl.where(visible, scores, float("-inf"))
            used = there
            if (mask is not None) | (tree is not None):  # what nobody sees may hold anything, and 0 * NaN is NaN
                used = used & (tl.max(visible.to(tl.int32), 1) > 0)

            # A value's own scale joins its weight. The running peak counts the scale's exponent, too, so that the
            # weight can leave fp16 neither way.
            peaks = scores
            if STORAGE == "int8":
                at_scale = offsets_at(blocks, places, v_scale_strides, WIDE)
                token_scale = tl.load(v_scale_head + at_scale, mask=used, other=0.0)
                exponent = ((token_scale.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
                # At least -100: of values that are 0, or nearly, even the sum of a billion weights is finite.
                peaks += tl.maximum(exponent, -100).to(tl.float32)[:, None]
            top = tl.maximum(peak, tl.max(peaks, 0))
            shift = tl.where(top == float("-inf"), 0.0, top)  # -inf - -inf would be NaN
            weights = tl.exp2(scores - shift[None, :])
            decay = tl.exp2(peak - shift)
            whole = whole * decay[None, :] + weights
            if STORAGE == "int8":
                weights *= token_scale[:, None]
            weights = weights.to(q_main.dtype)
            if V_IN_K:
                v_tile = tl.trans(k_main)
                if (mask is not None) | (tree is not None):
                    v_tile = tl.where(used[None, :], v_tile, 0.0)
            elif PAIRED:
                v_tile, v_odd = halves(load_across(v_head, v_offsets, used, DV // 2, BLOCK_DV // 2), STORAGE, COMPILED)
                acc_odd = tl.dot(v_odd, weights, acc_odd * decay[None, :])
            else:
                v_tile = load_across(v_head, v_offsets, used, DV, BLOCK_DV)
                if STORAGE == "bfp8":
                    v_powers = offsets_at(blocks, places, v_scale_strides, WIDE)
                    steps = powers_of_rows(v_scale_head, v_scale_strides, v_powers, used, 0, DV, KEYS, BLOCK_DV)
                    v_tile = v_tile.to(tl.float32) * tl.trans(steps)
                v_tile = v_tile.to(q_main.dtype)
            acc = tl.dot(v_tile, weights, acc * decay[None, :], input_precision="ieee")
            peak = top
            # Read one tile ahead: no key waits for its address.
            blocks = blocks_at(table_row, key + KEYS, key_stop, BLOCK_SIZE, ALIGNED, KEYS)

        if PAIRED:
            acc = join_pairs(acc, acc_odd, BLOCK_DV // 2, ROWS)
        acc *= value_scale
        sums = tl.sum(whole, 0)
        columns = tl.arange(0, BLOCK_DV)
        writes = real[None, :] & (columns < DV)[:, None]
        if (from_unit == 0) & (until == units):
            sink = tl.full((ROWS,), float("-inf"), tl.float32)
            if sinks is not None:
                sink = tl.load(sinks + row_head, mask=real & (row_last >= 0), other=float("-inf")).to(tl.float32)
                sink *= _LOG2_E
            result, natural = finished(acc, sums, peak, sink)
            out_rows = at_rows(out_strides, row_sequence, row_head, row_token)
            tl.store(out + out_rows[None, :] + columns[:, None], result.to(out.dtype.element_ty), mask=writes)
            lse_rows = at_rows(lse_strides, row_sequence, row_head, row_token)
            tl.store(lse + lse_rows, natural, mask=real)
        else:
            slot = at
            if not FIXED:
                slot = 2 * share + (from_unit == 0)
            pieces = (slot * heads + head_tile) * ROWS + tl.arange(0, ROWS)
            normal = acc / tl.where(sums == 0.0, 1.0, sums)[None, :]
            tl.store(part_out + pieces[None, :] * DV + columns[:, None], normal, mask=writes)
            tl.store(part_lse + pieces, peak + tl.log2(sums), mask=real)
        at += until - from_unit
