"""The parts of a step of the backward in Gluon: start and finish products, compute weights, and store sums."""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 - Gluon has no starred elements
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnmesh.ops.dense.gluon_alibi import product_layout
from attnmesh.ops.dense.gluon_backward_memory import TILE
from attnmesh.ops.dense.gluon_online_softmax import factor_of, tanh

_TILE = gl.constexpr(TILE)


@gluon.jit
def weights_of(
    products, row_lse, row, stage, key_begin, memory, work, SHAPE: gl.constexpr, FIRST: gl.constexpr = 0,
    ROWS: gl.constexpr = TILE,
):  # fmt: skip
    """The weights of 64 keys for (some of) the rows of a stage, and the tanh of the scores if they are capped."""
    grid: gl.constexpr = product_layout(ROWS)
    across: gl.constexpr = gl.SliceLayout(0, grid)
    capped = products
    if work.softcap is not None:
        capped = tanh(products * (work.scale / work.softcap))
    exponents = capped * factor_of(work.scale, work.softcap) - row_lse[None, :]
    if memory.slopes is not None:
        # With the slope times the distance of the row, which is part of `row_lse`: see `gluon_online_softmax.softmax`.
        q_positions, origin, later_keys = work.alibi
        near = memory.distances.index((key_begin - work.key_begin) // _TILE).load(gl.SliceLayout(1, grid))
        slopes = memory.slopes.index(stage).load(gl.SliceLayout(1, grid))
        exponents += (slopes * near)[:, None]
        if (row < work.inner) | (row >= work.edge) | (later_keys != 0):
            rows = row + FIRST + gl.arange(0, ROWS, layout=across)
            positions = gl.load(q_positions + rows, mask=rows < work.q_len, other=0)
            later = gl.minimum((positions - origin).to(gl.float32)[None, :] - near[:, None], 0.0)
            exponents += slopes[:, None] * (2.0 * later)
    weights = gl.exp2(exponents)
    if (row < work.inner) | (row >= work.edge):
        key = key_begin + gl.arange(0, _TILE, layout=gl.SliceLayout(1, grid))[:, None]
        if SHAPE.bounded:
            row_first = memory.bounds.index(2 * stage).slice(FIRST, ROWS).load(across)[None, :]
            row_end = memory.bounds.index(2 * stage + 1).slice(FIRST, ROWS).load(across)[None, :]
            weights = gl.where((key >= row_first) & (key < row_end), weights, 0.0)
        elif SHAPE.causal:
            last = gl.minimum(row + FIRST + gl.arange(0, ROWS, layout=across), work.kv_len - 1)[None, :]
            weights = gl.where(key <= last, weights, 0.0)
        else:
            weights = gl.where(key < work.kv_len, weights, 0.0)
    return weights, capped


@gluon.jit
def grad_scores_of(weights, grad_weights, row_delta, capped, work):
    """The gradients of scores, from the weights and their gradients."""
    grad_scores = weights * (grad_weights - row_delta[None, :])
    if work.softcap is not None:
        grad_scores = grad_scores * (1.0 - capped * capped)
    return grad_scores


@gluon.jit
def zero_blocks(WIDTH: gl.constexpr, BLOCKS: gl.constexpr, layout: gl.constexpr = None):
    """Sums of no rows, for each block of columns; in the layout of products, if there is no other."""
    result = ()
    for _ in gl.static_range(BLOCKS):
        result = result + (gl.zeros([_TILE, WIDTH], gl.float32, layout or product_layout(WIDTH)),)
    return result


@gluon.jit
def score(
    left, tile, right, stage, BLOCKS: gl.constexpr, HELD: gl.constexpr, FIRST: gl.constexpr = 0,
    ROWS: gl.constexpr = TILE,
):  # fmt: skip
    """Starts the products of 64 keys, or values, with (some of) the rows of a stage, over all blocks of columns.

    If HELD, `left` is in registers.
    """
    result = gl.zeros([_TILE, ROWS], gl.float32, product_layout(ROWS))
    for i in gl.static_range(BLOCKS):
        rows = right.index(stage * BLOCKS + i).slice(FIRST, ROWS).permute([1, 0])
        if HELD:
            result = warpgroup_mma(left, rows, result, use_acc=False, is_async=True)
        else:
            result = warpgroup_mma(left.index(tile * BLOCKS + i), rows, result, use_acc=i > 0, is_async=True)
    return result


@gluon.jit
def add_products(acc, left, right, stage, BLOCKS: gl.constexpr, FIRST: gl.constexpr = 0, ROWS: gl.constexpr = TILE):
    """Starts acc + left @ right, for each block of columns, with `left` in registers."""
    left = gl.convert_layout(left.to(right.dtype), gl.DotOperandLayout(0, product_layout(right.shape[2]), 2))
    result = ()
    for i in gl.static_range(BLOCKS):
        rows = right.index(stage * BLOCKS + i).slice(FIRST, ROWS)
        result = result + (warpgroup_mma(left, rows, acc[i], is_async=True),)
    return result


@gluon.jit
def exchanged(memory, drift, which, BLOCK: gl.constexpr, HALF: gl.constexpr, SHAPE: gl.constexpr):
    """Starts a block of columns of grad_q, or half of it, for the rows of a step: ds of both consumers, times k."""
    WIDTH: gl.constexpr = SHAPE.q_block
    part = gl.zeros([_TILE, WIDTH], gl.float32, product_layout(WIDTH))
    for half in gl.static_range(2):
        left = memory.ds.index(2 * which + half).permute([1, 0])
        right = memory.k.index((drift + half) * SHAPE.k_blocks + BLOCK)
        if SHAPE.k_block > WIDTH:
            right = right.slice(HALF * WIDTH, WIDTH, dim=1)
        part = warpgroup_mma(left, right, part, use_acc=half > 0, is_async=True)
    return part


@gluon.jit
def finish(UNDER_WAY: gl.constexpr, sums):
    """Waits until at most UNDER_WAY products run, none of them the products of the sums."""
    finished = warpgroup_mma_wait(UNDER_WAY, sums)
    return (finished,) if len(sums) == 1 else finished


@gluon.jit
def leave(part, scale, HALF: gl.constexpr, uses, memory, barriers):
    """Leaves a block of grad_q, times a scale unless that is None, for the copy engine."""
    mbarrier.wait(barriers.grad_q_free.index(HALF), (uses & 1) ^ 1)
    if scale is not None:
        part = part * scale
    memory.grad_q.index(HALF).store(part)
    fence_async_shared()
    mbarrier.arrive(barriers.grad_q_ready.index(HALF), count=1)


@gluon.jit
def add_sums(acc_k, acc_v, scale, work, key_begin, SHAPE: gl.constexpr, layout: gl.constexpr = None):
    """Adds the sums, block by block of columns, to the gradients of 64 keys and values, or overwrites them."""
    grad_k, grad_k_strides, grad_v, grad_v_strides = work.grads
    _add_blocks(grad_k, grad_k_strides, acc_k, scale, work, key_begin, SHAPE.k_block, SHAPE.d, SHAPE, layout)
    _add_blocks(grad_v, grad_v_strides, acc_v, None, work, key_begin, SHAPE.v_block, SHAPE.dv, SHAPE, layout)


@gluon.jit
def _add_blocks(
    grad, strides, sums, scale, work, key_begin, WIDTH: gl.constexpr, D: gl.constexpr, SHAPE: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    grid: gl.constexpr = layout or product_layout(WIDTH)
    if grad is not None:
        for i in gl.static_range(len(sums)):
            block = sums[i]
            if scale is not None:
                block = block * scale
            key = key_begin + gl.arange(0, _TILE, layout=gl.SliceLayout(1, grid))
            column = i * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, grid))[None, :]
            of_head = grad + work.batch.to(gl.int64) * strides[0] + work.kv_head.to(gl.int64) * strides[1]
            pointers = (of_head + key.to(gl.int64) * strides[2])[:, None] + column
            real = (key < work.kv_len)[:, None] & (column < D)
            if SHAPE.atomic:
                gl.atomic_add(pointers, block, mask=real, sem="relaxed")
            elif SHAPE.overwrite:
                gl.store(pointers, block.to(grad.dtype.element_ty), mask=real)
            else:
                gl.store(pointers, gl.load(pointers, mask=real, other=0.0) + block, mask=real)
