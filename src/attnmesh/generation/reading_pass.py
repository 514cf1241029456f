"""A stretch of a prompt, every rank its layout's part of it.

With nothing read before, its attention is that of context parallelism. Otherwise queries travel: every rank attends for
all of them over what it holds, and the states go back to be merged. That costs bytes by the length of the stretch and
not of what was read: a question about a long document moves little. Keys and values stay where they were computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.core import ranges
from attnmesh.core.masks import Mask
from attnmesh.core.ranges import Ranges
from attnmesh.generation.cache_pass import CachePass
from attnmesh.integrations.transformers_attention import ShardedPass
from attnmesh.ops.dense.api import attention_state
from attnmesh.ops.packed import merge_packed
from attnmesh.parallel.context import ContextParallel


@dataclass(frozen=True)
class ReadingPass(CachePass):
    """`length` tokens of one sequence from `begin` on.

    `parts[r]` are the positions of rank r's tokens; `held` are those of this rank so far, these included, and `blocks`
    their blocks.
    """

    ranks: ContextParallel
    parts: Sequence[Ranges]
    begin: int
    length: int
    held: Ranges
    blocks: Tensor

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Out of this rank's queries over all that was read, this stretch included."""
        if self.begin == 0:
            spread = ShardedPass(self.ranks, self.length)
            return spread.attend(layer, q, k, v, mask=mask, scale=scale, sinks=sinks)
        comm, (_, heads, _, dim) = self.ranks.comm, q.shape
        rows = [ranges.size(part) for part in self.parts]
        queries = comm.all_gather(q.contiguous(), [(1, heads, n, dim) for n in rows])
        keys, values = (self._tokens(pool) for pool in (self.cache.keys(layer), self.cache.values(layer)))
        states = [self._state(x, part, keys, values, mask, scale) for x, part in zip(queries, self.parts, strict=True)]
        mine = (heads, 1, rows[comm.rank], dim + 1)
        arrived = comm.buffer((comm.world, *mine), dtype=states[0].dtype, device=q.device)
        comm.all_to_all(states, [mine] * comm.world, into=arrived)
        return merge_packed(arrived, sinks, q.dtype)

    def _tokens(self, pool: object) -> Tensor:
        """What this rank holds of the sequence, [1, Hkv, n, D], one copy out of its blocks."""
        assert isinstance(pool, Tensor)
        return pool[self.blocks].flatten(0, 1)[: ranges.size(self.held)].transpose(0, 1).unsqueeze(0)

    def _state(self, q: Tensor, at: Ranges, k: Tensor, v: Tensor, mask: Mask, scale: float) -> Tensor:
        """The state of some rank's queries over what this one holds, packed to travel: [H, 1, n, D + 1]."""
        state = attention_state(
            q, k, v, mask=mask, scale=scale, q_positions=ranges.as_tensor(at), k_positions=ranges.as_tensor(self.held)
        )
        return torch.cat([state.out, state.lse.unsqueeze(-1)], -1).transpose(0, 1).contiguous()
