"""What a storage type costs in accuracy: decode over a quantized cache against the unquantized one in float64."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnmesh.ops.decode.api import paged_decode_attention
from attnmesh.ops.storage import PLAIN, quantize
from benchmarks.decode.cases import Shape
from benchmarks.decode.inputs import BLOCK_SIZE, backend_on

_OUTLIERS = 3  # channels of every head
_LOUDER = 20.0


def measure_storage_accuracy(device: str, shape: Shape, storages: Sequence[str]) -> list[dict[str, object]]:
    """Relative RMS errors of out and lse by data and storage type, seed 0.

    Queries are exact in bf16, so that none of the error is theirs; out is rounded to their dtype, which alone is 1.7e-3
    in bf16. With outliers, three channels of every kv head are twenty times as large, in keys and in values, which is
    what a scale shared by many values suffers from.
    """
    generator = torch.Generator().manual_seed(0)
    batch, q_heads, kv_heads, length, head_dim = shape
    slots = length // BLOCK_SIZE

    def pool() -> Tensor:
        return torch.randn(batch * slots, BLOCK_SIZE, kv_heads, head_dim, generator=generator).to(device)

    q = torch.randn(batch, q_heads, 1, head_dim, generator=generator).bfloat16().to(device)
    k, v = pool(), pool()
    loud = torch.ones(kv_heads, head_dim, device=device)
    for head in range(kv_heads):
        loud[head, torch.randperm(head_dim, generator=generator)[:_OUTLIERS].to(device)] = _LOUDER
    table = torch.randperm(batch * slots, generator=generator).view(batch, slots).int().to(device)
    last = torch.full((batch,), length - 1, dtype=torch.int32, device=device)

    rows: list[dict[str, object]] = []
    for data, keys, values in (("normal", k, v), ("outlier channels", k * loud, v * loud)):
        exact = paged_decode_attention(
            q.double(), keys.double(), values.double(), table, cur_pos=last, return_lse=True, backend="reference"
        )
        for storage in storages:
            dtype = PLAIN.get(storage, torch.bfloat16)
            k_pool, v_pool = (quantize(x, storage, head_axis=2) for x in (keys, values))
            found = paged_decode_attention(
                q.to(dtype), k_pool, v_pool, table, cur_pos=last, return_lse=True, backend=backend_on(q)
            )
            out, lse = (float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))
            rows.append({"data": data, "storage": storage, "queries": str(dtype)[6:], "out": out, "lse": lse})
    return rows
