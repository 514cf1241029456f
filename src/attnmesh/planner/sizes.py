"""What rows and pairs cost on every rank of a workload: bytes, operations and kernels, as arrays over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from attnmesh.core import ranges
from attnmesh.core.masks import Mask
from attnmesh.ops.merge import PENDING_PARTS, PENDING_PARTS_WITH_TOTAL, STREAMS
from attnmesh.plan.shards import Shape, Shards, Workload
from attnmesh.planner.program import Floats, Ints, KernelKind, Kernels

# Matrix products per pair of as wide rows as keys, and as values.
_FORWARD: tuple[int, int, KernelKind] = (1, 1, "attention")
_BACKWARD: tuple[int, int, KernelKind] = (3, 2, "attention backward")


@dataclass(frozen=True)
class RankSizes:
    """Bytes per row and operations per pair, and the rows of every rank: entry r is rank r's."""

    key_pair_flops: Floats  # of one (query, key) pair of a plan, in a matrix product over the width of keys
    value_pair_flops: Floats  # the same over the width of values
    key_row: Ints  # bytes of K and V per position
    key_grad_row: Ints
    query_row: Ints  # bytes of Q of a position
    query_sum_row: Ints  # the same in the accumulation dtype
    out_row: Ints  # bytes of out of a position
    out_sum_row: Ints
    lse_row: Ints
    rows: Ints  # query rows
    segments: Ints  # kernel calls per block: heads that do not divide evenly need more than one

    @staticmethod
    def of(
        shapes: Sequence[Shape], rows: Sequence[int], segments: Sequence[int] | None = None, *, mask: Mask
    ) -> RankSizes:
        """From the shape of the tensors that each rank computes with, and its query rows."""

        def each(name: str) -> Ints:
            return np.array([getattr(shape, name) for shape in shapes], dtype=np.int64)

        heads = each("batch") * each("q_heads")
        query, out = heads * each("head_dim"), heads * each("out_dim")
        # A plan counts the pairs of one sequence, or of all sequences if they have masks of their own.
        sequences = 1 if mask.sequences is None else np.maximum(each("batch"), 1)
        return RankSizes(
            key_pair_flops=2.0 * query / sequences,
            value_pair_flops=2.0 * out / sequences,
            key_row=each("key_row"),
            key_grad_row=each("key_grad_row"),
            query_row=each("query_row"),
            query_sum_row=query * each("sum_itemsize"),
            out_row=each("out_row"),
            out_sum_row=out * each("sum_itemsize"),
            lse_row=each("lse_row"),
            rows=np.array(rows, dtype=np.int64),
            segments=np.array(segments or [1] * len(shapes), dtype=np.int64),
        )

    @staticmethod
    def of_workload(workload: Workload) -> RankSizes:
        """The sizes of all ranks' own rows and heads."""
        rows = list(map(ranges.size, workload.shards.queries))
        return RankSizes.of([workload.shape] * workload.world, rows, mask=workload.shards.mask)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.rows)

    def by_rank(self, ranks: Ints, values: Ints) -> Ints:
        """Values of some ranks as an array over all ranks, added up, 0 elsewhere."""
        return np.bincount(ranks, values, self.world).astype(np.int64)

    def attention(
        self, pairs: Ints, calls: Ints, *, backward: bool, causal: tuple[Ints, Ints], single: bool = False
    ) -> Kernels:
        """The attention kernels over `pairs`: two matrix products forward (QK, PV), five backward.

        `causal` are the pairs and calls of the causal squares among them. Calls alternate between two streams, unless
        the program has only a `single` block.
        """
        over_keys, over_values, kind = _BACKWARD if backward else _FORWARD
        pair = over_keys * self.key_pair_flops + over_values * self.value_pair_flops

        def sized(pairs: Ints, calls: Ints) -> tuple[Floats, Floats]:
            return pair * pairs, (calls * self.segments).astype(np.float64)

        return Kernels(kind, *sized(pairs, calls), causal=sized(*causal), streams=1 if single else STREAMS)

    def merge(self, before: Ints, after: Ints, *, last: bool = False) -> Kernels:
        """The merge of partial results into a rank's total, when `before` had been computed and now `after` have.

        A pass reads the pending parts and the total and writes the total. The `last` pass also rounds.
        """
        parts = after - before
        passes = _merge_passes(after) - _merge_passes(before)
        moved = parts * self.out_row + 2 * passes * self.out_sum_row
        if last:
            several = after > 1
            passes = passes + several
            moved = moved + several * (self.out_sum_row + self.out_row)
        size = (self.rows * moved * (after > 1)).astype(np.float64)
        # Nothing is left to overlap the last pass with.
        return Kernels("relayout", size, passes.astype(np.float64), overlapped=not last)

    # Peak memory, in bytes.

    def state_bytes(self, parts: Floats, *, cpu: bool) -> Floats:
        """Partial results that cover all rows `parts` times, their total while it is merged, and the output."""
        part, total = self.rows * (self.out_row + self.lse_row), self.rows * (self.out_sum_row + self.lse_row)
        temporaries = 2 * self.rows * self.out_sum_row if cpu else 0  # of torch operations
        several = np.minimum(parts, PENDING_PARTS) * part + total + temporaries
        most: Floats = np.where(parts > 1, np.maximum(several, 2 * part + total + part), part)
        return np.where(parts > 0, most, total + part)

    def query_grad_bytes(self, parts: Floats) -> Floats:
        """Partial gradients of the queries, and one gradient in float32: their total, or a kernel's accumulator."""
        nbytes: Floats = self.rows * (np.minimum(parts, PENDING_PARTS) * self.query_row + self.query_sum_row)
        return nbytes


@dataclass(frozen=True)
class GroupedWorkload:
    """Rank groups that run the same schedule at once: the i-th rank of every group holds the i-th shard of `shards`.

    After the all-to-all of Ulysses, the ranks with the same heads form a group. Groups are listed by the shape of the
    tensors that their ranks compute with.
    """

    workload: Workload
    shards: Shards
    groups: dict[Shape, list[list[int]]]
    sizes: RankSizes

    @staticmethod
    def of(workload: Workload) -> GroupedWorkload:
        """One group of all ranks."""
        everyone = {workload.shape: [list(range(workload.world))]}
        return GroupedWorkload(workload, workload.shards, everyone, RankSizes.of_workload(workload))

    @property
    def all_groups(self) -> list[list[int]]:
        """The groups of all shapes."""
        return [group for same in self.groups.values() for group in same]


def key_rows(shards: Shards) -> Ints:
    """The number of keys that every rank holds."""
    return np.array(list(map(ranges.size, shards.keys)), dtype=np.int64)


def query_rows(shards: Shards) -> Ints:
    """The number of queries that every rank holds."""
    return np.array(list(map(ranges.size, shards.queries)), dtype=np.int64)


def row_coverage(calls: Ints) -> Floats:
    """How many times the partial results of a patch cover its rows, by estimate.

    The first call is taken to cover all rows and every further one half of them.
    """
    return np.where(calls > 0, (1 + calls) / 2, 0.0)


def copy(nbytes: ArrayLike, calls: int = 1) -> Kernels:
    """Copies within the device: each byte is read and written."""
    each = np.asarray(nbytes, dtype=np.float64)
    return Kernels("copy", 2 * each, np.where(each > 0, float(calls), 0.0))


def relayout(nbytes: ArrayLike, calls: int = 1, *, overlapped: bool = False) -> Kernels:
    """Copies from heads first to rows first, or back."""
    return replace(copy(nbytes, calls), kind="relayout", overlapped=overlapped)


def _merge_passes(parts: Ints) -> Ints:
    later = 1 + (parts - PENDING_PARTS) // PENDING_PARTS_WITH_TOTAL
    return np.where(parts < PENDING_PARTS, 0, later).astype(np.int64)
