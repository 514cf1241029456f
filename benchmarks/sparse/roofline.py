"""What every operation asks of a device, and the least time in which a device could give it.

Operations are those of the products, a multiplication and an addition each. Bytes are compulsory: every input read
once and every output written once. Gather bytes are the keys that slots name, slot by slot, in programs that serve all
heads of a query, and in programs that serve 64: they come from the L2 as far as it holds them, so that the time they
would take at the rate of a device copy is no bound.
"""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.sparse.cases import Attention, Indexer

_NUMBER = 4  # bytes of an index, an lse, a score, an indexer's weight
_HEADS_A_PROGRAM = 64  # of the kernels that others have published


class Work(NamedTuple):
    """What has to be done, in operations and bytes."""

    flops: int
    bytes: int
    gather: int = 0
    gather_64: int = 0


class Ceilings(NamedTuple):
    """What the device gave in this run: to a large product, and to a large copy (bytes read and written)."""

    tflops: float
    tb_per_s: float

    def operations_ms(self, work: Work) -> float:
        """The least time for the products."""
        return work.flops / self.tflops / 1e9

    def bytes_ms(self, moved: int) -> float:
        """The time of so many bytes at the rate of the copy."""
        return moved / self.tb_per_s / 1e9

    def bound(self, work: Work) -> tuple[str, float]:
        """Which of operations and compulsory bytes takes longer, and its milliseconds."""
        operations, moved = self.operations_ms(work), self.bytes_ms(work.bytes)
        return ("operations", operations) if operations >= moved else ("bytes", moved)


def distribution(x: Attention) -> Work:
    """Scores of the slots, summed over heads: one product."""
    return Work(2 * _pairs(x) * x.d, _queries(x) + _keys(x) + 2 * _slots(x) + _per_head(x), *_gathered(x))


def forward(x: Attention) -> Work:
    """Scores and values: two products."""
    moved = _queries(x) + _keys(x) + _slots(x) + _out(x) + _per_head(x)
    return Work(2 * _pairs(x) * (x.d + x.d_v), moved, *_gathered(x))


def backward(x: Attention) -> Work:
    """Five products: scores again, dq and dk over d, dp and dv over d_v. Out and its gradient are read, too."""
    moved = 2 * (_queries(x) + _keys(x) + _out(x)) + _slots(x) + _per_head(x)
    return Work(2 * _pairs(x) * (3 * x.d + 2 * x.d_v), moved, *_gathered(x))


def topk(x: Indexer, *, causal: bool) -> Work:
    """Every row against every key it sees; causal: the rows are the last of the sequence."""
    seen = x.s_q * x.s_kv - (x.s_q * (x.s_q - 1) // 2 if causal else 0)
    chosen = x.s_q * (2 * x.topk + 1) * _NUMBER  # indices, scores, length
    return Work(2 * seen * x.heads * x.d, _indexer(x) + chosen)


def sparse_loss(x: Attention, i: Indexer) -> Work:
    """Attention's scores at the slots, the indexer's there, and its two gradients: four products."""
    rows, keys = _gathered(x), x.s_q * x.topk * i.d * i.itemsize
    return Work(
        2 * x.s_q * x.topk * (x.heads * x.d + 3 * i.heads * i.d),
        _queries(x) + _keys(x) + _slots(x) + _per_head(x) + 2 * _indexer(i),
        rows[0] + keys,
        rows[1] + keys * _programs(i.heads),
    )


def dense_loss(x: Attention, i: Indexer) -> Work:
    """The same over all keys: nothing is gathered."""
    flops = 2 * x.s_q * x.s_kv * (x.heads * x.d + 3 * i.heads * i.d)
    return Work(flops, _queries(x) + _keys(x) + _per_head(x) + 2 * _indexer(i))


def _pairs(x: Attention) -> int:
    return x.s_q * x.heads * x.topk


def _queries(x: Attention) -> int:
    return x.s_q * x.heads * x.d * x.itemsize


def _keys(x: Attention) -> int:
    """All of them: s_q x topk random names leave none out."""
    return x.s_kv * x.d * x.itemsize


def _out(x: Attention) -> int:
    return x.s_q * x.heads * x.d_v * x.itemsize


def _slots(x: Attention) -> int:
    return x.s_q * x.topk * _NUMBER


def _per_head(x: Attention) -> int:
    return x.s_q * x.heads * _NUMBER


def _indexer(x: Indexer) -> int:
    return (x.s_q * x.heads + x.s_kv) * x.d * x.itemsize + x.s_q * x.heads * _NUMBER


def _gathered(x: Attention) -> tuple[int, int]:
    shared = x.s_q * x.topk * x.d * x.itemsize
    return shared, shared * _programs(x.heads)


def _programs(heads: int) -> int:
    return -(-heads // _HEADS_A_PROGRAM)
