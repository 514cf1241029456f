"""Linear layers over few tokens on the CPU, in the passes of an `Engine`.

A decode step of a few sequences takes as long as reading the weights, but MKL's product of 4 to 47 rows with a weight
[out, in] in float32 takes two to four times as long. Two other ways to ask for the same product read the weight at
nearly the speed of one row: a batched product with blocks of its rows, and, from 12 rows on, the transposed product.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnmesh.generation.norms import in_pass

_BLOCKED = range(4, 12)  # rows of a batched product
_TRANSPOSED = range(12, 48)  # rows of a transposed product; MKL's own is as fast below and above
_BLOCKS = range(16, 97)  # rows of the weight in a block


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of x [.., in] with a weight [out, in], rounded in another order where another product is faster."""
    rows = x.numel() // max(1, x.shape[-1])
    if not (rows in _BLOCKED or rows in _TRANSPOSED) or not _is_served(x, weight):
        return F.linear(x, weight, bias)
    flat, size = x.reshape(rows, -1), _block(weight.shape[0]) if rows in _BLOCKED else None
    if size is None:
        out = torch.mm(weight, flat.t()).t()
    else:
        blocks = weight.view(-1, size, weight.shape[1])
        out = torch.bmm(flat.expand(len(blocks), -1, -1), blocks.transpose(1, 2)).transpose(0, 1)
    out = out.reshape(*x.shape[:-1], -1).contiguous()  # some models take a view of it
    return out if bias is None else out + bias


def _is_served(x: Tensor, weight: Tensor) -> bool:
    return (
        x.dtype == weight.dtype == torch.float32 and weight.device.type == "cpu" and weight.is_contiguous()
        and weight.numel() > 0 and torch.backends.mkl.is_available()
        and not torch.is_autocast_enabled("cpu")
    )  # fmt: skip


@cache
def _block(rows: int) -> int | None:
    """The number of rows of a block, which divides all rows; None if none does."""
    return next((size for size in reversed(_BLOCKS) if rows % size == 0), None)


class StepLinear:
    """The forward of a linear layer."""

    def __init__(self, module: nn.Linear) -> None:
        self._linear = module

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self._linear.weight, self._linear.bias
        # A compiler cannot trace the variable.
        product = F.linear if torch.compiler.is_compiling() or not in_pass() else linear
        return product(x, weight, bias)


def is_plain(module: object) -> bool:
    """Whether a module is an `nn.Linear` itself, with its own forward or that of this file."""
    return type(module) is nn.Linear and isinstance(vars(module).get("forward"), StepLinear | None)


def use_linear(model: nn.Module) -> None:
    """Let every plain linear layer of a model on the CPU compute by `linear` in passes."""
    for module in model.modules():
        if type(module) is nn.Linear and "forward" not in vars(module) and module.weight.device.type == "cpu":
            vars(module)["forward"] = StepLinear(module)
