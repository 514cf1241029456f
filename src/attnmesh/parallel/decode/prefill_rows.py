"""`PrefillRows`: the rows of a batch that a prefill step has, and the chunks of tokens that it is computed in.

A decode step computes all rows of the batch, which keeps shapes fixed. In a prefill step that would be most of the
work: it usually has one sequence. So rows that are not in the step are left out, and each KVDP rank attends for as many
rows as it stores of the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.kv_cache.sharded import ShardedCache, Step
from attnmesh.parallel.decode.exchange import HeadExchange

_CHUNK_TOKENS = 8192  # of all rows: products are as fast as they get, and activations take tens of megabytes


@dataclass(frozen=True)
class PrefillRows:
    """The rows of a step in ascending order: n in all, `counts[d]` of KVDP rank d, and `own` of this rank among them.

    `positions` are [n, T]. Of this rank's rows there are the `slots` [own, T] and the `block_table`, and the positions
    `begins` of their first new tokens.
    """

    index: Tensor
    counts: tuple[int, ...]
    own: range
    begins: list[int]
    positions: Tensor
    slots: Tensor
    block_table: Tensor
    whole: bool  # whether these are all rows of the batch

    @classmethod
    def of(cls, step: Step, cache: ShardedCache) -> PrefillRows:
        """The rows of a step that is the latest of its cache."""
        sequences = sorted(step.sequences, key=lambda sequence: sequence.row)
        kvdp_ranks = [sequence.kvdp_rank for sequence in sequences]
        me = cache.sharding.place(cache.rank).kvdp
        own = range(kvdp_ranks.index(me), kvdp_ranks.index(me) + kvdp_ranks.count(me)) if me in kvdp_ranks else range(0)
        stored = sequences[own.start : own.stop]
        rows = [sequence.row for sequence in sequences]
        index = torch.tensor(rows, device=step.positions.device)
        local = index[own.start : own.stop] - cache.rows.start
        return cls(
            index, tuple(kvdp_ranks.count(peer) for peer in range(cache.sharding.kvdp)), own,
            [sequence.length - step.tokens for sequence in stored], step.positions[index], step.slots[local],
            cache.block_table[local], len(rows) == cache.batch,
        )  # fmt: skip

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Slices of the new tokens, about `_CHUNK_TOKENS` of all rows together."""
        size = max(1, _CHUNK_TOKENS // len(self.index))
        for start in range(0, tokens, size):
            yield slice(start, min(start + size, tokens))

    def select(self, x: Tensor, chunk: slice) -> Tensor:
        """Some tokens of these rows of x [batch, T, hidden]."""
        return x[:, chunk] if self.whole else x[self.index, chunk]

    def by_rank(self, buffer: Tensor, exchange: HeadExchange, tokens: int, dim: int) -> Tensor:
        """A buffer [q, n, tokens, dim] as `exchange` sends it: the rows of each KVDP rank contiguous."""
        if exchange.parts == 1:
            return buffer
        q = buffer.view(-1, len(self.index), tokens, dim)
        return torch.cat([part.reshape(-1) for part in q.split(self.counts, 1)])
