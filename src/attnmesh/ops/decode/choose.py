"""Which backend serves a decode call."""

from __future__ import annotations

from attnmesh.core.state import State
from attnmesh.ops.decode import reference
from attnmesh.ops.decode.call import Backend, DecodeCall
from attnmesh.ops.decode.cpu import Cpu
from attnmesh.ops.decode.triton import Triton


class Reference:
    """The specification, as a backend."""

    name = "reference"

    def refusal(self, call: DecodeCall) -> str | None:
        """Serves everything."""
        return None

    def run(self, call: DecodeCall, into: State | None = None) -> State:
        """Every score in memory."""
        state = reference.run(call)
        return state if into is None else State(into.out.copy_(state.out), into.lse.copy_(state.lse))


_BACKENDS: tuple[Backend, ...] = (Cpu(), Triton(), Reference())


def check_backend(backend: str) -> None:
    """Raise ValueError unless there is a backend of this name."""
    names = ("auto", *(known.name for known in _BACKENDS))
    if backend not in names:
        raise ValueError(f"backend must be one of {', '.join(names)}, got {backend!r}")


def choose(call: DecodeCall, backend: str) -> Backend:
    """The backend for a call: by name, or the first that serves it. One that cannot raises ValueError."""
    check_backend(backend)
    refusals = {}
    for known in _BACKENDS:
        refusals[known.name] = known.refusal(call)
        if refusals[known.name] is None and backend in ("auto", known.name):
            return known
    raise ValueError(f"backend={backend!r} cannot serve this call: {refusals[backend]}")
