"""Backend on the library's MLA decode kernel for Hopper, written in Gluon. Splits are merged by a Triton kernel."""

from __future__ import annotations

from types import ModuleType

import torch

from attnmesh.core.optional import require
from attnmesh.core.state import State
from attnmesh.core.validation import warn_caller
from attnmesh.ops.decode.call import DecodeCall
from attnmesh.ops.decode.triton import DecodeTiles, Triton


class Gluon(Triton):
    """Backend on the kernel in `gluon_latent`: paged MLA, keys of 576 columns of which the first 512 are the values."""

    name = "gluon"

    def refusal(self, call: DecodeCall) -> str | None:
        """The reason why this backend cannot serve the call; None if it can."""
        refused = super().refusal(call)
        if refused is not None:
            return refused
        if not call.q.is_cuda or torch.cuda.get_device_capability(call.q.device)[0] != 9:
            return "its kernel needs a Hopper GPU (compute capability 9.0)"
        reason: str | None = _kernel().refusal(call)
        return reason

    def run(self, call: DecodeCall, into: State | None = None, tiles: DecodeTiles | None = None) -> State:
        """Out and lse, in two launches per 1024 sequences. Raises errors that earlier calls have recorded."""
        warn_caller(
            'backend="gluon" has been compared with float64 on a GPU in a few cases only: '
            'compare it with backend="triton"'
        )
        return super().run(call, into, tiles)

    def _launch(self, call: DecodeCall, state: State, tiles: DecodeTiles | None, first_sequence: int) -> None:
        _kernel().launch(call, state, first_sequence)


def _kernel() -> ModuleType:
    return require("attnmesh.ops.decode.gluon_latent", extra="triton")
