"""`AttentionBlock`: the attention of one layer over a KV cache that is sharded over ranks, in decode and prefill steps.

    X [B, T, hidden]                                    on every rank, all sequences
    RMSNorm, fused QKV projection                       this rank's query heads and kv heads
    RMSNorm of Q and K, RoPE, RMSNorm of Q and K
    quantize, cache update                              its sequences, its positions
    KVDP in                                             more heads, its sequences
    CP in                                               all heads of its kv heads
    attention                                           over its positions
    CP out                                              over all positions
    KVDP out                                            its query heads, all sequences
    output projection, all-reduce                       [B, T, hidden] on every rank

Every stage but the QKV projection and the attention is optional. New tokens are written before any rank attends: the
rank that owns a position stores it, and it is attended to there, once.

A step of more tokens than a decode kernel takes is a prefill (`PrefillRows`): the same stages for the rows of the step
alone, some tokens at a time, with the dense kernels of `attention` over the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import OBJECT, Comm, SharedValues, check_on_all_ranks, propagate_failure
from attnmesh.kv_cache.norm_rope_write import norm_rope_write
from attnmesh.kv_cache.pools import CacheSpec, as_stored
from attnmesh.kv_cache.sharded import ShardedCache, Step
from attnmesh.ops.block.config import AttentionConfig, AttentionWeights, ProjectedKV, keys_and_values
from attnmesh.ops.block.norm_rope import CosSin, rms_norm
from attnmesh.ops.decode.api import PagedStep, check_backend
from attnmesh.ops.decode.call import MAX_DECODE_TOKENS
from attnmesh.ops.paged import PagedKV
from attnmesh.ops.storage import PLAIN
from attnmesh.parallel.checksums import equal_values
from attnmesh.parallel.compiling import not_compiled
from attnmesh.parallel.decode.core import DecodeAttention, LocalKV, StateExchange
from attnmesh.parallel.decode.exchange import Exchange, HeadExchange
from attnmesh.parallel.decode.prefill import PrefillRows, StepTokens, by_heads, kv_heads_of
from attnmesh.parallel.decode.ranks import DecodeRanks, all_ranks_of, decode_ranks
from attnmesh.plan.decode import Combine, DecodeShape, DecodeSharding, KvRows
from attnmesh.utils.validation import check_bool, check_choice, check_count, check_tensor, check_type, shown

_DEFAULT_EXCHANGE = Exchange()
_OF_ALL_HEADS = ("sinks", "alibi_slopes")
_REPLICATED = [field.name for field in fields(AttentionWeights) if "norm" in field.name or field.name in _OF_ALL_HEADS]
_SHARED_WEIGHTS = [field.name for field in fields(AttentionWeights) if field.name != "out_bias"]  # only on rank 0


class AttentionBlock:
    """Attention of one layer over a sharded KV cache. All ranks must construct and call it with the same arguments.

    `weights` are the weights of this rank (`AttentionWeights.shard`, `attention_from_transformers`). `comm` is a comm
    or a process group with its ranks in the order of the sharding, or a DeviceMesh with dimensions named tp, cp and
    kvdp, in any order: `decode_rank` returns the rank whose weights a process needs.

    `kv_rows="own"` projects K and V for this rank's sequences only: less compute, one more launch; "auto" does so where
    it is faster. (The first tokens of a prefill need the K and V of all sequences.) `split_size` makes the bits of
    attention over given queries and keys independent of the batch and of `cp` (projections and the all-reduce have an
    order of their own). The interleave must be a multiple of it, and it a multiple of the cache's block_size. `backend`
    is as for `paged_decode_attention`, and for steps of up to 8 tokens.

    Examples:
        >>> config = am.decode.AttentionConfig(hidden=32, q_heads=4, kv_heads=2, head_dim=8)
        >>> weights = am.decode.AttentionWeights(qkv=torch.randn(8 * 8, 32) / 8, out=torch.randn(32, 4 * 8) / 8)
        >>> x = torch.randn(2, 5, 32)  # [batch, new tokens, hidden], the same on every rank
        >>> def rank(comm, sharding):
        ...     block = am.AttentionBlock(config, weights.shard(config, sharding, comm.rank), sharding, comm)
        ...     cache = block.make_cache(batch=2, num_blocks=8, block_size=4, max_length=8)
        ...     return block(x, cache, cache.append([cache.allocate(5) for _ in range(2)], 5))
        >>> one = am.run_virtual(1, lambda comm: rank(comm, am.DecodeSharding()))[0]
        >>> four = am.run_virtual(4, lambda comm: rank(comm, am.DecodeSharding(tp=2, kvdp=2)))[3]
        >>> one.shape, torch.allclose(one, four, atol=1e-4)
        (torch.Size([2, 5, 32]), True)
    """

    @not_compiled("an AttentionBlock is constructed outside of a compiled graph")
    def __init__(
        self,
        config: AttentionConfig,
        weights: AttentionWeights,
        sharding: DecodeSharding,
        comm: Comm | ProcessGroup | DeviceMesh | None = None,
        *,
        exchange: Exchange = _DEFAULT_EXCHANGE,
        kv_rows: KvRows = "auto",
        split_size: int | None = None,
        backend: str = "auto",
    ) -> None:
        all_ranks = all_ranks_of(comm, "comm")
        settings = _Settings(config, sharding, exchange, kv_rows, split_size, backend)

        def check_arguments() -> tuple[DecodeRanks, SharedValues]:
            settings.check()
            ranks = decode_ranks(comm, all_ranks, sharding)
            return ranks, _check_weights(settings, weights, ranks.rank)

        # Forced: blocks of other layers have the same settings, but other weights.
        self._ranks = check_on_all_ranks(all_ranks, "AttentionBlock", check_arguments, force=True)
        self.rank = self._ranks.rank
        """This rank in the order of the sharding, which may differ from the process rank on a mesh."""
        self.config, self.weights, self.sharding = config, weights, sharding
        self._number = all_ranks.log.number("AttentionBlock")
        self._settings, self._exchange = settings, exchange

        heads = config.q_heads
        projected = sharding.replicated_q_heads if exchange.replicate_q else sharding.q_heads
        self._q_width = len(projected(self.rank, heads)) * config.head_dim
        peers = sharding.kvdp_peers(self.rank)
        self._heads_in = tuple(len(projected(peer, heads)) for peer in peers)
        self._heads_out = tuple(len(sharding.q_heads(peer, heads)) for peer in peers)
        cp_heads = tuple(len(sharding.cp_heads(peer, heads)) for peer in sharding.cp_peers(self.rank))
        self._states = StateExchange(self._ranks.cp, cp_heads)
        sinks, slopes = self._of_heads(sharding.group_heads(self.rank, heads))
        self._attention = DecodeAttention(
            self._states, config.scale, config.window, sinks, split_size, sharding.interleave, backend, config.softcap,
            slopes,
        )  # fmt: skip

    def make_cache(
        self, *, batch: int, num_blocks: int, block_size: int, max_length: int, layers: int = 1,
        storage: str | None = None, k_scale: float | Tensor | None = None, v_scale: float | Tensor | None = None,
    ) -> ShardedCache:  # fmt: skip
        """A cache for `layers` such blocks. `num_blocks` is per rank, `storage` by default the weights' dtype.

        The scales are for fp8, of the whole model: a number, [] or [kv_heads].
        """
        weight, config = self.weights.qkv, self.config
        plain = {dtype: name for name, dtype in PLAIN.items()}
        if storage is None and weight.dtype not in plain:
            raise ValueError(f"storage must be given for weights of dtype {weight.dtype}, which no storage holds as is")
        spec = CacheSpec(
            layers=layers, kv_heads=config.kv_heads, head_dim=config.head_dim, k_scale=k_scale, v_scale=v_scale,
            storage=plain[weight.dtype] if storage is None else storage,
        )  # fmt: skip
        cache = ShardedCache(
            self.sharding, self.rank, spec, batch=batch, num_blocks=num_blocks, block_size=block_size,
            max_length=max_length, device=weight.device,
        )  # fmt: skip
        self._number_cache(cache)
        return cache

    @torch.no_grad()
    def __call__(
        self, x: Tensor, cache: ShardedCache, step: Step, *, layer: int = 0, update_cache: bool = True,
        cos_sin: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """Attention for the new tokens of a step: x [batch, T, hidden] to [batch, T, hidden] on every rank, any T.

        Up to 8 tokens per sequence are a decode step. More are computed as a prefill, in memory that does not grow with
        the cache nor, but for x and the result, with T. Rows that are not in the step are skipped, and return the
        output bias (or 0). The x of a prefill may leave them out: its rows, and the rows of the result, are then the
        rows of the step in ascending order. Without an output projection the result is the attention of this rank's
        query heads, [batch, q, T, head_dim]. The new keys and values are written first; with `update_cache=False` they
        must be written already.

        `cos_sin` are cosines and sines of the tokens of x, [batch, T, rope.dim / 2] each, instead of values that follow
        from their positions and the frequencies: computed once for all layers (`Rope.cos_sin`), or of another rotary
        embedding, such as one of several axes.
        """

        def check_arguments() -> tuple[None, SharedValues]:
            shared = _check_call(self._settings, self.weights.qkv, self.rank, x, cache, step, layer, update_cache)
            number: SharedValues = {OBJECT: self._number, "cache (numbered as ranks make or use it)": cache.number}
            return None, number | shared | _check_cos_sin(self.config, x, cos_sin)

        log = self._number_cache(cache).log if isinstance(cache, ShardedCache) else None
        check_on_all_ranks(self._ranks, "AttentionBlock call", check_arguments, state=log)
        with propagate_failure(self._ranks), torch.autocast(x.device.type, enabled=False):
            attend = self._decode if step.tokens <= MAX_DECODE_TOKENS else self._prefill
            out = attend(x, cache, step, layer, update_cache, None if cos_sin is None else CosSin(*cos_sin))
        if update_cache:  # only now: after a failure, the step can be written again
            cache.mark_written(step, layer)
        return out

    def _of_heads(self, heads: range) -> tuple[Tensor | None, Tensor | None]:
        """The sinks and the ALiBi slopes of some heads of the model."""
        sinks, slopes = (
            None if x is None else x[heads.start : heads.stop] for x in (self.weights.sinks, self.weights.alibi_slopes)
        )
        return sinks, slopes

    def _number_cache(self, cache: ShardedCache) -> ShardedCache:
        """The cache, with a number by which ranks compare which of several they use."""
        if cache.number is None:
            cache.number = self._ranks.all_ranks.log.number("ShardedCache")
        return cache

    def _decode(
        self, x: Tensor, cache: ShardedCache, step: Step, layer: int, update_cache: bool, cos_sin: CosSin | None
    ) -> Tensor:
        """A step of a few tokens, once its arguments are checked."""
        rows = tuple(len(self.sharding.sequences(peer, len(x))) for peer in self.sharding.kvdp_peers(self.rank))
        heads_in, heads_out = self._head_exchanges(rows)
        tokens = StepTokens(x, step.positions, cache.rows, step.slots if update_cache else None, cos_sin)
        buffer, _ = self._project(tokens, cache, layer, heads_in.parts, self._settings.kv_rows)
        q = self._gather_heads(heads_in, buffer, step.tokens)
        kv = LocalKV(
            cache.keys(layer), cache.values(layer), PagedStep(cache.block_table, step.cur_pos), step.key_range,
            positions=None if self.weights.alibi_slopes is None else _positions(cache, step),
        )  # fmt: skip
        out = self._attention(q, kv, self._combine(x))
        heads = heads_out.scatter_heads(out)
        return heads.transpose(1, 2) if self.weights.out is None else self._project_output(heads)

    def _prefill(
        self, x: Tensor, cache: ShardedCache, step: Step, layer: int, update_cache: bool, cos_sin: CosSin | None
    ) -> Tensor:
        """A step of many tokens, once its arguments are checked: the rows of the step, some tokens at a time.

        Tokens are written before later ones attend, so a chunk needs none of the chunks after it.
        """
        rows = PrefillRows.of(step, cache)
        result: Tensor | None = None
        for chunk in rows.chunks(step.tokens):
            tokens = rows.tokens(x, cos_sin, chunk, write=update_cache)
            heads = self._prefill_chunk(tokens, cache, layer, rows, chunk.start)
            out = F.pad(heads.flatten(0, 1), (0, 0, 0, 0, 0, 1))  # a token of zeros: for rows that are not in the step
            if self.weights.out is not None:
                out = self._project_output(out)
            if result is None:
                result = out[-1].expand(len(x), step.tokens, *out.shape[1:]).clone()
            rows.put(result, chunk, out[:-1].unflatten(0, heads.shape[:2]))
        assert result is not None  # a step has tokens
        return result if self.weights.out is not None else result.transpose(1, 2)

    def _prefill_chunk(
        self, tokens: StepTokens, cache: ShardedCache, layer: int, rows: PrefillRows, start: int
    ) -> Tensor:
        """The attention of this rank's query heads for tokens `start`, ... of a prefill, [rows, tokens, q, D]."""
        x, dim = tokens.x, self.config.head_dim
        sharded = self.sharding.kvdp * self.sharding.cp > 1
        if sharded and rows.fresh and start == 0 and not self._exchange.replicate_q:
            buffer, kv = self._project(tokens, cache, layer, 1, "all")
            return self._first_tokens(buffer.view(-1, *x.shape[:2], dim).transpose(0, 1), kv, tokens, cache, layer)
        buffer, _ = self._project(tokens, cache, layer, 1, self._settings.kv_rows)
        heads_in, heads_out = self._head_exchanges(rows.counts)
        q = self._gather_heads(heads_in, rows.by_rank(buffer, heads_in, x.shape[1], dim), x.shape[1])
        if rows.own:
            pools = PagedKV(cache.keys(layer), cache.values(layer), rows.block_table, shard=cache.local.layout.shard)
            out = self._attention.prefill(q, [begin + start for begin in rows.begins], pools, self._combine(x))
        else:  # nor have the ranks that would merge with this rank
            out = x.new_empty(0, sum(heads_out.heads), *q.shape[2:])
        return heads_out.scatter_heads(out)

    def _first_tokens(self, q: Tensor, kv: Tensor, tokens: StepTokens, cache: ShardedCache, layer: int) -> Tensor:
        """The attention of this rank's query heads [n, q, T, D] over the projected kv alone, [n, T, q, D]."""
        config = self.config
        own = self.sharding.q_heads(self.rank, config.q_heads)
        per_kv, first = config.q_heads // config.kv_heads, self.sharding.kv_heads(self.rank, config.kv_heads).start
        angles = tokens.positions if tokens.cos_sin is None else tokens.cos_sin
        both = keys_and_values(kv, angles, config, self.weights)
        pools = cache.keys(layer), cache.values(layer)
        k, v = (kv_heads_of(as_stored(pool, x), own, per_kv, first) for x, pool in zip(both, pools, strict=True))
        sinks, slopes = self._of_heads(own)
        return by_heads(
            q, k, v, scale=config.scale, softcap=config.softcap, window=config.window, sinks=sinks, alibi_slopes=slopes
        )

    def _gather_heads(self, heads_in: HeadExchange, buffer: Tensor, tokens: int) -> Tensor:
        """Queries of all heads that attend here, [B_own, H, T, D], from the send buffer."""
        q = heads_in.gather_heads(buffer, tokens, self.config.head_dim)
        return (q if self._exchange.replicate_q else self._states.gather_heads(q)).transpose(0, 1)

    def _combine(self, x: Tensor) -> Combine:
        if self._exchange.cp != "auto" or self.sharding.cp == 1 or self._settings.split_size is not None:
            return "all_to_all" if self._exchange.cp == "auto" else self._exchange.cp
        batch, tokens, hidden = x.shape
        config = self.config
        shape = DecodeShape(
            batch, tokens, config.q_heads, config.kv_heads, config.head_dim, hidden, itemsize=x.element_size()
        )
        return self._exchange.combine(self.sharding, shape, x.device.type)

    def _head_exchanges(self, rows: tuple[int, ...]) -> tuple[HeadExchange, HeadExchange]:
        """KVDP in and out, of `rows[d]` sequences of KVDP rank d. The heads differ where queries are replicated."""
        comm, collective = self._ranks.kvdp, self._exchange.kvdp
        heads_in, heads_out = self._heads_in, self._heads_out
        return HeadExchange(comm, rows, heads_in, collective), HeadExchange(comm, rows, heads_out, collective)

    def _project(
        self, tokens: StepTokens, cache: ShardedCache, layer: int, parts: int, kv_rows: KvRows
    ) -> tuple[Tensor, Tensor]:
        """The send buffer with the queries of all rows, and the projected K and V. Writes K and V of own rows."""
        weights, (x, positions, own, slots, cos_sin) = self.weights, tokens
        if self.config.norm is not None:
            x = rms_norm(x, weights.norm, self.config.norm)
        q, kv = self._project_qkv(x, own, kv_rows)
        new = None if slots is None else ProjectedKV(kv, own, slots, cache.keys(layer), cache.values(layer))
        return norm_rope_write(q, positions, new, self.config, weights, parts, cos_sin), kv

    def _project_qkv(self, x: Tensor, own: range, kv_rows: KvRows) -> tuple[Tensor, Tensor]:
        """Q of all rows, and K and V of all rows or of this rank's."""
        weight, bias, width = self.weights.qkv, self.weights.qkv_bias, self._q_width
        if kv_rows == "auto":
            kv_rows = _faster_kv_rows(
                (len(x) - len(own)) * x.shape[1], (len(weight) - width) * weight.shape[1], x.device.type
            )
        if kv_rows == "all":
            q, kv = F.linear(x, weight, bias).tensor_split([width], -1)
            return q, kv
        q_bias, kv_bias = (None, None) if bias is None else (bias[:width], bias[width:])
        return F.linear(x, weight[:width], q_bias), F.linear(x[own.start : own.stop], weight[width:], kv_bias)

    def _project_output(self, heads: Tensor) -> Tensor:
        """The output projection of this rank's heads [..., q, D], summed over all ranks: [..., hidden]."""
        part = F.linear(heads.flatten(-2), self.weights.out, self.weights.out_bias)  # type: ignore[arg-type]
        return part if self.sharding.ranks == 1 else self._ranks.all_ranks.all_reduce(part, reuse=True)


def _positions(cache: ShardedCache, step: Step) -> tuple[Tensor, Tensor]:
    """The positions of this rank's new tokens, and of the keys that a row of its block table can hold."""
    index = torch.arange(cache.block_table.shape[1] * cache.block_size, device=cache.block_table.device)
    return step.positions[cache.rows.start : cache.rows.stop], cache.local.layout.shard.position(index)


def _faster_kv_rows(other_rows: int, weights: int, device: str) -> KvRows:
    """Whether to leave out the K and V of `other_rows` rows of other ranks, by the planner's estimate."""
    if not other_rows:
        return "all"
    from attnmesh.planner.auto import own_rows_pay
    from attnmesh.planner.catalog import default_cluster

    return "own" if own_rows_pay(other_rows, weights, default_cluster(device).device) else "all"


# Argument checks: ValueError with the argument and its value, before anything is sent.


@dataclass(frozen=True)
class _Settings:
    """The arguments of a block that must be equal on all ranks."""

    config: AttentionConfig
    sharding: DecodeSharding
    exchange: Exchange
    kv_rows: KvRows
    split_size: int | None
    backend: str

    def check(self) -> None:
        """Raise ValueError for arguments that are invalid or incompatible."""
        for name, kind in (("config", AttentionConfig), ("sharding", DecodeSharding), ("exchange", Exchange)):
            check_type(name, getattr(self, name), kind)
        self.sharding.check_heads(self.config.q_heads, self.config.kv_heads)
        check_backend(self.backend)
        check_choice("kv_rows", self.kv_rows, get_args(KvRows))
        if self.split_size is None:
            return
        check_count("split_size", self.split_size, least=1)
        interleave = self.sharding.interleave
        if self.sharding.cp > 1 and interleave % self.split_size:
            raise ValueError(
                f"interleave of the sharding must be a multiple of split_size, got interleave={interleave} and "
                f"split_size={self.split_size}"
            )
        if self.exchange.cp not in ("auto", "all_to_all"):
            raise ValueError(
                f"exchange.cp must be all_to_all or auto with split_size, which merges splits in order, got "
                f"{self.exchange.cp!r}"
            )


def _check_weights(settings: _Settings, weights: AttentionWeights, rank: int) -> SharedValues:
    """Raise ValueError unless the weights belong to this rank; returns the settings that must be equal on all ranks."""
    check_type("weights", weights, AttentionWeights)
    weights.check(settings.config, settings.sharding, rank, replicate_q=settings.exchange.replicate_q)
    return {
        "config": settings.config, "sharding": repr(settings.sharding), "exchange": settings.exchange,
        "kv_rows": settings.kv_rows, "split_size": settings.split_size, "dtype": weights.qkv.dtype,
        "device": weights.qkv.device.type, "backend": settings.backend,
        "tensors": [name for name in _SHARED_WEIGHTS if getattr(weights, name) is not None],
        **({} if settings.sharding.ranks == 1 else equal_values({n: getattr(weights, n) for n in _REPLICATED})),
    }  # fmt: skip


def _check_call(
    settings: _Settings, weight: Tensor, rank: int, x: Tensor, cache: ShardedCache, step: Step, layer: int,
    update_cache: bool,
) -> SharedValues:  # fmt: skip
    """Raise ValueError for a call with invalid arguments; returns the values that must be equal on all ranks."""
    check_type("cache", cache, ShardedCache)
    check_type("step", step, Step, "what append of the cache returned")
    check_bool(update_cache=update_cache)
    shape = (cache.batch, step.tokens, settings.config.hidden)
    some = (len(step.sequences), *shape[1:])  # without the rows that are not in the step
    prefill = step.tokens > MAX_DECODE_TOKENS
    if tuple(check_tensor("x", x, "[batch, tokens, hidden]").shape) not in ((shape, some) if prefill else (shape,)):
        wanted = f"{list(shape)}, or {list(some)} for the rows of the step," if prefill else f"{list(shape)},"
        raise ValueError(f"x must be [batch, tokens, hidden] = {wanted} got {list(x.shape)}")
    if x.dtype != weight.dtype or x.device != weight.device:
        raise ValueError(
            f"x must have the weights' dtype and device, {weight.dtype} on {weight.device}, got {x.dtype} on {x.device}"
        )
    if step.tokens > MAX_DECODE_TOKENS and settings.split_size is not None:
        raise ValueError(
            f"step must have 1 to {MAX_DECODE_TOKENS} new tokens per sequence with split_size, whose bits a prefill "
            f"does not reproduce, got {step.tokens} tokens and split_size={settings.split_size}"
        )
    _check_cache(settings, cache, rank, weight)
    cache.check_step(step, layer, written=not update_cache)
    return {
        "x": x.shape, "layer": layer, "update_cache": update_cache, "block_size": cache.block_size,
        "num_blocks": cache.num_blocks, "max_length": cache.max_length, "storage": cache.spec.storage,
        "device": x.device.type,
    }  # fmt: skip


def _check_cos_sin(config: AttentionConfig, x: Tensor, cos_sin: object) -> SharedValues:
    """Raise ValueError unless `cos_sin` is None or fits the tokens of x; returns what must be equal on all ranks."""
    if cos_sin is None:
        return {"cos_sin": None}
    if config.rope is None:
        raise ValueError(f"cos_sin must be None, since config.rope is None, got {shown(cos_sin)}")
    if not isinstance(cos_sin, tuple) or len(cos_sin) != 2:
        raise ValueError(f"cos_sin must be a tuple of two tensors, cosines and sines, got {shown(cos_sin)}")
    shape = (*x.shape[:2], config.rope.dim // 2)
    for name, each in (("cos_sin[0]", cos_sin[0]), ("cos_sin[1]", cos_sin[1])):
        if check_tensor(name, each).shape != shape or not each.is_floating_point() or each.device != x.device:
            raise ValueError(f"{name} must be floating point {list(shape)} on {x.device}, got {shown(each)}")
    return {"cos_sin": cos_sin[0].dtype}


def _check_cache(settings: _Settings, cache: ShardedCache, rank: int, weight: Tensor) -> None:
    config, sharding = settings.config, settings.sharding
    if (cache.sharding, cache.rank) != (sharding, rank):
        raise ValueError(
            f"cache must be that of rank {rank} under {sharding!r}, got rank {cache.rank} under {cache.sharding!r}"
        )
    if cache.spec.latent:
        raise ValueError("cache must have keys and values, got one with latent=True")
    shape = (cache.spec.kv_heads, cache.spec.head_dim, cache.value_dim)
    if shape != (config.kv_heads, config.head_dim, config.head_dim):
        raise ValueError(
            f"cache must have {config.kv_heads} kv heads of {config.head_dim}, got {shape[0]} heads of {shape[1]} "
            f"with values of {shape[2]}"
        )
    if cache.block_table.device != weight.device:
        raise ValueError(f"cache must be on the weights' device, {weight.device}, got {cache.block_table.device}")
    dtype = PLAIN.get(cache.spec.storage)
    if dtype is not None and dtype != weight.dtype:
        raise ValueError(
            f"cache must have the weights' dtype, {weight.dtype}, or be quantized, got storage={cache.spec.storage!r}"
        )
    if settings.split_size is not None and settings.split_size % cache.block_size:
        raise ValueError(
            f"split_size must be a multiple of the cache's block_size, got split_size={settings.split_size} and "
            f"block_size={cache.block_size}"
        )
