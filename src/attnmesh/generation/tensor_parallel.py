"""Linear maps that ranks compute together, while all of them step through the same tokens.

A step of few tokens takes as long as its weights take to be read. Every rank has all weights, but need not read them
all: of an MLP each computes some of the hidden numbers, and the ranks sum what they make of them; of the vocabulary
each scores some tokens, and the ranks gather the scores.

    gate_proj, up_proj    [.., hidden] -> own part of [.., intermediate]
    down_proj             own part -> [.., hidden], summed over ranks
    lm_head               [.., hidden] -> own part of [.., vocabulary], gathered

A model is the same as before, except within `with SharedWork(...)`: its maps ask who works on them in this thread.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from attnmesh.comm import Comm

_IN, _OUT, _SCORES = "in", "out", "scores"
_MLP = {"gate_proj": _IN, "up_proj": _IN, "down_proj": _OUT}


class _Workers(threading.local):
    """Who works together in this thread: virtual ranks are threads."""

    comm: Comm | None = None


_workers = _Workers()


class SharedWork:
    """The maps of a model that can be shared: ranks that are in its `with` together share the work.

    Models whose MLP is built otherwise share what they can.
    """

    def __init__(self, model: Any, comm: Comm) -> None:
        self._comm = comm
        if comm.world == 1:
            return
        for module in model.modules():
            parts = {name: getattr(module, name, None) for name in _MLP}
            if all(_is_plain(part) for part in parts.values()):
                for name, part in parts.items():
                    _share(part, _MLP[name])
        head = model.get_output_embeddings()
        if _is_plain(head):
            _share(head, _SCORES)

    def __enter__(self) -> None:
        _workers.comm = self._comm if self._comm.world > 1 else None

    def __exit__(self, *_: object) -> None:
        _workers.comm = None


class _SharedLinear:
    """The forward of a linear map that may be shared."""

    def __init__(self, linear: nn.Linear, how: str) -> None:
        self._linear, self._how = linear, how

    def __call__(self, x: Tensor) -> Tensor:
        linear, comm = self._linear, _workers.comm
        if comm is None:
            return F.linear(x, linear.weight, linear.bias)
        slices = _slices(linear.in_features if self._how == _OUT else linear.out_features, comm.world)
        own = slices[comm.rank]
        if self._how == _OUT:
            total = comm.all_reduce(F.linear(x, linear.weight[:, own]), reuse=True)
            return total if linear.bias is None else total + linear.bias
        y = F.linear(x, linear.weight[own], None if linear.bias is None else linear.bias[own])
        if self._how == _IN:
            return y
        shapes = [(*x.shape[:-1], part.stop - part.start) for part in slices]
        return torch.cat(comm.all_gather(y, shapes), -1)


def _slices(n: int, world: int) -> list[slice]:
    return [slice(n * rank // world, n * (rank + 1) // world) for rank in range(world)]


def _is_plain(module: object) -> bool:
    """Whether it is a linear map and nothing else: a subclass, or one that was given another forward, is left alone."""
    return type(module) is nn.Linear and isinstance(vars(module).get("forward"), _SharedLinear | None)


def _share(linear: Any, how: str) -> None:
    vars(linear)["forward"] = _SharedLinear(linear, how)
