"""The shared memory of a program of the backward in Gluon, the producer that fills it, and the warps that store grad_q.

The producer copies keys and values, and then a tile of q and grad_out and the terms of its rows for every step, some
steps ahead. Store warps let the copy engine (TMA) add finished tiles of grad_q to memory. Stage `step % STAGES` is
used for the `step // STAGES`-th time; warps wait for the parity of that number, and waiting for the phase before the
first succeeds at once.

If adds are `ordered`, key tiles add to each 64 rows of a head one after another, from the first to the last, so that
every sum has one order. A counter in memory says which tiles have added (`Turns`). Each consumer has a store warp. It
reads the counter of the next rows while sums are on their way to memory. A program waits for programs of earlier key
tiles only, which started before it. It begins with the last rows, and has all heads of a group before the rows above:
with a causal mask, programs that start together all begin with the last rows, and each is late by one add per earlier
tile. (Head by head, each head would begin with the last rows again, and programs of later key tiles, which have fewer
rows, would wait there for the first. Rows in ascending order would let a program begin with rows that the programs
before it have after some steps.)
"""

# mypy: disable-error-code="assignment"
from collections import namedtuple
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from attnmesh.ops.dense.gluon_tma import async_add_shared_to_global, wait_for_adds
from attnmesh.ops.dense.triton_tiles import LOG2_E

TILE = 64  # rows of a step, and keys of a consumer: the rows of one matrix instruction
_TILE, _LOG2_E = gl.constexpr(TILE), gl.constexpr(LOG2_E)


# Shared memory: tiles of keys and values; of rows and their terms, by stage; of ds and finished grad_q; and of weights
# if the consumers share keys. With slopes, the distances of keys from the first key of the program, and the slope of
# the head of each stage, once for every key of a consumer.
Memory = namedtuple("Memory", "k v q grad_out lse delta bounds distances slopes weights ds grad_q")
# The barriers of the tiles: `ready` to be read, `free` to be written. If the consumers do not share keys, they have no
# weights to exchange, and what frees q frees grad_out.
Barriers = namedtuple(
    "Barriers",
    "k_ready v_ready q_ready q_free grad_out_ready grad_out_free weights_ready weights_free ds_ready ds_free "
    "grad_q_ready grad_q_free",
)


class Work(NamedTuple):
    """What a program computes: the gradients of 64 or 128 keys, from some rows of some heads, in steps of 64 rows."""

    batch: Any
    kv_head: Any
    key_begin: Any
    head: Any  # the first of the query heads
    head_end: Any
    start: Any  # the rows of the first step
    begin: Any  # rows [begin, stop) see some key; rows [inner, edge) see all keys, and need no mask
    inner: Any
    edge: Any
    stop: Any
    steps: Any
    q_len: Any
    kv_len: Any
    alibi: Any  # positions of rows, the first key's, and whether a key comes after a row that sees all; None without
    grads: Any  # of the keys and of the values, each with its strides
    scale: Any
    softcap: Any


class Turns(NamedTuple):
    """Which key tiles have added to grad_q of a sequence, if they do so in their order."""

    done: Any  # of each head, for each 64 rows: the number of the last tile that has added to them, plus 1; or 0
    row_tiles: Any  # of a head
    tile: Any  # of this program
    before: Any  # the number of the last tile before it that rows see, plus 1; or 0
    stop: Any  # of the rows of that tile; no earlier tile has later rows


class Shape(NamedTuple):
    """The constants of a kernel."""

    needs_q: Any
    ordered: Any  # key tiles add to grad_q one after another
    scores: Any  # the gradient of the scores is needed, for grad_q or grad_k
    values: Any  # grad_v is needed
    shared_keys: Any  # by both consumers
    halved: Any  # the scores of half of the rows of a step at a time
    bounded: Any
    causal: Any
    atomic: Any  # other programs add to the same keys
    overwrite: Any
    d: Any
    k_block: Any  # columns of a block of queries and keys, and the blocks of a tile
    k_blocks: Any
    dv: Any
    v_block: Any
    v_blocks: Any
    q_block: Any  # columns of grad_q that are exchanged at once, as often as there are blocks of keys
    stages: Any
    grad_out_stages: Any
    unrolled: Any
    paired: Any
    held: Any


@gluon.jit
def load(q, grad_out, k, v, row_terms, memory, barriers, work, SHAPE: gl.constexpr):
    """Copies keys and values once, and then the rows of every step."""
    STAGES: gl.constexpr = SHAPE.stages
    lse, lse_strides, delta, delta_strides, first, end, bounds_stride, slopes, q_positions, k_positions = row_terms
    near = gl.arange(0, _TILE, layout=gl.BlockedLayout([1], [32], [1], [0]))
    batch, head, row = work.batch, work.head, work.start
    lse_head = lse + batch.to(gl.int64) * lse_strides[0] + head.to(gl.int64) * lse_strides[1]
    delta_head = delta + batch.to(gl.int64) * delta_strides[0] + head.to(gl.int64) * delta_strides[1]
    HALVES: gl.constexpr = 1 if SHAPE.shared_keys else 2
    _copy(k, batch, work.kv_head, work.key_begin, memory.k, 0, barriers.k_ready.index(0), SHAPE.k_blocks, HALVES)
    if slopes is not None:
        for half in gl.static_range(HALVES):
            at_key = work.key_begin + half * _TILE + near
            positions = gl.load(k_positions + at_key, mask=at_key < work.kv_len, other=0)
            distances = positions - gl.load(k_positions + work.key_begin)
            memory.distances.index(half).store(distances.to(gl.float32))
        mbarrier.arrive(barriers.k_ready.index(0), count=1)
    for step in range(work.steps):
        stage = step % STAGES
        turn = (step // STAGES) & 1
        rows = row + near
        real = rows < work.q_len
        row_lse = gl.load(lse_head + rows * lse_strides[2], mask=real, other=float("-inf"))
        row_delta = gl.load(delta_head + rows * delta_strides[2], mask=real, other=0.0)
        empty = row_lse == float("-inf")
        mbarrier.wait(barriers.q_free.index(stage), turn ^ 1)
        _copy(q, batch, head, row, memory.q, stage, barriers.q_ready.index(stage), SHAPE.k_blocks)
        # Rows without keys have weights of 0.
        row_lse = gl.where(empty, float("inf"), row_lse * _LOG2_E)
        if slopes is not None:
            slope = near * 0.0 + gl.load(slopes + gl.minimum(head, work.head_end - 1)) * _LOG2_E
            positions = gl.load(q_positions + rows, mask=real, other=0) - gl.load(k_positions + work.key_begin)
            row_lse += slope * positions.to(gl.float32)
            memory.slopes.index(stage).store(slope)
        memory.lse.index(stage).store(row_lse)
        if SHAPE.bounded:
            row_first = gl.load(first + batch.to(gl.int64) * bounds_stride + rows, mask=real, other=0)
            row_end = gl.load(end + batch.to(gl.int64) * bounds_stride + rows, mask=real, other=0)
            memory.bounds.index(2 * stage).store(row_first)
            memory.bounds.index(2 * stage + 1).store(gl.minimum(row_end, work.kv_len))
        mbarrier.arrive(barriers.q_ready.index(stage), count=1)
        if SHAPE.scores and step == 0:
            ready = barriers.v_ready.index(0)
            _copy(v, batch, work.kv_head, work.key_begin, memory.v, 0, ready, SHAPE.v_blocks, HALVES)
        at = step % SHAPE.grad_out_stages
        ready = barriers.grad_out_ready.index(at)
        if SHAPE.shared_keys:
            mbarrier.wait(barriers.grad_out_free.index(at), (step // SHAPE.grad_out_stages & 1) ^ 1)
        _copy(grad_out, batch, head, row, memory.grad_out, at, ready, SHAPE.v_blocks)
        memory.delta.index(at).store(gl.where(empty, 0.0, row_delta))
        mbarrier.arrive(ready, count=1)
        if SHAPE.ordered:
            before = head
            head, row = next_rows(head, row, work, SHAPE)
            lse_head += (head - before).to(gl.int64) * lse_strides[1]
            delta_head += (head - before).to(gl.int64) * delta_strides[1]
        else:
            # The next rows, or the first rows of the next head.
            row = row + _TILE
            if row >= work.stop:
                head = head + 1
                row = gl.where(head < work.head_end, work.begin, work.q_len)  # no rows, to make the steps even
                lse_head += lse_strides[1]
                delta_head += delta_strides[1]


@gluon.jit
def _copy(x, batch, head, row, memory, tile, ready, BLOCKS: gl.constexpr, TILES: gl.constexpr = 1):
    """Lets the copy engine fetch tiles one after another, block by block of columns."""
    block: gl.constexpr = gl.NVMMASharedLayout(128, 16, 4)
    WIDTH: gl.constexpr = memory.shape[2]
    mbarrier.expect(ready, TILES * x.block_type.nbytes * BLOCKS)
    for i in gl.static_range(TILES * BLOCKS):
        there = memory.index(tile * BLOCKS + i)._reinterpret(x.dtype, [1, 1, _TILE, WIDTH], block)
        tma.async_copy_global_to_shared(x, [batch, head, row + i // BLOCKS * _TILE, i % BLOCKS * WIDTH], ready, there)


@gluon.jit
def add_rows(grad_q, memory, barriers, work, SHAPE: gl.constexpr):
    """Lets the copy engine add the tiles of grad_q that the consumers leave in shared memory."""
    WIDTH: gl.constexpr = SHAPE.q_block
    ROUNDS: gl.constexpr = SHAPE.k_blocks
    if grad_q is not None:
        head, row = work.head, work.start
        for step in range(work.steps // 2 if SHAPE.paired else work.steps):
            # The rows of both halves: of two steps, or the same.
            next_head, next_row = next_rows(head, row, work, SHAPE)
            other_head, other_row = (next_head, next_row) if SHAPE.paired else (head, row)
            for i in gl.static_range(ROUNDS):
                column = i * WIDTH if SHAPE.paired else WIDTH
                _add_block(grad_q, memory, barriers, work.batch, head, row, i * WIDTH, step * ROUNDS + i, 0)
                _add_block(grad_q, memory, barriers, work.batch, other_head, other_row, column, step * ROUNDS + i, 1)
                _release(barriers, 0, 1)
                _release(barriers, 1, 0)
            if SHAPE.paired:
                head, row = next_rows(next_head, next_row, work, SHAPE)
            else:
                head, row = next_head, next_row


@gluon.jit
def add_in_turn(HALF: gl.constexpr, grad_q, turns, memory, barriers, work, SHAPE: gl.constexpr):
    """Lets the copy engine add the tiles of grad_q of one consumer, each after those of earlier key tiles."""
    head, row = work.head, work.start
    if HALF == 1:
        head, row = next_rows(head, row, work, SHAPE)
    seen = _seen(turns, head, row, work)
    pairs = work.steps // 2
    for pair in range(pairs):
        while seen < turns.before:
            seen = _seen(turns, head, row, work)
        _add_block(grad_q, memory, barriers, work.batch, head, row, 0, pair, HALF)
        # The counter of the next rows is read while these sums are on their way.
        other_head, other_row = next_rows(head, row, work, SHAPE)
        next_head, next_row = next_rows(other_head, other_row, work, SHAPE)
        if pair + 1 < pairs:
            seen = _seen(turns, next_head, next_row, work)
        _release(barriers, HALF, 0)
        wait_for_adds()
        if row < work.q_len:  # the next key tile with these rows adds to them
            gl.atomic_xchg(_done(turns, head, row), turns.tile + 1, sem="release")
        head, row = next_head, next_row


@gluon.jit
def add_blocks(HALF: gl.constexpr, grad_q, turns, memory, barriers, work, SHAPE: gl.constexpr):
    """Lets the copy engine add the blocks of grad_q of one consumer."""
    FIRST: gl.constexpr = HALF * (SHAPE.k_blocks // 2)
    ROUNDS: gl.constexpr = SHAPE.k_blocks - FIRST if HALF == 1 else SHAPE.k_blocks // 2
    # A consumer that multiplies the ds of the previous step has a step more: it begins with rows that do not exist.
    LATE: gl.constexpr = 1 if HALF == 0 or SHAPE.halved else 0
    if grad_q is not None and ROUNDS > 0:
        head, row = work.head, work.start
        for step in range(work.steps + LATE):
            real = gl.where(step >= LATE, row, work.q_len)
            for i in gl.static_range(ROUNDS):
                column = (FIRST + i) * SHAPE.q_block
                _add_block(grad_q, memory, barriers, work.batch, head, real, column, step * ROUNDS + i, HALF)
                _release(barriers, HALF, 0)
            if step >= LATE:
                head, row = next_rows(head, row, work, SHAPE)


@gluon.jit
def _add_block(grad_q, memory, barriers, batch, head, row, column, uses, HALF: gl.constexpr):
    block: gl.constexpr = gl.NVMMASharedLayout(128, 32, 4)
    WIDTH: gl.constexpr = memory.grad_q.shape[2]
    mbarrier.wait(barriers.grad_q_ready.index(HALF), uses & 1)
    tile = memory.grad_q.index(HALF)._reinterpret(gl.float32, [1, 1, _TILE, WIDTH], block)
    async_add_shared_to_global(grad_q, [batch, head, row, column], tile)


@gluon.jit
def _release(barriers, HALF: gl.constexpr, UNDER_WAY: gl.constexpr):
    tma.store_wait(UNDER_WAY)
    mbarrier.arrive(barriers.grad_q_free.index(HALF), count=1)


@gluon.jit
def _seen(turns, head, row, work):
    """The number of the last tile that has added to some rows, plus 1; at least `before` if nobody is waited for."""
    seen = turns.before
    if row < gl.minimum(turns.stop, work.q_len):
        seen = gl.atomic_add(_done(turns, head, row), 0, sem="acquire")
    return seen


@gluon.jit
def _done(turns, head, row):
    """The counter of some rows."""
    return turns.done + head * turns.row_tiles + row // _TILE


@gluon.jit
def next_rows(head, row, work, SHAPE: gl.constexpr):
    """The next rows, or the first of the next head; after the last head, rows that do not exist.

    If adds are ordered: the same rows of the next head, or the rows before; in the end, rows that do not exist.
    """
    if SHAPE.ordered:
        head = head + 1
        if head == work.head_end:
            head = work.head
            row = gl.where(row > work.begin, row - _TILE, work.q_len)
    else:
        row = row + _TILE
        if row >= work.stop:
            head = head + 1
            row = gl.where(head < work.head_end, work.begin, work.q_len)
    return head, row


@gluon.jit
def next_row(row, work):
    """The next rows, or the first of the next head."""
    row = row + _TILE
    if row >= work.stop:
        row = work.begin
    return row


@gluon.jit
def ordered_row(step, work):
    """The rows of a step, if adds are ordered. (No register is left in which consumers could count heads.)"""
    return work.start - step // (work.head_end - work.head) * _TILE
