"""What a block may be made of and called with: ValueError with names and values, before anything is exchanged."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import Comm, SharedValues, check_on_all_ranks, propagate_failure
from attnmesh.core.validation import check_count
from attnmesh.kv_cache.prepare import ProjectedKV, prepare
from attnmesh.kv_cache.sharded import ShardedCache, Step
from attnmesh.ops.block.config import AttentionConfig, AttentionWeights
from attnmesh.ops.block.stages import rms_norm
from attnmesh.ops.decode.api import check_backend
from attnmesh.ops.decode.call import MAX_DECODE_TOKENS
from attnmesh.ops.storage import PLAIN
from attnmesh.parallel.decode.core import Cp, ShardAttention
from attnmesh.parallel.decode.exchange import Exchange, Kvdp
from attnmesh.parallel.decode.ranks import DecodeRanks, decode_ranks, whole_comm
from attnmesh.plan.decode import DecodeShape, DecodeSharding, KvRows

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


def check_weights(settings: Settings, weights: AttentionWeights, rank: int) -> SharedValues:
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
) -> SharedValues:  # fmt: skip
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
    if step.tokens > MAX_DECODE_TOKENS:
        raise ValueError(f"a block takes 1 to {MAX_DECODE_TOKENS} new tokens a sequence, got {step.tokens}")
    _check_cache(settings, cache, rank, weight)
    cache.check_step(step, layer, written=not update_cache)
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


_BY_DEFAULT = Exchange()


class AttentionBlock:
    """One layer's attention over a spread KV cache. All ranks make it, and call it, alike.

    `weights` are this rank's (`AttentionWeights.shard`, `attention_from_transformers`). `comm` is a comm or a process
    group with its ranks in the sharding's order, or a DeviceMesh with dimensions named tp, cp and kvdp, in any order:
    `decode_rank` says which rank's weights a process must have.

    `kv_rows="own"` projects K and V for the rank's own sequences only: fewer operations, one more launch; "auto" does
    so where it pays. `split_size` makes the bits of attention over given queries and keys independent of the batch and
    of `cp` (projections and the sum over ranks have an order of their own); the interleave must be a multiple of it,
    and it a multiple of the cache's block_size. `backend` is as for `paged_decode_attention`.
    """

    def __init__(
        self,
        config: AttentionConfig,
        weights: AttentionWeights,
        sharding: DecodeSharding,
        comm: Comm | ProcessGroup | DeviceMesh | None = None,
        *,
        exchange: Exchange = _BY_DEFAULT,
        kv_rows: KvRows = "auto",
        split_size: int | None = None,
        backend: str = "auto",
    ) -> None:
        everyone = whole_comm(comm)
        settings = Settings(config, sharding, exchange, kv_rows, split_size, backend)

        def check_arguments() -> tuple[DecodeRanks, SharedValues]:
            settings.check()
            ranks = decode_ranks(comm, everyone, sharding)
            return ranks, check_weights(settings, weights, ranks.rank)

        # Anew: blocks of other layers have the same settings, but weights of their own.
        self._ranks = check_on_all_ranks(everyone, "AttentionBlock", check_arguments, force=True)
        self.rank = self._ranks.rank
        """This rank in the sharding's order; on a mesh that may be another than the process's."""
        self.config, self.weights, self.sharding = config, weights, sharding
        self._settings, self._exchange = settings, exchange

        heads = config.q_heads
        projected = sharding.replicated_q_heads if exchange.replicate_q else sharding.q_heads
        self._q_width = len(projected(self.rank, heads)) * config.head_dim
        peers = sharding.kvdp_peers(self.rank)
        self._heads_in = tuple(len(projected(peer, heads)) for peer in peers)
        self._heads_out = tuple(len(sharding.q_heads(peer, heads)) for peer in peers)
        cp_heads = tuple(len(sharding.cp_heads(peer, heads)) for peer in sharding.cp_peers(self.rank))
        self._cp = Cp(self._ranks.cp, cp_heads)
        group = sharding.group_heads(self.rank, heads)
        sinks = None if weights.sinks is None else weights.sinks[group.start : group.stop]
        self._attend = ShardAttention(sharding, self._cp, config.scale, config.window, sinks, split_size, backend)

    def make_cache(
        self, *, batch: int, num_blocks: int, block_size: int, max_length: int, layers: int = 1,
        storage: str | None = None, k_scale: float | Tensor | None = None, v_scale: float | Tensor | None = None,
    ) -> ShardedCache:  # fmt: skip
        """A cache for blocks like this one. `num_blocks` is a rank's; `storage` is by default the weights'.

        The scales are fp8's, of the whole model: a number, [] or [kv_heads].
        """
        weight, config = self.weights.qkv, self.config
        plain = {dtype: name for name, dtype in PLAIN.items()}
        if storage is None and weight.dtype not in plain:
            raise ValueError(f"storage must be given: nothing stores plain {weight.dtype}, which the weights have")
        return ShardedCache(
            self.sharding, self.rank, batch=batch, layers=layers, num_blocks=num_blocks, block_size=block_size,
            kv_heads=config.kv_heads, head_dim=config.head_dim, max_length=max_length, device=weight.device,
            storage=plain[weight.dtype] if storage is None else storage, k_scale=k_scale, v_scale=v_scale,
        )  # fmt: skip

    @torch.no_grad()
    def __call__(
        self, x: Tensor, cache: ShardedCache, step: Step, *, layer: int = 0, update_cache: bool = True
    ) -> Tensor:
        """Attention for the step's new tokens: x [batch, S, hidden], S = 1..8, to [batch, S, hidden] on every rank.

        Rows that are not in the step are skipped, and come back as the output bias (or 0). Without an output projection
        the result is the attention of this rank's query heads, [batch, q, S, head_dim]. The new keys and values are
        written first; `update_cache=False` says that they are there already.
        """

        def check_arguments() -> tuple[None, SharedValues]:
            weight = self.weights.qkv
            return None, check_call(self._settings, weight, self.rank, x, cache, step, layer, update_cache)

        check_on_all_ranks(self._ranks, "AttentionBlock call", check_arguments)
        with propagate_failure(self._ranks), torch.autocast(x.device.type, enabled=False):
            out = self._attended(x, cache, step, layer, update_cache)
        if update_cache:  # not before: after a failure, a step that is written again is whole
            cache.mark_written(step, layer)
        return out

    def _attended(self, x: Tensor, cache: ShardedCache, step: Step, layer: int, update_cache: bool) -> Tensor:
        """The call, once its arguments are known to be right."""
        trade_in, trade_out = self._trades(len(x))
        message = self._projected(x, cache, step, layer, update_cache, trade_in.parts)
        q = trade_in.gather_heads(message, step.tokens, self.config.head_dim)
        if not self._exchange.replicate_q:
            q = self._cp.gather_heads(q)
        out = self._attend(q, cache, step, layer, self._exchange.combine(self.sharding, self._shape(x), x.device.type))
        return self._returned(trade_out.scatter_heads(out))

    def _shape(self, x: Tensor) -> DecodeShape:
        batch, tokens, hidden = x.shape
        config = self.config
        return DecodeShape(
            batch, tokens, config.q_heads, config.kv_heads, config.head_dim, hidden, itemsize=x.element_size()
        )

    def _trades(self, batch: int) -> tuple[Kvdp, Kvdp]:
        """KVDP in and out. The heads differ where queries are replicated."""
        rows = tuple(len(self.sharding.sequences(peer, batch)) for peer in self.sharding.kvdp_peers(self.rank))
        comm, way = self._ranks.kvdp, self._exchange.kvdp
        return Kvdp(comm, rows, self._heads_in, way), Kvdp(comm, rows, self._heads_out, way)

    def _projected(
        self, x: Tensor, cache: ShardedCache, step: Step, layer: int, update_cache: bool, parts: int
    ) -> Tensor:
        """The queries of all sequences as a message, once the new keys and values are in the cache."""
        weights = self.weights
        if self.config.norm is not None:
            x = rms_norm(x, weights.norm, self.config.norm)
        q, kv = self._q_and_kv(x, cache.rows)
        new = None
        if update_cache:
            new = ProjectedKV(kv, cache.rows, step.slots, cache.keys(layer), cache.values(layer))
        return prepare(q, step.positions, new, self.config, weights, parts)

    def _q_and_kv(self, x: Tensor, own: range) -> tuple[Tensor, Tensor]:
        """Q of all rows, and K and V of all or of the own ones."""
        weight, bias, width = self.weights.qkv, self.weights.qkv_bias, self._q_width
        kv_rows = self._settings.kv_rows
        if kv_rows == "auto":
            spared = (len(x) - len(own)) * x.shape[1]
            from attnmesh.planner.auto import own_rows_pay
            from attnmesh.planner.catalog import default_cluster

            device = default_cluster(x.device.type).device
            pays = own_rows_pay(spared, (len(weight) - width) * weight.shape[1], device)
            kv_rows = "own" if pays else "all"
        if kv_rows == "all":
            q, kv = F.linear(x, weight, bias).tensor_split([width], -1)
            return q, kv
        q_bias, kv_bias = (None, None) if bias is None else (bias[:width], bias[width:])
        return F.linear(x, weight[:width], q_bias), F.linear(x[own.start : own.stop], weight[width:], kv_bias)

    def _returned(self, out: Tensor) -> Tensor:
        """Out [B, S, q, D] of the own heads through the output projection, summed over all ranks."""
        weights = self.weights
        if weights.out is None:
            return out.transpose(1, 2)
        part = F.linear(out.flatten(2), weights.out, weights.out_bias)
        return part if self.sharding.ranks == 1 else self._ranks.all_ranks.all_reduce(part, reuse=True)
