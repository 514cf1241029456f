"""Which positions of a sequence each rank stores, where prefill decided it: any ascending positions, as ranges.

`InterleavedShard` is the closed form for interleaved positions. Here the layout of the prefill decides,
chunk by chunk, and keys and values stay on the rank that computed them. Every rank tracks the positions of all ranks,
so all ranks make the same decisions without communication.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnmesh.core import ranges
from attnmesh.core.ranges import Ranges


class LocalPositions:
    """The positions of one sequence that one rank stores, ascending, in the order of its KV cache."""

    def __init__(self, positions: Ranges = ()) -> None:
        self.ranges = positions

    def __len__(self) -> int:
        return ranges.size(self.ranges)

    def count_below(self, position: int) -> int:
        """The number of stored positions below `position`: the index of the first stored one from there on."""
        return sum(ranges.rows_between(run, run.start, position).stop for run in self.ranges)

    def extend(self, more: Ranges) -> None:
        """Append positions, all of which are larger."""
        if len(more) == 1 and more[0] and self.ranges:  # the next token, of every sequence in every step
            whole = _one_range(self.ranges[-1], more[0])
            if whole is not None:
                self.ranges = (*self.ranges[:-1], whole)
                return
        self.ranges = _join((*self.ranges, *(run for run in more if run)))

    def truncated(self, length: int) -> LocalPositions:
        """The positions below `length`."""
        return LocalPositions(ranges.narrow(self.ranges, range(self.count_below(length))))


class SequenceShards:
    """The positions of one sequence on every rank; `local` are those of this rank."""

    def __init__(self, by_rank: Sequence[LocalPositions], rank: int) -> None:
        self.by_rank, self.rank = by_rank, rank

    @classmethod
    def empty(cls, world: int, rank: int) -> SequenceShards:
        """The shards of a sequence without tokens."""
        return cls([LocalPositions() for _ in range(world)], rank)

    @property
    def local(self) -> LocalPositions:
        """The positions that this rank stores."""
        return self.by_rank[self.rank]

    @property
    def counts(self) -> list[int]:
        """The number of positions per rank."""
        return [len(positions) for positions in self.by_rank]

    def extend(self, parts: Sequence[Ranges]) -> None:
        """Append positions `parts[r]` to rank r."""
        for positions, part in zip(self.by_rank, parts, strict=True):
            if part:
                positions.extend(part)

    def truncated(self, length: int) -> SequenceShards:
        """The shards of the sequence truncated to `length` tokens."""
        return SequenceShards([positions.truncated(length) for positions in self.by_rank], self.rank)


def key_range(local: Sequence[LocalPositions], new: Sequence[range], window: int | None) -> Tensor:
    """The stored keys that each new token attends to, `first` and `end`: int32 [2, B, T] on the CPU.

    `local[b]` are the stored positions of sequence b, and `new[b]` the positions of its new tokens.
    """
    pairs = list(zip(local, new, strict=True))
    end = [[stored.count_below(p + 1) for p in positions] for stored, positions in pairs]
    first = [
        [0 if window is None else stored.count_below(p + 1 - window) for p in positions] for stored, positions in pairs
    ]
    return torch.tensor([first, end], dtype=torch.int32, device="cpu")


def interleave(positions: range, world: int) -> list[Ranges]:
    """Consecutive positions assigned to the ranks in turn: position p goes to rank p % world."""
    if world == 1:
        return [(positions,) if positions else ()]
    parts = [positions[(rank - positions.start) % world :: world] for rank in range(world)]
    return [(part,) if part else () for part in parts]


def balance(positions: range, counts: Sequence[int]) -> list[Ranges]:
    """Consecutive positions, at least one per rank, divided so that ranks that store fewer (`counts`) get more.

    Truncation may take more positions from one rank than from another. Without this, the imbalance would accumulate.
    """
    level = min(counts)  # all ranks with fewer positions are filled up to this level: found by bisection
    above = max(counts) + len(positions) + 1
    while above - level > 1:
        middle = (level + above) // 2
        level, above = (middle, above) if sum(_fill_to(middle, counts)) <= len(positions) else (level, middle)
    sizes = _fill_to(level, counts)
    left = len(positions) - sum(sizes)
    for rank in [rank for rank, count in enumerate(counts) if count < level][:left]:
        sizes[rank] += 1
    ends = [sum(sizes[: rank + 1]) for rank in range(len(sizes))]
    return [(positions[end - size : end],) for end, size in zip(ends, sizes, strict=True)]


def _fill_to(level: int, counts: Sequence[int]) -> list[int]:
    return [max(1, level - count) for count in counts]


def _join(runs: Ranges) -> Ranges:
    """Adjacent ranges joined where possible: otherwise every decoded token would be a range of its own."""
    joined: list[range] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last is not None and (whole := _one_range(last, run)) is not None:
            joined[-1] = whole
        else:
            joined.append(run)
    return tuple(joined)


def _one_range(a: range, b: range) -> range | None:
    step = b[0] - a[-1]
    if (len(a) == 1 or a.step == step) and (len(b) == 1 or b.step == step):
        return range(a[0], b[-1] + 1, step)
    return None
