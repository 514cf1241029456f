"""Triton kernels that merge states and sum gradients: every part is read once, the result is written once.

Kernels that cannot continue from a state (cuDNN's, FlashAttention's) return one per step. Merging these one by one
would read and write the running total at every step; here up to four parts join it in one pass. `merge_packed` merges
any number of packed states in order, in one launch. The torch equivalents are in `attnmesh.core.state`.
"""

from collections.abc import Hashable, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from attnmesh.core.state import State
from attnmesh.ops.dense.triton_tiles import at_head, locate, padded, row_strides, store_rows, tile_mask, tile_pointers
from attnmesh.ops.launch import Launch, Recent, cdiv, next_power_of_2, prepare, repeat, signature

MAX_PARTS = 4
_launches: Recent[Launch] = Recent()
_ELEMENTS = 2048  # of one tensor per program: four 16-byte accesses in flight for each thread


def accumulate(
    total: State | None, parts: Sequence[tuple[State, int, int]], out_dtype: torch.dtype,
    shape: tuple[int, int, int, int], into: State | None = None, sinks: Tensor | None = None,
) -> State:  # fmt: skip
    """The state over all keys of `total` and of 1 to 4 `parts`, over the rows of `shape` = (B, H, S, D).

    A part `(state, row, sequence)` covers rows `row`, `row + 1`, ... of sequences `sequence`, `sequence + 1`, ...; it
    may be strided, with `out` in fp16, bf16 or fp32. `total` is float32 and covers all rows. If `out_dtype` is float32,
    it is overwritten with the result, and rows and sequences before and after all parts stay as they are; else the
    result is new, or written to `into`. A row with lse -inf contributes nothing, whatever its `out` holds; a row that
    no state covers is (0, -inf). Infinite lses as in `merge`. `sinks` [H] are merged too, if the result is not `total`.
    """
    _check_count(parts)
    batch, heads, length, head_dim = shape
    rows, sequences = range(length), range(batch)
    if into is not None:
        result = into
    elif total is not None and out_dtype == torch.float32:
        assert sinks is None, "rows outside the parts would get none"
        result = total
        rows, sequences = _covered([(state.lse.shape, row, first) for state, row, first in parts])
    else:
        device = parts[0][0].out.device
        result = State(
            torch.empty(shape, dtype=out_dtype, device=device),
            torch.empty(shape[:3], dtype=torch.float32, device=device),
        )
    tile = _rows_per_program(head_dim)
    programs = cdiv(len(rows), tile) * len(sequences) * heads
    if programs == 0 or head_dim == 0:
        return result

    # The total is one more part.
    states = [*([] if total is None else [(total, 0, 0)]), *parts]
    out_strides = row_strides(**{f"parts[{i}].out": state.out for i, (state, *_) in enumerate(states)})
    (result_strides,) = row_strides(out=result.out)
    with torch.cuda.device_of(result.out):
        _accumulate_kernel[(programs,)](
            tuple(state.out for state, *_ in states), tuple(out_strides),
            tuple(state.lse for state, *_ in states), tuple(state.lse.stride() for state, *_ in states),
            *_ranges([(state.lse.shape, row, first) for state, row, first in states]), sinks,
            result.out, result_strides, result.lse, result.lse.stride(), rows.start, rows.stop, sequences.start, heads,
            PARTS=len(states), D=head_dim, BLOCK_D=padded(head_dim), ROWS=tile, num_warps=4,
        )  # fmt: skip
    return result


def add(
    total: Tensor | None, parts: Sequence[tuple[Tensor, int, int]], out_dtype: torch.dtype,
    shape: tuple[int, int, int, int],
) -> Tensor:  # fmt: skip
    """The sum of `total` and of 1 to 4 `parts`, over the rows of `shape` = (B, H, S, D).

    A part `(x, row, sequence)` covers what it does in `accumulate`. `total` is float32 and covers all rows; if
    `out_dtype` is float32, it is overwritten with the sum, else the sum is new. Rows that nothing covers are 0.
    """
    _check_count(parts)
    batch, heads, length, head_dim = shape
    rows, sequences = range(length), range(batch)
    if total is not None and out_dtype == torch.float32:
        result = total
        rows, sequences = _covered([(x.shape, row, first) for x, row, first in parts])
    else:
        result = torch.empty(shape, dtype=out_dtype, device=parts[0][0].device)
    tile = _rows_per_program(head_dim)
    programs = cdiv(len(rows), tile) * len(sequences) * heads
    if programs == 0 or head_dim == 0:
        return result
    addends = [*([] if total is None else [(total, 0, 0)]), *parts]  # the total is one more part
    tensors = [*(x for x, *_ in addends), result]
    key = signature(*tensors), rows, sequences, tuple((row, first) for _, row, first in addends)
    launch = _launches.get(key)
    if launch is not None:
        launch(*tensors)
        return result
    strides = row_strides(**{f"parts[{i}]": x for i, (x, *_) in enumerate(addends)})
    (result_strides,) = row_strides(result=result)
    launch = prepare(
        _add_kernel, (programs,),
        (
            *tensors[:-1], *[None] * (MAX_PARTS + 1 - len(addends)), tuple(strides),
            *_ranges([(x.shape, row, first) for x, row, first in addends]),
            result, result_strides, rows.start, rows.stop, sequences.start, heads,
        ),
        tensors, PARTS=len(addends), D=head_dim, BLOCK_D=padded(head_dim), ROWS=tile, num_warps=4,
    )  # fmt: skip
    _launches.add(key, launch)
    return result


def _check_count(parts: Sequence[object]) -> None:
    if not 1 <= len(parts) <= MAX_PARTS:
        raise ValueError(f"parts must have 1 to {MAX_PARTS} elements, got {len(parts)}")


_Extent = tuple[torch.Size, int, int]  # the shape of a part [b, H, s, ...], its first row and its first sequence


def _covered(parts: Sequence[_Extent]) -> tuple[range, range]:
    """The rows and the sequences from the first to the last that any part covers; in place, only these change."""
    rows = range(min(row for _, row, _ in parts), max(row + shape[2] for shape, row, _ in parts))
    return rows, range(min(first for *_, first in parts), max(first + shape[0] for shape, _, first in parts))


def _ranges(parts: Sequence[_Extent]) -> tuple[tuple[int, ...], ...]:
    """The first row, the number of rows, the first sequence and the number of sequences of every part."""
    return (
        tuple(row for _, row, _ in parts), tuple(shape[2] for shape, *_ in parts),
        tuple(first for *_, first in parts), tuple(shape[0] for shape, *_ in parts),
    )  # fmt: skip


def _rows_per_program(head_dim: int) -> int:
    return max(1, _ELEMENTS // padded(head_dim))


@triton.jit
def _accumulate_kernel(
    outs, out_strides, lses, lse_strides, row_begins, row_counts, first_sequences, sequence_counts, sinks,
    result_out, result_out_strides, result_lse, result_lse_strides, begin, stop, first_sequence, heads,
    PARTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile, head, batch = locate(tl.cdiv(stop - begin, ROWS), heads)
    batch += first_sequence
    row_begin = begin + tile * ROWS

    sink = float("-inf")
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
    row_max = tl.full((ROWS,), 0.0, tl.float32) + sink
    for i in tl.static_range(PARTS):
        near, own = row_begin - row_begins[i], batch - first_sequences[i]
        count = _rows_of(own, sequence_counts[i], row_counts[i])
        row_max = tl.maximum(row_max, _load_lse(lses[i], lse_strides[i], own, head, near, count, ROWS))
    # No keys in any part: subtract 0, since -inf - -inf would be NaN.
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)

    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    if sinks is not None:  # a key without a value
        weight = _exp_difference(weight + sink, shift)
    for i in tl.static_range(PARTS):
        near, own = row_begin - row_begins[i], batch - first_sequences[i]
        count = _rows_of(own, sequence_counts[i], row_counts[i])
        # Reloaded rather than kept: it is in the cache, and the loop needs no list of tensors.
        lse = _load_lse(lses[i], lse_strides[i], own, head, near, count, ROWS)
        pointers = tile_pointers(at_head(outs[i], out_strides[i], own, head), out_strides[i][2], near, ROWS, BLOCK_D)
        # An `out` of weight 0 is not read: 0 * NaN would be NaN.
        covered = (near + tl.arange(0, ROWS) >= 0) & (lse != float("-inf"))
        mask = tile_mask(near, count, ROWS, D, BLOCK_D) & covered[:, None]
        out = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
        part_weight = _exp_difference(lse, shift)
        acc += out * part_weight[:, None]
        weight += part_weight

    acc /= tl.where(weight == 0.0, 1.0, weight)[:, None]
    pointers = tile_pointers(
        at_head(result_out, result_out_strides, batch, head), result_out_strides[2], row_begin, ROWS, BLOCK_D
    )
    tl.store(pointers, acc.to(result_out.dtype.element_ty), mask=tile_mask(row_begin, stop, ROWS, D, BLOCK_D))
    lse_rows = (at_head(result_lse, result_lse_strides, batch, head), result_lse_strides[2])
    store_rows(lse_rows, row_begin, stop, row_max + tl.log(weight), ROWS)


@triton.jit
def _exp_difference(lse, row_max):
    """exp(lse - row_max) for lse <= row_max and row_max > -inf; 1 where both are +inf."""
    return tl.exp(tl.where(lse == float("inf"), 0.0, lse - row_max))


@triton.jit
def _rows_of(sequence, sequences, rows):
    """The rows of a sequence in a part that has this many sequences; 0 if the sequence is not among them."""
    return tl.where((sequence >= 0) & (sequence < sequences), rows, 0)


@triton.jit
def _load_lse(lse, strides, batch, head, begin, count, ROWS: tl.constexpr):
    """The lse of a part over its rows [begin, begin + ROWS); -inf for rows that it does not cover."""
    near = begin + tl.arange(0, ROWS)
    pointers = at_head(lse, strides, batch, head) + near.to(tl.int64) * strides[2]
    return tl.load(pointers, mask=(near >= 0) & (near < count), other=float("-inf")).to(tl.float32)


@triton.jit
def _add_kernel(
    part0, part1, part2, part3, part4, part_strides, row_begins, row_counts, first_sequences, sequence_counts,
    result, result_strides, begin, stop, first_sequence, heads,
    PARTS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    tile, head, batch = locate(tl.cdiv(stop - begin, ROWS), heads)
    batch += first_sequence
    row_begin = begin + tile * ROWS
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    parts = (part0, part1, part2, part3, part4)
    for i in tl.static_range(PARTS):
        near, own = row_begin - row_begins[i], batch - first_sequences[i]
        count = _rows_of(own, sequence_counts[i], row_counts[i])
        pointers = tile_pointers(at_head(parts[i], part_strides[i], own, head), part_strides[i][2], near, ROWS, BLOCK_D)
        mask = tile_mask(near, count, ROWS, D, BLOCK_D) & (near + tl.arange(0, ROWS) >= 0)[:, None]
        acc += tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    pointers = tile_pointers(at_head(result, result_strides, batch, head), result_strides[2], row_begin, ROWS, BLOCK_D)
    tl.store(pointers, acc.to(result.dtype.element_ty), mask=tile_mask(row_begin, stop, ROWS, D, BLOCK_D))


_ROWS = 4


def merge_packed(parts: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """`attnmesh.ops.merge.merge_packed` on CUDA."""
    count, heads, batch, tokens, width = parts.shape
    parts = parts if parts.stride(-1) == 1 else parts.contiguous()
    out = torch.empty(batch, heads, tokens, width - 1, dtype=dtype, device=parts.device)
    rows = heads * batch * tokens
    if rows:
        with torch.cuda.device_of(parts):
            repeat(
                _launches, _merge_packed_kernel, (cdiv(rows, _ROWS),),
                (parts, parts.stride()[:4], sinks, out, out.stride()[:3], count, rows, batch, tokens),
                D=width - 1, BLOCK_D=next_power_of_2(width - 1), ROWS=_ROWS, num_warps=4,
            )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["count", "rows", "batch", "tokens"])
def _merge_packed_kernel(
    parts, strides, sinks, out, out_strides, count, rows, batch, tokens,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Merges ROWS rows (head, sequence, token) of all parts, one part after another."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    head = (row // (batch * tokens)).to(tl.int64)
    sequence = (row // tokens % batch).to(tl.int64)
    token = row % tokens
    column = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (column < D)[None, :]
    rows_of_part = parts + head * strides[1] + sequence * strides[2] + token * strides[3]

    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    for _ in range(count):
        lse = tl.load(rows_of_part + D, mask=real, other=float("-inf"))
        part = tl.load(rows_of_part[:, None] + column[None, :], mask=inside, other=0.0)
        new_row_max = tl.maximum(row_max, lse)
        shift = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)  # -inf - -inf would be NaN
        acc_scale, weight = _exp_difference(row_max, shift), _exp_difference(lse, shift)
        acc = acc * acc_scale[:, None] + part * weight[:, None]
        total = total * acc_scale + weight
        row_max = new_row_max
        rows_of_part += strides[0]
    if sinks is not None:
        sink = tl.load(sinks + head, mask=real, other=float("-inf")).to(tl.float32)
        # A row without keys stays 0: its row_max is -inf. An infinite sink and an infinite lse weigh the same.
        weight = tl.exp(tl.where(row_max == float("-inf"), float("-inf"), sink - row_max))
        total += tl.where((sink == float("inf")) & (row_max == float("inf")), total, weight)
    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    target = out + sequence * out_strides[0] + head * out_strides[1] + token * out_strides[2]
    tl.store(target[:, None] + column[None, :], acc.to(out.dtype.element_ty), mask=inside)


MAX_STATES = 8
MAX_WIDTH = 8192  # of out: a program has whole rows


def merge_states(states: Sequence[State], key: Hashable) -> State:
    """`attnmesh.core.state.merge` of 1 to 8 states that are not empty, nor of float64. `key`: their `signature`."""
    tensors = [x.contiguous() for state in states for x in state]
    out = torch.empty(states[0].out.shape, dtype=torch.float32, device=tensors[0].device)
    lse = torch.empty(states[0].lse.shape, dtype=torch.float32, device=tensors[0].device)
    launch = _launches.get(key)
    if launch is not None:
        launch(*tensors, out, lse)
    else:
        rows, width = lse.numel(), out.shape[-1]
        tile = _rows_per_program(width)
        args = (*tensors, *[None] * (2 * (MAX_STATES - len(states))), out, lse, rows)
        launch = prepare(
            _merge_states_kernel, (cdiv(rows, tile),), args, (*tensors, out, lse), STATES=len(states), D=width,
            BLOCK_D=padded(width), ROWS=tile, num_warps=4,
        )  # fmt: skip
        _launches.add(key, launch)
    return State(out, lse)


@triton.jit(do_not_specialize=["rows"])
def _merge_states_kernel(
    out0, lse0, out1, lse1, out2, lse2, out3, lse3, out4, lse4, out5, lse5, out6, lse6, out7, lse7, out, lse, rows,
    STATES: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_D)[None, :]
    real = row < rows
    outs, lses = (out0, out1, out2, out3, out4, out5, out6, out7), (lse0, lse1, lse2, lse3, lse4, lse5, lse6, lse7)
    row_max = _lse_of_rows(lse0, row, real)
    for i in tl.static_range(1, STATES):
        row_max = tl.maximum(row_max, _lse_of_rows(lses[i], row, real))
    # No keys in any state: subtract 0, since -inf - -inf would be NaN.
    row_max = tl.where(row_max == float("-inf"), 0.0, row_max)
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for i in tl.static_range(STATES):
        weight = _exp_difference(_lse_of_rows(lses[i], row, real), row_max)
        # An `out` of weight 0 is not read: 0 * NaN would be NaN.
        mask = (real & (weight > 0.0))[:, None] & (column < D)
        acc += tl.load(outs[i] + row[:, None] * D + column, mask=mask, other=0.0).to(tl.float32) * weight[:, None]
        total += weight
    acc /= tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + row[:, None] * D + column, acc, mask=real[:, None] & (column < D))
    tl.store(lse + row, tl.where(total > 0.0, row_max + tl.log(total), float("-inf")), mask=real)


@triton.jit
def _lse_of_rows(lse, row, real):
    return tl.load(lse + row, mask=real, other=float("-inf")).to(tl.float32)
