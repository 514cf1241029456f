"""Heads divided among ranks (Ulysses): any number of them, without padding.

Rank r of `world` takes the r-th stretch of query heads, stretches differing by at most one, and the kv heads they read.
Where a kv head's query heads fall to several ranks, each of them gets the kv head: it is replicated, and its
gradient is the sum of what they find.
"""

from __future__ import annotations

from typing import NamedTuple


class Segment(NamedTuple):
    """Query heads of a share that read its kv heads in equal groups, as one kernel call needs it."""

    q: range  # within the share
    kv: range  # within the share


class HeadShare(NamedTuple):
    """The heads of one rank."""

    q: range
    kv: range
    segments: tuple[Segment, ...]


def head_share(q_heads: int, kv_heads: int, world: int, rank: int) -> HeadShare:
    """The heads that fall to `rank`. More ranks than query heads leave some with none."""
    base, extra = divmod(q_heads, world)
    begin = rank * base + min(rank, extra)
    q = range(begin, begin + base + (rank < extra))
    group = q_heads // kv_heads
    if not q:
        return HeadShare(q, range(0), ())
    kv = range(q.start // group, q[-1] // group + 1)
    # A group that is cut by the stretch's start or end has fewer query heads than the others: a call of its own.
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
    """Whether some kv head goes to more than one rank."""
    return sum(len(head_share(q_heads, kv_heads, world, rank).kv) for rank in range(world)) > kv_heads
