"""The epilogue of a work tile in Gluon: it merges an earlier state into the carry and stores the new state.

A state is `out` and `lse`; `gluon_online_softmax` describes the carry. The earlier state is of other keys and the same
rows. Float32 tiles pass through shared memory if they are staged: the copy engine fetches the earlier state and stores
the new state. Else threads load and store their own elements.
"""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 - Gluon has no starred elements
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from attnmesh.ops.dense.gluon_alibi import ROWS, product_layout
from attnmesh.ops.dense.gluon_online_softmax import rescale
from attnmesh.ops.dense.gluon_tile_scheduler import as_matrix
from attnmesh.ops.dense.triton_tiles import LOG2_E

NEW, IN_PLACE, OTHER = 0, 1, 2  # no earlier state, one that the result replaces, or one in other memory
_NEW = gl.constexpr(NEW)
_ROWS, _LOG2_E = gl.constexpr(ROWS), gl.constexpr(LOG2_E)


@gluon.jit
def load_lse(before, place, SHAPE: gl.constexpr, down: gl.constexpr):
    """The lse of the earlier state, in base 2; -inf for rows beyond the last."""
    offset, real = _row_offsets(before[3], place, SHAPE, down)
    return gl.load(before[2] + offset, mask=real, other=float("-inf")) * _LOG2_E


@gluon.jit
def release(barriers, INDEX: gl.constexpr, SHAPE: gl.constexpr):
    """Releases the state tile in shared memory to the producer, as soon as the copy engine has stored its state."""
    if SHAPE.staged and SHAPE.state != _NEW:
        tma.store_wait(0)
        mbarrier.arrive(barriers.state_free.index(INDEX), count=1)


@gluon.jit
def load_state(before, place, SHAPE: gl.constexpr, down: gl.constexpr):
    """The carry of the earlier state: (acc, total, row_max). Where total is 0, acc may be anything."""
    row_max = load_lse(before, place, SHAPE, down)
    total = gl.where(row_max == float("-inf"), 0.0, 1.0)
    return _load_blocks(before, place, SHAPE), total, row_max


@gluon.jit
def join_state(before, memory, state_lse, acc, total, row_max, place, INDEX: gl.constexpr, SHAPE: gl.constexpr):
    """The carry (acc, total, row_max), merged with the earlier state."""
    new_row_max = gl.maximum(row_max, state_lse)
    # No key at all: subtract 0, since -inf - -inf would be NaN.
    shift = gl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    acc_scale, weight = gl.exp2(row_max - shift), gl.exp2(state_lse - shift)
    acc = rescale(acc, acc_scale, True)
    if SHAPE.staged:
        earlier = [as_matrix(tiles, INDEX).load(product_layout(tiles.shape[4])) for tiles in memory]
    else:
        earlier = _load_blocks(before, place, SHAPE)
    earlier = rescale(earlier, weight, True)  # an empty state may hold NaN
    joined = ()
    for i in gl.static_range(len(acc)):
        joined = joined + (acc[i] + earlier[i],)
    return joined, total * acc_scale + weight, new_row_max


@gluon.jit
def store_state(
    after, blocks, memory, acc, total, row_max, place, INDEX: gl.constexpr, SHAPE: gl.constexpr, down: gl.constexpr
):
    """Writes the carry as a state, with the sinks."""
    out, out_strides, lse, lse_strides, sinks = after
    batch, head, row_begin, _ = place
    if sinks is not None:
        heads = head + gl.arange(0, _ROWS, layout=down) // (_ROWS // SHAPE.pack)
        total, row_max, acc_scale = _with_sink(total, row_max, gl.load(sinks + heads).to(gl.float32) * _LOG2_E)
        acc = rescale(acc, acc_scale, True)
    offset, real = _row_offsets(lse_strides, place, SHAPE, down)
    # A row without keys has total 0 and row_max -inf: out 0, lse -inf + -inf.
    gl.store(lse + offset, (row_max + gl.log2(total)) / _LOG2_E, mask=real)
    acc = rescale(acc, gl.where(total == 0.0, 0.0, 1.0 / total), True)
    if SHAPE.staged and out.dtype.element_ty == gl.float32:
        if SHAPE.state == _NEW:
            tma.store_wait(0)
        for i in gl.static_range(len(acc)):
            as_matrix(memory[i], INDEX).store(acc[i])
        fence_async_shared()
        for i in gl.static_range(len(acc)):
            tma.async_copy_shared_to_global(blocks[i], [batch, head, row_begin, 0], memory[i].index(INDEX))
    else:
        for i in gl.static_range(len(acc)):
            _store_block(out, out_strides, memory, acc, place, INDEX, i, SHAPE)


@gluon.jit
def _row_offsets(strides, place, SHAPE: gl.constexpr, down: gl.constexpr):
    """The offsets of this consumer's rows in a tensor [B, H, S, ...], and which of them exist."""
    batch, head, row_begin, sizes = place
    APART: gl.constexpr = _ROWS // SHAPE.pack  # rows of one head
    within = gl.arange(0, _ROWS, layout=down)
    row = row_begin + within % APART
    heads = head + within // APART
    of_head = batch.to(gl.int64) * strides[0] + heads.to(gl.int64) * strides[1]
    return of_head + row.to(gl.int64) * strides[2], row < sizes.q_len


@gluon.jit
def _load_blocks(before, place, SHAPE: gl.constexpr):
    """The output of the earlier state."""
    blocks = (_load_block(before, place, SHAPE, 0, SHAPE.v_main),)
    if SHAPE.v_rest > 0:
        blocks = blocks + (_load_block(before, place, SHAPE, SHAPE.v_main, SHAPE.v_rest),)
    return blocks


@gluon.jit
def _load_block(before, place, SHAPE: gl.constexpr, column_begin: gl.constexpr, WIDTH: gl.constexpr):
    """A block of the output so far."""
    pointers, mask = _block_pointers(before[0], before[1], place, column_begin, WIDTH, product_layout(WIDTH), SHAPE)
    return gl.load(pointers, mask=mask, other=0.0)


@gluon.jit
def _block_pointers(
    base, strides, place, column_begin: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr, SHAPE: gl.constexpr
):
    """Pointers to a block of columns of this consumer's rows, and which elements exist."""
    offset, real = _row_offsets(strides, place, SHAPE, gl.SliceLayout(1, layout))
    column = column_begin + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    mask = real[:, None]
    if column_begin + WIDTH > SHAPE.v_dim:
        mask = mask & (column < SHAPE.v_dim)[None, :]
    return base + offset[:, None] + column[None, :], mask


@gluon.jit
def _with_sink(total, row_max, sink):
    """Total and row_max with one more key, of score `sink` in base 2 and value 0, and the factor `acc_scale` of acc."""
    new_row_max = gl.maximum(row_max, sink)
    shift = gl.where(new_row_max == float("-inf"), 0.0, new_row_max)
    # An infinite sink has all the weight: subtract nothing, since inf - inf would be NaN.
    weight = gl.exp2(gl.where(sink == float("inf"), 0.0, sink - shift))
    acc_scale = gl.exp2(row_max - shift)
    return total * acc_scale + weight, new_row_max, acc_scale


@gluon.jit
def _store_block(out, strides, memory, acc, place, INDEX: gl.constexpr, BLOCK: gl.constexpr, SHAPE: gl.constexpr):
    WIDTH: gl.constexpr = acc[BLOCK].shape[1]
    lines: gl.constexpr = _lines(WIDTH, out.dtype.element_ty == gl.float32)
    if SHAPE.staged:  # no shared memory is left for a change of layout but this
        as_matrix(memory[BLOCK], INDEX).store(acc[BLOCK])
        block = as_matrix(memory[BLOCK], INDEX).load(lines).to(out.dtype.element_ty)
    else:
        block = gl.convert_layout(acc[BLOCK].to(out.dtype.element_ty), lines)
    pointers, mask = _block_pointers(out, strides, place, BLOCK * SHAPE.v_main, WIDTH, lines, SHAPE)
    gl.store(pointers, block, mask=mask)


@triton.constexpr_function
def _lines(width, wide):
    """The layout in which results are stored: the layout of the products if wide, else 16 bytes per lane."""
    if wide:
        return product_layout(width)
    registers = [[0, 1], [0, 2], [0, 4], [8, 0]] + [[0, n] for n in (32, 64, 128) if n < width]
    lanes, warps = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [ROWS, width])
