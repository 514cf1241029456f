"""Which backend serves a call, and why."""

from __future__ import annotations

from dataclasses import dataclass

from attnmesh.ops.dense.aten import Aten
from attnmesh.ops.dense.call import Backend, Call, Result
from attnmesh.ops.dense.triton import Triton

BACKENDS = ("auto", "aten", "triton", "reference")

_ATEN, _TRITON = Aten(), Triton()
_FUSED: dict[str, Backend] = {"aten": _ATEN, "triton": _TRITON}

# Each block is a kernel launch and a partial result to merge; one Triton launch serves any number of them.
_MOST_ATEN_BLOCKS_ON_CUDA = 8


@dataclass(frozen=True)
class Choice:
    """The backend that serves a call, the reason, and what the others said."""

    backend: str
    reason: str
    refusals: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        others = "".join(f"\n  {name} refuses: {why}" for name, why in self.refusals)
        return f"{self.backend}: {self.reason}{others}"


def choose(call: Call, backend: str) -> Choice:
    """The backend for a call. A backend asked for by name that cannot serve raises ValueError."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if backend == "reference":
        return Choice("reference", "asked for by name", ())
    refusals = {name: fused.refusal(call) for name, fused in _FUSED.items()}
    said = tuple((name, why) for name, why in refusals.items() if why is not None)
    if backend != "auto":
        if refusals[backend] is not None:
            raise ValueError(f"backend={backend!r} cannot serve this call: {refusals[backend]}")
        return Choice(backend, "asked for by name", said)
    if refusals["aten"] is None:
        if not call.q.is_cuda:
            return Choice("aten", "torch's flash kernel is the fastest on the CPU", said)
        if len(call.visibility.blocks) <= _MOST_ATEN_BLOCKS_ON_CUDA or refusals["triton"] is not None:
            return Choice("aten", "every block is full or square causal: torch's fused kernels are fastest", said)
    if refusals["triton"] is None:
        return Choice("triton", "one launch serves this mask by row bounds", said)
    return Choice("reference", "no fused kernel serves this call; every score is held in memory", said)


def choose_fused(call: Call, backend: str) -> Backend:
    """The backend for the forward of a call that must be fused (it merges into a running state)."""
    choice = choose(call, backend)
    if choice.backend not in _FUSED:
        raise ValueError(f"no fused kernel serves this call: {choice}")
    return _FUSED[choice.backend]


def fused_for_backward(call: Call, result: Result, backend: str) -> Backend:
    """The backend for the backward of a call: the forward's if it serves this too; under "auto", else Triton."""
    forward = choose_fused(call, backend)
    why = forward.backward_refusal(call, result)
    if why is None:
        return forward
    if backend == "auto" and _TRITON.backward_refusal(call, result) is None:
        return _TRITON
    raise ValueError(f"backend={forward.name!r} cannot serve this backward: {why}")
