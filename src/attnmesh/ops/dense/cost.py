"""Estimates by which backends are chosen on CUDA, and the rows that share a mask.

torch's kernels take one launch per block, and each block returns a partial result that is merged: many small blocks
leave the device idle. One launch of a kernel of our own, Gluon on Hopper or Triton, serves all blocks.
On the CPU, torch's flash kernel was faster than matrix products under every mask.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.visibility import Block, Kind, Patch, Visibility
from attnmesh.ops.dense.call import Call


class Rates(NamedTuple):
    """TFLOP/s on visible pairs of each backend; 0 where it does not serve the widths."""

    aten: float
    triton: float
    gluon: float


# By the widths of keys and values, then by the number of positions: bf16, causal, `python -m benchmarks.dense` on one
# H200. Other shapes have the rates of the nearest one. Only their ratios matter for the choice.
_FORWARD: dict[tuple[int, int], dict[int, Rates]] = {
    (64, 64): {8192: Rates(411, 366, 435)},
    (128, 128): {
        2048: Rates(386, 323, 536),
        8192: Rates(533, 463, 623),
        32768: Rates(594, 504, 631),
        131072: Rates(542, 492, 617),
    },
    (192, 128): {8192: Rates(0, 434, 623)},
    (256, 256): {8192: Rates(270, 499, 621)},  # aten: FlashAttention-2, as in the backward
    (576, 512): {8192: Rates(0, 202, 603)},  # gluon: values that are features of the keys
}
_BACKWARD: dict[tuple[int, int], dict[int, Rates]] = {
    (64, 64): {8192: Rates(390, 244, 450)},
    (128, 128): {2048: Rates(322, 192, 355), 8192: Rates(478, 324, 497), 32768: Rates(535, 378, 521)},
    (192, 128): {8192: Rates(0, 296, 446)},
    (256, 256): {8192: Rates(234, 201, 380)},
    (576, 512): {8192: Rates(0, 51, 467)},  # gluon: products of cuBLAS
}
_GLUON_WIDTHS = (64, 96, 128, 192, 256)  # of its tiles: other head dims take the next width
_SHORT = 512  # queries and keys
_SHORT_FLOPS = 1e10  # with masked pairs; 50 us in Triton's kernel
_LAUNCH = 10e-6  # seconds of a launch that does nothing
_BANDWIDTH = 4e12
_MERGE_BYTES = 24  # per element of a partial out: what blocks of 1,024 to 8,192 rows cost beyond their FLOPs
_TILE_ROWS = 128  # of one program: a block with few programs does not fill the device
_LABELS = {"aten": "torch's kernels", "triton": "Triton's kernel", "gluon": "Gluon's kernel"}


@dataclass(frozen=True)
class Estimate:
    """The number of blocks, and the seconds of each backend."""

    blocks: int
    seconds: Mapping[str, float]

    @property
    def fastest(self) -> str:
        """The backend that takes the least time."""
        return min(self.seconds, key=lambda name: self.seconds[name])

    def __str__(self) -> str:
        ordered = sorted(self.seconds.items(), key=lambda item: item[1])
        launches = f"in {self.blocks} launch{'' if self.blocks == 1 else 'es'} of "
        return "about " + ", ".join(
            f"{1e6 * seconds:.0f} us {launches if name == 'aten' else 'in '}{_LABELS[name]}"
            for name, seconds in ordered
        )


def estimate(call: Call, backends: Collection[str], *, backward: bool = False) -> Estimate:
    """The estimate for a call on CUDA, by some of "aten", "triton" and "gluon".

    The blocks must be FULL or CAUSAL, with "aten".
    """
    batch, heads, _, width = call.q.shape
    shape = (batch, heads, width, call.v.shape[3])
    return _estimate(call.visibility, shape, call.q.device, tuple(backends), backward)  # type: ignore[arg-type]


def is_short(call: Call) -> bool:
    """Whether one launch computes all gradients (`triton_backward.short_gradients`).

    Launches cost more than the time that faster kernels save.
    """
    batch, heads, rows, width = call.q.shape
    keys, value_width = call.k.shape[2], call.v.shape[3]
    if not (0 < rows <= _SHORT and 0 < keys <= _SHORT and batch and width <= 128 and value_width <= 128):
        return False
    return 2 * (3 * width + 2 * value_width) * batch * heads * rows * keys <= _SHORT_FLOPS


def rates(width: int, value_width: int, length: int, *, backward: bool) -> Rates:
    """The rates of the nearest shape that was measured."""
    table = _BACKWARD if backward else _FORWARD
    lengths = table[min(table, key=lambda at: (abs(at[0] - width) + abs(at[1] - value_width), at))]
    return lengths[min(lengths, key=lambda at: (max(at, length) / max(1, min(at, length)), -at))]


@lru_cache(maxsize=256)
def _estimate(
    visibility: Visibility, shape: tuple[int, int, int, int], device: torch.device, backends: tuple[str, ...],
    backward: bool,
) -> Estimate:  # fmt: skip
    batch, heads, width, value_width = shape
    blocks = visibility.blocks
    columns = 3 * width + 2 * value_width if backward else width + value_width
    flops = 2 * columns * heads  # per pair of one sequence
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    length = max((block.q.stop for block in blocks), default=0)
    if not any(block.kind is Kind.CAUSAL for block in blocks):
        length *= 2  # rates are measured for causal calls, in which the processors with few keys wait for the others
    speed = rates(width, value_width, length, backward=backward)
    padded = sum(next((tile for tile in _GLUON_WIDTHS if tile >= d), d) for d in (width, value_width))
    speed = speed._replace(gluon=speed.gluon * (width + value_width) / padded)
    pairs, aten = 0, 0.0
    for block in blocks:
        sequences = batch if block.sequences is None else len(block.sequences)
        programs = sequences * heads * -(-len(block.q) // _TILE_ROWS)
        count = _pairs(block) * sequences
        pairs += count
        aten += _LAUNCH + count * flops / (1e12 * (speed.aten or 1.0) * min(1.0, programs / processors))
        if len(blocks) > 1:
            aten += _MERGE_BYTES * sequences * heads * len(block.q) * value_width / _BANDWIDTH
    one_launch = {
        name: _LAUNCH + pairs * flops / (1e12 * (rate or 1.0)) for name, rate in speed._asdict().items()
    }  # fmt: skip
    seconds = one_launch | {"aten": aten}
    return Estimate(len(blocks), {name: seconds[name] for name in backends})


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
