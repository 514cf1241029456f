"""Decode in Triton: one launch over the keys, one over the rows."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attnmesh.core.optional import installed, require
from attnmesh.core.state import State
from attnmesh.ops.decode.call import DecodeCall
from attnmesh.ops.decode.device_errors import MAX_SEQUENCES, error_record, raise_device_error
from attnmesh.ops.storage import Quantized, Stored, values_of

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_WIDEST = 1024
_LOG2_E = 1.4426950408889634
_WHOLE = 2**30  # a split longer than any sequence; a sum of two still fits 32 bits
_AT_ONCE = 1024  # sequences a launch: every program looks at all their lengths


class Triton:
    """Backend over the split kernel and the merge kernel."""

    name = "triton"

    def refusal(self, call: DecodeCall) -> str | None:
        """Why it cannot serve this call; None if it can."""
        width = max(call.q.shape[3], call.value_dim)
        if call.q.dtype not in _DTYPES:
            return f"its kernels take queries in fp16, bf16 and fp32, not {call.q.dtype}"
        if width > _WIDEST:
            return f"its kernels take head_dim up to {_WIDEST}, not {width}"
        if values_of(call.k).stride(-1) != 1 or values_of(call.v).stride(-1) != 1:
            return "its kernels take caches whose last dimension is contiguous"
        if call.q.shape[0] > MAX_SEQUENCES:
            return f"its kernels take up to {MAX_SEQUENCES} sequences, not {call.q.shape[0]}"
        if not installed("triton"):
            return "triton is not installed (pip install 'attnmesh[triton]')"
        if not call.q.is_cuda and not _interpreted():
            return "it needs a GPU (or TRITON_INTERPRET=1 set before triton is imported)"
        fp8 = isinstance(call.k, Quantized) and call.k.storage == "fp8"
        if call.q.is_cuda and fp8 and torch.cuda.get_device_capability(call.q.device) < (8, 9):
            return "its kernels read fp8 caches from compute capability 8.9 on"
        return None

    def run(self, call: DecodeCall, into: State | None = None, tiles: Tiles | None = None) -> State:
        """Out and lse, by two launches for each 1024 sequences. Raises what faults earlier calls have met."""
        raise_device_error(call.q.device)
        batch = call.q.shape[0]
        state = call.empty_state() if into is None else into
        if state.out.numel():
            for first in range(0, batch, _AT_ONCE):
                some = slice(first, first + _AT_ONCE)
                part = call if batch <= _AT_ONCE else _sequences(call, some)
                _launch(part, State(state.out[some], state.lse[some]), tiles or pick_tiles(call), first)
        return state


def _launch(call: DecodeCall, state: State, tiles: Tiles, first_sequence: int) -> None:
    q = call.q if call.q.stride(-1) == 1 else call.q.contiguous()
    cur_pos = call.cur_pos.contiguous()
    sinks = None if call.sinks is None else call.sinks.contiguous()
    key_range = (None, None) if call.key_range is None else tuple(x.contiguous() for x in call.key_range)
    batch, _, tokens, head_dim = q.shape
    # Sequences that share a cache are rows of one tile, and read it once. Not with fixed splits, whose tiles may not
    # depend on the batch, nor with a window: what lies between two windows may be anything.
    shared = call.shared and call.splits.size is None and call.window is None
    rows = call.group * tokens * (batch if shared else 1)
    row_tile = min(max(8, power_of_two(rows)), tiles.rows)
    heads = call.kv_heads * -(-rows // row_tile)
    lines = 1 if shared else batch

    fixed = call.splits.size is not None or call.splits.max_count == 1
    unit = min(call.splits.size or _WHOLE, _WHOLE) if fixed else tiles.keys
    units = lines * -(-call.capacity // unit)
    shares = max(1, min(units, count_shares(lines, heads, tiles.resident * _multiprocessors(q.device))))
    most = None if fixed else call.splits.max_count
    pieces = heads * (units if fixed else 2 * shares)
    part_out = torch.empty(pieces, row_tile, call.value_dim, dtype=torch.float32, device=q.device)
    part_lse = torch.empty(pieces, row_tile, dtype=torch.float32, device=q.device)

    words = paired(call)
    k, *k_parts = _parts(call, call.k, words)
    v, *v_parts = _parts(call, call.v, words)
    mask, tree = (_as_bytes(x) for x in (call.mask, call.tree))
    main = max(16, 1 << (head_dim.bit_length() - 1))
    tail = max(16, power_of_two(head_dim - main)) if head_dim > main else 0
    block_size = call.block_size if call.paged else 0
    with torch.cuda.device_of(q):
        early = _starts_early(q.device)
    table: tuple[Tensor | None, int] = (None, 0)
    if call.table is not None:
        slots = call.table if call.table.stride(1) == 1 else call.table.contiguous()
        table = (slots, 0 if slots.shape[0] == 1 else slots.stride(0))
    written = (state.out, state.out.stride()[:3], state.lse, state.lse.stride())
    window = None if call.window is None else min(call.window, max(1, call.capacity))  # differences fit 32 bits
    numbers = (batch, call.kv_heads, k.shape[0], call.capacity, window, shares, most)
    common: dict[str, Any] = {
        "TOKENS": tokens, "GROUP": call.group, "ROWS": row_tile, "DV": call.value_dim, "BLOCK_SIZE": block_size,
        "UNIT": unit, "FIXED": fixed, "SHARED": shared, "BATCH": power_of_two(batch), "EARLY": early,
    }  # fmt: skip
    with torch.cuda.device_of(q):
        _kernel("split")[(shares * heads,)](
            q, q.stride()[:3], k, v, *k_parts, *v_parts, *table, cur_pos, *key_range,
            mask, _broadcast_strides(mask, 4), 0 if mask is None else mask.shape[3],
            tree, _broadcast_strides(tree, 3), sinks, *written, part_out, part_lse, *numbers, call.scale * _LOG2_E,
            **common, KEYS=tiles.keys, D=head_dim, MAIN=main, TAIL=tail, BLOCK_DV=max(16, power_of_two(call.value_dim)),
            STORAGE="plain" if isinstance(call.k, Tensor) else call.k.storage, PAIRED=words, V_IN_K=_v_in_k(call, main),
            COMPILED=not _interpreted(),
            ALIGNED=unit % tiles.keys == 0 and (tiles.keys % max(block_size, 1) == 0 or block_size % tiles.keys == 0),
            WIDE=max(_reach(call.k), _reach(call.v)) >= 2**31, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        part = pick_merge_tile(shares // lines + 2, row_tile, call.value_dim, fixed)
        _kernel("merge")[(lines * heads, row_tile // part.rows, -(-call.value_dim // part.columns))](
            part_out, part_lse, *table, cur_pos, *key_range, sinks, *written,
            error_record(q.device), first_sequence, *numbers,
            **common, PIECES=part.pieces, SOME_ROWS=part.rows, COLUMNS=part.columns, num_warps=4,
            **({"launch_pdl": True} if early else {}),
        )  # fmt: skip


def _sequences(call: DecodeCall, some: slice) -> DecodeCall:
    """The call for some of its sequences."""

    def part(x: Tensor | None) -> Tensor | None:
        return x if x is None or x.shape[0] == 1 else x[some]

    return replace(
        call,
        q=call.q[some],
        cur_pos=call.cur_pos[some],
        table=part(call.table),
        mask=part(call.mask),
        tree=part(call.tree),
        key_range=None if call.key_range is None else (call.key_range[0][some], call.key_range[1][some]),
        k=_rows(call, call.k, some),
        v=_rows(call, call.v, some),
    )


def _rows(call: DecodeCall, cache: Stored, some: slice) -> Stored:
    """Some sequences of a contiguous cache; all of a pool, and of a cache that is everybody's."""
    if call.paged or values_of(cache).shape[0] == 1:
        return cache
    if isinstance(cache, Tensor):
        return cache[some]
    return replace(
        cache, values=cache.values[some], scales=cache.scales if cache.storage == "fp8" else cache.scales[some]
    )


def _kernel(name: str) -> Any:
    return getattr(require("attnmesh.ops.decode.triton_kernels", extra="triton"), f"{name}_kernel")


def _parts(
    call: DecodeCall, stored: Stored, words: bool
) -> tuple[Tensor, tuple[int, ...], Tensor | None, tuple[int, ...]]:
    """Values and scales, each with its strides by (block or sequence, token, head)."""
    values = values_of(stored)
    values = values.view(torch.int16) if words else values

    def strides(x: Tensor) -> tuple[int, ...]:
        if call.paged:
            return x.stride()[:3]
        return (0 if x.shape[0] == 1 else x.stride(0), x.stride(2), x.stride(1))  # a cache of one is everybody's

    if isinstance(stored, Tensor):
        return values, strides(values), None, (0, 0, 0, 0)
    scales = stored.scales
    if stored.storage == "fp8":
        return values, strides(values), scales, (scales.stride(0) if scales.ndim else 0, 0, 0, 0)
    return values, strides(values), scales, (*strides(scales), scales.stride(3) if scales.ndim == 4 else 0)


def _as_bytes(x: Tensor | None) -> Tensor | None:
    return x.view(torch.uint8) if x is not None and x.dtype == torch.bool else x


def _broadcast_strides(x: Tensor | None, ndim: int) -> tuple[int, ...]:
    if x is None:
        return (0,) * ndim
    return tuple(0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True))


def _v_in_k(call: DecodeCall, main: int) -> bool:
    """Whether the values are the keys' first columns (MLA): they are then read once."""
    k, v = call.k, call.v
    return (
        isinstance(k, Tensor)
        and isinstance(v, Tensor)
        and k.data_ptr() == v.data_ptr()
        and k.stride() == v.stride()
        and v.shape[3] == main <= k.shape[3]  # narrower keys are padded, not read
    )


def _reach(stored: Stored) -> int:
    """The farthest offset from the beginning of a cache, or of its scales."""
    parts = (stored,) if isinstance(stored, Tensor) else (stored.values, stored.scales)
    return max(_span(x) for x in parts)


def _span(x: Tensor) -> int:
    """How far apart the first and the last element of a tensor lie."""
    return sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@functools.cache
def _starts_early(device: torch.device) -> bool:
    """Whether the merge may start while the first kernel runs: from Hopper on. Called where `device` is current."""
    if _interpreted():
        return False
    from triton.runtime import driver

    target = driver.active.get_current_target()
    return bool(target.backend == "cuda" and target.arch >= 90)


def _interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


class Tiles(NamedTuple):
    """One program's tile, the warps and pipeline stages that run it, and how many programs a multiprocessor holds."""

    rows: int  # at most: fewer query heads and tokens take a smaller tile
    keys: int
    warps: int
    stages: int
    resident: int


# Padded head_dim -> Tiles. Two tiles in flight for each of two or three programs keep the memory busy.
_SIXTEEN_BITS = {
    64: Tiles(64, 64, 4, 3, 3),
    128: Tiles(32, 64, 4, 3, 2),
    256: Tiles(32, 32, 4, 3, 2),
    1024: Tiles(32, 32, 8, 2, 1),
}
_EIGHT_BITS = {
    64: Tiles(32, 64, 4, 3, 3),
    128: Tiles(32, 64, 4, 3, 3),
    256: Tiles(32, 32, 4, 3, 2),
    1024: Tiles(32, 32, 8, 2, 1),
}
# float32 runs without tensor cores (tf32 would not be float32): a thread then holds much of both operands.
_FLOAT32 = {
    64: Tiles(16, 16, 4, 2, 2),
    128: Tiles(16, 16, 4, 2, 2),
    256: Tiles(16, 16, 8, 2, 1),
    1024: Tiles(8, 16, 8, 1, 1),
}


def pick_tiles(call: DecodeCall) -> Tiles:
    """The tiles of a call. They depend on its sequences' shape and dtypes, not on how many there are or how long."""
    if call.q.dtype == torch.float32:
        table = _FLOAT32
    else:
        # bfp8 multiplies each value by its power of two, for which 16 bits' tiles leave more registers.
        table = _SIXTEEN_BITS if isinstance(call.k, Tensor) or call.k.storage == "bfp8" else _EIGHT_BITS
    width = max(call.q.shape[3], call.value_dim)
    return next(tiles for limit, tiles in table.items() if width <= limit)


def paired(call: DecodeCall) -> bool:
    """Whether two neighbours of an 8-bit cache are read as one 16-bit word: faster, if widths and places are even."""
    if isinstance(call.k, Tensor) or call.k.storage == "bfp8" or call.q.dtype == torch.float32:
        return False
    values = [values_of(x) for x in (call.k, call.v)]
    head_dim, value_dim = call.q.shape[3], call.value_dim
    return (
        head_dim >= 32
        and power_of_two(head_dim) == head_dim
        and value_dim % 32 == 0
        and all(stride % 2 == 0 for x in values for stride in (*x.stride()[:3], x.storage_offset(), x.data_ptr()))
    )


@functools.cache
def count_shares(sequences: int, heads: int, places: int) -> int:
    """How many shares, of `heads` programs each, fill the chip's places.

    If the sequences are equally long (the host does not know), a number that divides theirs cuts none of them and
    leaves nothing to merge, and with a multiple of theirs no program meets two. Either saves more than the few places
    it leaves empty.
    """
    fill = max(1, places // heads)
    whole = [n for n in range(1, sequences + 1) if sequences % n == 0 and _filled(n * heads, places) >= 0.9]
    if whole:
        return min(whole)
    even = fill - fill % sequences
    return even if even >= 0.9 * fill else fill


def _filled(programs: int, places: int) -> float:
    """The part of the chip's places that programs take, over all the rounds they need."""
    return programs / (-(-programs // places) * places)


_MOST_PIECES = 512  # of one sequence and head, alone on the chip: in one go the loads do not wait for one another


class MergeTile(NamedTuple):
    """What a program of the merge holds at a time."""

    pieces: int
    rows: int
    columns: int


def pick_merge_tile(pieces: int, rows: int, value_dim: int, fixed: bool) -> MergeTile:
    """All pieces of a head at once where that can be, and as few rows and columns as leave 4096 numbers a program.

    With fixed splits it may depend on nothing but the sequence: the order of the sums would change.
    """
    pieces = 16 if fixed else min(max(4, power_of_two(pieces)), _MOST_PIECES)
    cells = 4096 // pieces
    columns = min(max(16, power_of_two(value_dim)), cells)
    return MergeTile(pieces, max(1, min(rows, cells // columns)), columns)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()
