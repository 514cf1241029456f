"""Random recurrent layers of every kind, their results with all gradients, and the error rule for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmesh.core.masks import Documents, Mask, PerSequence
from attnmesh.ops.recurrent.convolution import ShortConvolution
from attnmesh.ops.recurrent.delta_rules import GatedDeltaRule, KimiDeltaAttention
from attnmesh.ops.recurrent.layer import RecurrentLayer
from attnmesh.ops.recurrent.linear_attention import RWKV7, LightningAttention
from attnmesh.ops.recurrent.state_space import Mamba1, Mamba2
from attnmesh.testing.errors import ROUNDING, Comparison

KINDS = ("gated delta rule", "kda", "lightning", "rwkv7", "mamba2", "mamba1", "convolution")
Results = dict[str, Tensor]


def random_layer(
    kind: str, length: int, *, batch: int = 1, groups: int = 2, heads: int = 4, key_dim: int = 6, value_dim: int = 5,
    seed: int = 0,
) -> RecurrentLayer:  # fmt: skip
    """A layer in float64 whose values are exact in float32, with inputs such as models have."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    def keys() -> Tensor:
        return randn(batch, groups, length, key_dim)

    def unit(x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)

    v, by_head = randn(batch, heads, length, value_dim), (batch, heads, length)
    full = (*by_head, key_dim)
    layer: RecurrentLayer = {
        "gated delta rule": lambda: GatedDeltaRule(
            keys(), unit(keys()), v, -randn(*by_head).exp() / 4, randn(*by_head).sigmoid()
        ),
        "kda": lambda: KimiDeltaAttention(
            keys(), unit(keys()), v, -randn(*full).exp() / 4, randn(*by_head).sigmoid(), scale=0.5
        ),
        "lightning": lambda: LightningAttention(keys(), keys(), v, -randn(heads).exp() / 8),
        "rwkv7": lambda: RWKV7(
            randn(*full), -randn(*full).exp() / 4, randn(*full), v, -unit(randn(*full)),
            unit(randn(*full)) * randn(*by_head, 1).sigmoid(),
        ),
        "mamba2": lambda: Mamba2(v, F.softplus(randn(*by_head)), -randn(heads).exp(), keys(), keys(), randn(heads)),
        "mamba1": lambda: Mamba1(
            randn(*by_head), F.softplus(randn(*by_head)), -randn(heads, key_dim).exp(), keys(), keys(), randn(heads)
        ),
        "convolution": lambda: ShortConvolution(randn(*by_head), randn(heads, 4), randn(heads), "silu"),
    }[kind]()  # fmt: skip
    return to_dtype(layer, torch.float64)


def to_dtype(layer: RecurrentLayer, dtype: torch.dtype) -> RecurrentLayer:
    return replace(layer, **{name: x.to(dtype) for name, x in layer._tensors().items()})


def has_positions(layer: RecurrentLayer, name: str) -> bool:
    return "seq" in layer._DIMS[name].split()


def packed(length: int, batch: int, how: str) -> Mask | None:
    """No documents, the same documents in all rows, or documents of its own for each row; one document is empty."""
    if how == "whole":
        return None
    rows = [Documents([length // 3 + row, 0, 1, length - length // 3 - row - 1]) for row in range(batch)]
    return PerSequence(rows) if how == "rows" else rows[0]


def random_state(layer: RecurrentLayer, seed: int = 1) -> Tensor:
    return torch.randn(layer.state_shape, generator=torch.Generator().manual_seed(seed)).double()


def weights_like(x: Tensor, seed: int) -> Tensor:
    """What a loss multiplies an output with: the same for every dtype."""
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(x)


def with_grads(
    layer: RecurrentLayer, state: Tensor | None, run: Callable[[RecurrentLayer, Tensor | None], tuple[Tensor, Tensor]]
) -> Results:
    """The outputs, the final state and the gradients of all inputs of `run(layer, initial state)`."""
    leaves = {name: x.detach().clone().requires_grad_() for name, x in layer._tensors().items()}
    state = None if state is None else state.detach().clone().requires_grad_()
    out, final = run(replace(layer, **leaves), state)
    ((out * weights_like(out, 2)).sum() + (final * weights_like(final, 3)).sum()).backward()
    grads = {f"gradient of {name}": _grad(x) for name, x in leaves.items()}
    if state is not None:
        grads["gradient of initial_state"] = _grad(state)
    return {"out": out.detach(), "final state": final.detach(), **grads}


def _grad(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def assert_errors(
    found: Results, plain: Results, exact: Results, what: object, sizes: dict[str, float] | None = None
) -> None:
    """At most twice the error of the plain computation, for everything.

    `sizes` are the norms of what was rounded to float32 before it was summed over ranks, where that is larger.
    """
    assert found.keys() == plain.keys() == exact.keys()
    for name in exact:
        assert found[name].shape == exact[name].shape, (what, name)
        larger = max(1.0, (sizes or {}).get(name, 0.0) / float(exact[name].norm().clamp(min=1e-30)))
        compared = Comparison(name, found[name], exact[name], plain[name], larger * ROUNDING[torch.float32])
        assert compared.error <= compared.bound, (what, name, compared.error, compared.bound)
