"""The public `merge`: a Triton kernel on CUDA where nothing is differentiated, torch elsewhere."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnmesh.core.merge import check_states, merge_checked
from attnmesh.core.state import State
from attnmesh.ops.launch import Recent, signature
from attnmesh.utils.optional import installed
from attnmesh.utils.validation import check_list

_kernel_of: Recent[bool] = Recent()  # by signature, if all was checked: whether the kernel serves the call


def merge(states: Iterable[State]) -> State:
    """Returns the state over all keys of `states`, whose key sets are disjoint.

    Takes any number of states. Associative, commutative and total: rows with `lse = -inf` contribute nothing, whatever
    their `out` holds. Where some states have `lse = +inf`, the result is the mean of their `out`, with `lse = +inf`: an
    infinite weight, never a row without keys. FlashMLA writes `+inf` for rows without keys, and vLLM's merge reads it
    so: pass `lse.masked_fill(lse == torch.inf, -torch.inf)`. An lse in base 2 goes through `convert_lse` first.
    Differentiable through every `out` and every finite `lse`. The result is float32 (float64 if any input is).

    Examples:
        >>> q, k, v = torch.randn(3, 1, 2, 10, 8)
        >>> early = am.State(*am.attention(q, k[:, :, :4], v[:, :, :4], return_lse=True))
        >>> late = am.State(*am.attention(q, k[:, :, 4:], v[:, :, 4:], return_lse=True))
        >>> torch.allclose(am.merge([early, late]).out, am.attention(q, k, v), atol=1e-6)
        True
    """
    states = check_list("states", states, "states")
    key = _signature(states)
    by_kernel = None if key is None else _kernel_of.get(key)
    if by_kernel is None:
        check_states(states)
        by_kernel = key is not None and _kernel_serves(states)
        if key is not None:
            _kernel_of.add(key, by_kernel)
    if by_kernel and not (torch.is_grad_enabled() and any(x.requires_grad for state in states for x in state)):
        from attnmesh.ops.triton_merge import merge_states

        return merge_states(states, key)
    return merge_checked(states)


def _signature(states: list[State]) -> Hashable:
    """What the checks and the kernel depend on; None if it cannot be known."""
    if torch.compiler.is_compiling() or forward_ad._current_level >= 0:
        return None
    if not all(type(state) is State and type(state[0]) is type(state[1]) is Tensor for state in states):
        return None
    try:
        return signature(*[x for state in states for x in state])
    except RuntimeError:  # not dense
        return None


def _kernel_serves(states: list[State]) -> bool:
    if not states[0].out.is_cuda or not installed("triton"):
        return False
    from attnmesh.ops.triton_merge import MAX_STATES, MAX_WIDTH

    return (
        len(states) <= MAX_STATES
        and states[0].out.numel() > 0
        and states[0].out.shape[-1] <= MAX_WIDTH
        and not any(x.dtype == torch.float64 for state in states for x in state)
    )
