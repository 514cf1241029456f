"""The schedule of `triton_schedule` in Gluon: which units of which sequences a program attends over.

All warps of a program find the beginning of its partition in the list of units once. Then the program goes from
sequence to sequence. An item is the units of one sequence in the partition or, with a fixed split size, one unit.
"""

# Kernels are written in Gluon's language, whose names have no Python types.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# mypy: disallow-untyped-decorators=False, disallow-untyped-calls=False
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

KEYS = 64  # per tile
_KEYS = gl.constexpr(KEYS)


class Sources(NamedTuple):
    """The inputs that decide which keys a sequence attends to."""

    cur_pos: Any
    range_first: Any
    range_end: Any
    batch: Any
    capacity: Any
    window: Any


class Position(NamedTuple):
    """Where a program is in the list of units."""

    sequence: Any
    unit: Any  # of the sequence
    at: Any  # in the list
    stop: Any


class Item(NamedTuple):
    """Units of one sequence: tiles of 64 keys, of which [first, stop) belong to the item; without any, `tiles` is 0."""

    last: Any  # position of the last token of the sequence
    first: Any
    stop: Any
    inner: Any  # keys [inner, edge) are visible to all rows
    edge: Any
    begin: Any  # of the first tile
    tiles: Any
    units: Any
    starts: Any  # at the first unit of the sequence
    ends: Any  # with its last unit


@gluon.jit
def first_position(
    sources, partition, partitions, max_splits, TOKENS: gl.constexpr, UNIT: gl.constexpr, BATCH: gl.constexpr
):
    """The position of the first unit of a partition."""
    index = gl.arange(0, BATCH, layout=gl.BlockedLayout([1], [32], [4], [0]))
    _, first, end = _key_range(sources, index, TOKENS)
    count = _count_units(first, end, UNIT)
    total, partitions = _partition_units(count, partitions, max_splits)
    at = partition * total // partitions
    stop = gl.minimum((partition + 1) * total // partitions, total)
    before = gl.associative_scan(count, 0, _add)
    sequence = gl.sum((before <= at).to(gl.int32), 0).to(gl.int32)
    unit = at - gl.sum(gl.where(index < sequence, count, 0), 0)
    return Position(sequence, unit.to(gl.int32), at, stop)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _partition_units(count, partitions, max_splits):
    """`triton_schedule.partition_units`."""
    total = gl.sum(count, 0).to(gl.int64)
    min_units = total * 0 + 1
    if max_splits is not None:
        longest = gl.max(count, 0)
        alone = gl.maximum((longest + max_splits - 1) // max_splits, 1)
        among = gl.maximum((longest + max_splits - 3) // (max_splits - 1), 1)
        min_units = gl.where(longest == total, alone, among)
    return total, gl.minimum(partitions, gl.maximum(total // min_units, 1))


@gluon.jit
def _key_range(sources, index, TOKENS: gl.constexpr):
    """The last position of sequences, -1 if skipped or invalid, and the keys [first, end) that some token sees."""
    is_sequence = index < sources.batch
    last = gl.load(sources.cur_pos + index, mask=is_sequence, other=-1)
    last = gl.where(last < sources.capacity, gl.maximum(last, -1), -1).to(gl.int32)
    if sources.range_first is not None:
        first = gl.maximum(gl.load(sources.range_first + index * TOKENS, mask=is_sequence, other=0), 0)
        end = gl.load(sources.range_end + (index * TOKENS + (TOKENS - 1)), mask=is_sequence, other=0)
        end = gl.minimum(end, last + 1)
        some = first < end
        first, end = gl.where(some, first, 0).to(gl.int32), gl.where(some, end, 0).to(gl.int32)
    else:
        first, end = last * 0, last + 1
        if sources.window is not None:
            first = gl.maximum(last - (TOKENS - 1) - (sources.window - 1), 0).to(gl.int32)
    return last, first, end


@gluon.jit
def _count_units(first, end, UNIT: gl.constexpr):
    return gl.where(end > 0, (end + (UNIT - 1)) // UNIT - first // UNIT, 0)


@gluon.jit
def item_at(sources, position, TOKENS: gl.constexpr, UNIT: gl.constexpr, FIXED: gl.constexpr):
    """The item that begins at a position."""
    last, first, end = _key_range(sources, position.sequence, TOKENS)
    units = _count_units(first, end, UNIT)
    if FIXED:
        unit_end = gl.minimum(position.unit + 1, units)
    else:
        unit_end = gl.minimum(units, position.unit + (position.stop - position.at)).to(gl.int32)
    first_unit = first // UNIT
    stop = gl.minimum((first_unit + unit_end) * UNIT, end)
    # Keys that all tokens see: the first token has the first end, the last token the last beginning.
    if sources.range_first is not None:
        at = position.sequence * TOKENS
        inner = gl.load(sources.range_first + (at + (TOKENS - 1))).to(gl.int32)
        edge = gl.minimum(gl.load(sources.range_end + at), last + 1).to(gl.int32)
    else:
        inner, edge = last * 0, last - (TOKENS - 2)
        if sources.window is not None:
            inner = (last - (sources.window - 1)).to(gl.int32)
    first = gl.maximum(first, (first_unit + position.unit) * UNIT)
    begin = first // _KEYS * _KEYS
    tiles = gl.where(units > 0, (stop - begin + (_KEYS - 1)) // _KEYS, 0)
    return Item(
        last, first, stop, gl.maximum(inner, first), gl.minimum(edge, stop), begin, tiles, unit_end - position.unit,
        position.unit == 0, unit_end >= units,
    )  # fmt: skip


@gluon.jit
def after(position, item):
    """The position of the next item."""
    return Position(
        gl.where(item.ends, position.sequence + 1, position.sequence),
        gl.where(item.ends, 0, position.unit + item.units),
        position.at + item.units,
        position.stop,
    )


@gluon.jit
def row_bounds(sources, item, sequence, token, is_row, TOKENS: gl.constexpr):
    """The keys [first, end) of the item that each row sees; none for rows that do not exist."""
    if sources.range_first is not None:
        at = sequence * TOKENS + token
        first = gl.load(sources.range_first + at, mask=is_row, other=0)
        end = gl.minimum(gl.load(sources.range_end + at, mask=is_row, other=0), item.last + 1)
        first = gl.maximum(gl.minimum(first, item.stop), 0).to(gl.int32)
        end = gl.maximum(end, 0).to(gl.int32)
    else:
        end = item.last - (TOKENS - 2) + token
        first = end * 0
        if sources.window is not None:
            first = (end - sources.window).to(gl.int32)
    return gl.maximum(first, item.first), gl.where(is_row, gl.minimum(end, item.stop), 0)
