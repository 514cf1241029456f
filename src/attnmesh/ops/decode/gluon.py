"""Backend on the library's MLA decode kernels for Hopper, written in Gluon. Splits are merged by a Triton kernel."""

from __future__ import annotations

from types import ModuleType

from attnmesh.core.optional import require
from attnmesh.core.state import State
from attnmesh.ops.decode.call import DecodeCall
from attnmesh.ops.decode.triton import DecodeTiles, Triton, rope_of
from attnmesh.ops.gpu import gpu_of


class Gluon(Triton):
    """Backend for paged MLA: keys of 576 columns, of which the first 512 are the values.

    `gluon_latent` serves latents in 16 bits, `gluon_narrow` those in 8 bits.
    """

    name = "gluon"

    def refusal(self, call: DecodeCall) -> str | None:
        """The reason why this backend cannot serve the call; None if it can."""
        if not call.q.is_cuda or gpu_of(call.q.device).capability != 90:
            return "its kernels need a Hopper GPU (compute capability 9.0)"
        refused = super().refusal(call)
        if refused is None:
            refused = _module("common").refusal(call)
        return refused

    def _launch(self, call: DecodeCall, state: State, tiles: DecodeTiles | None, first_sequence: int) -> None:
        _module("latent" if rope_of(call.k) is None else "narrow").launch(call, state, first_sequence)


def _module(name: str) -> ModuleType:
    return require(f"attnmesh.ops.decode.gluon_{name}", extra="triton")
