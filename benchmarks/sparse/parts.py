"""The parts of the sparse benchmark: what each asks of the device, measures, and is called."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Collection, Iterator

from attnmesh.cli.output import Rows
from benchmarks.sparse import roofline
from benchmarks.sparse.attention import BACKWARD, DISTRIBUTION, FORWARD, measure_attention, measure_distribution
from benchmarks.sparse.cases import Sizes, sizes
from benchmarks.sparse.loss import DENSE, SPARSE, measure_loss
from benchmarks.sparse.roofline import Ceilings, Work
from benchmarks.sparse.stage import Stage, freed, measured_ceilings
from benchmarks.sparse.topk import TOPK, measure_topk


class Part(enum.StrEnum):
    """What to measure."""

    DIST = "dist"
    ATTENTION = "attention"
    TOPK = "topk"
    LOSS = "loss"


CEILINGS = "what the device gives in this run to a large product, and to a large copy (bytes read and written)"
ROOFLINE = (
    "what is asked: operations, compulsory bytes, and bytes of the keys that slots name, gathered for all heads of a "
    "query at once, or for 64 at a time (from the L2 as far as it holds them, so no bound); ms at the ceilings"
)
_METHOD = (
    "uniformly random distinct indices in random order; of_bound: the larger bound over the time; error: relative, "
    "of a few rows against float64"
)
DIST = f"attention_distribution, all heads summed ({_METHOD})"
ATTENTION = f"sparse_attention ({_METHOD})"
TOPK_TITLE = (
    "indexer_topk beside torch: a product of all scores, some rows at a time, and torch.topk, in the dtype of the "
    "inputs (causal: the rows are the last of the sequence); memory_over_io: peak with inputs, over inputs and outputs"
)
LOSS = (
    "the indexer's whole loss step, attention's distribution and forward and backward of the loss, beside the naive "
    "one with all scores in memory (`at_once`: as many rows as fit); added_gb: peak beside the inputs"
)
_TITLES: dict[Part, tuple[str, Callable[[Stage], Rows]]] = {
    Part.DIST: (DIST, measure_distribution),
    Part.ATTENTION: (ATTENTION, measure_attention),
    Part.TOPK: (TOPK_TITLE, measure_topk),
    Part.LOSS: (LOSS, measure_loss),
}
_ABSOLUTE = re.compile(r"(^|_)(ms|tflops|tb_per_s)$")


def measure_sparse(device: str, parts: Collection[Part], *, quick: bool) -> Iterator[tuple[str, Rows]]:
    """A title and its rows at a time, as they are known; on a CPU only ratios."""
    for title, rows in _measured(device, parts, sizes(device, quick)):
        yield title, rows if device == "cuda" else _ratios(rows)


def _measured(device: str, parts: Collection[Part], given: Sizes) -> Iterator[tuple[str, Rows]]:
    ceilings = measured_ceilings(device, given)
    if device == "cuda":
        yield CEILINGS, [dict(ceilings._asdict())]
    yield ROOFLINE, roofline_rows(given, parts, ceilings)
    stage = Stage(device, given, ceilings)
    for part, (title, measure) in _TITLES.items():
        if part in parts:
            freed(device)
            yield title, measure(stage)


def roofline_rows(given: Sizes, parts: Collection[Part], ceilings: Ceilings) -> Rows:
    """What every operation asks, and the least time for it."""
    return [
        {
            "operation": operation, "s_q": s_q, "heads": heads, "s_kv": s_kv, "tflop": work.flops / 1e12,
            "flop_ms": ceilings.operations_ms(work),
            "gb": work.bytes / 1e9, "bytes_ms": ceilings.bytes_ms(work.bytes),
            "gather_gb": work.gather / 1e9, "gather_ms": ceilings.bytes_ms(work.gather),
            "gather64_gb": work.gather_64 / 1e9, "gather64_ms": ceilings.bytes_ms(work.gather_64),
        }
        for operation, s_q, heads, s_kv, work in _asked(given, parts)
    ]  # fmt: skip


def wrong(rows: Rows) -> Rows:
    """The lines whose results were not right."""
    return [row for row in rows if row.get("verdict") == "WRONG"]


def _asked(given: Sizes, parts: Collection[Part]) -> Iterator[tuple[str, int, int, int, Work]]:
    if Part.DIST in parts:
        for x in given.lengths:
            yield DISTRIBUTION, x.s_q, x.heads, x.s_kv, roofline.distribution(x)
    if Part.ATTENTION in parts:
        for x in (*given.lengths, given.few_heads):
            yield FORWARD, x.s_q, x.heads, x.s_kv, roofline.forward(x)
            yield BACKWARD, x.s_q, x.heads, x.s_kv, roofline.backward(x)
    if Part.TOPK in parts:
        for i in given.indexers:
            for causal, name in TOPK.items():
                yield name, i.s_q, i.heads, i.s_kv, roofline.topk(i, causal=causal)
    if Part.LOSS in parts:
        x, i = given.loss
        yield SPARSE, x.s_q, x.heads, x.s_kv, roofline.sparse_loss(x, i)
        yield DENSE, x.s_q, x.heads, x.s_kv, roofline.dense_loss(x, i)


def _ratios(rows: Rows) -> Rows:
    """Without times and rates: what a small size on a shared machine says is how one compares with another."""
    return [{name: value for name, value in row.items() if not _ABSOLUTE.search(name)} for row in rows]
