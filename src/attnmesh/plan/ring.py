"""Ring context parallelism as plain data: what every rank holds, computes and sends, stage by stage.

    stage 0      every rank has its own keys
    stage s      rank r holds keys of rank r - offsets[s], sent on by the rank that held them a stage before

Three rules keep bytes and work down; all of them only remove what nobody needs:

- An offset at which no rank sees anything is jumped over: a sliding window stops after its halo.
- A block of keys stops travelling at the last rank that sees it, and only the rows that some rank further on sees go
  on. Under a causal zigzag, going round towards lower ranks, late pieces need no more travelling after rank 0: three
  quarters of the bytes of the usual ring.
- Gradients of keys travel with the keys' journey and return home from its end. They start when the first visitor has
  computed something, so they hold only the rows seen so far.

The ring turns whichever way moves fewer bytes; that can differ between forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from attnmesh.core import ranges
from attnmesh.plan.blocks import Patch
from attnmesh.plan.shards import Shards

NOTHING = range(0)


@dataclass(frozen=True)
class Stage:
    """What a rank does at one stage. All ranges are rows of the shard of the rank `block`."""

    block: int  # whose keys these are
    keys: range  # the rows that are here; empty: nothing came
    came_from: int  # the rank that held them a stage before
    seen: range  # those of them that this rank's queries see; empty: they only pass through
    patch: Patch  # what the queries see of the rows `seen`
    next_keys: range  # the rows that travel on; empty: the journey ends here
    next_rank: int  # to this rank; where the journey ends, home
    grads_in: range  # the rows whose gradients came along, from the visitors before
    grads_out: range  # the rows whose gradients leave with next_rank: those, and what this stage has seen


@dataclass(frozen=True)
class RingPlan:
    """The journey of every rank's keys around the ring."""

    shards: Shards
    offsets: tuple[int, ...]  # 0 first; at stage s rank r holds keys of rank (r - offsets[s]) % world

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return self.shards.world

    def stages(self, rank: int) -> tuple[Stage, ...]:
        """What `rank` does, in order."""
        return self._stages[rank]

    def returns(self, rank: int) -> tuple[int, int, range]:
        """Where the journey of the rank's own keys ends: (stage, rank there, rows of gradient that come home)."""
        stage = self._last[rank]
        return stage, self._holder(rank, stage), self._grads[rank][stage]

    def pairs(self, rank: int) -> int:
        """The (query, key) pairs the rank computes: its work."""
        return sum(stage.patch.pairs for stage in self.stages(rank))

    def rows_sent(self, rank: int) -> int:
        """The rows of keys the rank sends in a forward; each is 2 x kv_heads x head_dim x batch elements."""
        return sum(len(stage.next_keys) for stage in self.stages(rank))

    def grad_rows_sent(self, rank: int) -> int:
        """The rows of key gradients the rank sends in a backward, in float32."""
        return sum(len(stage.grads_out) for stage in self.stages(rank))

    def moved(self, grad_weight: float) -> float:
        """What all ranks send, in rows of keys; a row of gradients weighs `grad_weight` of them."""
        ranks = range(self.world)
        grads = grad_weight * sum(map(self.grad_rows_sent, ranks)) if grad_weight else 0.0
        return sum(map(self.rows_sent, ranks)) + grads

    def _holder(self, block: int, stage: int) -> int:
        return (block + self.offsets[stage]) % self.world

    @cached_property
    def _carried(self) -> list[list[range]]:
        """For every block and stage, the rows that are carried there: those seen there or later."""
        carried = []
        for block in range(self.world):
            rows = [NOTHING] * len(self.offsets)
            needed = NOTHING
            for stage in reversed(range(1, len(self.offsets))):
                needed = _hull(needed, self.shards.patch(self._holder(block, stage), block).seen)
                rows[stage] = needed
            rows[0] = range(ranges.size(self.shards.keys[block]))
            carried.append(rows)
        return carried

    @cached_property
    def _grads(self) -> list[list[range]]:
        """For every block and stage, the rows of gradient known once the stage is done (the own ones stay home)."""
        known = []
        for block in range(self.world):
            rows, seen = [NOTHING], NOTHING
            for stage in range(1, len(self.offsets)):
                seen = _hull(seen, self.shards.patch(self._holder(block, stage), block).seen)
                rows.append(seen if self._carried[block][stage] else NOTHING)
            known.append(rows)
        return known

    @cached_property
    def _last(self) -> list[int]:
        """For every block, the last stage its journey reaches."""
        return [max(s for s, rows in enumerate(carried) if rows or s == 0) for carried in self._carried]

    @cached_property
    def _stages(self) -> list[tuple[Stage, ...]]:
        return [tuple(self._stage(rank, s) for s in range(len(self.offsets))) for rank in range(self.world)]

    def _stage(self, rank: int, stage: int) -> Stage:
        block = (rank - self.offsets[stage]) % self.world
        keys = self._carried[block][stage]
        goes_on = stage < self._last[block]
        # A rank's own keys are all there, seen or not; a visitor's rows are narrowed to what is seen of them.
        seen = keys if stage == 0 else self.shards.patch(rank, block).seen if keys else NOTHING
        return Stage(
            block=block,
            keys=keys,
            came_from=self._holder(block, max(0, stage - 1)),
            seen=seen,
            patch=self.shards.patch(rank, block, seen),
            next_keys=self._carried[block][stage + 1] if goes_on else NOTHING,
            next_rank=self._holder(block, stage + 1) if goes_on else block,
            grads_in=self._grads[block][stage - 1] if stage > 1 and keys else NOTHING,
            grads_out=self._grads[block][stage],
        )


@lru_cache(maxsize=256)
def ring_plan(shards: Shards, *, grad_weight: float = 0.0) -> RingPlan:
    """The ring that moves the fewest bytes; a row of gradients, if they travel, weighs `grad_weight` rows of keys."""
    return min(both_ways(shards, needed_offsets(shards)), key=lambda plan: plan.moved(grad_weight))


def needed_offsets(shards: Shards) -> list[int]:
    """The offsets at which some rank sees something of the keys it would hold there."""
    world = shards.world
    return [o for o in range(1, world) if any(shards.patch(r, (r - o) % world).seen for r in range(world))]


def both_ways(shards: Shards, offsets: list[int]) -> tuple[RingPlan, RingPlan]:
    """The ring that turns upwards and the one that turns downwards."""
    return RingPlan(shards, (0, *offsets)), RingPlan(shards, (0, *reversed(offsets)))


def _hull(a: range, b: range) -> range:
    if not a or not b:
        return a or b
    return range(min(a.start, b.start), max(a.stop, b.stop))
