"""A forward pass that keeps what it reads: what Transformers takes for a cache, and where new tokens go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.core import ranges
from attnmesh.core.masks import Causal, Mask, SlidingWindow
from attnmesh.core.merge import unpack_state
from attnmesh.core.ranges import Ranges
from attnmesh.core.state import accumulation_dtype
from attnmesh.integrations.transformers_attention import ShardedPass
from attnmesh.kv_cache.cache import BlockCache
from attnmesh.kv_cache.pools import write_tokens
from attnmesh.ops.decode.api import paged_decode_attention
from attnmesh.ops.dense.api import attention_state
from attnmesh.ops.merge import merge_packed
from attnmesh.parallel.context import ContextParallel
from attnmesh.parallel.decode.positions import Held


@dataclass(frozen=True)
class CachePass:
    """Keys and values of new tokens go to `slots` [B, T] of this rank's cache; -1 where another rank keeps them."""

    cache: BlockCache
    slots: Tensor

    is_compileable: ClassVar[bool] = False  # as Transformers asks

    def update(self, key: Tensor, value: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Keep keys and values [B, Hkv, T, D]. Attention gets those of this pass, and knows where the others are."""
        write_tokens(self.cache.keys(layer), self.cache.values(layer), self.slots, key, value)
        return key, value

    def get_mask_sizes(self, query_length: int, layer: int = 0) -> tuple[int, int]:
        """Of a mask that nobody makes."""
        return query_length, 0

    def get_query_offset(self, layer: int = 0) -> int:
        """Of the same mask."""
        return 0

    def get_seq_length(self, layer: int = 0) -> int:
        """Nothing that Transformers need count on: positions come with every pass."""
        return 0


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
        paged_decode_attention(
            q, *pools, cur_pos=self.cur_pos, scale=scale, key_range=key_range, into=unpack_state(packed)
        )
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


Run = Callable[[SteppingPass, Tensor, Tensor], Tensor]


class StepGraphs:
    """The graphs of a model's steps. The first step of a shape runs as it is, to compile; the second is captured."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._graphs: dict[torch.Size, _StepGraph | None] = {}

    def __call__(self, how: SteppingPass, ids: Tensor, positions: Tensor) -> Tensor:
        """What `run` gives for a step; the tensor is good until the next."""
        if ids.shape not in self._graphs:
            self._graphs[ids.shape] = None
            return self._run(how, ids, positions)
        graph = self._graphs[ids.shape]
        if graph is None:
            graph = self._graphs[ids.shape] = _StepGraph(self._run, how, ids, positions)
        return graph(how, ids, positions)


class _StepGraph:
    def __init__(self, run: Run, how: SteppingPass, ids: Tensor, positions: Tensor) -> None:
        self._inputs = [x.clone() for x in _changing(how, ids, positions)]
        slots, table, cur_pos, own_ids, own_positions = self._inputs
        fixed = replace(how, slots=slots, table=table, cur_pos=cur_pos)
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(ids.device)
        with torch.cuda.graph(self._graph):
            self._logits = run(fixed, own_ids, own_positions)

    def __call__(self, how: SteppingPass, ids: Tensor, positions: Tensor) -> Tensor:
        for own, given in zip(self._inputs, _changing(how, ids, positions), strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._logits


def _changing(how: SteppingPass, ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    return how.slots, how.table, how.cur_pos, ids, positions
