"""Several calls on one device, on two CUDA streams where that is faster.

torch's fused kernels end with a wave of tiles that does not fill the device. On CUDA, independent runs of queries
therefore use two streams in turn, the longest first, so that short ones fill the gaps; each stream finishes its own
rows. In the backward all blocks add to the same keys, and single blocks use the streams in turn. Triton's kernels serve
everything in one launch, and the CPU has nothing to overlap: there a call is not divided.
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
from attnmesh.core.visibility import Block, Kind, Patch, Visibility
from attnmesh.ops.dense.aten import Aten
from attnmesh.ops.dense.call import Backend, Call, Grads, Result, kernel_span
from attnmesh.ops.dense.dispatch import choose_fused, choose_fused_backward
from attnmesh.ops.merge import SINGLE_STREAM, GradAccumulator, StateAccumulator, StreamPair
from attnmesh.trace.timeline import Recorder


def forward(
    calls: Sequence[Call],
    backend: str,
    *,
    allow_two_streams: bool,
    recorder: Recorder | None = None,
    sinks: Tensor | None = None,
) -> State:
    """The states of the rows of all calls, concatenated. Allow two streams only if no other rank uses this device.

    `sinks` [Hq] are merged into every row.
    """
    assigned = [(call, choose_fused(call, backend)) for call in calls]
    on_two_streams = allow_two_streams and _use_two_streams(assigned)
    if on_two_streams:
        assigned = [(run, chosen) for call, chosen in assigned for run in _by_run(call, alone=len(calls) == 1)]
    if not assigned:  # no queries
        return _empty_state_for(calls)
    if len(assigned) == 1:
        call, chosen = assigned[0]
        total = StateAccumulator(call.q, call.v.shape[3], sinks=sinks, last_call=True)
        with kernel_span(recorder, "attention", chosen, call):
            chosen.forward(call, total)
        return total.finish(call.q.dtype)
    streams = StreamPair(enabled=True) if on_two_streams else SINGLE_STREAM
    whole = _empty_state_for([call for call, _ in assigned])
    ends = accumulate(call.q.shape[2] for call, _ in assigned)
    work = zip(assigned, ends, strict=True)
    for (call, chosen), end in sorted(work, key=lambda item: _work(item[0][0]), reverse=True):
        rows = slice(end - call.q.shape[2], end)
        with streams.next_stream():
            parts = len(call.visibility.blocks) if on_two_streams else None
            total = StateAccumulator(call.q, call.v.shape[3], parts=parts, sinks=sinks, last_call=True)
            with kernel_span(recorder, "attention", chosen, call):
                chosen.forward(call, total)
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
    """The dq of every call, and dk and dv summed over all calls; complete on the caller's stream.

    `result` covers the rows of all calls, concatenated; the keys of all calls begin with the same key. `wanted` is q, k
    and v, or None for gradients that are not needed. Keys that no call reads get a gradient of zero.
    """
    results = list(_split_rows(result, calls))
    assigned = [(call, choose_fused_backward(call, part, backend)) for call, part in zip(calls, results, strict=True)]
    for (call, chosen), part in zip(assigned, results, strict=True):
        chosen.prepare(call, part)
    on_two_streams = allow_two_streams and _use_two_streams(assigned)
    streams = StreamPair(enabled=True) if on_two_streams else SINGLE_STREAM
    blocks = sum(len(call.visibility.blocks) for call in calls) if on_two_streams else None
    keys = [None if x is None else GradAccumulator(x, streams, blocks) for x in wanted[1:]]
    queries: list[GradAccumulator] = []
    work = []
    for (call, chosen), part in zip(assigned, results, strict=True):
        query = GradAccumulator(call.q, streams, len(call.visibility.blocks) if on_two_streams else None)
        queries.append(query)
        grads = Grads(query if wanted[0] is not None else None, *keys)
        work += [(block, part, chosen, grads) for block in (_blocks(call) if on_two_streams else [call])]
    for call, part, chosen, grads in sorted(work, key=lambda item: _work(item[0]), reverse=True):
        with streams.next_stream(), kernel_span(recorder, "attention backward", chosen, call):
            chosen.backward(call, part, grads)
    streams.join()
    return queries, Grads(None, *keys)


def _use_two_streams(assigned: Sequence[tuple[Call, Backend]]) -> bool:
    return bool(assigned) and all(call.q.is_cuda and isinstance(chosen, Aten) for call, chosen in assigned)


def _by_run(call: Call, *, alone: bool) -> Iterator[Call]:
    """One call per run of queries, with only the keys that it reads."""
    assert isinstance(call.visibility, Patch)
    for rows, keys, visibility in _runs(call.visibility, alone):
        q, k, v = call.q[:, :, rows], call.k[:, :, keys], call.v[:, :, keys]
        yield Call(q, k, v, visibility, call.scores)


@lru_cache(maxsize=128)
def _runs(visibility: Patch, alone: bool) -> tuple[tuple[slice, slice, Patch], ...]:
    """Rows, keys and visibility of every run of queries. A run that is `alone` is halved, one half per stream."""
    runs = visibility.q
    if alone and len(runs) == 1 and len(visibility.blocks) > 1:
        half = len(runs[0]) // 2
        runs = (runs[0][:half], runs[0][half:])
    parts, row = [], 0
    for run in runs:
        seen = ranges.hull(Patch(visibility.mask, (run,), visibility.k).seen)
        patch = Patch(visibility.mask, (run,), ranges.narrow(visibility.k, seen))
        parts.append((slice(row, row + len(run)), slice(seen.start, seen.stop), patch))
        row += len(run)
    if any(block.kind is Kind.PARTIAL for _, _, patch in parts for block in patch.blocks):
        # torch's kernels serve the whole but not its parts: many tiny documents.
        return ((slice(None), slice(None), visibility),)
    return tuple(parts)


def _blocks(call: Call) -> Iterator[Call]:
    """One call per block."""
    for block in call.visibility.blocks:
        yield replace(call, visibility=_SingleBlock(call.visibility, block))


def _split_rows(result: Result, calls: Sequence[Call]) -> Iterator[Result]:
    """The part of the result that belongs to the rows of each call."""
    if len(calls) == 1:
        yield result
        return
    row = 0
    for call in calls:
        rows = slice(row, row + call.q.shape[2])
        grad_lse = None if result.grad_lse is None else result.grad_lse[:, :, rows]
        yield Result(result.out[:, :, rows], result.lse[:, :, rows], result.grad_out[:, :, rows], grad_lse)
        row = rows.stop


def _empty_state_for(calls: Sequence[Call]) -> State:
    """Memory for the rows of all calls."""
    q, v = calls[0].q, calls[0].v
    rows = sum(call.q.shape[2] for call in calls)
    return State(
        torch.empty(*q.shape[:2], rows, v.shape[3], dtype=q.dtype, device=q.device),
        torch.empty(*q.shape[:2], rows, dtype=accumulation_dtype(q.dtype), device=q.device),
    )


def _work(call: Call) -> int:
    def pairs(block: Block) -> int:
        return len(block.q) * len(block.k) // (2 if block.kind is Kind.CAUSAL else 1)

    return sum(map(pairs, call.visibility.blocks))


@dataclass(frozen=True)
class _SingleBlock:
    """One block of a visibility. It has the bounds of the whole visibility: kernels read them within the block."""

    whole: Visibility
    block: Block

    @property
    def blocks(self) -> tuple[Block, ...]:
        return (self.block,)

    def bounds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return self.whole.bounds(device)

    def unseen(self, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
        return self.whole.unseen(device)

    def positions(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return self.whole.positions(device)
