"""Estimates by which backends are chosen, and the rows that share a mask.

On CUDA, torch's kernels are the fastest per visible pair, but they take one launch per block, and each block returns a
partial result that is merged: many small blocks leave the device idle. One Triton launch serves all blocks.
On the CPU, torch's flash kernel was faster than matrix products under every mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from attnmesh.ops.dense.call import Call
from attnmesh.plan.blocks import Block, Kind, Patch, Visibility

# Of a forward on an H200 with bf16, 32 query heads and head_dim 128. Only their ratios matter for the choice.
_ATEN_FLOPS, _TRITON_FLOPS = 600e12, 480e12
_LAUNCH = 10e-6  # seconds of a launch that does nothing
_BANDWIDTH = 4e12
_MERGE_BYTES = 24  # per element of a partial out: what blocks of 1,024 to 8,192 rows cost beyond their FLOPs
_TILE_ROWS = 128  # of one program: a block with few programs does not fill the device


@dataclass(frozen=True)
class Estimate:
    """The number of blocks, and seconds of the forward on either backend."""

    blocks: int
    aten: float
    triton: float

    def __str__(self) -> str:
        aten, triton = 1e6 * self.aten, 1e6 * self.triton
        return f"about {aten:.0f} us in {self.blocks} launches of torch's kernels, {triton:.0f} us in Triton's"


def estimate(call: Call) -> Estimate:
    """The estimate for a call on CUDA whose blocks are all FULL or CAUSAL."""
    batch, heads, _, width = call.q.shape
    return _estimate(call.visibility, batch, heads, width, call.v.shape[3], call.q.device)  # type: ignore[arg-type]


@lru_cache(maxsize=128)
def _estimate(
    visibility: Visibility, batch: int, heads: int, width: int, value_width: int, device: torch.device
) -> Estimate:
    blocks = visibility.blocks
    flops = 2 * (width + value_width) * heads  # per pair of one sequence
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    pairs, aten = 0, 0.0
    for block in blocks:
        sequences = batch if block.sequences is None else len(block.sequences)
        programs = sequences * heads * -(-len(block.q) // _TILE_ROWS)
        count = _pairs(block) * sequences
        pairs += count
        merged = _MERGE_BYTES * sequences * heads * len(block.q) * value_width
        aten += _LAUNCH + count * flops / (_ATEN_FLOPS * min(1.0, programs / processors)) + merged / _BANDWIDTH
    return Estimate(len(blocks), aten, _LAUNCH + pairs * flops / _TRITON_FLOPS)


def _pairs(block: Block) -> int:
    """The visible pairs of a FULL or CAUSAL block in one sequence."""
    return len(block.q) * (len(block.q) + 1) // 2 if block.kind is Kind.CAUSAL else len(block.q) * len(block.k)


def described(call: Call) -> str:
    """The visible pairs and blocks of a call, as far as the host knows them."""
    visibility, count = call.visibility, len(call.visibility.blocks)
    blocks = f"{count} block{'' if count == 1 else 's'}"
    if not isinstance(visibility, Patch):
        return blocks
    pairs = visibility.pairs * (call.q.shape[0] if visibility.mask.sequences is None else 1)
    return f"{pairs:,} visible pairs in {blocks}"


def strip_rows(first: Tensor, end: Tensor, heads: int, call: int) -> int:
    """How many rows of a block should share one mask: 256, 128 or 64.

    Row i sees keys first[i] <= j < end[i]. More rows compute more scores that no row sees, fewer make more calls. A
    call costs as much as `call` scores; `heads` counts all sequences.
    """

    def cost(rows: int) -> int:
        last = torch.cat([end[rows - 1 :: rows], end[-1:]])[: -(-len(end) // rows)]
        keys = (last - first[::rows]).clamp(min=0)
        return int(keys.sum()) * rows * heads + int((keys > 0).sum()) * call

    return min((256, 128, 64), key=cost)
