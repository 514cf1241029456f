"""Recurrent layers: random inputs of every kind, results with all gradients, also over ranks, and the error rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmesh.core.masks import Documents, Mask, PerSequence
from attnmesh.ops.recurrent.api import Backend, scan
from attnmesh.ops.recurrent.layer import RecurrentLayer
from attnmesh.ops.recurrent.layers import (
    RWKV7,
    GatedDeltaRule,
    KimiDeltaAttention,
    LightningAttention,
    Mamba1,
    Mamba2,
    ShortConvolution,
)
from attnmesh.parallel.context import ContextParallel
from attnmesh.testing.errors import ROUNDING, Comparison

KINDS = ("gated delta rule", "kda", "lightning", "rwkv7", "mamba2", "mamba1", "convolution")
Results = dict[str, Tensor]


def random_layer(
    kind: str, length: int, *, batch: int = 1, groups: int = 2, heads: int = 4, key_dim: int = 6, value_dim: int = 5,
    seed: int = 0,
) -> RecurrentLayer:  # fmt: skip
    """Return a layer in float64 whose values are exact in float32, with inputs such as models have."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")

    def keys() -> Tensor:
        return randn(batch, groups, length, key_dim)

    def unit(x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1)

    v, by_head = randn(batch, heads, length, value_dim), (batch, heads, length)
    full = (*by_head, key_dim)
    make: dict[str, Callable[[], RecurrentLayer]] = {
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
    }  # fmt: skip
    return to_dtype(make[kind](), torch.float64)


def _randn(shape: Sequence[int], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32, device="cpu")


def to_dtype(
    layer: RecurrentLayer, dtype: torch.dtype, device: torch.device | str | None = None
) -> RecurrentLayer:  # fmt: skip
    """Return the layer with all inputs in a dtype, and on a device."""
    return replace(layer, **{name: x.to(device, dtype) for name, x in layer._tensors().items()})


def has_positions(layer: RecurrentLayer, name: str) -> bool:
    """Return whether an input has positions, or is a weight."""
    return "seq" in layer._DIMS[name].split()


def packed(length: int, batch: int, how: str) -> Mask | None:
    """Return no documents, documents that are the same in all rows, or documents of each row; one of them is empty."""
    if how == "whole":
        return None
    rows = [Documents([length // 3 + row, 0, 1, length - length // 3 - row - 1]) for row in range(batch)]
    return PerSequence(rows) if how == "rows" else rows[0]


def random_state(layer: RecurrentLayer, seed: int = 1) -> Tensor:
    """Return an initial state, in float64."""
    return _randn(layer.state_shape, seed).double()


def weights_like(x: Tensor, seed: int) -> Tensor:
    """Return what a loss multiplies an output with: the same for every dtype."""
    return _randn(x.shape, seed).to(x)


def with_grads(
    layer: RecurrentLayer, state: Tensor | None, run: Callable[[RecurrentLayer, Tensor | None], tuple[Tensor, Tensor]]
) -> Results:
    """Return the outputs, the final state and the gradients of all inputs of `run(layer, initial state)`."""
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


def one_process(
    layer: RecurrentLayer, state: Tensor | None, documents: Mask | None, backend: Backend = "auto"
) -> Results:  # fmt: skip
    """Return the results of `scan`."""

    def run(layer: RecurrentLayer, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return scan(layer, documents=documents, initial_state=state, return_final_state=True, backend=backend)

    return with_grads(layer, state, run)


def sharded(cp: ContextParallel, layer: RecurrentLayer) -> RecurrentLayer:
    """Return this rank's shard of a layer."""
    return replace(layer, **{n: cp.shard(x, 2) for n, x in layer._tensors().items() if has_positions(layer, n)})


def over_ranks(
    cp: ContextParallel, layer: RecurrentLayer, state: Tensor | None, documents: Mask | None, length: int
) -> tuple[Results, dict[str, float]]:
    """Return the results of the whole sequence, on every rank, and the norms of what sums were made of.

    The losses of all ranks are summed.
    """
    mine = sharded(cp, layer)
    names = [name for name in layer._tensors() if has_positions(layer, name)]
    weights = weights_like(getattr(layer, layer._OUTPUT), 2)

    def run(mine: RecurrentLayer, state: Tensor | None) -> tuple[Tensor, Tensor]:
        out, final = cp.recurrent(
            mine, length=length, documents=documents, initial_state=state, return_final_state=True
        )
        # `with_grads` multiplies with weights of its own: exchange them for this rank's share of the whole loss.
        part = weights_like(final, 3) * (1.0 if cp.rank == cp.world - 1 else 0.0)
        return _Weighted.apply(out, cp.shard(weights, 2)), _Weighted.apply(final, part)  # type: ignore[no-untyped-call]

    found = with_grads(mine, state, run)
    whole = {"out", *(f"gradient of {name}" for name in names)}
    sums = [name for name in found if name not in whole and name != "final state"]
    sizes = {name: float(cp.comm.all_reduce(found[name].double().norm())) for name in sums}
    results = {
        name: cp.unshard(x, 2, length) if name in whole else cp.comm.all_reduce(x.double()) if name in sums else x
        for name, x in found.items()
    }
    return results, sizes


class _Weighted(torch.autograd.Function):
    """The identity, with a given gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grad: Tensor) -> Tensor:
        ctx.save_for_backward(grad)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.saved_tensors[0], None


def comparisons(
    found: Results, plain: Results, exact: Results, dtype: torch.dtype, sizes: dict[str, float] | None = None
) -> list[Comparison]:
    """Return a comparison for every result.

    `sizes` are the norms of what was rounded before it was summed over ranks.
    """
    assert found.keys() == plain.keys() == exact.keys()
    made = []
    for name in exact:
        rounding = ROUNDING[dtype]
        if sizes is not None and name in sizes:  # few numbers: each may be rounded by half a unit in the last place
            larger = sizes[name] / float(exact[name].norm().clamp(min=1e-30))
            rounding = max(rounding, larger * torch.finfo(dtype).eps / 2)
        made.append(Comparison(name, found[name], exact[name], plain[name], rounding))
    return made


def assert_errors(
    found: Results, plain: Results, exact: Results, what: object, sizes: dict[str, float] | None = None
) -> None:
    """Assert that the error is at most twice that of the plain computation in float32, for everything."""
    for compared in comparisons(found, plain, exact, torch.float32, sizes):
        name = compared.name
        assert found[name].shape == exact[name].shape, (what, name)
        assert compared.error <= compared.bound, (what, name, compared.error, compared.bound)
