"""Backend on the library's kernels for Hopper, written in Gluon: the calls of the Triton backend, at more speed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from attnmesh.core.state import State
from attnmesh.ops.dense.call import Call
from attnmesh.ops.dense.triton import Triton, _module
from attnmesh.ops.launch import is_hopper
from attnmesh.utils.optional import installed

_LATENT = 512  # features of a key, from which it may be a latent


class Gluon(Triton):
    """Backend on the kernels in `gluon_forward`, `gluon_latent` and `gluon_backward`, and on `latent_backward`.

    The order in which gradients of queries are summed differs between runs, unless `torch.use_deterministic_algorithms`
    is on.
    """

    name = "gluon"

    def why_not(self, call: Call) -> str | None:
        """The reason why this backend cannot serve the forward; None if it can."""
        return self._reason(call, "forward")

    def backward_why_not(self, call: Call, *, grad_lse: bool = False) -> str | None:
        """The reason why this backend cannot serve the backward, with or without a gradient of lse; None if it can."""
        return self._reason(call, "backward")

    def backward_why_slower(self, call: Call) -> str | None:
        """The reason why the Triton backend is faster for a backward that this one can serve; None if it is not."""
        return _module("latent_backward").why_slower(call) if call.q.shape[3] >= _LATENT else None

    def _reason(self, call: Call, part: str) -> str | None:
        if not installed("triton"):
            return "triton is not installed (pip install 'attnmesh[triton]')"
        if not is_hopper(call.q.device):
            return "its kernels need a Hopper GPU (compute capability 9.0)"
        reason: str | None = _module(f"gluon_{part}").why_not(call.q, call.v)
        if reason is not None and call.q.shape[3] >= _LATENT:
            if part == "forward":
                of_latents = _module("gluon_latent").why_not(call.q, call.k, call.v, call.scores)
            else:
                of_latents = _module("latent_backward").why_not(call)
            reason = None if of_latents is None else f"{reason}, or latents, for which {of_latents}"
        return reason

    def _forward(self, call: Call) -> Callable[..., State]:
        return _module("gluon_latent" if call.q.shape[3] >= _LATENT else "gluon_forward").forward  # type: ignore[no-any-return]

    def _gradients(self, call: Call) -> Callable[..., list[Tensor | None]]:
        if call.q.shape[3] >= _LATENT:
            return partial(_module("triton_backward").gradients, by=_module("latent_backward").backward)
        gradients: Callable[..., list[Tensor | None]] = _module("gluon_backward").gradients
        return partial(gradients, deterministic=True) if torch.are_deterministic_algorithms_enabled() else gradients

    def _backward(self, call: Call) -> Callable[..., None]:
        module = _module("latent_backward" if call.q.shape[3] >= _LATENT else "gluon_backward")
        backward: Callable[..., None] = module.backward
        return partial(backward, deterministic=True) if torch.are_deterministic_algorithms_enabled() else backward
