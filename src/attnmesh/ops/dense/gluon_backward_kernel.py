"""The backward of attention on Hopper in Gluon: one pass over the keys, adding into float32 gradients.

A program has 128 keys of one kv head, and loops over the rows that see any of them, in every query head of the group.
It recomputes the weights p from the log-sum-exp of the whole softmax::

    grad_v += p^T @ grad_out          ds = p * (grad_out @ v^T - delta)
    grad_q += scale * ds @ k          grad_k += scale * ds^T @ q

A program has four or five groups of warps:

- the producer copies a tile of q and grad_out, and the terms of its rows, two or more tiles ahead;
- two consumers each have 64 of the keys, whose gradients they keep in registers. Scores are computed transposed,
  [keys, rows]: p^T and ds^T are left operands of the next products as they are, without leaving registers;
- a store warp, or one for each consumer, lets the copy engine (TMA) add finished tiles of grad_q to memory.

grad_q sums over all keys: the consumers exchange ds in shared memory. In pairs of steps, each multiplies the ds
of the rows of one step with k; else each multiplies the ds of every step with half of the columns of k. The scores of
the next rows are computed behind these products, so that the tensor cores have work while weights and sums are.

Wide heads leave less room (`gluon_backward_wide`). Their tiles are in blocks of 64 columns, and finished grad_q leaves
registers by block. Up to 320 columns of sums (192/128), consumers have the scores of 32 rows at a time. Each multiplies
the ds of the previous step with some blocks of k, while the other may be behind. Beyond, shared memory does not hold
128 keys: the consumers share 64. One computes the weights and has grad_v; the other gets the weights in float32 through
shared memory, computes ds and has grad_k; each has half of the columns of grad_q. One computes weights while the other
multiplies.

The least cycles of a tile of 64 keys and 64 rows on one processor, for the five products, and of shared memory at 128
bytes per cycle (operands, weights and ds, what is loaded, and grad_q, written and read), and the bytes that a processor
adds to grad_q, which the L2 sums up:

========  ========  =============  ===============
head_dim  products  shared memory  bytes of grad_q
========  ========  =============  ===============
128       1280      1400           16 KiB
192/128   1660      2270           24 KiB
256       2560      3780           64 KiB
========  ========  =============  ===============
"""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 - Gluon has no starred elements
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnmesh.ops.dense import gluon_backward_memory as rows
from attnmesh.ops.dense import gluon_backward_steps as steps
from attnmesh.ops.dense.gluon_alibi import product_layout
from attnmesh.ops.dense.gluon_backward_memory import TILE, Barriers, Memory, Turns, Work
from attnmesh.ops.dense.gluon_backward_wide import differentiate_by_half, differentiate_keys, differentiate_values
from attnmesh.ops.gluon_barriers import invalidate_barriers, new_barriers

_TILE = gl.constexpr(TILE)
_STOPS = gl.constexpr(512)  # of the rows of key tiles, read at once
_CONSUMER, _OTHER = gl.constexpr(240), gl.constexpr(24)  # registers per thread, of 504


@gluon.jit(do_not_specialize=["q_len", "kv_len", "kv_heads", "splits", "members", "streams", "section"])
def backward_kernel(
    q, grad_out, k, v, grad_q, lse, lse_strides, delta, delta_strides, first, end, bounds_stride, ranges, done,
    grad_k, grad_k_strides, grad_v, grad_v_strides,
    q_len, kv_len, kv_heads, splits, members, streams, section, scale, softcap, slopes, q_positions, k_positions,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """One program: the gradients of 64 or 128 keys, from one part of the mask."""
    gdc_launch_dependents()  # the next kernel may be launched: if it reads these results, it waits for the end itself
    gdc_wait()
    STAGES: gl.constexpr = SHAPE.stages
    HALVES: gl.constexpr = 1 if SHAPE.shared_keys else 2  # tiles of 64 keys
    # The tiles of the heads of a section, longest first: programs of the same heads share rows in the L2 cache.
    tile_count = gl.cdiv(kv_len, HALVES * _TILE)
    first_stream = gl.program_id(0) // (section * tile_count) * section
    within = gl.program_id(0) % (section * tile_count)
    together = gl.minimum(section, streams - first_stream)
    stream = first_stream + within % together
    key_begin = within // together * (HALVES * _TILE)
    kv_head = stream // splits % kv_heads
    batch = stream // splits // kv_heads
    head = stream % (splits * kv_heads) * members
    begin, inner, edge, stop = _row_phases(ranges, bounds_stride, batch, key_begin, q_len, kv_len, tile_count, SHAPE)
    step_count = gl.cdiv(gl.cdiv(stop - begin, _TILE) * members, SHAPE.unrolled) * SHAPE.unrolled
    start = (gl.cdiv(stop, _TILE) - 1) * _TILE if SHAPE.ordered else begin
    alibi = None
    if slopes is not None:
        last_key = gl.load(k_positions + (gl.minimum(key_begin + HALVES * _TILE, kv_len) - 1))
        later_keys = (last_key > gl.load(q_positions + gl.minimum(inner, q_len - 1))).to(gl.int32)
        alibi = (q_positions, gl.load(k_positions + key_begin), later_keys)
    work = Work(
        batch, kv_head, key_begin, head, head + members, start, begin, inner, edge, stop, step_count, q_len, kv_len,
        alibi, (grad_k, grad_k_strides, grad_v, grad_v_strides), scale, softcap,
    )  # fmt: skip
    if step_count <= 0:
        if SHAPE.overwrite:
            grid: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
            no_k = steps.zero_blocks(SHAPE.k_block, SHAPE.k_blocks, grid)
            no_v = steps.zero_blocks(SHAPE.v_block, SHAPE.v_blocks, grid)
            for half in gl.static_range(HALVES):
                steps.add_sums(no_k, no_v, None, work, key_begin + half * _TILE, SHAPE, grid)
        return

    # Without swizzle: numbers of rows; and the eight columns that four threads hold.
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    quads: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    memory = Memory(
        weights=gl.allocate_shared_memory(gl.float32, [1, _TILE, _TILE], quads) if SHAPE.shared_keys else None,
        distances=None if slopes is None else gl.allocate_shared_memory(gl.float32, [HALVES, _TILE], flat),
        slopes=None if slopes is None else gl.allocate_shared_memory(gl.float32, [STAGES, _TILE], flat),
        # Of both consumers, of two steps if they exchange them.
        ds=None if grad_q is None else _tiles(q.dtype, 1 if SHAPE.shared_keys else 4, _TILE),
        grad_q=None if grad_q is None else _tiles(gl.float32, 2, SHAPE.q_block),
        v=_tiles(q.dtype, HALVES * SHAPE.v_blocks, SHAPE.v_block) if SHAPE.scores else None,
        k=_tiles(q.dtype, HALVES * SHAPE.k_blocks, SHAPE.k_block),
        q=_tiles(q.dtype, STAGES * SHAPE.k_blocks, SHAPE.k_block),
        grad_out=_tiles(q.dtype, SHAPE.grad_out_stages * SHAPE.v_blocks, SHAPE.v_block),
        lse=gl.allocate_shared_memory(gl.float32, [STAGES, _TILE], flat),
        delta=gl.allocate_shared_memory(gl.float32, [STAGES, _TILE], flat),
        bounds=gl.allocate_shared_memory(gl.int32, [2 * STAGES, _TILE], flat),
    )
    barriers = Barriers(
        k_ready=new_barriers(1, 1 if slopes is None else 2),  # the copies, and the distances
        v_ready=new_barriers(1, 1),
        q_ready=new_barriers(STAGES, 2),  # the copies and, once, the terms of the rows
        q_free=new_barriers(STAGES, 2),
        grad_out_ready=new_barriers(STAGES, 2),
        grad_out_free=new_barriers(STAGES, 2 if SHAPE.values else 1),
        weights_ready=new_barriers(1, 1),
        weights_free=new_barriers(1, 1),
        ds_ready=new_barriers(2, HALVES),
        ds_free=new_barriers(1, HALVES),
        grad_q_ready=new_barriers(2, 1),
        grad_q_free=new_barriers(2, 1),
    )
    fence_async_shared()

    turns: gl.constexpr = None
    if SHAPE.ordered:
        row_tiles = gl.cdiv(q_len, _TILE)
        of_batch = done + (batch * kv_heads * members).to(gl.int64) * row_tiles
        before, before_stop = _tile_before(ranges, bounds_stride, work, tile_count)
        turns = Turns(of_batch, row_tiles, key_begin // (2 * _TILE), before, before_stop)
    row_terms = (lse, lse_strides, delta, delta_strides, first, end, bounds_stride, slopes, q_positions, k_positions)
    wide: gl.constexpr = SHAPE.shared_keys or SHAPE.halved
    if wide or SHAPE.ordered:
        gl.warp_specialize(
            [(differentiate_values if SHAPE.shared_keys else differentiate_by_half if wide else _differentiate,
              (0, memory, barriers, work, SHAPE)),
             (differentiate_keys if SHAPE.shared_keys else differentiate_by_half if wide else _differentiate,
              (1, memory, barriers, work, SHAPE)),
             (rows.load, (q, grad_out, k, v, row_terms, memory, barriers, work, SHAPE)),
             (rows.add_blocks if wide else rows.add_in_turn, (0, grad_q, turns, memory, barriers, work, SHAPE)),
             (rows.add_blocks if wide else rows.add_in_turn, (1, grad_q, turns, memory, barriers, work, SHAPE))],
            [4, 1, 1, 1], [_CONSUMER, _OTHER, _OTHER, _OTHER],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [(_differentiate, (0, memory, barriers, work, SHAPE)),
             (_differentiate, (1, memory, barriers, work, SHAPE)),
             (rows.load, (q, grad_out, k, v, row_terms, memory, barriers, work, SHAPE)),
             (rows.add_rows, (grad_q, memory, barriers, work, SHAPE))],
            [4, 1, 1], [_CONSUMER, _OTHER, _OTHER],
        )  # fmt: skip
    invalidate_barriers(barriers)


@gluon.jit
def _tiles(dtype: gl.constexpr, NUMBER: gl.constexpr, WIDTH: gl.constexpr):
    """Shared memory for tiles of 64 rows that the matrix units and the copy engine read."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 32 if dtype == gl.float32 else 16, 2)
    return gl.allocate_shared_memory(dtype, [NUMBER, _TILE, WIDTH], layout)


@gluon.jit
def _row_phases(ranges, bounds_stride, batch, key_begin, q_len, kv_len, tile_count, SHAPE: gl.constexpr):
    """Rows [begin, stop) see some key of the tile; rows [inner, edge) see all its keys, and need no mask."""
    KEYS: gl.constexpr = _TILE if SHAPE.shared_keys else 2 * _TILE
    begin, full_begin, full_end, stop = 0, 0, q_len, q_len
    if ranges is not None:
        of_tile = ranges + (gl.where(bounds_stride != 0, batch, 0) * tile_count + key_begin // KEYS) * 4
        begin, full_begin = gl.load(of_tile), gl.load(of_tile + 1)
        full_end, stop = gl.load(of_tile + 2), gl.load(of_tile + 3)
    elif SHAPE.causal:
        begin, full_begin = gl.minimum(key_begin, q_len), key_begin + KEYS - 1
    begin = begin // _TILE * _TILE
    inner = gl.cdiv(full_begin, _TILE) * _TILE
    edge = gl.where(full_end >= q_len, q_len, full_end // _TILE * _TILE)  # rows beyond the last have no weights
    edge = gl.where(key_begin + KEYS > kv_len, 0, edge)
    return begin, inner, edge, stop


@gluon.jit
def _tile_before(ranges, bounds_stride, work, tile_count):
    """The number, plus 1, of the last earlier key tile that rows see, and where its rows end; or (0, 0).

    The keys of later rows do not begin or end earlier: so the rows of key tiles that rows see do not either.
    """
    before, stop = work.key_begin // (2 * _TILE), work.q_len
    if ranges is not None:
        of_batch = ranges + gl.where(bounds_stride != 0, work.batch, 0) * tile_count * 4
        last, stop = before * 0, before * 0
        for begin in range(0, before, _STOPS):
            tiles = begin + gl.arange(0, _STOPS, layout=gl.BlockedLayout([4], [32], [4], [0]))
            stops = gl.load(of_batch + tiles * 4 + 3, mask=tiles < before, other=0)
            last = gl.maximum(last, gl.max(gl.where(stops > 0, tiles + 1, 0), 0))
            stop = gl.maximum(stop, gl.max(stops, 0))
        before = last
    return before, stop


@gluon.jit
def _differentiate(HALF: gl.constexpr, memory, barriers, work, SHAPE: gl.constexpr):
    """A consumer: the gradients of 64 keys, and half of the gradients of the queries."""
    STAGES: gl.constexpr = SHAPE.stages
    UNROLLED: gl.constexpr = SHAPE.unrolled
    PAIRED: gl.constexpr = SHAPE.paired
    K_BLOCKS: gl.constexpr = SHAPE.k_blocks
    V_BLOCKS: gl.constexpr = SHAPE.v_blocks
    UNDER_WAY: gl.constexpr = V_BLOCKS if SHAPE.scores else 0  # products that start behind the scores
    score_grid: gl.constexpr = product_layout(_TILE)
    across: gl.constexpr = gl.SliceLayout(0, score_grid)

    my_keys = work.key_begin + HALF * _TILE
    acc_k = steps.zero_blocks(SHAPE.k_block, K_BLOCKS if SHAPE.scores else 0)
    acc_v = steps.zero_blocks(SHAPE.v_block, V_BLOCKS if SHAPE.values else 0)
    row = work.start
    # 0, but the compiler does not know: it would keep the addresses of every stage in registers.
    origin = gl.minimum(work.q_len, 0)
    drift = origin

    mbarrier.wait(barriers.k_ready.index(0), 0)
    my_k, my_v = memory.k, memory.v
    if SHAPE.scores:
        mbarrier.wait(barriers.v_ready.index(0), 0)
    if SHAPE.held:
        my_k = my_k.index(HALF).load(gl.DotOperandLayout(0, score_grid, 2))
        my_v = my_v.index(HALF).load(gl.DotOperandLayout(0, score_grid, 2))
    for turns in range(work.steps // UNROLLED):
        for within in gl.static_range(UNROLLED):
            step = origin + turns * UNROLLED + within
            stage = step % STAGES
            turn = (step // STAGES) & 1
            if within == 0:
                mbarrier.wait(barriers.q_ready.index(stage), turn)
                tile = HALF if PAIRED else drift + HALF
                products = steps.score(my_k, tile, memory.q, stage, K_BLOCKS, SHAPE.held)
            if SHAPE.scores:
                mbarrier.wait(barriers.grad_out_ready.index(stage), turn)
                grad_weights = steps.score(my_v, tile, memory.grad_out, stage, V_BLOCKS, SHAPE.held)
            row_lse = memory.lse.index(stage).load(across)
            if within == 0:
                products = warpgroup_mma_wait(UNDER_WAY, [products])
            else:
                # And what the last step added to the sums.
                if SHAPE.scores:
                    finished = warpgroup_mma_wait(UNDER_WAY, (products,) + acc_k)
                    acc_k = finished[1:]
                else:
                    finished = warpgroup_mma_wait(UNDER_WAY, (products,) + acc_v)
                    acc_v = finished[1:]
                products = finished[0]
                mbarrier.arrive(barriers.q_free.index((step + STAGES - 1) % STAGES), count=1)
            if SHAPE.ordered:
                row = rows.ordered_row(step, work)
            weights, capped = steps.weights_of(products, row_lse, row, stage, my_keys, memory, work, SHAPE)
            if SHAPE.values:
                if not SHAPE.scores:
                    mbarrier.wait(barriers.grad_out_ready.index(stage), turn)
                acc_v = steps.add_products(acc_v, weights, memory.grad_out, stage, V_BLOCKS)
            if SHAPE.scores:
                row_delta = memory.delta.index(stage).load(across)
                grad_weights = warpgroup_mma_wait(V_BLOCKS if SHAPE.values else 0, [grad_weights])
                ds = steps.grad_scores_of(weights, grad_weights, row_delta, capped, work).to(memory.k.dtype)
                # Of every step, or of two steps at a time: then each consumer has the rows of one.
                ds_stage = step % 2
                if SHAPE.needs_q:
                    if PAIRED and within % 2 == 0:
                        mbarrier.wait(barriers.ds_free.index(0), (step // 2 & 1) ^ 1)
                    # Else: both consumers have multiplied the ds of two steps ago before the last step's barrier.
                    memory.ds.index(2 * ds_stage + HALF).store(ds)
                if SHAPE.needs_q and (within % 2 == 1 or not PAIRED):
                    fence_async_shared()
                    at = 0 if PAIRED else ds_stage
                    mbarrier.arrive(barriers.ds_ready.index(at), count=1)
                    mbarrier.wait(barriers.ds_ready.index(at), (step // 2) & 1)
                    if PAIRED and SHAPE.values:
                        acc_v = steps.finish(0, acc_v)
                    parts = ()
                    for i in gl.static_range(K_BLOCKS):
                        which = drift + HALF if PAIRED else ds_stage
                        parts = parts + (steps.exchanged(memory, drift, which, i, HALF, SHAPE),)
                acc_k = steps.add_products(acc_k, ds, memory.q, stage, K_BLOCKS)
                if SHAPE.needs_q and (within % 2 == 1 or not PAIRED):
                    for i in gl.static_range(K_BLOCKS):
                        if SHAPE.values and i == 0:
                            finished = warpgroup_mma_wait(2 * (K_BLOCKS - 1 - i) + K_BLOCKS, (parts[i],) + acc_v)
                            part = finished[0]
                            acc_v = finished[1:]
                        else:
                            part = warpgroup_mma_wait(2 * (K_BLOCKS - 1 - i) + K_BLOCKS, [parts[i]])
                        if PAIRED and i == K_BLOCKS - 1:
                            mbarrier.arrive(barriers.ds_free.index(0), count=1)
                        uses = (step // 2 if PAIRED else step) * K_BLOCKS + i
                        steps.leave(part, work.scale, HALF, uses, memory, barriers)
                elif SHAPE.values and not SHAPE.needs_q:
                    acc_v = steps.finish(K_BLOCKS, acc_v)
            if within + 1 < UNROLLED:
                following = (step + 1) % STAGES
                mbarrier.wait(barriers.q_ready.index(following), ((step + 1) // STAGES) & 1)
                products = steps.score(my_k, tile, memory.q, following, K_BLOCKS, SHAPE.held)
                if SHAPE.scores and SHAPE.values and SHAPE.needs_q:
                    acc_v = steps.finish(2 * K_BLOCKS, acc_v)
            row = rows.next_row(row, work)
        drift = drift * 2
        # The compiler would serialize products that are under way from one turn to the next.
        if SHAPE.scores:
            acc_k = steps.finish(0, acc_k)
        else:
            acc_v = steps.finish(0, acc_v)
        mbarrier.arrive(barriers.q_free.index((origin + turns * UNROLLED + UNROLLED - 1) % STAGES), count=1)

    steps.add_sums(acc_k, acc_v, work.scale, work, my_keys, SHAPE)
