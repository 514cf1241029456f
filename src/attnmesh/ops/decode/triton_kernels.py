"""The two decode kernels: `split_kernel` attends over partitions of the keys, `merge_kernel` merges the partial states.

In the split kernel, the query heads of one kv head and their T tokens are the columns of one tile, so that each key is
read once for all of them. Keys are the rows: the tensor cores then pad the few queries to 8, not to 16. Where two kv
heads have at most 8 queries together, one program reads both, which are adjacent in a pool (HEADS = 2; GROUP then
counts the query heads of both): each product has all queries, and products with the other head are dropped.

The merge kernel merges the splits of every head in the order of their keys. It starts while the split kernel runs, and
meanwhile checks for positions beyond the cache and table entries outside the pool. (The split kernel reads no such
memory; rows with an error become NaN in the merge.)
"""

# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnmesh.ops.decode.triton_keys import (
    head_pointer,
    in_bounds,
    join_pairs,
    key_offsets,
    load_bfp_scales,
    load_blocks,
    load_exponents,
    load_exponents_transposed,
    load_latent_scales,
    load_rows,
    load_transposed,
    normalize_to_fp16,
    offsets_in_block,
    split_pairs,
    unpack_bfp_pairs,
    unpack_pairs,
)
from attnmesh.ops.decode.triton_schedule import (
    NOT_SPECIALIZED,
    locate_rows,
    partition_units,
    row_key_range,
    row_offsets,
    row_tiles,
    select,
    units_before,
    valid_position,
    visible_keys,
    work_units,
)
from attnmesh.ops.dense.triton_tiles import tanh

_LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = tl.constexpr(1.4426950408889634)
_CHAIN = tl.constexpr(128)  # products of float32 that are summed one after another
_NO_SLOT = tl.constexpr(2**31 - 1)  # beyond any slot


@triton.jit
def finish_state(total, row_max, sink):
    """The factor of the sums of values, and the lse in natural log, of a state in base 2 with sinks (-inf: none)."""
    new_row_max = tl.maximum(row_max, sink)
    shift = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    acc_scale = tl.exp2(row_max - shift)
    total = total * acc_scale + tl.exp2(tl.where(sink == float("inf"), 0.0, sink - shift))
    weight = acc_scale / tl.where(total == 0.0, 1.0, total)
    return weight, (shift + tl.log2(total)) * _LN_2


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def merge_kernel(
    part_out, part_lse, table, table_stride, cur_pos, range_first, range_end, sinks,
    out, out_strides, lse, lse_strides, errors, error_base,
    batch, kv_heads, num_blocks, capacity, window, partitions, max_splits,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, DV: tl.constexpr,
    SPLITS: tl.constexpr, SOME_ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, UNIT: tl.constexpr, FIXED: tl.constexpr, SHARED: tl.constexpr,
    BATCH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program per head of each sequence (even a skipped one), and per tile of its rows and columns."""
    index, firsts, ends, _, counts = work_units(
        cur_pos, range_first, range_end, batch, window, capacity, UNIT, TOKENS, SHARED, BATCH
    )
    row_count, tiles = row_tiles(batch, TOKENS, GROUP, ROWS, SHARED)
    heads = kv_heads * tiles
    sequence = tl.program_id(0) // heads
    head_tile = tl.program_id(0) % heads
    units = select(counts, index, sequence)
    begin = units_before(counts, index, sequence)
    if FIXED:
        first = begin
        splits = units
    else:
        total, partitions = partition_units(counts, partitions, max_splits)
        total = tl.maximum(total, 1)
        first = ((begin + 1) * partitions - 1) // total  # the partition that contains begin
        splits = (((begin + units) * partitions - 1) // total - first + 1).to(tl.int32)

    within = tl.program_id(1) * SOME_ROWS + tl.arange(0, SOME_ROWS)
    rows = head_tile % tiles * ROWS + within
    is_row, row_sequence, row_head, row_token = locate_rows(
        rows, row_count, head_tile // tiles, sequence, TOKENS, GROUP, SHARED
    )
    row_last = tl.load(cur_pos + row_sequence, mask=is_row, other=-1)
    columns = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)

    invalid = row_last >= capacity
    invalid_sequence = tl.max(tl.where(invalid, row_sequence, -1), 0)
    if invalid_sequence >= 0:
        _record_error(errors, error_base + invalid_sequence, -1 - tl.load(cur_pos + invalid_sequence).to(tl.int64))
    if BLOCK_SIZE > 0:
        table_row = table
        if not SHARED:
            table_row += sequence.to(tl.int64) * table_stride
        slot = _first_invalid_slot(
            table_row, select(firsts, index, sequence), select(ends, index, sequence), num_blocks, BLOCK_SIZE
        )
        if (slot != _NO_SLOT) & (invalid_sequence < 0):  # a position beyond the cache has no slots
            entry = tl.load(table_row + slot).to(tl.int64) & 0xFFFFFFFF
            _record_error(errors, error_base + sequence, (tl.cast(slot + 1, tl.int64) << 32) | entry)
        # Of the sequences that share a table, the sequences that reach the slot.
        invalid = invalid | ((row_last >= 0) & (slot <= row_last // BLOCK_SIZE))

    whole_head = (splits == 1) & (units > 0)  # written by the split kernel
    any_invalid = tl.max(invalid.to(tl.int32), 0) > 0
    is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0) & (tl.program_id(2) == 0)
    # Programs with nothing to merge return without waiting; one always waits, or this kernel could finish first.
    if EARLY and ((not whole_head) | any_invalid | is_first):
        gdc_wait()
    if (not whole_head) | any_invalid:
        acc = tl.zeros((SOME_ROWS, COLUMNS), tl.float32)
        denominator = tl.zeros((SOME_ROWS,), tl.float32)
        row_max = tl.full((SOME_ROWS,), float("-inf"), tl.float32)
        if units > 0:  # sequences without an error share these rows with one that has one
            for at in range(0, splits, SPLITS):
                split = at + tl.arange(0, SPLITS)
                if FIXED:
                    slots = first + split
                else:
                    # The first split of a partition begins within a sequence, the last split at its beginning.
                    slots = 2 * (first + split) + (split == 0)
                # [rows, columns, splits]: the compiler divides the rows among warps, and splits are summed by a thread.
                where = within[:, None] + (slots * heads + head_tile)[None, :] * ROWS
                some = is_row[:, None] & (split < splits)[None, :]
                lses = tl.load(part_lse + where, mask=some, other=float("-inf"))
                outs = tl.load(
                    part_out + where[:, None, :] * DV + columns[None, :, None],
                    mask=some[:, None, :] & (columns < DV)[None, :, None], other=0.0,
                )  # fmt: skip
                new_row_max = tl.maximum(row_max, tl.max(lses, 1))
                shift = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
                weights = tl.exp2(lses - shift[:, None])
                acc_scale = tl.exp2(row_max - shift)
                denominator = denominator * acc_scale + tl.sum(weights, 1)
                acc = acc * acc_scale[:, None] + tl.sum(weights[:, None, :] * outs, 2)
                row_max = new_row_max
        sink = tl.full((SOME_ROWS,), float("-inf"), tl.float32)
        if sinks is not None:
            sink = (
                tl.load(sinks + row_head, mask=is_row & (row_last >= 0), other=float("-inf")).to(tl.float32) * _LOG2_E
            )
        weight, natural_lse = finish_state(denominator, row_max, sink)
        result = tl.where(invalid[:, None], float("nan"), acc * weight[:, None])
        natural_lse = tl.where(invalid, float("nan"), natural_lse)
        # Of a head that the split kernel has written, only invalid rows are overwritten.
        writes = is_row & (invalid | (not whole_head))
        out_rows = row_offsets(out_strides, row_sequence, row_head, row_token)
        inside = writes[:, None] & (columns < DV)[None, :]
        tl.store(out + out_rows[:, None] + columns[None, :], result.to(out.dtype.element_ty), mask=inside)
        if tl.program_id(2) == 0:
            lse_rows = row_offsets(lse_strides, row_sequence, row_head, row_token)
            tl.store(lse + lse_rows, natural_lse, mask=writes)


@triton.jit
def _dot_in_parts(keys, queries):
    """keys @ queries of float32, in parts of _CHAIN columns that are added up: a chain of all has twice the error."""
    PARTS: tl.constexpr = keys.shape[1] // _CHAIN
    keys = keys.reshape(keys.shape[0], PARTS, _CHAIN).permute(1, 0, 2)
    queries = queries.reshape(PARTS, _CHAIN, queries.shape[1])
    return tl.sum(tl.dot(keys, queries, input_precision="ieee"), 0)


@triton.jit
def _first_invalid_slot(table_row, first, end, num_blocks, BLOCK_SIZE: tl.constexpr):
    """The first slot that a sequence reads whose entry is not a block of the pool."""
    worst = tl.full((512,), _NO_SLOT, tl.int32)
    stop = tl.cdiv(end, BLOCK_SIZE)
    for begin in range(first // BLOCK_SIZE, stop, 512):
        slots = begin + tl.arange(0, 512)
        blocks = tl.load(table_row + slots, mask=slots < stop, other=0)
        wrong = (blocks < 0) | (blocks >= num_blocks)
        worst = tl.minimum(worst, tl.where(wrong, slots, _NO_SLOT))
    return tl.min(worst, 0)


@triton.jit
def _record_error(errors, sequence, word):
    """Writes the word of a sequence, (slot + 1) << 32 | entry or -1 - position, then the flag, to host memory."""
    tl.store(errors + 1 + sequence, word)
    tl.store(errors, tl.full((), 1, tl.int64))


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def split_kernel(
    q, q_strides, k, v, k_strides, k_scales, k_scale_strides, v_strides, v_scales, v_scale_strides, scale_shifts,
    table, table_stride, cur_pos, range_first, range_end, mask, mask_strides, mask_width, tree, tree_strides, sinks,
    out, out_strides, lse, lse_strides, part_out, part_lse,
    batch, kv_heads, num_blocks, capacity, window, partitions, max_splits, scale_log2, softcap_log2,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    D: tl.constexpr, MAIN: tl.constexpr, TAIL: tl.constexpr, DV: tl.constexpr, BLOCK_DV: tl.constexpr,
    STORAGE: tl.constexpr, BLOCK_SIZE: tl.constexpr, ALIGNED: tl.constexpr, WIDE: tl.constexpr, UNIT: tl.constexpr,
    FIXED: tl.constexpr, SHARED: tl.constexpr, BATCH: tl.constexpr, V_IN_K: tl.constexpr, PAIRED: tl.constexpr,
    COMPILED: tl.constexpr, EARLY: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Attends over this program's partition of the units; writes complete heads to out, and splits to the buffers."""
    if EARLY:
        gdc_launch_dependents()  # the merge kernel may start: it waits for the end of this kernel itself
    index, firsts, ends, first_units, counts = work_units(
        cur_pos, range_first, range_end, batch, window, capacity, UNIT, TOKENS, SHARED, BATCH
    )
    BOUNDED: tl.constexpr = (window is not None) or (range_first is not None)  # keys may begin at any position
    row_count, tiles = row_tiles(batch, TOKENS, GROUP, ROWS, SHARED)
    heads = kv_heads * tiles
    head_tile = tl.program_id(0) % heads
    head = head_tile // tiles
    partition = (tl.program_id(0) // heads).to(tl.int64)
    total, partitions = partition_units(counts, partitions, max_splits)
    GAPS: tl.constexpr = (mask is not None) | (tree is not None)
    at = partition * total // partitions
    stop = tl.minimum((partition + 1) * total // partitions, total)

    while at < stop:
        # The sequence of this unit, and the range of its units in this partition.
        sequence = tl.sum((tl.cumsum(counts, 0) <= at).to(tl.int32), 0)
        units = select(counts, index, sequence)
        unit_begin = (at - units_before(counts, index, sequence)).to(tl.int32)
        unit_end = unit_begin + 1
        if not FIXED:
            unit_end = tl.minimum(units, unit_begin + (stop - at)).to(tl.int32)
        first_unit = select(first_units, index, sequence)
        key_begin = (first_unit + unit_begin) * UNIT
        key_stop = tl.minimum((first_unit + unit_end) * UNIT, select(ends, index, sequence))
        first = key_begin
        if BOUNDED:  # keys may begin within a unit: the tiles before are skipped
            first = tl.maximum(select(firsts, index, sequence), key_begin)
            key_begin += (first - key_begin) // KEYS * KEYS

        rows = head_tile % tiles * ROWS + tl.arange(0, ROWS)
        is_row, row_sequence, row_head, row_token = locate_rows(rows, row_count, head, sequence, TOKENS, GROUP, SHARED)
        row_last = valid_position(tl.load(cur_pos + row_sequence, mask=is_row, other=-1), capacity)
        # The last key visible to each row; -1 for rows that do not exist.
        row_first = range_first
        if range_first is not None:
            row_first, own = row_key_range(range_first, range_end, row_sequence, row_token, row_last, TOKENS)
        else:
            own = tl.where(row_last >= 0, row_last - (TOKENS - 1) + row_token, -1)

        q_rows = q + row_offsets(q_strides, row_sequence, row_head, row_token)
        main = tl.arange(0, MAIN)
        q_main = tl.load(q_rows[None, :] + main[:, None], mask=is_row[None, :] & (main < D)[:, None], other=0.0)
        q_tail = q_main
        if TAIL > 0:
            tail = MAIN + tl.arange(0, TAIL)
            q_tail = tl.load(q_rows[None, :] + tail[:, None], mask=is_row[None, :] & (tail < D)[:, None], other=0.0)

        score_scale = scale_log2
        value_scale = 1.0
        if STORAGE == "fp8":
            score_scale *= tl.load(k_scales + head * k_scale_strides[0])
            value_scale = tl.load(v_scales + head * v_scale_strides[0])

        if PAIRED:
            if STORAGE == "bfp8":
                shifts = tl.load(scale_shifts + tl.arange(0, 4))
            else:
                q_main, row_scale = normalize_to_fp16(q_main)
                score_scale *= row_scale[None, :]
            q_main, q_odd = split_pairs(q_main, MAIN // 2, ROWS)
        # The carry: `acc / sum(denominator)` is the output so far, `row_max + log2(sum(denominator))` its base-2 lse.
        acc = tl.zeros((BLOCK_DV // 2 if PAIRED else BLOCK_DV, ROWS), tl.float32)
        acc_odd = acc
        acc_second = acc
        denominator = tl.zeros((KEYS, ROWS), tl.float32)  # summed over the keys once, at the end
        row_max = tl.full((ROWS,), float("-inf"), tl.float32)

        table_row = table
        if (BLOCK_SIZE > 0) and (not SHARED):
            table_row += sequence.to(tl.int64) * table_stride
        PER_SEQUENCE: tl.constexpr = (BLOCK_SIZE == 0) and (not SHARED)
        k_head = head_pointer(k, k_strides, head * HEADS, sequence, PER_SEQUENCE)
        v_head = head_pointer(v, v_strides, head * HEADS, sequence, PER_SEQUENCE)
        of_second = (rows // TOKENS % GROUP >= GROUP // HEADS)[None, :]
        k_scale_head = k_scales
        v_scale_head = v_scales
        if STORAGE == "fp8_ds_mla":
            k_scale_head = head_pointer(k_scales, k_scale_strides, head, sequence, PER_SEQUENCE)
        if (STORAGE == "int8") | (STORAGE == "bfp8"):
            k_scale_head = head_pointer(k_scales, k_scale_strides, head, sequence, PER_SEQUENCE)
            v_scale_head = head_pointer(v_scales, v_scale_strides, head, sequence, PER_SEQUENCE)

        blocks = load_blocks(table_row, key_begin, key_stop, BLOCK_SIZE, ALIGNED, KEYS)
        for key in range(key_begin, key_stop, KEYS):
            keys = key + tl.arange(0, KEYS)
            block_offsets = offsets_in_block(key, BLOCK_SIZE, ALIGNED, KEYS)
            valid = in_bounds(blocks, keys, first, key_stop, num_blocks, BOUNDED, BLOCK_SIZE)
            k_offsets = key_offsets(blocks, block_offsets, k_strides, WIDE)
            v_offsets = key_offsets(blocks, block_offsets, v_strides, WIDE)
            if STORAGE == "bfp8":
                k_powers = key_offsets(blocks, block_offsets, k_scale_strides, WIDE)
            if PAIRED:
                words = load_rows(k_head, k_offsets, valid, 0, D // 2, MAIN // 2)
                if STORAGE == "bfp8":
                    powers = load_exponents(k_scale_head, k_powers, valid, shifts, D, MAIN)
                    powers = tl.broadcast_to(powers[:, :, :, None], (KEYS, MAIN // 64, 4, 8)).reshape(KEYS, MAIN // 2)
                    k_main, k_odd = unpack_bfp_pairs(words, powers, COMPILED, q_main.dtype)
                else:
                    k_main, k_odd = unpack_pairs(words, STORAGE, COMPILED)
            else:
                k_main = load_rows(k_head, k_offsets, valid, 0, D, MAIN)
            if STORAGE == "bfp8" and not PAIRED:
                steps = load_bfp_scales(k_scale_head, k_scale_strides, k_powers, valid, 0, D, KEYS, MAIN)
                k_main = k_main.to(tl.float32) * steps
            if STORAGE == "fp8_ds_mla":
                at_scale = key_offsets(blocks, block_offsets, k_scale_strides, WIDE)
                k_main = k_main.to(tl.float32) * load_latent_scales(
                    k_scale_head, k_scale_strides, at_scale, valid, KEYS, MAIN
                )
            k_main = k_main.to(q_main.dtype)
            if q_main.dtype == tl.float32 and MAIN > _CHAIN:
                scores = _dot_in_parts(k_main, q_main)
            else:
                scores = tl.dot(k_main, q_main, input_precision="ieee")
            if HEADS == 2:
                k_second = load_rows(k_head + k_strides[2], k_offsets, valid, 0, D, MAIN)
                scores = tl.where(of_second, tl.dot(k_second, q_main), scores)
            if PAIRED:
                scores = tl.dot(k_odd, q_odd, scores)
            if TAIL > 0:
                if STORAGE == "fp8_ds_mla":  # v is the rope part
                    k_tail = load_rows(v_head, v_offsets, valid, 0, D - MAIN, TAIL)
                else:
                    k_tail = load_rows(k_head, k_offsets, valid, MAIN, D, TAIL)
                if STORAGE == "bfp8":
                    steps = load_bfp_scales(k_scale_head, k_scale_strides, k_powers, valid, MAIN, D, KEYS, TAIL)
                    k_tail = k_tail.to(tl.float32) * steps
                scores = tl.dot(k_tail.to(q_main.dtype), q_tail, scores, input_precision="ieee")
            scores *= score_scale
            if STORAGE == "int8":
                at_scale = key_offsets(blocks, block_offsets, k_scale_strides, WIDE)
                scores *= tl.load(k_scale_head + at_scale, mask=valid, other=0.0)[:, None]
            if softcap_log2 is not None:
                scores = softcap_log2 * tanh(scores / softcap_log2, q_main.dtype == tl.float32)

            scores, visible = visible_keys(
                scores, keys, row_last, row_first, own, row_sequence, row_head, row_token, window,
                mask, mask_strides, mask_width, tree, tree_strides, TOKENS,
            )  # fmt: skip
            if UNIT % KEYS != 0:  # a split may end within a tile
                visible = visible & (keys < key_stop)[:, None]
            scores = tl.where(visible, scores, float("-inf"))
            used = valid
            if GAPS:  # keys visible to no row may hold anything, and 0 * NaN is NaN
                used = used & (tl.max(visible.to(tl.int32), 1) > 0)

            # The scale of a value is multiplied into its weight. The maximum includes the exponent of the scale,
            # so that the weight neither overflows nor underflows fp16.
            maxima = scores
            if STORAGE == "int8":
                at_scale = key_offsets(blocks, block_offsets, v_scale_strides, WIDE)
                token_scale = tl.load(v_scale_head + at_scale, mask=used, other=0.0)
                exponent = ((token_scale.to(tl.int32, bitcast=True) >> 23) & 0xFF) - 127
                # At least -100: even the sum of a billion weights of values that are almost 0 is finite.
                maxima += tl.maximum(exponent, -100).to(tl.float32)[:, None]
            new_row_max = tl.maximum(row_max, tl.max(maxima, 0))
            shift = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)  # -inf - -inf would be NaN
            weights = tl.exp2(scores - shift[None, :])
            acc_scale = tl.exp2(row_max - shift)
            denominator = denominator * acc_scale[None, :] + weights
            if STORAGE == "int8":
                weights *= token_scale[:, None]
            weights = weights.to(q_main.dtype)
            if V_IN_K:
                v_tile = tl.trans(k_main)
                if GAPS:
                    v_tile = tl.where(used[None, :], v_tile, 0.0)
            elif PAIRED:
                words = load_transposed(v_head, v_offsets, used, DV // 2, BLOCK_DV // 2)
                if STORAGE == "bfp8":
                    v_powers = key_offsets(blocks, block_offsets, v_scale_strides, WIDE)
                    powers = load_exponents_transposed(v_scale_head, v_powers, used, shifts, DV, BLOCK_DV)
                    powers = tl.broadcast_to(powers[:, :, None, :], (BLOCK_DV // 64, 4, 8, KEYS))
                    v_tile, v_odd = unpack_bfp_pairs(words, powers.reshape(BLOCK_DV // 2, KEYS), COMPILED, q_main.dtype)
                else:
                    v_tile, v_odd = unpack_pairs(words, STORAGE, COMPILED)
                acc_odd = tl.dot(v_odd, weights, acc_odd * acc_scale[None, :])
            else:
                v_tile = load_transposed(v_head, v_offsets, used, DV, BLOCK_DV)
                if STORAGE == "bfp8":
                    v_powers = key_offsets(blocks, block_offsets, v_scale_strides, WIDE)
                    steps = load_bfp_scales(v_scale_head, v_scale_strides, v_powers, used, 0, DV, KEYS, BLOCK_DV)
                    v_tile = v_tile.to(tl.float32) * tl.trans(steps)
                v_tile = v_tile.to(q_main.dtype)
            acc = tl.dot(v_tile, weights, acc * acc_scale[None, :], input_precision="ieee")
            if HEADS == 2:
                v_second = load_transposed(v_head + v_strides[2], v_offsets, used, DV, BLOCK_DV)
                acc_second = tl.dot(v_second, weights, acc_second * acc_scale[None, :])
            row_max = new_row_max
            # Read one tile ahead, so that no load waits for its address.
            blocks = load_blocks(table_row, key + KEYS, key_stop, BLOCK_SIZE, ALIGNED, KEYS)

        if PAIRED:
            acc = join_pairs(acc, acc_odd, BLOCK_DV // 2, ROWS)
        if HEADS == 2:
            acc = tl.where(of_second, acc_second, acc)
        acc *= value_scale
        row_sums = tl.sum(denominator, 0)
        columns = tl.arange(0, BLOCK_DV)
        writes = is_row[None, :] & (columns < DV)[:, None]
        if (unit_begin == 0) & (unit_end == units):
            sink = tl.full((ROWS,), float("-inf"), tl.float32)
            if sinks is not None:
                sink = tl.load(sinks + row_head, mask=is_row & (row_last >= 0), other=float("-inf")).to(tl.float32)
                sink *= _LOG2_E
            weight, natural_lse = finish_state(row_sums, row_max, sink)
            result = acc * weight[None, :]
            out_rows = row_offsets(out_strides, row_sequence, row_head, row_token)
            tl.store(out + out_rows[None, :] + columns[:, None], result.to(out.dtype.element_ty), mask=writes)
            lse_rows = row_offsets(lse_strides, row_sequence, row_head, row_token)
            tl.store(lse + lse_rows, natural_lse, mask=is_row)
        else:
            slot = at
            if not FIXED:
                slot = 2 * partition + (unit_begin == 0)
            splits = (slot * heads + head_tile) * ROWS + tl.arange(0, ROWS)
            normal = acc / tl.where(row_sums == 0.0, 1.0, row_sums)[None, :]
            tl.store(part_out + splits[None, :] * DV + columns[:, None], normal, mask=writes)
            tl.store(part_lse + splits, row_max + tl.log2(row_sums), mask=is_row)
        at += unit_end - unit_begin
