"""The memory that every schedule takes beside its inputs, from the same plans that executors follow.

Forward: from the call until its results are there, these included, and what is kept for a backward. Backward: beside
q, k, v, out, lse and the gradient of out; gradients and what the forward kept included. Left out is what kernels use
for themselves while they run.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from attnmesh.core import ranges
from attnmesh.plan import held
from attnmesh.plan.program import Ints
from attnmesh.plan.programs import (
    Lanes,
    after_trade,
    everybody,
    figures,
    grad_weight,
    groups_of_heads,
    lanes_by_shape,
    sizes_of,
)
from attnmesh.plan.rounds.sizes import Sizes
from attnmesh.plan.rounds.ulysses import Trade
from attnmesh.plan.shards import Shards
from attnmesh.plan.ulysses import replicated
from attnmesh.plan.workload import Shape, Workload
from attnmesh.planner.hardware import Floats


def peak_bytes(schedule: str, workload: Workload, *, backward: bool) -> Ints:
    """Bytes by rank. The schedule must be able to serve the case: see `refusal`."""
    return _rounded(_PEAKS[schedule](workload, backward))


def _ring(workload: Workload, backward: bool) -> Floats:
    return _turning(workload, workload.shards, [everybody(workload)], sizes_of(workload), backward)


def _allgather(workload: Workload, backward: bool) -> Floats:
    return _gathering(workload, workload.shards, {workload.shape: [everybody(workload)]}, sizes_of(workload), backward)


def _ring_ring(workload: Workload, backward: bool) -> Floats:
    outer, turn = figures(workload.shards).two_level(workload.ranks_per_node, grad_weight(workload.shape, backward))
    sizes, own, cpu = sizes_of(workload), _held_keys(workload.shards), workload.device == "cpu"
    between, within = held.Turned(sizes.world), held.Turned(sizes.world)
    for at, stage in enumerate(outer):
        between.meet(stage, first=at == 0)
        within.turn(turn(at), at_home=at == 0)
    if not backward:
        return held.key_buffers(between, sizes) + held.ring_forward_peak(within, sizes, cpu=cpu)
    # A node's visitors have sums of gradients in this rank, as its own keys have.
    visitors = between.keys * (sizes.key_grad_row + sizes.key_row)
    outside = held.key_buffers(between, sizes) + held.grad_buffers(between, sizes) + visitors
    return outside + held.ring_backward_peak(within, sizes, own)


def _ulysses(workload: Workload, backward: bool) -> Floats:
    return _traded(workload, workload.shards.world, backward, _turning_lanes)


def _ulysses_ring(workload: Workload, backward: bool) -> Floats:
    return _traded(workload, workload.ranks_per_node, backward, _turning_lanes)


def _ulysses_allgather(workload: Workload, backward: bool) -> Floats:
    return _traded(workload, workload.ranks_per_node, backward, _gathering)


_PEAKS: dict[str, Callable[[Workload, bool], Floats]] = {
    "ring": _ring,
    "allgather": _allgather,
    "ulysses": _ulysses,
    "ulysses+ring": _ulysses_ring,
    "ulysses+allgather": _ulysses_allgather,
    "ring+ring": _ring_ring,
}

_Between = Callable[[Workload, Shards, dict[Shape, Lanes], Sizes, bool], Floats]


def _turning(workload: Workload, shards: Shards, lanes: Lanes, sizes: Sizes, backward: bool) -> Floats:
    turned = held.Turned(sizes.world)
    turned.turn(figures(shards).ring(lanes, grad_weight(workload.shape, backward)))
    if not backward:
        return held.ring_forward_peak(turned, sizes, cpu=workload.device == "cpu")
    return held.ring_backward_peak(turned, sizes, _by_lane(_held_keys(shards), lanes, sizes))


def _turning_lanes(
    workload: Workload, shards: Shards, lanes: dict[Shape, Lanes], sizes: Sizes, backward: bool
) -> Floats:
    return _turning(workload, shards, [lane for alike in lanes.values() for lane in alike], sizes, backward)


def _gathering(workload: Workload, shards: Shards, lanes: dict[Shape, Lanes], sizes: Sizes, backward: bool) -> Floats:
    peak = np.zeros(sizes.world)
    for shape, alike in lanes.items():
        group = np.full(sizes.world, max(map(len, groups_of_heads(workload, shards, shape))) / shape.kv_heads)
        gathered = figures(shards).gathered(alike, sizes.world, workload.ranks_per_node)
        if backward:
            found = held.gather_backward_peak(gathered, group, sizes)
        else:
            found = held.gather_forward_peak(gathered, group, sizes, cpu=workload.device == "cpu")
        members = np.array(alike).reshape(-1)
        peak[members] = found[members]
    return peak


def _traded(workload: Workload, ranks: int, backward: bool, then: _Between) -> Floats:
    """All rows of some heads, twice over while they are traded, and what follows among those with the same heads."""
    trade, between, sizes = after_trade(workload, ranks)
    own = sizes_of(workload)
    lse = workload.lse * sizes.rows * sizes.lse_row
    queries, mine = sizes.rows * sizes.query_row, own.rows * own.query_row
    keys = np.repeat(_held_keys(between), ranks)
    attending = then(workload, between, lanes_by_shape(workload, trade), sizes, backward)
    if not backward:
        # On the way back: q and out, out in one piece, then with rows first; and of the own rows, parts and the whole.
        back: Floats = keys * sizes.key_row + 4 * queries + 2 * mine + 3 * lse
        there: Floats = queries + keys * sizes.key_row + attending
        return np.maximum(there, back)
    kept = 2 * queries + keys * sizes.key_row + sizes.rows * sizes.lse_row
    there = queries + lse + attending
    back = 2 * queries + lse + mine + _traded_key_grads(workload, trade, sizes, keys)
    peak: Floats = kept + np.maximum(there, back)
    return peak


def _traded_key_grads(workload: Workload, trade: Trade, sizes: Sizes, keys: Ints) -> Floats:
    """dk and dv: found, in one piece, with rows first; and of the own rows, parts from everybody and their sum."""
    shape = workload.shape
    shared = replicated(shape.q_heads, shape.kv_heads, trade.ranks)
    row = sizes.key_grad_row if shared else sizes.key_row
    own = _held_keys(workload.shards)
    first = np.arange(len(own)) // trade.ranks
    of_all = np.bincount(first, row)[first]  # a row from every rank of the group
    found: Floats = keys * (np.maximum(row, sizes.key_row) + 2 * row) + own * (of_all + shape.key_row)
    return found


def _held_keys(shards: Shards) -> Ints:
    return np.array([ranges.size(mine) for mine in shards.keys], dtype=np.int64)


def _by_lane(values: Ints, lanes: Lanes, sizes: Sizes) -> Ints:
    """Values by place in a lane as values by rank."""
    found = np.zeros(sizes.world, dtype=np.int64)
    for lane in lanes:
        found[lane] = values
    return found


def _rounded(peak: Floats) -> Ints:
    return np.ceil(peak).astype(np.int64)
