"""The consumers of the backward in Gluon for wide heads, whose sums leave less room in registers."""

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

from attnmesh.ops.dense import gluon_backward_steps as steps
from attnmesh.ops.dense.gluon_alibi import product_layout
from attnmesh.ops.dense.gluon_backward_memory import TILE, next_row

_TILE = gl.constexpr(TILE)


@gluon.jit
def differentiate_by_half(HALF: gl.constexpr, memory, barriers, work, SHAPE: gl.constexpr):
    """The gradients of 64 keys, with the scores of 32 rows at a time, and some columns of grad_q.

    grad_q is of the previous step, whose ds is ready. A consumer multiplies one or two of its three blocks of columns,
    each before it adds to the sums: a block leaves registers while these products run.
    """
    K_BLOCKS: gl.constexpr = SHAPE.k_blocks
    V_BLOCKS: gl.constexpr = SHAPE.v_blocks
    FIRST: gl.constexpr = HALF * (K_BLOCKS // 2)  # of the blocks of grad_q, two of them the second consumer's
    ROUNDS: gl.constexpr = 1 + HALF if SHAPE.needs_q else 0
    ROWS: gl.constexpr = _TILE // 2
    across: gl.constexpr = gl.SliceLayout(0, product_layout(ROWS))

    my_keys = work.key_begin + HALF * _TILE
    acc_k = steps.zero_blocks(SHAPE.k_block, K_BLOCKS)
    acc_v = steps.zero_blocks(SHAPE.v_block, V_BLOCKS)
    row = work.begin
    # 0, but the compiler does not know: it would keep the addresses of every stage in registers.
    origin = gl.minimum(work.q_len, 0)
    drift = origin
    mbarrier.wait(barriers.k_ready.index(0), 0)
    mbarrier.wait(barriers.v_ready.index(0), 0)
    for turn in range(work.steps):
        step = origin + turn
        stage = step % SHAPE.stages
        mbarrier.wait(barriers.q_ready.index(stage), step // SHAPE.stages & 1)
        products = steps.score(memory.k, drift + HALF, memory.q, stage, K_BLOCKS, False, 0, ROWS)
        mbarrier.wait(barriers.grad_out_ready.index(stage), step // SHAPE.stages & 1)
        grad_weights = steps.score(memory.v, drift + HALF, memory.grad_out, stage, V_BLOCKS, False, 0, ROWS)
        for half in gl.static_range(2):
            row_lse = memory.lse.index(stage).slice(half * ROWS, ROWS).load(across)
            if half == 0:
                products = warpgroup_mma_wait(V_BLOCKS, [products])
            else:
                # And what the first rows added to the sums.
                finished = warpgroup_mma_wait(V_BLOCKS, (products,) + acc_k + acc_v)
                products = finished[0]
                acc_k = finished[1 : 1 + K_BLOCKS]
                acc_v = finished[1 + K_BLOCKS :]
            weights, capped = steps.weights_of(
                products, row_lse, row, stage, my_keys, memory, work, SHAPE, half * ROWS, ROWS
            )  # fmt: skip
            row_delta = memory.delta.index(stage).slice(half * ROWS, ROWS).load(across)
            grad_weights = warpgroup_mma_wait(0, [grad_weights])
            ds = steps.grad_scores_of(weights, grad_weights, row_delta, capped, work).to(memory.k.dtype)
            if SHAPE.needs_q:
                if half == 0:
                    # The ds of the last step is ready, and both have multiplied the one before, which this overwrites.
                    # In the first step nothing is: what is multiplied then is added to rows that do not exist.
                    mbarrier.wait(barriers.ds_ready.index(0), step & 1 ^ 1)
                memory.ds.index(2 * (step % 2) + HALF).slice(half * ROWS, ROWS, dim=1).store(ds)
            if half < ROUNDS:
                part = steps.exchanged(memory, drift, (step + 1) % 2, FIRST + half, HALF, SHAPE)
            # grad_v not before ds: there are no registers for the weights in both precisions.
            acc_v = steps.add_products(acc_v, weights, memory.grad_out, stage, V_BLOCKS, half * ROWS, ROWS)
            acc_k = steps.add_products(acc_k, ds, memory.q, stage, K_BLOCKS, half * ROWS, ROWS)
            if half < ROUNDS:
                part = warpgroup_mma_wait(K_BLOCKS + V_BLOCKS, [part])
            if SHAPE.needs_q and half == 1:
                fence_async_shared()
                mbarrier.arrive(barriers.ds_ready.index(0), count=1)
            if half < ROUNDS:
                steps.leave(part * work.scale, None, HALF, step * ROUNDS + half, memory, barriers)
            drift = drift * 2
            if half == 0:
                products = steps.score(memory.k, drift + HALF, memory.q, stage, K_BLOCKS, False, ROWS, ROWS)
                grad_weights = steps.score(memory.v, drift + HALF, memory.grad_out, stage, V_BLOCKS, False, ROWS, ROWS)
        # The compiler would serialize products that are under way from one turn to the next.
        finished = warpgroup_mma_wait(0, acc_k + acc_v)
        acc_k = finished[:K_BLOCKS]
        acc_v = finished[K_BLOCKS:]
        mbarrier.arrive(barriers.q_free.index(stage), count=1)
        row = next_row(row, work)
    if SHAPE.needs_q:
        mbarrier.wait(barriers.ds_ready.index(0), work.steps & 1 ^ 1)
        for i in gl.static_range(ROUNDS):
            part = steps.exchanged(memory, drift, (work.steps + 1) % 2, FIRST + i, HALF, SHAPE)
            part = warpgroup_mma_wait(0, [part])
            steps.leave(part * work.scale, None, HALF, work.steps * ROUNDS + i, memory, barriers)
    steps.add_sums(acc_k, acc_v, work.scale, work, my_keys, SHAPE)


@gluon.jit
def differentiate_values(HALF: gl.constexpr, memory, barriers, work, SHAPE: gl.constexpr):
    """The weights of 64 keys, which the other consumer gets, their grad_v, and some columns of grad_q.

    grad_q is of the previous step: its ds is ready while the weights are computed.
    """
    V_BLOCKS: gl.constexpr = SHAPE.v_blocks
    ROUNDS: gl.constexpr = SHAPE.k_blocks // 2 if SHAPE.needs_q else 0
    across: gl.constexpr = gl.SliceLayout(0, product_layout(_TILE))

    acc_v = steps.zero_blocks(SHAPE.v_block, V_BLOCKS if SHAPE.values else 0)
    row = work.begin
    # 0, but the compiler does not know: it would keep the addresses of every stage in registers.
    origin = gl.minimum(work.q_len, 0)
    drift = origin
    mbarrier.wait(barriers.k_ready.index(0), 0)
    for turn in range(work.steps):
        step = origin + turn
        stage = step % SHAPE.stages
        mbarrier.wait(barriers.q_ready.index(stage), step // SHAPE.stages & 1)
        products = steps.score(memory.k, drift, memory.q, stage, SHAPE.k_blocks, False)
        row_lse = memory.lse.index(stage).load(across)
        parts = ()
        if ROUNDS > 0:
            mbarrier.wait(barriers.ds_ready.index(0), step & 1)
            parts = _start_grad_q(memory, drift, 0, 1, SHAPE)
        products = warpgroup_mma_wait(1 if ROUNDS > 0 else 0, [products])
        weights, capped = steps.weights_of(products, row_lse, row, stage, work.key_begin, memory, work, SHAPE)
        mbarrier.arrive(barriers.q_free.index(stage), count=1)
        # Weights are stored and loaded by threads, never by the matrix units or the copy engine: no fence is needed.
        # Stores come before loads: `arrive` is a barrier of this group's warps and then an arrival (release) of one
        # thread, and every thread of the other group waits for it (acquire). Loads come before the next stores: ds is
        # computed from what was loaded, and the other group arrives at `ds_ready` behind a barrier of its warps; every
        # thread here has waited for that. The phase of `step` is the phase of the previous step's ds, since the first
        # is completed without one. Without grad_q the same holds of `weights_free`. (compute-sanitizer's racecheck
        # reports a hazard here. We think that it follows the one thread that arrives, not the threads that a barrier
        # joined with it.)
        if ROUNDS == 0:
            mbarrier.wait(barriers.weights_free.index(0), (step & 1) ^ 1)
        memory.weights.index(0).store(weights if work.softcap is None else weights * (1.0 - capped * capped))
        mbarrier.arrive(barriers.weights_ready.index(0), count=1)
        if ROUNDS > 1:
            parts = parts + _start_grad_q(memory, drift, 1, ROUNDS - 1, SHAPE)
        if SHAPE.values:
            at = step % SHAPE.grad_out_stages
            mbarrier.wait(barriers.grad_out_ready.index(at), step // SHAPE.grad_out_stages & 1)
            acc_v = steps.add_products(acc_v, weights, memory.grad_out, at, V_BLOCKS)
        if ROUNDS > 0:
            _finish_grad_q(parts, HALF, ROUNDS, V_BLOCKS if SHAPE.values else 0, step, memory, barriers, work)
        if SHAPE.values:
            acc_v = steps.finish(0, acc_v)
            mbarrier.arrive(barriers.grad_out_free.index(at), count=1)
        row = next_row(row, work)
        drift = drift * 2
    if ROUNDS > 0:
        mbarrier.wait(barriers.ds_ready.index(0), work.steps & 1)
        parts = _start_grad_q(memory, drift, 0, ROUNDS, SHAPE)
        _finish_grad_q(parts, HALF, ROUNDS, 0, work.steps, memory, barriers, work)
    steps.add_sums((), acc_v, None, work, work.key_begin, SHAPE)


@gluon.jit
def differentiate_keys(HALF: gl.constexpr, memory, barriers, work, SHAPE: gl.constexpr):
    """The ds of 64 keys, which the other consumer gets, their grad_k, and the other columns of grad_q."""
    K_BLOCKS: gl.constexpr = SHAPE.k_blocks
    FIRST: gl.constexpr = K_BLOCKS // 2 if SHAPE.needs_q else 0
    ROUNDS: gl.constexpr = K_BLOCKS - FIRST
    score_grid: gl.constexpr = product_layout(_TILE)
    across: gl.constexpr = gl.SliceLayout(0, score_grid)

    acc_k = steps.zero_blocks(SHAPE.k_block, K_BLOCKS)
    origin = gl.minimum(work.q_len, 0)
    drift = origin
    if FIRST > 0:
        # The other multiplies the ds of the step before: of none, in the first.
        memory.ds.index(0).store(gl.zeros([_TILE, _TILE], memory.k.dtype, score_grid))
        fence_async_shared()
        mbarrier.arrive(barriers.ds_ready.index(0), count=1)
    mbarrier.wait(barriers.v_ready.index(0), 0)
    mbarrier.wait(barriers.k_ready.index(0), 0)
    for turn in range(work.steps):
        step = origin + turn
        stage = step % SHAPE.stages
        at = step % SHAPE.grad_out_stages
        mbarrier.wait(barriers.grad_out_ready.index(at), step // SHAPE.grad_out_stages & 1)
        grad_weights = steps.score(memory.v, drift, memory.grad_out, at, SHAPE.v_blocks, False)
        row_delta = memory.delta.index(at).load(across)
        grad_weights = warpgroup_mma_wait(0, [grad_weights])
        mbarrier.arrive(barriers.grad_out_free.index(at), count=1)
        mbarrier.wait(barriers.weights_ready.index(0), step & 1)
        weights = memory.weights.index(0).load(score_grid)
        if FIRST == 0:
            mbarrier.arrive(barriers.weights_free.index(0), count=1)
        ds = (weights * (grad_weights - row_delta[None, :])).to(memory.k.dtype)
        parts = ()
        if SHAPE.needs_q:
            if FIRST > 0:
                mbarrier.wait(barriers.ds_free.index(0), step & 1)
            memory.ds.index(0).store(ds)
            fence_async_shared()
            mbarrier.arrive(barriers.ds_ready.index(0), count=1)
            parts = _start_grad_q(memory, drift, FIRST, ROUNDS, SHAPE)
        mbarrier.wait(barriers.q_ready.index(stage), step // SHAPE.stages & 1)
        acc_k = steps.add_products(acc_k, ds, memory.q, stage, K_BLOCKS)
        if SHAPE.needs_q:
            _finish_grad_q(parts, HALF, ROUNDS, K_BLOCKS, step, memory, barriers, work)
        acc_k = steps.finish(0, acc_k)
        mbarrier.arrive(barriers.q_free.index(stage), count=1)
        drift = drift * 2
    steps.add_sums(acc_k, (), work.scale, work, work.key_begin, SHAPE)


@gluon.jit
def _start_grad_q(memory, drift, FIRST: gl.constexpr, ROUNDS: gl.constexpr, SHAPE: gl.constexpr):
    """Starts ds @ k for some blocks of columns."""
    K_BLOCK: gl.constexpr = SHAPE.k_block
    nothing = gl.zeros([_TILE, K_BLOCK], gl.float32, product_layout(K_BLOCK))
    parts = ()
    for i in gl.static_range(ROUNDS):
        left, right = memory.ds.index(drift).permute([1, 0]), memory.k.index(drift + FIRST + i)
        parts = parts + (warpgroup_mma(left, right, nothing, use_acc=False, is_async=True),)
    return parts


@gluon.jit
def _finish_grad_q(parts, HALF: gl.constexpr, ROUNDS: gl.constexpr, BEHIND: gl.constexpr, uses, memory, barriers, work):
    """Brings the blocks to shared memory, one after the other, while `BEHIND` later products are under way."""
    for i in gl.static_range(ROUNDS):
        part = warpgroup_mma_wait(ROUNDS - 1 - i + BEHIND, [parts[i]])
        if HALF == 0 and i == ROUNDS - 1:
            mbarrier.arrive(barriers.ds_free.index(0), count=1)
        # Multiplied by the scale before the wait, forward and backward took 1.07 of the time.
        steps.leave(part, work.scale, HALF, uses * ROUNDS + i, memory, barriers)
