"""Backend on the library's forward kernel for Hopper, written in Gluon. The backward is that of the Triton backend."""

from __future__ import annotations

from types import ModuleType

import torch

from attnmesh.core.optional import installed, require
from attnmesh.core.validation import warn_caller
from attnmesh.ops.dense.call import Call
from attnmesh.ops.dense.triton import Triton
from attnmesh.ops.merge import StateAccumulator


class Gluon(Triton):
    """Backend on the kernel in `gluon_forward`, and for gradients on those in `triton_backward`."""

    name = "gluon"

    def refusal(self, call: Call) -> str | None:
        """The reason why this backend cannot serve the forward; None if it can."""
        if not installed("triton"):
            return "triton is not installed (pip install 'attnmesh[triton]')"
        if not call.q.is_cuda or torch.cuda.get_device_capability(call.q.device)[0] != 9:
            return "its kernel needs a Hopper GPU (compute capability 9.0)"
        if call.scores.alibi_slopes is not None:
            return "its kernel does not take alibi_slopes"
        reason: str | None = self._forward().refusal(call.q, call.v)
        return reason

    def forward(self, call: Call, total: StateAccumulator) -> None:
        """Merges the attention of this call into `total`."""
        warn_caller(
            'backend="gluon" has been tested in an emulator only, not on a GPU: compare it with backend="triton"'
        )
        super().forward(call, total)

    def _forward(self) -> ModuleType:
        return require("attnmesh.ops.dense.gluon_forward", extra="triton")
