"""Which backend computes an operation of the sparse functions, and the call of it.

Backends are named after what runs: kernels in "gluon" for Hopper, kernels in "triton", and operations of "torch" on any
device. "auto" takes, on a GPU, the first that serves a call; a backend that is asked for by name and does not serve it
is an error.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from attnmesh.ops.decode.device_errors import MAX_SEQUENCES
from attnmesh.ops.launch import Launch, Recent, gpu_of, signature
from attnmesh.ops.sparse import torch_backend
from attnmesh.ops.sparse.arguments import IndexerCall, SparseCall, TopKIndices
from attnmesh.ops.sparse.paged import PagedKeys
from attnmesh.ops.storage import Quantized
from attnmesh.utils.log import log_choice, wants_choices
from attnmesh.utils.optional import installed, require
from attnmesh.utils.validation import check_choice

# The forward pass of sparse attention by a kernel: memory for its results, and launches that repeat.


FirstLaunch = Callable[[SparseCall, Tensor | None, tuple[Tensor, ...]], Launch]


class Forward:
    """The forward pass of calls with one signature: the first call launches a kernel, the others repeat the launch.

    Results are out [s_q, heads, d_v], lse [s_q, heads] in float32, natural, and, with `max_logits`, the largest scaled
    score [s_q, heads] in float32. `sinks` [heads] are scores of one more key per head, without a value; they are part
    of out and lse, not of the largest score. A row without a valid slot has out 0 and lse -inf (or its sink). Keys of
    no valid slot may hold any values.
    """

    def __init__(self, first: FirstLaunch, call: SparseCall, dtype: torch.dtype, max_logits: bool) -> None:
        s_q, heads, _ = call.q.shape
        of_rows = (s_q, heads), (heads, 1)
        self._shape, self._strides = (s_q, heads, call.d_v), (heads * call.d_v, call.d_v, 1)
        self._more = [of_rows] * (2 if max_logits else 1)
        self._first, self._dtype, self._device = first, dtype, call.q.device
        self._launch: Launch | None = None

    def __call__(self, call: SparseCall, sinks: Tensor | None) -> tuple[Tensor, ...]:
        """The results of a call."""
        device = self._device
        out = torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=device)
        results = out, *[torch.empty_strided(*x, dtype=torch.float32, device=device) for x in self._more]
        if 0 in self._shape:
            return results
        if sinks is not None:
            sinks = sinks.contiguous()
        if self._launch is None:
            with torch.cuda.device_of(call.q):
                self._launch = self._first(call, sinks, results)
        else:
            q, k, v, indices, (lo, hi, slots, _), *_ = call
            self._launch(q, k, v, indices, lo, hi, slots, sinks, *results)
        return results


LOG = logging.getLogger(__name__)
"""Of choices of a backend."""

NAMES = ("auto", "gluon", "triton", "torch")
_MAX_WIDTH, _MAX_INDEX_WIDTH = 576, 256  # of a key that kernels take, and of a key of the indexer

# The operations that have a kernel in Gluon.
_IN_GLUON = {
    "forward": "gluon_forward",
    "backward": "gluon_backward",
    "distribution": "gluon_distribution",
    "topk": "gluon_topk",
    "decode": "gluon_decode",
    "paged_topk": "gluon_paged_scores",
}


def choose(
    operation: str, q: Tensor, backend: str, *given: Any, supports: str = "supports", cannot: str | None = None
) -> str:
    """The backend, by name, for an operation of queries q. Raises ValueError if the one that is asked for cannot.

    `given` are the arguments of the function `supports` of the kernel in Gluon; `cannot` is why no kernel serves it.
    """
    check_choice("backend", backend, NAMES)
    why_not = {"kernels": "q is not on a GPU"} if backend == "auto" and not q.is_cuda else {}
    for name in () if why_not else ("gluon", "triton") if backend == "auto" else (backend,):
        why = None if name == "torch" else cannot or _why_not(name, operation, q, given, supports)
        if why is None:
            chosen = name
            break
        why_not[name] = why
    else:
        if backend != "auto":
            raise ValueError(f"backend={backend!r} cannot serve this call: {why_not[backend]}")
        chosen = "torch"
    if backend == "auto" and wants_choices(LOG):
        reasons = "".join(f"; {name} cannot: {why}" for name, why in why_not.items())
        of = f"sparse {operation} of q {tuple(q.shape)}"
        log_choice(LOG, "%s, %s on %s: %s%s", of, q.dtype, q.device, chosen, reasons)
    return chosen


def _why_not(name: str, operation: str, q: Tensor, given: tuple[Any, ...], supports: str) -> str | None:
    """Why kernels of a backend do not serve an operation; None if they do."""
    if not installed("triton"):
        return "Triton is not installed"
    if q.dtype == torch.float64:
        return "it computes in float32, and q is float64"
    most = _MAX_INDEX_WIDTH if operation in ("scores_at", "topk", "paged_topk") else _MAX_WIDTH
    if q.shape[-1] > most:
        return f"its head dim is at most {most}, got {q.shape[-1]}"
    if name == "triton":
        return None
    if operation not in _IN_GLUON:
        return f"it has no kernel for {operation}"
    module = _module(_IN_GLUON[operation])
    return None if getattr(module, supports)(*given) else f"it takes {module.NEEDS}"


def _module(name: str) -> ModuleType:
    return require(f"attnmesh.ops.sparse.{name}", extra="triton")


def check_backend(operation: str, call: SparseCall | IndexerCall, *more: Any) -> None:
    """Raises ValueError if the backend that a call names does not serve an operation of it."""
    choose(operation, call[0], call.backend, call, *more)


# Attention.

_forwards: Recent[Forward] = Recent()


def prepare_forward(call: SparseCall, dtype: torch.dtype, max_logits: bool) -> Any:
    """The forward pass of all calls with the signature of this one: a function of a call and its sinks."""
    name = choose("forward", call.q, call.backend, call)
    if name == "torch":
        return lambda call, sinks: torch_backend.forward(call, dtype, sinks, max_logits)
    return Forward(_module(f"{name}_forward").launch, call, dtype, max_logits)


def forward(
    call: SparseCall, dtype: torch.dtype, sinks: Tensor | None = None, max_logits: bool = False
) -> tuple[Tensor, ...]:
    """`out` of `dtype`, `lse` and, with `max_logits`, the largest score: see `Forward`."""
    if choose("forward", call.q, call.backend, call) == "torch":
        return torch_backend.forward(call, dtype, sinks, max_logits)
    q, k, v, indices, (lo, hi, slots, k_offset), *options = call
    key = (*signature(q, k, v, indices, lo, hi, slots, sinks), k_offset, *options, dtype, max_logits, gpu_of(q.device))
    known = _forwards.get(key)
    return (known or _forwards.add(key, prepare_forward(call, dtype, max_logits)))(call, sinks)


def backward(
    call: SparseCall, lse: Tensor, delta: Tensor, dout: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dq of `dtype`; dk and dv in the accumulation dtype. Without `v`, dk includes the gradient of the values.

    lse [s_q, heads] may cover more keys; a head whose lse is infinite has no weights. `delta` is from `softmax_delta`.
    """
    name = choose("backward", call.q, call.backend, call, dout)
    if name == "torch":
        return torch_backend.backward(call, lse, delta, dout, dtype)
    from attnmesh.ops.sparse.backward import backward

    return backward(call, lse, delta, dout, dtype, gluon=name == "gluon")


def softmax_delta(call: SparseCall, out: Tensor, lse: Tensor, dout: Tensor, d_lse: Tensor | None) -> Tensor:
    """[s_q, heads]: sum(out * dout) - d_lse, which is subtracted from the gradient of every probability."""
    name = choose("backward", call.q, call.backend, call, dout)
    delta: Tensor = (torch_backend if name == "torch" else _module("triton_backward")).row_delta(out, dout)
    return delta if d_lse is None else delta - torch.where(torch.isinf(lse), 0.0, d_lse)


def distribution(call: SparseCall, lse: Tensor, head_group: int) -> Tensor:
    """Probabilities of the slots, summed over the heads of each group, [groups, s_q, topk]; 0 where a slot is invalid.

    A head whose lse [s_q, heads] is infinite contributes nothing.
    """
    name = choose("distribution", call.q, call.backend, call, head_group)
    module = torch_backend if name == "torch" else _module(f"{name}_distribution")
    found: Tensor = module.distribution(call, lse, head_group)
    return found


# The indexer.


def scores_at(call: IndexerCall) -> Tensor:
    """Index scores of the slots [s_q, topk], -inf where a slot is invalid."""
    name = choose("scores_at", call.iq, call.backend)
    found: Tensor = (torch_backend if name == "torch" else _module("triton_indexer")).scores_at(call)
    return found


def scores_at_backward(call: IndexerCall, grad: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """d_iq of `dtype`; d_ik and d_w in the accumulation dtype. Without indices, the slots of a row are all keys."""
    name = choose("scores_at", call.iq, call.backend)
    module = torch_backend if name == "torch" else _module("triton_indexer")
    of = module.dense_scores_backward if call.indices is None else module.scores_at_backward
    d_iq, d_ik, d_w = of(call, grad, dtype)
    return d_iq, d_ik, d_w


def choose_topk(call: IndexerCall, topk: int) -> str:
    """The backend of a top-k."""
    supports = "is_faster" if isinstance(call.backend, str) and call.backend == "auto" else "supports"
    return choose("topk", call.iq, call.backend, call.iq, call.ik, topk, supports=supports)


def topk(call: IndexerCall, topk: int, block_size: int) -> TopKIndices:
    """The `topk` keys with the highest index scores per row. `block_size`: keys scored at a time on a CPU."""
    name = choose_topk(call, topk)
    if name == "torch":
        return torch_backend.topk(call, topk, block_size)
    lo, hi, _, first = call.bounds
    if first:
        call = call._replace(bounds=call.bounds._replace(lo=lo - first, hi=hi - first, k_offset=0))
    found: TopKIndices = _module(f"{name}_topk").topk(call, topk)
    return found._replace(indices=torch.where(found.indices < 0, -1, found.indices + first)) if first else found


# Over paged caches.


def choose_paged(operation: str, q: Tensor, keys: PagedKeys, backend: str, *given: Any) -> str:
    """`choose` for queries [B, T, heads, d] over keys in a paged cache."""
    cannot = None
    if q.shape[0] > MAX_SEQUENCES:
        cannot = f"it takes up to {MAX_SEQUENCES} sequences, got {q.shape[0]}"
    elif isinstance(keys.pool, Quantized) and gpu_of(q.device).capability < 89:
        cannot = "its kernels need compute capability 8.9 to read fp8 caches"
    return choose(operation, q, backend, q, keys.pool, *given, cannot=cannot)
