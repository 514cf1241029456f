"""Ways to spread a KV cache side by side: what is held how often, in the terms of the field.

B is the batch, S the new tokens, H the hidden width, s_prior the context. DP attention is here to compare with: it
replicates weights so that a rank can project whole sequences on its own, and is not something that this library runs.
"""

from __future__ import annotations

from dataclasses import dataclass

from attnmesh.core.validation import check_positive
from attnmesh.plan.decode_load import weight_copies
from attnmesh.plan.sharding import DecodeSharding
from attnmesh.planner.recommend import tensor_parallel_size


@dataclass(frozen=True)
class Compared:
    """One way, in words."""

    name: str
    w_kv: str
    w_q: str
    w_out: str
    x: str
    kv_cache: str


def compare_shardings(q_heads: int, kv_heads: int, ranks: int) -> list[Compared]:
    """Plain tensor parallelism (where it fits), KVDP, CP and DP attention over the same ranks."""
    check_positive(q_heads=q_heads, kv_heads=kv_heads, ranks=ranks)
    tp = tensor_parallel_size(kv_heads, ranks)
    rest = ranks // tp
    DecodeSharding(tp, kvdp=rest).check_heads(q_heads, kv_heads)
    rows = []
    if ranks % kv_heads == 0 or kv_heads % ranks == 0:
        rows.append(_row(f"Vanilla TP{ranks}", DecodeSharding(ranks), kv_heads))
    if rest > 1:
        rows.append(_row(f"KVDP (TP{ranks} KVDP{rest})", DecodeSharding(tp, kvdp=rest), kv_heads))
        rows.append(_row(f"CP (TP{ranks} CP{rest})", DecodeSharding(tp, cp=rest), kv_heads))
        copies = _times(rest, "DP")
        part = f"B/{rest}"
        rows.append(
            Compared(f"DP Attention (TP{tp} DP{rest})", copies, copies, copies, f"[{part}, S, H]", f"{part} batches")
        )
    return rows


def _row(name: str, sharding: DecodeSharding, kv_heads: int) -> Compared:
    copies = weight_copies(sharding, kv_heads)
    batches = f"B/{sharding.kvdp} batches" if sharding.kvdp > 1 else "B batches"
    positions = f", s_prior/{sharding.cp}" if sharding.cp > 1 else ""
    return Compared(
        name, _times(copies.w_kv, "GQA"), _times(copies.w_q), _times(copies.w_out), "[B, S, H]", batches + positions
    )


def _times(copies: int, cause: str = "") -> str:
    return f"{copies}x ({cause})" if copies > 1 and cause else f"{copies}x"
