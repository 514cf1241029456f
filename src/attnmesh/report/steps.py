"""Schedules step by step, read off the library's plans: who computes what, and what travels meanwhile (forward)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from attnmesh.core import ranges
from attnmesh.plan.allgather import gather_plan, head_groups
from attnmesh.plan.ring import RingPlan, ring_plan
from attnmesh.plan.shards import between_nodes
from attnmesh.plan.two_level import two_level_plan
from attnmesh.plan.ulysses import head_share
from attnmesh.plan.workload import Workload


class Visit(NamedTuple):
    """A rank meets queries of some shards with keys of some shards, for some query heads."""

    rank: int
    step: int
    heads: range  # query heads
    queries: range  # whose queries: ranks
    keys: range  # whose keys: ranks
    pairs: int  # that are visible, for each head


class Message(NamedTuple):
    """What a rank sends another during a step."""

    step: int
    source: int
    target: int
    nbytes: int
    what: str


@dataclass(frozen=True)
class Steps:
    """A schedule step by step."""

    names: list[str]  # what every step is, in words
    visits: list[Visit]
    messages: list[Message]


def steps(schedule: str, workload: Workload) -> Steps:
    """The steps of a schedule that can serve the case."""
    found = _STEPS[schedule](workload)
    seen = [visit for visit in found.visits if visit.pairs]
    return Steps(found.names, seen, [message for message in found.messages if message.nbytes])


def _ring(workload: Workload) -> Steps:
    plan = ring_plan(workload.shards)
    ranks = range(plan.world)
    stages = [(rank, s, stage) for rank in ranks for s, stage in enumerate(plan.stages(rank))]
    heads = range(workload.shape.q_heads)
    visits = [Visit(r, s, heads, _one(r), _one(stage.block), stage.patch.pairs) for r, s, stage in stages]
    return Steps(
        [_distance(offset, plan.world) for offset in plan.offsets], visits, list(_keys_passed_on(plan, workload))
    )


def _allgather(workload: Workload) -> Steps:
    plan, shape = gather_plan(workload.shards), workload.shape
    groups, readers = head_groups(shape.kv_heads), shape.q_heads // shape.kv_heads
    ranks = range(plan.world)
    visits, messages = [], []
    for at, group in enumerate(groups):
        row = replace(shape, kv_heads=len(group)).key_row
        for r in ranks:
            heads = range(group.start * readers, group.stop * readers)
            visits.append(Visit(r, at + 1, heads, _one(r), ranks, plan.pairs(r)))
            messages += [Message(at, r, b, plan.rows_sent(r, b) * row, "keys") for b in ranks if b != r]
    names = ["keys of the first heads travel", *(f"heads {_said(group)} of the keys" for group in groups)]
    return Steps(names, visits, messages)


def _ring_of_rings(workload: Workload) -> Steps:
    plan = two_level_plan(workload.shards, workload.ranks_per_node)
    names: list[str] = []
    visits: list[Visit] = []
    messages: list[Message] = []
    heads = range(workload.shape.q_heads)
    for turn, offset in enumerate(plan.outer_offsets):
        rings = [plan.inner_ring(node, turn) for node in range(plan.nodes)]
        first = len(names)
        for node, ring in enumerate(rings):
            mine = range(node * plan.ranks_per_node, (node + 1) * plan.ranks_per_node)
            theirs = ((node - offset) % plan.nodes) * plan.ranks_per_node
            for i, rank in enumerate(mine):
                for s, stage in enumerate(ring.stages(i)):
                    block = _one(theirs + stage.block)
                    visits.append(Visit(rank, first + s, heads, _one(rank), block, stage.patch.pairs))
            messages += _keys_passed_on(ring, workload, first, mine.start)
        for i in range(plan.ranks_per_node):
            for node in range(plan.nodes):
                stage = plan.outer(i).stages(node)[turn]
                nbytes = len(stage.next_keys) * workload.shape.key_row
                target = stage.next_rank * plan.ranks_per_node + i
                messages.append(Message(first, node * plan.ranks_per_node + i, target, nbytes, "keys between nodes"))
        longest = max(rings, key=lambda ring: len(ring.offsets))
        whose = _distance(offset, plan.nodes, "node")
        names += [f"{whose}, turn {s + 1} within the node" for s in range(len(longest.offsets))]
    return Steps(names, visits, messages)


def _ulysses(workload: Workload) -> Steps:
    return _traded(workload, workload.shards.world, _ring)


def _ulysses_ring(workload: Workload) -> Steps:
    return _traded(workload, workload.ranks_per_node, _ring)


def _ulysses_allgather(workload: Workload) -> Steps:
    return _traded(workload, workload.ranks_per_node, _allgather)


def _traded(workload: Workload, ranks: int, then: Callable[[Workload], Steps]) -> Steps:
    """Rows traded for heads among `ranks` neighbours, a schedule between those with the same heads, and back."""
    between = between_nodes(workload.shards, ranks)
    assert between is not None, "see refusal"
    world, shape = workload.shards.world, workload.shape
    shares = [head_share(shape.q_heads, shape.kv_heads, ranks, i) for i in range(ranks)]
    visits: list[Visit] = []
    messages: list[Message] = []
    names: list[str] = []
    for i, share in enumerate(shares):
        said: list[str] = []
        for segment in share.segments:  # one after the other: each is a call of the schedule between
            first = 1 + len(said)
            part = replace(shape, q_heads=len(segment.q), kv_heads=len(segment.kv))
            inside = then(Workload(between, part, 1))
            said += inside.names
            start = share.q.start + segment.q.start
            for rank, step, heads, queries, keys, pairs in inside.visits:
                moved = range(start + heads.start, start + heads.stop)
                visits.append(
                    Visit(rank * ranks + i, first + step, moved, _all(queries, ranks), _all(keys, ranks), pairs)
                )
            for step, source, target, nbytes, what in inside.messages:
                messages.append(Message(first + step, source * ranks + i, target * ranks + i, nbytes, what))
        names = max(names, said, key=len)
    last = len(names) + 1
    for rank in range(world):
        node, me = divmod(rank, ranks)
        for other in (other for other in range(ranks) if other != me):
            target = node * ranks + other
            there, back = shape.of(shares[other]), shape.of(shares[me])
            rows, key_rows = ranges.size(workload.shards.queries[rank]), ranges.size(workload.shards.keys[rank])
            given = rows * there.query_row + key_rows * there.key_row
            returned = ranges.size(workload.shards.queries[target]) * back.query_row
            messages += [
                Message(0, rank, target, given, "queries, keys and values"),
                Message(last, rank, target, returned, "outputs"),
            ]
    computed = ["every rank attends with its own heads"] * len(names) if ranks == world else names
    return Steps(["rows are traded for heads", *computed, "outputs go back to their rows"], visits, messages)


_STEPS: dict[str, Callable[[Workload], Steps]] = {
    "ring": _ring,
    "allgather": _allgather,
    "ulysses": _ulysses,
    "ulysses+ring": _ulysses_ring,
    "ulysses+allgather": _ulysses_allgather,
    "ring+ring": _ring_of_rings,
}


def _keys_passed_on(plan: RingPlan, workload: Workload, step: int = 0, rank: int = 0) -> Iterator[Message]:
    """The keys that ranks of a ring send on; its first stage is the step `step`, its first rank the rank `rank`."""
    for i in range(plan.world):
        for s, stage in enumerate(plan.stages(i)):
            nbytes = len(stage.next_keys) * workload.shape.key_row
            yield Message(step + s, rank + i, rank + stage.next_rank, nbytes, "keys")


def _one(rank: int) -> range:
    return range(rank, rank + 1)


def _all(nodes: range, ranks: int) -> range:
    """The ranks of some nodes."""
    return range(nodes.start * ranks, nodes.stop * ranks)


def _distance(offset: int, world: int, what: str = "rank") -> str:
    """Whose keys these are, counted from the rank (or node) that has them now, by the shorter way round."""
    if offset == 0:
        return f"keys of this {what}"
    steps, way = (offset, "before") if 2 * offset <= world else (world - offset, "after")
    return f"keys of the {what} {steps} {'place' if steps == 1 else 'places'} {way} it"


def _said(heads: range) -> str:
    return f"{heads.start}" if len(heads) == 1 else f"{heads.start} to {heads[-1]}"
