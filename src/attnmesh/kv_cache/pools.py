"""The memory of all layers: keys or values in blocks, as plain numbers or quantized."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.ops.storage import BFP_GROUP, PLAIN, Quantized, Stored


@dataclass(frozen=True)
class Pools:
    """Keys (or values) of all layers, `whole` [layers, num_blocks, block_size, kv_heads, D], and each `layer` of it."""

    whole: tuple[Tensor, ...]  # what is written a token: values, and scales unless they are fp8's
    layers: tuple[Stored, ...]

    def copy_blocks(self, source: Tensor, target: Tensor) -> None:
        """Copy blocks to other blocks in every layer, on the device."""
        for x in self.whole:
            x[:, target] = x[:, source]


def make_pools(shape: tuple[int, int, int, int, int], storage: str, scale: Tensor, device: torch.device) -> Pools:
    """Empty pools of a shape [layers, num_blocks, block_size, kv_heads, D]; `scale` is fp8's."""
    if storage in PLAIN:
        plain = torch.zeros(shape, dtype=PLAIN[storage], device=device)
        return Pools((plain,), tuple(plain))
    if storage == "fp8":
        raw = torch.zeros(shape, dtype=torch.uint8, device=device)  # copied as bytes: torch indexes no fp8 on the CPU
        return Pools((raw,), tuple(Quantized(x.view(torch.float8_e4m3fn), scale) for x in raw))
    values = torch.zeros(shape, dtype=torch.int8, device=device)
    *front, block_size, heads, dim = shape
    # The scales of one head's tokens lie next to one another: a kernel reads one head of a block at a time.
    if storage == "int8":
        scales = torch.zeros((*front, heads, block_size), dtype=torch.float32, device=device).transpose(2, 3)
    else:
        groups = (*front, heads, block_size, dim // BFP_GROUP)
        scales = torch.zeros(groups, dtype=torch.int8, device=device).transpose(2, 3)
    return Pools((values, scales), tuple(Quantized(*both) for both in zip(values, scales, strict=True)))


def fp8_scale(name: str, scale: float | Tensor | None, storage: str, kv_heads: int, device: torch.device) -> Tensor:
    """An fp8 scale as a float32 tensor [] or [kv_heads] on the device; 1 by default."""
    if scale is None:
        return torch.ones((), dtype=torch.float32, device=device)
    if storage != "fp8":
        raise ValueError(f"{name} is for storage 'fp8' only: {storage!r} finds its scales itself")
    if isinstance(scale, Tensor):
        if scale.shape not in ((), (kv_heads,)) or not scale.dtype.is_floating_point:
            raise ValueError(
                f"{name} must be a number or floating point [] or [{kv_heads}], got {scale.dtype} {list(scale.shape)}"
            )
        numbers = scale.detach().float().cpu().flatten().tolist()  # once, when the cache is made
        scale = scale.detach()
    elif isinstance(scale, (int, float)):
        numbers = [float(scale)]
    else:
        raise ValueError(f"{name} must be a number or a tensor, got {type(scale).__name__}")
    if not all(math.isfinite(number) and number > 0 for number in numbers):
        raise ValueError(f"{name} must be positive and finite, got {numbers}")
    return torch.as_tensor(scale, dtype=torch.float32, device=device)
