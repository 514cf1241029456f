"""`State`: the result `(out, lse)` of softmax attention over a subset of the keys.

Over any set of keys, `out = softmax(scores) @ V` and `lse = log(sum(exp(scores)))`. States over disjoint keys merge
into the state over their union: see `attnmesh.core.merge`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.utils.validation import check_device, check_dtype, check_shape


class State(NamedTuple):
    """Attention over a subset of the keys: normalized `out` [..., D] and `lse` [...], natural log.

    The identity, for rows that attend to no key, is `(0, -inf)`. An lse of `+inf` (an infinite sink) outweighs others.

    Examples:
        >>> nothing = am.State.identity((2, 3), dtype=torch.float32)
        >>> nothing.lse
        tensor([-inf, -inf])
        >>> state = am.State(torch.ones(2, 3), torch.zeros(2))
        >>> torch.equal(am.merge([state, nothing]).out, state.out)
        True
    """

    out: Tensor
    lse: Tensor

    @staticmethod
    def identity(shape: Iterable[int], *, dtype: torch.dtype, device: torch.device | str | None = None) -> State:
        """The state of rows that have attended to no key yet; `shape` is the shape of `out`."""
        sizes = check_shape("shape", shape)
        if not sizes:
            raise ValueError("shape must be that of out [..., D], got none")
        check_dtype("dtype", dtype)
        out = torch.zeros(sizes, dtype=dtype, device=None if device is None else check_device("device", device))
        return State(out, torch.full(out.shape[:-1], -torch.inf, dtype=dtype, device=device))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32
