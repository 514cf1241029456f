"""`Segment`: what a range of positions does to the state of a recurrent layer, and the scan over segments.

Over any range of positions, a recurrent layer maps the incoming state S to `A S + B`. Two adjacent ranges compose:

    (A2, B2) o (A1, B1) = (A2 A1, A2 B1 + B2)

Composition is associative, but not commutative: segments stay in the order of positions. The identity is `(I, 0)`. A
range in which a document starts has `A = 0`: nothing from before reaches the positions after it.

The exclusive prefix of the segments gives every range its incoming state, `S[i + 1] = A[i] S[i] + B[i]`. Its backward
is the same scan in reverse order with A transposed: with D[i] the gradient of S[i] from what reads it,

    L[i] = D[i] + A[i]^T L[i + 1],    gradient of B[i] = L[i + 1],    gradient of A[i] = L[i + 1] S[i]^T

The same scan runs over the chunks of a sequence on one device and over the ranges of all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attnmesh.utils.validation import check_device, check_dtype, check_shape, check_tensor, check_type, shown


class Segment(NamedTuple):
    """A range of positions as a map of states [..., K, V]: `S` becomes `transition @ S + update`.

    `update` is [..., K, V]. `transition` has the same leading dimensions and is dense [..., K, K], diagonal [..., K, 1]
    or one number per state [..., 1, 1]. The identity is `(I, 0)`; a transition of 0 forgets the incoming state.

    Examples:
        >>> a, b = (am.recurrent.Segment(torch.rand(4, 1), torch.randn(4, 2)) for _ in range(2))
        >>> state = torch.randn(4, 2)
        >>> torch.allclose(b.after(a).apply(state), b.apply(a.apply(state)))
        True
        >>> start = am.recurrent.Segment(torch.zeros(4, 1), b.update)  # a document starts
        >>> torch.equal(start.after(a).apply(state), b.update)
        True
    """

    transition: Tensor
    update: Tensor

    @staticmethod
    def identity(shape: Iterable[int], *, dtype: torch.dtype, device: torch.device | str | None = None) -> Segment:
        """The segment of no positions; `shape` is that of a state."""
        sizes = check_shape("shape", shape)
        if len(sizes) < 2:
            raise ValueError(f"shape must be that of a state [..., K, V], got {list(sizes)}")
        check_dtype("dtype", dtype)
        update = torch.zeros(sizes, dtype=dtype, device=None if device is None else check_device("device", device))
        return Segment(torch.ones_like(update[..., :1, :1]), update)

    def apply(self, state: Tensor) -> Tensor:
        """The state after the segment, from the state before it."""
        self._check()
        update = self.update
        x = check_tensor("state", state)
        if (x.shape, x.dtype, x.device) != (update.shape, update.dtype, update.device):
            raise ValueError(f"state must be as update, {shown(update)}, got {shown(state)}")
        return times(self.transition, state) + self.update

    def after(self, earlier: Segment) -> Segment:
        """The segment of both ranges: `earlier`, then this one."""
        self._check()
        check_type("earlier", earlier, Segment)
        earlier._check("earlier.")
        theirs, update = earlier.update, self.update
        if (theirs.shape, theirs.dtype, theirs.device) != (update.shape, update.dtype, update.device):
            raise ValueError(f"earlier.update must be as update, {shown(update)}, got {shown(theirs)}")
        return compose(self, earlier)

    def _check(self, at: str = "") -> None:
        """Raises ValueError unless the two tensors are a segment."""
        update, transition = check_tensor(f"{at}update", self.update), check_tensor(f"{at}transition", self.transition)
        rows = update.shape[-2] if update.ndim >= 2 else -1
        for name, x in (("update", update), ("transition", transition)):
            if not x.dtype.is_floating_point or (x.dtype, x.device) != (update.dtype, update.device):
                raise ValueError(f"{at}{name} must be floating point, both of one dtype and device, got {shown(x)}")
        forms = (rows, rows), (rows, 1), (1, 1)
        if transition.shape[:-2] != update.shape[:-2] or tuple(transition.shape[-2:]) not in forms:
            raise ValueError(
                f"{at}transition must be [..., K, K], [..., K, 1] or [..., 1, 1] for {at}update [..., K, V], got "
                f"{shown(transition)} for {shown(update)}"
            )


def times(transition: Tensor, x: Tensor) -> Tensor:
    """`transition @ x` for [..., K, V], of a transition in any form."""
    return transition * x if transition.shape[-1] == 1 else transition @ x


def transposed(transition: Tensor) -> Tensor:
    """The transition of the reversed scan."""
    return transition if transition.shape[-1] == 1 else transition.mT


def compose(later: Segment, earlier: Segment) -> Segment:
    """`later.after(earlier)` of segments that have been checked. Differentiable."""
    a2, a1 = later.transition, earlier.transition
    if a2.shape[-1] > 1 and a1.shape[-1] == 1:
        transition = a2 * a1.mT  # columns of a dense transition
    else:
        transition = times(a2, a1)
    return Segment(transition, times(a2, earlier.update) + later.update)


def total(segments: Segment) -> Segment:
    """The composition of segments [n, ...], n >= 1, in the order of the first dimension. Differentiable.

    Neighbors are composed in pairs: the products of a chain, in a logarithmic number of operations.
    """
    transition, update = segments
    while (n := len(update)) > 1:
        pairs = Segment(transition[: n - n % 2], update[: n - n % 2])
        later, earlier = (Segment(*(x[at::2] for x in pairs)) for at in (1, 0))
        both = compose(later, earlier)
        if n % 2:
            both = Segment(*(torch.cat([x, y[-1:]]) for x, y in zip(both, (transition, update), strict=True)))
        transition, update = both
    return Segment(transition[0], update[0])


def scan(segments: Segment, initial: Tensor) -> Tensor:
    """The states [n + 1, ...] before each of the segments [n, ...], from `initial` on, and after the last.

    Differentiable. Only the states are kept for the backward, which is the reversed scan.
    """
    states: Tensor = _Scan.apply(*segments, initial)  # type: ignore[no-untyped-call]
    return states


def forward_scan(segments: Segment, initial: Tensor) -> Tensor:
    """`scan` without a gradient."""
    transition, update = segments
    states = update.new_empty(len(update) + 1, *update.shape[1:])
    states[0] = initial
    for i in range(len(update)):
        torch.add(times(transition[i], states[i]), update[i], out=states[i + 1])
    return states


def reversed_scan(transition: Tensor, grads: Tensor) -> Tensor:
    """The gradients L [n + 1, ...] of all states, from the gradients D [n + 1, ...] of what reads each state."""
    after = torch.empty_like(grads, memory_format=torch.contiguous_format)
    after[-1] = grads[-1]
    for i in reversed(range(len(transition))):
        torch.add(times(transposed(transition[i]), after[i + 1]), grads[i], out=after[i])
    return after


def transition_gradient(transition: Tensor, state: Tensor, grad: Tensor) -> Tensor:
    """The gradient of a transition: `grad` is the gradient of the state after it, `state` the state before it."""
    if transition.shape[-1] > 1:
        return grad @ state.mT
    by_row = (grad * state).sum(-1, keepdim=True)
    return by_row if transition.shape[-2] > 1 or state.shape[-2] == 1 else by_row.sum(-2, keepdim=True)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, transition: Tensor, update: Tensor, initial: Tensor) -> Tensor:
        states = forward_scan(Segment(transition, update), initial)
        ctx.save_for_backward(transition, states)
        return states

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:
        transition, states = ctx.saved_tensors
        after = reversed_scan(transition, grads)
        by_transition = None
        if ctx.needs_input_grad[0]:
            by_transition = transition_gradient(transition, states[:-1], after[1:])
        return by_transition, after[1:], after[0]
