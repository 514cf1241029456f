"""What layers with a sliding window keep of a sequence: the window before each position where it may be continued.

    0 ................ mark ................ length          window + margin before each is kept
             [---------)            [---------)

Those positions are the end, and `marks` where a later prompt may part from this one: the end of the prompt, and where
earlier prompts have parted from it. With the margin, a prompt may also part somewhat before a mark, and drafts may be
rejected. No ranks and no blocks here: all ranks have the same `KeptPositions`, and store those that are theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from attnmesh.core import ranges
from attnmesh.core.ranges import Ranges
from attnmesh.parallel.decode.positions import LocalPositions

MARGIN = 512
"""Tokens before a window that are kept, too: a later prompt may differ in as many tokens at its end."""

_MAX_MARKS = 2


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """The window of each layer, the token itself included; None for layers that attend to all tokens."""
    layers, window = int(config.num_hidden_layers), getattr(config, "sliding_window", None)
    if window is None or getattr(config, "use_sliding_window", None) is False:
        return (None,) * layers
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


@dataclass(frozen=True)
class KeptPositions:
    """The positions of a sequence of `length` tokens that layers with a `window` still have."""

    window: int
    margin: int
    length: int = 0
    ranges: Ranges = ()
    marks: tuple[int, ...] = ()

    def grown(self, length: int) -> KeptPositions:
        """After more tokens, up to `length`."""
        held = ranges.merged((*self.ranges, range(self.length, length)))
        return replace(self, length=length, ranges=ranges.intersection(held, self._wanted(length, self.marks)))

    def truncated(self, length: int) -> KeptPositions:
        """After truncation to `length` tokens."""
        marks = tuple(mark for mark in self.marks if mark <= length)
        return replace(self, length=length, ranges=ranges.intersection(self.ranges, (range(length),)), marks=marks)

    def marked(self, marks: Sequence[int]) -> KeptPositions:
        """With more marks, which may be beyond the length; the latest ones count."""
        latest = tuple(sorted({*self.marks, *(mark for mark in marks if mark)}))[-_MAX_MARKS:]
        return replace(self, marks=latest, ranges=ranges.intersection(self.ranges, self._wanted(self.length, latest)))

    def reusable(self, prefix: int) -> int:
        """The longest prefix, of at most `prefix` tokens, after which other tokens can follow."""
        ends = [(run.start, min(prefix, run.stop)) for run in self.ranges]
        return max((end for start, end in ends if start == 0 or end - self.window + 1 >= start), default=0)

    def count(self, local: LocalPositions) -> int:
        """The number of kept positions among those that a rank stores."""
        return sum(local.count_below(run.stop) - local.count_below(run.start) for run in self.ranges)

    def blocks(self, local: LocalPositions, block_size: int) -> set[int]:
        """The indices of the blocks of a rank that have a kept position."""
        kept: set[int] = set()
        for run in self.ranges:
            first, end = local.count_below(run.start), local.count_below(run.stop)
            if end > first:
                kept.update(range(first // block_size, (end - 1) // block_size + 1))
        return kept

    def _wanted(self, length: int, marks: Sequence[int]) -> Ranges:
        kept = (range(max(0, end - self.window - self.margin), min(end, length)) for end in (*marks, length))
        return ranges.merged(kept)


def max_window_blocks(window: int, margin: int, block_size: int) -> int:
    """The most blocks of one sequence on a rank, however its positions are sharded.

    During a pass these are the windows of all marks, and those at its begin and end. Each has at most two blocks that
    it fills in part. What has left a window is freed once per block.
    """
    return (_MAX_MARKS + 2) * (-(-(window + margin) // block_size) + 2)
