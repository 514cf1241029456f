"""Rounds in which keys of the sparse family come to queries: gathered at once, or block by block around a ring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from attnmesh.plan.program import Ints, Messages, Round
from attnmesh.plan.rounds.collectives import Groups, exchanged
from attnmesh.plan.rounds.sizes import copying
from attnmesh.plan.sparse_shape import SparseShares
from attnmesh.planner.hardware import Floats


@dataclass(frozen=True)
class Met:
    """The keys that every rank has at hand in one visit; entry r is rank r's."""

    name: str
    keys: Ints
    seen: Floats  # pairs of its queries and these keys
    named: Floats  # slots of its queries that name one of these keys


Work = Callable[[Met], Iterator[Round]]
"""What ranks do with the keys of a visit; one round at least."""


def visits(
    shares: SparseShares, key_rows: Sequence[int], work: Work, *, name: str, grad_rows: Sequence[int] = ()
) -> Iterator[Round]:
    """Keys of `key_rows` bytes a position (an entry for each tensor) come by; gradients of them go home."""
    groups = along_cp(shares)
    if shares.grid.sharded:
        return _ring(shares, groups, sum(key_rows), work, name, sum(grad_rows))
    return _gathered(shares, groups, key_rows, work, name, grad_rows)


def along_tp(shares: SparseShares) -> Groups:
    """Ranks with the same rows."""
    return Groups(shares.ranks, shares.grid.node or shares.grid.world)


def along_cp(shares: SparseShares) -> Groups:
    """Ranks with the same heads."""
    return Groups(shares.ranks.T, shares.grid.node or shares.grid.world)


def _gathered(
    shares: SparseShares, groups: Groups, key_rows: Sequence[int], work: Work, name: str, grad_rows: Sequence[int]
) -> Iterator[Round]:
    at, total = shares.cp_place, int(shares.held.sum())
    everything = np.full(groups.world, total, dtype=np.int64)
    if groups.size > 1:
        for tensor, row in enumerate(key_rows):
            yield from exchanged(f"{name} {tensor}", groups.gathered(shares.held[at] * row))
            yield Round(f"{name} {tensor} in order", work=(copying(everything * row),))
    yield from work(Met(name, everything, shares.seen.sum(1)[at], shares.named.sum(1)[at]))
    if groups.size > 1:
        for tensor, row in enumerate(grad_rows):
            yield Round(f"{name} gradients {tensor} packed", work=(copying(everything * row),))
            yield from exchanged(f"{name} gradients {tensor}", groups.scattered(shares.held[at] * row))
            yield Round(f"{name} gradients {tensor} added", work=(copying(groups.size * shares.held[at] * row),))


def _ring(shares: SparseShares, groups: Groups, key_row: int, work: Work, name: str, grad_row: int) -> Iterator[Round]:
    """At every step the keys of the next owner travel, and the gradients of the last one's follow them."""
    homing: dict[str, Messages] = {}
    for step in range(groups.size):
        owner = (shares.cp_place - step) % groups.size
        held = shares.held[owner]
        keys: dict[str, Messages] = {}
        if step + 1 < groups.size:
            keys = {f"{name} {step + 1}": groups.shifted(held * key_row)}
        travelling = keys | homing
        place = shares.cp_place
        rounds = list(work(Met(f"{name} {step}", held, shares.seen[place, owner], shares.named[place, owner])))
        rounds[0] = replace(rounds[0], starts={**travelling, **rounds[0].starts})
        rounds[-1] = replace(rounds[-1], waits=(*rounds[-1].waits, *travelling))
        yield from rounds
        homing = {}
        if step and grad_row:
            yield Round(f"{name} gradients {step} added", work=(copying(held * grad_row),))
            homing = {f"{name} gradients {step}": groups.shifted(held * grad_row)}
    if homing:
        yield Round(f"{name} home", homing, (), tuple(homing))
        yield Round(f"{name} home added", work=(copying(shares.held[shares.cp_place] * grad_row),))
