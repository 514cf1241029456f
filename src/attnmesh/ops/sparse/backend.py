"""The interface of a sparse backend, and which backend serves a call."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import ParamSpec, Protocol, TypeVar, cast

import torch
from torch import Tensor

from attnmesh.ops.sparse import torch_backend
from attnmesh.ops.sparse.arguments import RowBounds, TopKIndices
from attnmesh.utils.log import log_choice, wants_choices
from attnmesh.utils.optional import installed
from attnmesh.utils.validation import check_choice

LOG = logging.getLogger(__name__)
"""Of choices of a backend."""

_NAMES = ("auto", "torch", "triton")

P = ParamSpec("P")
R = TypeVar("R")


class Backend(Protocol):
    """Takes validated tensors: q [s_q, heads, d], k [s_kv, d], indices [s_q, topk], lse [s_q, heads]."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, bounds: RowBounds,
        *, scale: float, d_v: int, dtype: torch.dtype, sinks: Tensor | None = None, max_logits: bool = False,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """`out` [s_q, heads, d_v] of `dtype`, `lse` [s_q, heads] and, with `max_logits`, the largest score like lse.

        `sinks` [heads] are part of out and lse, not of the largest score.
        """
        ...

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, bounds: RowBounds, lse: Tensor, delta: Tensor,
        dout: Tensor, *, scale: float, d_v: int, deterministic: bool, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
        """dq of `dtype`; dk and dv in the accumulation dtype. Without `v`, dk includes the gradient of the values."""
        ...

    def row_delta(self, out: Tensor, dout: Tensor) -> Tensor:
        """The sum of out * dout over features, [s_q, heads]."""
        ...

    def distribution(
        self, q: Tensor, k: Tensor, indices: Tensor, bounds: RowBounds, lse: Tensor, *, scale: float, head_group: int
    ) -> Tensor:
        """Probabilities of the slots, summed over the heads of each group: [groups, s_q, topk]."""
        ...

    def scores_at(
        self, iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor, bounds: RowBounds, *, scale: float, relu: bool
    ) -> Tensor:
        """Index scores of the slots [s_q, topk], -inf where a slot is invalid."""
        ...

    def scores_at_backward(
        self, iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor, bounds: RowBounds, grad: Tensor,
        *, scale: float, relu: bool, deterministic: bool, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """d_iq of `dtype`; d_ik and d_w in the accumulation dtype."""
        ...

    def dense_scores_backward(
        self, iq: Tensor, ik: Tensor, w: Tensor, bounds: RowBounds, grad: Tensor,
        *, scale: float, relu: bool, dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """`scores_at_backward` where the slots of every row are all keys of `ik`, in order. Always deterministic."""
        ...

    def topk(
        self,
        iq: Tensor,
        ik: Tensor,
        w: Tensor,
        topk: int,
        bounds: RowBounds,
        *,
        scale: float,
        relu: bool,
        block_size: int,
    ) -> TopKIndices:
        """The `topk` keys with the highest index scores per row. `block_size`: keys scored at a time on a CPU."""
        ...


def _without_autocast(compute: Callable[P, R]) -> Callable[P, R]:
    """Disable autocast in `compute`, which chooses its dtypes itself."""

    @functools.wraps(compute)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.autocast(cast(Tensor, args[0]).device.type, enabled=False):
            return compute(*args, **kwargs)

    return wrapped


class Torch:
    """Torch operations: any device and dtype."""

    forward = staticmethod(_without_autocast(torch_backend.forward))
    backward = staticmethod(_without_autocast(torch_backend.backward))
    row_delta = staticmethod(_without_autocast(torch_backend.row_delta))
    distribution = staticmethod(_without_autocast(torch_backend.distribution))
    scores_at = staticmethod(_without_autocast(torch_backend.scores_at))
    scores_at_backward = staticmethod(_without_autocast(torch_backend.scores_at_backward))
    dense_scores_backward = staticmethod(_without_autocast(torch_backend.dense_scores_backward))
    topk = staticmethod(_without_autocast(torch_backend.topk))


def select_backend(q: Tensor, backend: str) -> Backend:
    """The backend of this name; "auto" is Triton on a GPU and torch elsewhere. ValueError if it cannot serve `q`."""
    check_choice("backend", backend, _NAMES)
    refusal = _triton_refusal(q)
    if backend == "triton" and refusal is not None:
        raise ValueError(f"backend='triton' cannot serve this call: {refusal}")
    use_triton = backend == "triton" or (backend == "auto" and q.is_cuda and refusal is None)
    if backend == "auto":
        log_backend(LOG, "sparse attention", q, "triton" if use_triton else "torch", refusal)
    if use_triton:
        from attnmesh.ops.sparse.triton_backend import Triton

        return Triton()
    return Torch()


def log_backend(logger: logging.Logger, what: str, q: Tensor, backend: str, triton_refusal: str | None) -> None:
    """Log which backend "auto" chose, and why not Triton."""
    if wants_choices(logger):
        why = "" if backend == "triton" else f"; triton cannot: {triton_refusal or 'q is not on a GPU'}"
        log_choice(logger, "%s of q %s, %s on %s: %s%s", what, tuple(q.shape), q.dtype, q.device, backend, why)


def _triton_refusal(q: Tensor) -> str | None:
    if not installed("triton"):
        return "Triton is not installed"
    if q.dtype == torch.float64:
        return "it computes in float32, and q is float64"
    if q.shape[2] > 576:
        return f"its head dim is at most 576, got {q.shape[2]}"
    return None
