"""Accumulators for partial states and gradients, and the merge of packed states: Triton on CUDA, torch elsewhere.

Partial results are float32 sums that are rounded once, at the end. They wait until several can join the total in one
pass over memory: merging each on arrival would read and write the float32 total every time, which costs more than a
tenth of the attention at short blocks. Four half-precision parts wait before there is a total, two beside it. Both take
the same memory, which does not grow with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnmesh.core.merge import discount_sinks_batch_invariant, merge_into, merge_sequential
from attnmesh.core.optional import require
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.streams import SINGLE_STREAM, StreamPair
from attnmesh.plan.workload import PENDING_PARTS, PENDING_PARTS_WITH_TOTAL


class StateAccumulator:
    """Merges states over disjoint keys, each covering some of the rows of `like` [B, H, S, D].

    Takes ownership of the tensors it is given. A part with an lse of -inf must have `out = 0`: a single part is
    returned as it is. `parts` is the number of parts to come, if known: the last ones are then merged and rounded in
    one pass.
    """

    def __init__(self, like: Tensor, streams: StreamPair = SINGLE_STREAM, parts: int | None = None) -> None:
        self._like, self._streams, self._parts_left = like, streams, parts
        self._dtype = accumulation_dtype(like.dtype)
        self._total: State | None = None
        self._pending: list[tuple[State, int]] = []

    def add(self, part: State, row: int = 0) -> None:
        """Merges a partial state that covers rows `row`, `row + 1`, ..."""
        self._pending.append((part, row))
        self._parts_left = _decremented(self._parts_left)
        if self._parts_left != 0 and len(self._pending) >= _max_pending(self._total):
            self.flush()

    def flush(self) -> State | None:
        """Returns the float32 state so far, which a kernel may continue in place; None before the first part."""
        if self._pending:
            self._total = self._merged(self._dtype)
        return self._total

    def total(self) -> State:
        """Returns the float32 state so far, as `flush` does; the identity before the first part."""
        total = self.flush()
        if total is None:
            total = self._total = State.identity(self._like.shape, dtype=self._dtype, device=self._like.device)
        return total

    def replace(self, total: State) -> None:
        """Replaces the total with a state that a kernel has continued."""
        self._total = total

    def finish(self, dtype: torch.dtype) -> State:
        """Returns the merged state with `out` in `dtype` and `lse` in the accumulation dtype."""
        if self._total is None and len(self._pending) == 1 and self._pending[0][0].out.shape == self._like.shape:
            only = self._pending[0][0]
            return State(only.out.to(dtype), only.lse)
        if self._pending and _use_triton(self._pending):
            lse = torch.empty(self._like.shape[:3], dtype=self._dtype, device=self._like.device)
            rows = torch.empty_like(self._like, dtype=dtype)  # with the strides of q
            if rows.stride(-1) != 1:  # the kernel writes contiguous rows
                rows = torch.empty(rows.shape, dtype=dtype, device=rows.device)
            result = State(rows, lse)
            self.finish_into(result)
            return result
        if self._pending:
            return self._merged(dtype)
        total = self.total()
        return State(total.out.to(dtype), total.lse)

    def finish_into(self, result: State) -> None:
        """Writes the merged state to `result`, which has the shape of `like` and may be strided."""
        if self._pending and _use_triton(self._pending):
            with self._streams.exclusive():
                _triton().accumulate(self._total, self._pending, result.out.dtype, self._like.shape, result)
                self._pending = []
            return
        state = self.finish(result.out.dtype)
        result.out.copy_(state.out)
        result.lse.copy_(state.lse)

    def _merged(self, dtype: torch.dtype) -> State:
        with self._streams.exclusive():
            merged = _merge_parts(self._total, self._pending, dtype, self._like.shape)
            self._pending = []
        return merged


class GradAccumulator:
    """Sums partial gradients, each covering some rows of `like` [B, H, S, D]. `parts` as in `StateAccumulator`."""

    @classmethod
    def from_total(cls, total: Tensor, dtype: torch.dtype) -> GradAccumulator:
        """Returns an accumulator that holds a complete sum, to be rounded to `dtype`."""
        accumulator = cls(total.new_empty((), dtype=dtype).expand(total.shape))  # a shape without memory
        accumulator.add(total)
        return accumulator

    def __init__(self, like: Tensor, streams: StreamPair = SINGLE_STREAM, parts: int | None = None) -> None:
        self._like, self._streams, self._parts_left = like, streams, parts
        self._total: Tensor | None = None
        self._pending: list[tuple[Tensor, int]] = []

    def add(self, part: Tensor, row: int = 0) -> None:
        """Adds a partial gradient that covers rows `row`, `row + 1`, ..."""
        self._pending.append((part, row))
        self._parts_left = _decremented(self._parts_left)
        if self._parts_left != 0 and len(self._pending) >= _max_pending(self._total):
            self.total()

    def total(self) -> Tensor:
        """Returns the sum so far in the accumulation dtype; a kernel may add to it in place."""
        if self._pending or self._total is None:
            self._total = self._summed(accumulation_dtype(self._like.dtype))
        return self._total

    def add_to(self, target: Tensor) -> None:
        """Adds the sum to `target` in place and resets this accumulator."""
        for group in (self._pending, [] if self._total is None else [(self._total, 0)]):
            _sum_parts(target, group, target.dtype, target)
        self._total, self._pending = None, []

    def finish(self) -> Tensor:
        """Returns the sum in the dtype of `like`."""
        if self._total is None and len(self._pending) == 1 and self._pending[0][0].shape == self._like.shape:
            return self._pending[0][0].to(self._like.dtype)
        return self._summed(self._like.dtype)

    def _summed(self, dtype: torch.dtype) -> Tensor:
        with self._streams.exclusive():
            summed = _sum_parts(self._total, self._pending, dtype, self._like)
            self._pending = []
        return summed


def merge_packed(parts: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns `out` [B, H, T, D] in `dtype` over all keys of `parts` [N, H, B, T, D + 1], whose key sets are disjoint.

    The last column is the lse. Parts are merged in order: see `attnmesh.core.merge.merge_sequential`. `sinks` [H] are
    scores of keys without a value.
    """
    if parts.is_cuda:
        return _triton().merge_packed(parts, sinks, dtype)  # type: ignore[no-any-return]
    out, lse = merge_sequential(parts)
    if sinks is not None:
        out = discount_sinks_batch_invariant(out, lse, sinks[:, None, None])
    return out.transpose(0, 1).to(dtype)


def _decremented(parts: int | None) -> int | None:
    return None if parts is None else parts - 1


def _max_pending(total: object | None) -> int:
    return PENDING_PARTS if total is None else PENDING_PARTS_WITH_TOTAL


def _sum_parts(total: Tensor | None, parts: Sequence[tuple[Tensor, int]], dtype: torch.dtype, like: Tensor) -> Tensor:
    """The sum in `dtype`; in place where the total has that dtype."""
    if not parts:
        return torch.zeros(like.shape, dtype=dtype, device=like.device) if total is None else total.to(dtype)
    # A single part in place is what torch's own addition does best, with less work for the host.
    in_place = total is not None and dtype == total.dtype
    if like.is_cuda and accumulation_dtype(like.dtype) == torch.float32 and not (in_place and len(parts) == 1):
        summed: Tensor = _triton().add(total, parts, dtype, like.shape)
        return summed
    if total is None:
        total = torch.zeros(like.shape, dtype=accumulation_dtype(like.dtype), device=like.device)
    for part, row in parts:
        total[:, :, row : row + part.shape[2]] += part
    return total.to(dtype)


def _merge_parts(
    total: State | None, parts: Sequence[tuple[State, int]], dtype: torch.dtype, shape: torch.Size
) -> State:
    if _use_triton(parts):
        merged: State = _triton().accumulate(total, parts, dtype, shape)
        return merged
    if total is None:
        out = parts[0][0].out
        total = State.identity(shape, dtype=accumulation_dtype(out.dtype), device=out.device)
    for part, row in parts:
        merge_into(total, part, row)
    return State(total.out.to(dtype), total.lse)


def _use_triton(parts: Sequence[tuple[State, int]]) -> bool:
    return parts[0][0].lse.is_cuda and parts[0][0].lse.dtype == torch.float32


def _triton() -> Any:
    return require("attnmesh.ops.triton_merge", extra="triton")
