"""Accumulators for partial states and gradients, and the merge of packed states: Triton on CUDA, torch elsewhere.

Partial results are float32 sums that are rounded once, at the end. They wait until several can join the total in one
pass over memory: merging each on arrival would read and write the float32 total every time, which costs more than a
tenth of the attention at short blocks. Four half-precision parts wait before there is a total, two beside it. Both take
the same memory, which does not grow with the number of ranks.

On a GPU, blocks of work use two streams in turn. A kernel over one block of a ring ends with a wave of tiles that does
not fill the device, and small memory-bound kernels run before and after it. With two streams the next block starts
while the previous one drains. Block s + 1 may overtake block s, never block s - 1: a ring has two key buffers, and
block s + 1 reads the one that block s - 1 has finished with.

The caching allocator reuses memory on the stream that freed it. Memory that one stream allocated and another has read
is therefore safe only if the first waits for the second before it continues, which `exclusive` and `record_arrival`
ensure. (`Tensor.record_stream` would not need the wait, but it holds memory back for as long as the host runs ahead of
the device, so memory would grow with the ring.) `tests/parallel/test_streams.py` checks the order with vector clocks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from attnmesh.core.state import (
    State,
    accumulation_dtype,
    add_sinks,
    check_states,
    discount_sinks_batch_invariant,
    identity,
    merge_checked,
    merge_into,
    merge_sequential,
)
from attnmesh.ops.launch import Recent, signature
from attnmesh.utils.optional import installed, require
from attnmesh.utils.validation import check_list

STREAMS = 2
"""CUDA streams that the kernels of a ring alternate between."""

_NOTHING = nullcontext()


def stream_of(x: Tensor) -> int | None:
    """The number of the current stream of the device of x, a key for results that are kept; 0 on the CPU.

    None while a graph is captured: what the graph computes is not there before it runs, and what it reads must live as
    long as the graph does.
    """
    if not x.is_cuda:
        return 0
    return None if torch.cuda.is_current_stream_capturing() else int(torch._C._cuda_getCurrentRawStream(x.get_device()))


class StreamPair:
    """Orders the blocks of one ring on two streams. Unless `enabled`, everything stays on the caller's stream."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled
        if enabled:
            self._main = torch.cuda.current_stream()
            self._streams = _streams(self._main.device_index, self._main.cuda_stream)
            self._current = self._main
            self._arrived = self._main.record_event()
            self._summed = self._arrived
            self._done: list[torch.cuda.Event] = []  # one per block so far, alternating between the streams

    def next_stream(self) -> AbstractContextManager[None]:
        """Runs a block on the next stream, after everything whose arrival has been recorded."""
        return self._on_next_stream() if self._enabled else _NOTHING

    @contextmanager
    def _on_next_stream(self) -> Iterator[None]:
        stream = self._current = self._streams[len(self._done) % STREAMS]
        stream.wait_event(self._arrived)
        stream.wait_event(self._summed)
        with torch.cuda.stream(stream):
            yield
        self._done.append(stream.record_event())
        self._current = self._main

    def exclusive(self) -> AbstractContextManager[None]:
        """Runs work that reads results of both streams: after all blocks so far, and before any later block."""
        return self._after_all_blocks() if self._enabled else _NOTHING

    @contextmanager
    def _after_all_blocks(self) -> Iterator[None]:
        for done in self._done[-STREAMS:]:
            self._current.wait_event(done)
        yield
        self._summed = self._current.record_event()

    def record_arrival(self) -> None:
        """Makes everything that the caller's stream has waited for available to later blocks."""
        if self._enabled:
            self._arrived = self._main.record_event()

    def wait_for_last_block(self) -> None:
        """Makes the caller's stream wait for the last block.

        Call it before receiving keys into the buffer which that block reads, and before reading what the block
        produced. Its stream reuses that memory in the block after next, which waits for `record_arrival`.
        """
        if self._enabled and self._done:
            self._main.wait_event(self._done[-1])

    def join(self) -> None:
        """Makes the caller's stream wait for all blocks."""
        if self._enabled:
            for done in self._done[-STREAMS:]:  # the last block of each stream
                self._main.wait_event(done)


SINGLE_STREAM = StreamPair(enabled=False)


@cache
def _streams(device: int, caller: int) -> tuple[torch.cuda.Stream, ...]:
    """The pair that belongs to one stream of the caller: rings on different streams must not share a pair."""
    return tuple(torch.cuda.Stream(device) for _ in range(STREAMS))


PENDING_PARTS, PENDING_PARTS_WITH_TOTAL = 4, 2
"""Partial results that are collected before they are merged in one pass: before there is a total, and with one."""

_T = TypeVar("_T", State, Tensor)


class Part(NamedTuple, Generic[_T]):
    """A partial state or gradient [b, H, s, D] of rows `row`, `row + 1`, ... of sequences `sequence`, ..."""

    value: _T
    row: int = 0
    sequence: int = 0


class StateAccumulator:
    """Merges states over disjoint keys, each covering some rows of some sequences of q [B, H, S, D].

    `width` is that of `out`: the head dim of the values. Takes ownership of the tensors it is given. A part with an lse
    of -inf must have `out = 0`: a single part is returned as it is. `parts` is the number of parts to come, if known:
    the last ones are then merged and rounded in one pass.

    `sinks` [H] are scores of keys without a value. They are merged once, before `out` is rounded, and `lse` has them.
    While `last_call` is set, no other call of a backend follows. A kernel may then merge the state so far and the sinks
    itself, for all rows, and `complete` the result in the dtype of q, which saves a pass over it.
    """

    def __init__(
        self, q: Tensor, width: int, streams: StreamPair = SINGLE_STREAM, parts: int | None = None,
        *, sinks: Tensor | None = None, last_call: bool = False,
    ) -> None:  # fmt: skip
        self._q, self._streams, self._parts_left = q, streams, parts
        self.sinks, self.last_call = sinks, last_call
        self._width = width
        self._total: State | None = None
        self._pending: list[Part[State]] = []
        self._result: State | None = None

    @property
    def _shape(self) -> torch.Size:
        return torch.Size((*self._q.shape[:3], self._width))

    @property
    def _dtype(self) -> torch.dtype:
        return accumulation_dtype(self._q.dtype)

    def add(self, part: State, row: int = 0, sequence: int = 0) -> None:
        """Merges a partial state of rows `row`, `row + 1`, ... of sequences `sequence`, `sequence + 1`, ..."""
        self._pending.append(Part(part, row, sequence))
        if self._parts_left is not None:
            self._parts_left -= 1
        if len(self._pending) > 1 and self._parts_left != 0 and len(self._pending) >= _max_pending(self._total):
            self.flush()

    def flush(self) -> State | None:
        """Returns the float32 state so far, which a kernel may continue in place; None before the first part."""
        if self._pending:
            with self._streams.exclusive():
                self._total = _merge_parts(self._total, self._pending, self._dtype, self._shape)
                self._pending = []
        return self._total

    def total(self) -> State:
        """Returns the float32 state so far, as `flush` does; the identity before the first part."""
        total = self.flush()
        if total is None:
            total = self._total = identity(self._shape, self._dtype, self._q.device)
        return total

    def replace(self, total: State) -> None:
        """Replaces the total with a state that a kernel has continued."""
        self._total = total

    def complete(self, result: State) -> None:
        """Takes the result of the last call, which has the sinks and everything that was added before."""
        assert self.last_call, "another call follows, whose part would be missing"
        self._result = result

    def finish(self, dtype: torch.dtype) -> State:
        """Returns the merged state, with the sinks: `out` in `dtype` and `lse` in the accumulation dtype."""
        if self._result is not None:
            return _rounded(self._result, dtype)
        if self.sinks is None and self._total is None and len(self._pending) == 1:
            only = self._pending[0].value
            if only.lse.shape == self._q.shape[:3]:
                return _rounded(only, dtype)
        if self._finishes_in_triton():
            lse = torch.empty(self._shape[:3], dtype=self._dtype, device=self._q.device)
            result = State(empty_out(self._q, self._shape, dtype), lse)
            self.finish_into(result)
            return result
        total = self.total()
        if self.sinks is not None:
            total = add_sinks(total, self.sinks[:, None])
        return _rounded(total, dtype)

    def finish_into(self, result: State) -> None:
        """Writes the merged state, with the sinks, to `result`, which may be strided."""
        if self._finishes_in_triton():
            with self._streams.exclusive():
                total, parts = self._total, self._pending
                if not parts:
                    total, parts = None, [Part(self.total())]
                scores = None if self.sinks is None else self.sinks.contiguous()
                _triton().accumulate(total, parts, result.out.dtype, self._shape, result, scores)
                self._pending = []
            return
        state = self.finish(result.out.dtype)
        result.out.copy_(state.out)
        result.lse.copy_(state.lse)

    def _finishes_in_triton(self) -> bool:
        """Whether a kernel has something to merge, on a device that it runs on."""
        merges = self._result is None and (bool(self._pending) or self.sinks is not None)
        return merges and _use_triton(self._q)


class GradAccumulator:
    """Sums partial gradients, each covering some rows of some sequences of `like` [B, H, S, D].

    `parts` is as in `StateAccumulator`. With `one_call` a single call of a backend makes the whole sum, which a kernel
    may round itself. `memory` returns where kernels compute the sum: a tensor of the accumulation dtype with any
    content.
    """

    @classmethod
    def from_total(cls, total: Tensor, dtype: torch.dtype) -> GradAccumulator:
        """Returns an accumulator that holds a complete sum, to be rounded to `dtype`."""
        accumulator = cls(total.new_empty((), dtype=dtype).expand(total.shape))  # a shape without memory
        accumulator.add(total)
        return accumulator

    def __init__(
        self, like: Tensor, streams: StreamPair = SINGLE_STREAM, parts: int | None = None, *, one_call: bool = False,
        memory: Callable[[], Tensor] | None = None,
    ) -> None:  # fmt: skip
        self._like, self._streams, self._parts_left = like, streams, parts
        self.one_call, self._memory = one_call, memory
        self._total: Tensor | None = None
        self._given: Tensor | None = None
        self._pending: list[Part[Tensor]] = []

    def add(self, part: Tensor, row: int = 0, sequence: int = 0) -> None:
        """Adds a partial gradient of rows `row`, `row + 1`, ... of sequences `sequence`, `sequence + 1`, ..."""
        self._pending.append(Part(part, row, sequence))
        if self._parts_left is not None:
            self._parts_left -= 1
        if len(self._pending) > 1 and self._parts_left != 0 and len(self._pending) >= _max_pending(self._total):
            self.total()

    @property
    def shape(self) -> torch.Size:
        """The shape of the sum."""
        return self._like.shape

    @property
    def empty(self) -> bool:
        """Whether nothing has been added."""
        return self._total is None and not self._pending

    @property
    def in_memory(self) -> bool:
        """Whether the whole sum is in the memory that was given."""
        return self._total is not None and self._total is self._given and not self._pending

    def total(self, *, overwritten: bool = False) -> Tensor:
        """Returns the sum so far in the accumulation dtype; a kernel may add to it in place.

        An empty one is zero, or anything if it is `overwritten`.
        """
        dtype = accumulation_dtype(self._like.dtype)
        if self.empty and self._memory is not None:
            self._given = self._memory()
            self._total = self._given if overwritten else self._given.zero_()
        elif self.empty and overwritten:
            self._total = torch.empty(self._like.shape, dtype=dtype, device=self._like.device)
        elif self._pending or self._total is None:
            self._total = self._summed(dtype)
        return self._total

    def add_to(self, target: Tensor) -> None:
        """Adds the sum to `target` in place and resets this accumulator."""
        for group in (self._pending, [] if self._total is None else [Part(self._total)]):
            _sum_parts(target, group, target.dtype, target)
        self._total, self._pending = None, []

    def finish(self) -> Tensor:
        """Returns the sum in the dtype of `like`."""
        if self._total is None and len(self._pending) == 1 and self._pending[0].value.shape == self._like.shape:
            only = self._pending[0].value
            return only if only.dtype == self._like.dtype else only.to(self._like.dtype)
        return self._summed(self._like.dtype)

    def _summed(self, dtype: torch.dtype) -> Tensor:
        with self._streams.exclusive():
            summed = _sum_parts(self._total, self._pending, dtype, self._like)
            self._pending = []
        return summed


def merge_packed(parts: Tensor, sinks: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Returns `out` [B, H, T, D] in `dtype` over all keys of `parts` [N, H, B, T, D + 1], whose key sets are disjoint.

    The last column is the lse. Parts are merged in order: see `attnmesh.core.state.merge_sequential`. `sinks` [H] are
    scores of keys without a value.
    """
    if parts.is_cuda:
        return _triton().merge_packed(parts, sinks, dtype)  # type: ignore[no-any-return]
    out, lse = merge_sequential(parts)
    if sinks is not None:
        out = discount_sinks_batch_invariant(out, lse, sinks[:, None, None])
    return out.transpose(0, 1).to(dtype)


def _rounded(state: State, dtype: torch.dtype) -> State:
    return state if state.out.dtype == dtype else State(state.out.to(dtype), state.lse)


def _max_pending(total: object | None) -> int:
    return PENDING_PARTS if total is None else PENDING_PARTS_WITH_TOTAL


def _sum_parts(total: Tensor | None, parts: Sequence[Part[Tensor]], dtype: torch.dtype, like: Tensor) -> Tensor:
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
    for part in parts:
        _covered(total, part.value.shape, part)[:] += part.value
    return total.to(dtype)


def _merge_parts(total: State | None, parts: Sequence[Part[State]], dtype: torch.dtype, shape: torch.Size) -> State:
    if _use_triton(parts[0].value.lse):
        merged: State = _triton().accumulate(total, parts, dtype, shape)
        return merged
    if total is None:
        out = parts[0].value.out
        total = identity(shape, accumulation_dtype(out.dtype), out.device)
    for part in parts:
        shape = part.value.lse.shape
        merge_into(State(_covered(total.out, shape, part), _covered(total.lse, shape, part)), part.value)
    return State(total.out.to(dtype), total.lse)


def _covered(x: Tensor, shape: torch.Size, part: Part[Any]) -> Tensor:
    """The view of `x` [B, H, S, ...] that a part of `shape` [b, H, s, ...] covers."""
    return x[part.sequence : part.sequence + shape[0], :, part.row : part.row + shape[2]]


def empty_out(q: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """An `out` [B, H, S, D] with rows before heads where q has them so: what follows attention reads it row by row."""
    batch, heads, rows, width = shape
    if q.stride(1) < q.stride(2):
        return torch.empty(batch, rows, heads, width, dtype=dtype, device=q.device).transpose(1, 2)
    return torch.empty(shape, dtype=dtype, device=q.device)


def new_state(q: Tensor, width: int, dtype: torch.dtype) -> State:
    """Memory for the state of q [B, H, S, D] and values of a width: `out` in `dtype`, `lse` in float32."""
    shape = q.shape[:3]
    out = empty_out(q, torch.Size((*shape, width)), dtype)
    return State(out, torch.empty(shape, dtype=torch.float32, device=q.device))


def _use_triton(x: Tensor) -> bool:
    return x.is_cuda and accumulation_dtype(x.dtype) == torch.float32


def _triton() -> Any:
    return require("attnmesh.ops.triton_merge", extra="triton")


# The public `merge`: a Triton kernel on CUDA where nothing is differentiated, torch elsewhere.

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
    """Everything that the checks and the kernel depend on; None if it cannot be known."""
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
