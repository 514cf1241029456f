"""The prefill steps of an `AttentionBlock`: `PrefillRows`, their rows and chunks, and `by_heads`, their first tokens.

A decode step computes all rows of the batch, which keeps shapes fixed. In a prefill step that would be most of the
work: it usually has one sequence. So rows that are not in the step are left out.

Tokens after cached ones attend where their sequence is stored, as in a decode step. The first tokens of a sequence need
no cache: every rank has projected their keys and values for its kv heads, and attends for its own query heads. Nothing
is sent, and under KVDP all ranks share the work on a single sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.masks import Mask
from attnmesh.core.visibility import Patch
from attnmesh.kv_cache.sharded import ShardedCache, Step
from attnmesh.ops.block.norm_rope import CosSin
from attnmesh.ops.dense.call import Call, resolve_scores
from attnmesh.ops.dense.dispatch import forward
from attnmesh.ops.paged import prefill_mask
from attnmesh.parallel.decode.exchange import HeadExchange

_CHUNK_TOKENS = 8192  # of all rows: products are as fast as they get, and activations take tens of megabytes


class StepTokens(NamedTuple):
    """The tokens that a block computes at a time, of a decode step or of a chunk of a prefill.

    `x` [n, T, hidden] and `positions` [n, T]. Of its rows, this rank stores `own`, and writes their K and V to `slots`
    [own, T], unless there are none. `cos_sin` [n, T, ...] replace the values of the positions.
    """

    x: Tensor
    positions: Tensor
    own: range
    slots: Tensor | None
    cos_sin: CosSin | None


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
    fresh: bool  # whether no row, of any rank, has tokens before this step

    @classmethod
    def of(cls, step: Step, cache: ShardedCache) -> PrefillRows:
        """The rows of a step that is the latest of its cache."""
        sequences = sorted(step.sequences, key=lambda sequence: sequence.row)
        kvdp_ranks = [sequence.kvdp_rank for sequence in sequences]
        me = cache.sharding.place(cache.rank).kvdp
        own = range(kvdp_ranks.index(me), kvdp_ranks.index(me) + kvdp_ranks.count(me)) if me in kvdp_ranks else range(0)
        stored = sequences[own.start : own.stop]
        rows = [sequence.row for sequence in sequences]
        index = torch.tensor(rows, device="cpu").to(step.positions.device, non_blocking=True)
        local = index[own.start : own.stop] - cache.rows.start
        return cls(
            index, tuple(kvdp_ranks.count(peer) for peer in range(cache.sharding.kvdp)), own,
            [sequence.length - step.tokens for sequence in stored], step.positions[index], step.slots[local],
            cache.block_table[local],
            all(sequence.length == step.tokens for sequence in sequences),
        )  # fmt: skip

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Slices of the new tokens, about `_CHUNK_TOKENS` of all rows together."""
        size = max(1, _CHUNK_TOKENS // len(self.index))
        for start in range(0, tokens, size):
            yield slice(start, min(start + size, tokens))

    def tokens(self, x: Tensor, cos_sin: CosSin | None, chunk: slice, *, write: bool) -> StepTokens:
        """A chunk of the tokens of these rows, from x [batch or n, T, hidden]."""
        slots = self.slots[:, chunk] if write and self.own else None
        angles = None if cos_sin is None else CosSin(*(each[self._rows_of(each), chunk] for each in cos_sin))
        return StepTokens(x[self._rows_of(x), chunk], self.positions[:, chunk], self.own, slots, angles)

    def put(self, x: Tensor, chunk: slice, new: Tensor) -> None:
        """Set a chunk of the tokens of these rows of x [batch or n, T, ...] to `new` [n, tokens, ...]."""
        x[self._rows_of(x), chunk] = new

    def _rows_of(self, x: Tensor) -> Tensor | slice:
        return slice(None) if len(x) == len(self.index) else self.index

    def by_rank(self, buffer: Tensor, exchange: HeadExchange, tokens: int, dim: int) -> Tensor:
        """A buffer [q, n, tokens, dim] as `exchange` sends it: the rows of each KVDP rank contiguous."""
        if exchange.parts == 1:
            return buffer
        q = buffer.view(-1, len(self.index), tokens, dim)
        return torch.cat([part.reshape(-1) for part in q.split(self.counts, 1)])


def by_heads(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, softcap: float | None, window: int | None,
    sinks: Tensor | None, alibi_slopes: Tensor | None,
) -> Tensor:  # fmt: skip
    """Causal attention of the first T tokens of sequences, [B, T, h, D]: q [B, h, T, D] over its kv heads' k and v."""
    scores = resolve_scores(q, scale, softcap, alibi_slopes)
    call = Call(q, k, v, _square(prefill_mask(window), q.shape[2]), scores)
    return forward(call, sinks, "auto").out.transpose(1, 2)


@lru_cache(maxsize=16)
def _square(mask: Mask, tokens: int) -> Patch:
    # Cached: every layer of a model uses the same, and a patch caches its blocks.
    return Patch(mask, (range(tokens),), (range(tokens),))


def kv_heads_of(x: Tensor, heads: range, per_kv: int, first: int) -> Tensor:
    """The kv heads that query heads attend to, from x [B, Hkv, T, D] of the kv heads from `first` on.

    Repeated where they serve unequal numbers of query heads.
    """
    used = [head // per_kv - first for head in heads]
    if len({used.count(head) for head in used}) == 1:  # the same number of query heads for each
        return x[:, used[0] : used[-1] + 1]
    return x[:, used]
