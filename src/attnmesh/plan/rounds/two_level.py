"""Rounds of a ring of rings: at every outer stage the next node's keys travel while the inner rings turn once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from attnmesh.plan.program import Messages, Round
from attnmesh.plan.rounds.ring import Merged, grads_of, keys_of, ring_backward, ring_forward
from attnmesh.plan.rounds.sizes import Sizes, laid_out
from attnmesh.plan.rounds.stages import Stages

Inner = Callable[[int], Iterator[Stages]]
"""The stages of all inner rings at an outer stage."""


def two_level_forward(outer: Iterator[Stages], inner: Inner, sizes: Sizes) -> Iterator[Round]:
    """An outer stage is as many rounds as its longest inner ring has."""
    merged = Merged(sizes)
    for t, stage in enumerate(outer):
        between = {f"node keys {t + 1}": keys_of(stage, sizes)}
        turning = ring_forward(inner(t), sizes, merged, name=f"keys {t}.", ends=False)
        yield from _beside(turning, between, between)
    yield Round("finish", work=(sizes.merging(merged.parts, merged.parts, last=True),))


def two_level_backward(outer: Iterator[Stages], inner: Inner, sizes: Sizes) -> Iterator[Round]:
    """What a node found for visiting keys travels on with them."""
    merged = Merged(sizes)
    homing: dict[str, Messages] = {}
    for t, stage in enumerate(outer):
        keys = {f"node keys {t + 1}": keys_of(stage, sizes)}
        turning = ring_backward(inner(t), sizes, merged, name=f"keys {t}.", ends=False)
        yield from _beside(turning, keys | homing, keys | homing)
        homing = {}
        if t:
            rows = np.zeros(sizes.world, dtype=np.int64)
            rows[stage.rank] = stage.grad_rows
            yield Round(f"join {t}", work=(laid_out(rows * sizes.key_grad_row, calls=2),))
            homing = {f"node gradients {t}": grads_of(stage, sizes)}
    yield Round("home", homing, (sizes.merging(merged.parts, merged.parts, last=True),), tuple(homing))


def _beside(turning: Iterator[Round], starts: dict[str, Messages], waits: dict[str, Messages]) -> Iterator[Round]:
    """Rounds during which more travels: it starts with the first and is waited for in the last."""
    rounds = list(turning)
    rounds[0] = replace(rounds[0], starts={**starts, **rounds[0].starts})
    rounds[-1] = replace(rounds[-1], waits=(*rounds[-1].waits, *waits))
    yield from rounds
