"""Which backend serves a decode call."""

from __future__ import annotations

from attnmesh.ops.decode import reference
from attnmesh.ops.decode.call import Backend, DecodeCall
from attnmesh.ops.decode.cpu import Cpu
from attnmesh.ops.decode.triton import Triton
from attnmesh.state import State


class Reference:
    """The specification, as a backend."""

    name = "reference"

    def refusal(self, call: DecodeCall) -> str | None:
        """Serves everything."""
        return None

    def run(self, call: DecodeCall) -> State:
        """Every score in memory."""
        return reference.run(call)


_BACKENDS: tuple[Backend, ...] = (Cpu(), Triton(), Reference())


def choose(call: DecodeCall, backend: str) -> Backend:
    """The backend for a call: by name, or the first that serves it. One that cannot raises ValueError."""
    names = ("auto", *(known.name for known in _BACKENDS))
    if backend not in names:
        raise ValueError(f"backend must be one of {', '.join(names)}, got {backend!r}")
    refusals = {}
    for known in _BACKENDS:
        refusals[known.name] = known.refusal(call)
        if refusals[known.name] is None and backend in ("auto", known.name):
            return known
    raise ValueError(f"backend={backend!r} cannot serve this call: {refusals[backend]}")
