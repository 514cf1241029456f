"""What is held while rings turn and keys are gathered: buffers, partial results and sums. Entry r is rank r's bytes.

Partial results wait, four at most, before they become a total in float32, and two beside it (ops/accumulate.py). How
many rows each covers is not looked up: of one patch, the first is taken to cover all and further ones half of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from attnmesh.plan.program import Ints
from attnmesh.plan.rounds.gather import Gathered
from attnmesh.plan.rounds.sizes import Sizes
from attnmesh.plan.rounds.stages import Stages
from attnmesh.planner.hardware import Floats

_WAITING = 4


@dataclass
class Turned:
    """What rings have held so far: the most of every stage."""

    world: int

    def __post_init__(self) -> None:
        zeros = np.zeros(self.world, dtype=np.int64)
        self.keys, self.grads, self.home = zeros.copy(), zeros.copy(), zeros.copy()  # rows in buffers
        self.own_parts, self.parts, self.visiting = np.zeros((3, self.world))  # in whole rows of queries, and of keys

    def turn(self, stages: Iterator[Stages], *, at_home: bool = True) -> None:
        """Once around. The first stage is `at_home` where its keys are the ranks' own."""
        for at, stage in enumerate(stages):
            self.meet(stage, first=at == 0)
            whole = _whole(stage.calls)
            np.add.at(self.parts, stage.rank, whole)
            if at == 0 and at_home:
                np.maximum.at(self.own_parts, stage.rank, whole)
            else:
                np.maximum.at(self.visiting, stage.rank, whole * stage.seen)

    def meet(self, stage: Stages, *, first: bool) -> None:
        """What goes in and out of buffers at one stage; gradients found at the first stay."""
        np.maximum.at(self.keys, stage.next_rank, stage.next_rows)
        if first:
            np.maximum.at(self.keys, stage.rank, stage.next_rows)
        else:
            np.maximum.at(self.grads, stage.rank, stage.grad_rows)
            np.maximum.at(self.home, stage.next_rank, stage.grad_rows)


def key_buffers(turned: Turned, sizes: Sizes) -> Ints:
    """Two: one is computed on while the other fills."""
    return 2 * turned.keys * sizes.key_row


def grad_buffers(turned: Turned, sizes: Sizes) -> Ints:
    """Two on the way, and one for what comes home."""
    return (2 * turned.grads + turned.home) * sizes.key_grad_row


def states(parts: Floats, sizes: Sizes, *, cpu: bool) -> Floats:
    """Partial results of all rows, their total while it is merged, and what comes out."""
    part, total = sizes.rows * (sizes.query_row + sizes.lse_row), sizes.rows * (sizes.query_sum_row + sizes.lse_row)
    scaled = 2 * sizes.rows * sizes.query_sum_row if cpu else 0  # torch's operations leave some behind
    several = np.minimum(parts, _WAITING) * part + total + scaled
    held: Floats = np.where(parts > 1, np.maximum(several, 2 * part + total + part), part)
    return np.where(parts > 0, held, total + part)


def query_grads(parts: Floats, sizes: Sizes) -> Floats:
    """Partial gradients of queries, and as much in float32: their total, or what a kernel sums them in."""
    found: Floats = sizes.rows * (np.minimum(parts, _WAITING) * sizes.query_row + sizes.query_sum_row)
    return found


def ring_forward_peak(turned: Turned, sizes: Sizes, *, cpu: bool) -> Floats:
    """Keys on their way and states."""
    return key_buffers(turned, sizes) + states(turned.parts, sizes, cpu=cpu)


def ring_backward_peak(turned: Turned, sizes: Sizes, own: Ints) -> Floats:
    """Keys and gradients on their way, those of the `own` keys, and of those that visit, as kernels leave them."""
    on_the_way = key_buffers(turned, sizes) + grad_buffers(turned, sizes)
    left = (np.minimum(turned.own_parts, _WAITING) * own + turned.visiting) * sizes.key_row
    finished = sizes.rows * (sizes.query_sum_row + sizes.query_row) + own * (sizes.key_grad_row + sizes.key_row)
    turning = on_the_way + left + query_grads(turned.parts, sizes)
    peak: Floats = np.maximum(turning, finished)
    return peak


def gather_forward_peak(gathered: Gathered, group: Floats, sizes: Sizes, *, cpu: bool) -> Floats:
    """Keys of two groups and own keys to be sent; states of the groups before, which are joined in the end.

    `group` is the part of all heads that the largest group has.
    """
    whole = sizes.rows * (sizes.query_row + sizes.lse_row)
    working = states(_whole(gathered.calls), sizes, cpu=cpu)
    at_work = _gathered_keys(gathered, group, sizes) + (1 - group) * whole + group * working
    peak: Floats = np.maximum(at_work, np.where(group < 1, 2 * whole, 0))
    return peak


def gather_backward_peak(gathered: Gathered, group: Floats, sizes: Sizes) -> Floats:
    """Of one group: gradients of its keys as kernels leave them, those that are sent, and those that arrive."""
    parts = _whole(gathered.calls)
    left = np.minimum(parts, 2) * gathered.rows * sizes.key_row
    sent = (gathered.rows + gathered.travel.sent(sizes.world)) * sizes.key_grad_row
    totals = gathered.own * sizes.key_grad_row + sizes.rows * sizes.query_row
    return _gathered_keys(gathered, group, sizes) + totals + group * (left + sent + query_grads(parts, sizes))


def _gathered_keys(gathered: Gathered, group: Floats, sizes: Sizes) -> Floats:
    keys: Floats = 2 * (gathered.rows + gathered.own) * sizes.key_row * group
    return keys


def _whole(calls: Ints) -> Floats:
    """How many times the calls of one patch cover its rows."""
    return np.where(calls > 0, (1 + calls) / 2, 0.0)
