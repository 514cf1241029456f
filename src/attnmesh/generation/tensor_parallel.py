"""Tensor-parallel MLP and LM head for decode steps, in which all ranks compute the same tokens.

A step of few tokens takes as long as reading its weights. Every rank stores all weights, but reads only a part: each
computes a part of the intermediate activations of an MLP, and an all-reduce sums the results; each computes the logits
of a part of the vocabulary, and an all-gather collects them. All ranks sum in rank order: they get the same bits.

    gate_proj, up_proj    column-parallel: [.., hidden] -> this rank's part of [.., intermediate]
    down_proj             row-parallel: this rank's part -> [.., hidden], all-reduce
    lm_head               column-parallel: [.., hidden] -> this rank's part of [.., vocabulary], all-gather

On the CPU a row-parallel layer keeps a copy of this rank's part of its weight: torch's CPU product takes twice as long
over a part of every row. Outside of `with TensorParallel(...)` the model is unchanged.
"""

from __future__ import annotations

import copy
import threading
from typing import Any, Literal

import torch
from torch import Tensor, nn

from attnmesh.comm import Comm
from attnmesh.generation.layers import StepLinear, is_plain, linear

_Split = Literal["column", "row", "column_gathered"]
_MLP: dict[str, _Split] = {"gate_proj": "column", "up_proj": "column", "down_proj": "row"}


class _Active(threading.local):
    """The comm of the tensor-parallel ranks in this thread: virtual ranks are threads."""

    comm: Comm | None = None


_active = _Active()


class TensorParallel:
    """Context manager that runs the MLPs and the LM head of a model in parallel over the ranks of `comm`.

    All ranks must enter it together. Modules that are not plain gated MLPs of `nn.Linear`, or that compute other than
    element by element between these (a norm, a top-k of the activations), are left alone.
    """

    def __init__(self, model: Any, comm: Comm) -> None:
        self._comm = comm
        if comm.world == 1:
            return
        for module in model.modules():
            linears = {name: getattr(module, name, None) for name in _MLP}
            if all(is_plain(linear) for linear in linears.values()) and _is_elementwise(module, linears):
                for name, linear in linears.items():
                    _parallelize(linear, _MLP[name])
        head = model.get_output_embeddings()
        if is_plain(head):
            _parallelize(head, "column_gathered")

    def __enter__(self) -> None:
        _active.comm = self._comm if self._comm.world > 1 else None

    def __exit__(self, *_: object) -> None:
        _active.comm = None


class _ParallelForward(StepLinear):
    """The forward of a linear layer, tensor-parallel where that is active."""

    def __init__(self, module: nn.Linear, split: _Split) -> None:
        super().__init__(module)
        self._split = split
        self._copy: tuple[tuple[object, ...], Tensor] | None = None

    def __call__(self, x: Tensor) -> Tensor:
        module, comm = self._linear, _active.comm
        if comm is None:
            return super().__call__(x)
        slices = _slices(module.in_features if self._split == "row" else module.out_features, comm.world)
        own = slices[comm.rank]
        if self._split == "row":
            total = comm.all_reduce(linear(x, self._columns(own)), reuse=True)
            return total if module.bias is None else total + module.bias
        y = linear(x, module.weight[own], None if module.bias is None else module.bias[own])
        if self._split == "column":
            return y
        shapes = [(*x.shape[:-1], part.stop - part.start) for part in slices]
        return torch.cat(comm.all_gather(y, shapes), -1)

    def _columns(self, own: slice) -> Tensor:
        """Columns of the weight; on the CPU contiguous, copied again whenever the weight has changed."""
        weight = self._linear.weight
        if weight.device.type != "cpu" or _active.comm is None or not _active.comm.shares_memory:
            return weight[:, own]
        version = None if weight.is_inference() else weight._version
        state = (weight.data_ptr(), version, own.start, own.stop, weight.dtype)
        if self._copy is None or self._copy[0] != state:
            self._copy = state, weight.detach()[:, own].contiguous()
        return self._copy[1]


def _slices(n: int, world: int) -> list[slice]:
    return [slice(n * rank // world, n * (rank + 1) // world) for rank in range(world)]


class _Given(nn.Module):
    """In place of a linear layer: notes its input, and returns what it is given."""

    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.out, self.inputs = out, [out[..., :0]]

    def forward(self, x: Tensor) -> Tensor:
        self.inputs.append(x)
        return self.out


@torch.no_grad()
def _is_elementwise(mlp: nn.Module, linears: dict[str, Any]) -> bool:
    """Whether a part of the outputs of `gate_proj` and `up_proj` gives that part of the input of `down_proj`."""
    gate, up, down = linears.values()
    width, like = gate.out_features, down.weight
    if not width == up.out_features == down.in_features:
        return False
    x = like.new_ones(1, 2, gate.in_features)
    steps = torch.arange(4 * width, dtype=torch.float32, device=like.device).mul(0.7)
    g, u = (3 * steps.sin()).to(like.dtype).view(2, 1, 2, width)

    def between(own: slice) -> Tensor:
        parts = [_Given(g[..., own]), _Given(u[..., own]), _Given(like.new_zeros(1, 2, down.out_features))]
        copied: Any = copy.copy(mlp)
        copied._modules = {**mlp._modules, **dict(zip(linears, parts, strict=True))}
        type(mlp).forward(copied, x)
        return parts[-1].inputs[-1]

    try:
        whole = between(slice(None))
        parts = [between(own) for own in _slices(width, 2)]
    except (TypeError, RuntimeError, ValueError, AttributeError):  # its code needs more, such as an intermediate size
        return False
    return whole.shape[-1] == width and torch.allclose(torch.cat(parts, -1), whole, rtol=1e-2, atol=1e-3)


def _parallelize(linear: Any, split: _Split) -> None:
    vars(linear)["forward"] = _ParallelForward(linear, split)
