"""Running sums of partial results: states merged, gradients added, in float32, rounded once at the end.

Partial results wait until a few of them can join the total in one pass over memory: merging each as it comes would
read and write the float32 total every time, which at short blocks costs more than a tenth of the attention itself.
Four half-precision parts wait before there is a total, two beside it: the same memory, and it does not grow with the
number of ranks (holding all parts, as others do, would let it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attnmesh.core.optional import require
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.streams import SINGLE_STREAM, StreamPair

_WAITING_FIRST, _WAITING_BESIDE_A_TOTAL = 4, 2


class StateAccumulator:
    """The merge of states over disjoint keys, each covering some of the rows. Takes over the tensors it is given.

    Where a part has an lse of -inf its out is 0, as backends leave it: a part alone is handed on as it is. `parts` is
    how many will be added, if known: the last of them are then merged and rounded in one pass.
    """

    def __init__(self, like: Tensor, streams: StreamPair = SINGLE_STREAM, parts: int | None = None) -> None:
        self._like, self._streams, self._due = like, streams, parts
        self._dtype = accumulation_dtype(like.dtype)
        self._total: State | None = None
        self._waiting: list[tuple[State, int]] = []

    def add(self, part: State, row: int = 0) -> None:
        """Merge a partial state that covers rows `row`, `row + 1`, ..."""
        self._waiting.append((part, row))
        self._due = _one_less(self._due)
        if self._due != 0 and len(self._waiting) >= _most_waiting(self._total):
            self.flush()

    def flush(self) -> State | None:
        """The float32 state of everything added so far, for a kernel to continue in place; None before the first."""
        if self._waiting:
            self._total = self._merged(self._dtype)
        return self._total

    def total(self) -> State:
        """Like `settle`, but the identity before the first."""
        total = self.flush()
        if total is None:
            total = self._total = State.identity(self._like.shape, dtype=self._dtype, device=self._like.device)
        return total

    def replace(self, total: State) -> None:
        """Put a state that a kernel continued in place of the total."""
        self._total = total

    def finish(self, dtype: torch.dtype) -> State:
        """The merged state with `out` in `dtype`; lse stays in the accumulation type."""
        if self._total is None and len(self._waiting) == 1 and self._waiting[0][0].out.shape == self._like.shape:
            only = self._waiting[0][0]
            return State(only.out.to(dtype), only.lse)
        if self._waiting and _in_triton(self._waiting):
            lse = torch.empty(self._like.shape[:3], dtype=self._dtype, device=self._like.device)
            room = State(torch.empty_like(self._like, dtype=dtype), lse)  # in memory as q is
            self.finish_into(room)
            return room
        if self._waiting:
            return self._merged(dtype)
        total = self.total()
        return State(total.out.to(dtype), total.lse)

    def finish_into(self, room: State) -> None:
        """The same, written where it belongs: `room` has the shape of the rows, and may be strided."""
        if self._waiting and _in_triton(self._waiting):
            with self._streams.exclusive():
                _triton().accumulate(self._total, self._waiting, room.out.dtype, self._like.shape, room)
                self._waiting = []
            return
        state = self.finish(room.out.dtype)
        room.out.copy_(state.out)
        room.lse.copy_(state.lse)

    def _merged(self, dtype: torch.dtype) -> State:
        with self._streams.exclusive():
            merged = _merged(self._total, self._waiting, dtype, self._like.shape)
            self._waiting = []
        return merged


class GradAccumulator:
    """The sum of partial gradients, each covering some of the rows, in the accumulation type. `parts` as above."""

    @classmethod
    def from_total(cls, whole: Tensor, dtype: torch.dtype) -> GradAccumulator:
        """A sum that is complete already, to be rounded to `dtype`."""
        total = cls(whole.new_empty((), dtype=dtype).expand(whole.shape))  # a shape, no memory
        total.add(whole)
        return total

    def __init__(self, like: Tensor, streams: StreamPair = SINGLE_STREAM, parts: int | None = None) -> None:
        self._like, self._streams, self._due = like, streams, parts
        self._total: Tensor | None = None
        self._waiting: list[tuple[Tensor, int]] = []

    def add(self, part: Tensor, row: int = 0) -> None:
        """Add a partial gradient that covers rows `row`, `row + 1`, ..."""
        self._waiting.append((part, row))
        self._due = _one_less(self._due)
        if self._due != 0 and len(self._waiting) >= _most_waiting(self._total):
            self.total()

    def total(self) -> Tensor:
        """The sum so far, for a kernel to add to in place."""
        if self._waiting or self._total is None:
            self._total = self._summed(accumulation_dtype(self._like.dtype))
        return self._total

    def add_to(self, target: Tensor) -> None:
        """Add everything to `target`, in place. The sum is spent."""
        for group in (self._waiting, [] if self._total is None else [(self._total, 0)]):
            _summed(target, group, target.dtype, target)
        self._total, self._waiting = None, []

    def finish(self) -> Tensor:
        """The sum in the type of the tensor it is the gradient of."""
        if self._total is None and len(self._waiting) == 1 and self._waiting[0][0].shape == self._like.shape:
            return self._waiting[0][0].to(self._like.dtype)
        return self._summed(self._like.dtype)

    def _summed(self, dtype: torch.dtype) -> Tensor:
        with self._streams.exclusive():
            summed = _summed(self._total, self._waiting, dtype, self._like)
            self._waiting = []
        return summed


def _one_less(due: int | None) -> int | None:
    return None if due is None else due - 1


def _most_waiting(total: object | None) -> int:
    return _WAITING_FIRST if total is None else _WAITING_BESIDE_A_TOTAL


def _summed(total: Tensor | None, parts: Sequence[tuple[Tensor, int]], dtype: torch.dtype, like: Tensor) -> Tensor:
    """The sum in `dtype`; in place where the total has it."""
    if not parts:
        return torch.zeros(like.shape, dtype=dtype, device=like.device) if total is None else total.to(dtype)
    # One part in place is what torch's own addition does best, with less work for the host.
    in_place = total is not None and dtype == total.dtype
    if like.is_cuda and accumulation_dtype(like.dtype) == torch.float32 and not (in_place and len(parts) == 1):
        summed: Tensor = _triton().add(total, parts, dtype, like.shape)
        return summed
    if total is None:
        total = torch.zeros(like.shape, dtype=accumulation_dtype(like.dtype), device=like.device)
    for part, row in parts:
        total[:, :, row : row + part.shape[2]] += part
    return total.to(dtype)


def _merged(total: State | None, parts: Sequence[tuple[State, int]], dtype: torch.dtype, shape: torch.Size) -> State:
    if _in_triton(parts):
        merged: State = _triton().accumulate(total, parts, dtype, shape)
        return merged
    if total is None:
        out = parts[0][0].out
        total = State.identity(shape, dtype=accumulation_dtype(out.dtype), device=out.device)
    for part, row in parts:
        merge_into(total, part, row)
    return State(total.out.to(dtype), total.lse)


def _in_triton(parts: Sequence[tuple[State, int]]) -> bool:
    return parts[0][0].lse.is_cuda and parts[0][0].lse.dtype == torch.float32


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


def _triton() -> Any:
    return require("attnmesh.ops.triton_merge", extra="triton")


def unpack_state(packed: Tensor) -> State:
    """The state [rows, heads, ...] in a buffer [heads, rows, ..., D + 1], as views of it."""
    by_row = packed.transpose(0, 1)
    return State(by_row[..., :-1], by_row[..., -1])


def merge_packed(parts: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The out [B, H, T, D] over all keys of `parts` [N, H, B, T, D + 1], whose key sets are disjoint.

    They join one after the other, so the bits depend on their order and on nothing else: identities, wherever they
    stand, change nothing. `sinks` [H] are scores of keys without a value.
    """
    if parts.is_cuda:
        return _triton_packed().merge_packed(parts, sinks, dtype)  # type: ignore[no-any-return]
    acc = torch.zeros_like(parts[0, ..., :-1])
    total = torch.zeros_like(parts[0, ..., -1])
    peak = torch.full_like(total, -torch.inf)
    for part in parts:
        lse = part[..., -1]
        top = torch.maximum(peak, lse)
        shift = torch.where(top == -torch.inf, 0.0, top)  # -inf - -inf would be NaN
        decay, weight = torch.exp(peak - shift), torch.exp(lse - shift)
        acc = acc * decay.unsqueeze(-1) + part[..., :-1] * weight.unsqueeze(-1)
        total, peak = total * decay + weight, top
    out = acc / torch.where(total == 0.0, 1.0, total).unsqueeze(-1)
    lse = torch.where(total == 0.0, -torch.inf, peak + torch.log(total))
    return with_sinks(out, lse, sinks).transpose(0, 1).to(dtype)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Out [H, B, T, D] with one more key a head, whose score is the sink and whose value is 0."""
    if sinks is None:
        return out
    # Not by logaddexp: on the CPU its last bit depends on where in the tensor a number stands, and so on the batch.
    share = 1 / (1 + torch.exp(sinks.to(lse.dtype)[:, None, None] - lse))
    return out * torch.where(lse == -torch.inf, 0.0, share).unsqueeze(-1)


def _triton_packed() -> Any:
    return require("attnmesh.ops.triton_merge", extra="triton")
