"""The online softmax in Gluon: from a state to its carry, one tile of scores at a time, and back to a state.

A group of four warps has 64 rows: the rows of one head, or fewer rows of several heads one after another. Their carry
is `acc / total`, the output so far, and `peak + log2(total)`, its log-sum-exp in base 2. Tiles of values and of output
are tuples of one or two blocks of columns.
"""

# Kernels are written in Gluon's language, whose names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False, disable-error-code="assignment"
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from attnmesh.ops.dense.triton_tiles import LOG2_E

ROWS = 64  # of a group: the rows of one matrix instruction
_ROWS, _LOG2_E = gl.constexpr(ROWS), gl.constexpr(LOG2_E)


@gluon.jit
def softmax(
    scores, total, peak, key_begin, inner, edge, row_first, row_end, scale, softcap,
    SHAPE: gl.constexpr, grid: gl.constexpr,
):  # fmt: skip
    """One step of the online softmax: the weights of a tile, the decay of what was before, and the new carry."""
    if softcap is None:
        factor = scale * _LOG2_E
    else:
        scores = tanh(scores * (scale / softcap))
        factor = softcap * _LOG2_E
    if (key_begin < inner) | (key_begin >= edge):
        key = gl.arange(0, SHAPE.keys, layout=gl.SliceLayout(0, grid))[None, :]
        visible = key < (row_end - key_begin)[:, None]
        if SHAPE.parts > 0:
            visible &= key >= (row_first - key_begin)[:, None]
        scores = gl.where(visible, scores, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(scores, 1) * factor)
    # No key so far: subtract 0, since -inf - -inf would be NaN.
    shift = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    # The scale is part of the multiply-add in the exponent instead of a separate pass.
    weights = gl.exp2(scores * factor - shift[:, None])
    decay = gl.exp2(peak - shift)
    return weights, decay, total * decay + gl.sum(weights, 1), new_peak


@gluon.jit
def tanh(x):
    """tanh, with an error of about 1e-7."""
    return 1.0 - 2.0 / (1.0 + gl.exp2(x * (2.0 * _LOG2_E)))


@gluon.jit
def operand(weights, memory, wide: gl.constexpr):
    """The weights as the left operand of the products with values."""
    return gl.convert_layout(weights.to(memory.v[0].dtype), gl.DotOperandLayout(0, wide, 2))


@gluon.jit
def rescale(acc, factor, SELECT: gl.constexpr = False):
    """The rows of all blocks times a factor. If SELECT, a factor of 0 makes 0 of anything: an empty state holds NaN."""
    main = _times(acc[0], factor, SELECT)
    if len(acc) > 1:
        result = (main, _times(acc[1], factor, SELECT))
    else:
        result = (main,)
    return result


@gluon.jit
def _times(block, factor, SELECT: gl.constexpr):
    grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, block.shape[1], 16])
    column = gl.convert_layout(factor, gl.SliceLayout(1, grid))[:, None]
    product = block * column
    if SELECT:
        product = gl.where(column != 0.0, product, 0.0)
    return product


@gluon.jit
def initial(before, batch, head, row_begin, sizes, SHAPE: gl.constexpr, down: gl.constexpr):
    """The carry of the state before: (acc, total, peak). Where total is 0, acc may be anything."""
    state_out, out_strides, state_lse, lse_strides = before
    if state_out is None:
        total = gl.zeros([_ROWS], gl.float32, down)
        peak = gl.full([_ROWS], float("-inf"), gl.float32, down)
        main = _zeros(SHAPE.v_main)
        if SHAPE.v_rest > 0:
            acc = (main, _zeros(SHAPE.v_rest))
        else:
            acc = (main,)
    else:
        place, real = _places(lse_strides, batch, head, row_begin, sizes, SHAPE, down)
        peak = gl.load(state_lse + place, mask=real, other=float("-inf")) * _LOG2_E
        total = gl.where(peak == float("-inf"), 0.0, 1.0)
        # Not needed before the first softmax. To select the rows by `total` would be to wait for it here.
        main = _load_block(state_out, out_strides, batch, head, row_begin, sizes, SHAPE, 0, SHAPE.v_main)
        if SHAPE.v_rest > 0:
            acc = (main, _load_block(
                state_out, out_strides, batch, head, row_begin, sizes, SHAPE, SHAPE.v_main, SHAPE.v_rest
            ))  # fmt: skip
        else:
            acc = (main,)
    return acc, total, peak


@gluon.jit
def _zeros(WIDTH: gl.constexpr):
    return gl.zeros([_ROWS, WIDTH], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16]))


@gluon.jit
def _places(strides, batch, head, row_begin, sizes, SHAPE: gl.constexpr, down: gl.constexpr):
    """The offsets of this attender's rows in a tensor [B, H, S, ...], and which of them exist."""
    APART: gl.constexpr = _ROWS // SHAPE.pack  # rows of one head
    within = gl.arange(0, _ROWS, layout=down)
    row = row_begin + within % APART
    heads = head + within // APART
    return batch.to(gl.int64) * strides[0] + heads.to(gl.int64) * strides[1] + row.to(gl.int64) * strides[
        2
    ], row < sizes.q_len


@gluon.jit
def _load_block(
    state_out,
    strides,
    batch,
    head,
    row_begin,
    sizes,
    SHAPE: gl.constexpr,
    column_begin: gl.constexpr,
    WIDTH: gl.constexpr,
):
    """A block of the output so far."""
    grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    down: gl.constexpr = gl.SliceLayout(1, grid)
    place, real = _places(strides, batch, head, row_begin, sizes, SHAPE, down)
    column = column_begin + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, grid))
    mask = _inside(real, column, column_begin + WIDTH, SHAPE.v_dim)
    return gl.load(state_out + place[:, None] + column[None, :], mask=mask, other=0.0)


@gluon.jit
def _inside(real, column, END: gl.constexpr, WIDTH: gl.constexpr):
    """Which elements of a block that ends at column END exist: those of real rows, in the first WIDTH columns."""
    mask = real[:, None]
    if END > WIDTH:
        mask = mask & (column < WIDTH)[None, :]
    return mask


@gluon.jit
def store_state(after, acc, total, peak, batch, head, row_begin, sizes, SHAPE: gl.constexpr, down: gl.constexpr):
    """Writes the carry as a state, with the sinks."""
    out, out_strides, lse, lse_strides, sinks = after
    if sinks is not None:
        heads = head + gl.arange(0, _ROWS, layout=down) // (_ROWS // SHAPE.pack)
        total, peak, decay = _with_sink(total, peak, gl.load(sinks + heads).to(gl.float32) * _LOG2_E)
        acc = rescale(acc, decay, True)
    place, real = _places(lse_strides, batch, head, row_begin, sizes, SHAPE, down)
    # A row without keys has total 0 and peak -inf: out 0, lse -inf + -inf.
    gl.store(lse + place, (peak + gl.log2(total)) / _LOG2_E, mask=real)
    acc = rescale(acc, gl.where(total == 0.0, 0.0, 1.0 / total), True)
    _store_block(out, out_strides, acc[0], batch, head, row_begin, sizes, SHAPE, 0)
    if SHAPE.v_rest > 0:
        _store_block(out, out_strides, acc[1], batch, head, row_begin, sizes, SHAPE, SHAPE.v_main)


@gluon.jit
def _with_sink(total, peak, sink):
    """The carry with one more key, of score `sink` in base 2 and value 0, and the decay of what was before."""
    new_peak = gl.maximum(peak, sink)
    shift = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    # An infinite sink has all the weight: subtract nothing, since inf - inf would be NaN.
    weight = gl.exp2(gl.where(sink == float("inf"), 0.0, sink - shift))
    decay = gl.exp2(peak - shift)
    return total * decay + weight, new_peak, decay


@gluon.jit
def _store_block(out, strides, block, batch, head, row_begin, sizes, SHAPE: gl.constexpr, column_begin: gl.constexpr):
    WIDTH: gl.constexpr = block.shape[1]
    lines: gl.constexpr = _lines(WIDTH, out.dtype.element_ty == gl.float32)
    block = gl.convert_layout(block.to(out.dtype.element_ty), lines)
    place, real = _places(strides, batch, head, row_begin, sizes, SHAPE, gl.SliceLayout(1, lines))
    column = column_begin + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, lines))
    mask = _inside(real, column, column_begin + WIDTH, SHAPE.v_dim)
    gl.store(out + place[:, None] + column[None, :], block, mask=mask)


@triton.constexpr_function
def _lines(width, wide):
    """The layout in which results are stored: that of the products if wide, else 16 bytes per lane."""
    if wide:
        return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, width, 16])
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]] + [[0, n] for n in (32, 64, 128) if n < width]
    lanes, warps = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [ROWS, width])
