"""What a block may be made of and called with: ValueError with names and values, before anything is exchanged."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import get_args

from torch import Tensor

from attnmesh.kv_cache.sharded import ShardedCache
from attnmesh.kv_cache.step import Step
from attnmesh.ops.block.config import AttentionConfig
from attnmesh.ops.block.weights import AttentionWeights
from attnmesh.ops.decode.call import MOST_TOKENS
from attnmesh.ops.decode.choose import check_backend
from attnmesh.ops.storage import PLAIN
from attnmesh.parallel.agreement import Facts, check_count
from attnmesh.parallel.decode.exchange import Exchange
from attnmesh.plan.decode import DecodeSharding
from attnmesh.planner.auto import KvRows

_TENSORS = [field.name for field in fields(AttentionWeights) if field.name != "out_bias"]  # that one is rank 0's alone


@dataclass(frozen=True)
class Settings:
    """What all ranks of a block have in common."""

    config: AttentionConfig
    sharding: DecodeSharding
    exchange: Exchange
    kv_rows: KvRows
    split_size: int | None
    backend: str

    def check(self) -> None:
        """Refuse what does not fit together."""
        for name, kind in (("config", AttentionConfig), ("sharding", DecodeSharding), ("exchange", Exchange)):
            if not isinstance(getattr(self, name), kind):
                raise ValueError(f"{name} must be of type {kind.__name__}, got {type(getattr(self, name)).__name__}")
        self.sharding.check_heads(self.config.q_heads, self.config.kv_heads)
        check_backend(self.backend)
        if self.kv_rows not in get_args(KvRows):
            raise ValueError(f"kv_rows must be one of {', '.join(get_args(KvRows))}, got {self.kv_rows!r}")
        if self.split_size is None:
            return
        check_count("split_size", self.split_size, least=1)
        interleave = self.sharding.interleave
        if self.sharding.cp > 1 and interleave % self.split_size:
            raise ValueError(
                f"the sharding's interleave must be a multiple of split_size, or ranks would cut splits: got "
                f"interleave={interleave} and split_size={self.split_size}"
            )
        if self.exchange.cp not in ("auto", "all_to_all"):
            raise ValueError(
                f"split_size merges pieces, which all_to_all brings: exchange.cp must be that or auto, got "
                f"{self.exchange.cp!r}"
            )


def check_weights(settings: Settings, weights: AttentionWeights, rank: int) -> Facts:
    """Refuse weights that are not this rank's; what must be equal on all ranks."""
    if not isinstance(weights, AttentionWeights):
        raise ValueError(f"weights must be AttentionWeights, got {type(weights).__name__}")
    weights.check(settings.config, settings.sharding, rank, replicate_q=settings.exchange.replicate_q)
    return {
        "config": settings.config, "sharding": repr(settings.sharding), "exchange": settings.exchange,
        "kv_rows": settings.kv_rows, "split_size": settings.split_size, "dtype": weights.qkv.dtype,
        "device": weights.qkv.device.type, "backend": settings.backend,
        "tensors": [name for name in _TENSORS if getattr(weights, name) is not None],
    }  # fmt: skip


def check_call(
    settings: Settings, weight: Tensor, rank: int, x: Tensor, cache: ShardedCache, step: Step, layer: int,
    update_cache: bool,
) -> Facts:  # fmt: skip
    """Refuse a call that this rank cannot serve; what must be equal on all ranks."""
    if not isinstance(cache, ShardedCache) or not isinstance(step, Step):
        raise ValueError(
            f"cache must be a ShardedCache and step what its append returned, got {type(cache).__name__} and "
            f"{type(step).__name__}"
        )
    shape = (cache.batch, step.tokens, settings.config.hidden)
    if not isinstance(x, Tensor) or tuple(x.shape) != shape:
        said = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must be [batch, tokens, hidden] = {list(shape)}, got {said}")
    if x.dtype != weight.dtype or x.device != weight.device:
        raise ValueError(
            f"x must have the weights' dtype and device, {weight.dtype} on {weight.device}, got {x.dtype} on {x.device}"
        )
    if step.tokens > MOST_TOKENS:
        raise ValueError(f"a block takes 1 to {MOST_TOKENS} new tokens a sequence, got {step.tokens}")
    _check_cache(settings, cache, rank, weight)
    cache.check_current(step, layer, written=not update_cache)
    return {
        "x": x.shape, "layer": layer, "update_cache": update_cache, "block_size": cache.block_size,
        "num_blocks": cache.num_blocks, "max_length": cache.max_length, "storage": cache.storage,
        "device": x.device.type,
    }  # fmt: skip


def _check_cache(settings: Settings, cache: ShardedCache, rank: int, weight: Tensor) -> None:
    config, sharding = settings.config, settings.sharding
    if (cache.sharding, cache.rank) != (sharding, rank):
        raise ValueError(
            f"the cache is that of rank {cache.rank} under {cache.sharding!r}, the block is rank {rank}'s under "
            f"{sharding!r}"
        )
    held = (cache.kv_heads, cache.head_dim, cache.value_dim)
    if held != (config.kv_heads, config.head_dim, config.head_dim):
        raise ValueError(
            f"the cache must be for {config.kv_heads} kv heads of {config.head_dim}, got {held[0]} heads of {held[1]} "
            f"with values of {held[2]}"
        )
    if cache.block_table.device != weight.device:
        raise ValueError(f"the cache must be where the weights are, {weight.device}, got {cache.block_table.device}")
    dtype = PLAIN.get(cache.storage)
    if dtype is not None and dtype != weight.dtype:
        raise ValueError(f"a plain cache must have the weights' dtype, {weight.dtype}, got storage={cache.storage!r}")
    if settings.split_size is not None and settings.split_size % cache.block_size:
        raise ValueError(
            f"split_size must be a multiple of the cache's block_size, got split_size={settings.split_size} and "
            f"block_size={cache.block_size}"
        )
