"""Where kernels are called, so that a run can be recorded: `recorder` is None unless somebody watches."""

from __future__ import annotations

from attnmesh.ops.dense.call import Backend, Call, Grads, Result
from attnmesh.ops.merge import StateAccumulator
from attnmesh.trace.recorder import Recorder


def forward(backend: Backend, call: Call, total: StateAccumulator, recorder: Recorder | None) -> None:
    """As `backend.forward`."""
    if recorder is None:
        backend.forward(call, total)
        return
    with recorder.span("compute", "attention", call.q.device, **_facts(backend, call)):
        backend.forward(call, total)


def backward(backend: Backend, call: Call, result: Result, grads: Grads, recorder: Recorder | None) -> None:
    """As `backend.backward`."""
    if recorder is None:
        backend.backward(call, result, grads)
        return
    with recorder.span("compute", "attention backward", call.q.device, **_facts(backend, call)):
        backend.backward(call, result, grads)


def _facts(backend: Backend, call: Call) -> dict[str, object]:
    return {
        "backend": backend.name,
        "blocks": len(call.visibility.blocks),
        "queries": call.q.shape[2],
        "keys": call.k.shape[2],
        "heads": call.q.shape[1],
    }
