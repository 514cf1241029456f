"""Running sums of partial results: states merged, gradients added, in float32, rounded once at the end.

Up to four partial results wait and then join the total in one pass over memory: merging each as it comes would read and
write the float32 total every time, which at short blocks costs more than a tenth of the attention itself. Holding four
keeps memory constant; holding all (as others do) would let it grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from attnmesh.extras import require
from attnmesh.state import State, accumulation_dtype

_MOST_WAITING = 4


class StateSum:
    """The merge of states over disjoint keys, each covering some of the rows. Takes over the tensors it is given."""

    def __init__(self, like: Tensor) -> None:
        self._shape = like.shape
        self._device = like.device
        self._dtype = accumulation_dtype(like.dtype)
        self._total: State | None = None
        self._waiting: list[tuple[State, int]] = []
        self._order = _Order(like.device)

    def add(self, part: State, row: int = 0) -> None:
        """Merge a partial state that covers rows `row`, `row + 1`, ..."""
        if len(self._waiting) == _MOST_WAITING:
            self.settle()
        self._waiting.append((part, row))
        self._order.made()

    def settle(self) -> State | None:
        """The float32 state of everything added so far, for a kernel to continue in place; None before the first."""
        if self._waiting:
            self._take()
            self._total = _merged(self._total, self._waiting, self._dtype, self._shape)
            self._order.made()
            self._waiting = []
        return self._total

    def begin(self) -> State:
        """Like `settle`, but the identity before the first."""
        total = self.settle()
        if total is None:
            total = self._total = State.identity(self._shape, dtype=self._dtype, device=self._device)
        return total

    def replace(self, total: State) -> None:
        """Put a state that a kernel continued in place of the total."""
        self._total = total

    def finish(self, dtype: torch.dtype) -> State:
        """The merged state with `out` in `dtype`; lse stays in the accumulation type."""
        self._take()
        if self._total is None and len(self._waiting) == 1 and self._waiting[0][0].out.shape == self._shape:
            only = self._waiting[0][0]
            return State(only.out.to(dtype), only.lse)
        if self._waiting:
            return _merged(self._total, self._waiting, dtype, self._shape)
        total = self.begin()
        return State(total.out.to(dtype), total.lse)

    def _take(self) -> None:
        states = [part for part, _ in self._waiting] + ([] if self._total is None else [self._total])
        self._order.take(chain(*states))


class GradSum:
    """The sum of partial gradients, each covering some of the rows, in the accumulation type."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._total: Tensor | None = None
        self._waiting: list[tuple[Tensor, int]] = []
        self._order = _Order(like.device)

    def add(self, part: Tensor, row: int = 0) -> None:
        """Add a partial gradient that covers rows `row`, `row + 1`, ..."""
        if len(self._waiting) == _MOST_WAITING:
            self.total()
        self._waiting.append((part, row))
        self._order.made()

    def total(self) -> Tensor:
        """The sum so far, for a kernel to add to in place."""
        if self._waiting or self._total is None:
            self._total = self._summed(accumulation_dtype(self._like.dtype))
            self._order.made()
        return self._total

    def pour(self, target: Tensor) -> None:
        """Add everything to `target`, in place. The sum is spent."""
        if len(self._waiting) == _MOST_WAITING:
            self.total()
        self._take()
        parts = self._waiting + ([] if self._total is None else [(self._total, 0)])
        if parts:
            _summed(target, parts, target.dtype, target)
        self._total, self._waiting = None, []

    def finish(self) -> Tensor:
        """The sum in the type of the tensor it is the gradient of."""
        if self._total is None and len(self._waiting) == 1 and self._waiting[0][0].shape == self._like.shape:
            self._take()
            return self._waiting[0][0].to(self._like.dtype)
        return self._summed(self._like.dtype)

    def _summed(self, dtype: torch.dtype) -> Tensor:
        self._take()
        waiting, self._waiting = self._waiting, []
        return _summed(self._total, waiting, dtype, self._like)

    def _take(self) -> None:
        self._order.take([part for part, _ in self._waiting] + ([] if self._total is None else [self._total]))


class _Order:
    """Lets parts be made on one CUDA stream and summed on another (see `lanes`)."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._made: list[tuple[torch.cuda.Stream, torch.cuda.Event]] = []

    def made(self) -> None:
        """The current stream has just made a part or a total."""
        if self._cuda:
            stream = torch.cuda.current_stream()
            self._made.append((stream, stream.record_event()))

    def take(self, tensors: Iterable[Tensor]) -> None:
        """The current stream is about to read these: it waits for them, and their memory outlives its reading."""
        if not self._cuda:
            return
        stream = torch.cuda.current_stream()
        others = [event for maker, event in self._made if maker != stream]
        for event in others:
            stream.wait_event(event)
        if others:
            for tensor in tensors:
                tensor.record_stream(stream)
        self._made = []


def _summed(total: Tensor | None, parts: Sequence[tuple[Tensor, int]], dtype: torch.dtype, like: Tensor) -> Tensor:
    """The sum in `dtype`; in place where the total has it."""
    if not parts:
        return torch.zeros(like.shape, dtype=dtype, device=like.device) if total is None else total.to(dtype)
    if like.is_cuda and accumulation_dtype(like.dtype) == torch.float32:
        summed: Tensor = _triton().add(total, parts, dtype, like.shape)
        return summed
    if total is None:
        total = torch.zeros(like.shape, dtype=accumulation_dtype(like.dtype), device=like.device)
    for part, row in parts:
        total[:, :, row : row + part.shape[2]] += part
    return total.to(dtype)


def _merged(total: State | None, parts: Sequence[tuple[State, int]], dtype: torch.dtype, shape: torch.Size) -> State:
    if _fused(parts[0][0].lse):
        merged: State = _triton().accumulate(total, parts, dtype, shape)
        return merged
    if total is None:
        out = parts[0][0].out
        total = State.identity(shape, dtype=accumulation_dtype(out.dtype), device=out.device)
    for part, row in parts:
        merge_into(total, part, row)
    return State(total.out.to(dtype), total.lse)


def merge_into(total: State, part: State, row: int = 0) -> None:
    """Merge a partial state into rows `row`, `row + 1`, ... of a total, in place. Total where `merge` is."""
    rows = slice(row, row + part.lse.shape[-1])
    out, old, new = total.out[..., rows, :], total.lse[..., rows], part.lse.to(total.lse.dtype)
    merged = torch.logaddexp(old, new)
    seen = merged > -torch.inf
    keep = torch.where(seen, torch.exp(old - merged), 0.0).unsqueeze(-1)
    take = torch.where(seen, torch.exp(new - merged), 0.0).unsqueeze(-1)
    # where, not a product: a part that saw nothing may hold anything, and 0 * NaN is NaN.
    out.mul_(keep).add_(torch.where(take > 0, part.out.to(out.dtype) * take, 0.0))
    old.copy_(merged)


def _fused(x: Tensor) -> bool:
    return x.is_cuda and x.dtype == torch.float32


def _triton() -> Any:
    return require("attnmesh.ops.triton_accumulate", extra="triton")
