"""`attention` on one device: validation, choice of the backend, autograd."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.core import ranges
from attnmesh.core.intervals import Intervals
from attnmesh.core.mask import sequence_intervals
from attnmesh.core.masks import Full, Mask, check_mask
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.core.validation import check_bool, check_choice, check_tensor
from attnmesh.ops.dense import cost, reference
from attnmesh.ops.dense.aten import Aten
from attnmesh.ops.dense.call import (
    Backend,
    Call,
    Grads,
    Result,
    Scores,
    check_batch,
    check_dim_order,
    check_inputs,
    check_score_terms,
    contiguous_last_dim,
    resolve_scores,
)
from attnmesh.ops.dense.torch_tiles import TorchTiles
from attnmesh.ops.dense.triton import Triton
from attnmesh.ops.merge import GradAccumulator, StateAccumulator
from attnmesh.plan.blocks import Block, Kind, Patch, Visibility, bounds_of, stacked_bounds, unseen_of

BACKENDS = ("auto", "aten", "triton", "torch", "reference")

_TRITON, _TORCH = Triton(), TorchTiles()
_FUSED: dict[str, Backend] = {"aten": Aten(), "triton": _TRITON, "torch": _TORCH}

# Every pair of runs is planned; beyond this many, row bounds alone are cheaper than a plan.
_MAX_RUN_PAIRS = 256


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = ..., scale: float | None = ..., softcap: float | None = ...,
    sinks: Tensor | None = ..., alibi_slopes: Tensor | None = ..., q_positions: Tensor | None = ...,
    k_positions: Tensor | None = ..., return_lse: Literal[False] = ..., backend: str = ...,
) -> Tensor: ...  # fmt: skip
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = ..., scale: float | None = ..., softcap: float | None = ...,
    sinks: Tensor | None = ..., alibi_slopes: Tensor | None = ..., q_positions: Tensor | None = ...,
    k_positions: Tensor | None = ..., return_lse: Literal[True], backend: str = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask = Full(),  # noqa: B008  (immutable)
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    q_positions: Tensor | None = None,
    k_positions: Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Softmax attention on one device: q [B,Hq,Sq,D], k [B,Hkv,Sk,D] and v [B,Hkv,Sk,Dv] to out [B,Hq,Sq,Dv].

    Heads come before positions, as in `scaled_dot_product_attention`; pass `x.transpose(1, 2)` of tensors in the order
    of FlashAttention, [B,S,H,D]. More heads than positions on both sides warn, or raise if no model has so many heads.
    Query head h reads kv head `h // (Hq // Hkv)`. `out` has the dtype of q. A row that attends to no key has out 0 and
    lse -inf (with sinks, the sink). There is no dropout.

    Args:
        mask: which keys a query attends to. A mask with `sequences` has one mask per sequence of the batch.
        scale: multiplies the scores; 1 / sqrt(D) by default.
        softcap: bounds the scores to `softcap * tanh(score / softcap)`, as Gemma 2 and Grok do.
        sinks: [Hq], a score per query head that joins every softmax with a value of zero, as in GPT-OSS. It is
            differentiable, and part of the lse.
        alibi_slopes: [Hq], adds `-slope * |q_position - k_position|` to the scores, after the softcap. Constants.
        q_positions, k_positions: integer positions of the rows, in any order; 0, 1, 2, ... by default. A chunk of a
            longer prompt is `q_positions=torch.arange(start, start + Sq)`. On CUDA, pass CPU tensors (or None) to allow
            the fastest kernels: reading positions back from the device would stall it.
        return_lse: also return the float32 lse [B,Hq,Sq], natural log. It is differentiable.
        backend: "auto", "aten", "triton", "torch" or "reference". A backend that cannot serve the call raises
            ValueError. `explain_attention` returns what "auto" chooses and why.
    """
    check_bool(return_lse=return_lse)
    work = _prepared(q, k, v, mask, scale, softcap, sinks, alibi_slopes, q_positions, k_positions)
    choice = choose(work.call, backend)
    if choice.backend == "reference":
        at = [
            torch.arange(x.shape[2], device="cpu") if p is None else p for x, p in ((q, q_positions), (k, k_positions))
        ]
        with torch.autocast(q.device.type, enabled=False):  # the reference computes in the given dtype
            state = reference.attention(
                q, k, v, mask, work.call.scores.scale, *(p.to(q.device, torch.long) for p in at),
                softcap=softcap, sinks=sinks, alibi_slopes=alibi_slopes,
            )  # fmt: skip
        return (state.out, state.lse) if return_lse else state.out
    call = work.call
    out, lse = _Attention.apply(call.q, call.k, call.v, sinks, call.visibility, call.scores, backend)  # type: ignore[no-untyped-call]
    if work.order is not None:
        back = work.order.argsort()
        out, lse = out[:, :, back], lse[:, :, back]
    return (out, lse) if return_lse else out


@torch.no_grad()
def attention_state(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, q_positions: Tensor, k_positions: Tensor,
    backend: str = "auto",
) -> State:  # fmt: skip
    """`attention` as an unrounded float32 state, to be merged with others. Positions must ascend. No autograd."""
    call = _prepared(q, k, v, mask, scale, None, None, None, q_positions, k_positions).call
    total = StateAccumulator(call.q, v.shape[3])
    choose_fused(call, backend).forward(call, total)
    return total.finish(accumulation_dtype(q.dtype))


def explain_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = Full(), scale: float | None = None,  # noqa: B008
    softcap: float | None = None, sinks: Tensor | None = None, alibi_slopes: Tensor | None = None,
    q_positions: Tensor | None = None, k_positions: Tensor | None = None, backend: str = "auto",
) -> Choice:  # fmt: skip
    """The backend that `attention` would use for this call, the reason, and why others cannot. Computes nothing.

    The reason has the number of visible pairs and of blocks, if the host knows the positions.
    """
    call = _prepared(q, k, v, mask, scale, softcap, sinks, alibi_slopes, q_positions, k_positions).call
    choice = choose(call, backend)
    return replace(choice, reason=f"{choice.reason} ({cost.described(call)})")


@dataclass(frozen=True)
class Choice:
    """The backend for a call, the reason, and why other backends cannot serve it."""

    backend: str
    reason: str
    refusals: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        others = "".join(f"\n  {name} cannot: {why}" for name, why in self.refusals)
        return f"{self.backend}: {self.reason}{others}"


def choose(call: Call, backend: str) -> Choice:
    """The backend for a call. One requested by name that cannot serve it, or none that can, raises ValueError."""
    check_choice("backend", backend, BACKENDS)
    if backend == "reference":
        return Choice("reference", "requested by name", ())
    refusals = {name: fused.refusal(call) for name, fused in _FUSED.items()}
    unsupported = tuple((name, why) for name, why in refusals.items() if why is not None)
    if backend != "auto":
        if refusals[backend] is not None:
            raise ValueError(f"backend={backend!r} cannot serve this call: {refusals[backend]}")
        return Choice(backend, "requested by name", unsupported)
    if refusals["aten"] is None:
        if not call.q.is_cuda:
            return Choice("aten", "torch's flash kernel is the fastest on the CPU", unsupported)
        if len(call.visibility.blocks) <= 1 or refusals["triton"] is not None:
            return Choice(
                "aten", "torch's fused kernels are the fastest for a full or square causal block", unsupported
            )
        costs = cost.estimate(call)
        if costs.aten <= costs.triton:
            return Choice("aten", f"a launch per block costs less: {costs}", unsupported)
        return Choice("triton", f"one launch of Triton's kernel costs less: {costs}", unsupported)
    if refusals["triton"] is None and call.q.is_cuda:
        return Choice("triton", "one launch serves this mask by row bounds", unsupported)
    if refusals["torch"] is None:
        return Choice("torch", "no fused kernel serves this call", unsupported)
    raise ValueError("no backend serves this call: " + "; ".join(f"{name}: {why}" for name, why in unsupported))


def choose_fused(call: Call, backend: str) -> Backend:
    """The backend for a forward that must be fused (it merges into an accumulator)."""
    choice = choose(call, backend)
    if choice.backend == "reference":
        raise ValueError('backend="reference" keeps every score, and has no state to merge')
    return _FUSED[choice.backend]


def choose_fused_backward(call: Call, result: Result, backend: str) -> Backend:
    """The backend for the backward of a call: that of the forward if possible; with "auto", else Triton."""
    forward = choose_fused(call, backend)
    why = forward.backward_refusal(call, result)
    if why is None:
        return forward
    if backend == "auto":
        return _TRITON if call.q.is_cuda and _TRITON.backward_refusal(call, result) is None else _TORCH
    raise ValueError(f"backend={forward.name!r} cannot serve this backward: {why}")


class _Attention(torch.autograd.Function):
    """The fused path: backends add to accumulators; the backward needs only (out, lse)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, visibility: Visibility, scores: Scores,
        backend: str,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        call = Call(q.detach(), k.detach(), v.detach(), visibility, scores)
        total = StateAccumulator(call.q, v.shape[3], one_call=sinks is None)
        choose_fused(call, backend).forward(call, total)
        state = total.finish(q.dtype, sinks)
        ctx.save_for_backward(q, k, v, sinks, *state)
        ctx.visibility, ctx.scores, ctx.backend = visibility, scores, backend
        ctx.set_materialize_grads(False)
        return state.out, state.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        call = Call(q, k, v, ctx.visibility, ctx.scores)
        result = Result.of(out, lse, grad_out, grad_lse)
        sums = [
            GradAccumulator(x, one_call=True) if needed else None
            for x, needed in zip((q, k, v), ctx.needs_input_grad, strict=False)
        ]
        if any(ctx.needs_input_grad[:3]):
            choose_fused_backward(call, result, ctx.backend).backward(call, result, Grads(*sums))
        grad_sinks = result.sink_gradient(sinks).to(sinks.dtype) if ctx.needs_input_grad[3] else None
        return *(None if grad is None else grad.finish() for grad in sums), grad_sinks, None, None, None


@dataclass(frozen=True)
class _Prepared:
    """A call with ascending positions, and the permutation that sorted the queries (None: already sorted)."""

    call: Call
    order: Tensor | None


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, softcap: float | None, sinks: Tensor | None,
    alibi_slopes: Tensor | None, q_at: Tensor | None, k_at: Tensor | None,
) -> _Prepared:  # fmt: skip
    check_inputs(q, k, v, scale)
    check_score_terms(q, softcap, sinks, alibi_slopes)
    check_mask("mask", mask)
    check_batch(mask, q)
    if q_at is None and k_at is None and mask.length is None:  # nothing else tells positions from heads
        check_dim_order(q, k, q.shape[2], k.shape[2])
    if k_at is None:
        mask.check(k.shape[2])
    q, k, v = (contiguous_last_dim(x) for x in (q, k, v))
    scores = resolve_scores(q, scale, softcap, alibi_slopes)
    q_runs = _runs("q_positions", q_at, q)
    k_runs = _runs("k_positions", k_at, k)
    if q_runs is not None and k_runs is not None and len(q_runs) * len(k_runs) <= _MAX_RUN_PAIRS:
        return _Prepared(Call(q, k, v, _patch(mask, q_runs, k_runs), scores), None)

    # Irregular positions: sort both sides (attention is permutation-equivariant) and use row bounds.
    q_pos, k_pos = (
        torch.arange(x.shape[2], device=x.device) if at is None else at.to(x.device, torch.long)
        for x, at in ((q, q_at), (k, k_at))
    )
    q_pos, q_order = q_pos.sort(stable=True)
    k_pos, k_order = k_pos.sort(stable=True)
    q, k, v = q[:, :, q_order], k[:, :, k_order], v[:, :, k_order]
    return _Prepared(Call(q, k, v, _Irregular(mask, q_pos, k_pos), scores), q_order)


@lru_cache(maxsize=128)
def _patch(mask: Mask, q: ranges.Ranges, k: ranges.Ranges) -> Patch:
    # Cached, because every layer of a model needs the same few patches, and a patch caches its blocks.
    return Patch(mask, q, k)


@dataclass(frozen=True, eq=False)
class _Irregular:
    """Visibility of positions that are irregular or on a device: row bounds and one partial block."""

    mask: Mask
    q: Tensor
    k: Tensor

    @property
    def blocks(self) -> tuple[Block, ...]:
        rows, keys = range(self.q.numel()), range(self.k.numel())
        return tuple(
            Block(rows, keys, Kind.PARTIAL, part, sequences)
            for sequences, intervals in self._intervals
            for part in range(len(intervals) if rows and keys else 0)
        )

    @cached_property
    def _intervals(self) -> tuple[tuple[range | None, tuple[Intervals, ...]], ...]:
        start, stop = 0, 1
        if not self.mask.is_interval and self.q.numel() and self.k.numel():  # a union: reading this stalls a device
            ends = torch.stack([self.q[0], self.k[0], self.q[-1], self.k[-1]]).tolist()
            start, stop = min(0, *ends[:2]), max(ends[2:]) + 1
        return sequence_intervals(self.mask, stop, start)

    def bounds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        q, k = self.q.to(device), self.k.to(device)
        groups = [
            (sequences, [bounds_of(each, q, k) for each in intervals]) for sequences, intervals in self._intervals
        ]
        first, end = stacked_bounds(groups, len(q)).to(device)
        return first, end

    def unseen(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return unseen_of(*self.bounds(device), self.k.numel())

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return self.q.to(device, torch.int32), self.k.to(device, torch.int32)


def _runs(name: str, positions: Tensor | None, x: Tensor) -> ranges.Ranges | None:
    """Positions as ranges, or None if they are irregular or on a device (reading them would stall it)."""
    length = x.shape[2]
    if positions is None:
        return (range(length),) if length else ()
    check_tensor(name, positions)
    if positions.ndim != 1 or positions.shape[0] != length:
        raise ValueError(f"{name} must be [{length}], one position per row, got shape {tuple(positions.shape)}")
    if positions.dtype.is_floating_point or positions.dtype.is_complex or positions.dtype == torch.bool:
        raise ValueError(f"{name} must be integers, got {positions.dtype}")
    if positions.device.type != "cpu":
        if positions.device != x.device:
            raise ValueError(f"{name} must be on the CPU or on {x.device}, got {positions.device}")
        return None
    return ranges.from_tensor(positions.long())
