"""What the Gluon kernels of sparse attention and sparse decode share: sizes, sinks, copies and the writing of results.

An item is 64 heads of a row of queries and its slots, 64 keys at a time. The columns of keys that are values, 512, are
two halves in `gluon_forward` and four quarters in `gluon_decode`; see there for the groups of warps.
"""

from collections import namedtuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from attnmesh.ops.launch import multiprocessors

LOG2_E = 1.4426950408889634
HEADS = 64  # per item: the rows of one matrix instruction
KEYS = 64  # per tile
D_V, D_TAIL = 512, 64
_LOG2_E = gl.constexpr(LOG2_E)
_HEADS, _QUARTER = gl.constexpr(HEADS), gl.constexpr(D_V // 4)
RESCALE_THRESHOLD = 8.0  # weights may grow to 2**RESCALE_THRESHOLD before sums are rescaled

# Of rows that are copied, and of their columns: eight lanes copy 128 bytes of a row, a whole cache line.
COPIED = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
COPIED_ROWS = gl.constexpr(gl.SliceLayout(1, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])))
# Of a quarter or half of the columns: a lane has eight in a row.
_LINES = (
    [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
    [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
    [[16, 0], [32, 0]],
)
_QUARTER_LINES = gl.constexpr(gl.DistributedLinearLayout(*_LINES, [], [HEADS, D_V // 4]))
_HALF_LINES = gl.constexpr(gl.DistributedLinearLayout([*_LINES[0], [0, 128]], *_LINES[1:], [], [HEADS, D_V // 2]))


def processors(q: Tensor) -> int:
    """The multiprocessors of q's GPU, each of which runs one program."""
    return multiprocessors(q.device, 3)  # in the emulation, so that a program has several items


# Where results are written, of rows or of splits of their slots; and the sinks, which are part of them.
Results = namedtuple("Results", "out lse top sinks")


@gluon.jit
def add_sinks(sinks, head, is_head, row_max, total):
    """The maximum and sum with the sink of each head, and the factor of what was summed before."""
    sink = gl.load(sinks + head, mask=is_head, other=0.0).to(gl.float32) * _LOG2_E
    highest = gl.maximum(row_max, sink)
    shift = gl.where(highest == float("-inf"), 0.0, highest)
    kept = gl.exp2(row_max - shift)
    total = total * kept + gl.where(sink == shift, 1.0, gl.exp2(sink - shift))  # also if both are +inf
    return highest, total, kept


@gluon.jit
def copy_columns(target, rows, there, column, COUNT: gl.constexpr):
    """Starts copying COUNT columns of some rows, from `column`; 0 for rows that are not there."""
    columns = column + gl.arange(0, COUNT, layout=gl.SliceLayout(0, COPIED))
    async_copy.async_copy_global_to_shared(target, rows[:, None] + columns[None, :], mask=there[:, None])


@gluon.jit
def write_columns(out, result, column_begin, head_begin, heads, NARROW: gl.constexpr, grid: gl.constexpr):
    """Writes a quarter or half of the output columns of some heads of a row."""
    COLUMNS: gl.constexpr = result.shape[1]
    # Four lanes exchange pairs of columns until each has eight in a row: 16-byte stores, without shared memory, where
    # the queries of the next item already arrive.
    narrow: gl.constexpr = _HALF_LINES if COLUMNS == 2 * _QUARTER else _QUARTER_LINES
    lines: gl.constexpr = narrow if NARROW else grid
    result = gl.convert_layout(result.to(out.dtype.element_ty), lines)
    head = head_begin + gl.arange(0, _HEADS, layout=gl.SliceLayout(1, lines))[:, None]
    column = column_begin + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, lines))[None, :]
    gl.store(out + head.to(gl.int64) * (4 * _QUARTER) + column, result, mask=head < heads)
