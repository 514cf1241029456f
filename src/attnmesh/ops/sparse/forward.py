"""The forward pass of sparse attention by a kernel: memory for its results, and launches that repeat."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from attnmesh.ops.launch import Launch
from attnmesh.ops.sparse.call import SparseCall

FirstLaunch = Callable[[SparseCall, Tensor | None, tuple[Tensor, ...]], Launch]


class Forward:
    """The forward pass of calls with one signature: the first call launches a kernel, the others repeat the launch.

    Results are out [s_q, heads, d_v], lse [s_q, heads] in float32, natural, and, with `max_logits`, the largest scaled
    score [s_q, heads] in float32. `sinks` [heads] are scores of one more key per head, without a value; they are part
    of out and lse, not of the largest score. A row without a valid slot has out 0 and lse -inf (or its sink). Keys of
    no valid slot may hold any values.
    """

    def __init__(self, first: FirstLaunch, call: SparseCall, dtype: torch.dtype, max_logits: bool) -> None:
        s_q, heads, _ = call.q.shape
        of_rows = (s_q, heads), (heads, 1)
        self._shape, self._strides = (s_q, heads, call.d_v), (heads * call.d_v, call.d_v, 1)
        self._more = [of_rows] * (2 if max_logits else 1)
        self._first, self._dtype, self._device = first, dtype, call.q.device
        self._launch: Launch | None = None

    def __call__(self, call: SparseCall, sinks: Tensor | None) -> tuple[Tensor, ...]:
        """The results of a call."""
        device = self._device
        out = torch.empty_strided(self._shape, self._strides, dtype=self._dtype, device=device)
        results = out, *[torch.empty_strided(*x, dtype=torch.float32, device=device) for x in self._more]
        if 0 in self._shape:
            return results
        if sinks is not None:
            sinks = sinks.contiguous()
        if self._launch is None:
            with torch.cuda.device_of(call.q):
                self._launch = self._first(call, sinks, results)
        else:
            q, k, v, indices, (lo, hi, slots, _), *_ = call
            self._launch(q, k, v, indices, lo, hi, slots, sinks, *results)
        return results
