"""Backend on the library's MLA decode kernel for Hopper, written in Gluon. Splits are merged by a Triton kernel."""

from __future__ import annotations

from types import ModuleType

from attnmesh.core.optional import require
from attnmesh.core.state import State
from attnmesh.ops.decode.call import DecodeCall
from attnmesh.ops.decode.triton import DecodeTiles, Triton
from attnmesh.ops.gpu import gpu_of


class Gluon(Triton):
    """Backend on the kernel in `gluon_latent`: paged MLA, keys of 576 columns of which the first 512 are the values."""

    name = "gluon"

    def refusal(self, call: DecodeCall) -> str | None:
        """The reason why this backend cannot serve the call; None if it can."""
        if not call.q.is_cuda or gpu_of(call.q.device).capability != 90:
            return "its kernel needs a Hopper GPU (compute capability 9.0)"
        refused = super().refusal(call)
        if refused is None:
            refused = _kernel().refusal(call)
        return refused

    def _launch(self, call: DecodeCall, state: State, tiles: DecodeTiles | None, first_sequence: int) -> None:
        _kernel().launch(call, state, first_sequence)


def _kernel() -> ModuleType:
    return require("attnmesh.ops.decode.gluon_latent", extra="triton")
