"""The kernels of sparse decode over a paged cache of latents in Triton, which `decode_kernels` describes.

From Hopper on, `_merge_kernel` may be launched while the kernel before it runs; it waits for the end of that before it
accesses global memory. The others start after the end of those before them.

Tiles follow fixed rules, so results do not depend on timings; tests/ops/sparse/test_sparse_kernels_compile.py checks
that they fit sm_90.
"""

from collections import namedtuple
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnmesh.ops.decode.device_errors import INDEX_FAULT, error_record
from attnmesh.ops.dense.triton_tiles import blocks_of
from attnmesh.ops.launch import Launch, Recent, cdiv, gpu_of, next_power_of_2, repeat, starts_early
from attnmesh.ops.sparse.paged import PagedKeys, SparseDecodeCall
from attnmesh.ops.sparse.triton_forward import LOG2_E, ForwardTiles, pick_tiles, softmax_step
from attnmesh.ops.storage import LATENT_GROUP, Quantized, values_of

_LOG2_E = tl.constexpr(LOG2_E)
_INDEX_FAULT = tl.constexpr(INDEX_FAULT)
_GROUP = tl.constexpr(LATENT_GROUP)
# More heads per tile push values out of the registers, which also hold the keys in float32 and the next tile. One
# stage: the kernel loads ahead itself, since the compiler does not where a load feeds two products.
_QUANTIZED = ForwardTiles(16, 32, 8, 1)
_LOCATED = 1024  # indices that a program maps at a time
_GATHERED = 32  # slots that a program dequantizes
_MERGED_HEADS = 4
_NOT_SPECIALIZED = ["tokens", "topk", "num_blocks", "table_width", "heads", "span", "splits", "scale_log2"]
_launches: Recent[Launch] = Recent()
# The features of values or, if not quantized, of all; the widths of the two column tiles of a key, the first feature of
# the second, and how many it has; keys per block.
Sizes = namedtuple("Sizes", "d main tail tail_begin tail_width block_size quantized")
Pool = namedtuple("Pool", "latents strides scales scale_strides rope rope_strides")


def locate(keys: PagedKeys, indices: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor]:
    """The slots of the indices [B, T, topk]: int32 [B * T, topk], and their number per token, -1 for a fault.

    Padding is left out; the order is kept. Entries past the number are undefined.
    """
    batch, tokens, topk = indices.shape
    slots = torch.empty(batch * tokens, topk, dtype=torch.int32, device=indices.device)
    lengths = torch.empty(batch * tokens, dtype=torch.int32, device=indices.device)
    table, shard = keys.table, keys.shard
    repeat(
        _launches, _locate_kernel, (batch * tokens,),
        (
            indices, indices.stride(), counts, (0, 0) if counts is None else counts.stride(),
            table, (0, 0) if table is None else table.stride(), slots, lengths, error_record(indices.device),
            tokens, topk, keys.num_blocks, 0 if table is None else table.shape[1],
        ),
        RANKS=1 if shard is None else shard.ranks, RANK=0 if shard is None else shard.rank,
        INTERLEAVE=1 if shard is None else shard.interleave, BLOCK_SIZE=keys.block_size, BLOCK=_LOCATED,
        EARLY=starts_early(indices.device), num_warps=4,
    )  # fmt: skip
    return slots, lengths


def tiles_of(call: SparseDecodeCall) -> ForwardTiles:
    """The tiles of `attend`."""
    heads = min(64, max(16, next_power_of_2(call.q.shape[2])))
    if isinstance(call.keys.pool, Tensor):
        main, tail = blocks_of(call.keys.width)
        return pick_tiles(heads, main, main + tail, call.q.dtype, separate=False, gpu=gpu_of(call.q.device))
    return _QUANTIZED


def attend(
    call: SparseDecodeCall, slots: Tensor, lengths: Tensor, sinks: Tensor | None, results: tuple[Tensor, ...],
    parts: tuple[Tensor, ...] | None, span: int, splits: int, tiles: ForwardTiles,
) -> None:  # fmt: skip
    """Out, lse and largest scores of tokens, or of `parts` of `span` slots each, without sinks."""
    (batch, tokens, heads, _), sizes = call.q.shape, _pool_sizes(call.keys)
    value_tail = sizes.tail if not sizes.quantized and call.d_v > sizes.main else 0
    repeat(
        _launches, _attend_kernel, (batch * tokens * splits * cdiv(heads, tiles.heads),),
        (
            call.q, call.q.stride()[:3], *_pool_arguments(call.keys), slots, lengths, sinks, *results,
            *(parts or (None, None, None)), tokens, heads, call.indices.shape[2], span, splits, call.scale * LOG2_E,
        ),
        SIZES=sizes, D_V=call.d_v, VALUE_TAIL=value_tail, HEADS=tiles.heads, KEYS=tiles.keys,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def merge(
    parts: tuple[Tensor, ...], lengths: Tensor, sinks: Tensor | None, results: tuple[Tensor, ...], span: int
) -> None:
    """The results of tokens from the results of their splits."""
    rows, splits, heads, d_v = parts[0].shape
    early = starts_early(lengths.device)
    repeat(
        _launches, _merge_kernel, (rows, cdiv(heads, _MERGED_HEADS)),
        (*parts, lengths, sinks, *results, heads, span, splits),
        D_V=d_v, HEADS=_MERGED_HEADS, COLUMNS=max(16, next_power_of_2(d_v)), EARLY=early, num_warps=4,
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip


def gather(keys: PagedKeys, slots: Tensor, lengths: Tensor, target: Tensor) -> None:
    """Write the keys of slots [rows, topk] to rows of `target` [rows * topk, D], dequantized."""
    rows, topk = slots.shape
    repeat(
        _launches, _gather_kernel, (rows, cdiv(topk, _GATHERED)),
        (*_pool_arguments(keys), slots, slots.stride(0), lengths, target, target.stride(0), topk),
        SIZES=_pool_sizes(keys), KEYS=_GATHERED, num_warps=4,
    )  # fmt: skip


def _pool_arguments(keys: PagedKeys) -> tuple[Any, ...]:
    """The values, scales and rope part of a pool and their strides, as kernels take them."""
    values, scales, rope = values_of(keys.pool), None, None
    scale_strides, rope_strides = (0, 0, 0), (0, 0)
    if isinstance(keys.pool, Quantized):
        assert keys.pool.rope is not None
        values, scales, rope = values.view(torch.uint8), keys.pool.scales, keys.pool.rope
        scale_strides = (scales.stride(0), scales.stride(1), scales.stride(3))
        rope_strides = (rope.stride(0), rope.stride(1))
    return values, values.stride()[:2], scales, scale_strides, rope, rope_strides


def _pool_sizes(keys: PagedKeys) -> Sizes:
    """The sizes of a pool."""
    if isinstance(keys.pool, Quantized):
        assert keys.pool.rope is not None
        width, rest = keys.pool.values.shape[-1], keys.pool.rope.shape[-1]
        main, tail = next_power_of_2(width), max(16, next_power_of_2(rest))
        return Sizes(width, main, tail, width, rest, keys.block_size, True)
    main, tail = blocks_of(keys.width)
    return Sizes(keys.width, main, tail, main, keys.width - main, keys.block_size, False)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _locate_kernel(
    indices, index_strides, counts, count_strides, table, table_strides, slots, lengths, errors,
    tokens, topk, num_blocks, table_width,
    RANKS: tl.constexpr, RANK: tl.constexpr, INTERLEAVE: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One token."""
    if EARLY:
        gdc_launch_dependents()  # the kernel in Gluon may start: it waits for the end of this kernel itself
    row = tl.program_id(0)
    sequence = (row // tokens).to(tl.int64)
    token = (row % tokens).to(tl.int64)
    count = topk
    if counts is not None:
        given = tl.load(counts + sequence * count_strides[0] + token * count_strides[1])
        count = tl.minimum(tl.maximum(given, 0), topk).to(tl.int32)
    source = indices + sequence * index_strides[0] + token * index_strides[1]
    target = slots + row.to(tl.int64) * topk
    written = tl.zeros((), tl.int32)
    fault = tl.zeros((BLOCK,), tl.int64)
    for begin in range(0, count, BLOCK):
        j = begin + tl.arange(0, BLOCK)
        index = tl.load(source + j.to(tl.int64) * index_strides[2], mask=j < count, other=-1)
        used = index >= 0
        position = index
        if RANKS > 1:
            used = used & (index // INTERLEAVE % RANKS == RANK)
            position = index // (RANKS * INTERLEAVE) * INTERLEAVE + index % INTERLEAVE
        entry = position // BLOCK_SIZE
        block = entry
        named = index.to(tl.int64) | _INDEX_FAULT
        if table is not None:
            inside = used & (entry < table_width)
            block = tl.load(
                table + sequence * table_strides[0] + entry.to(tl.int64) * table_strides[1], mask=inside, other=0
            )
            word = ((entry + 1).to(tl.int64) << 32) | (block.to(tl.int64) & 0xFFFFFFFF)
            named = tl.where(inside, word, named)
            valid = inside & (block >= 0) & (block < num_blocks)
        else:
            valid = used & (block < num_blocks)
        fault = tl.maximum(fault, tl.where(used & ~valid, named, 0))
        at = written + tl.cumsum(valid.to(tl.int32), 0) - 1
        tl.store(target + at, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=valid)
        written += tl.sum(valid.to(tl.int32), 0)
    worst = tl.max(fault, 0)
    if worst != 0:
        written = tl.full((), -1, tl.int32)
        tl.store(errors + 1 + sequence, worst)
        tl.store(errors, tl.full((), 1, tl.int64))
    tl.store(lengths + row, written)


@triton.jit
def _fetch(pool, slot, valid, SIZES: tl.constexpr):
    """The codes [KEYS, MAIN], scales and rope part of the fp8_ds_mla keys in some slots; 0 where not valid."""
    block, offset = (slot // SIZES.block_size).to(tl.int64), (slot % SIZES.block_size).to(tl.int64)
    there = valid[:, None]
    main = tl.arange(0, SIZES.main)[None, :]
    rows = pool.latents + (block * pool.strides[0] + offset * pool.strides[1])[:, None]
    codes = tl.load(rows + main, mask=there & (main < SIZES.d), other=0)
    group = tl.arange(0, SIZES.main // _GROUP)[None, :]
    scale_rows = pool.scales + (block * pool.scale_strides[0] + offset * pool.scale_strides[1])[:, None]
    steps = tl.load(scale_rows + group * pool.scale_strides[2], mask=there & (group < SIZES.d // _GROUP), other=0.0)
    tail = tl.arange(0, SIZES.tail)[None, :]
    rope_rows = pool.rope + (block * pool.rope_strides[0] + offset * pool.rope_strides[1])[:, None]
    return codes, steps, tl.load(rope_rows + tail, mask=there & (tail < SIZES.tail_width), other=0.0)


@triton.jit
def _dequantize(codes, steps, DTYPE: tl.constexpr):
    """The values of codes [KEYS, MAIN], rounded once."""
    wide = tl.reshape(codes, (codes.shape[0], codes.shape[1] // _GROUP, _GROUP)).to(tl.float8e4nv, bitcast=True)
    return tl.reshape((wide.to(tl.float16).to(tl.float32) * steps[:, :, None]).to(DTYPE), codes.shape)


@triton.jit
def _load_plain(pool, slot, valid, SIZES: tl.constexpr):
    """The plain keys in some slots as two tiles, [KEYS, MAIN] and [KEYS, TAIL]; 0 where not valid."""
    block, offset = (slot // SIZES.block_size).to(tl.int64), (slot % SIZES.block_size).to(tl.int64)
    rows = pool.latents + (block * pool.strides[0] + offset * pool.strides[1])[:, None]
    main = tl.arange(0, SIZES.main)[None, :]
    k_main = tl.load(rows + main, mask=valid[:, None] & (main < SIZES.d), other=0.0)
    k_tail = k_main
    if SIZES.tail > 0:
        tail = SIZES.main + tl.arange(0, SIZES.tail)[None, :]
        k_tail = tl.load(rows + tail, mask=valid[:, None] & (tail < SIZES.d), other=0.0)
    return k_main, k_tail


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _gather_kernel(
    pool, strides, scales, scale_strides, rope, rope_strides, slots, slots_row, lengths, target, target_row, topk,
    SIZES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """KEYS slots of one token; those past its length are not written."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    valid = j < tl.load(lengths + row)
    slot = tl.load(slots + row * slots_row + j, mask=valid, other=0)
    source = Pool(pool, strides, scales, scale_strides, rope, rope_strides)
    if SIZES.quantized:
        codes, steps, k_tail = _fetch(source, slot, valid, SIZES)
        k_main = _dequantize(codes, steps, target.dtype.element_ty)
    else:
        k_main, k_tail = _load_plain(source, slot, valid, SIZES)
    rows = target + (row * topk + j)[:, None] * target_row
    main = tl.arange(0, SIZES.main)[None, :]
    tl.store(rows + main, k_main, mask=valid[:, None] & (main < SIZES.d))
    if SIZES.tail > 0:
        tail = tl.arange(0, SIZES.tail)[None, :]
        there = valid[:, None] & (tail < SIZES.tail_width)
        tl.store(rows + SIZES.tail_begin + tail, k_tail.to(target.dtype.element_ty), mask=there)


@triton.jit
def _finish(log_sum, largest, inv_sum, length, sinks, lse, top, row, head, heads):
    """Writes the lse and largest scores of a token; returns the factor of its sums. All are NaN after a fault."""
    if sinks is not None:
        sink = tl.load(sinks + head, mask=head < heads, other=float("-inf")).to(tl.float32) * _LOG2_E
        most = tl.maximum(log_sum, sink)
        shift = tl.where(tl.abs(most) == float("inf"), 0.0, most)
        both = shift + tl.log2(tl.exp2(log_sum - shift) + tl.exp2(sink - shift))
        infinite = most == float("inf")
        both = tl.where(infinite, most, tl.where(most == float("-inf"), most, both))
        half = tl.where(sink == float("inf"), tl.where(log_sum == float("inf"), 0.5, 0.0), 1.0)
        # The weight of the sums without the sinks.
        inv_sum *= tl.where(infinite, half, tl.exp2(log_sum - tl.where(most == float("-inf"), 0.0, both)))
        log_sum = both
    spoiled = tl.where(length < 0, float("nan"), 0.0)
    inv_sum += spoiled
    at = row * heads + head
    tl.store(lse + at, log_sum / _LOG2_E + spoiled, mask=head < heads)
    tl.store(top + at, largest / _LOG2_E + spoiled, mask=head < heads)
    return inv_sum


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _attend_kernel(
    q, q_strides, pool, strides, scales, scale_strides, rope, rope_strides, slots, lengths, sinks,
    out, lse, top, part_out, part_lse, part_top, tokens, heads, topk, span, splits, scale_log2,
    SIZES: tl.constexpr, D_V: tl.constexpr, VALUE_TAIL: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """One token, one tile of heads, `span` of its slots. Neighboring programs share the slots: their keys are in L2."""
    head_tiles = tl.cdiv(heads, HEADS)
    row = (tl.program_id(0) // (head_tiles * splits)).to(tl.int64)
    split = tl.program_id(0) // head_tiles % splits
    head = tl.program_id(0) % head_tiles * HEADS + tl.arange(0, HEADS)
    real = (head < heads)[:, None]
    length = tl.load(lengths + row)
    begin = split * span
    end = tl.minimum(begin + span, length)

    main = tl.arange(0, SIZES.main)[None, :]
    q_tile = q + row // tokens * q_strides[0] + row % tokens * q_strides[1] + head[:, None].to(tl.int64) * q_strides[2]
    q_main = tl.load(q_tile + main, mask=real & (main < SIZES.d), other=0.0)
    if SIZES.tail > 0:
        tail = tl.arange(0, SIZES.tail)[None, :]
        q_tail = tl.load(q_tile + SIZES.tail_begin + tail, mask=real & (tail < SIZES.tail_width), other=0.0)

    # The running state: `acc / total` is the output, `row_max + log2(total)` the lse in base 2.
    MAIN: tl.constexpr = SIZES.main
    acc = tl.zeros((HEADS, MAIN), tl.float32)
    if VALUE_TAIL > 0:
        acc_tail = tl.zeros((HEADS, VALUE_TAIL), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    row_max = tl.full((HEADS,), float("-inf"), tl.float32)
    row_slots = slots + row * topk
    source = Pool(pool, strides, scales, scale_strides, rope, rope_strides)
    if SIZES.quantized:  # the keys of a tile are loaded before the products of the previous tile, their slots earlier
        j = begin + tl.arange(0, KEYS)
        slot = tl.load(row_slots + j, mask=j < end, other=0)
        codes, steps, rest = _fetch(source, slot, j < end, SIZES)
        slot = tl.load(row_slots + j + KEYS, mask=j + KEYS < end, other=0)
    for first in range(begin, end, KEYS):
        j = first + tl.arange(0, KEYS)
        valid = j < end
        if SIZES.quantized:
            k_main, k_tail = _dequantize(codes, steps, q.dtype.element_ty), rest.to(q.dtype.element_ty)
            codes, steps, rest = _fetch(source, slot, j + KEYS < end, SIZES)
            slot = tl.load(row_slots + j + 2 * KEYS, mask=j + 2 * KEYS < end, other=0)
        else:
            slot = tl.load(row_slots + j, mask=valid, other=0)
            k_main, k_tail = _load_plain(source, slot, valid, SIZES)
        scores = tl.dot(q_main, tl.trans(k_main), input_precision="ieee")
        if SIZES.tail > 0:
            scores = tl.dot(q_tail, tl.trans(k_tail), scores, input_precision="ieee")
        weights, rescale, row_max, total = softmax_step(scores, valid, scale_log2, row_max, total)
        weights = weights.to(k_main.dtype)
        acc = tl.dot(weights, k_main, acc * rescale[:, None], input_precision="ieee")
        if VALUE_TAIL > 0:
            acc_tail = tl.dot(weights, k_tail, acc_tail * rescale[:, None], input_precision="ieee")

    inv_sum = 1.0 / tl.where(total == 0.0, 1.0, total)
    log_sum = row_max + tl.log2(total)
    at = row * heads + head
    if part_out is not None:
        at = (row * splits + split) * heads + head
        tl.store(part_lse + at, log_sum, mask=head < heads)
        tl.store(part_top + at, row_max, mask=head < heads)
        target = part_out
    else:
        inv_sum = _finish(log_sum, row_max, inv_sum, length, sinks, lse, top, row, head, heads)
        target = out
    out_rows = target + at[:, None] * D_V
    tl.store(out_rows + main, (acc * inv_sum[:, None]).to(target.dtype.element_ty), mask=real & (main < D_V))
    if VALUE_TAIL > 0:
        column = SIZES.main + tl.arange(0, VALUE_TAIL)[None, :]
        tl.store(
            out_rows + column, (acc_tail * inv_sum[:, None]).to(target.dtype.element_ty), mask=real & (column < D_V)
        )


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def _merge_kernel(
    part_out, part_lse, part_top, lengths, sinks, out, lse, top, heads, span, splits,
    D_V: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some heads of one token: the states of its splits, in order."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    real = head < heads
    column = tl.arange(0, COLUMNS)[None, :]
    if EARLY:
        gdc_wait()
    length = tl.load(lengths + row)
    count = tl.minimum(tl.cdiv(tl.maximum(length, 0), span), splits)
    row_max = tl.full((HEADS,), float("-inf"), tl.float32)
    largest = row_max
    for split in range(count):
        at = (row * splits + split) * heads + head
        row_max = tl.maximum(row_max, tl.load(part_lse + at, mask=real, other=float("-inf")))
        largest = tl.maximum(largest, tl.load(part_top + at, mask=real, other=float("-inf")))
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    acc = tl.zeros((HEADS, COLUMNS), tl.float32)
    total = tl.zeros((HEADS,), tl.float32)
    for split in range(count):
        at = (row * splits + split) * heads + head
        weight = tl.exp2(tl.load(part_lse + at, mask=real, other=float("-inf")) - shift)
        total += weight
        part = tl.load(part_out + at[:, None] * D_V + column, mask=real[:, None] & (column < D_V), other=0.0)
        acc += part * weight[:, None]
    inv_sum = 1.0 / tl.where(total == 0.0, 1.0, total)
    log_sum = row_max + tl.log2(tl.where(total == 0.0, 1.0, total))
    inv_sum = _finish(log_sum, largest, inv_sum, length, sinks, lse, top, row, head, heads)
    at = row * heads + head
    value = (acc * inv_sum[:, None]).to(out.dtype.element_ty)
    tl.store(out + at[:, None] * D_V + column, value, mask=real[:, None] & (column < D_V))
