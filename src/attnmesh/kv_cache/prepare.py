"""`ProjectedTokens`: the keys and values of one step, on their way to the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attnmesh.core.optional import require
from attnmesh.kv_cache.pools import write_tokens
from attnmesh.ops.block.config import AttentionConfig, AttentionWeights
from attnmesh.ops.block.stages import keys_and_values, queries
from attnmesh.ops.storage import Stored, values_of


@dataclass(frozen=True, eq=False)
class ProjectedTokens:
    """What of the new tokens goes to this rank's cache, and where to.

    `kv` is projected K, then V: [B, T, 2*kv*D] of all rows of the batch, or [len(own), T, 2*kv*D] of the rows `own`
    alone. Only those are written, to `slots` int64 [len(own), T] of the pools [num_blocks, block_size, kv, D]; slots
    below 0 are skipped.
    """

    kv: Tensor
    own: range
    slots: Tensor
    keys: Stored
    values: Stored

    @property
    def first(self) -> int:
        """The row of `kv` that is the first own one."""
        return 0 if len(self.kv) == len(self.own) else self.own.start


def prepare(
    q: Tensor, positions: Tensor, new: ProjectedTokens | None, config: AttentionConfig, weights: AttentionWeights,
    parts: int,
) -> Tensor:  # fmt: skip
    """Queries from q [B, T, q*D] as the flat message, in q's dtype; the new keys and values are written on the way.

    Positions are integers [B, T]. A position below 0 marks a row that nobody reads: what the message holds there is
    anything. Keys are rounded to their projection's dtype, then stored as `write_tokens` would. On a GPU it is one
    kernel. Without `new`, nothing is written.
    """
    _check(q, positions, new, config, parts)
    if q.is_cuda:
        message: Tensor = _triton().prepare(q, positions, new, config, weights, parts)
        return message
    if new is not None:
        _write(new, positions, config, weights)
    return _message(queries(q, positions, config, weights), parts)


def _write(new: ProjectedTokens, positions: Tensor, config: AttentionConfig, weights: AttentionWeights) -> None:
    kv = new.kv[new.first : new.first + len(new.own)]
    k, v = keys_and_values(kv, positions[new.own.start : new.own.stop], config, weights)
    write_tokens(new.keys, new.values, new.slots, k, v)


def _message(q: Tensor, parts: int) -> Tensor:
    batch = len(q)
    by_part = [q[batch * part // parts : batch * (part + 1) // parts] for part in range(parts)]
    return torch.cat([rows.transpose(0, 1).flatten() for rows in by_part])


def _check(q: Tensor, positions: Tensor, new: ProjectedTokens | None, config: AttentionConfig, parts: int) -> None:
    if q.ndim != 3 or q.shape[-1] % config.head_dim:
        raise ValueError(f"q must be [B, T, heads * {config.head_dim}], got {list(q.shape)}")
    if q.is_cuda and q.dtype == torch.float64:
        raise ValueError(f"float64 is computed on the CPU only, got q on {q.device}")
    if positions.shape != q.shape[:2]:
        raise ValueError(f"positions must be {list(q.shape[:2])}, as q has it, got {list(positions.shape)}")
    if parts < 1:
        raise ValueError(f"parts must be a positive integer, got {parts!r}")
    if new is None:
        return
    batch, tokens = positions.shape
    own, pool = new.own, values_of(new.keys)
    if not 0 <= own.start <= own.stop <= batch or own.step != 1:
        raise ValueError(f"own must be a run of the {batch} rows of the batch, got {own}")
    width = 2 * pool.shape[2] * config.head_dim
    if len(new.kv) not in (batch, len(own)) or new.kv.shape[1:] != (tokens, width):
        raise ValueError(
            f"kv must be [{batch} or {len(own)}, {tokens}, {width}]: all rows or the own ones, and keys and values of "
            f"the pool's {pool.shape[2]} heads; got {list(new.kv.shape)}"
        )
    if new.slots.shape != (len(own), tokens):
        raise ValueError(f"slots must be [{len(own)}, {tokens}], got {list(new.slots.shape)}")


def _triton() -> Any:
    return require("attnmesh.kv_cache.triton_write", extra="triton")
