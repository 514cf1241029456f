"""Which backend serves a sparse call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar, cast

import torch
from torch import Tensor

from attnmesh.core.optional import installed
from attnmesh.ops.sparse import torch_attention, torch_indexer
from attnmesh.ops.sparse.backend import Backend

_NAMES = ("auto", "torch", "triton")


P = ParamSpec("P")
R = TypeVar("R")


def _as_written(compute: Callable[P, R]) -> Callable[P, R]:
    """Without autocast: what says float32 is computed in float32."""

    @functools.wraps(compute)
    def computed(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.autocast(cast(Tensor, args[0]).device.type, enabled=False):
            return compute(*args, **kwargs)

    return computed


class Torch:
    """Torch operations, any device and dtype."""

    forward = staticmethod(_as_written(torch_attention.forward))
    backward = staticmethod(_as_written(torch_attention.backward))
    row_delta = staticmethod(_as_written(torch_attention.row_delta))
    distribution = staticmethod(_as_written(torch_attention.distribution))
    scores_at = staticmethod(_as_written(torch_indexer.scores_at))
    scores_at_backward = staticmethod(_as_written(torch_indexer.scores_at_backward))
    stretch_backward = staticmethod(_as_written(torch_indexer.stretch_backward))
    topk = staticmethod(_as_written(torch_indexer.topk))


def choose(q: Tensor, backend: str) -> Backend:
    """The backend of this name; "auto" is the kernels on a GPU and torch elsewhere. ValueError if it cannot serve."""
    if backend not in _NAMES:
        raise ValueError(f"backend must be one of {', '.join(_NAMES)}, got {backend!r}")
    refusal = _refusal(q)
    if backend == "triton" and refusal is not None:
        raise ValueError(f"backend='triton' cannot serve this call: {refusal}")
    if backend == "triton" or (backend == "auto" and q.is_cuda and refusal is None):
        from attnmesh.ops.sparse.triton import Triton

        return Triton()
    return Torch()


def _refusal(q: Tensor) -> str | None:
    if not installed("triton"):
        return "Triton is not installed"
    if q.dtype == torch.float64:
        return "it computes in float32, and q is float64"
    if q.shape[2] > 576:
        return f"its heads are at most 576 wide, got {q.shape[2]}"
    return None
