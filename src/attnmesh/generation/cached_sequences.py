"""`GroupCache`: the sequences that a group of ranks caches, as metadata: token ids, positions and blocks per rank.

Every rank has one for every group, so that all ranks schedule alike without messages. It counts blocks as `BlockCache`
does: sequences with a common prefix share its blocks, and a block that others use is copied before it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attnmesh.core import ranges
from attnmesh.core.ranges import Ranges
from attnmesh.generation.windows import KeptPositions
from attnmesh.parallel.decode.positions import SequenceShards

Shard = Callable[[Sequence[int], range], Sequence[Ranges]]
"""The new positions that each rank stores, where the ranks store so many positions before them."""

Growth = dict[int, Ranges]
"""The new positions of a sequence that each rank stores, without ranks that store none."""

_COMPARED = 1024  # tokens that are compared at a time


@dataclass(eq=False)
class CachedSequence:
    """A sequence in a `GroupCache`: `blocks[r]` are its blocks on rank r, which stores `counts[r]` of its tokens."""

    ids: list[int]
    shards: SequenceShards
    counts: list[int]
    blocks: list[list[int]]
    kept: KeptPositions | None = None  # in layers that keep a window only; None if there are none
    active: bool = True  # False once it is only kept for reuse


class Prefix(NamedTuple):
    """The first `length` tokens of a prompt, which `source` has; `common` are those that some sequence began with."""

    source: CachedSequence | None
    length: int
    common: int


@dataclass(frozen=True)
class CacheLimits:
    """What the cache of one rank holds."""

    blocks: int
    block_size: int
    max_sequences: int
    max_length: int  # tokens of one sequence on one rank


class _RankBlocks:
    """The blocks of one rank in use, with the number of all sequences and of active sequences that refer to each."""

    def __init__(self) -> None:
        self.references: dict[int, int] = {}
        self.active: dict[int, int] = {}
        self._next = 0

    def new(self) -> int:
        """A block of one active sequence."""
        self._next += 1
        self.references[self._next] = self.active[self._next] = 1
        return self._next

    def add(self, blocks: Iterable[int]) -> None:
        """Count one more sequence, which is active."""
        _add(self.references, blocks)
        _add(self.active, blocks)

    def remove(self, blocks: Iterable[int], active: bool) -> None:
        """Count one sequence less."""
        _remove(self.references, blocks)
        if active:
            _remove(self.active, blocks)

    def activate(self, blocks: Iterable[int]) -> None:
        """Count a sequence as active."""
        _add(self.active, blocks)

    def deactivate(self, blocks: Iterable[int]) -> None:
        """Count a sequence as inactive."""
        _remove(self.active, blocks)


class GroupCache:
    """The cached sequences of `world` ranks, the least recently used first. Inactive ones may be evicted.

    `nothing_kept` is what an empty sequence keeps in layers with a window, if these have a cache of their own. That one
    has room for all sequences: its blocks are not counted.
    """

    def __init__(
        self, world: int, shard: Shard, limits: CacheLimits, nothing_kept: KeptPositions | None = None
    ) -> None:
        self._world, self._shard, self.limits, self._nothing_kept = world, shard, limits, nothing_kept
        self.clear()

    @property
    def used(self) -> list[int]:
        """The blocks in use on each rank."""
        return [len(blocks.references) for blocks in self._blocks]

    def clear(self) -> None:
        """Forget all sequences."""
        self.sequences: list[CachedSequence] = []
        self._blocks = [_RankBlocks() for _ in range(self._world)]

    def longest_prefix(self, ids: Sequence[int]) -> Prefix:
        """The longest prefix that a sequence has; the last token is always computed again."""
        best: CachedSequence | None = None
        longest = most = 0
        for sequence in self.sequences:
            common = min(common_prefix(sequence.ids, ids), len(ids) - 1)
            reusable = common if sequence.kept is None else sequence.kept.reusable(common)
            if reusable > longest:
                best, longest = sequence, reusable
            most = max(most, common)
        return Prefix(best, longest, most)

    # Room.

    def growth(self, sequence: CachedSequence, tokens: int) -> Growth:
        """The positions that ranks store of the next `tokens` tokens; ranks that store none are left out."""
        begin = len(sequence.ids)
        if tokens == 1:  # as a decode step stores it
            return {begin % self._world: (range(begin, begin + 1),)}
        parts = self._shard(sequence.counts, range(begin, begin + tokens))
        return {rank: part for rank, part in enumerate(parts) if part}

    def is_too_long(self, sequence: CachedSequence, growth: Growth) -> bool:
        """Whether a rank could not store this much of one sequence, however empty the cache is."""
        return any(sequence.counts[rank] + ranges.size(part) > self.limits.max_length for rank, part in growth.items())

    def has_room(self, sequence: CachedSequence, growth: Growth) -> bool:
        """Whether all ranks have the blocks to grow by this."""
        return all(
            len(self._blocks[rank].references) + self._new_blocks(sequence, rank, part) <= self.limits.blocks
            for rank, part in growth.items()
        )

    def can_hold(self, ids: Sequence[int], source: CachedSequence | None, prefix: int, reserved: list[int]) -> bool:
        """Whether a sequence of `ids` and one more token fits beside the active ones, and `reserved` blocks per rank.

        Its first `prefix` tokens are those of `source`.
        """
        size = self.limits.block_size
        begin = [0] * self._world if source is None else source.shards.truncated(prefix).counts
        end = self._counts_after(begin, prefix, len(ids))
        shares = source is not None and source.active
        return all(
            len(blocks.active) + kept + -(-(after + 1) // size) - (before // size if shares else 0)
            <= self.limits.blocks
            for blocks, kept, before, after in zip(self._blocks, reserved, begin, end, strict=True)
        )

    def is_uneven(self, source: CachedSequence, prefix: int, length: int, max_length: int) -> bool:
        """Whether one rank stores so much of a prefix that a prompt of `length` tokens might become too long there."""
        end = self._counts_after(source.shards.truncated(prefix).counts, prefix, length)
        return max(end) + -(-(max_length - length) // self._world) > self.limits.max_length

    def missing_blocks(self, sequence: CachedSequence, length: int) -> list[int]:
        """The blocks per rank that a sequence needs in addition for `length` tokens and one more."""
        end = self._counts_after(sequence.counts, len(sequence.ids), length)
        return [
            max(0, -(-(count + 1) // self.limits.block_size) - len(blocks))
            for count, blocks in zip(end, sequence.blocks, strict=True)
        ]

    def oldest_inactive(self, but: Sequence[CachedSequence | None] = ()) -> CachedSequence | None:
        """The inactive sequence that was used least recently, or None."""
        return next((each for each in self.sequences if not each.active and each not in but), None)

    # Changes.

    def start(
        self, source: CachedSequence | None, prefix: int, *, keep: bool = False, marks: Sequence[int] = ()
    ) -> CachedSequence:
        """An active sequence with the first `prefix` tokens of `source`: a fork, or `source` itself.

        It is a fork if the source is active, or to `keep` its other tokens for reuse. `marks` are where later prompts
        may part from it.
        """
        if source is None:
            shards = SequenceShards.empty(self._world, 0)
            empty: list[list[int]] = [[] for _ in range(self._world)]
            sequence = CachedSequence([], shards, [0] * self._world, empty, self._nothing_kept)
        elif source.active or keep:
            sequence = CachedSequence(
                list(source.ids), source.shards, list(source.counts), [list(blocks) for blocks in source.blocks],
                source.kept,
            )  # fmt: skip
            for of_rank, blocks in zip(self._blocks, sequence.blocks, strict=True):
                of_rank.add(blocks)
        else:
            sequence = source
            self.sequences.remove(source)
            sequence.active = True
            for of_rank, blocks in zip(self._blocks, sequence.blocks, strict=True):
                of_rank.activate(blocks)
        self.sequences.append(sequence)
        self._truncate(sequence, prefix)
        if sequence.kept is not None:
            sequence.kept = sequence.kept.truncated(prefix).marked(marks)
        return sequence

    def grow(self, sequence: CachedSequence, ids: Sequence[int], growth: Growth) -> None:
        """Append tokens. There must be room for them."""
        size = self.limits.block_size
        for rank, part in growth.items():
            of_rank, blocks, count = self._blocks[rank], sequence.blocks[rank], sequence.counts[rank]
            if self._copies(sequence, rank):
                of_rank.remove(blocks[-1:], active=True)
                blocks[-1] = of_rank.new()
            sequence.counts[rank] = count + ranges.size(part)
            blocks += [of_rank.new() for _ in range(-(-sequence.counts[rank] // size) - len(blocks))]
            sequence.shards.by_rank[rank].extend(part)
        sequence.ids += ids
        if sequence.kept is not None:
            sequence.kept = sequence.kept.grown(len(sequence.ids))

    def add_token(self, sequence: CachedSequence, token: int) -> bool:
        """Append one token, as most steps do: to a block that is there. Otherwise nothing changes: returns False."""
        position = len(sequence.ids)
        rank = position % self._world
        count = sequence.counts[rank]
        if count % self.limits.block_size == 0 or count >= self.limits.max_length or self._copies(sequence, rank):
            return False
        sequence.counts[rank] = count + 1
        sequence.shards.by_rank[rank].extend((range(position, position + 1),))
        sequence.ids.append(token)
        if sequence.kept is not None:
            sequence.kept = sequence.kept.grown(position + 1)
        return True

    def release(self, sequence: CachedSequence) -> None:
        """Keep a sequence for reuse, until room is needed."""
        sequence.active = False
        self.sequences.remove(sequence)
        self.sequences.append(sequence)
        for of_rank, blocks in zip(self._blocks, sequence.blocks, strict=True):
            of_rank.deactivate(blocks)

    def free(self, sequence: CachedSequence) -> None:
        """Remove a sequence."""
        self.sequences.remove(sequence)
        for of_rank, blocks in zip(self._blocks, sequence.blocks, strict=True):
            of_rank.remove(blocks, sequence.active)

    def _truncate(self, sequence: CachedSequence, length: int) -> None:
        sequence.shards = sequence.shards.truncated(length)  # also a copy of those of the source
        sequence.counts = sequence.shards.counts
        del sequence.ids[length:]
        for of_rank, blocks, count in zip(self._blocks, sequence.blocks, sequence.counts, strict=True):
            kept = -(-count // self.limits.block_size)
            of_rank.remove(blocks[kept:], active=True)
            del blocks[kept:]

    def _copies(self, sequence: CachedSequence, rank: int) -> bool:
        """Whether the next token of a rank goes to a block that another sequence refers to, too."""
        is_partly_filled = sequence.counts[rank] % self.limits.block_size > 0
        return is_partly_filled and self._blocks[rank].references[sequence.blocks[rank][-1]] > 1

    def _new_blocks(self, sequence: CachedSequence, rank: int, part: Ranges) -> int:
        count = sequence.counts[rank] + ranges.size(part)
        missing = -(-count // self.limits.block_size) - len(sequence.blocks[rank])
        return missing + self._copies(sequence, rank)

    def _counts_after(self, counts: Sequence[int], begin: int, end: int) -> list[int]:
        """The tokens per rank once positions `begin` to `end` are stored, if they are in one chunk."""
        parts = self._shard(counts, range(begin, end))
        return [count + ranges.size(part) for count, part in zip(counts, parts, strict=True)]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix of two lists."""
    at = 0
    while (part := a[at : at + _COMPARED]) and part == b[at : at + _COMPARED]:
        at += len(part)
    return at + next(
        (i for i, (x, y) in enumerate(zip(part, b[at : at + _COMPARED], strict=False)) if x != y),
        min(len(part), len(b[at : at + _COMPARED])),
    )


def _add(counts: dict[int, int], blocks: Iterable[int]) -> None:
    for block in blocks:
        counts[block] = counts.get(block, 0) + 1


def _remove(counts: dict[int, int], blocks: Iterable[int]) -> None:
    for block in blocks:
        counts[block] -= 1
        if not counts[block]:
            del counts[block]
