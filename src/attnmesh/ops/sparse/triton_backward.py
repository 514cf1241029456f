"""The kernels of the backward pass of sparse attention in Triton, which `backward` describes.

Deterministic sums of the gradients of slots are key by key, in the order of rows and slots. The slots of a row are
summed first, then the rows: a row may name one key in all of its slots, and an error that grows with the number of
additions in a chain then grows with the longer of the two.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.ops.dense.triton_backward import delta
from attnmesh.ops.launch import Launch, Recent, cdiv, next_power_of_2, repeat
from attnmesh.ops.sparse.arguments import RowBounds, SparseCall
from attnmesh.ops.sparse.triton_bounds import valid_keys

_MAX_COLUMNS = 1024  # per program
_IN_FLIGHT = tl.constexpr(8)  # loads issued before the first is added
_launches: Recent[Launch] = Recent()


class SlotsByKey(NamedTuple):
    """Slots, numbered row by row, sorted by key: `order`; the slots of key j begin at `starts[j]`."""

    order: Tensor
    starts: Tensor
    row_slots: int


def sort_slots_by_key(indices: Tensor, bounds: RowBounds, keys: int) -> SlotsByKey:
    """Sorts the slots of some rows by key, the slots of a key by row and slot number; invalid slots come last."""
    slot_keys = torch.where(bounds.valid(indices), indices - bounds.k_offset, keys).int()
    slot_keys, order = slot_keys.flatten().sort(stable=True)
    every = torch.arange(keys + 1, dtype=torch.int32, device=slot_keys.device)
    return SlotsByKey(order, torch.searchsorted(slot_keys, every), indices.shape[1])


def add_by_key(total: Tensor, grads: Tensor, slots: SlotsByKey) -> None:
    """Adds the gradient of each slot, float32 [..., width], to the row of its key in `total` [keys, width]."""
    keys, width = total.shape
    columns = min(_MAX_COLUMNS, next_power_of_2(width))
    repeat(
        _launches, sum_kernel, (keys, cdiv(width, columns)), (grads, *slots, total, total.stride(0)),
        WIDTH=width, COLUMNS=columns, num_warps=4,
    )  # fmt: skip


@triton.jit
def sum_kernel(grads, order, starts, row_slots, total, total_stride, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Adds the slots of one key to its sum, row by row: the bits do not depend on the chunks of rows."""
    key = tl.program_id(0).to(tl.int64)
    begin = tl.load(starts + key)
    end = tl.load(starts + key + 1)
    if begin < end:
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        pointers = total + key * total_stride + columns
        acc = tl.load(pointers, mask=columns < WIDTH, other=0.0)
        row = tl.load(order + begin) // row_slots
        of_row = tl.zeros((COLUMNS,), tl.float32)
        for first in range(begin, end, _IN_FLIGHT):
            for i in tl.static_range(_IN_FLIGHT):  # past the end it adds 0 once more; no partial sum is -0
                slot = tl.load(order + first + i, mask=first + i < end, other=0)
                grad = tl.load(grads + slot * WIDTH + columns, mask=(first + i < end) & (columns < WIDTH), other=0.0)
                same = slot // row_slots == row
                acc += tl.where(same, 0.0, of_row)
                of_row = tl.where(same, of_row + grad, grad)
                row = slot // row_slots
        tl.store(pointers, acc + of_row, mask=columns < WIDTH)


_Factors = tuple[Tensor, Tensor]  # a workspace, and the q or dout that it is multiplied with
_LOG2_E = tl.constexpr(1.4426950408889634)
_NOT_SPECIALIZED = ["row_begin", "k_offset"]  # they differ between chunks


class BackwardTiles(NamedTuple):
    """The tile of a program, and its warps and pipeline stages."""

    heads: int  # heads, keys and columns are maxima: the tile shrinks with the operands
    keys: int
    columns: int
    warps: int
    stages: int


def row_delta(out: Tensor, dout: Tensor) -> Tensor:
    """`sum(out * dout)` over the value's columns: float32 [s_q, h] from two [s_q, h, d_v]."""
    return delta(out[None], dout[None], None)[0]


def scores(
    call: SparseCall, rows: range, lse: Tensor, delta: Tensor, dout: Tensor, weights: Tensor, grad_scores: Tensor,
    tiles: BackwardTiles,
) -> None:  # fmt: skip
    """Writes p and ds of some rows to workspaces [rows, padded_heads, padded_slots]."""
    q, k, v, indices, (lo, hi, slots, k_offset), scale, d_v, *_ = call
    v, (_, heads, width), (_, padded_heads, padded_slots) = k if v is None else v, q.shape, weights.shape
    repeat(
        _launches, scores_kernel, (len(rows) * (padded_heads // tiles.heads) * (padded_slots // tiles.keys),),
        (
            q, q.stride()[:2], k, k.stride(0), v, v.stride(0), dout, dout.stride()[:2], indices, indices.stride(0),
            lo, hi, slots, lse, lse.stride(), delta, delta.stride(), weights, grad_scores,
            rows.start, padded_slots, k_offset, scale, width,
        ),
        D=width, DV=d_v, V_IN_K=call.v is None, H=heads, PADDED_HEADS=padded_heads,
        HEADS=tiles.heads, KEYS=tiles.keys, COLUMNS=tiles.columns, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def grad_query(call: SparseCall, rows: range, grad_scores: Tensor, dq: Tensor, tiles: BackwardTiles) -> None:
    """Writes dq of some rows from ds."""
    k, indices, (lo, hi, slots, k_offset) = call.k, call.indices, call.bounds
    (_, heads, width), (_, padded_heads, padded_slots) = dq.shape, grad_scores.shape
    parts, main, extra = _parts(width, tiles.columns)
    repeat(
        _launches, grad_query_kernel, (len(rows) * (padded_heads // tiles.heads) * parts,),
        (
            grad_scores, k, k.stride(0), indices, indices.stride(0), lo, hi, slots, dq, dq.stride()[:2],
            rows.start, padded_slots, k_offset, call.scale,
        ),
        D=width, H=heads, PADDED_HEADS=padded_heads, HEADS=tiles.heads, KEYS=tiles.keys,
        PARTS=parts, MAIN=main, EXTRA=extra, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def grad_key(
    into: Tensor, call: SparseCall, rows: range, scale: float, product: _Factors, second: _Factors | None,
    tiles: BackwardTiles, *, atomic: bool,
) -> None:  # fmt: skip
    """Adds `scale * left^T @ right`, and a second such product, of some rows to their keys, or stores it by slots."""
    indices, (lo, hi, slots, k_offset), width = call.indices, call.bounds, into.shape[1]
    left, right = product
    left_v, right_v = second or (None, right)
    _, padded_heads, padded_slots = left.shape
    parts, main, extra = _parts(width, tiles.columns)
    repeat(
        _launches, grad_key_kernel, (len(rows) * parts,),
        (
            left, right, right.stride()[:2], left_v, right_v, right_v.stride()[:2], indices, indices.stride(0),
            lo, hi, slots, into, into.stride(0), rows.start, padded_slots, k_offset, indices.shape[1], scale,
        ),
        WIDTH=width, WIDTH_V=right_v.shape[2], H=right.shape[1], PADDED_HEADS=padded_heads,
        HEADS=tiles.heads, KEYS=tiles.keys, PARTS=parts, MAIN=main, EXTRA=extra,
        ATOMIC=atomic, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def _parts(width: int, most: int) -> tuple[int, int, int]:
    """PARTS, MAIN and EXTRA: each part of the columns has MAIN of the first PARTS * MAIN, and EXTRA of the rest.

    MAIN is at most `most`, and EXTRA at most half of it: 576 = 4 * (128 + 16).
    """
    main = max(16, min(most, next_power_of_2(width)))
    while True:
        number = max(1, width // main)
        rest = max(0, width - number * main)
        extra = max(16, next_power_of_2(-(-rest // number))) if rest else 0
        if main == 16 or (width >= main and extra <= main // 2):
            return number, main, extra
        main //= 2


# Kernels.


@triton.jit
def _row_of(program, row_begin, lo, hi, slots):
    """The row of a program of a chunk: its number, and the bounds of its valid slots and keys."""
    row = (row_begin + program).to(tl.int64)
    return row, tl.load(lo + row), tl.load(hi + row), tl.load(slots + row)


@triton.jit
def _load_tile(rows, there, columns, LIMIT: tl.constexpr, WHOLE: tl.constexpr):
    """Columns of some rows, given as pointers [n, 1]; 0 for rows that do not exist and columns past the last.

    Masked elements are never read: keys of no valid slot may hold NaN. With WHOLE all columns exist.
    """
    mask = there[:, None]
    if not WHOLE:
        mask = mask & (columns < LIMIT)[None, :]
    return tl.load(rows + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _times_transposed(acc, left_rows, left_there, right_rows, right_there, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Adds left @ right^T over all columns, COLUMNS at a time."""
    WHOLE: tl.constexpr = WIDTH % COLUMNS == 0
    for begin in range(0, WIDTH, COLUMNS):
        columns = begin + tl.arange(0, COLUMNS)
        left = _load_tile(left_rows, left_there, columns, WIDTH, WHOLE)
        right = _load_tile(right_rows, right_there, columns, WIDTH, WHOLE)
        acc = tl.dot(left, tl.trans(right), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def scores_kernel(
    q, q_strides, k, k_stride, v, v_stride, dout, dout_strides, indices, indices_stride, lo, hi, slots,
    lse, lse_strides, delta, delta_strides, weights, grad_scores,
    row_begin, padded_slots, k_offset, scale, width,
    D: tl.constexpr, DV: tl.constexpr, V_IN_K: tl.constexpr, H: tl.constexpr, PADDED_HEADS: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """One tile [heads, slots] of the weights and of the gradients of the scores."""
    head_tiles: tl.constexpr = PADDED_HEADS // HEADS
    key_tiles = padded_slots // KEYS
    program = tl.program_id(0)  # neighboring programs share a row, so its queries stay in L2
    in_chunk = program // (key_tiles * head_tiles)
    row, first, end, count = _row_of(in_chunk, row_begin, lo, hi, slots)
    key_begin = program % key_tiles * KEYS
    if key_begin < count:
        slot = key_begin + tl.arange(0, KEYS)
        valid, key = valid_keys(indices + row * indices_stride, slot, count, first, end, k_offset)
        head = program // key_tiles % head_tiles * HEADS + tl.arange(0, HEADS)
        real = head < H
        q_rows = q + row * q_strides[0] + head.to(tl.int64)[:, None] * q_strides[1]
        dout_rows = dout + row * dout_strides[0] + head.to(tl.int64)[:, None] * dout_strides[1]
        k_rows = k + key[:, None] * k_stride
        scores = tl.zeros((HEADS, KEYS), tl.float32)
        grad_weights = tl.zeros((HEADS, KEYS), tl.float32)
        if V_IN_K:  # one load of the keys serves both products; the few columns past DV are multiplied by 0
            for begin in range(0, width, COLUMNS):
                columns = begin + tl.arange(0, COLUMNS)
                k_tile = _load_tile(k_rows, valid, columns, D, D % COLUMNS == 0)
                q_tile = _load_tile(q_rows, real, columns, D, D % COLUMNS == 0)
                dout_tile = _load_tile(dout_rows, real, columns, DV, False)
                scores = tl.dot(q_tile, tl.trans(k_tile), scores, input_precision="ieee")
                grad_weights = tl.dot(dout_tile, tl.trans(k_tile), grad_weights, input_precision="ieee")
        else:
            v_rows = v + key[:, None] * v_stride
            scores = _times_transposed(scores, q_rows, real, k_rows, valid, D, COLUMNS)
            grad_weights = _times_transposed(grad_weights, dout_rows, real, v_rows, valid, DV, COLUMNS)

        row_lse = tl.load(lse + row * lse_strides[0] + head * lse_strides[1], mask=real, other=float("inf"))
        row_delta = tl.load(delta + row * delta_strides[0] + head * delta_strides[1], mask=real, other=0.0)
        has_mass = tl.abs(row_lse) != float("inf")
        p = tl.exp2(scores * (scale * _LOG2_E) - (row_lse * _LOG2_E)[:, None])
        p = tl.where(valid[None, :] & has_mass[:, None], p, 0.0)
        # A weight of 0 has no gradient, even if dout or delta is NaN.
        ds = tl.where(p == 0.0, 0.0, p * (grad_weights - row_delta[:, None]))

        at = (in_chunk.to(tl.int64) * PADDED_HEADS + head)[:, None] * padded_slots + slot[None, :]
        tl.store(weights + at, p.to(weights.dtype.element_ty))
        tl.store(grad_scores + at, ds.to(grad_scores.dtype.element_ty))


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def grad_query_kernel(
    grad_scores, k, k_stride, indices, indices_stride, lo, hi, slots, dq, dq_strides,
    row_begin, padded_slots, k_offset, scale,
    D: tl.constexpr, H: tl.constexpr, PADDED_HEADS: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
    PARTS: tl.constexpr, MAIN: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    """dq = scale * ds @ k: one part of the columns, of one tile of heads."""
    head_tiles: tl.constexpr = PADDED_HEADS // HEADS
    program = tl.program_id(0)
    part = program % PARTS
    in_chunk = program // (PARTS * head_tiles)
    row, first, end, count = _row_of(in_chunk, row_begin, lo, hi, slots)
    head = program // PARTS % head_tiles * HEADS + tl.arange(0, HEADS)
    # The width need not be a power of two: a part has MAIN of the first PARTS * MAIN columns and EXTRA of the rest.
    main = part * MAIN + tl.arange(0, MAIN)
    extra = PARTS * MAIN + part * EXTRA + tl.arange(0, EXTRA if EXTRA > 0 else 16)
    acc = tl.zeros((HEADS, MAIN), tl.float32)
    acc_extra = tl.zeros((HEADS, EXTRA if EXTRA > 0 else 16), tl.float32)
    ds_rows = grad_scores + (in_chunk.to(tl.int64) * PADDED_HEADS + head)[:, None] * padded_slots
    for begin in range(0, count, KEYS):
        slot = begin + tl.arange(0, KEYS)
        valid, key = valid_keys(indices + row * indices_stride, slot, count, first, end, k_offset)
        ds = tl.load(ds_rows + slot[None, :])
        k_rows = k + key[:, None] * k_stride
        k_main = _load_tile(k_rows, valid, main, D, PARTS * MAIN <= D)
        acc = tl.dot(ds, k_main, acc, input_precision="ieee")
        if EXTRA > 0:
            k_extra = _load_tile(k_rows, valid, extra, D, PARTS * (MAIN + EXTRA) == D)
            acc_extra = tl.dot(ds, k_extra, acc_extra, input_precision="ieee")
    real = (head < H)[:, None]
    dq_rows = dq + row * dq_strides[0] + head[:, None] * dq_strides[1]
    tl.store(dq_rows + main[None, :], (acc * scale).to(dq.dtype.element_ty), mask=real & (main < D)[None, :])
    if EXTRA > 0:
        value = (acc_extra * scale).to(dq.dtype.element_ty)
        tl.store(dq_rows + extra[None, :], value, mask=real & (extra < D)[None, :])


@triton.jit
def _times(acc, left, held, rows, there, columns, WIDTH: tl.constexpr, WHOLE: tl.constexpr, HELD: tl.constexpr):
    """Adds left @ right, where right is `held` in shared memory or loaded now."""
    right = held
    if not HELD:
        right = _load_tile(rows, there, columns, WIDTH, WHOLE)
    return tl.dot(left, right, acc, input_precision="ieee")


@triton.jit
def _put(target, rows, valid, columns, value, WIDTH: tl.constexpr, WHOLE: tl.constexpr, ATOMIC: tl.constexpr):
    """Adds a tile to the rows of its keys, or stores it in the rows of its slots."""
    mask = valid[:, None]
    if not WHOLE:
        mask = mask & (columns < WIDTH)[None, :]
    pointers = target + rows[:, None] + columns[None, :]
    if ATOMIC:
        tl.atomic_add(pointers, value, mask=mask, sem="relaxed")
    else:
        tl.store(pointers, value, mask=mask)


@triton.jit(do_not_specialize=_NOT_SPECIALIZED)
def grad_key_kernel(
    left, right, right_strides, left_v, right_v, right_v_strides, indices, indices_stride, lo, hi, slots,
    target, target_stride, row_begin, padded_slots, k_offset, slot_count, scale,
    WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, H: tl.constexpr, PADDED_HEADS: tl.constexpr,
    HEADS: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr, MAIN: tl.constexpr, EXTRA: tl.constexpr,
    ATOMIC: tl.constexpr,
):  # fmt: skip
    """scale * left^T @ right + left_v^T @ right_v, one part of the columns, for all slots of a row.

    left and left_v are workspaces, right [.., WIDTH] and right_v [.., WIDTH_V] are q and dout; left_v is None
    where the values are not in the keys. The sum goes to the row of its key (ATOMIC) or of its slot in the target.
    """
    head_tiles: tl.constexpr = PADDED_HEADS // HEADS
    ONE_TILE: tl.constexpr = head_tiles == 1
    program = tl.program_id(0)
    part = program % PARTS
    in_chunk = program // PARTS
    row, first, end, count = _row_of(in_chunk, row_begin, lo, hi, slots)
    main = part * MAIN + tl.arange(0, MAIN)
    extra = PARTS * MAIN + part * EXTRA + tl.arange(0, EXTRA if EXTRA > 0 else 16)
    MAIN_WHOLE: tl.constexpr = PARTS * MAIN <= WIDTH
    MAIN_V_WHOLE: tl.constexpr = PARTS * MAIN <= WIDTH_V
    EXTRA_WHOLE: tl.constexpr = PARTS * (MAIN + EXTRA) == WIDTH
    EXTRA_V: tl.constexpr = (left_v is not None) and (WIDTH_V > PARTS * MAIN)
    member = tl.arange(0, HEADS)
    wide = member.to(tl.int64)[:, None]
    right_rows = right + row * right_strides[0] + wide * right_strides[1]
    right_v_rows = right_v + row * right_v_strides[0] + wide * right_v_strides[1]
    tile_rows = (in_chunk.to(tl.int64) * PADDED_HEADS + member)[:, None] * padded_slots
    # If one tile holds all heads, q and dout stay in shared memory for all slots.
    held = _load_tile(right_rows, member < H, main, WIDTH, MAIN_WHOLE)
    held_v = _load_tile(right_v_rows, member < H, main, WIDTH_V, MAIN_V_WHOLE)
    held_extra = _load_tile(right_rows, member < H, extra, WIDTH, EXTRA_WHOLE)
    held_extra_v = _load_tile(right_v_rows, member < H, extra, WIDTH_V, False)
    for begin in range(0, count, KEYS):
        slot = begin + tl.arange(0, KEYS)
        valid, key = valid_keys(indices + row * indices_stride, slot, count, first, end, k_offset)
        # Two accumulators instead of one that is scaled in between, so that the products do not wait for each other.
        acc = tl.zeros((KEYS, MAIN), tl.float32)
        acc_v = tl.zeros((KEYS, MAIN), tl.float32)
        acc_extra = tl.zeros((KEYS, EXTRA if EXTRA > 0 else 16), tl.float32)
        acc_extra_v = tl.zeros((KEYS, EXTRA if EXTRA > 0 else 16), tl.float32)
        for tile in range(head_tiles):
            there = tile * HEADS + member < H
            at = tile_rows + tile * HEADS * padded_slots + slot[None, :]
            rows = right_rows + tl.cast(tile * HEADS, tl.int64) * right_strides[1]
            factor = tl.trans(tl.load(left + at))
            acc = _times(acc, factor, held, rows, there, main, WIDTH, MAIN_WHOLE, ONE_TILE)
            if EXTRA > 0:
                acc_extra = _times(acc_extra, factor, held_extra, rows, there, extra, WIDTH, EXTRA_WHOLE, ONE_TILE)
            if left_v is not None:
                rows_v = right_v_rows + tl.cast(tile * HEADS, tl.int64) * right_v_strides[1]
                factor_v = tl.trans(tl.load(left_v + at))
                acc_v = _times(acc_v, factor_v, held_v, rows_v, there, main, WIDTH_V, MAIN_V_WHOLE, ONE_TILE)
                if EXTRA_V:
                    acc_extra_v = _times(
                        acc_extra_v, factor_v, held_extra_v, rows_v, there, extra, WIDTH_V, False, ONE_TILE
                    )
        # tl.fma, because the compiler would fold a plain sum into one accumulator.
        value = tl.fma(acc, scale + tl.zeros_like(acc), acc_v)
        value_extra = tl.fma(acc_extra, scale + tl.zeros_like(acc_extra), acc_extra_v)
        target_rows = key
        if not ATOMIC:
            target_rows = in_chunk.to(tl.int64) * slot_count + slot
        _put(target, target_rows * target_stride, valid, main, value, WIDTH, MAIN_WHOLE, ATOMIC)
        if EXTRA > 0:
            _put(target, target_rows * target_stride, valid, extra, value_extra, WIDTH, EXTRA_WHOLE, ATOMIC)
