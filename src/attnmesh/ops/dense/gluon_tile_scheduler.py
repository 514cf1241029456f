"""The tile scheduler of the dense forward in Gluon: the work tiles of a program, the keys that each needs, and records.

A work tile is a tile of query rows of one head, or of a few heads that share a KV head. The producer decides which keys
a work tile needs and publishes a record for each part of the mask, which the consumers read. See `gluon_forward`.
"""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 - Gluon has no starred elements
from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from attnmesh.ops.dense.gluon_alibi import ROWS

CONSUMERS = 2  # groups of warps, with ROWS rows each
_TILE_ROWS = gl.constexpr(CONSUMERS * ROWS)
RECORD = 8  # integers of a record: row, head, batch, begin, inner, edge, stop; one is not used
_RECORD = gl.constexpr(RECORD)


# The lengths, the query heads, the query heads of a group, the work tiles, and the head tiles of a section.
Sizes = namedtuple("Sizes", "q_len kv_len q_heads group work_tiles section")


@gluon.jit
def as_matrix(memory, stage):
    """A block of a tile in shared memory as a matrix: heads and rows are one dimension."""
    ROWS: gl.constexpr = memory.shape[2] * memory.shape[3]
    return memory.index(stage).reshape([ROWS, memory.shape[4]])


@gluon.jit
def locate(work_tile, sizes, SHAPE: gl.constexpr):
    """The first row, head and sequence of a work tile. Last rows come first in a section: most have the most keys."""
    TILE: gl.constexpr = _TILE_ROWS // SHAPE.pack
    tile_count = (sizes.q_len + TILE - 1) // TILE
    within = work_tile % (sizes.section * tile_count)
    begin = work_tile // (sizes.section * tile_count) * sizes.section
    section = gl.minimum(sizes.section, sizes.work_tiles // tile_count - begin)
    head_tile = begin + within % section
    heads = sizes.q_heads // SHAPE.pack
    return (tile_count - 1 - within // section) * TILE, head_tile % heads * SHAPE.pack, head_tile // heads


@gluon.jit
def key_phases(mask, part, batch, row_begin, row_stop, sizes, SHAPE: gl.constexpr):
    """The keys [begin, stop) that rows [row_begin, row_stop) see; all of them see [inner, edge), in whole tiles."""
    KEYS: gl.constexpr = SHAPE.keys
    if SHAPE.parts > 0:
        first, end = _at_part(mask, part, batch)
        begin, full_begin = gl.load(first + row_begin), gl.load(first + (row_stop - 1))
        full_end, stop = gl.load(end + row_begin), gl.load(end + (row_stop - 1))
        if (begin == full_end) | (full_begin == stop):
            # The first or the last row is empty. Its bounds may be far from the bounds of the other rows.
            rows = row_begin + gl.arange(0, _TILE_ROWS, layout=gl.BlockedLayout([1], [32], [1], [0]))
            real = rows < row_stop
            row_first = gl.load(first + rows, mask=real, other=0)
            row_end = gl.load(end + rows, mask=real, other=0)
            some = row_first < row_end
            begin = gl.min(gl.where(some, row_first, sizes.kv_len), 0)
            stop = gl.max(gl.where(some, row_end, 0), 0)
    else:
        begin, full_begin = row_begin * 0, row_begin * 0
        full_end, stop = (row_begin + 1, row_stop) if SHAPE.causal else (sizes.kv_len, sizes.kv_len)
    begin = begin // KEYS * KEYS
    inner = gl.maximum(gl.minimum((full_begin + KEYS - 1) // KEYS * KEYS, stop), begin)
    edge = gl.maximum(gl.minimum(full_end, stop) // KEYS * KEYS, inner)
    return begin, inner, edge, gl.maximum(stop, begin)


@gluon.jit
def visible_keys(mask, part, batch, rows, sizes, SHAPE: gl.constexpr):
    """The keys [first, end) that each row sees; none for rows beyond the last."""
    real = rows < sizes.q_len
    if SHAPE.parts > 0:
        first, end = _at_part(mask, part, batch)
        row_first = gl.load(first + rows, mask=real, other=0)
        row_end = gl.load(end + rows, mask=real, other=0)
    else:
        row_first = rows * 0
        row_end = gl.where(real, rows + 1 if SHAPE.causal else sizes.kv_len, 0)
    return row_first, row_end


@gluon.jit
def _at_part(mask, part, batch):
    """The bounds of one part of the mask of one sequence."""
    offset = part.to(gl.int64) * mask[2][0] + batch.to(gl.int64) * mask[2][1]
    return mask[0] + offset, mask[1] + offset


@gluon.jit
def publish(work, barriers, record, fields):
    """Writes work record `record`, as soon as all consumers have read record `record - 2` from the same slot."""
    slot = record % 2
    mbarrier.wait(barriers.work_free.index(slot), (record // 2 & 1) ^ 1)
    field = gl.arange(0, _RECORD, layout=gl.BlockedLayout([1], [32], [1], [0]))
    values = field * 0
    for i in gl.static_range(len(fields)):
        values = gl.where(field == i, fields[i], values)
    work.index(slot).store(values.to(gl.int32))
    mbarrier.arrive(barriers.work_ready.index(slot), count=1)


@gluon.jit
def read(work, barriers, record):
    """The fields of a work record: row, head, batch, begin, inner, edge, stop."""
    slot = record % 2
    mbarrier.wait(barriers.work_ready.index(slot), record // 2 & 1)
    layout: gl.constexpr = gl.BlockedLayout([_RECORD], [32], [4], [0])  # each thread has all fields
    values = work.index(slot).load(layout)
    field = gl.arange(0, _RECORD, layout=layout)
    fields = ()
    for i in gl.static_range(7):
        fields = fields + (gl.sum(gl.where(field == i, values, 0), 0),)
    return fields
