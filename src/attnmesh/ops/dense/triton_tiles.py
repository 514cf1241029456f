"""Helpers of the dense Triton kernels: tile sizes, widths, score functions, and the phases of a loop over tiles.

Kernels receive every mask as disjoint parts. In each part row i attends to the keys `first[i] <= j < end[i]`, both ends
non-decreasing. A tile of rows therefore reads one contiguous run of key tiles per part, and only the ends of that run
need a mask::

          begin   inner            edge    stop
            |       |               |       |
    row 0   |  xxxxx|xxxxxxxxxxxxxxx|x      |      x: visible
    row 1   |    xxx|xxxxxxxxxxxxxxx|xxx    |
    row 2   |      x|xxxxxxxxxxxxxxx|xxxxxxx|
             masked      unmasked     masked

One loop runs over the tiles of [inner, edge), a second over the tiles of both ends: a loop has to fill its pipeline of
loads first, so that a third would cost more than its tiles. Read by columns, the picture is the loop of a key tile over
the rows that attend to it.

A width that is not a power of two is held as two blocks, the largest power of two and the rest, where that is less than
the next power of two: 192 = 128 + 64, 576 = 512 + 64. Tiles are tuples of one or two blocks.
"""

# mypy: disable-error-code="assignment"
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from attnmesh.core.ranges import Ranges
from attnmesh.ops.exponents import EXPONENT_BITS, HUGE, LOWEST
from attnmesh.ops.launch import GPU, HOPPER, gpu_of

LENGTHS = ["q_len", "kv_len"]  # not specialized: the blocks of a ring have many lengths, and each would recompile
LOG2_E = 1.4426950408889634  # the kernels exponentiate in base 2, which the hardware supports natively
_LOG2_E = tl.constexpr(LOG2_E)
_HUGE, _LOWEST, _EXPONENT_BITS = tl.constexpr(HUGE), tl.constexpr(LOWEST), tl.constexpr(EXPONENT_BITS)


class DenseTiles(NamedTuple):
    """The tile of one program, rows x keys, and its warps and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


# (width, bytes per element) -> tiles, where the width is the wider of keys and values, rounded up to one
# of WIDTHS. Fixed rather than autotuned: the order of the sums, and so the result, must not depend on a timing.
# Tuned on an H200; tests/ops/test_triton_compiles.py checks that none spills on sm_90. `pick_tiles` reduces them for
# devices with less shared memory. float32 runs without tensor cores (tf32 would not be float32): a thread then keeps
# whole rows of both operands of a product in registers, which requires small tiles.
WIDTHS = (64, 128, 192, 256, 576)
# Of the forward, of the gradient of queries, and of the gradients of keys and of values, which take a launch each at
# width 256: one tile of both would not fit in registers.
_TILES = {
    (64, 2): (DenseTiles(128, 64, 4, 3), DenseTiles(128, 64, 4, 3), DenseTiles(64, 128, 8, 3)),
    (128, 2): (DenseTiles(128, 64, 8, 3), DenseTiles(128, 64, 8, 3), DenseTiles(64, 128, 8, 3)),
    (192, 2): (DenseTiles(128, 64, 8, 3), DenseTiles(128, 64, 8, 2), DenseTiles(32, 128, 8, 2)),
    (256, 2): (DenseTiles(128, 64, 8, 2), DenseTiles(128, 32, 8, 2), DenseTiles(32, 128, 8, 2)),
    (576, 2): (DenseTiles(64, 32, 8, 2), DenseTiles(32, 32, 8, 1), DenseTiles(32, 16, 8, 1)),
    (64, 4): (DenseTiles(64, 32, 8, 2), DenseTiles(32, 32, 8, 1), DenseTiles(32, 32, 8, 1)),
    (128, 4): (DenseTiles(16, 32, 8, 2), DenseTiles(32, 32, 8, 2), DenseTiles(16, 32, 8, 2)),
    (192, 4): (DenseTiles(16, 16, 8, 2), DenseTiles(32, 16, 8, 1), DenseTiles(16, 16, 8, 1)),
    (256, 4): (DenseTiles(16, 16, 8, 2), DenseTiles(32, 16, 8, 2), DenseTiles(16, 16, 8, 1)),
    (576, 4): (DenseTiles(16, 16, 8, 1), DenseTiles(16, 16, 8, 1), DenseTiles(16, 16, 8, 1)),
}
FORWARD_TILES, GRAD_QUERY_TILES, GRAD_KEY_TILES = ({at: tiles[i] for at, tiles in _TILES.items()} for i in range(3))
# With bounds, fewer rows per program mask fewer pairs in vain, and a second program runs while one waits.
BOUNDED_FORWARD_TILES = FORWARD_TILES | {(64, 2): DenseTiles(64, 64, 4, 3), (128, 2): DenseTiles(64, 64, 4, 3)}
# Instead of the backward's 16-bit tiles of width 192, which exceed Blackwell's memory, by the tensors that are held.
TENSOR_MEMORY_TILES: dict[tuple[str, ...], DenseTiles] = {
    ("q", "grad_out"): DenseTiles(128, 32, 8, 2),
    ("k", "v"): DenseTiles(16, 128, 8, 2),
}
_RESERVED = 2048  # bytes of shared memory for reductions


def padded(head_dim: int) -> int:
    """The width of a tile that holds `head_dim`: the next power of two, as Triton's blocks must be."""
    return int(triton.next_power_of_2(head_dim))


def blocks_of(width: int) -> tuple[int, int]:
    """The blocks of a tile that holds `width` columns: a power of two and the rest, or the next power of two and 0."""
    whole = triton.next_power_of_2(width)
    if whole == width or width < 32:
        return max(16, whole), 0
    main = whole // 2
    rest = max(16, triton.next_power_of_2(width - main))
    return (main, rest) if main + rest < whole else (whole, 0)


_blocks_of = triton.constexpr_function(blocks_of)


def pick_tiles(table: dict[tuple[int, int], DenseTiles], q: Tensor, v: Tensor, *, held: tuple[str, ...]) -> DenseTiles:
    """The entry of `table` for the widths of keys and values and for the dtype, reduced until it fits the device.

    `held` are the tensors of which a program holds one tile while it reads tile after tile of the others.
    """
    widths = q.shape[-1], v.shape[-1]
    if max(widths) > WIDTHS[-1]:
        raise ValueError(
            f"head_dim must be at most {WIDTHS[-1]} for the Triton kernels, got {widths[0]} (keys) and "
            f"{widths[1]} (values)"
        )
    width, size, gpu = next(at for at in WIDTHS if at >= max(widths)), q.element_size(), gpu_of(q.device)
    if gpu.tensor_memory and (width, size) == (192, 2) and held in TENSOR_MEMORY_TILES:
        return TENSOR_MEMORY_TILES[held]
    tiles = table[width, size]
    return tiles if gpu.shared_memory >= HOPPER.shared_memory else _fitted(tiles, *widths, size, held, gpu)


@functools.cache
def _fitted(tiles: DenseTiles, key_dim: int, value_dim: int, size: int, held: tuple[str, ...], gpu: GPU) -> DenseTiles:
    """The tiles with fewer stages, then with fewer rows or keys, whichever are more, until they fit."""
    key_blocks, value_blocks = blocks_of(key_dim), blocks_of(value_dim)
    both = sum(key_blocks) + sum(value_blocks)
    columns = sum(key_blocks) if held == ("q",) else both
    least = 4 if size == 4 else 16  # tensor cores multiply 16 rows at a time
    many, few, row_terms = ("keys", "rows", 16) if held == ("k", "v") else ("rows", "keys", 0)
    while True:
        kept, read = getattr(tiles, many), getattr(tiles, few)
        # Of what is read, one stage is in registers. So are the weights of a product whose rows are at least as many as
        # its columns: each warp then multiplies whole rows. Otherwise warps exchange them through shared memory.
        exchanged = 0 if size == 2 and kept >= max(*key_blocks, *value_blocks) else kept * read * size
        needed = kept * columns * size + max(1, tiles.stages - 1) * read * (both * size + row_terms) + exchanged
        if needed + _RESERVED <= gpu.shared_memory:
            return tiles
        if tiles.stages > 2:
            tiles = tiles._replace(stages=tiles.stages - 1)
        elif read >= kept and read > 16:
            tiles = tiles._replace(**{few: read // 2})
        elif kept > least:
            tiles = tiles._replace(**{many: kept // 2})
        else:
            return tiles  # Triton raises OutOfResources


class Shape(NamedTuple):
    """The constants of a kernel."""

    rows: Any  # of a tile, and keys
    keys: Any
    d: Any
    dv: Any
    parts: Any = 1  # of the mask
    causal: Any = False
    ordered: Any = False  # sums are over ascending tiles
    overwrite: Any = True  # gradients are written, not added
    from_out: Any = False  # deltas are computed from the output of the forward, which comes in their place
    splits: Any = 1  # the most programs of a key tile
    steps: Any = 1  # the least of each


class Bounds(NamedTuple):
    """The bounds of a mask as kernel arguments: pointers, strides over parts and sequences, and the number of parts.

    `kept` is what kernels derive from the bounds, for the next launch. `on_host` are the bounds in host memory, where
    they are known there: reading those of a device would stall it.
    """

    first: Tensor | None
    end: Tensor | None
    strides: tuple[int, int]
    parts: int
    kept: dict[Any, Any]
    on_host: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(
        cls, bounds: "tuple[Tensor, Tensor] | Bounds | None", on_host: tuple[Tensor, Tensor] | None = None
    ) -> "Bounds":  # fmt: skip
        """From `first` and `end`, int32 [parts, B or 1, rows]; None is a mask that is not described by bounds."""
        if bounds is None:
            return _NO_BOUNDS
        if isinstance(bounds, Bounds):
            return bounds
        first, end = bounds
        on_host = bounds if first.device.type == "cpu" else on_host
        if first.stride(-1) != 1 or first.stride() != end.stride():
            first, end = first.contiguous(), end.contiguous()
        strides = first.stride(0), 0 if first.shape[1] == 1 else first.stride(1)
        return cls(first, end, strides, first.shape[0], {}, on_host)

    def of_rows(self, part: int, sequence: int, rows: slice) -> tuple[Tensor, Tensor]:
        """The bounds of some rows of one part of the mask of one sequence."""
        assert self.first is not None
        assert self.end is not None
        at = part, sequence if self.strides[1] else 0, rows
        return self.first[at], self.end[at]

    def each(self) -> "Sequence[Bounds]":
        """The bounds of each part."""
        if self.parts == 1 or self.first is None or self.end is None:
            return (self,)
        if "each" not in self.kept:
            pairs = zip(self.first.split(1), self.end.split(1), strict=True)
            self.kept["each"] = [Bounds.of(pair) for pair in pairs]
        return self.kept["each"]  # type: ignore[no-any-return]


_NO_BOUNDS = Bounds(None, None, (0, 0), 1, {})


class EvenPositions(NamedTuple):
    """Positions of rows and keys, from the first key on, all `step` apart but for one jump on each side.

    Row i is at `q_first + step * i`, and `q_jump` further from row `q_split` on. Key j is at `step * j`, and `k_jump`
    further from key `k_split` on. Without a jump, both are 0.
    """

    step: int
    q_first: int
    q_split: int
    q_jump: int
    k_split: int
    k_jump: int

    @classmethod
    def of(cls, q: Ranges, k: Ranges) -> "EvenPositions | None":
        """From the ranges of both; None if there are more jumps."""
        steps = {run.step for run in (*q, *k) if len(run) > 1}
        if not q or not k or len(q) > 2 or len(k) > 2 or len(steps) > 1:
            return None
        step = max(steps, default=1)
        q_split, q_jump, k_split, k_jump = (
            x for runs in (q, k) for x in ((len(runs[0]), runs[1][0] - runs[0][-1] - step) if runs[1:] else (0, 0))
        )
        return cls(step, q[0][0] - k[0][0], q_split, q_jump, k_split, k_jump)

    def has_later_keys(self, causal: bool) -> bool:
        """Whether a key that a row sees may come after the row. `causal`: row i sees keys 0..i."""
        return not causal or self.q_first < 0 or (self.q_split, self.q_jump) != (self.k_split, self.k_jump)


class ScoreTerms(NamedTuple):
    """The terms of a score besides the scaled product, as kernel arguments; None is not computed.

    `score = softcap * tanh(scale * q.k / softcap) - slopes[head] * |q_positions[row] - k_positions[key]|`, where slopes
    are float32 [Hq] and positions int32 [Sq] and [Sk], ascending for Gluon's kernels. `even` are the same positions,
    where they have that form. `terms[1:4]` are the tensors.
    """

    softcap: float | None = None
    slopes: Tensor | None = None
    q_positions: Tensor | None = None
    k_positions: Tensor | None = None
    even: EvenPositions | None = None


PLAIN = ScoreTerms()


def row_strides(**tensors: Tensor | None) -> list[tuple[int, int, int]]:
    """The batch, head and row strides of [B, H, S, D] tensors, whose head dims must be contiguous."""
    for name, x in tensors.items():
        if x is not None and x.stride(-1) != 1:
            raise ValueError(f"{name} must have stride 1 along head_dim for the Triton kernels, got {x.stride(-1)}")
    return [(0, 0, 0) if x is None else (x.stride(0), x.stride(1), x.stride(2)) for x in tensors.values()]


@triton.jit
def locate(inner, middle):
    """Of this program, such as the (tile, head, batch): tiles of one head are adjacent and share its keys in L2."""
    program = tl.program_id(0)
    return program % inner, program // inner % middle, program // (inner * middle)


@triton.jit
def at_head(base, strides, batch, head):
    """The beginning of a head, in int64: a tensor may have more than 2**31 elements."""
    return base + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1]


@triton.jit
def rows_of(base, strides, batch, head):
    """The rows of a head: where they begin, and their stride."""
    return at_head(base, strides, batch, head), strides[2]


@triton.jit
def tile_pointers(base, stride, begin, ROWS: tl.constexpr, BLOCK_D: tl.constexpr):
    """Pointers to rows [begin, begin + ROWS) of one head. Offsets within the tile fit int32."""
    within = tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, BLOCK_D)[None, :]
    return base + tl.cast(begin, tl.int64) * stride + within


@triton.jit
def tile_mask(begin, limit, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """True within the first `limit` rows and the D real columns of a tile."""
    return (begin + tl.arange(0, ROWS) < limit)[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :]


@triton.jit
def load_tile(rows, begin, limit, EDGE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Rows [begin, begin + ROWS) of one head, as blocks of columns. If EDGE, rows from `limit` on read as zero."""
    BLOCKS: tl.constexpr = _blocks_of(D)
    main = load_block(rows, begin, limit, EDGE, ROWS, D, BLOCKS[0])
    if BLOCKS[1] > 0:
        rest = load_block((rows[0] + BLOCKS[0], rows[1]), begin, limit, EDGE, ROWS, D - BLOCKS[0], BLOCKS[1])
    return (main, rest) if BLOCKS[1] > 0 else (main,)


@triton.jit
def load_block(rows, begin, limit, EDGE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """The first D columns of such rows, as one block of BLOCK_D columns."""
    pointers = tile_pointers(rows[0], rows[1], begin, ROWS, BLOCK_D)
    if EDGE:
        block = tl.load(pointers, mask=tile_mask(begin, limit, ROWS, D, BLOCK_D), other=0.0)
    elif D < BLOCK_D:
        block = tl.load(pointers, mask=(tl.arange(0, BLOCK_D) < D)[None, :], other=0.0)
    else:
        block = tl.load(pointers)
    return block


@triton.jit
def store_tile(rows, begin, limit, tile, ROWS: tl.constexpr, D: tl.constexpr):
    """The inverse of `load_tile`, in the dtype of the rows."""
    BLOCKS: tl.constexpr = _blocks_of(D)
    for i in tl.static_range(len(tile)):
        mask = tile_mask(begin, limit, ROWS, D - i * BLOCKS[0], BLOCKS[i])
        pointers = tile_pointers(rows[0] + i * BLOCKS[0], rows[1], begin, ROWS, BLOCKS[i])
        tl.store(pointers, tile[i].to(rows[0].dtype.element_ty), mask=mask)


@triton.jit
def add_to_tile(rows, begin, limit, tile, OVERWRITE: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Adds a tile to rows [begin, begin + ROWS) of one head, or overwrites them. No other program writes them."""
    if not OVERWRITE:
        old = load_tile(rows, begin, limit, True, ROWS, D)
        tile = (old[0] + tile[0], old[1] + tile[1]) if len(tile) == 2 else (old[0] + tile[0],)
    store_tile(rows, begin, limit, tile, ROWS, D)


@triton.jit
def zero_tile(ROWS: tl.constexpr, D: tl.constexpr):
    """A float32 tile of zeros."""
    BLOCKS: tl.constexpr = _blocks_of(D)
    MAIN: tl.constexpr = BLOCKS[0]
    REST: tl.constexpr = BLOCKS[1]
    main = tl.zeros((ROWS, MAIN), tl.float32)
    return (main, tl.zeros((ROWS, REST), tl.float32)) if REST > 0 else (main,)


@triton.jit
def dot_rows(a, b):
    """The products of the rows of two tiles, a @ b^T."""
    result = tl.dot(a[0], tl.trans(b[0]), input_precision="ieee")
    if len(a) == 2:
        result = tl.dot(a[1], tl.trans(b[1]), result, input_precision="ieee")
    return result


@triton.jit
def add_product(acc, weights, tile):
    """acc + weights @ tile."""
    weights = weights.to(tile[0].dtype)
    main = tl.dot(weights, tile[0], acc[0], input_precision="ieee")
    return (main, tl.dot(weights, tile[1], acc[1], input_precision="ieee")) if len(tile) == 2 else (main,)


@triton.jit
def load_rows(rows, begin, limit, other, EDGE: tl.constexpr, ROWS: tl.constexpr):
    """One value per row of [begin, begin + ROWS). If EDGE, rows from `limit` on read as `other`."""
    near = tl.arange(0, ROWS)
    pointers = rows[0] + tl.cast(begin, tl.int64) * rows[1] + near * rows[1]
    return tl.load(pointers, mask=begin + near < limit, other=other) if EDGE else tl.load(pointers)


@triton.jit
def store_rows(rows, begin, limit, value, ROWS: tl.constexpr):
    """The inverse of `load_rows`."""
    near = tl.arange(0, ROWS)
    tl.store(rows[0] + tl.cast(begin, tl.int64) * rows[1] + near * rows[1], value, mask=begin + near < limit)


@triton.jit
def base2_scores(products, scale, softcap, slope, left_positions, right_positions, EXACT: tl.constexpr):
    """The scores of the products q.k in base 2, and tanh(scale * q.k / softcap), for the gradient.

    Positions belong to the two dimensions of the products, in float32. EXACT is for float32 inputs.
    """
    capped = products if softcap is None else tanh(products * (scale / softcap), EXACT)
    scores = capped * ((scale if softcap is None else softcap) * _LOG2_E)
    if slope is not None:
        scores -= (slope * _LOG2_E) * tl.abs(left_positions[:, None] - right_positions[None, :])
    return scores, capped


@triton.jit
def lowest_of(factor):
    """Less than any score: the `raw_max` of a row without a key. Its product with the factor is finite."""
    return 1.0 / tl.maximum(factor, 1.0) * _LOWEST


@triton.jit
def row_exponents(raw_max, new_raw_max, factor):
    """The factor and the shift of rows, and the exponents that rescale their sums: see `ops/gluon_exponents.py`."""
    power = tl.cast(tl.cast(factor, tl.int32, bitcast=True) & _EXPONENT_BITS, tl.float32, bitcast=True)
    factors = tl.where(tl.abs(new_raw_max) >= 1.0 / factor * _HUGE, power, factor)
    shift = new_raw_max * factors
    # Not the difference of equal products, which a multiply-add would not make 0.
    return factors, shift, tl.where(raw_max == new_raw_max, 0.0, raw_max * factors - shift)


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    """tanh, with an error of about 1e-7; relative to the result if EXACT, where a series serves small x."""
    result = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * _LOG2_E)))
    if EXACT:
        near = x * x
        series = x * (1.0 + near * (-1 / 3 + near * (2 / 15 + near * (-17 / 315 + near * (62 / 2835)))))
        result = tl.where(near < 0.1, series, result)
    return result


@triton.jit
def load_positions(positions, begin, limit, COUNT: tl.constexpr):
    """The positions of rows or keys [begin, begin + COUNT)."""
    near = begin + tl.arange(0, COUNT)
    return tl.load(positions + near, mask=near < limit, other=0)


@triton.jit
def distances(held, positions, begin, limit, COUNT: tl.constexpr):
    """Positions held and of a tile as float32 distances from the tile's first: exact even where a position is not."""
    origin = tl.load(positions + begin)
    return (held - origin).to(tl.float32), (load_positions(positions, begin, limit, COUNT) - origin).to(tl.float32)


@triton.jit
def at_part(bounds, strides, part, batch):
    """The bounds of one part of the mask of one sequence."""
    return bounds + tl.cast(part, tl.int64) * strides[0] + batch.to(tl.int64) * strides[1]


@triton.jit
def visible_keys(first, end, rows, row_count, key_count, CAUSAL: tl.constexpr):
    """The interval of keys visible to each of `rows`; empty for rows beyond the last."""
    real = rows < row_count
    if first is not None:
        row_first = tl.load(first + rows, mask=real, other=0)
        row_end = tl.load(end + rows, mask=real, other=0)
    else:
        row_first = tl.zeros_like(rows)
        row_end = tl.where(real, rows + 1 if CAUSAL else key_count, 0)
    return row_first, row_end


@triton.jit
def over_keys(
    STEP: tl.constexpr, carry, held, keys, terms, mask, rows, row_begin, q_len, head, batch, SHAPE: tl.constexpr
):
    """What STEP makes of `carry`, tile by tile of the keys that a tile of rows attends to.

    STEP gets what is `held`, the arguments of `score_keys`, and the first and the end of each row's keys, or None where
    all rows attend to all of the tile. `mask` has the bounds and their strides.
    """
    first, end, strides = mask
    kv_len = keys[2]
    scale, softcap, slopes, q_positions, k_positions = terms
    of_rows = (  # what `terms` are for this head and these rows
        scale, softcap, None if slopes is None else tl.load(slopes + head),
        None if slopes is None else load_positions(q_positions, row_begin, q_len, SHAPE.rows), k_positions,
    )  # fmt: skip
    for part in range(SHAPE.parts):
        part_first = None if first is None else at_part(first, strides, part, batch)
        part_end = None if first is None else at_part(end, strides, part, batch)
        row_stop = tl.minimum(row_begin + SHAPE.rows, q_len)
        begin, inner, edge, stop = key_phases(part_first, part_end, row_begin, row_stop, kv_len, SHAPE)
        if SHAPE.ordered:  # one loop, and the same code for every tile
            inner, edge = begin, begin
        else:
            for key_begin in range(inner, edge, SHAPE.keys):
                carry = STEP(carry, held, keys, of_rows, key_begin, None, None, SHAPE)
        row_first, row_end = visible_keys(part_first, part_end, rows, q_len, kv_len, SHAPE.causal)
        for index in range(edge_count(begin, inner, edge, stop, SHAPE.keys)):
            key_begin = edge_tile(index, begin, inner, edge, SHAPE.keys)
            carry = STEP(carry, held, keys, of_rows, key_begin, row_first, row_end, SHAPE)
    return carry


@triton.jit
def score_keys(q_tile, keys, terms, begin, EDGE: tl.constexpr, BASE2: tl.constexpr, SHAPE: tl.constexpr):
    """A tile of keys and of values, and `base2_scores` of the keys; if not BASE2, products to which nothing is added.

    `keys` are the keys and values of a head, and their number.
    """
    scale, softcap, slope, row_positions, k_positions = terms
    k, v, kv_len = keys
    k_tile = load_tile(k, begin, kv_len, EDGE, SHAPE.keys, SHAPE.d)
    v_tile = load_tile(v, begin, kv_len, EDGE, SHAPE.keys, SHAPE.dv)
    left, right = None, None
    if slope is not None:
        left, right = distances(row_positions, k_positions, begin, kv_len, SHAPE.keys)
    scores = dot_rows(q_tile, k_tile)
    capped = scores
    if BASE2 or (softcap is not None or slope is not None):
        scores, capped = base2_scores(scores, scale, softcap, slope, left, right, k_tile[0].dtype == tl.float32)
    return k_tile, v_tile, scores, capped


@triton.jit
def key_phases(first, end, row_begin, row_stop, key_count, SHAPE: tl.constexpr):
    """The (begin, inner, edge, stop) of the keys visible to the rows [row_begin, row_stop)."""
    if first is not None:
        begin, full_begin = tl.load(first + row_begin), tl.load(first + row_stop - 1)
        full_end, stop = tl.load(end + row_begin), tl.load(end + row_stop - 1)
        if (begin == full_end) | (full_begin == stop):
            # The first or the last row is empty. Its bounds may be far from the bounds of the other rows.
            rows = row_begin + tl.arange(0, SHAPE.rows)
            row_first, row_end = visible_keys(first, end, rows, row_stop, key_count, SHAPE.causal)
            some = row_first < row_end
            begin = tl.min(tl.where(some, row_first, key_count), 0)
            stop = tl.max(tl.where(some, row_end, 0), 0)
    else:
        begin, full_begin = 0, 0
        full_end, stop = (row_begin + 1, row_stop) if SHAPE.causal else (key_count, key_count)
    return split_phases(begin, full_begin, full_end, stop, SHAPE.keys)


@triton.jit
def split_phases(begin, full_begin, full_end, stop, BLOCK: tl.constexpr):
    """Splits [begin, stop), fully visible in [full_begin, full_end), at tile boundaries: (begin, inner, edge, stop)."""
    begin = begin // BLOCK * BLOCK
    inner = tl.maximum(tl.minimum(tl.cdiv(full_begin, BLOCK) * BLOCK, stop), begin)
    edge = tl.maximum(tl.minimum(full_end, stop) // BLOCK * BLOCK, inner)
    return begin, inner, edge, stop


@triton.jit
def edge_count(begin, inner, edge, stop, BLOCK: tl.constexpr):
    """The number of tiles that need a mask, in [begin, inner) and [edge, stop)."""
    return tl.cdiv(inner - begin, BLOCK) + tl.maximum(tl.cdiv(stop - edge, BLOCK), 0)


@triton.jit
def edge_tile(index, begin, inner, edge, BLOCK: tl.constexpr):
    """Where one of the tiles that need a mask begins."""
    left = tl.cdiv(inner - begin, BLOCK)
    return tl.where(index < left, begin + index * BLOCK, edge + (index - left) * BLOCK)
