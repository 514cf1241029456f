"""The stages of rings as arrays: what each rank computes and passes on. Several rings may turn side by side."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from attnmesh.plan.blocks import Kind, Patch
from attnmesh.plan.program import Ints
from attnmesh.plan.ring import RingPlan

_FEW = 8  # stretches of queries


class Stages(NamedTuple):
    """One stage of all ranks of some rings; entry i is of rank `rank[i]`."""

    rank: Ints
    pairs: Ints  # that it computes
    calls: Ints  # in so many blocks
    seen: Ints  # rows of the visiting keys that it sees
    next_rank: Ints  # where keys and gradients go on to
    next_rows: Ints  # rows of keys that go there
    grad_rows: Ints  # rows of gradients that go there
    square_pairs: Ints  # of the pairs, those in causal squares
    square_calls: Ints


def stages_of(plan: RingPlan, ranks: Sequence[int], *, computes: bool = True) -> Iterator[Stages]:
    """The stages of a plan whose i-th rank is the rank `ranks[i]` of the whole. An outer ring only moves keys."""
    stages = [plan.stages(i) for i in range(plan.world)]
    for at in range(len(plan.offsets)):
        rows = [
            (
                ranks[i], mine[at].patch.pairs if computes else 0, _calls(mine[at].patch) if computes else 0,
                len(mine[at].seen),
                ranks[mine[at].next_rank], len(mine[at].next_keys), len(mine[at].grads_out),
                *(causal_squares(mine[at].patch) if computes else (0, 0)),
            )
            for i, mine in enumerate(stages)
        ]  # fmt: skip
        yield Stages(*np.array(rows, dtype=np.int64).reshape(-1, len(Stages._fields)).T)


def _calls(patch: Patch) -> int:
    """Blocks that a patch is computed in; of many documents, about as many."""
    return len(patch.blocks) if patch.stretches <= _FEW else min(patch.stretches, patch.pairs)


def side_by_side(rings: Iterable[Iterator[Stages]]) -> Iterator[Stages]:
    """The stages of several rings of different ranks; those with fewer are done earlier."""
    for stages in zip_longest(*rings):
        there = [stage for stage in stages if stage is not None]
        yield Stages(*map(np.concatenate, zip(*there, strict=True)))


def causal_squares(patch: Patch) -> tuple[int, int]:
    """Pairs in the causal squares among a patch's blocks, and how many squares: kernels have their own pace there."""
    if patch.stretches > _FEW:
        return 0, 0
    sides = [len(block.q) for block in patch.blocks if block.kind is Kind.CAUSAL]
    return sum(side * (side + 1) // 2 for side in sides), len(sides)
