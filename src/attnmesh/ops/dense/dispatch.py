"""The backend for a call of `attention`, and the call itself: validated, with ascending positions."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from attnmesh.core import ranges
from attnmesh.core.mask import MAX_INTERVALS, Intervals, sequence_intervals
from attnmesh.core.masks import (
    BlockCausal,
    Causal,
    Chunked,
    Full,
    Global,
    Mask,
    Prefix,
    SlidingWindow,
    check_mask,
)
from attnmesh.core.state import State
from attnmesh.core.visibility import Block, Kind, Patch, Visibility, bounds_of, stacked_bounds, unseen_of
from attnmesh.ops.dense import cost
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
    values_in_keys,
)
from attnmesh.ops.dense.gluon import Gluon
from attnmesh.ops.dense.reproducible import Reproducible, sink_gradients, sum_of_sequences
from attnmesh.ops.dense.torch_tiles import TorchTiles
from attnmesh.ops.dense.triton import Triton
from attnmesh.ops.launch import Recent
from attnmesh.ops.merge import GradAccumulator, StateAccumulator
from attnmesh.plan.leaves import VERSION
from attnmesh.utils.log import log_choice, wants_choices
from attnmesh.utils.text import explained_in
from attnmesh.utils.validation import check_bool, check_choice, check_tensor

_LOG = logging.getLogger(__name__)

BackendName = Literal["auto", "aten", "triton", "gluon", "torch", "reference"]
BACKENDS: tuple[BackendName, ...] = get_args(BackendName)

_GLUON = Gluon()
_FUSED: dict[str, Backend] = {"aten": Aten(), "triton": Triton(), "gluon": _GLUON, "torch": TorchTiles()}
_REPRODUCIBLE = Reproducible()
_KERNELS = ("gluon", "aten", "triton")  # among which "auto" chooses on CUDA; the first of equals

# Every pair of runs is planned; beyond this many, row bounds alone are cheaper than a plan.
_MAX_RUN_PAIRS = 256


@dataclass(frozen=True)
class Choice:
    """The backend for a call, the reason, and why other backends cannot serve it."""

    backend: str
    reason: str
    why_not: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        others = "".join(f"\n  {name} cannot: {why}" for name, why in self.why_not)
        return f"{self.backend}: {self.reason}{others}"


@explained_in("reproducibility.md#what-is-promised")
def with_reproducible(backend: str, reproducible: bool) -> str:
    """The backend of a call; ValueError for one that cannot be reproducible."""
    check_bool(reproducible=reproducible)
    if reproducible and backend != "auto":
        raise ValueError(f'backend must be "auto" with reproducible=True, which has one of its own, got {backend!r}')
    return _REPRODUCIBLE.name if reproducible else backend


@explained_in("masks.md#attention-on-one-device")
def choose(call: Call, backend: str) -> Choice:
    """The backend for a forward. One requested by name that cannot serve it, or none that can, raises ValueError."""
    if backend == _REPRODUCIBLE.name:
        return _reproducible(_REPRODUCIBLE.why_not(call))
    check_choice("backend", backend, BACKENDS)
    if backend == "reference":
        return Choice("reference", "requested by name", ())
    return _choose(call, backend, {name: fused.why_not(call) for name, fused in _FUSED.items()}, backward=False)


@explained_in("masks.md#attention-on-one-device")
def choose_backward(call: Call, backend: str, *, grad_lse: bool = False, whole: bool = False) -> Choice:
    """The backend for a backward: with "auto" not always the backend of the forward. `whole`: it is the only call."""
    if backend == _REPRODUCIBLE.name:
        return _reproducible(_REPRODUCIBLE.backward_why_not(call, grad_lse=grad_lse))
    why_not = {name: fused.backward_why_not(call, grad_lse=grad_lse) for name, fused in _FUSED.items()}
    if backend == "auto" and why_not["gluon"] is None:
        why_not["gluon"] = _GLUON.backward_why_slower(call)
    is_served = call.q.is_cuda and why_not["triton"] is None and not grad_lse
    if backend == "auto" and whole and is_served and cost.is_short(call) and len(_turns(call)) == 1:
        return Choice("triton", "one launch computes all gradients of up to 512 positions", ())
    return _choose(call, backend, why_not, backward=True)


def _reproducible(why_not: str | None) -> Choice:
    if why_not is not None:
        raise ValueError(f"reproducible=True cannot serve this call: {why_not}")
    return Choice(_REPRODUCIBLE.name, f"reproducible=True, version {VERSION} of its bits", ())


def _choose(call: Call, backend: str, why_not: dict[str, str | None], *, backward: bool) -> Choice:
    choice = _chosen(call, backend, why_not, backward=backward)
    if backend == "auto" and wants_choices(_LOG):
        of = f"{'backward' if backward else 'forward'} of q {tuple(call.q.shape)}, k {tuple(call.k.shape)}"
        log_choice(
            _LOG, "attention, %s, %s on %s: %s", of, call.q.dtype, call.q.device, str(choice).replace("\n ", ";")
        )
    return choice


def _chosen(call: Call, backend: str, why_not: dict[str, str | None], *, backward: bool) -> Choice:
    unsupported = tuple((name, why) for name, why in why_not.items() if why is not None)
    if backend != "auto":
        if why_not[backend] is not None:
            this = "backward" if backward else "call"
            raise ValueError(f"backend={backend!r} cannot serve this {this}: {why_not[backend]}")
        return Choice(backend, "requested by name", unsupported)
    served = [name for name in _KERNELS if why_not[name] is None] if call.q.is_cuda else []
    if "aten" in served:
        costs = cost.estimate(call, served, backward=backward)
        return Choice(costs.fastest, f"the fastest kernel for these blocks: {costs}", unsupported)
    if served:
        rates = cost.rates(call.q.shape[3], call.v.shape[3], call.q.shape[2], backward=backward)
        fastest = max(served, key=lambda name: rates._asdict()[name])
        return Choice(fastest, "one launch serves this mask by row bounds", unsupported)
    if why_not["aten"] is None:
        return Choice("aten", "torch's flash kernel is the fastest on the CPU", unsupported)
    if why_not["torch"] is None:
        return Choice("torch", "no fused kernel serves this call", unsupported)
    raise ValueError("no backend serves this call: " + "; ".join(f"{name}: {why}" for name, why in unsupported))


def choose_fused(call: Call, backend: str) -> Backend:
    """The backend for a forward that must be fused (it merges into an accumulator)."""
    key = _key(call, backend)
    known = None if key is None else _known.get(key)
    if known is not None and known[0] is call.visibility:
        return known[1]
    choice = choose(call, backend)
    if choice.backend == "reference":
        raise ValueError('backend="reference" keeps every score, and has no state to merge')
    return _kept(key, call, choice)


def choose_fused_backward(call: Call, result: Result, backend: str, *, whole: bool = False) -> Backend:
    """The backend for the backward of a call. `whole`: no other call adds to its gradients."""
    grad_lse, deterministic = result.grad_lse is not None, torch.are_deterministic_algorithms_enabled()
    key = _key(call, backend, "backward", grad_lse, deterministic, whole)
    known = None if key is None else _known.get(key)
    if known is not None and known[0] is call.visibility:
        return known[1]
    return _kept(key, call, choose_backward(call, backend, grad_lse=grad_lse, whole=whole))


_known: Recent[tuple[Visibility, Backend]] = Recent()


def _key(call: Call, backend: str, *more: object) -> Hashable | None:
    """All that the choice of a backend depends on; None for a choice that is to be made, and logged, again."""
    visibility, q, scores = call.visibility, call.q, call.scores
    if not isinstance(visibility, Patch) or type(backend) is not str or wants_choices(_LOG):
        return None
    shapes = q.shape, call.k.shape, call.v.shape
    return (
        id(visibility),
        q.shape[3] > 256 and values_in_keys(call.k, call.v),
        q.dtype,
        q.device,
        shapes,
        scores.softcap is None,
        scores.alibi_slopes is None,
        backend,
        *more,
    )


def _kept(key: Hashable | None, call: Call, choice: Choice) -> Backend:
    backend = _REPRODUCIBLE if choice.backend == _REPRODUCIBLE.name else _FUSED[choice.backend]
    backend = backend if backend is _REPRODUCIBLE or len(_turns(call)) == 1 else _InTurns(backend)
    if key is not None:
        _known.add(key, (call.visibility, backend))
    return backend


def _turns(call: Call) -> list[Call]:
    """The call, or one for every MAX_INTERVALS parts of its mask: bounds of all parts would take too much memory."""
    visibility = call.visibility
    turns = visibility.turns if isinstance(visibility, Patch | _Irregular) else (visibility,)
    return [call] if len(turns) == 1 else [replace(call, visibility=turn) for turn in turns]


class _InTurns:
    """A backend that serves masks of many parts by several calls of another backend."""

    def __init__(self, backend: Backend) -> None:
        self.name, self._backend = backend.name, backend
        self.why_not, self.backward_why_not, self.prepare = backend.why_not, backend.backward_why_not, backend.prepare

    def forward(self, call: Call, total: StateAccumulator) -> None:
        """Merges the attention of this call into `total`."""
        total.last_call = False  # the sinks join after all turns
        for turn in _turns(call):
            self._backend.forward(turn, total)

    def backward(self, call: Call, result: Result, grads: Grads) -> None:
        """Adds the gradients of this call to `grads`."""
        for grad in (grads.q, grads.k, grads.v):
            if grad is not None:
                grad.one_call = False
        for turn in _turns(call):
            self._backend.backward(turn, result, grads)


def forward(call: Call, sinks: Tensor | None, backend: str) -> State:
    """The state of a call, with the sinks, in the dtype of q."""
    chosen = choose_fused(call, backend)
    state = chosen.attend(call, sinks) if isinstance(chosen, Triton) else None
    if state is None:
        total = StateAccumulator(call.q, call.v.shape[3], sinks=sinks, last_call=True)
        chosen.forward(call, total)
        state = total.finish(call.q.dtype)
    return state


def gradients(
    call: Call, sinks: Tensor | None, result: Result, backend: str, needs_grad: Sequence[bool]
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of q, k, v and sinks; None for gradients that are not needed."""
    grad_sinks = None
    if needs_grad[3] and sinks is not None:
        if backend == _REPRODUCIBLE.name:
            grad_sinks = sum_of_sequences(sink_gradients(call, result, sinks)[0]).to(sinks.dtype)
        else:
            grad_sinks = result.sink_gradient(sinks).to(sinks.dtype)
    needs_q, needs_k, needs_v = needs_grad[:3]
    if not (needs_q or needs_k or needs_v):
        return [None, None, None, grad_sinks]
    chosen = choose_fused_backward(call, result, backend, whole=needs_q and needs_k and needs_v)
    found = chosen.gradients(call, result, (needs_q, needs_k, needs_v)) if isinstance(chosen, Triton) else None
    if found is None:
        sums = [
            GradAccumulator(x, one_call=True) if needed else None
            for x, needed in zip((call.q, call.k, call.v), needs_grad, strict=False)
        ]
        chosen.backward(call, result, Grads(*sums))
        found = [None if grad is None else grad.finish() for grad in sums]
    return [*found, grad_sinks]


class Prepared(NamedTuple):
    """A call with ascending positions, and the permutations that sorted queries and keys (None: already sorted)."""

    call: Call
    order: Tensor | None
    key_order: Tensor | None = None


def prepared(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, softcap: float | None, sinks: Tensor | None,
    alibi_slopes: Tensor | None, q_at: Tensor | None, k_at: Tensor | None,
) -> Prepared:  # fmt: skip
    """The call of checked arguments. Checks that do not depend on values are made once for each signature."""
    key, known = _signature(q, k, v, mask, scale, softcap, sinks, alibi_slopes, q_at, k_at)
    if known is not None and (known[0] is mask or type(mask) in SMALL_MASKS):
        _, visibility, scores = known
        if alibi_slopes is not None:
            scores = resolve_scores(q, scale, softcap, alibi_slopes)
        if not q.stride(3) == k.stride(3) == v.stride(3) == 1:
            q, k, v = (contiguous_last_dim(x) for x in (q, k, v))
        return Prepared(Call(q, k, v, visibility, scores), None)
    check_inputs(q, k, v, scale)
    check_score_terms(q, softcap, sinks, alibi_slopes)
    check_mask("mask", mask)
    check_batch(mask, q)
    warned = False
    if q_at is None and k_at is None and mask.length is None:  # nothing else tells positions from heads
        warned = check_dim_order(q, k, q.shape[2], k.shape[2])
    if k_at is None:
        mask.check(k.shape[2])
    q, k, v = (contiguous_last_dim(x) for x in (q, k, v))
    scores = resolve_scores(q, scale, softcap, alibi_slopes)
    q_runs = _runs("q_positions", q_at, q)
    k_runs = _runs("k_positions", k_at, k)
    if q_runs is not None and k_runs is not None and len(q_runs) * len(k_runs) <= _MAX_RUN_PAIRS:
        patch = _patch(mask, q_runs, k_runs)
        if key is not None and not warned:
            _checked.add(key, (mask, patch, resolve_scores(q, scale, softcap, None)))
        return Prepared(Call(q, k, v, patch, scores), None)

    # Irregular positions: sort both sides (attention is permutation-equivariant) and use row bounds.
    q_pos, k_pos = (
        torch.arange(x.shape[2], device=x.device) if at is None else at.to(x.device, torch.long)
        for x, at in ((q, q_at), (k, k_at))
    )
    q_pos, q_order = q_pos.sort(stable=True)
    k_pos, k_order = k_pos.sort(stable=True)
    q, k, v = q[:, :, q_order], k[:, :, k_order], v[:, :, k_order]
    return Prepared(Call(q, k, v, _Irregular(mask, q_pos, k_pos), scores), q_order, k_order)


SMALL_MASKS = (Full, Causal, SlidingWindow, Prefix, Chunked, BlockCausal, Global)
"""Masks of a few numbers, which are compared by value: programs construct them anew for every call."""
_checked: Recent[tuple[Mask, Patch, Scores]] = Recent()


def _signature(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, softcap: float | None, sinks: Tensor | None,
    slopes: Tensor | None, q_at: Tensor | None, k_at: Tensor | None,
) -> tuple[Hashable | None, tuple[Mask, Patch, Scores] | None]:  # fmt: skip
    """Everything that checks and visible keys depend on, and the results.

    None if they are to be found out again, as for wrong arguments. Classes are part of it: True equals 1, and a
    subclass of Tensor may be anything.
    """
    try:
        runs = None
        if q_at is not None or k_at is not None:
            runs = _runs("q_positions", q_at, q), _runs("k_positions", k_at, k)
            if None in runs:
                return None, None
        key = (
            mask if type(mask) in SMALL_MASKS else id(mask), scale, type(scale), softcap, type(softcap), runs,
            q.dtype, q.shape, q.device, type(q), q.layout, k.dtype, k.shape, k.device, type(k), k.layout,
            v.dtype, v.shape, v.device, type(v), v.layout,
            None if sinks is None else (sinks.dtype, sinks.shape, sinks.device, type(sinks), sinks.layout),
            None if slopes is None
            else (slopes.dtype, slopes.shape, slopes.device, type(slopes), slopes.layout, slopes.requires_grad),
        )  # fmt: skip
        return key, _checked.get(key)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None, None


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
    at: int | None = None  # the first of MAX_INTERVALS parts; None: all parts

    @cached_property
    def turns(self) -> tuple[_Irregular, ...]:
        """As of a `Patch`."""
        most = max((len(intervals) for _, intervals in self._intervals), default=0)
        if most <= MAX_INTERVALS:
            return (self,)
        return tuple(replace(self, at=at) for at in range(0, most, MAX_INTERVALS))

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
        found = sequence_intervals(self.mask, stop, start)
        if self.at is None:
            return found
        stop = self.at + MAX_INTERVALS
        return tuple((sequences, intervals[self.at : stop]) for sequences, intervals in found)

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
