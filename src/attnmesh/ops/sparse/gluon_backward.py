"""The gradients of sparse attention on Hopper in Gluon, from the gradients of the scores: two kernels.

In `backward` they take the place of `grad_query_kernel` (65 to 128 heads) and `grad_key_kernel` (up to 128 heads) of
`triton_backward`, where values are the first 512 columns of keys of 576 or 512. In both, a group of warps, the
producer, copies to shared memory what two other groups, the consumers, multiply, 64 keys at a time::

    grad_query   dq = scale * ds @ k                   keys are gathered; each group sums half of the heads
    grad_key     dk += scale * ds^T @ q + p^T @ dout   q and dout stay in shared memory; the groups take every other
                                                       tile: one multiplies while the other adds its tile to the keys

A program has a part of the columns. The width need not be a power of two: a part has MAIN of the first PARTS * MAIN
columns and EXTRA of the rest.

**Atomics and the L2 cache.** Atomics on gradients that are not in the L2 cache read and write device memory, and take
more than twice as long. So where dk is larger than the cache, the slots of each row are sorted by key once, and
programs of the same columns and of the same segment of slots run at the same time: most of what they add to stays in
the cache (see `segments`).

A stage of the ring is `ready` when the copies of every loading thread have arrived (each reports its own), and `free`
when the products of all that read it are done. A barrier tells only odd phases from even ones. A group that waits for
tile t has seen t - 2, so all tiles before are ready, and t - STAGES, that of the phase before, is one of them.
"""

from collections import namedtuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from attnmesh.ops.gluon_barriers import invalidate_barriers, new_barriers
from attnmesh.ops.launch import Launch, Recent, is_hopper, repeat
from attnmesh.ops.sparse.arguments import RowBounds, SparseCall
from attnmesh.ops.sparse.gluon_common import COPIED_ROWS, D_TAIL, D_V, HEADS, KEYS, copy_columns

QUERY_HEADS = 2 * HEADS  # padded heads that `grad_query` takes: half of them for each group
IN_CACHE = 32 << 20  # bytes of dk up to which the order of the programs does not matter: half of the L2 cache
# Bytes of dk that programs add to at the same time, by padded heads: p and ds of many heads also need the cache.
WINDOW = {16: 24 << 20, 32: 24 << 20, 64: 24 << 20, 128: 12 << 20}
STAGES = {16: 8, 32: 8, 64: 8, 128: 3}  # of `grad_key`, by padded heads: as many as fit, or are of use
_KEY_MAIN = 128  # columns of a part of `grad_key`
_QUERY_MAIN = 256  # and of `grad_query`
_INT32_MAX = 2**31 - 1
_SORTED_SLOTS = 1 << 24  # at a time, which takes 17 bytes per slot
_HEADS, _KEYS, _D_V = gl.constexpr(HEADS), gl.constexpr(KEYS), gl.constexpr(D_V)
_THREADS = gl.constexpr(128)  # of the loader
_NO_KEY = gl.constexpr(-2147483648)
_NOT_SPECIALIZED = ["row_begin", "rows", "heads", "k_offset", "slot_count", "row_step", "part_step"]
_launches: Recent[Launch] = Recent()
# The parts of the columns, the columns MAIN and EXTRA of each, and the stages of the ring.
Shape = namedtuple("Shape", "parts main extra stages")
# In shared memory: rings of ds and of keys, and their barriers.
KeyRing = namedtuple("KeyRing", "ds main extra ready free")
# And rings of ds and p beside q and dout, and their barriers.
WeightRing = namedtuple("WeightRing", "q q_extra dout dout_extra ds p q_ready dout_ready ready free turns")


NEEDS = (
    "up to 128 heads and keys of 512 or 576 features in 16 bits whose first 512 are the values, rows aligned to 16 "
    "bytes, on Hopper"
)


def supports(call: SparseCall, dout: Tensor) -> bool:
    """Whether the kernels can serve the call: it has what they NEED."""
    q, k, v, d_v = call.q, call.k, call.v, call.d_v
    return (
        v is None
        and d_v == D_V
        and q.shape[-1] in (D_V, D_V + D_TAIL)
        and q.shape[1] <= QUERY_HEADS
        and q.dtype in (torch.bfloat16, torch.float16)
        and all(x.data_ptr() % 16 == 0 and all(n % 16 == 0 for n in x.stride()[:-1]) for x in (q, k, dout))
        and is_hopper(q.device)
    )


def segments(dk: Tensor, heads: int) -> int:
    """The number of segments of slots that `grad_key` takes in turn, for sorted slots, if more than one.

    0 if the cache holds all of dk. `heads` is the number of padded heads.
    """
    size = dk.element_size()
    if dk.numel() * size <= IN_CACHE:
        return 0
    _, main, extra = _parts(dk.shape[1], _KEY_MAIN)
    return -(-dk.shape[0] * (main + extra) * size // WINDOW[heads])


def sort_by_key(indices: Tensor, bounds: RowBounds) -> tuple[Tensor, Tensor]:
    """The valid slots of each row in the order of their keys, contiguous, and their number, int32 [s_q]."""
    rows, slots = indices.shape
    by_key = torch.empty(rows, slots, dtype=torch.int32, device=indices.device)
    counts = torch.empty(rows, dtype=torch.int32, device=indices.device)
    step = max(1, _SORTED_SLOTS // slots)
    for begin in range(0, rows, step):
        some = slice(begin, begin + step)
        valid = bounds.narrow(begin, begin + step).valid(indices[some])
        by_key[some] = torch.where(valid, indices[some], _INT32_MAX).sort(1).values
        counts[some] = valid.sum(1, dtype=torch.int32)
    return by_key, counts


def grad_query(call: SparseCall, rows: range, grad_scores: Tensor, dq: Tensor, _: object = None) -> None:
    """Writes dq of some rows from `grad_scores` [rows, QUERY_HEADS, padded_slots], a multiple of 64 slots."""
    k, indices, (lo, hi, slots, k_offset) = call.k, call.indices, call.bounds
    parts, main, extra = _parts(dq.shape[2], _QUERY_MAIN)
    repeat(
        _launches, grad_query_kernel, (len(rows) * parts,),
        (
            grad_scores, k, k.stride(0), indices, indices.stride(0), lo, hi, slots, dq, dq.stride(0), dq.stride(1),
            rows.start, dq.shape[1], grad_scores.shape[2], k_offset, call.scale,
        ),
        SHAPE=Shape(parts, main, extra, 4), num_warps=4,
    )  # fmt: skip


def grad_key(
    target: Tensor, call: SparseCall, rows: range, scale: float, grad_scores: Tensor, q: Tensor, weights: Tensor,
    dout: Tensor, *, atomic: bool, segments: int,
) -> None:  # fmt: skip
    """Adds scale * ds^T @ q + p^T @ dout of some rows to their keys in `target`, float32.

    `grad_scores` and `weights` are [rows, padded_heads, padded_slots], where `padded_heads` is 16, 32, 64 or 128. If
    not `atomic`, the sums are stored slot by slot, in `target` [rows * slots, width]. `segments` is the result of the
    function of that name: 0 computes all parts of a row together, so that p and ds are read from device memory once.
    """
    indices, (lo, hi, slots, k_offset) = call.indices, call.bounds
    count, (_, padded_heads, padded_slots), slot_count = len(rows), grad_scores.shape, indices.shape[1]
    parts, main, extra = _parts(target.shape[1], _KEY_MAIN)
    segment_slots = -(-slot_count // (KEYS * max(1, segments))) * KEYS
    row_step, part_step = (1, count) if segments else (parts, 1)
    repeat(
        _launches, grad_key_kernel, (count * parts * -(-slot_count // segment_slots),),
        (
            grad_scores, weights, q, q.stride(0), q.stride(1), dout, dout.stride(0), dout.stride(1),
            indices, indices.stride(0), lo, hi, slots, target, target.stride(0),
            rows.start, count, q.shape[1], padded_slots, k_offset, slot_count,
            segment_slots, row_step, part_step, scale,
        ),
        HEADS=padded_heads, SHAPE=Shape(parts, main, extra, STAGES[padded_heads]), ATOMIC=atomic, num_warps=4,
    )  # fmt: skip


def _parts(width: int, main: int) -> tuple[int, int, int]:
    """PARTS, MAIN and EXTRA: 576 = 3 * (128 + 64) = 2 * (256 + 32), 512 = 4 * 128 = 2 * 256."""
    if width == D_V:
        return D_V // main, main, 0
    parts = {128: 3, 256: 2}[main]
    return parts, main, width // parts - main


# Kernels.


@gluon.jit(do_not_specialize=_NOT_SPECIALIZED)
def grad_query_kernel(
    grad_scores, k, k_row, indices, indices_row, lo, hi, slots, dq, dq_row, dq_head,
    row_begin, heads, padded_slots, k_offset, scale, SHAPE: gl.constexpr,
):  # fmt: skip
    """dq of one part of the columns of a row."""
    dtype: gl.constexpr = k.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ds = gl.allocate_shared_memory(dtype, [2 * SHAPE.stages, _HEADS, _KEYS], wide)
    main = gl.allocate_shared_memory(dtype, [SHAPE.stages, _KEYS, SHAPE.main], wide)
    extra = main
    if SHAPE.extra > 0:
        extra = gl.allocate_shared_memory(dtype, [SHAPE.stages, _KEYS, SHAPE.extra], gl.NVMMASharedLayout(64, 16, 2))
    ring = KeyRing(ds, main, extra, new_barriers(SHAPE.stages, _THREADS), new_barriers(SHAPE.stages, 2))
    fence_async_shared()

    program = gl.program_id(0)
    part = program % SHAPE.parts
    in_chunk = program // SHAPE.parts
    row = (row_begin + in_chunk).to(gl.int64)
    count = gl.load(slots + row)
    load = (grad_scores, k, k_row, indices + row * indices_row, gl.load(lo + row), gl.load(hi + row),
            count, in_chunk, part, padded_slots, k_offset)  # fmt: skip
    store = (dq + row * dq_row, dq_head, heads, count, part, scale)
    gl.warp_specialize(
        [(_sum_queries, (ring, store, 0, SHAPE)), (_sum_queries, (ring, store, 1, SHAPE)),
         (_load_keys, (ring, load, SHAPE))],
        [4, 4], [208, 96],
    )  # fmt: skip
    invalidate_barriers((ring.ready, ring.free))


@gluon.jit
def _load_keys(ring, args, SHAPE: gl.constexpr):
    """Copies tiles of ds, and of the keys of their slots; 0 where a slot is invalid."""
    grad_scores, k, k_row, row_indices, first, end, count, in_chunk, part, padded_slots, k_offset = args
    head = gl.arange(0, _HEADS, layout=COPIED_ROWS)
    slot = gl.arange(0, _KEYS, layout=COPIED_ROWS)
    key = gl.load(row_indices + slot, mask=slot < count, other=_NO_KEY)
    ds_rows = grad_scores + (in_chunk.to(gl.int64) * (2 * _HEADS) + head) * padded_slots
    for tile in range((count + _KEYS - 1) // _KEYS):
        stage = tile % SHAPE.stages
        valid = (key >= first) & (key < end) & (slot < count)
        k_rows = k + (key.to(gl.int64) - k_offset) * k_row
        slot = slot + _KEYS  # the next indices are loaded early, so that the copies do not wait for them
        key = gl.load(row_indices + slot, mask=slot < count, other=_NO_KEY)
        mbarrier.wait(ring.free.index(stage), ((tile // SHAPE.stages) & 1) ^ 1)
        for half in gl.static_range(2):
            rows = ds_rows + half * _HEADS * padded_slots
            copy_columns(ring.ds.index(stage * 2 + half), rows, head >= 0, tile * _KEYS, _KEYS)
        copy_columns(ring.main.index(stage), k_rows, valid, part * SHAPE.main, SHAPE.main)
        if SHAPE.extra > 0:
            extra_column = SHAPE.parts * SHAPE.main + part * SHAPE.extra
            copy_columns(ring.extra.index(stage), k_rows, valid, extra_column, SHAPE.extra)
        async_copy.mbarrier_arrive(ring.ready.index(stage), increment_count=False)


@gluon.jit
def _sum_queries(ring, args, HALF: gl.constexpr, SHAPE: gl.constexpr):
    """Sums half of the heads, and writes them."""
    dq_row, dq_head, heads, count, part, scale = args
    MAIN: gl.constexpr = SHAPE.main
    EXTRA: gl.constexpr = SHAPE.extra
    RIGHT: gl.constexpr = EXTRA if EXTRA > 0 else 16
    grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    extra_grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, RIGHT, 16])
    main = gl.zeros([_HEADS, MAIN], gl.float32, grid)
    extra = gl.zeros([_HEADS, RIGHT], gl.float32, extra_grid)
    tiles = (count + _KEYS - 1) // _KEYS
    for tile in range(tiles):
        stage = tile % SHAPE.stages
        mbarrier.wait(ring.ready.index(stage), (tile // SHAPE.stages) & 1)
        fence_async_shared()  # copies and tensor cores access shared memory through different proxies
        left = ring.ds.index(stage * 2 + HALF)
        main = warpgroup_mma(left, ring.main.index(stage), main, is_async=True)
        if EXTRA > 0:
            extra = warpgroup_mma(left, ring.extra.index(stage), extra, is_async=True)
        main, extra = warpgroup_mma_wait(2 if EXTRA > 0 else 1, [main, extra])  # the products of the tile before
        mbarrier.arrive(ring.free.index((tile + SHAPE.stages - 1) % SHAPE.stages), count=1, pred=tile > 0)
    main, extra = warpgroup_mma_wait(0, [main, extra])
    _write(dq_row, dq_head, main * scale, HALF * _HEADS, heads, part * MAIN, MAIN, grid)
    if EXTRA > 0:
        extra_column = SHAPE.parts * MAIN + part * EXTRA
        _write(dq_row, dq_head, extra * scale, HALF * _HEADS, heads, extra_column, EXTRA, extra_grid)


@gluon.jit
def _write(dq_row, dq_head, tile, head_begin, heads, column_begin, COLUMNS: gl.constexpr, grid: gl.constexpr):
    head = head_begin + gl.arange(0, _HEADS, layout=gl.SliceLayout(1, grid))
    column = column_begin + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, grid))
    pointers = (dq_row + head.to(gl.int64) * dq_head)[:, None] + column[None, :]
    gl.store(pointers, tile.to(dq_row.dtype.element_ty), mask=(head < heads)[:, None])


@gluon.jit(do_not_specialize=_NOT_SPECIALIZED)
def grad_key_kernel(
    grad_scores, weights, q, q_row, q_head, dout, dout_row, dout_head, indices, indices_row, lo, hi, slots,
    target, target_row, row_begin, rows, heads, padded_slots, k_offset, slot_count,
    segment_slots, row_step, part_step, scale,
    HEADS: gl.constexpr, SHAPE: gl.constexpr, ATOMIC: gl.constexpr,
):  # fmt: skip
    """scale * ds^T @ q + p^T @ dout of one part of the columns, for a segment of the slots of a row.

    The sum goes to the row of its key (ATOMIC) or of its slot in the target.
    """
    dtype: gl.constexpr = q.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_main = gl.allocate_shared_memory(dtype, [HEADS, SHAPE.main], wide)
    dout_main = gl.allocate_shared_memory(dtype, [HEADS, SHAPE.main], wide)
    q_extra = q_main
    dout_extra = dout_main
    if SHAPE.extra > 0:
        q_extra = gl.allocate_shared_memory(dtype, [HEADS, SHAPE.extra], wide)
        dout_extra = gl.allocate_shared_memory(dtype, [HEADS, SHAPE.extra], wide)
    ring = WeightRing(
        q_main, q_extra, dout_main, dout_extra,
        ds=gl.allocate_shared_memory(dtype, [SHAPE.stages, HEADS, _KEYS], wide),
        p=gl.allocate_shared_memory(dtype, [SHAPE.stages, HEADS, _KEYS], wide),
        q_ready=new_barriers(1, _THREADS), dout_ready=new_barriers(1, _THREADS),
        ready=new_barriers(SHAPE.stages, _THREADS), free=new_barriers(SHAPE.stages, 1), turns=new_barriers(2, 1),
    )  # fmt: skip
    fence_async_shared()

    program = gl.program_id(0)
    in_chunk = program // row_step % rows
    part = program // part_step % SHAPE.parts
    begin = program // (rows * SHAPE.parts) * segment_slots
    row = (row_begin + in_chunk).to(gl.int64)
    count = gl.minimum(gl.load(slots + row), begin + segment_slots)
    tiles = gl.maximum(count - begin + _KEYS - 1, 0) // _KEYS
    load = (grad_scores, weights, q + row * q_row, q_head, dout + row * dout_row, dout_head, heads,
            begin, tiles, in_chunk, part, padded_slots)  # fmt: skip
    add = (target, target_row, indices + row * indices_row, gl.load(lo + row), gl.load(hi + row), count,
           in_chunk, slot_count, k_offset)  # fmt: skip
    gl.warp_specialize(
        [(_add_keys, (ring, add, begin, tiles, part, scale, 0, SHAPE, ATOMIC)),
         (_add_keys, (ring, add, begin, tiles, part, scale, 1, SHAPE, ATOMIC)),
         (_load_weights, (ring, load, SHAPE))],
        [4, 4], [192, 112],
    )  # fmt: skip
    invalidate_barriers((ring.q_ready, ring.dout_ready, ring.ready, ring.free, ring.turns))


@gluon.jit
def _load_weights(ring, args, SHAPE: gl.constexpr):
    """Copies q and dout, 0 in columns that no value has, and tiles of ds and p."""
    HEADS: gl.constexpr = ring.q.shape[0]
    grad_scores, weights, q, q_head, dout, dout_head, heads, begin, tiles, in_chunk, part, padded_slots = args
    head = gl.arange(0, HEADS, layout=COPIED_ROWS)
    offset = (in_chunk.to(gl.int64) * HEADS + head) * padded_slots + begin
    extra_column = SHAPE.parts * SHAPE.main + part * SHAPE.extra
    for tile in range(tiles):
        stage = tile % SHAPE.stages
        if tile == 0:
            q_rows = q + head.to(gl.int64) * q_head
            copy_columns(ring.q, q_rows, head < heads, part * SHAPE.main, SHAPE.main)
            if SHAPE.extra > 0:
                copy_columns(ring.q_extra, q_rows, head < heads, extra_column, SHAPE.extra)
            async_copy.mbarrier_arrive(ring.q_ready.index(0), increment_count=False)
        mbarrier.wait(ring.free.index(stage), ((tile // SHAPE.stages) & 1) ^ 1)
        copy_columns(ring.ds.index(stage), grad_scores + offset, head >= 0, tile * _KEYS, _KEYS)
        copy_columns(ring.p.index(stage), weights + offset, head >= 0, tile * _KEYS, _KEYS)
        async_copy.mbarrier_arrive(ring.ready.index(stage), increment_count=False)
        if tile == 0:  # last, because it is needed last
            dout_rows = dout + head.to(gl.int64) * dout_head
            copy_columns(ring.dout, dout_rows, head < heads, part * SHAPE.main, SHAPE.main)
            if SHAPE.extra > 0:
                there = (head < heads) & (extra_column < _D_V)
                copy_columns(ring.dout_extra, dout_rows, there, extra_column, SHAPE.extra)
            async_copy.mbarrier_arrive(ring.dout_ready.index(0), increment_count=False)


@gluon.jit
def _add_keys(ring, add, begin, tiles, part, scale, WHICH: gl.constexpr, SHAPE: gl.constexpr, ATOMIC: gl.constexpr):
    """Multiplies every other tile, and adds it to the keys."""
    MAIN: gl.constexpr = SHAPE.main
    EXTRA: gl.constexpr = SHAPE.extra
    RIGHT: gl.constexpr = EXTRA if EXTRA > 0 else 16
    grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    extra_grid: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, RIGHT, 16])
    for tile in range(WHICH, tiles, 2):
        stage = tile % SHAPE.stages
        # In turn: groups in step would multiply at the same time, and then both add to the keys.
        mbarrier.wait(ring.turns.index(WHICH), (tile // 2 & 1) ^ (1 - WHICH))
        mbarrier.wait(ring.ready.index(stage), (tile // SHAPE.stages) & 1)
        mbarrier.arrive(ring.turns.index(1 - WHICH), count=1)
        mbarrier.wait(ring.q_ready.index(0), 0, pred=tile == WHICH)
        fence_async_shared()  # copies and tensor cores access shared memory through different proxies
        left = ring.ds.index(stage).permute([1, 0])
        main = gl.zeros([_KEYS, MAIN], gl.float32, grid)
        extra = gl.zeros([_KEYS, RIGHT], gl.float32, extra_grid)
        main = warpgroup_mma(left, ring.q, main, use_acc=False, is_async=True)
        if EXTRA > 0:
            extra = warpgroup_mma(left, ring.q_extra, extra, use_acc=False, is_async=True)
        mbarrier.wait(ring.dout_ready.index(0), 0, pred=tile == WHICH)
        fence_async_shared()
        main, extra = warpgroup_mma_wait(0, [main, extra])
        main = main * scale
        extra = extra * scale
        left = ring.p.index(stage).permute([1, 0])
        main = warpgroup_mma(left, ring.dout, main, is_async=True)
        if EXTRA > 0:
            extra = warpgroup_mma(left, ring.dout_extra, extra, is_async=True)
        main, extra = warpgroup_mma_wait(0, [main, extra])
        mbarrier.arrive(ring.free.index(stage), count=1)
        _put(add, main, begin + tile * _KEYS, part * MAIN, MAIN, ATOMIC)
        if EXTRA > 0:
            _put(add, extra, begin + tile * _KEYS, SHAPE.parts * MAIN + part * EXTRA, EXTRA, ATOMIC)


@gluon.jit
def _put(args, sums, slot_begin, column_begin, COLUMNS: gl.constexpr, ATOMIC: gl.constexpr):
    """Adds a tile to the rows of its keys, or stores it in the rows of its slots."""
    target, target_row, row_indices, first, end, count, in_chunk, slot_count, k_offset = args
    # Lanes of a warp exchange columns until each has four in a row, and eight of them 128 bytes: atomics on shorter
    # pieces take longer.
    lines: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [4, 0], [0, 32]] + ([[0, 64]] if COLUMNS == 128 else []),
        [[0, 8], [0, 4], [1, 0], [2, 0], [0, 16]], [[16, 0], [32, 0]], [], [_KEYS, COLUMNS],
    )  # fmt: skip
    sums = gl.convert_layout(sums, lines)
    slot = slot_begin + gl.arange(0, _KEYS, layout=gl.SliceLayout(1, lines))
    column = column_begin + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, lines))
    key = gl.load(row_indices + slot, mask=slot < count, other=_NO_KEY)
    valid = (key >= first) & (key < end) & (slot < count)
    if ATOMIC:
        pointers = target + ((key.to(gl.int64) - k_offset) * target_row)[:, None] + column[None, :]
        gl.atomic_add(pointers, sums, mask=valid[:, None], sem="relaxed")
    else:
        pointers = target + ((in_chunk.to(gl.int64) * slot_count + slot) * target_row)[:, None] + column[None, :]
        gl.store(pointers, sums, mask=valid[:, None])
