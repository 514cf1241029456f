"""The one currency: the state `(out, lse)` of softmax attention over some of the keys, and how states merge.

Over any set of keys, attention is `out = softmax(scores) @ V` and `lse = log(sum(exp(scores)))`. Two states over
disjoint keys make the state over both:

    lse = log(exp(lse_a) + exp(lse_b))
    out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

Note on the ring attention text this grew from: it scales by `exp(lse_i - max)` and never divides by the new sum.
The weights are `exp(lse_i - lse)`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class State(NamedTuple):
    """Attention over some keys: `out` [..., D], normalized, and `lse` [...], natural log. Identity: `(0, -inf)`."""

    out: Tensor
    lse: Tensor

    @staticmethod
    def identity(shape: Iterable[int], *, dtype: torch.dtype, device: torch.device | str | None = None) -> State:
        """The state of rows that have seen no key yet; `shape` is that of `out`."""
        out = torch.zeros(tuple(shape), dtype=dtype, device=device)
        return State(out, torch.full(out.shape[:-1], -torch.inf, dtype=dtype, device=device))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums are kept in: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge(states: Iterable[State]) -> State:
    """The state over all the keys of `states`, whose key sets are disjoint.

    Any number of states, associative, commutative and total: `-inf` anywhere, or everywhere, gives the identity and
    never NaN, whatever the `out` of such a row holds. Differentiable through every `out` and every `lse`. The
    result is float32 (float64 if any input is).
    """
    states = list(states)
    if not states:
        raise ValueError("merge needs at least one state, got none")
    for i, state in enumerate(states):
        if state.out.shape != states[0].out.shape or state.lse.shape != state.out.shape[:-1]:
            raise ValueError(
                f"states must have one shape, and lse that of out less its last dimension: state {i} has out "
                f"{tuple(state.out.shape)} and lse {tuple(state.lse.shape)}, state 0 out {tuple(states[0].out.shape)}"
            )
    dtype = accumulation_dtype(_widest(states))
    lse = torch.stack([state.lse.to(dtype) for state in states])

    # Subtracting the largest finite lse keeps exp in range. It cancels, so no gradient flows through it.
    top = lse.detach().amax(0)
    top = torch.where(top == -torch.inf, 0.0, top)
    weight = torch.exp(lse - top)  # 0 for -inf
    total = weight.sum(0)
    seen = total > 0
    total = torch.where(seen, total, 1.0)

    out = torch.zeros_like(states[0].out, dtype=dtype)
    for state, w in zip(states, weight / total, strict=True):
        # where, not a product: a row that saw nothing may hold anything, and 0 * NaN is NaN.
        w = w.unsqueeze(-1)
        out = out + w * torch.where(w > 0, state.out.to(dtype), 0.0)
    return State(out, torch.where(seen, top + torch.log(total), -torch.inf))


def _widest(states: list[State]) -> torch.dtype:
    dtype = states[0].out.dtype
    for state in states:
        dtype = torch.promote_types(torch.promote_types(dtype, state.out.dtype), state.lse.dtype)
    return dtype
