"""Rounds of the sparse family over ranks: attention over chosen keys, its distribution, the indexer's top-k and loss.

Operations are those of docs/benchmarks.md. Beside them stand the bytes that slots make kernels read: a key for each
slot, whatever the number of heads. With few heads that is what takes the time. An H200 took 1.99 ms for 16 heads and
4.39 for 128 (docs/benchmarks.md: 4096 queries of 2048 slots each, 576 wide, over 32k keys).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from attnmesh.plan.program import Kernels, Round
from attnmesh.plan.rounds.collectives import exchanged, summed
from attnmesh.plan.rounds.sizes import copying
from attnmesh.plan.rounds.visits import Met, Work, along_cp, along_tp, visits
from attnmesh.plan.sparse_shape import SparseShares
from attnmesh.planner.hardware import Floats, Kind

CHECKSUM = 8  # bytes
INDEX = 4
_MOST_SLOTS, _LEAST_KEYS = 1 << 23, 128  # of a stretch of keys: as ops/sparse/dense_kl.py has it


def same_indices(shares: SparseShares) -> Iterator[Round]:
    """A checksum of the indices goes to everybody, first along tp, then along cp."""
    grid = shares.grid
    if grid.tp > 1:
        one = np.full(grid.world, CHECKSUM, dtype=np.int64)
        yield from exchanged("checksums along tp", along_tp(shares).gathered(one))
        yield from exchanged("checksums along cp", along_cp(shares).gathered(grid.tp * one))


def attention_forward(shares: SparseShares) -> Iterator[Round]:
    """States of visiting keys are merged one by one."""
    shape = shares.shape
    state = shares.rows * shares.heads * shape.value_width * shape.sum_itemsize

    def work(met: Met) -> Iterator[Round]:
        size = 2.0 * shares.heads * met.named * (shape.width + shape.value_width)
        kernels = [_kernels("sparse", size, gathered=met.named * sum(shape.key_rows) * shape.itemsize)]
        if shares.grid.sharded:
            kernels.append(copying(1.5 * state))  # two are read, one is written
        yield Round(f"{met.name}, attended", work=tuple(kernels))

    return visits(shares, [row * shape.itemsize for row in shape.key_rows], work, name="keys")


def attention_backward(shares: SparseShares) -> Iterator[Round]:
    """Gradients of keys go home along cp, and are then summed over heads along tp."""
    shape = shares.shape
    rows, elements = shape.key_rows, sum(shape.key_rows)
    outs = shares.rows * shares.heads * shape.value_width * shape.itemsize

    def work(met: Met) -> Iterator[Round]:
        size = 2.0 * shares.heads * met.named * (3 * shape.width + 2 * shape.value_width)
        # Two kernels read a slot's key; the sum that its gradient joins is read and written.
        moved = met.named * elements * 2 * (shape.itemsize + shape.sum_itemsize)
        yield Round(f"{met.name}, differentiated", work=(_kernels("sparse backward", size, gathered=moved),))

    yield Round("delta", work=(copying(outs),))  # out and its gradient are read
    sums = [row * shape.sum_itemsize for row in rows]
    yield from visits(shares, [row * shape.itemsize for row in rows], work, name="keys", grad_rows=sums)
    for at, row in enumerate(sums):
        yield from summed(f"gradients over heads {at}", shares.held[shares.cp_place] * row, along_tp(shares))


def distribution(shares: SparseShares) -> Iterator[Round]:
    """Of the heads of all ranks, on every one of them."""
    yield from visits(shares, [shares.shape.width * shares.shape.itemsize], _distributing(shares), name="keys")
    yield from _over_heads(shares, scattered=False)


def indexer_topk(shares: SparseShares) -> Iterator[Round]:
    """Every tp rank finds the best keys of its share of the rows, and they exchange what they have found."""
    shape, part = shares.shape, shares.share / np.maximum(shares.rows, 1)
    found = shares.share * shape.topk * (INDEX + shape.sum_itemsize)

    def work(met: Met) -> Iterator[Round]:
        kernels = [_kernels("indexer", 2.0 * shape.index_heads * shape.index_width * met.seen * part)]
        if shares.grid.sharded:
            kernels.append(copying(2 * found))  # the best of two times as many
        yield Round(f"{met.name}, chosen", work=tuple(kernels))

    yield from visits(shares, [shape.index_width * shape.itemsize], work, name="index keys")
    yield from _of_shares(shares, "slots", shape.topk * (INDEX + shape.sum_itemsize))


def loss_forward(shares: SparseShares, *, scattered: bool) -> Iterator[Round]:
    """The target at the chosen keys, summed over heads; then the indexer's scores at these."""
    shape = shares.shape
    yield from visits(shares, [shape.width * shape.itemsize], _distributing(shares), name="keys")
    yield from _over_heads(shares, scattered=scattered)
    part = _part(shares, scattered=scattered)

    def work(met: Met) -> Iterator[Round]:
        yield Round(f"{met.name}, scored", work=(_scores(shares, met.named * part),))

    yield from visits(shares, [shape.index_width * shape.itemsize], work, name="index keys")
    yield from _whole_loss(shares, scattered=scattered)


def loss_backward(shares: SparseShares, *, scattered: bool) -> Iterator[Round]:
    """Gradients of the indexer's keys go home; those of its rows come together where rows were dealt out."""
    shape, part = shares.shape, _part(shares, scattered=scattered)

    def work(met: Met) -> Iterator[Round]:
        slots = met.named * part
        moved = slots * shape.index_width * 2 * (shape.itemsize + shape.sum_itemsize)
        yield Round(f"{met.name}, differentiated", work=(_scores(shares, slots, times=2, moved=moved),))

    sums = [shape.index_width * shape.sum_itemsize]
    yield from visits(shares, [shape.index_width * shape.itemsize], work, name="index keys", grad_rows=sums)
    yield from _gradients_of_rows(shares, scattered=scattered)


def dense_loss(shares: SparseShares, *, scattered: bool, backward: bool) -> Iterator[Round]:
    """Over all keys, a stretch of a block at a time. The backward computes targets and scores again."""
    shape, part = shares.shape, _part(shares, scattered=scattered)
    wide = np.maximum(_LEAST_KEYS, _MOST_SLOTS // np.maximum(1, shares.rows))

    def work(met: Met) -> Iterator[Round]:
        for at in range(max(1, int(np.max(-(-met.keys // wide), initial=1)))):
            keys = np.clip(met.keys - at * wide, 0, wide) * (shares.rows > 0)
            seen = met.seen * keys / np.maximum(met.keys, 1)
            name = f"{met.name}, stretch {at}"
            yield Round(name, work=(_kernels("sparse", 2.0 * shares.heads * shape.width * seen),))
            yield from _over_heads(shares, scattered=scattered, slots=keys, name=f"{name} over heads")
            yield Round(
                f"{name} scored", work=(_scores(shares, seen * part, times=3 if backward else 1, moved=0 * seen),)
            )

    rows = [shape.index_width * shape.itemsize, shape.width * shape.itemsize]
    sums = [shape.index_width * shape.sum_itemsize] if backward else []
    yield from visits(shares, rows, work, name="all keys", grad_rows=sums)
    after = _gradients_of_rows if backward else _whole_loss
    yield from after(shares, scattered=scattered)


def _distributing(shares: SparseShares) -> Work:
    shape = shares.shape

    def work(met: Met) -> Iterator[Round]:
        size = 2.0 * shares.heads * met.named * shape.width
        gathered = met.named * shape.width * shape.itemsize
        yield Round(f"{met.name}, distributed", work=(_kernels("sparse", size, gathered=gathered),))

    return work


def _over_heads(
    shares: SparseShares, *, scattered: bool, slots: np.ndarray | None = None, name: str = "over heads"
) -> Iterator[Round]:
    """What heads found at every slot, summed over all: everywhere, or each row where it was dealt to."""
    row = (shares.shape.topk if slots is None else slots) * shares.shape.sum_itemsize
    groups = along_tp(shares)
    if not scattered or groups.size == 1:
        yield from summed(name, shares.rows * row, groups)
        return
    yield from exchanged(name, groups.scattered(shares.share * row))
    yield Round(f"{name}, added", work=(copying(groups.size * shares.share * row),))


def _whole_loss(shares: SparseShares, *, scattered: bool) -> Iterator[Round]:
    """A number for each row, to all that hold the rows; and their sum over the sequence."""
    if scattered:
        yield from _of_shares(shares, "loss of rows", shares.shape.sum_itemsize)
    one = np.full(shares.grid.world, shares.shape.sum_itemsize, dtype=np.int64)
    yield from summed("loss of all rows", one, along_cp(shares))


def _gradients_of_rows(shares: SparseShares, *, scattered: bool) -> Iterator[Round]:
    """Where every rank worked on its share of the rows: what they found for the keys, and for their own rows."""
    shape = shares.shape
    if scattered:
        held = shares.held[shares.cp_place]
        yield from summed("over ranks", held * shape.index_width * shape.sum_itemsize, along_tp(shares))
        yield from _of_shares(shares, "d_iq", shape.index_heads * shape.index_width * shape.itemsize)
        yield from _of_shares(shares, "d_w", shape.index_heads * shape.itemsize)


def _of_shares(shares: SparseShares, name: str, row: int) -> Iterator[Round]:
    """Rows of `row` bytes, from those they were dealt to, to all who hold them."""
    groups = along_tp(shares)
    if groups.size > 1:
        yield from exchanged(name, groups.gathered(shares.share * row))
        yield Round(f"{name} in order", work=(copying(shares.rows * row),))


def _part(shares: SparseShares, *, scattered: bool) -> Floats:
    """The part of a rank's rows that it works on."""
    if not scattered:
        return np.ones(shares.grid.world)
    part: Floats = shares.share / np.maximum(shares.rows, 1)
    return part


def _scores(shares: SparseShares, slots: Floats, *, times: int = 1, moved: Floats | None = None) -> Kernels:
    """Scores at slots, or two times as much for their gradients."""
    shape = shares.shape
    gathered = slots * shape.index_width * shape.itemsize if moved is None else moved
    return _kernels("indexer", 2.0 * times * shape.index_heads * shape.index_width * slots, gathered=gathered)


def _kernels(kind: Kind, size: Floats, *, gathered: Floats | None = None) -> Kernels:
    return Kernels(kind, size, (size > 0).astype(np.float64), reads=gathered)
