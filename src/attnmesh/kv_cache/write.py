"""New keys and values into their slots, quantized on the way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attnmesh.core.optional import require
from attnmesh.ops.storage import Quantized, Stored, quantize, storage_of, values_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def write_tokens(keys: Stored, values: Stored, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Write k [n, Hkv, T, D] and v [n, Hkv, T, Dv] to `slots` [n, T] of the pools, as `quantize` would store them.

    A slot is block * block_size + offset; those below 0 are skipped. Nothing else is touched, and on a GPU it is one
    kernel.
    """
    if slots.is_cuda:
        _triton().write_tokens(keys, values, slots, k, v)
    else:
        _write(keys, slots, k)
        _write(values, slots, v)


def _write(pool: Stored, slots: Tensor, x: Tensor) -> None:
    kept = slots >= 0
    at = slots[kept]
    block_size = values_of(pool).shape[1]
    where = (at // block_size, at % block_size)
    tokens = x.transpose(1, 2)[kept]  # [tokens, Hkv, D]
    if isinstance(pool, Tensor):
        pool[where] = tokens.to(pool.dtype)
        return
    scale = pool.scales if pool.storage == "fp8" else None
    new = quantize(tokens, storage_of(pool), scale=scale)
    assert isinstance(new, Quantized)
    as_bytes = torch.int8  # torch indexes no fp8 on the CPU
    pool.values.view(as_bytes)[where] = new.values.view(as_bytes)
    if scale is None:
        pool.scales[where] = new.scales


def _triton() -> Any:
    return require("attnmesh.kv_cache.triton_write", extra="triton")
