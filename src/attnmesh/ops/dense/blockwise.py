"""One call on a device of its own, block by block where that is faster.

torch's fused kernels take a call's blocks one by one, and each ends with a wave of tiles that does not fill the device.
On CUDA the blocks take two lanes in turn, the longest first, so that short ones fill the gaps at the end. Triton's
kernels serve all blocks in one launch, and the CPU has nothing to overlap: there a call stays whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attnmesh.ops.accumulate import GradSum, StateSum
from attnmesh.ops.dense.aten import Aten
from attnmesh.ops.dense.call import Backend, Call, Grads, Result
from attnmesh.ops.dense.choose import choose_fused, fused_for_backward
from attnmesh.ops.lanes import ONE_LANE, Lanes
from attnmesh.plan.blocks import Block, Kind, Visibility
from attnmesh.state import State


def forward(call: Call, backend: str, *, lanes_allowed: bool) -> State:
    """The state of the call's rows, `out` in the dtype of q. Lanes are for a stream that no other rank uses."""
    serving = choose_fused(call, backend)
    parts = _parts(call, serving, lanes_allowed)
    lanes, count = _lanes(parts)
    total = StateSum(call.q, lanes, count)
    for part in parts:
        with lanes.lane():
            serving.forward(part, total)
    lanes.join()
    return total.finish(call.q.dtype)


def backward(
    call: Call, result: Result, backend: str, wanted: Sequence[Tensor | None], *, lanes_allowed: bool
) -> Grads:
    """The sums of dq, dk and dv, finished by the caller, on whose stream they are complete.

    `wanted` is what to differentiate for: q, k and v, or None where nobody asked. One of them may have more rows than
    the call's own; the rows beyond get a gradient of zero.
    """
    serving = fused_for_backward(call, result, backend)
    parts = _parts(call, serving, lanes_allowed)
    lanes, count = _lanes(parts)
    grads = Grads(*(None if x is None else GradSum(x, lanes, count) for x in wanted))
    for part in parts:
        with lanes.lane():
            serving.backward(part, result, grads)
    lanes.join()
    return grads


def _parts(call: Call, backend: Backend, lanes_allowed: bool) -> list[Call]:
    """The call as it is, or a call for each block where they are to take lanes."""
    if not (lanes_allowed and _gains_by_lanes(call, backend)):
        return [call]
    blocks = sorted(call.sight.blocks, key=_work, reverse=True)
    return [replace(call, sight=_OneOf(call.sight, block)) for block in blocks]


def _gains_by_lanes(call: Call, backend: Backend) -> bool:
    return call.q.is_cuda and isinstance(backend, Aten) and len(call.sight.blocks) > 1


def _lanes(parts: Sequence[Call]) -> tuple[Lanes, int | None]:
    """Two lanes for parts of one block each, and how many parts the sums will get."""
    return (Lanes(enabled=True), len(parts)) if len(parts) > 1 else (ONE_LANE, None)


def _work(block: Block) -> int:
    pairs = len(block.q) * len(block.k)
    return pairs // 2 if block.kind is Kind.CAUSAL else pairs


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
