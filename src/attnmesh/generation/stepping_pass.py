"""The same few new tokens of some sequences on every rank, which all of them compute.

Each rank attends over what it holds of every sequence, and merges everybody's states in the same order: all go on with
the same bits. A new token is kept by the rank whose turn it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.core.masks import Causal, Mask, SlidingWindow
from attnmesh.core.state import accumulation_dtype
from attnmesh.generation.cache_pass import CachePass
from attnmesh.generation.held import Held
from attnmesh.ops.decode.api import paged_decode_attention
from attnmesh.ops.merge import merge_packed, state_in


@dataclass(frozen=True)
class SteppingPass(CachePass):
    """`positions[b]` are those of sequence b's new tokens, `held[b]` all that this rank holds of it, with the new."""

    comm: Comm
    table: Tensor  # int32 [B, blocks]
    cur_pos: Tensor  # int32 [B]: the last token that is held here
    positions: Sequence[range]
    held: Sequence[Held]
    _sights: dict[int | None, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Out of the new tokens over all that was read, the same on every rank."""
        if not isinstance(mask, (Causal, SlidingWindow)):
            raise ValueError(f"mask must be Causal() or SlidingWindow(), got {mask!r}")
        window = mask.left + 1 if isinstance(mask, SlidingWindow) else None
        pools = self.cache.keys(layer), self.cache.values(layer), self.table
        comm = self.comm
        if comm.world == 1:
            return paged_decode_attention(q, *pools, cur_pos=self.cur_pos, scale=scale, window=window, sinks=sinks)
        batch, heads, tokens, dim = q.shape
        mine = (heads, batch, tokens, dim + 1)
        packed = q.new_empty(mine, dtype=accumulation_dtype(q.dtype))
        # One token without a window sees all that a rank holds, and the kernel need not be told.
        key_range = None if tokens == 1 and window is None else self._key_range(window)
        paged_decode_attention(q, *pools, cur_pos=self.cur_pos, scale=scale, key_range=key_range, into=state_in(packed))
        everybodys = comm.buffer((comm.world, *mine), dtype=packed.dtype, device=q.device)
        comm.all_gather(packed, [mine] * comm.world, into=everybodys)
        return merge_packed(everybodys, sinks, q.dtype)

    def _key_range(self, window: int | None) -> tuple[Tensor, Tensor]:
        """The interval of the tokens held here that each new one sees: the same in all layers of a window."""
        if window not in self._sights:
            pairs = list(zip(self.held, self.positions, strict=True))
            end = [[held.below(p + 1) for p in new] for held, new in pairs]
            first = [[0 if window is None else held.below(p + 1 - window) for p in new] for held, new in pairs]
            both = torch.tensor([first, end], dtype=torch.int32).to(self.slots.device, non_blocking=True)
            self._sights[window] = (both[0], both[1])
        return self._sights[window]
