"""Calls on a device of their own, side by side where that is faster.

torch's fused kernels end with a wave of tiles that does not fill the device. On CUDA, runs of queries that need nothing
of each other therefore take two lanes in turn, the longest first, so that short ones fill the gaps; each lane finishes
its own rows. In the backward all blocks add to the same keys, and blocks take lanes. Triton's kernels serve
everything in one launch, and the CPU has nothing to overlap: there a call stays whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from attnmesh.core import ranges
from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.dense.api import choose_fused, choose_fused_backward
from attnmesh.ops.dense.aten import Aten
from attnmesh.ops.dense.call import Backend, Call, Grads, Result, kernel_span
from attnmesh.ops.merge import GradAccumulator, StateAccumulator
from attnmesh.ops.streams import SINGLE_STREAM, StreamPair
from attnmesh.plan.blocks import Block, Kind, Patch, Visibility
from attnmesh.trace.recorder import Recorder


def forward(calls: Sequence[Call], backend: str, *, allow_two_streams: bool, recorder: Recorder | None = None) -> State:
    """The states of the calls' rows, one call after another. Lanes are for a stream that no other rank uses."""
    served = [(call, choose_fused(call, backend)) for call in calls]
    on_two_streams = allow_two_streams and _gain_by_two_streams(served)
    if on_two_streams:
        served = [(run, serving) for call, serving in served for run in _by_run(call, alone=len(calls) == 1)]
    if not served:  # no queries at all
        return State.identity(calls[0].q.shape, dtype=accumulation_dtype(calls[0].q.dtype), device=calls[0].q.device)
    if len(served) == 1:
        call, serving = served[0]
        total = StateAccumulator(call.q)
        with kernel_span(recorder, "attention", serving, call):
            serving.forward(call, total)
        return total.finish(call.q.dtype)
    streams = StreamPair(enabled=True) if on_two_streams else SINGLE_STREAM
    whole = _room_for([call.q for call, _ in served])
    ends = accumulate(call.q.shape[2] for call, _ in served)
    work = zip(served, ends, strict=True)
    for (call, serving), end in sorted(work, key=lambda item: _work(item[0][0]), reverse=True):
        rows = slice(end - call.q.shape[2], end)
        with streams.next_stream():
            total = StateAccumulator(call.q, parts=len(call.visibility.blocks) if on_two_streams else None)
            with kernel_span(recorder, "attention", serving, call):
                serving.forward(call, total)
            total.finish_into(State(whole.out[:, :, rows], whole.lse[:, :, rows]))
    streams.join()
    return whole


def backward(
    calls: Sequence[Call],
    result: Result,
    backend: str,
    wanted: Sequence[Tensor | None],
    *,
    allow_two_streams: bool,
    recorder: Recorder | None = None,
) -> tuple[list[GradAccumulator], Grads]:
    """The sums of every call's dq, and those of dk and dv over all calls; complete on the caller's stream.

    `result` covers the calls' rows, one call after another, and the keys of all calls begin with the same key.
    `wanted` is what to differentiate for: q, k and v, or None where nobody asked. The keys may have more rows than the
    calls see; these get a gradient of zero.
    """
    results = list(_parted(result, calls))
    served = [(call, choose_fused_backward(call, part, backend)) for call, part in zip(calls, results, strict=True)]
    for (call, serving), part in zip(served, results, strict=True):
        serving.prepare(call, part)
    on_two_streams = allow_two_streams and _gain_by_two_streams(served)
    streams = StreamPair(enabled=True) if on_two_streams else SINGLE_STREAM
    blocks = sum(len(call.visibility.blocks) for call in calls) if on_two_streams else None
    keys = [None if x is None else GradAccumulator(x, streams, blocks) for x in wanted[1:]]
    queries: list[GradAccumulator] = []
    work = []
    for (call, serving), part in zip(served, results, strict=True):
        query = GradAccumulator(call.q, streams, len(call.visibility.blocks) if on_two_streams else None)
        queries.append(query)
        grads = Grads(query if wanted[0] is not None else None, *keys)
        work += [(block, part, serving, grads) for block in (_blocks(call) if on_two_streams else [call])]
    for call, part, serving, grads in sorted(work, key=lambda item: _work(item[0]), reverse=True):
        with streams.next_stream(), kernel_span(recorder, "attention backward", serving, call):
            serving.backward(call, part, grads)
    streams.join()
    return queries, Grads(None, *keys)


def _gain_by_two_streams(served: Sequence[tuple[Call, Backend]]) -> bool:
    return bool(served) and all(call.q.is_cuda and isinstance(serving, Aten) for call, serving in served)


def _by_run(call: Call, *, alone: bool) -> Iterator[Call]:
    """A call for each run of queries, with only the keys it sees."""
    assert isinstance(call.visibility, Patch)
    for rows, keys, visibility in _runs(call.visibility, alone):
        q, k, v = call.q[:, :, rows], call.k[:, :, keys], call.v[:, :, keys]
        yield Call(q, k, v, visibility, call.scale)


@lru_cache(maxsize=128)
def _runs(visibility: Patch, alone: bool) -> tuple[tuple[slice, slice, Patch], ...]:
    """Rows, keys and patch of every run of queries. One run `alone` is halved: it has two lanes."""
    runs = visibility.q
    if alone and len(runs) == 1 and len(visibility.blocks) > 1:
        half = len(runs[0]) // 2
        runs = (runs[0][:half], runs[0][half:])
    found, row = [], 0
    for run in runs:
        seen = Patch(visibility.mask, (run,), visibility.k).seen
        patch = Patch(visibility.mask, (run,), ranges.narrow(visibility.k, seen))
        found.append((slice(row, row + len(run)), slice(seen.start, seen.stop), patch))
        row += len(run)
    if any(block.kind is Kind.PARTIAL for _, _, patch in found for block in patch.blocks):
        # Torch's kernels serve the patch as a whole, but not when it is cut: many tiny documents.
        return ((slice(None), slice(None), visibility),)
    return tuple(found)


def _blocks(call: Call) -> Iterator[Call]:
    """A call for each block."""
    for block in call.visibility.blocks:
        yield replace(call, visibility=_OneOf(call.visibility, block))


def _parted(result: Result, calls: Sequence[Call]) -> Iterator[Result]:
    """What belongs to each call's rows."""
    if len(calls) == 1:
        yield result
        return
    row = 0
    for call in calls:
        rows = slice(row, row + call.q.shape[2])
        grad_lse = None if result.grad_lse is None else result.grad_lse[:, :, rows]
        yield Result(result.out[:, :, rows], result.lse[:, :, rows], result.grad_out[:, :, rows], grad_lse)
        row = rows.stop


def _room_for(queries: Sequence[Tensor]) -> State:
    batch, heads, _, head_dim = queries[0].shape
    rows = sum(q.shape[2] for q in queries)
    dtype = queries[0].dtype
    return State(
        torch.empty(batch, heads, rows, head_dim, dtype=dtype, device=queries[0].device),
        torch.empty(batch, heads, rows, dtype=accumulation_dtype(dtype), device=queries[0].device),
    )


def _work(call: Call) -> int:
    def pairs(block: Block) -> int:
        return len(block.q) * len(block.k) // (2 if block.kind is Kind.CAUSAL else 1)

    return sum(map(pairs, call.visibility.blocks))


@dataclass(frozen=True)
class _OneOf:
    """What one block holds of a visibility. The bounds stay those of all: kernels look at them within the block."""

    whole: Visibility
    block: Block

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (self.block,)

    def bounds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return self.whole.bounds(device)
