"""The Ulysses schedules: an all-to-all exchanges rows of all heads for all rows of some heads, and back.

Heads are divided without padding, whatever their number. Rank r of `world` takes the r-th run of query heads, runs
differing by at most one, and the kv heads they read. Where the query heads of a kv head belong to several ranks, each
of them gets the kv head: it is replicated, and its gradient is the sum over them.

Among all ranks this is "ulysses". Within nodes it leaves rank groups with the same heads, which run a ring
("ulysses+ring") or an all-gather ("ulysses+allgather") between nodes.
"""

from __future__ import annotations

from typing import NamedTuple


class Segment(NamedTuple):
    """Query heads of a share that read its kv heads in equal groups, as one kernel call requires."""

    q: range  # within the share
    kv: range  # within the share


class HeadShare(NamedTuple):
    """The heads of one rank."""

    q: range
    kv: range
    segments: tuple[Segment, ...]


def head_share(
    q_heads: int, kv_heads: int, world: int, rank: int, *, whole_groups: bool = False
) -> HeadShare:  # fmt: skip
    """The heads of `rank`. With more ranks than query heads some have none.

    With `whole_groups` all query heads of a kv head are on one rank: then no gradient is a sum over ranks.
    """
    if whole_groups:
        kv = head_share(kv_heads, kv_heads, world, rank).q
        size = q_heads // kv_heads
        q = range(kv.start * size, kv.stop * size)
        return HeadShare(q, kv, (Segment(range(len(q)), range(len(kv))),) if kv else ())
    base, extra = divmod(q_heads, world)
    begin = rank * base + min(rank, extra)
    q = range(begin, begin + base + (rank < extra))
    group = q_heads // kv_heads
    if not q:
        return HeadShare(q, range(0), ())
    kv = range(q.start // group, q[-1] // group + 1)
    # A GQA group that is cut by the start or end of the share has fewer query heads than the others: a call of its own.
    counts = [min(q.stop, (h + 1) * group) - max(q.start, h * group) for h in kv]
    segments: list[Segment] = []
    at = 0
    for h, count in enumerate(counts):
        last = segments[-1] if segments else None
        if last is not None and len(last.q) == len(last.kv) * count:
            segments[-1] = Segment(range(last.q.start, at + count), range(last.kv.start, h + 1))
        else:
            segments.append(Segment(range(at, at + count), range(h, h + 1)))
        at += count
    return HeadShare(q, kv, tuple(segments))


def replicated(q_heads: int, kv_heads: int, world: int) -> bool:
    """Whether some kv head belongs to more than one rank."""
    return sum(len(head_share(q_heads, kv_heads, world, rank).kv) for rank in range(world)) > kv_heads
