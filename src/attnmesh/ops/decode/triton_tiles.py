"""How the decode kernels cut their work: tiles, shares, and what the merge holds at a time.

Fixed rules rather than autotuning: the order of the sums, and so the result, must not depend on a timing. Measured on
an H200 (docs/benchmarks.md); tests/ops/test_triton_compiles.py keeps every choice from spilling on sm_90.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.ops.decode.call import DecodeCall
from attnmesh.ops.storage import values_of


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
