"""The same tensor in other memory: permuted, in the middle of a larger tensor, every second element, expanded."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

VARIANTS = ("permuted", "rows", "last", "offset", "step", "steps", "expanded")
ROWS = ("rows", "offset")  # the last dimension stays contiguous


def strided(x: Tensor, variant: str, random: Random) -> Tensor:
    """Return x with other strides; "expanded" repeats one index of a dimension. Memory between is poison."""
    if not x.ndim:
        return _around(x[None], random)[0]
    dim = random.randrange(x.ndim)
    if variant in ("permuted", "rows"):
        order = random.sample(range(x.ndim), x.ndim)
        if variant == "rows":
            order = [*(i for i in order if i != x.ndim - 1), x.ndim - 1]
        back = [order.index(i) for i in range(x.ndim)]
        return x.permute(order).contiguous().permute(back)
    if variant == "last":  # the last dimension is the slowest
        return x.movedim(-1, 0).contiguous().movedim(0, -1)
    if variant == "offset":
        return _around(x, random)
    if variant == "step":
        return _every_second(x, dim)
    if variant == "steps":
        for each in range(x.ndim):
            x = _every_second(x, each)
        return x
    assert variant == "expanded"
    if not x.shape[dim]:
        return x
    return x.narrow(dim, random.randrange(x.shape[dim]), 1).clone().expand(x.shape)


def poison(x: Tensor) -> float | int | bool:
    """A value that spoils every result that reads it."""
    if x.dtype == torch.bool:
        return True
    if x.is_floating_point():
        return torch.nan
    return 127 if x.dtype == torch.int8 else 2**31 - 1


def _full(shape: list[int], x: Tensor) -> Tensor:
    """Poison; fp8, which torch cannot fill on the CPU, as bytes."""
    if x.dtype == torch.float8_e4m3fn:
        return torch.full(shape, 127, dtype=torch.int8, device=x.device).view(x.dtype)
    return torch.full(shape, poison(x), dtype=x.dtype, device=x.device)


def _around(x: Tensor, random: Random) -> Tensor:
    """In the middle of a larger tensor, at an odd storage offset."""
    before = [random.randint(1, 3) for _ in x.shape]
    whole = _full([n + at + random.randint(0, 2) for n, at in zip(x.shape, before, strict=True)], x)
    place = whole[tuple(slice(at, at + n) for at, n in zip(before, x.shape, strict=True))]
    return _copied(place, x)


def _every_second(x: Tensor, dim: int) -> Tensor:
    shape = list(x.shape)
    shape[dim] = max(1, 2 * shape[dim])
    whole = _full(shape, x)
    index = [slice(None)] * x.ndim
    index[dim] = slice(0, 2 * x.shape[dim], 2)
    return _copied(whole[tuple(index)], x)


def _copied(place: Tensor, x: Tensor) -> Tensor:
    as_bytes = x.dtype == torch.float8_e4m3fn
    (place.view(torch.int8) if as_bytes else place).copy_(x.view(torch.int8) if as_bytes else x)
    return place
