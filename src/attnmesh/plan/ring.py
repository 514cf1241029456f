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

Small blocks are joined: a stage has the keys of `joined` offsets, which are computed at once. They are received in
ascending order of position, so that a mask is an interval per row of them as it is of one block. The rank that had a
block a stage before is then `joined` offsets away. As many rows are sent as without, in fewer stages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import NamedTuple

from attnmesh.core import ranges
from attnmesh.core.ranges import Ranges
from attnmesh.core.visibility import Patch
from attnmesh.plan.shards import Piece, Shards

MAX_KEY_RANGES = 16
"""The most ranges of rows of one block that are sent to a rank; the smallest gaps between more of them are sent too."""

_MAX_JOINED_RUNS = 4  # of positions in a shard whose keys are joined with others: each run is a message
_MAX_JOINED_RANKS = 8  # more are seldom on one node
_JOINED_BYTES = 1 << 24  # K and V of a shard up to which a kernel over one block loses more than its memory is worth


class Joined(NamedTuple):
    """The most blocks that a stage has, forward and backward."""

    forward: int = 1
    backward: int = 1


def joined_blocks(shards: Shards, key_row: int, ranks_per_node: int, device: str) -> Joined:
    """How many blocks a stage of a ring joins, with `key_row` bytes of K and V per position.

    Only on GPUs, whose kernels begin and end with idle multiprocessors, and within a node, where the rank that is
    several offsets away is as near as the next one. The first transfer hides behind the own block, which takes about as
    long as the transfer of four small blocks over NVLink. In a backward the gradients of the last stage return when
    nothing is left to compute, so it has one block. The others have two: three blocks of 1,024 keys and 8 KV heads take
    192 programs, two rounds of an H200's 132 multiprocessors.
    """
    world, rows = shards.world, max(map(ranges.size, shards.keys), default=0)
    if device == "cpu" or not ranks_per_node >= world <= _MAX_JOINED_RANKS or rows * key_row > _JOINED_BYTES:
        return Joined()
    return Joined(forward=4, backward=2 if world % 2 == 0 else 1)


class Transfer(NamedTuple):
    """Rows in one message. A side counts them in the keys of its stage, an owner in those of its shard."""

    source: int
    target: int
    rows: Ranges  # of the sender; one range unless it is the owner, which packs them
    to: Ranges  # of the receiver; one range unless it is the owner, which adds gradients to its own

    @property
    def size(self) -> int:
        """The number of rows."""
        return ranges.size(self.rows)


Transfers = tuple[Transfer, ...]


class Block(NamedTuple):
    """Keys of one rank at another."""

    owner: int
    rows: Ranges  # of its shard: those that the queries here see, or all if they are its own
    places: tuple[Piece, ...]  # where these rows are among all keys of the stage


@dataclass(frozen=True)
class Stage:
    """What a rank does at one stage: it computes on keys of one or several ranks, while the next ones are sent."""

    blocks: tuple[Block, ...]
    patch: Patch  # the queries against the keys of all blocks, in ascending order
    received: Transfers  # what came from the ranks that had the blocks a stage before, gradients likewise
    from_owner: Transfers  # what came from the owners; it has no gradients yet
    sent: Transfers  # what the ranks that have the blocks next receive from this one, gradients likewise
    own_sent: Transfers  # of this rank's own keys, what the ranks that have them next receive from it
    returned: Transfers  # the gradients that are sent to the owners
    own_returned: Transfers  # the gradients of this rank's own keys that are sent to it

    @cached_property
    def size(self) -> int:
        """The rows of all keys that are here."""
        return sum(ranges.size(block.rows) for block in self.blocks)


@dataclass(frozen=True)
class RingPlan:
    """The route of every rank's keys around the ring."""

    shards: Shards
    offsets: tuple[int, ...]  # 0 first, in the order in which rank r has keys of rank (r - offset) % world
    joined: int = 1  # offsets of a stage: stage 0 has the first, and every stage after it the next `joined` ones
    _stages: dict[int, tuple[Stage, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.shards.world

    def stages(self, rank: int) -> tuple[Stage, ...]:
        """The stages of `rank`, in order."""
        if rank not in self._stages:
            self._stages[rank] = tuple(self._stage(rank, at) for at in range(self.count))
        return self._stages[rank]

    @property
    def count(self) -> int:
        """The number of stages."""
        return 1 + -(-(len(self.offsets) - 1) // self.joined)

    def visits(self, at: int) -> range:
        """The offsets of a stage, as indices of `offsets`."""
        last = 1 + at * self.joined
        return range(last - self.joined, min(last, len(self.offsets))) if at else range(1)

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
            for visit in range(1, len(self.offsets)):
                rows = ranges.size(here[visit])
                shared, before = (ranges.size(self._shared(here, visit + i)) for i in (0, -self.joined))
                count += 3 * (shared > 0) + 2 * (before < rows) + (shared < rows)
        return count

    def passed_on(self, block: int, visit: int) -> Transfers:
        """What the rank that has a block at a visit sends to the one that has it a stage later."""
        shared = self._shared(self._seen[block], visit)
        if not shared:
            return ()
        source, target = self.holder(block, visit), self.holder(block, visit + self.joined)
        here, there = self._places[source][visit], self._places[target][visit + self.joined]
        found = [
            Piece(_moved(run, sent), _moved(run, to))
            for sent in here
            for to in there
            for run in ranges.intersection((sent.rows,), ranges.intersection(shared, (to.rows,)))
        ]
        return _transfers(source, target, sorted(found, key=lambda piece: piece.to.start))

    def sent_by_owner(self, block: int, visit: int) -> Transfers:
        """What the owner sends to the rank that has its block at a visit: rows that no rank had a stage before."""
        here = self._seen[block]
        new = ranges.difference(here[visit], self._shared(here, visit - self.joined))
        target = self.holder(block, visit)
        return _transfers(block, target, _parts(new, self._places[target][visit]), packs=True)

    def holder(self, block: int, visit: int) -> int:
        """The rank that has the keys of the rank `block` at a visit."""
        return (block + self.offsets[visit]) % self.world

    def _returned(self, block: int, visit: int) -> Transfers:
        """The gradients that the owner of a block receives after a visit: of the rows that are not sent on."""
        here, source = self._seen[block], self.holder(block, visit)
        last = ranges.difference(here[visit], self._shared(here, visit))
        found = (Piece(to, rows) for rows, to in _parts(last, self._places[source][visit]))
        return _transfers(source, block, found, unpacks=True)

    def _shared(self, here: list[Ranges], visit: int) -> Ranges:
        """The rows of a block that are here both at a visit and a stage later; the owner passes nothing on."""
        if visit <= 0 or visit + self.joined >= len(self.offsets):
            return ()
        return ranges.intersection(here[visit], here[visit + self.joined])

    @cached_property
    def _seen(self) -> list[list[Ranges]]:
        """For every block and visit, the rows of the block that are there; all of them at its owner."""
        return [
            [
                ranges.rows_of(self.shards.keys[block]),
                *(
                    ranges.at_most(MAX_KEY_RANGES, self.shards.patch(self.holder(block, visit), block).seen)
                    for visit in range(1, len(self.offsets))
                ),
            ]
            for block in range(self.world)
        ]

    @cached_property
    def _places(self) -> list[list[tuple[Piece, ...]]]:
        """For every rank and visit, where the rows of the block are among the keys of the stage."""
        return [
            [pieces for at in range(self.count) for pieces in self._places_at(rank, at)] for rank in range(self.world)
        ]

    def _places_at(self, rank: int, at: int) -> list[tuple[Piece, ...]]:
        """In ascending order of position: a block by itself is in order, several are arranged run by run."""
        visits, runs = self.visits(at), []
        for i, visit in enumerate(visits):
            block = (rank - self.offsets[visit]) % self.world
            keys, rows = self.shards.keys[block], self._seen[block][visit]
            if len(visits) == 1:
                runs += [(0, i, run) for run in rows]
                continue
            begin = 0
            for held in keys:
                inside = ranges.intersection(rows, (range(begin, begin + len(held)),))
                runs += [(held[run.start - begin], i, run) for run in inside]
                begin += len(held)
        found: list[list[Piece]] = [[] for _ in visits]
        begin = 0
        for _, i, run in sorted(runs, key=lambda each: (each[0], each[2].start)):
            found[i].append(Piece(run, range(begin, begin + len(run))))
            begin += len(run)
        return [tuple(sorted(pieces, key=lambda piece: piece.rows.start)) for pieces in found]

    def _stage(self, rank: int, at: int) -> Stage:
        visits = self.visits(at)
        after = self.visits(at + 1) if at + 1 < self.count else range(0)
        owners = [(rank - self.offsets[visit]) % self.world for visit in visits]
        here = list(zip(owners, visits, strict=True))
        blocks = tuple(Block(block, self._seen[block][v], self._places[rank][v]) for block, v in here)
        return Stage(
            blocks=blocks,
            patch=self._patch(rank, blocks) if at else self.shards.patch(rank, rank),
            received=_all(self.passed_on(block, visit - self.joined) for block, visit in here),
            from_owner=_all(self.sent_by_owner(block, visit) for block, visit in here if at),
            sent=_all(self.passed_on(block, visit) for block, visit in here),
            own_sent=_all(self.sent_by_owner(rank, visit) for visit in after),
            returned=_all(self._returned(block, visit) for block, visit in here if at),
            own_returned=_all(self._returned(rank, visit) for visit in visits if at),
        )

    def _patch(self, rank: int, blocks: tuple[Block, ...]) -> Patch:
        """The queries of a rank against the keys of blocks of others."""
        if len(blocks) == 1:
            return self.shards.patch(rank, blocks[0].owner, blocks[0].rows)
        keys = ranges.union(ranges.select(self.shards.keys[owner], rows) for owner, rows, _ in blocks)
        assert keys is not None, "see ring_plan"
        return Patch(self.shards.mask, self.shards.queries[rank], keys)


@lru_cache(maxsize=256)
def ring_plan(shards: Shards, joined: int = 1) -> RingPlan:
    """The ring with the fewest messages; both directions move the same rows.

    Blocks of many runs, or of positions with a step, are not joined: in ascending order they would be many messages.
    """
    if any(len(keys) > _MAX_JOINED_RUNS or any(len(run) > 1 < run.step for run in keys) for keys in shards.keys):
        joined = 1
    both = both_directions(shards, needed_offsets(shards), joined)
    return min(both, key=lambda plan: plan.connections)


def needed_offsets(shards: Shards) -> list[int]:
    """The offsets at which some rank sees some of the keys it would receive."""
    world = shards.world
    return [o for o in range(1, world) if any(shards.patch(r, (r - o) % world).seen for r in range(world))]


def both_directions(shards: Shards, offsets: list[int], joined: int = 1) -> tuple[RingPlan, RingPlan]:
    """The ring that sends towards higher ranks and the one that sends towards lower ranks."""
    return RingPlan(shards, (0, *offsets), joined), RingPlan(shards, (0, *reversed(offsets)), joined)


def _moved(run: range, piece: Piece) -> range:
    """The places of some rows of a piece."""
    start = piece.to.start + run.start - piece.rows.start
    return range(start, start + len(run))


def _parts(rows: Ranges, places: tuple[Piece, ...]) -> list[Piece]:
    """Some rows of a block and their places."""
    found = ((run, piece) for piece in places for run in ranges.intersection(rows, (piece.rows,)))
    return [Piece(run, _moved(run, piece)) for run, piece in found]


def _all(transfers: Iterable[Transfers]) -> Transfers:
    return tuple(transfer for some in transfers for transfer in some)


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


def packed_once(transfers: Transfers) -> tuple[list[range], list[tuple[Ranges, range]]]:
    """Where an owner packs the rows of each message, and what it copies: rows that several ranks receive only once."""
    places, copies = {}, list[tuple[Ranges, range]]()
    end = 0
    for i, transfer in sorted(enumerate(transfers), key=lambda each: -each[1].size):
        rows = transfer.rows
        start = next((at for at in (_start_in(rows, copy) for copy in copies) if at is not None), None)
        if start is None:
            start, end = end, end + transfer.size
            copies.append((rows, range(start, end)))
        places[i] = range(start, start + transfer.size)
    return [places[i] for i in range(len(transfers))], copies


def _start_in(rows: Ranges, copy: tuple[Ranges, range]) -> int | None:
    """Where rows begin in a copy that has them one after another; None if it does not."""
    copied, to = copy
    if rows == copied:
        return to.start
    if len(rows) > 1 or len(copied) > 1 or rows[0].start < copied[0].start or rows[0].stop > copied[0].stop:
        return None
    return to.start + rows[0].start - copied[0].start


def rows_in(transfers: Transfers) -> int:
    """The number of rows in all of these messages."""
    return sum(transfer.size for transfer in transfers)
