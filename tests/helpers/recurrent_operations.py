"""Recurrent layers as public operations: see `helpers.operations`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import attnmesh as am
from attnmesh.testing.recurrent import KINDS, has_positions, random_layer, to_dtype
from helpers.operations import Operation, Random, Tensors, over_ranks

WORLD, LENGTH, DOCUMENTS = 2, 11, am.Documents([4, 7])


def _inputs(kind: str) -> Callable[[Random], Tensors]:
    def make(random: Random) -> Tensors:
        layer = to_dtype(random_layer(kind, LENGTH, seed=int(random.integers(0, 1000))), torch.float32)
        return {**layer._tensors(), "initial_state": random.normal(*layer.state_shape)}

    return make


def _layer(kind: str, x: Tensors) -> am.recurrent.RecurrentLayer:
    template = random_layer(kind, 1)
    return replace(template, **{name: one for name, one in x.items() if name != "initial_state"})


def _scan(kind: str) -> Callable[[Tensors, str], Tensors]:
    def run(x: Tensors, backend: str) -> Tensors:
        layer = _layer(kind, x)
        out, state = am.recurrent.scan(
            layer, documents=DOCUMENTS, initial_state=x["initial_state"], return_final_state=True, backend=backend
        )
        return {"out": out, "state": state, "rows": am.recurrent.scan(layer.rows(range(2, 5)), backend=backend)}

    return run


def _over_ranks(kind: str) -> Callable[[Tensors, str], Tensors]:
    def run(x: Tensors, backend: str) -> Tensors:
        def rank(comm: am.comm.Comm) -> Tensors:
            cp = am.ContextParallel(comm)
            layer = _layer(kind, x)
            mine = {n: cp.shard(one, 2) if has_positions(layer, n) else one for n, one in layer._tensors().items()}
            grads = {name: one.detach().requires_grad_() for name, one in mine.items()}
            out, state = cp.recurrent(
                replace(layer, **grads), length=LENGTH, documents=DOCUMENTS, initial_state=x["initial_state"],
                return_final_state=True,
            )  # fmt: skip
            found = torch.autograd.grad([out.square().sum(), state.sum()], list(grads.values()))
            return {"out": out.detach(), "state": state.detach(), **dict(zip(grads, found, strict=True))}

        return over_ranks(WORLD, rank)

    return run


def _segments(x: Tensors, backend: str) -> Tensors:
    first, second = (am.recurrent.Segment(x[f"transition {i}"], x[f"update {i}"]) for i in range(2))
    both = second.after(first)
    return {"transition": both.transition, "update": both.update, "state": both.apply(x["state"])}


def recurrent_operations() -> list[Operation]:
    """Return recurrent layers on one device and over ranks, and the algebra of segments."""
    found = []
    for kind in KINDS:
        layer = random_layer(kind, 1)
        name = type(layer).__name__
        grads = (*layer._tensors(), "initial_state")
        found.append(
            Operation(f"recurrent {kind}", (name, "scan"), _inputs(kind), _scan(kind), grads, exact="reference")
        )
        if kind in ("gated delta rule", "convolution"):
            found.append(
                Operation(
                    f"recurrent {kind} over ranks", ("ContextParallel.recurrent",), _inputs(kind), _over_ranks(kind)
                )
            )
    shapes = {"transition 0": (2, 3, 3), "update 0": (2, 3, 4), "transition 1": (2, 3, 1), "update 1": (2, 3, 4)}
    shapes["state"] = (2, 3, 4)

    def make(random: Random) -> dict[str, Tensor]:
        return {name: random.normal(*shape) for name, shape in shapes.items()}

    found.append(Operation("segments", ("Segment.after", "Segment.apply"), make, _segments, tuple(shapes)))
    return found
