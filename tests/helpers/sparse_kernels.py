"""The kernels of the sparse family, called with tensors: `lo`, `hi` and `slots` are the bounds of the rows."""

from types import ModuleType

import torch
from torch import Tensor

from attnmesh.ops.sparse import backward as by_kernels
from attnmesh.ops.sparse import triton_indexer, triton_paged_topk
from attnmesh.ops.sparse.arguments import IndexerCall, RowBounds, SparseCall, TopKIndices
from attnmesh.ops.sparse.dispatch import Forward
from attnmesh.ops.sparse.paged import IndexerStep, PagedKeys
from attnmesh.ops.sparse.triton_indexer import Grads


def attention_call(
    q: Tensor, k: Tensor, v: Tensor | None, indices: Tensor, lo: Tensor, hi: Tensor, slots: Tensor, *, scale: float,
    d_v: int = 0, k_offset: int = 0, deterministic: bool = False,
) -> SparseCall:  # fmt: skip
    bounds = RowBounds(lo, hi, slots, k_offset)
    return SparseCall(q, k, v, indices, bounds, scale, d_v or k.shape[1], deterministic, "triton")


def latent_call(q: Tensor, k: Tensor, v: Tensor | None = None, d_v: int = 512) -> SparseCall:
    """Return a call without bounds, to ask what kernels serve it."""
    return SparseCall(q, k, v, None, None, 1.0, d_v, False, "auto")


def forward(
    kernel: ModuleType, *given: Tensor, out_dtype: torch.dtype, sinks: Tensor | None = None, max_logits: bool = False,
    **how: object,
) -> tuple[Tensor, ...]:  # fmt: skip
    call = attention_call(*given, **how)
    return Forward(kernel.launch, call, out_dtype, max_logits)(call, sinks)


def distribution(
    kernel: ModuleType, q: Tensor, k: Tensor, indices: Tensor, lo: Tensor, hi: Tensor, slots: Tensor, lse: Tensor, *,
    k_offset: int, scale: float, head_group: int, **how: object,
) -> Tensor:  # fmt: skip
    call = attention_call(q, k, None, indices, lo, hi, slots, scale=scale, k_offset=k_offset)
    return kernel.distribution(call, lse, head_group, **how)


def backward(
    *given: Tensor, lse: Tensor, delta: Tensor, dout: Tensor, dtype: torch.dtype | None = None,
    chunk_rows: int | None = None, gluon: bool = False, **how: object,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    call = attention_call(*given, **how)
    return by_kernels.backward(call, lse, delta, dout, dtype or call.q.dtype, gluon=gluon, chunk_rows=chunk_rows)


def indexer_call(
    iq: Tensor, ik: Tensor, w: Tensor, indices: Tensor | None, lo: Tensor, hi: Tensor, slots: Tensor, *, scale: float,
    relu: bool, k_offset: int = 0, deterministic: bool = False,
) -> IndexerCall:  # fmt: skip
    return IndexerCall(iq, ik, w, indices, RowBounds(lo, hi, slots, k_offset), scale, relu, deterministic, "triton")


def topk(
    kernel: ModuleType, iq: Tensor, ik: Tensor, w: Tensor, k: int, lo: Tensor, hi: Tensor, *, scale: float, relu: bool,
    **how: object,
) -> TopKIndices:  # fmt: skip
    return kernel.topk(indexer_call(iq, ik, w, None, lo, hi, hi, scale=scale, relu=relu), k, **how)


def scores_at(*given: Tensor, tiles: object = None, **how: object) -> Tensor:
    return triton_indexer.scores_at(indexer_call(*given, **how), tiles=tiles)


def scores_at_backward(
    *given: Tensor, d_iq_dtype: torch.dtype | None = None, tiles: object = None, workspace: int = 256 << 20,
    **how: object,
) -> Grads:  # fmt: skip
    *given, grad = given
    call = indexer_call(*given, **how)
    return triton_indexer.scores_at_backward(call, grad, d_iq_dtype or call.iq.dtype, tiles=tiles, workspace=workspace)


def dense_scores_backward(
    iq: Tensor, ik: Tensor, w: Tensor, first_key: int, lo: Tensor, hi: Tensor, grad: Tensor, *, scale: float,
    relu: bool, d_iq_dtype: torch.dtype | None = None, tiles: object = None,
) -> Grads:  # fmt: skip
    call = indexer_call(iq, ik, w, None, lo, hi, hi, scale=scale, relu=relu, k_offset=first_key)
    return triton_indexer.dense_scores_backward(call, grad, d_iq_dtype or iq.dtype, tiles=tiles)


def paged_topk(
    iq: Tensor, keys: PagedKeys, w: Tensor, k: int, first: Tensor, end: Tensor, *, scale: float, relu: bool,
    gluon: ModuleType | None = None, **how: object,
) -> TopKIndices:  # fmt: skip
    step = IndexerStep(iq, keys, w, k, first, end, scale, relu, "triton")
    return triton_paged_topk.paged_topk(step, gluon, **how)
