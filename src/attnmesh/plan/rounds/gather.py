"""Rounds of the all-gather: a group of kv heads a round, its keys one round ahead of its attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnmesh.core import ranges
from attnmesh.plan.allgather import GatherPlan
from attnmesh.plan.program import Bundle, Ints, Kernels, Messages, Round
from attnmesh.plan.rounds.sizes import Sizes, copying, laid_out
from attnmesh.plan.rounds.stages import causal_squares
from attnmesh.plan.rounds.travel import Travel, TravelSums


@dataclass(frozen=True)
class Gathered:
    """What every rank gathers and computes; entry r is rank r's, 0 where another gathering serves it."""

    pairs: Ints
    calls: Ints
    rows: Ints  # that it gathers, its own among them
    own: Ints  # rows of keys that it holds
    travel: Travel | TravelSums
    squares: tuple[Ints, Ints]  # pairs and calls of the causal squares among them


def gathered_of(plan: GatherPlan, lanes: Sequence[Sequence[int]], world: int) -> Gathered:
    """A plan that serves the ranks of every lane; the i-th rank of a lane is the plan's i-th."""
    pairs, calls, rows, own, *squares = columns = np.zeros((6, world), dtype=np.int64)
    for i in range(plan.world):
        patch = plan.patch(i)
        mine = plan.pairs(i), len(patch.blocks), plan.rows(i), ranges.size(plan.shards.keys[i]), *causal_squares(patch)
        columns[:, [lane[i] for lane in lanes]] = np.array(mine)[:, None]
    ways = [(s, t) for s in range(plan.world) for t in range(plan.world) if s != t]
    moves = [(lane[s], lane[t], plan.rows_sent(s, t)) for lane in lanes for s, t in ways]
    travel = Travel(*np.array(moves, dtype=np.int64).reshape(-1, 3).T)
    return Gathered(pairs, calls, rows, own, travel, (squares[0], squares[1]))


def gather_forward(gathered: Gathered, groups: Sequence[int], sizes: Sizes, *, name: str = "keys") -> Iterator[Round]:
    """The next group's keys travel while this group is computed. `groups` are their kv heads."""
    for at, heads in enumerate((*groups, 0)):
        posted = {f"{name} {at}": _keys(gathered, sizes, heads, sum(groups))} if heads else {}
        work = [_packing(gathered, sizes, heads, sum(groups))] if heads else []
        if at:
            work += _attention(gathered, sizes, groups[at - 1], sum(groups), backward=False)
        if not heads and len(groups) > 1:
            work.append(copying(sizes.rows * sizes.query_row * (gathered.pairs > 0)))  # groups of heads side by side
        yield Round(f"{name} {at}", posted, tuple(work), tuple(posted))


def gather_backward(gathered: Gathered, groups: Sequence[int], sizes: Sizes, *, name: str = "keys") -> Iterator[Round]:
    """Gradients of the group before travel home meanwhile."""
    homing: dict[str, Messages | Bundle] = {}
    for at, heads in enumerate((*groups, 0)):
        posted = {f"{name} {at}": _keys(gathered, sizes, heads, sum(groups))} if heads else {}
        work = [_packing(gathered, sizes, heads, sum(groups))] if heads else []
        if at:
            work += _attention(gathered, sizes, groups[at - 1], sum(groups), backward=True)
        yield Round(f"{name} {at}", posted | homing, tuple(work), (*posted, *homing))
        homing = {}
        if at:
            row = sizes.key_grad_row * groups[at - 1] // sum(groups)
            homing = {f"{name} gradients {at}": gathered.travel.back_weighing(row)}
    yield Round(f"{name} home", homing, (), tuple(homing))


def _keys(gathered: Gathered, sizes: Sizes, heads: int, of: int) -> Messages | Bundle:
    return gathered.travel.weighing(sizes.key_row * heads // of)


def _packing(gathered: Gathered, sizes: Sizes, heads: int, of: int) -> Kernels:
    """The own keys of a group: into a message, if anybody wants them, and among those that are gathered."""
    copies = 1 + (gathered.travel.sent(sizes.world) > 0)
    return laid_out(copies * gathered.own * sizes.key_row * heads // of, calls=4)


def _attention(gathered: Gathered, sizes: Sizes, heads: int, of: int, *, backward: bool) -> list[Kernels]:
    share = heads / of
    kernels = sizes.attention(gathered.pairs, gathered.calls, backward=backward, squares=gathered.squares)
    if backward:
        after = laid_out(gathered.rows * sizes.key_grad_row * share, calls=2)  # into the message that goes home
    else:
        after = sizes.merging(np.zeros_like(gathered.calls), gathered.calls, last=True)
        after = replace(after.times(share), beside=True)  # runs of queries finish on lanes of their own
    return [kernels.times(share), after]
