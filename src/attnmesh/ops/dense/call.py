"""`Call`: one block of attention for a backend, forward or backward, and the validation of q, k and v."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Protocol, TypedDict

import torch
from torch import Tensor

from attnmesh.core.mask import Mask
from attnmesh.core.state import accumulation_dtype, sink_gradient
from attnmesh.core.visibility import Block, Kind, Visibility
from attnmesh.ops.merge import GradAccumulator, StateAccumulator
from attnmesh.trace.timeline import Recorder
from attnmesh.utils.optional import installed, require
from attnmesh.utils.text import explained_in
from attnmesh.utils.validation import check_number, check_tensor, warn_caller


def contiguous_last_dim(x: Tensor) -> Tensor:
    """The tensor itself if its last dimension is contiguous, as kernels require, else a contiguous copy."""
    return x if x.stride(-1) == 1 else x.contiguous()


def aligned(x: Tensor) -> Tensor:
    """The tensor itself if its rows start at multiples of 16 bytes, else a contiguous copy.

    cuDNN and FlashAttention-2 read 16 bytes at a time and do not check this.
    """
    return x if _is_aligned(x) else x.clone(memory_format=torch.contiguous_format)


def loadable(x: Tensor) -> Tensor:
    """The tensor itself if Hopper's copy engine (TMA) can load from it, else a contiguous copy."""
    return x if is_loadable(x) else x.clone(memory_format=torch.contiguous_format)


def is_loadable(x: Tensor) -> bool:
    """Whether Hopper's copy engine (TMA) can load from the tensor and store to it."""
    expanded = any(n > 1 and stride == 0 for n, stride in zip(x.shape, x.stride(), strict=True))
    return not expanded and x.stride(-1) == 1 and _is_aligned(x)


def _is_aligned(x: Tensor) -> bool:
    step = 16 // x.element_size()
    strides = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    return x.data_ptr() % 16 == 0 and all(n == 1 or stride % step == 0 for n, stride in strides)


def values_in_keys(k: Tensor, v: Tensor) -> bool:
    """Whether v is a view of the first features of wide keys, as in MLA with absorbed weights.

    Kernels for latents then read only k. A backend that is kept for such tensors must not serve others.
    """
    if k.ndim != 4 or k.shape[3] <= 256:
        return False
    try:
        begin = Tensor.data_ptr if k.numel() else Tensor.storage_offset  # an empty tensor has no address
        return begin(v) == begin(k) and v.stride() == k.stride()
    except RuntimeError:  # the tensors of a torch.func transform have no memory
        return False


@dataclass(frozen=True)
class Scores:
    """The score of a query and a key: `softcap * tanh(scale * q.k / softcap) - slope * |q_position - k_position|`."""

    scale: float
    softcap: float | None = None
    alibi_slopes: Tensor | None = None  # [Hq] in the accumulation dtype

    @property
    def plain(self) -> bool:
        """Whether a score is the scaled product alone, as torch's fused kernels compute it."""
        return self.softcap is None and self.alibi_slopes is None

    def of_heads(self, heads: slice) -> Scores:
        """The scores of some of the query heads."""
        return self if self.alibi_slopes is None else replace(self, alibi_slopes=self.alibi_slopes[heads])


@dataclass(frozen=True)
class Call:
    """Queries [B,Hq,Sq,D], keys [B,Hkv,Sk,D] and values [B,Hkv,Sk,Dv], kv heads not expanded.

    `visibility` describes the keys that each row attends to.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    visibility: Visibility
    scores: Scores

    def bounds(self, block: Block, device: torch.device) -> tuple[Tensor, Tensor]:
        """The keys first[i] <= j < end[i] of the block that its row i sees, int32 [rows of the block]."""
        if block.kind is not Kind.PARTIAL:
            first = torch.full((len(block.q),), block.k.start, dtype=torch.int32, device=device)
            rows = torch.arange(len(block.q), dtype=torch.int32, device=device)
            return first, first + (rows + 1 if block.kind is Kind.CAUSAL else len(block.k))
        sequence = 0 if block.sequences is None else block.sequences.start  # the others of a block have the same bounds
        first, end = (
            bound[block.part, sequence, block.q.start : block.q.stop].clamp(block.k.start, block.k.stop)
            for bound in self.visibility.bounds(device)
        )
        return first, end

    def with_unseen_zeroed(self) -> Call:
        """The same call with 0 in keys that no row sees and in rows that see no key.

        Both may hold NaN, and a weight of 0 times NaN is NaN. Only PARTIAL blocks contain any.
        """
        rows, keys = self.visibility.unseen(self.q.device)
        q = self.q if rows is None else self.q.masked_fill(rows[:, None, :, None], 0.0)
        k, v = (x if keys is None else x.masked_fill(keys[:, None, :, None], 0.0) for x in (self.k, self.v))
        return replace(self, q=q, k=k, v=v)


@dataclass(frozen=True)
class Result:
    """The forward result of the whole softmax (all keys, all ranks), and the gradients of its outputs."""

    out: Tensor  # in the dtype of q
    lse: Tensor
    grad_out: Tensor
    grad_lse: Tensor | None
    _by_layout: dict[object, tuple[Tensor, Tensor]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _by_rows: dict[object, tuple[Tensor, Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, out: Tensor, lse: Tensor, grad_out: Tensor | None, grad_lse: Tensor | None) -> Result:
        """From the arguments of an autograd backward, where None means that an output is unused."""
        return cls(out, lse, torch.zeros_like(out) if grad_out is None else contiguous_last_dim(grad_out), grad_lse)

    def with_layout_of(self, q: Tensor, rows: range, sequences: range | None = None) -> tuple[Tensor, Tensor]:
        """The given rows of out and grad_out with the strides of `torch.empty_like(q)`; copied at most once."""
        strides = _strides_like(q.shape, q.stride())
        at = rows, sequences, strides
        if at not in self._by_layout:
            parts = [of_sequences(x, sequences) for x in (self.out, self.grad_out)]
            if len(rows) < parts[0].shape[2]:
                parts = [x[:, :, rows.start : rows.stop] for x in parts]
            out, grad_out = (
                x if _strided(x, strides) and _is_aligned(x) else torch.empty_like(q).copy_(x) for x in parts
            )
            self._by_layout[at] = out, grad_out
        return self._by_layout[at]

    def of_rows(self, rows: slice | None) -> tuple[Tensor, Tensor, Tensor]:
        """grad_out, lse and delta of some rows; None is all of them."""
        if rows is None:
            return self.grad_out, self.lse, self.delta
        at = rows.start, rows.stop
        parts = self._by_rows.get(at)
        if parts is None:
            parts = self._by_rows[at] = self.grad_out[:, :, rows], self.lse[:, :, rows], self.delta[:, :, rows]
        return parts

    @cached_property
    def delta(self) -> Tensor:
        """rowsum(out * grad_out) - grad_lse: the row term of the softmax gradient, computed once.

        In the accumulation dtype.
        """
        dtype = accumulation_dtype(self.out.dtype)
        if self.out.is_cuda and dtype == torch.float32 and installed("triton"):
            delta: Tensor = require("attnmesh.ops.dense.triton_backward", extra="triton").delta(
                self.out, self.grad_out, self.grad_lse
            )
            return delta
        products = (self.out.to(dtype) * self.grad_out.to(dtype)).sum(-1)
        return products if self.grad_lse is None else products - self.grad_lse

    def sink_gradient(self, sinks: Tensor) -> Tensor:
        """The gradient of `sinks` [H], for the rows of this result, in the accumulation dtype.

        `out` and `lse` include the sinks. Over ranks that hold different rows, the gradient is the sum.
        """
        lse, delta = (x.movedim(1, -1).flatten(0, -2) for x in (self.lse, self.delta))
        return sink_gradient(sinks.detach(), lse, delta)


@lru_cache(maxsize=256)
def _strides_like(shape: torch.Size, strides: tuple[int, ...]) -> tuple[int, ...]:
    """The strides of `torch.empty_like` of a tensor."""
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


def _strided(x: Tensor, strides: tuple[int, ...]) -> bool:
    """Whether x has these strides, ignoring dimensions of size 1."""
    return all(n == 1 or a == b for n, a, b in zip(x.shape, x.stride(), strides, strict=True))


@dataclass(frozen=True)
class Grads:
    """Accumulators for the gradients of a call; None for gradients that are not needed."""

    q: GradAccumulator | None
    k: GradAccumulator | None
    v: GradAccumulator | None


class Backend(Protocol):
    """One implementation. It serves a call, or returns the reason why it cannot."""

    name: str

    def why_not(self, call: Call) -> str | None:
        """The reason why this backend cannot serve the forward; None if it can."""

    def backward_why_not(self, call: Call, *, grad_lse: bool = False) -> str | None:
        """The reason why this backend cannot serve the backward, with or without a gradient of lse; None if it can."""

    def forward(self, call: Call, total: StateAccumulator) -> None:
        """Merges the attention of this call into `total`."""

    def prepare(self, call: Call, result: Result) -> None:
        """Computes the common inputs of several blocks of a backward, before they run on two streams."""

    def backward(self, call: Call, result: Result, grads: Grads) -> None:
        """Adds the gradients of this call to `grads`."""


def of_sequences(x: Tensor, sequences: range | None) -> Tensor:
    """Some sequences of a tensor [B, ...]; None is all of them."""
    return x if sequences is None else x[sequences.start : sequences.stop]


@explained_in("masks.md#head-shapes-and-scores")
def check_inputs(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> None:
    """Raise ValueError for invalid inputs of attention. The width of v may differ from the width of q and k."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.ndim != 4:
            raise ValueError(f"{name} must be [batch, heads, seq, head_dim], got shape {tuple(x.shape)}")
        if not x.dtype.is_floating_point:
            raise ValueError(f"{name} must be floating point, got {x.dtype}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have the same dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on the same device, got {q.device}, {k.device} and {v.device}")
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"k and v must have the same batch size, heads and length, got {tuple(k.shape)} and {tuple(v.shape)}"
        )
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3]:
        raise ValueError(
            f"q and k must have the same batch size and head_dim, got {tuple(q.shape)} and {tuple(k.shape)}"
        )
    if not q.shape[1] or not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"q_heads must be a multiple of kv_heads, got q_heads={q.shape[1]} and kv_heads={k.shape[1]}")
    for name, x in (("q", q), ("v", v)):
        if not x.shape[3]:
            raise ValueError(f"head_dim must be at least 1, got 0 in {name} {list(x.shape)}")
    if scale is not None:
        check_number("scale", scale)


_MAX_HEADS = 256
"""More heads than any model has."""


@explained_in("masks.md#head-shapes-and-scores")
def check_dim_order(q: Tensor, k: Tensor, length: int, key_length: int) -> bool:
    """Raise ValueError, or warn, if q and k seem to be [batch, seq, heads, head_dim], as FlashAttention has them.

    The lengths are the lengths of the whole sequences. Both must be shorter than there are heads. It raises if there
    are more heads than any model has. It warns if q and k have equally many heads and the lengths are such as head
    counts are: a short prompt of a model with fewer KV heads, and a decode step, do not look like that. Returns whether
    it warned.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    if not (1 < length < heads and 0 < key_length < kv_heads):
        return False
    text = (
        f"q and k, [batch, heads, seq, head_dim], have more heads than positions, got q {list(q.shape)} and k "
        f"{list(k.shape)}: if they are [batch, seq, heads, head_dim], pass x.transpose(1, 2)"
    )
    if min(heads, kv_heads) > _MAX_HEADS:
        raise ValueError(f"{text}; heads that are in fact sequences belong to the batch dimension")
    if heads != kv_heads or length % key_length:
        return False
    warn_caller(text)
    return True


def check_batch(mask: Mask, q: Tensor) -> None:
    """Raise ValueError for a mask of another number of sequences than q [B, Hq, S, D] has."""
    if mask.sequences is not None and mask.sequences != q.shape[0]:
        raise ValueError(f"mask must have one mask per sequence of the batch of {q.shape[0]}, got {mask.sequences}")


def resolve_scores(q: Tensor, scale: float | None, softcap: float | None, alibi_slopes: Tensor | None) -> Scores:
    """The score function of checked arguments."""
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.to(accumulation_dtype(q.dtype)).contiguous()
    return Scores(resolve_scale(q, scale), None if softcap is None else float(softcap), alibi_slopes)


class ScoreOptions(TypedDict, total=False):
    """Arguments of attention that few calls need, by keyword: as for `attention`."""

    softcap: float | None
    sinks: Tensor | None
    alibi_slopes: Tensor | None
    backend: str


def check_score_terms(
    q: Tensor, softcap: float | None, sinks: Tensor | None, alibi_slopes: Tensor | None
) -> None:  # fmt: skip
    """Raise ValueError for an invalid softcap, sinks or slopes of queries that have been checked."""
    if softcap is not None:
        check_number("softcap", softcap, above=0)
    for name, x in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if x is None:
            continue
        check_tensor(name, x, "[heads]")
        if x.shape != q.shape[1:2] or not x.dtype.is_floating_point:
            raise ValueError(
                f"{name} must be floating point [{q.shape[1]}], one per query head, got {x.dtype} {tuple(x.shape)}"
            )
        if x.device != q.device:
            raise ValueError(f"{name} must be on the device of q, {q.device}, got {x.device}")
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise ValueError("alibi_slopes must be constants without a gradient, got requires_grad=True")


def resolve_scale(q: Tensor, scale: float | None) -> float:
    """The given scale, or 1 / sqrt(head_dim)."""
    return 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)


def kernel_span(
    recorder: Recorder | None, name: str, backend: Backend, call: Call
) -> AbstractContextManager[None]:  # fmt: skip
    """Records a kernel call as a "compute" span; does nothing if `recorder` is None."""
    if recorder is None:
        return nullcontext()
    return recorder.span(
        "compute", name, call.q.device, backend=backend.name, blocks=len(call.visibility.blocks),
        queries=call.q.shape[2], keys=call.k.shape[2], heads=call.q.shape[1],
    )  # fmt: skip
