"""What a pair costs and a row weighs on every rank: ranks with fewer heads have less of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from attnmesh.plan.program import Ints, Kernels
from attnmesh.plan.workload import Shape
from attnmesh.planner.hardware import Floats, Kind

_FORWARD: tuple[int, Kind] = (2, "attention")  # products of a pair
_BACKWARD: tuple[int, Kind] = (5, "attention backward")
_LANES = 2  # as ops/lanes.py has it
_WAIT_FIRST, _WAIT_BESIDE = 4, 2  # parts that join the total in one pass: as ops/accumulate.py has it


@dataclass(frozen=True)
class Sizes:
    """Entry r is rank r's."""

    pair: Floats  # operations of a (query, key) pair, a product
    key_row: Ints  # bytes of K and V of a position
    key_grad_row: Ints
    query_row: Ints  # bytes of Q or out of a position
    query_sum_row: Ints  # the same while it is summed
    lse_row: Ints
    rows: Ints  # query rows
    segments: Ints  # calls that a block takes: heads that do not divide need more than one

    @staticmethod
    def of(shapes: Sequence[Shape], rows: Sequence[int], segments: Sequence[int] | None = None) -> Sizes:
        """From the shape of the tensors that each rank computes with, and the rows it has."""

        def each(name: str) -> Ints:
            return np.array([getattr(shape, name) for shape in shapes], dtype=np.int64)

        elements = each("batch") * each("q_heads") * each("head_dim")
        return Sizes(
            pair=2.0 * elements.astype(np.float64),
            key_row=each("key_row"),
            key_grad_row=each("key_grad_row"),
            query_row=each("query_row"),
            query_sum_row=elements * each("sum_itemsize"),
            lse_row=each("lse_row"),
            rows=np.array(rows, dtype=np.int64),
            segments=np.array(segments or [1] * len(shapes), dtype=np.int64),
        )

    @property
    def world(self) -> int:
        """How many ranks there are."""
        return len(self.rows)

    def attention(
        self, pairs: Ints, calls: Ints, *, backward: bool, squares: tuple[Ints, Ints], alone: bool = False
    ) -> Kernels:
        """The kernels over so many pairs: two products forward, five backward. `squares`: pairs and calls of them.

        Calls take two lanes in turn unless there is but one, `alone`.
        """
        products, kind = _BACKWARD if backward else _FORWARD

        def sized(pairs: Ints, calls: Ints) -> tuple[Floats, Floats]:
            return products * self.pair * pairs, (calls * self.segments).astype(np.float64)

        return Kernels(kind, *sized(pairs, calls), squares=sized(*squares), lanes=1 if alone else _LANES)

    def merging(self, before: Ints, after: Ints, *, last: bool = False) -> Kernels:
        """Partial results that join the total of a rank's rows, when `before` had come and now `after` have.

        Four wait before there is a total, two beside it; a pass reads them and the total and writes it. The `last` pass
        rounds.
        """
        parts = after - before
        passes = _passes(after) - _passes(before)
        moved = parts * self.query_row + 2 * passes * self.query_sum_row
        if last:
            several = after > 1
            passes = passes + several
            moved = moved + several * (self.query_sum_row + self.query_row)
        size = (self.rows * moved * (after > 1)).astype(np.float64)
        # The last pass has nothing left to hide behind.
        return Kernels("relayout", size, passes.astype(np.float64), beside=not last)  # parts lie as kernels left them


def copying(nbytes: ArrayLike, calls: int = 1) -> Kernels:
    """Bytes that are moved within the device: each is read and written."""
    each = np.asarray(nbytes, dtype=np.float64)
    return Kernels("copy", 2 * each, np.where(each > 0, float(calls), 0.0))


def laid_out(nbytes: ArrayLike, calls: int = 1, *, beside: bool = False) -> Kernels:
    """The same, from heads first to rows first or back."""
    return replace(copying(nbytes, calls), kind="relayout", beside=beside)


def _passes(parts: Ints) -> Ints:
    return np.where(parts < _WAIT_FIRST, 0, 1 + (parts - _WAIT_FIRST) // _WAIT_BESIDE).astype(np.int64)
