"""Figures of others, recorded on an H200 in another run: to read beside ours, never measured here."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from attnmesh.cli.output import Rows
from benchmarks.sparse import roofline
from benchmarks.sparse.cases import Attention
from benchmarks.sparse.roofline import Work


class Recorded(NamedTuple):
    """Milliseconds of somebody's kernel over so many keys, bf16, otherwise at `_SHAPE`."""

    beside: str  # the operation of ours that computes the same
    who: str
    ms: dict[int, float]
    work: Callable[[Attention], Work]


_SHAPE = Attention(4096, 0, 128, 576, 512, 2048)

RECORDED = (
    Recorded(
        "attention_distribution", "a CUDA kernel of the same function, 64 heads a program",
        {8192: 2.98, 32768: 3.30, 131072: 3.85}, roofline.distribution,
    ),
    Recorded("forward", "FlashMLA's sparse forward", {8192: 3.52, 32768: 4.04, 131072: 4.47}, roofline.forward),
)  # fmt: skip


def recorded_rows(processor: str, operations: Collection[str], shapes: Collection[Attention]) -> Rows:
    """What is known of this processor, for the operations and shapes that were measured."""
    if "H200" not in processor:
        return []
    return [
        {
            "operation": peer.beside,
            "peer": peer.who,
            "s_kv": s_kv,
            "ms": ms,
            "tflops": peer.work(_SHAPE).flops / ms / 1e9,
        }
        for peer in RECORDED
        if peer.beside in operations
        for s_kv, ms in peer.ms.items()
        if _SHAPE._replace(s_kv=s_kv) in shapes
    ]
