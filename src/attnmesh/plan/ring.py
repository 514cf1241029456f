"""The ring schedule: every rank's keys are sent around the ring, stage by stage.

    stage 0      every rank has its own keys
    stage s      rank r has the keys of rank r - offsets[s] that its queries see

An offset at which no rank sees anything is skipped: a sliding window stops after its halo. A row of keys is sent to
exactly the ranks that see it. It comes from the rank that had the block a stage before if that rank
saw it too, else from its owner. So the bytes of a union of masks are at most the sum of its parts'. Under a causal
zigzag, sending towards lower ranks, every row comes from the rank before, and three quarters of the bytes of the usual
ring are sent.

Gradients of keys follow the keys: a rank adds what it computed to what it received, and sends the sum to the next rank
that has the block for the rows that are sent there, else to the owner.

Both directions around the ring move the same rows. The one with fewer messages is chosen.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from attnmesh.core import ranges
from attnmesh.core.ranges import Ranges
from attnmesh.core.visibility import Patch
from attnmesh.plan.shards import Piece, Shards, pieces

MAX_KEY_RANGES = 16
"""The most ranges of rows of one block that are sent to a rank; the smallest gaps between more of them are sent too."""


class Transfer(NamedTuple):
    """Rows in one message. Each side counts them in the rows of the block that it has, in order."""

    source: int
    target: int
    rows: Ranges  # of the sender; one range unless it is the owner, which packs them
    to: Ranges  # of the receiver; one range unless it is the owner, which adds gradients to its own

    @property
    def size(self) -> int:
        """The number of rows."""
        return ranges.size(self.rows)


Transfers = tuple[Transfer, ...]


@dataclass(frozen=True)
class Stage:
    """What a rank does at one stage: it computes on some keys of the rank `block`, while the next ones are sent."""

    block: int  # the rank that owns these keys
    keys: Ranges  # the rows of its shard that are here: those that this rank's queries see, or all if they are its own
    patch: Patch  # the queries against these rows
    received: Transfers  # what came from the rank that had the block a stage before, gradients likewise
    from_owner: Transfers  # what came from the owner; it has no gradients yet
    sent: Transfers  # what the rank that has the block next receives from this one, gradients likewise
    own_sent: Transfers  # of this rank's own keys, what the rank that has them next receives from it
    returned: Transfers  # the gradients that are sent to the owner
    own_returned: Transfers  # the gradients of this rank's own keys that are sent to it


@dataclass(frozen=True)
class RingPlan:
    """The route of every rank's keys around the ring."""

    shards: Shards
    offsets: tuple[int, ...]  # 0 first; at stage s rank r holds keys of rank (r - offsets[s]) % world
    _stages: dict[int, tuple[Stage, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.shards.world

    def stages(self, rank: int) -> tuple[Stage, ...]:
        """The stages of `rank`, in order."""
        if rank not in self._stages:
            self._stages[rank] = tuple(self._stage(rank, at) for at in range(len(self.offsets)))
        return self._stages[rank]

    def pairs(self, rank: int) -> int:
        """The (query, key) pairs the rank computes: its work."""
        return sum(stage.patch.pairs for stage in self.stages(rank))

    def rows_sent(self, rank: int) -> int:
        """The rows of keys the rank sends in a forward; a row is kv_heads x (head_dim + value_dim) x batch elements."""
        return sum(rows_in((*stage.sent, *stage.own_sent)) for stage in self.stages(rank))

    def grad_rows_sent(self, rank: int) -> int:
        """The rows of key gradients the rank sends in a backward, in float32: one for every row of keys it received."""
        return sum(rows_in((*stage.sent, *stage.returned)) for stage in self.stages(rank))

    @cached_property
    def connections(self) -> int:
        """How often a rank sends something to another in a forward (keys) and a backward (keys and gradients)."""
        count = 0
        for here in self._seen:
            for at in range(1, len(self.offsets)):
                rows, shared, before = (ranges.size(here[at]), *(self._shared(here, at + i) for i in (0, -1)))
                count += 3 * (shared > 0) + 2 * (before < rows) + (shared < rows)
        return count

    def _shared(self, here: list[Ranges], at: int) -> int:
        """The rows of a block that are here both at a stage and at the next one."""
        if at == 0 or at + 1 == len(self.offsets):
            return 0
        return ranges.size(ranges.intersection(here[at], here[at + 1]))

    def _holder(self, block: int, at: int) -> int:
        return (block + self.offsets[at]) % self.world

    @cached_property
    def _seen(self) -> list[list[Ranges]]:
        """For every block and stage, the rows of the block that are there; all of them at its owner."""
        return [
            [
                ranges.rows_of(self.shards.keys[block]),
                *(
                    ranges.at_most(MAX_KEY_RANGES, self.shards.patch(self._holder(block, at), block).seen)
                    for at in range(1, len(self.offsets))
                ),
            ]
            for block in range(self.world)
        ]

    def _stage(self, rank: int, at: int) -> Stage:
        block = (rank - self.offsets[at]) % self.world
        keys = self._seen[block][at]
        return Stage(
            block=block,
            keys=keys,
            patch=self.shards.patch(rank, block, keys if at else None),
            received=self._passed_on(block, at - 1),
            from_owner=self._sent_by_owner(block, at),
            sent=self._passed_on(block, at),
            own_sent=self._sent_by_owner(rank, at + 1),
            returned=self._returned(block, at),
            own_returned=self._returned(rank, at),
        )

    def _passed_on(self, block: int, at: int) -> Transfers:
        """What the rank that has a block at a stage sends to the next one."""
        if at <= 0 or at + 1 == len(self.offsets):
            return ()
        shared = pieces(self._seen[block][at], self._seen[block][at + 1])
        return _transfers(self._holder(block, at), self._holder(block, at + 1), shared)

    def _sent_by_owner(self, block: int, at: int) -> Transfers:
        """What the owner sends to the rank that has its block at a stage: rows that no rank had a stage before."""
        if at == 0 or at == len(self.offsets):
            return ()
        here = self._seen[block][at]
        new = ranges.difference(here, self._seen[block][at - 1] if at > 1 else ())
        return _transfers(block, self._holder(block, at), map(Piece, new, _places(new, here)), packs=True)

    def _returned(self, block: int, at: int) -> Transfers:
        """The gradients that the owner of a block receives after a stage: of the rows that are not at the next one."""
        if at == 0:
            return ()
        here = self._seen[block][at]
        last = ranges.difference(here, self._seen[block][at + 1] if at + 1 < len(self.offsets) else ())
        return _transfers(self._holder(block, at), block, map(Piece, _places(last, here), last), unpacks=True)


@lru_cache(maxsize=256)
def ring_plan(shards: Shards) -> RingPlan:
    """The ring with the fewest messages; both directions move the same rows."""
    return min(both_directions(shards, needed_offsets(shards)), key=lambda plan: plan.connections)


def needed_offsets(shards: Shards) -> list[int]:
    """The offsets at which some rank sees some of the keys it would receive."""
    world = shards.world
    return [o for o in range(1, world) if any(shards.patch(r, (r - o) % world).seen for r in range(world))]


def both_directions(shards: Shards, offsets: list[int]) -> tuple[RingPlan, RingPlan]:
    """The ring that sends towards higher ranks and the one that sends towards lower ranks."""
    return RingPlan(shards, (0, *offsets)), RingPlan(shards, (0, *reversed(offsets)))


def _places(rows: Ranges, among: Ranges) -> list[range]:
    """The places of ranges of rows among the rows `among`, which contain them."""
    begins = [0, *accumulate(map(len, among))]
    found = []
    for run in rows:
        i = bisect_right(among, run.start, key=lambda part: part.start) - 1
        start = begins[i] + run.start - among[i].start
        found.append(range(start, start + len(run)))
    return found


def _transfers(
    source: int, target: int, found: Iterable[Piece], *, packs: bool = False, unpacks: bool = False
) -> Transfers:
    """Pieces in as few messages as possible: contiguous on the side of the sender unless it `packs` them,
    and on the side of the receiver unless it `unpacks` them.
    """
    messages: list[tuple[list[range], list[range]]] = []
    for rows, to in found:
        if messages:
            last_rows, last_to = messages[-1][0][-1], messages[-1][1][-1]
            if (packs or last_rows.stop == rows.start) and (unpacks or last_to.stop == to.start):
                messages[-1][0].append(rows)
                messages[-1][1].append(to)
                continue
        messages.append(([rows], [to]))
    return tuple(Transfer(source, target, ranges.merged(rows), ranges.merged(to)) for rows, to in messages)


def rows_in(transfers: Transfers) -> int:
    """The number of rows in all of these messages."""
    return sum(transfer.size for transfer in transfers)
