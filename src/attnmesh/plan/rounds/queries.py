"""Rounds of query-distributed attention: keys are whole on every rank, which answers its share of the queries.

Nothing travels forward. Backward, dk and dv of all ranks are summed, one after the other, before they are rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from attnmesh.core.ranges import Ranges
from attnmesh.plan.program import Ints, Kernels, Round
from attnmesh.plan.rounds.collectives import Groups, exchanged, summed
from attnmesh.plan.rounds.sizes import Sizes, copying


@dataclass(frozen=True)
class Answered:
    """What every rank answers; entry r is rank r's."""

    pairs: Ints
    calls: Ints
    squares: tuple[Ints, Ints]  # pairs and calls of the causal squares among them

    @staticmethod
    def of(chunks: Sequence[Ranges]) -> Answered:
        """Causal queries in chunks: each chunk sees all keys before it, and a triangle of its own."""
        pairs = [sum(len(c) * (c.start + c.stop + 1) // 2 for c in mine) for mine in chunks]
        calls = [sum(1 + (c.start > 0 and len(c) > 1) for c in mine) for mine in chunks]
        sides = [[len(c) for c in mine if len(c) > 1] for mine in chunks]
        square_pairs, square_calls = (
            [sum(n * (n + 1) // 2 for n in mine) for mine in sides],
            [len(mine) for mine in sides],
        )
        columns = (np.array(column, dtype=np.int64) for column in (pairs, calls, square_pairs, square_calls))
        every_pair, every_call, *squares = columns
        return Answered(every_pair, every_call, (squares[0], squares[1]))


def queries_forward(answered: Answered, sizes: Sizes, groups: Groups, *, gather: bool) -> Iterator[Round]:
    """`gather`: the whole of out comes to every rank in the end."""
    parts = np.minimum(answered.calls, 2)  # of a row: keys before its chunk, and the chunk's own
    merging = sizes.merging(np.zeros_like(parts), parts, last=True)
    yield Round("answer", work=(_attention(answered, sizes, backward=False), merging))
    if gather:
        whole = int((sizes.rows * sizes.query_row).sum())
        yield from exchanged("gather", groups.gathered(sizes.rows * sizes.query_row))
        yield Round("in order", work=(copying(np.full(sizes.world, whole)),))


def queries_backward(answered: Answered, sizes: Sizes, groups: Groups, length: int, *, gather: bool) -> Iterator[Round]:
    """`gather`: what each rank found for the whole of out is summed before anything else."""
    if gather:
        yield from summed("sum of d_out", length * sizes.query_row, groups)
    whole_dq = copying(length * sizes.query_sum_row)  # zeros, but for the own rows
    yield Round("answer", work=(_attention(answered, sizes, backward=True), whole_dq))
    side = length * sizes.key_grad_row // 2
    for name in ("dk", "dv"):
        yield from summed(f"sum of {name}", side, groups)
        yield Round(f"round {name}", work=(copying(side),))


def _attention(answered: Answered, sizes: Sizes, *, backward: bool) -> Kernels:
    return sizes.attention(answered.pairs, answered.calls, backward=backward, squares=answered.squares)
