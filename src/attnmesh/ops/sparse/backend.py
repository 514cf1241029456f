"""What a backend of the sparse family computes: everything else is the same for all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor

from attnmesh.core.optional import installed
from attnmesh.ops.sparse import torch_backend as torch_attention
from attnmesh.ops.sparse import torch_backend as torch_indexer
from attnmesh.ops.sparse.arguments import Rows, Slots


class Backend(Protocol):
    """Checked tensors in: q [s_q, h, d], k [s_kv, d], indices [s_q, topk], the natural lse in float32."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, rows: Rows,
        *, scale: float, d_v: int, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, rows: Rows, lse: Tensor, delta: Tensor,
        dout: Tensor, *, scale: float, d_v: int, deterministic: bool, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor | None]: ...  # fmt: skip

    def row_delta(self, out: Tensor, dout: Tensor) -> Tensor: ...

    def distribution(
        self, q: Tensor, k: Tensor, indices: Tensor, rows: Rows, lse: Tensor, *, scale: float, head_group: int
    ) -> Tensor: ...

    def scores_at(
        self, iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor, rows: Rows, *, scale: float, relu: bool
    ) -> Tensor: ...

    def scores_at_backward(
        self, iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor, rows: Rows, grad: Tensor,
        *, scale: float, relu: bool, deterministic: bool, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip

    def stretch_backward(
        self, iq: Tensor, ik: Tensor, w: Tensor, rows: Rows, grad: Tensor,
        *, scale: float, relu: bool, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """As `scores_at_backward`, where every row names all of `ik`, in order. The same bits in every run."""
        ...

    def topk(
        self, iq: Tensor, ik: Tensor, w: Tensor, topk: int, rows: Rows, *, scale: float, relu: bool, block: int
    ) -> Slots: ...


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
        from attnmesh.ops.sparse.triton_backend import Triton

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
