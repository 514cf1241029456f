"""Attention forward on Hopper in Gluon: one pass over the visible keys, from a state to a state.

The schedule is FlashAttention-3's. A program is persistent and processes one work tile after another: query rows of one
head, or of a few heads that share a KV head. Its warps have two roles:

- one warp, the producer, decides which keys a work tile needs and lets the copy engine (TMA) fetch queries, keys and
  values into shared memory, a few tiles ahead;
- two groups of four warps, the consumers, have 64 of the rows each. A consumer starts the products of the queries
  with tile i + 1 of the keys before the products of the weights with tile i of the values, and computes the softmax
  while the tensor cores work. Consumers take turns: one computes its softmax during the products of the other.

Synchronization: the barriers of a stage of keys (or values) are `ready`, which the copy engine completes, and `free`,
at which every consumer arrives. Queries have the same pair per consumer. The producer writes which keys a work tile
needs, for each part of its mask, into `work`, a ring of two records. All wait by the parity of a barrier's phase,
counted over all work tiles: stage `step % STAGES` is used for the `step // STAGES`-th time; waiting for the phase
before the first succeeds at once. A record with row -1 ends the loop.

The epilogue of a work tile merges the earlier state, where there is one: until then it has time to arrive. Where shared
memory has room, each consumer has a float32 tile there. The producer fetches the state into it, the consumer replaces
it by the new state, and the copy engine stores the new state while the next work tile begins (barriers `state_ready`
and `state_free`). Where values are wider than 128 and there is no room, a work tile begins with its state.

Masks are the same as in the Triton kernels (see `triton_tiles`): in each part, a row attends to one interval of keys.
Tiles of keys that all rows see need no mask, and tiles that no row sees are not loaded. The copy engine reads zeros
beyond the ends of q, k and v: rows there are masked, and columns there fill a tile that is wider than the head dim.
"""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 - Gluon has no starred elements
from collections import namedtuple
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attnmesh.core.state import State
from attnmesh.ops.dense.call import is_loadable, loadable
from attnmesh.ops.dense.gluon_alibi import ROWS, first_scores, has_later_keys, key_distances, product_layout, row_terms
from attnmesh.ops.dense.gluon_online_softmax import factor_of, initial, operand, rescale, softmax
from attnmesh.ops.dense.gluon_producer import load
from attnmesh.ops.dense.gluon_state import IN_PLACE, NEW, OTHER, join_state, load_lse, load_state, release, store_state
from attnmesh.ops.dense.gluon_tile_scheduler import CONSUMERS, RECORD, Sizes, as_matrix, read, visible_keys
from attnmesh.ops.dense.triton_tiles import LENGTHS, PLAIN, Bounds, ScoreTerms, blocks_of, row_strides
from attnmesh.ops.gluon_barriers import invalidate_barriers, new_barriers
from attnmesh.ops.gluon_descriptor import descriptor
from attnmesh.ops.gluon_exponents import lowest_of, row_max_of
from attnmesh.ops.launch import Launch, Recent, multiprocessors, prepare, signature
from attnmesh.ops.merge import new_state

# Lengths and heads, and the strides of what has one element per row: each would recompile for another alignment.
_NOT_SPECIALIZED = [
    *LENGTHS, "q_heads", "group", "work_tiles", "section", "scale", "softcap", "part_stride", "sequence_stride",
    *(f"{name}_{dim}" for name in ("state_lse", "lse") for dim in ("batch", "head", "row")),
    "step", "q_first", "q_split", "q_jump", "k_split", "k_jump",
]  # fmt: skip
_ROWS = gl.constexpr(ROWS)
_CONSUMERS, _RECORD = gl.constexpr(CONSUMERS), gl.constexpr(RECORD)
_NEW, _IN_PLACE = gl.constexpr(NEW), gl.constexpr(IN_PLACE)


class Shape(NamedTuple):
    """The constants of a kernel."""

    causal: Any
    parts: Any  # of the mask by bounds; 0 without
    pack: Any  # heads of a tile
    keys: Any
    stages: Any
    v_main: Any  # columns of the blocks of values
    v_rest: Any
    v_dim: Any  # columns that exist
    state: Any  # NEW, IN_PLACE or OTHER
    staged: Any  # whether float32 tiles pass through shared memory
    even: Any  # whether there are slopes, and even positions
    later: Any  # whether there are slopes, and keys that may come after their rows
    biased: Any  # whether products begin from the terms of slopes


# Shared memory: tiles, which are tuples of one or two blocks of columns, with those of the state None if not staged;
# records; and the distances of keys from a work tile's first row, None without slopes, or if even.
Memory = namedtuple("Memory", "q k v state work distances")
# The barriers of the stages, records and consumers.
Barriers = namedtuple(
    "Barriers", "work_ready work_free q_ready q_free turn k_ready k_free v_ready v_free state_ready state_free"
)


class GluonTiles(NamedTuple):
    """Keys per tile, how many tiles of keys and of values are in flight, and the order of the work tiles.

    The work tiles of `section` KV heads come together, the longest first: they share keys in the L2 cache. None: the
    work tiles of all heads, or of one head where the call is causal and long, or has many heads or sequences.
    """

    keys: int
    stages: int
    section: int | None = None


# By the widths of keys and values, ascending: a call takes the first entry that is wide enough.
TILES = {
    (64, 64): GluonTiles(128, 3),
    (96, 96): GluonTiles(128, 2),
    (128, 128): GluonTiles(128, 2),
    (192, 128): GluonTiles(128, 2),
    (192, 192): GluonTiles(64, 2),
    (256, 256): GluonTiles(64, 2),
}
_WIDTHS = sorted({width for widths in TILES for width in widths})
_SHARED_BYTES = 226 * 1024  # for tiles; the rest of 227 KiB is for barriers and records
_LONG = 32768  # rows, from which the keys of all heads do not stay in the L2 cache
_CACHED = 100e6  # bytes of all keys and values, up to which the heads need not come one after another
# Registers per thread; the first consumer has the rest.
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = gl.constexpr(232), gl.constexpr(40)


def why_not(q: Tensor, v: Tensor) -> str | None:
    """The reason why the kernel cannot serve these queries and values; None if it can."""
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"its kernel takes fp16 and bf16, not {q.dtype}"
    if any(x.shape[-1] % 8 or x.shape[-1] > _WIDTHS[-1] for x in (q, v)):
        return (
            f"its kernel takes head_dim 8, 16, 24, ..., {_WIDTHS[-1]}, not {q.shape[-1]} (keys) and {v.shape[-1]} "
            "(values)"
        )
    return None


def pick_tiles(key_dim: int, value_dim: int) -> GluonTiles:
    """The tiles for keys and values of these widths."""
    return next(tiles for (d, d_v), tiles in TILES.items() if d >= key_dim and d_v >= value_dim)


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, bounds: tuple[Tensor, Tensor] | Bounds | None,
    state: State | None, out_dtype: torch.dtype, terms: ScoreTerms = PLAIN, sinks: Tensor | None = None,
    tiles: GluonTiles | None = None, pack: int | None = None,
) -> State:  # fmt: skip
    """`triton_forward.forward` for 16-bit inputs on Hopper; see `why_not`.

    `pack` is the number of heads of a group that share a tile; by default 1, or more where rows are few.
    """
    visible = Bounds.of(bounds)
    in_place = state is not None and out_dtype == torch.float32
    state_out, state_lse = state or (None, None)
    sinks = None if sinks is None else sinks.contiguous()
    given = q, k, v, visible.first, visible.end, state_out, state_lse, sinks
    alibi = terms[1:4]
    of_alibi = None if terms.slopes is None else (*signature(*alibi), terms.even)
    key = signature(*given), scale, causal, out_dtype, terms.softcap, of_alibi, tiles, pack
    launch = _known.get(key)
    if launch is None:
        loaded = loadable(q), loadable(k), loadable(v)
        if scale <= 0:  # the kernel takes the maximum before it scales
            loaded = (-loaded[0] if scale < 0 else torch.zeros_like(loaded[0])), *loaded[1:]
            scale = -scale if scale < 0 else 1.0
        if any(x is not y for x, y in zip(loaded, given, strict=False)):
            return forward(
                *loaded, scale=scale, causal=causal, bounds=bounds, state=state, out_dtype=out_dtype, terms=terms,
                sinks=sinks, tiles=tiles, pack=pack,
            )  # fmt: skip
    result = state if state is not None and in_place else new_state(q, v.shape[3], out_dtype)
    if launch is not None:
        launch(*given, *alibi, *result)
    elif result.out.numel():
        with torch.cuda.device_of(q):
            launch = _first_launch(given, visible, result, scale, causal, terms, in_place, tiles, pack)
        if launch is not None:
            _known.add(key, launch)
    return result


_known: Recent[Launch] = Recent()


def _first_launch(
    given: tuple[Any, ...], visible: Bounds, result: State, scale: float, causal: bool, terms: ScoreTerms,
    in_place: bool, tiles: GluonTiles | None, pack: int | None,
) -> Launch | None:  # fmt: skip
    """Launches the kernel, and returns what repeats it; None without keys."""
    q, k, v, _, _, state_out, state_lse, sinks = given
    if in_place:  # the kernel knows it as the result
        state_out, state_lse = None, None
    batch, q_heads, q_len, key_dim = q.shape
    kv_heads, kv_len, value_dim = v.shape[1:]
    if kv_len == 0:  # the copy engine takes no empty tensor
        k, v = (x.new_zeros(*x.shape[:2], 1, x.shape[3]) for x in (k, v))
    tiles = tiles or pick_tiles(key_dim, value_dim)
    pack = pack or _packed_heads(q_heads // kv_heads, q_len)
    rows = ROWS // pack
    state_strides, out_strides = row_strides(state_out=state_out, out=result.out)
    key_blocks, value_blocks = (blocks_of(next(width for width in _WIDTHS if width >= d)) for d in (key_dim, value_dim))
    q_blocks = _descriptors(q, pack, rows, key_blocks)
    k_blocks = _descriptors(k, 1, tiles.keys, key_blocks)
    v_blocks = _descriptors(v, 1, tiles.keys, value_blocks)
    wide = result.out if result.out.dtype == torch.float32 else state_out
    staged = wide is not None and is_loadable(wide) and _has_room(tiles, sum(key_blocks), sum(value_blocks))
    state_blocks = _descriptors(wide, pack, rows, value_blocks) if wide is not None and staged else [None, None]
    head_tiles = batch * (q_heads // pack)
    work_tiles = triton.cdiv(q_len, CONSUMERS * rows) * head_tiles
    apart = causal and (q_len >= _LONG or 2 * (k.numel() + v.numel()) > _CACHED)
    kv_section = tiles.section or (1 if apart else None)
    section = head_tiles if kv_section is None else kv_section * (q_heads // kv_heads // pack)
    grid = (min(work_tiles, multiprocessors(q.device, 3)),)  # in the emulation, a program has several work tiles, too
    even = None if terms.slopes is None or terms.even is None or terms.even.k_split % tiles.keys else terms.even
    positions = (None, None) if even else (terms.q_positions, terms.k_positions)
    args = (
        *q_blocks, *k_blocks, *v_blocks, *state_blocks, visible.first, visible.end, *visible.strides,
        state_out, *state_strides, state_lse, *((0, 0, 0) if state_lse is None else state_lse.stride()),
        result.out, *out_strides, result.lse, *result.lse.stride(), sinks,
        q_len, kv_len, q_heads, q_heads // kv_heads, work_tiles, section, scale,
        terms.softcap, terms.slopes, *positions, *(even or (0,) * 6),
    )  # fmt: skip
    shape = Shape(
        causal, 0 if visible.first is None else visible.parts, pack, tiles.keys, tiles.stages, *value_blocks,
        value_dim, IN_PLACE if in_place else NEW if state_out is None else OTHER, staged, even is not None,
        terms.slopes is not None and (even is None or even.has_later_keys(causal)),
        terms.slopes is not None and terms.softcap is None,
    )  # fmt: skip
    options = {"SHAPE": shape, "num_warps": 4, "launch_pdl": True}
    if kv_len == 0:
        _forward_kernel[grid](*args, **options)
        return None
    return prepare(_forward_kernel, grid, args, (*given, *terms[1:4], *result), **options)


def _packed_heads(group: int, q_len: int) -> int:
    """The heads of a group in a tile: more where rows are few, at most 8, since eight rows lie in one swizzle."""
    pack = 1
    while pack < 8 and group % (2 * pack) == 0 and 2 * pack * q_len <= CONSUMERS * ROWS:
        pack *= 2
    return pack


def _has_room(tiles: GluonTiles, key_dim: int, value_dim: int) -> bool:
    """Whether shared memory holds a float32 tile of every consumer besides the queries, keys and values."""
    halves = CONSUMERS * ROWS * key_dim + tiles.stages * tiles.keys * (key_dim + value_dim)
    return 2 * halves + 4 * CONSUMERS * ROWS * value_dim <= _SHARED_BYTES


def _descriptors(x: Tensor, heads: int, rows: int, blocks: tuple[int, int]) -> list[Any]:
    """The copy engine's view of x [B, H, S, D], in tiles of `rows` rows of `heads` heads, for each block of columns."""
    return [
        descriptor(x, [1, heads, rows, width], begin) if width else None
        for begin, width in zip((0, blocks[0]), blocks, strict=True)
    ]


@gluon.jit(do_not_specialize=_NOT_SPECIALIZED)
def _forward_kernel(
    q_main, q_rest, k_main, k_rest, v_main, v_rest, state_main, state_rest, first, end,
    part_stride: gl.int64, sequence_stride: gl.int64,
    state_out, state_out_batch: gl.int64, state_out_head: gl.int64, state_out_row: gl.int64,
    state_lse, state_lse_batch: gl.int64, state_lse_head: gl.int64, state_lse_row: gl.int64,
    out, out_batch: gl.int64, out_head: gl.int64, out_row: gl.int64,
    lse, lse_batch: gl.int64, lse_head: gl.int64, lse_row: gl.int64, sinks,
    q_len, kv_len, q_heads, group, work_tiles, section, scale, softcap, slopes, q_positions, k_positions,
    step, q_first, q_split, q_jump, k_split, k_jump, SHAPE: gl.constexpr,
):  # fmt: skip
    gdc_launch_dependents()  # the next stage of a ring may be launched: it waits for the end of this stage itself
    STAGES: gl.constexpr = SHAPE.stages
    q_blocks, k_blocks, v_blocks = (q_main, q_rest), (k_main, k_rest), (v_main, v_rest)
    state_blocks = (state_main, state_rest)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # Of distances, one tile more: keys of a stage are replaced before all consumers have computed their softmax.
    DISTANCES: gl.constexpr = STAGES + 1
    memory = Memory(
        q=_allocate(q_blocks, _CONSUMERS),
        k=_allocate(k_blocks, STAGES),
        v=_allocate(v_blocks, STAGES),
        state=_allocate(state_blocks, _CONSUMERS) if SHAPE.staged else None,
        work=gl.allocate_shared_memory(gl.int32, [2, _RECORD], flat),
        distances=None if k_positions is None else gl.allocate_shared_memory(gl.float32, [DISTANCES, SHAPE.keys], flat),
    )
    barriers = Barriers(
        work_ready=new_barriers(2, 1),
        work_free=new_barriers(2, _CONSUMERS),
        q_ready=new_barriers(_CONSUMERS, 1),
        q_free=new_barriers(_CONSUMERS, 1),
        turn=new_barriers(_CONSUMERS, 1),
        k_ready=new_barriers(STAGES, 1 if k_positions is None else 2),  # the copies, and the distances
        k_free=new_barriers(STAGES, _CONSUMERS),
        v_ready=new_barriers(STAGES, 1),
        v_free=new_barriers(STAGES, _CONSUMERS),
        state_ready=new_barriers(_CONSUMERS, 1),
        state_free=new_barriers(_CONSUMERS, 1),
    )
    fence_async_shared()

    mask = (first, end, (part_stride, sequence_stride))
    state_out_strides = (state_out_batch, state_out_head, state_out_row)
    state_lse_strides = (state_lse_batch, state_lse_head, state_lse_row)
    after = (out, (out_batch, out_head, out_row), lse, (lse_batch, lse_head, lse_row), sinks)
    before = after[:4] if SHAPE.state == _IN_PLACE else (state_out, state_out_strides, state_lse, state_lse_strides)
    sizes = Sizes(q_len, kv_len, q_heads, group, work_tiles, section)
    alibi = (slopes, q_positions, k_positions, (step, q_first, q_split, q_jump, k_split, k_jump))
    gdc_wait()
    gl.warp_specialize(
        [(_attend, (0, memory, barriers, mask, before, after, state_blocks, sizes, scale, softcap, alibi, SHAPE)),
         (_attend, (1, memory, barriers, mask, before, after, state_blocks, sizes, scale, softcap, alibi, SHAPE)),
         (load, (q_blocks, k_blocks, v_blocks, state_blocks, memory, barriers, mask, sizes, alibi, SHAPE))],
        [4, 1], [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip
    invalidate_barriers(barriers)


@gluon.jit
def _allocate(blocks, STAGES: gl.constexpr):
    """Shared memory for the blocks of some tiles."""
    result = (_allocate_block(blocks[0], STAGES),)
    if blocks[1] is not None:
        result = result + (_allocate_block(blocks[1], STAGES),)
    return result


@gluon.jit
def _allocate_block(block, STAGES: gl.constexpr):
    shape: gl.constexpr = [STAGES] + block.block_type.shape
    return gl.allocate_shared_memory(block.dtype, shape, block.layout)


@gluon.jit
def _attend(
    INDEX: gl.constexpr, memory, barriers, mask, before, after, state_blocks, sizes, scale, softcap, alibi,
    SHAPE: gl.constexpr,
):  # fmt: skip
    """A consumer: the attention of 64 rows of every work tile, from the earlier state to the new state."""
    KEYS: gl.constexpr = SHAPE.keys
    STAGES: gl.constexpr = SHAPE.stages
    PARTS: gl.constexpr = 1 if SHAPE.parts == 0 else SHAPE.parts
    down: gl.constexpr = gl.SliceLayout(1, product_layout(KEYS))
    FIRST: gl.constexpr = 1 if INDEX == 0 else 0
    APART: gl.constexpr = _ROWS // SHAPE.pack  # rows of one head
    # From the state instead of from nothing: registers do not hold both in the end.
    CONTINUES: gl.constexpr = SHAPE.state != _NEW and not SHAPE.staged and SHAPE.v_main + SHAPE.v_rest > 128
    factor = factor_of(scale, softcap)
    step = 0  # tiles of keys so far, of all work tiles
    turns = 0  # of this consumer so far
    record = 0  # records so far
    served = 0  # work tiles so far that see any key
    count = 0  # work tiles so far
    tile_begin, head, batch, begin, inner, edge, stop = read(memory.work, barriers, record)
    while tile_begin >= 0:
        row_begin = tile_begin + INDEX * APART
        place = (batch, head, row_begin, sizes)
        within = gl.arange(0, _ROWS, layout=down)
        rows = row_begin + within % APART
        slopes, row_distances = None, None
        if alibi[0] is not None:
            slopes, row_distances = row_terms(alibi, factor, head, within, tile_begin, rows, sizes, SHAPE, down)
        acc, total, raw_max = initial(factor, SHAPE, down)
        state_lse = None
        if CONTINUES:
            acc, total, row_max = load_state(before, place, SHAPE, down)
            acc = rescale(acc, total, True)  # an empty state may hold NaN
            raw_max = gl.where(total == 0.0, lowest_of(factor), row_max / factor)
            if alibi[0] is not None:
                raw_max += slopes * row_distances  # type: ignore[operator]
        elif SHAPE.state != _NEW:
            # Not needed before the end of the work tile.
            state_lse = load_lse(before, place, SHAPE, down)
        seen = served
        if PARTS > 1:
            release(barriers, INDEX, SHAPE)
        for part in range(PARTS):
            if part > 0:
                tile_begin, head, batch, begin, inner, edge, stop = read(memory.work, barriers, record)
            mbarrier.arrive(barriers.work_free.index(record % 2), count=1)
            record += 1
            if stop > begin:
                row_first, row_end = visible_keys(mask, part, batch, rows, sizes, SHAPE)
                terms = ()
                if alibi[0] is not None:
                    terms = (slopes, row_distances, has_later_keys(alibi, tile_begin, edge, SHAPE))
                of_rows = (inner, edge, row_first, row_end, scale, softcap, terms)
                mbarrier.wait(barriers.q_ready.index(INDEX), served & 1)
                seen = served + 1

                # The first tile has no products of weights and values to overlap with.
                stage = step % STAGES
                phase = step // STAGES & 1
                mbarrier.wait(barriers.k_ready.index(stage), phase)
                near = key_distances(memory, alibi, step, tile_begin, begin, SHAPE)
                scores = _score(memory, INDEX, stage, alibi, slopes, near, tile_begin, begin, SHAPE)
                if PARTS == 1:
                    release(barriers, INDEX, SHAPE)
                scores = warpgroup_mma_wait(0, [scores])
                mbarrier.arrive(barriers.k_free.index(stage), count=1)
                weights, acc_scale, total, raw_max = softmax(scores, total, raw_max, begin, near, of_rows, SHAPE)
                if PARTS > 1 or CONTINUES:
                    acc = rescale(acc, acc_scale)
                weights = operand(weights, memory, SHAPE)
                for key_begin in range(begin + KEYS, stop, KEYS):
                    next_stage = (step + 1) % STAGES
                    mbarrier.wait(barriers.turn.index(INDEX), (turns & 1) ^ FIRST)
                    mbarrier.wait(barriers.k_ready.index(next_stage), (step + 1) // STAGES & 1)
                    next_near = key_distances(memory, alibi, step + 1, tile_begin, key_begin, SHAPE)
                    scores = _score(memory, INDEX, next_stage, alibi, slopes, next_near, tile_begin, key_begin, SHAPE)
                    mbarrier.wait(barriers.v_ready.index(stage), phase)
                    sums = _add_values(acc, weights, memory, stage)
                    mbarrier.arrive(barriers.turn.index(1 - INDEX), count=1)
                    turns += 1
                    scores = warpgroup_mma_wait(1 if SHAPE.v_rest == 0 else 2, [scores])
                    mbarrier.arrive(barriers.k_free.index(next_stage), count=1)
                    next_weights, acc_scale, total, raw_max = softmax(
                        scores, total, raw_max, key_begin, next_near, of_rows, SHAPE
                    )
                    # Succeeds at once. Without it, the compiler moves the softmax after the end of the products.
                    mbarrier.wait(barriers.v_ready.index(stage), phase)
                    acc = _finish(sums, weights)
                    mbarrier.arrive(barriers.v_free.index(stage), count=1)
                    acc = rescale(acc, acc_scale)
                    weights = operand(next_weights, memory, SHAPE)
                    step += 1
                    stage = next_stage
                    phase = step // STAGES & 1
                if PARTS == 1:
                    mbarrier.arrive(barriers.q_free.index(INDEX), count=1)
                mbarrier.wait(barriers.v_ready.index(stage), phase)
                acc = _finish(_add_values(acc, weights, memory, stage), weights)
                mbarrier.arrive(barriers.v_free.index(stage), count=1)
                step += 1
            elif PARTS == 1:
                release(barriers, INDEX, SHAPE)
        if (PARTS > 1) & (seen > served):
            mbarrier.arrive(barriers.q_free.index(INDEX), count=1)
        served = seen
        place = (batch, head, row_begin, sizes)  # as in the last record: the compiler does not know that it is the same
        row_max = row_max_of(raw_max, factor)
        if alibi[0] is not None:
            row_max -= slopes * row_distances * factor  # type: ignore[operator]
        if SHAPE.state != _NEW and not CONTINUES:
            if SHAPE.staged:
                mbarrier.wait(barriers.state_ready.index(INDEX), count & 1)
            acc, total, row_max = join_state(before, memory.state, state_lse, acc, total, row_max, place, INDEX, SHAPE)
        store_state(after, state_blocks, memory.state, acc, total, row_max, place, INDEX, SHAPE, down)
        count += 1
        tile_begin, head, batch, begin, inner, edge, stop = read(memory.work, barriers, record)
    if SHAPE.staged:
        tma.store_wait(0)


@gluon.jit
def _score(memory, INDEX: gl.constexpr, stage, alibi, slopes, near, tile_begin, key_begin, SHAPE: gl.constexpr):
    """Starts the products of this consumer's queries with a tile of keys."""
    KEYS: gl.constexpr = SHAPE.keys
    scores = gl.zeros([_ROWS, KEYS], gl.float32, product_layout(KEYS))
    if SHAPE.biased:
        scores = first_scores(alibi, slopes, near, tile_begin, key_begin, SHAPE)
    for i in gl.static_range(len(memory.k)):
        q_tile, k_tile = as_matrix(memory.q[i], INDEX), as_matrix(memory.k[i], stage).permute([1, 0])
        scores = warpgroup_mma(q_tile, k_tile, scores, use_acc=SHAPE.biased or i > 0, is_async=True)
    return scores


@gluon.jit
def _add_values(acc, weights, memory, stage):
    """Starts acc + weights @ values."""
    result = ()
    for i in gl.static_range(len(memory.v)):
        result = result + (warpgroup_mma(weights, as_matrix(memory.v[i], stage), acc[i], is_async=True),)
    return result


@gluon.jit
def _finish(sums, weights):
    """Waits for all products. Until then the weights have to stay in their registers."""
    return warpgroup_mma_wait(0, sums + (weights,))[:-1]
