"""Rounds of rings: the two loops of parallel/ring.py, a stage a round."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attnmesh.plan.program import Ints, Kernels, Messages, Round
from attnmesh.plan.rounds.sizes import Sizes, laid_out
from attnmesh.plan.rounds.stages import Stages


class Merged:
    """How many partial results every rank has merged; one ring may continue another's state."""

    def __init__(self, sizes: Sizes) -> None:
        self.parts: Ints = np.zeros(sizes.world, dtype=np.int64)


def ring_forward(
    stages: Iterator[Stages], sizes: Sizes, merged: Merged, *, name: str = "keys", ends: bool = True
) -> Iterator[Round]:
    """The next keys travel while these are computed. `ends`: the results are finished after the last stage."""
    for at, (stage, last) in enumerate(_and_last(stages)):
        work = _work(at, stage, sizes, merged, last=last, ends=ends, backward=False)
        posted = {f"{name} {at + 1}": keys_of(stage, sizes)}
        yield Round(f"{name} {at}", posted, work, tuple(posted))


def ring_backward(
    stages: Iterator[Stages], sizes: Sizes, merged: Merged, *, name: str = "keys", ends: bool = True
) -> Iterator[Round]:
    """Keys travel as before; what visitors found for them travels on behind, and home at the end."""
    homing: dict[str, Messages] = {}
    for at, (stage, last) in enumerate(_and_last(stages)):
        work = _work(at, stage, sizes, merged, last=last, ends=ends, backward=True)
        if at:  # gradients of visiting keys join those that came along
            found = _spread(stage.rank, stage.grad_rows, sizes) * sizes.key_grad_row
            work = (*work, laid_out(found, calls=2, beside=True))
        posted = {f"{name} {at + 1}": keys_of(stage, sizes)} | homing
        yield Round(f"{name} {at}", posted, work, tuple(posted))
        homing = {f"{name} gradients {at}": grads_of(stage, sizes)} if at else {}
    yield Round(f"{name} home", homing, (), tuple(homing))


def _work(
    at: int, stage: Stages, sizes: Sizes, merged: Merged, *, last: bool, ends: bool, backward: bool
) -> tuple[Kernels, ...]:
    """What ranks compute at a stage: own keys are packed at the first, parts are merged, and finished at the last."""
    pairs, calls = _spread(stage.rank, stage.pairs, sizes), _spread(stage.rank, stage.calls, sizes)
    before = merged.parts
    merged.parts = before + calls
    squares = _spread(stage.rank, stage.square_pairs, sizes), _spread(stage.rank, stage.square_calls, sizes)
    attention = sizes.attention(pairs, calls, backward=backward, squares=squares, alone=last and not at)
    merging = sizes.merging(before, merged.parts, last=ends and last)
    if at:
        return attention, merging
    return laid_out(_spread(stage.rank, stage.next_rows, sizes) * sizes.key_row), attention, merging


def keys_of(stage: Stages, sizes: Sizes) -> Messages:
    """The keys that go on after a stage."""
    return _messages(stage, stage.next_rows * sizes.key_row[stage.rank])


def grads_of(stage: Stages, sizes: Sizes) -> Messages:
    """The gradients that go on after a stage."""
    return _messages(stage, stage.grad_rows * sizes.key_grad_row[stage.rank])


def _messages(stage: Stages, nbytes: Ints) -> Messages:
    sent = nbytes > 0
    return Messages(stage.rank[sent], stage.next_rank[sent], nbytes[sent])


def _spread(ranks: Ints, values: Ints, sizes: Sizes) -> Ints:
    """Values of some ranks as an entry for every rank."""
    whole = np.zeros(sizes.world, dtype=np.int64)
    whole[ranks] = values
    return whole


def _and_last(stages: Iterator[Stages]) -> Iterator[tuple[Stages, bool]]:
    """Every stage, and whether it is the last."""
    stage = next(stages, None)
    while stage is not None:
        after = next(stages, None)
        yield stage, after is None
        stage = after
