"""`State`: the result `(out, lse)` of softmax attention over a subset of the keys.

Over any set of keys, `out = softmax(scores) @ V` and `lse = log(sum(exp(scores)))`. States over disjoint keys merge
into the state over both:

    lse = log(exp(lse_a) + exp(lse_b))
    out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b

The weights are `exp(lse_i - lse)`. (A common description of ring attention scales by `exp(lse_i - max)` and never
divides by the new sum.) All merges treat `-inf` as "no keys" and never return NaN for it. An lse of `+inf`, as an
infinite sink gives, outweighs every finite one: `out` is the mean over the states with `+inf`, and lse is `+inf`. (A
state does not know how many it was merged from, so a merge of merged states is not that mean.) The gradient of an lse
of `+inf` is 0.

The functions below compute the same value with different orders of operations, so their last bits differ. Each order
serves a promise that the other orders cannot keep:

| function | order | needed for |
|---|---|---|
| `merge` | all at once, under the maximum | the public function: differentiable, any number of states |
| `merge_into` | pairwise, in place | ring steps: no copy of the running total |
| `merge_sequential` | one after another, running maximum | identities anywhere in the sequence do not change a bit |
| `merge_stacked` | all at once, weights normalized first | CPU decode: one product and one sum over stacked parts |
| `scale_for_sum` | each rank scales by the total lse | reduce-scatter and all-reduce, which can only add |

A sink is the score of an extra key whose value is zero: it takes weight from the other keys and adds nothing.

| function | formula of the remaining weight | needed for |
|---|---|---|
| `add_sinks` | `exp(lse - logaddexp(lse, sink))` | the new lse is returned too |
| `discount_sinks` | `sigmoid(lse - sink)` | gradients through autograd |
| `discount_sinks_batch_invariant` | `1 / (1 + exp(sink - lse))` | bits that do not depend on the batch |
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.utils.validation import (
    check_device,
    check_dtype,
    check_list,
    check_shape,
    check_tensor,
    check_type,
    shown,
)


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
        return identity(sizes, dtype, None if device is None else check_device("device", device))


def identity(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None) -> State:
    """`State.identity`, without checks of its arguments."""
    out = torch.zeros(shape, dtype=dtype, device=device)
    return State(out, torch.full(out.shape[:-1], -torch.inf, dtype=dtype, device=device))


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


# Every merge of states in plain torch, and the terms that attention sinks add.


def merge(states: Iterable[State]) -> State:
    """The public `merge` in torch, on any device. Differentiable."""
    states = check_list("states", states, "states")
    check_states(states)
    return merge_checked(states)


def merge_checked(states: list[State]) -> State:
    """`merge` of states that have been checked."""
    dtype = accumulation_dtype(_widest_dtype(states))
    lse = torch.stack([state.lse.to(dtype) for state in states])

    # Subtracting the largest lse keeps exp in range. It cancels, so no gradient flows through it.
    top = lse.detach().amax(0)
    top = torch.where(top == -torch.inf, 0.0, top)
    weight = _exp_difference(lse, top)  # 0 for -inf
    total = weight.sum(0)
    nonempty = total > 0
    total = torch.where(nonempty, total, 1.0)

    out = torch.zeros_like(states[0].out, dtype=dtype)
    for state, w in zip(states, weight / total, strict=True):
        # where, not a product: an empty row may hold anything, and 0 * NaN is NaN.
        w = w.unsqueeze(-1)
        out = out + w * torch.where(w > 0, state.out.to(dtype), 0.0)
    return State(out, torch.where(nonempty, top + torch.log(total), -torch.inf))


def check_states(states: list[State]) -> None:
    """Raises ValueError unless these are states that can be merged, at least one."""
    if not states:
        raise ValueError("states must contain at least one state, got none")
    _check_states({f"states[{i}]": state for i, state in enumerate(states)})


def _check_states(states: Mapping[str, State]) -> None:
    """Raises ValueError unless these are states of one shape on one device; by their names as arguments."""
    one = next(iter(states.values()))
    for at, state in states.items():
        check_type(at, state, State)
        for name, x in zip(state._fields, state, strict=True):
            if not check_tensor(f"{at}.{name}", x).dtype.is_floating_point:
                raise ValueError(f"{at}.{name} must be floating point, got {shown(x)}")
            if x.device != one.out.device:
                raise ValueError(f"{at} must be on one device, {one.out.device}, got {name} {shown(x)}")
        if state.out.shape != one.out.shape or state.lse.shape != state.out.shape[:-1]:
            raise ValueError(
                f"states must have one shape, and lse the shape of out without its last dimension: {at} has out "
                f"{tuple(state.out.shape)} and lse {tuple(state.lse.shape)}, {next(iter(states))} out "
                f"{tuple(one.out.shape)}"
            )


def merge_sinks(state: State, sinks: Tensor) -> State:
    """Returns the state with sinks merged in: `sinks` are scores of one more key per row, whose value is zero.

    `sinks` has the dimensions of `lse`, each of its size or 1: `sinks[None, :, None]` for one per head of attention
    [B, H, S, D], and [B, H, S] for one per query. `attention(..., sinks=sinks, return_lse=True)` returns an lse with
    the sinks; call it without them, and `merge_sinks` of its state, for an lse without. Differentiable. The result is
    float32 (float64 if any input is).

    Examples:
        >>> q, k, v = torch.randn(3, 1, 2, 10, 8)
        >>> state = am.State(*am.attention(q, k, v, return_lse=True))  # its lse is of the keys alone
        >>> sinks = torch.randn(2)
        >>> out = am.decode.merge_sinks(state, sinks[None, :, None]).out
        >>> torch.allclose(out, am.attention(q, k, v, sinks=sinks), atol=1e-6)
        True
    """
    _check_states({"state": state})
    lse = state.lse
    if not check_tensor("sinks", sinks).dtype.is_floating_point or sinks.device != lse.device:
        raise ValueError(f"sinks must be floating point on {lse.device}, got {shown(sinks)}")
    if sinks.ndim != lse.ndim or any(n not in (1, m) for n, m in zip(sinks.shape, lse.shape, strict=True)):
        raise ValueError(
            f"sinks must have the dimensions of lse, {list(lse.shape)}, each as long as that of lse or 1, got "
            f"{list(sinks.shape)}: sinks[None, :, None] is one per head of [batch, heads, seq]"
        )
    if sinks.dtype.itemsize == 1:
        raise ValueError(f"sinks must be of 16 bits at least, got {sinks.dtype}")
    dtype = accumulation_dtype(torch.promote_types(_widest_dtype([state]), sinks.dtype))
    out, lse, sinks = state.out.to(dtype), lse.to(dtype), sinks.to(dtype)
    # A row without keys may hold anything; infinities have no gradient, and logaddexp would give NaN.
    out = torch.where(lse.unsqueeze(-1) == -torch.inf, 0.0, out)
    larger = torch.maximum(lse, sinks).detach()
    both = [torch.where(larger.isinf(), 0.0, x) for x in (lse, sinks)]
    return State(discount_sinks(out, lse, sinks), torch.where(larger.isinf(), larger, torch.logaddexp(*both)))


def _exp_difference(lse: Tensor, top: Tensor) -> Tensor:
    """exp(lse - top) for lse <= top and top > -inf; 1 where both are +inf."""
    return torch.exp(torch.where(lse == torch.inf, 0.0, lse - top))


def _widest_dtype(states: list[State]) -> torch.dtype:
    dtype = states[0].out.dtype
    for state in states:
        dtype = torch.promote_types(torch.promote_types(dtype, state.out.dtype), state.lse.dtype)
    return dtype


def merge_into(total: State, part: State, row: int = 0) -> None:
    """Merges `part` into rows `row`, `row + 1`, ... of `total`, in place.

    Pairwise and in place, so that a running total over many ring steps needs no second buffer.
    """
    rows = slice(row, row + part.lse.shape[-1])
    out, old, new = total.out[..., rows, :], total.lse[..., rows], part.lse.to(total.lse.dtype)
    merged = torch.logaddexp(old, new)
    nonempty = merged > -torch.inf
    both_infinite = (old == torch.inf) & (new == torch.inf)
    keep, take = (
        torch.where(nonempty, _exp_difference(lse, merged), 0.0).masked_fill_(both_infinite, 0.5).unsqueeze(-1)
        for lse in (old, new)
    )
    # where, not a product: an empty row may hold anything, and 0 * NaN is NaN.
    out.mul_(keep).add_(torch.where(take > 0, part.out.to(out.dtype) * take, 0.0))
    old.copy_(merged)


def merge_sequential(packed: Tensor) -> State:
    """Returns the state over `packed` [N, ..., D + 1], merged in the order 0 to N - 1; the last column is the lse.

    The bits depend on that order and on nothing else: identities anywhere in the sequence change nothing, so the result
    does not depend on how many ranks the parts came from. Empty rows must have `out = 0`.
    """
    acc = torch.zeros_like(packed[0, ..., :-1])
    total = torch.zeros_like(packed[0, ..., -1])
    peak = torch.full_like(total, -torch.inf)
    for part in packed:
        lse = part[..., -1]
        top = torch.maximum(peak, lse)
        shift = torch.where(top == -torch.inf, 0.0, top)  # -inf - -inf would be NaN
        decay, weight = _exp_difference(peak, shift), _exp_difference(lse, shift)
        acc = acc * decay.unsqueeze(-1) + part[..., :-1] * weight.unsqueeze(-1)
        total, peak = total * decay + weight, top
    out = acc / torch.where(total == 0.0, 1.0, total).unsqueeze(-1)
    return State(out, torch.where(total == 0.0, -torch.inf, peak + torch.log(total)))


def merge_stacked(states: list[State], n: int) -> State:
    """Returns the state [n, ...] of n sequences with one part each, or of one sequence whose parts are the first dim.

    A single product and sum over the stacked parts: the fewest passes over memory on the CPU. Empty rows must have
    `out = 0`.
    """
    if len(states) == 1 and states[0].lse.shape[0] == n:
        return states[0]
    joined = torch.cat if n == 1 else torch.stack
    out, lse = (joined(parts) for parts in zip(*states, strict=True))
    # A row that is empty in every part has a total of 0; any other total is at least 1, the largest part's own.
    top = lse.amax(0, keepdim=n == 1).clamp(min=torch.finfo(lse.dtype).min)
    weight = _exp_difference(lse, top)
    total = weight.sum(0, keepdim=n == 1)
    weight = weight / total.clamp(min=1.0)
    return State((out * weight.unsqueeze(-1)).sum(0, keepdim=n == 1), top + torch.log(total))


def scale_for_sum(state: State, lses: Tensor) -> State:
    """Returns `out` scaled so that the sum over ranks is the merged `out`, and the total lse.

    `lses` [ranks, ...] holds the lse of every rank. For collectives that can only add. Empty rows must have `out = 0`.
    """
    total = torch.logsumexp(lses, 0)
    scale = _exp_difference(state.lse, torch.where(total == -torch.inf, 0.0, total))
    scale = scale / (lses == torch.inf).sum(0).clamp(min=1)
    return State(state.out * scale.unsqueeze(-1), total)


def unpack_state(packed: Tensor) -> State:
    """Returns the state [rows, heads, ...] in a buffer [heads, rows, ..., D + 1], as views.

    `out` and `lse` of a row lie side by side, so that a state is one message, and heads come first, so that the rows of
    some heads are contiguous.
    """
    by_row = packed.transpose(0, 1)
    return State(by_row[..., :-1], by_row[..., -1])


def add_sinks(state: State, sinks: Tensor) -> State:
    """Returns the state with sinks merged in; `sinks` broadcast to `lse`. Not rounded.

    An empty row becomes `(0, sink)`.
    """
    lse = torch.logaddexp(state.lse, sinks.to(state.lse.dtype))
    weight = _exp_difference(state.lse, torch.where(lse == -torch.inf, 0.0, lse))
    weight = torch.where((state.lse == torch.inf) & (sinks == torch.inf), 0.5, weight)
    return State(state.out * weight.unsqueeze(-1), lse)


def discount_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Returns `out` in its own dtype, with sinks merged in; `sinks` broadcast to `lse`. Differentiable.

    sigmoid has finite gradients everywhere, where the difference of two log-sum-exps has not.
    """
    sinks = sinks.to(lse.dtype)
    # Equal infinities: half for +inf, and any weight for -inf, where `out` is 0.
    weight = torch.sigmoid(torch.where(lse.isinf() & (lse == sinks), 0.0, lse - sinks))
    return (out * weight.unsqueeze(-1)).to(out.dtype)


def discount_sinks_batch_invariant(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Returns `out` with sinks merged in; `sinks` broadcast to `lse`. A row's bits do not depend on the batch.

    torch's logaddexp is vectorized on the CPU: the last bit of an element depends on its place in the tensor.
    """
    sinks = sinks.to(lse.dtype)
    weight = 1 / (1 + torch.exp(torch.where(lse == sinks, 0.0, sinks - lse)))
    return out * torch.where(lse == -torch.inf, 0.0, weight).unsqueeze(-1)


def sink_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """Returns the gradient [H] of `sinks` [H], summed over rows; `lse` [rows, H] includes the sinks. Not rounded.

    `delta` [rows, H] is `rowsum(out * grad_out) - grad_lse`.
    """
    # A sink of -inf is no key; a row whose lse is -inf has no weight to move.
    weight = torch.exp(sinks.to(lse.dtype) - lse.masked_fill(torch.isinf(lse), 0.0))
    return -(weight * delta).masked_fill(torch.isinf(lse), 0.0).sum(0)
