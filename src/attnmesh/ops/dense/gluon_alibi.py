"""ALiBi in the dense forward in Gluon: slopes times the distances of keys from the first row of their work tile.

A key that is not after its row has the score `x + slope * distance`, with the distance from any one position, since
what all keys of a row have in common does not change its weights; lse takes it back. So distances are below 0 or small
where weights are not: no digits are lost. The slopes are divided by the factor that scores still lack. The products of
queries and keys begin from these terms instead of from 0, while others use the tensor cores.

General distances are a value per key, which the producer loads. Of even ones (`EvenPositions`) nothing is loaded: a
thread has keys `8 i + 2 lane + b` of a tile, of which `8 i + b` are constants in the machine code, so that a term is
one multiply-add.
"""

# mypy: disable-error-code="assignment"
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnmesh.ops.dense.triton_tiles import LOG2_E

ROWS = 64  # of a group of warps: the rows of one matrix instruction
_ROWS, _LOG2_E = gl.constexpr(ROWS), gl.constexpr(LOG2_E)


@triton.constexpr_function
def product_layout(columns):
    """The layout in which the four warps of a group have the products of 64 rows."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.jit
def row_terms(alibi, factor, head, within, tile_begin, rows, sizes, SHAPE: gl.constexpr, down: gl.constexpr):
    """The slopes of rows, divided by the factor, and their distances from the first row of the work tile."""
    slopes, q_positions, _, even = alibi
    if SHAPE.pack == 1:
        row_slopes = gl.zeros([_ROWS], gl.float32, down) + gl.load(slopes + head) * (_LOG2_E / factor)
    else:
        row_slopes = gl.load(slopes + (head + within // (_ROWS // SHAPE.pack))) * (_LOG2_E / factor)
    if SHAPE.even:
        row_distances = _row_position(even, rows) - _row_position(even, tile_begin)
    else:
        positions = gl.load(q_positions + rows, mask=rows < sizes.q_len, other=0)
        row_distances = positions - gl.load(q_positions + tile_begin)
    return row_slopes, row_distances.to(gl.float32)


@gluon.jit
def has_later_keys(alibi, tile_begin, edge, SHAPE: gl.constexpr):
    """Whether some key before `edge` comes after the first row of the work tile. Positions are ascending."""
    _, q_positions, k_positions, even = alibi
    last = gl.maximum(edge - 1, 0)
    if SHAPE.even:
        result = _key_position(even, last) > _row_position(even, tile_begin)
    else:
        result = gl.load(k_positions + last) > gl.load(q_positions + tile_begin)
    return result


@gluon.jit
def key_distances(memory, alibi, step, tile_begin, key_begin, SHAPE: gl.constexpr):
    """The distances of a tile of keys from the first row of the work tile, [1, keys]; None without slopes."""
    near = None
    if SHAPE.even:
        even = alibi[3]
        near = _even(_tile_distance(even, tile_begin, key_begin), 1.0 * even[0], SHAPE.keys)
    elif memory.distances is not None:
        of_tile = memory.distances.index(step % (SHAPE.stages + 1))
        near = of_tile.load(gl.SliceLayout(0, product_layout(SHAPE.keys)))[None, :]
    return near


@gluon.jit
def first_scores(alibi, slopes, near, tile_begin, key_begin, SHAPE: gl.constexpr):
    """What the products of a tile begin from: its terms."""
    if SHAPE.even:
        even = alibi[3]
        first = slopes * _tile_distance(even, tile_begin, key_begin)
        scores = _even(first[:, None], (slopes * even[0])[:, None], SHAPE.keys)
    else:
        scores = slopes[:, None] * near
    return scores


@gluon.jit
def _tile_distance(even, tile_begin, key_begin):
    """The distance of the first key of a tile from the first row of the work tile."""
    return (_key_position(even, key_begin) - _row_position(even, tile_begin)).to(gl.float32)


@gluon.jit
def _row_position(even, rows):
    step, first, split, jump, _, _ = even
    return first + step * rows + gl.where(rows >= split, jump, 0)


@gluon.jit
def _key_position(even, keys):
    step, _, _, _, split, jump = even
    return step * keys + gl.where(keys >= split, jump, 0)


@gluon.jit
def _even(first, step, KEYS: gl.constexpr):
    """`first + step * key` for the keys of a tile."""
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(0, product_layout(KEYS)))
    of_lane = first + step * (key & 6).to(gl.float32)[None, :]
    # `fma`, since the compiler would hold products of steps and constants in registers.
    return gl.fma(step, (key & (KEYS - 7)).to(gl.float32)[None, :], of_lane)
