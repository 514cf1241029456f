"""From the name of a schedule to the program of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attnmesh.core import ranges
from attnmesh.plan.allgather import groups_that_fill, head_groups
from attnmesh.plan.program import Program, Round
from attnmesh.plan.rounds.by_patch import ByPatch
from attnmesh.plan.rounds.gather import gather_backward, gather_forward
from attnmesh.plan.rounds.lanes import beside
from attnmesh.plan.rounds.ring import Merged, ring_backward, ring_forward
from attnmesh.plan.rounds.sizes import Sizes
from attnmesh.plan.rounds.two_level import two_level_backward, two_level_forward
from attnmesh.plan.rounds.ulysses import Trade, traded
from attnmesh.plan.shards import Shards, between_nodes
from attnmesh.plan.wide.schedules import WideSpread
from attnmesh.plan.workload import Shape, Workload

MOST_BY_PATCH = 16
"""Ranks up to which every patch is looked at by itself."""

Lanes = list[list[int]]
"""Ranks that work with one another; the i-th of every lane does the same."""


def program(schedule: str, workload: Workload, *, backward: bool) -> Program:
    """What all ranks do under a schedule that can serve the case (see `refusal`)."""
    return Program(schedule, workload.shards.world, lambda: _ROUNDS[schedule](workload, backward))


def _ring(workload: Workload, backward: bool) -> Iterator[Round]:
    return _turning(workload.shards, workload.shape, [everybody(workload)], sizes_of(workload), backward)


def _allgather(workload: Workload, backward: bool) -> Iterator[Round]:
    return _gathering(workload, workload.shards, workload.shape, [everybody(workload)], sizes_of(workload), backward)


def _ulysses(workload: Workload, backward: bool) -> Iterator[Round]:
    return _after_trade(workload, workload.shards.world, backward, _ring_between)


def _ulysses_ring(workload: Workload, backward: bool) -> Iterator[Round]:
    return _after_trade(workload, workload.ranks_per_node, backward, _ring_between)


def _ulysses_allgather(workload: Workload, backward: bool) -> Iterator[Round]:
    return _after_trade(workload, workload.ranks_per_node, backward, _gather_between)


def _ring_ring(workload: Workload, backward: bool) -> Iterator[Round]:
    outer, turn = figures(workload.shards).two_level(workload.ranks_per_node, grad_weight(workload.shape, backward))
    return (two_level_backward if backward else two_level_forward)(outer, turn, sizes_of(workload))


_ROUNDS: dict[str, Callable[[Workload, bool], Iterator[Round]]] = {
    "ring": _ring,
    "allgather": _allgather,
    "ulysses": _ulysses,
    "ulysses+ring": _ulysses_ring,
    "ulysses+allgather": _ulysses_allgather,
    "ring+ring": _ring_ring,
}
SCHEDULES = tuple(_ROUNDS)


def figures(shards: Shards) -> ByPatch | WideSpread:
    """Patch by patch as executors have it; for more ranks than executors were ever asked for, the same by arrays."""
    wide = WideSpread.of(shards) if shards.world > MOST_BY_PATCH else None
    return ByPatch(shards) if wide is None else wide


def _turning(shards: Shards, shape: Shape, lanes: Lanes, sizes: Sizes, backward: bool) -> Iterator[Round]:
    stages = figures(shards).ring(lanes, grad_weight(shape, backward))
    return (ring_backward if backward else ring_forward)(stages, sizes, Merged(sizes))


def _gathering(
    workload: Workload, shards: Shards, shape: Shape, lanes: Lanes, sizes: Sizes, backward: bool, name: str = "keys"
) -> Iterator[Round]:
    groups = groups_of_heads(workload, shards, shape)
    gathered = figures(shards).gathered(lanes, sizes.world, workload.ranks_per_node)
    return (gather_backward if backward else gather_forward)(
        gathered, [len(heads) for heads in groups], sizes, name=name
    )


def groups_of_heads(workload: Workload, shards: Shards, shape: Shape) -> list[range]:
    """The kv heads that are gathered together, group by group."""
    if workload.device == "cpu":
        return head_groups(shape.kv_heads)
    return head_groups(shape.kv_heads, groups_that_fill(shards, shape.batch, shape.q_heads))


def _after_trade(
    workload: Workload,
    ranks: int,
    backward: bool,
    then: Callable[[Workload, Trade, Shards, Sizes, bool], Iterator[Round]],
) -> Iterator[Round]:
    """Rows traded for heads among `ranks` neighbours, and what follows between those with the same heads."""
    trade, between, sizes = after_trade(workload, ranks)
    return traded(trade, then(workload, trade, between, sizes, backward), backward=backward)


def after_trade(workload: Workload, ranks: int) -> tuple[Trade, Shards, Sizes]:
    """The trade among `ranks` neighbours, and who holds what after it."""
    trade = Trade(workload, ranks)
    between = between_nodes(workload.shards, ranks)
    assert between is not None, "see refusal"
    rows = [ranges.size(held) for held in between.queries for _ in range(ranks)]
    segments = [len(share.segments) for share in trade.shares] * between.world
    return trade, between, Sizes.of(trade.shapes(), rows, segments)


def _ring_between(workload: Workload, trade: Trade, between: Shards, sizes: Sizes, backward: bool) -> Iterator[Round]:
    lanes = [lane for lanes in lanes_by_shape(workload, trade).values() for lane in lanes]
    return _turning(between, workload.shape, lanes, sizes, backward)


def _gather_between(workload: Workload, trade: Trade, between: Shards, sizes: Sizes, backward: bool) -> Iterator[Round]:
    """Lanes with the same heads gather in the same groups of heads."""
    return beside(
        [
            _gathering(
                workload, between, shape, lanes, sizes, backward, name=f"keys of {shape.q_heads}/{shape.kv_heads} heads"
            )
            for shape, lanes in lanes_by_shape(workload, trade).items()
        ]
    )


def lanes_by_shape(workload: Workload, trade: Trade) -> dict[Shape, Lanes]:
    """Those who have the same share of the heads, a lane for each share, by what it is a share of."""
    alike: dict[Shape, Lanes] = {}
    for i, share in enumerate(trade.shares):
        if share.q:
            alike.setdefault(workload.shape.of(share), []).append(list(range(i, workload.shards.world, trade.ranks)))
    return alike


def everybody(workload: Workload) -> list[int]:
    """One lane of all ranks."""
    return list(range(workload.shards.world))


def sizes_of(workload: Workload) -> Sizes:
    """The sizes of all ranks' own rows and heads."""
    return Sizes.of([workload.shape] * workload.shards.world, [ranges.size(held) for held in workload.shards.queries])


def grad_weight(shape: Shape, backward: bool) -> float:
    """How much gradients weigh where a ring chooses its way."""
    return shape.grad_weight if backward else 0.0
