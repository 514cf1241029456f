"""From the name of a schedule to the program of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from attnmesh.core import ranges as spans
from attnmesh.plan.allgather import groups_that_fill, head_groups
from attnmesh.plan.case import Case, Shape
from attnmesh.plan.program import Program, Round
from attnmesh.plan.rounds.by_patch import ByPatch
from attnmesh.plan.rounds.gather import gather_backward, gather_forward
from attnmesh.plan.rounds.lanes import beside
from attnmesh.plan.rounds.ring import Merged, ring_backward, ring_forward
from attnmesh.plan.rounds.sizes import Sizes
from attnmesh.plan.rounds.two_level import two_level_backward, two_level_forward
from attnmesh.plan.rounds.ulysses import Trade, traded
from attnmesh.plan.shards import Spread, between_nodes
from attnmesh.plan.wide.schedules import WideSpread

MOST_BY_PATCH = 16
"""Ranks up to which every patch is looked at by itself."""

Lanes = list[list[int]]
"""Ranks that work with one another; the i-th of every lane does the same."""


def program(schedule: str, case: Case, *, backward: bool) -> Program:
    """What all ranks do under a schedule that can serve the case (see `refusal`)."""
    return Program(schedule, case.spread.world, lambda: _ROUNDS[schedule](case, backward))


def _ring(case: Case, backward: bool) -> Iterator[Round]:
    return _turning(case.spread, case.shape, [everybody(case)], sizes_of(case), backward)


def _allgather(case: Case, backward: bool) -> Iterator[Round]:
    return _gathering(case, case.spread, case.shape, [everybody(case)], sizes_of(case), backward)


def _ulysses(case: Case, backward: bool) -> Iterator[Round]:
    return _after_trade(case, case.spread.world, backward, _ring_between)


def _ulysses_ring(case: Case, backward: bool) -> Iterator[Round]:
    return _after_trade(case, case.ranks_per_node, backward, _ring_between)


def _ulysses_allgather(case: Case, backward: bool) -> Iterator[Round]:
    return _after_trade(case, case.ranks_per_node, backward, _gather_between)


def _ring_ring(case: Case, backward: bool) -> Iterator[Round]:
    outer, turn = figures(case.spread).two_level(case.ranks_per_node, grad_weight(case.shape, backward))
    return (two_level_backward if backward else two_level_forward)(outer, turn, sizes_of(case))


_ROUNDS: dict[str, Callable[[Case, bool], Iterator[Round]]] = {
    "ring": _ring,
    "allgather": _allgather,
    "ulysses": _ulysses,
    "ulysses+ring": _ulysses_ring,
    "ulysses+allgather": _ulysses_allgather,
    "ring+ring": _ring_ring,
}
SCHEDULES = tuple(_ROUNDS)


def figures(spread: Spread) -> ByPatch | WideSpread:
    """Patch by patch as executors have it; for more ranks than executors were ever asked for, the same by arrays."""
    wide = WideSpread.of(spread) if spread.world > MOST_BY_PATCH else None
    return ByPatch(spread) if wide is None else wide


def _turning(spread: Spread, shape: Shape, lanes: Lanes, sizes: Sizes, backward: bool) -> Iterator[Round]:
    stages = figures(spread).ring(lanes, grad_weight(shape, backward))
    return (ring_backward if backward else ring_forward)(stages, sizes, Merged(sizes))


def _gathering(
    case: Case, spread: Spread, shape: Shape, lanes: Lanes, sizes: Sizes, backward: bool, name: str = "keys"
) -> Iterator[Round]:
    groups = groups_of_heads(case, spread, shape)
    gathered = figures(spread).gathered(lanes, sizes.world, case.ranks_per_node)
    return (gather_backward if backward else gather_forward)(
        gathered, [len(heads) for heads in groups], sizes, name=name
    )


def groups_of_heads(case: Case, spread: Spread, shape: Shape) -> list[range]:
    """The kv heads that are gathered together, group by group."""
    if case.device == "cpu":
        return head_groups(shape.kv_heads)
    return head_groups(shape.kv_heads, groups_that_fill(spread, shape.batch, shape.q_heads))


def _after_trade(
    case: Case, ranks: int, backward: bool, then: Callable[[Case, Trade, Spread, Sizes, bool], Iterator[Round]]
) -> Iterator[Round]:
    """Rows traded for heads among `ranks` neighbours, and what follows between those with the same heads."""
    trade, between, sizes = after_trade(case, ranks)
    return traded(trade, then(case, trade, between, sizes, backward), backward=backward)


def after_trade(case: Case, ranks: int) -> tuple[Trade, Spread, Sizes]:
    """The trade among `ranks` neighbours, and who holds what after it."""
    trade = Trade(case, ranks)
    between = between_nodes(case.spread, ranks)
    assert between is not None, "see refusal"
    rows = [spans.size(held) for held in between.queries for _ in range(ranks)]
    segments = [len(share.segments) for share in trade.shares] * between.world
    return trade, between, Sizes.of(trade.shapes(), rows, segments)


def _ring_between(case: Case, trade: Trade, between: Spread, sizes: Sizes, backward: bool) -> Iterator[Round]:
    lanes = [lane for lanes in lanes_by_shape(case, trade).values() for lane in lanes]
    return _turning(between, case.shape, lanes, sizes, backward)


def _gather_between(case: Case, trade: Trade, between: Spread, sizes: Sizes, backward: bool) -> Iterator[Round]:
    """Lanes with the same heads gather in the same groups of heads."""
    return beside(
        [
            _gathering(
                case, between, shape, lanes, sizes, backward, name=f"keys of {shape.q_heads}/{shape.kv_heads} heads"
            )
            for shape, lanes in lanes_by_shape(case, trade).items()
        ]
    )


def lanes_by_shape(case: Case, trade: Trade) -> dict[Shape, Lanes]:
    """Those who have the same share of the heads, a lane for each share, by what it is a share of."""
    alike: dict[Shape, Lanes] = {}
    for i, share in enumerate(trade.shares):
        if share.q:
            alike.setdefault(case.shape.of(share), []).append(list(range(i, case.spread.world, trade.ranks)))
    return alike


def everybody(case: Case) -> list[int]:
    """One lane of all ranks."""
    return list(range(case.spread.world))


def sizes_of(case: Case) -> Sizes:
    """The sizes of all ranks' own rows and heads."""
    return Sizes.of([case.shape] * case.spread.world, [spans.size(held) for held in case.spread.queries])


def grad_weight(shape: Shape, backward: bool) -> float:
    """How much gradients weigh where a ring chooses its way."""
    return shape.grad_weight if backward else 0.0
