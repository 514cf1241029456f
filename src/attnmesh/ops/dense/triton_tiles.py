"""Helpers of the dense Triton kernels: tile sizes, strides, and the three phases of a loop over tiles.

Kernels receive every mask as an interval of keys per row, `first[i] <= j < end[i]`, both ends non-decreasing. A tile of
rows therefore reads one contiguous run of key tiles, and only the ends of that run need a mask::

          begin   inner            edge    stop
            |       |               |       |
    row 0   |  xxxxx|xxxxxxxxxxxxxxx|x      |      x: visible
    row 1   |    xxx|xxxxxxxxxxxxxxx|xxx    |
    row 2   |      x|xxxxxxxxxxxxxxx|xxxxxxx|
             masked      unmasked     masked

Read by columns, this is the loop of a key tile over the rows that attend to it.
"""

# Kernels are Triton's language, not Python's: its names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

LENGTHS = ["q_len", "kv_len"]  # not specialized: the blocks of a ring have many lengths, and each would recompile
LOG2_E = 1.4426950408889634  # the kernels exponentiate in base 2, which the hardware supports natively


class DenseTiles(NamedTuple):
    """The tile of one program, rows x keys, and its warps and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


# (padded head_dim, bytes per element) -> tiles. Fixed rather than autotuned: the order of the sums, and so
# the result, must not depend on a timing. tests/ops/test_triton_compiles.py checks that none spills on sm_90.
# float32 runs without tensor cores (tf32 would not be float32): a thread then keeps whole rows of both
# operands of a product in registers, which requires small tiles.
FORWARD_TILES = {
    (64, 2): DenseTiles(128, 128, 8, 3),
    (128, 2): DenseTiles(128, 64, 8, 3),
    (256, 2): DenseTiles(64, 64, 8, 2),
    (64, 4): DenseTiles(64, 32, 8, 2),
    (128, 4): DenseTiles(16, 32, 8, 2),
    (256, 4): DenseTiles(16, 16, 8, 2),
}
GRAD_QUERY_TILES = {
    (64, 2): DenseTiles(128, 128, 8, 2),
    (128, 2): DenseTiles(128, 64, 8, 2),
    (256, 2): DenseTiles(64, 32, 8, 2),
    (64, 4): DenseTiles(32, 32, 8, 1),
    (128, 4): DenseTiles(32, 32, 8, 2),
    (256, 4): DenseTiles(32, 16, 8, 2),
}
GRAD_KEY_TILES = {
    (64, 2): DenseTiles(64, 128, 8, 2),
    (128, 2): DenseTiles(64, 64, 8, 2),
    (256, 2): DenseTiles(32, 32, 8, 1),
    (64, 4): DenseTiles(32, 32, 8, 1),
    (128, 4): DenseTiles(16, 32, 8, 2),
    (256, 4): DenseTiles(16, 16, 8, 1),
}


def padded(head_dim: int) -> int:
    """The width of a tile that holds `head_dim`: the next power of two, as Triton's blocks must be."""
    return int(triton.next_power_of_2(head_dim))


def pick_tiles(table: dict[tuple[int, int], DenseTiles], x: Tensor) -> DenseTiles:
    """The entry of `table` for the head dim and dtype of `x`."""
    head_dim = x.shape[-1]
    if not 16 <= head_dim <= 256:
        raise ValueError(f"head_dim must be 16 to 256 for the Triton kernels, got {head_dim}")
    return table[max(64, padded(head_dim)), x.element_size()]


def row_strides(**tensors: Tensor | None) -> list[tuple[int, int, int]]:
    """The batch, head and row strides of [B, H, S, D] tensors, whose head dims must be contiguous."""
    for name, x in tensors.items():
        if x is not None and x.stride(-1) != 1:
            raise ValueError(f"{name} must have stride 1 along head_dim for the Triton kernels, got {x.stride(-1)}")
    return [(0, 0, 0) if x is None else (x.stride(0), x.stride(1), x.stride(2)) for x in tensors.values()]


@triton.jit
def locate(tile_count, heads):
    """The (tile, head, batch) of this program. Tiles of one head are adjacent and share its keys in L2."""
    program = tl.program_id(0)
    return program % tile_count, program // tile_count % heads, program // (tile_count * heads)


@triton.jit
def at_head(base, strides, batch, head):
    """The beginning of a head, in int64: a tensor may have more than 2**31 elements."""
    return base + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]


@triton.jit
def tile_pointers(base, stride, begin, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to rows [begin, begin + ROWS) of one head. Offsets within the tile fit int32."""
    return (
        base + tl.cast(begin, tl.int64) * stride + tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]
    )


@triton.jit
def tile_mask(begin, limit, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """True within the first `limit` rows and the D real columns of a tile."""
    return (begin + tl.arange(0, ROWS) < limit)[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]


@triton.jit
def load_tile(
    base, stride, begin, limit, EDGE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Rows [begin, begin + ROWS) of one head. If EDGE, those from `limit` on read as zero."""
    pointers = tile_pointers(base, stride, begin, ROWS, BLOCK_D)
    if EDGE:
        tile = tl.load(pointers, mask=tile_mask(begin, limit, ROWS, D, BLOCK_D), other=0.0)
    elif D != BLOCK_D:
        tile = tl.load(pointers, mask=(tl.arange(0, BLOCK_D) < D)[None, :], other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def load_rows(base, stride, begin, limit, other, EDGE: tl.constexpr, ROWS: tl.constexpr):
    """One value per row of [begin, begin + ROWS). If EDGE, rows from `limit` on read as `other`."""
    near = tl.arange(0, ROWS)
    pointers = base + tl.cast(begin, tl.int64) * stride + near * stride
    if EDGE:
        values = tl.load(pointers, mask=begin + near < limit, other=other)
    else:
        values = tl.load(pointers)
    return values


@triton.jit
def store_rows(base, stride, begin, limit, value, ROWS: tl.constexpr):
    """The inverse of `load_rows`."""
    near = tl.arange(0, ROWS)
    tl.store(base + tl.cast(begin, tl.int64) * stride + near * stride, value, mask=begin + near < limit)


@triton.jit
def visible_keys(first, end, rows, row_count, key_count, CAUSAL: tl.constexpr):
    """The interval of keys visible to each of `rows`; empty for rows beyond the last."""
    real = rows < row_count
    if first is not None:
        row_first = tl.load(first + rows, mask=real, other=0)
        row_end = tl.load(end + rows, mask=real, other=0)
    elif CAUSAL:
        row_first = tl.zeros_like(rows)
        row_end = tl.where(real, rows + 1, 0)
    else:
        row_first = tl.zeros_like(rows)
        row_end = tl.where(real, key_count, 0)
    return row_first, row_end


@triton.jit
def key_phases(first, end, row_begin, row_stop, key_count, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """The (begin, inner, edge, stop) of the keys visible to the rows [row_begin, row_stop)."""
    if first is not None:
        begin, full_begin = tl.load(first + row_begin), tl.load(first + row_stop - 1)
        full_end, stop = tl.load(end + row_begin), tl.load(end + row_stop - 1)
    elif CAUSAL:
        begin, full_begin = 0, 0
        full_end, stop = row_begin + 1, row_stop
    else:
        begin, full_begin = 0, 0
        full_end, stop = key_count, key_count
    return split_phases(begin, full_begin, full_end, stop, BLOCK)


@triton.jit
def split_phases(begin, full_begin, full_end, stop, BLOCK: tl.constexpr):
    """Splits [begin, stop), fully visible in [full_begin, full_end), at tile boundaries: (begin, inner, edge, stop)."""
    inner = tl.minimum(tl.cdiv(full_begin, BLOCK) * BLOCK, stop)
    edge = tl.maximum(full_end // BLOCK * BLOCK, inner)
    return begin // BLOCK * BLOCK, inner, edge, stop
