"""`AttentionConfig` and `AttentionWeights`: what an attention block computes, and the tensors of one rank.

From the QKV projection to the heads of attention: split into heads, norm, rotary embedding, norm.

Between stages values stay in float32 (float64 for float64); the result is rounded once to the projection's dtype.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields

import torch
from torch import Tensor

from attnmesh.ops.block.norm_rope import CosSin, Norm, Rope, rms_norm, rotated, widened
from attnmesh.ops.storage import Stored
from attnmesh.plan.decode import DecodeSharding
from attnmesh.utils.validation import (
    check_bool,
    check_choice,
    check_number,
    check_positive,
    check_tensor,
    check_type,
    shown,
)


@dataclass(frozen=True)
class AttentionConfig:
    """Sizes of the whole model and the stages of its attention; None omits a stage.

    `norm` applies to the input of the projections, `norm_before_rope` and `norm_after_rope` to each head of Q and K.
    `window` is the number of last keys, up to its own, that a query attends to. `scale` multiplies the scores; 1 /
    sqrt(head_dim) by default. `softcap` bounds them, as in `attention`. Biases, sinks, ALiBi slopes and the output
    projection are present if the weights contain them.

    Examples:
        >>> norm, rope = am.decode.Norm(1e-5), am.decode.Rope.plain(64)
        >>> config = am.decode.AttentionConfig(2880, 64, 8, 64, norm=norm, rope=rope, window=128)
        >>> config.q_heads // config.kv_heads
        8
        >>> am.decode.AttentionConfig(2880, q_heads=64, kv_heads=7, head_dim=64)
        Traceback (most recent call last):
            ...
        ValueError: q_heads must be a multiple of kv_heads, got q_heads=64 and kv_heads=7
    """

    hidden: int
    q_heads: int
    kv_heads: int
    head_dim: int
    _: KW_ONLY
    norm: Norm | None = None
    norm_before_rope: Norm | None = None
    norm_after_rope: Norm | None = None
    rope: Rope | None = None
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None

    def __post_init__(self) -> None:
        check_positive(hidden=self.hidden, q_heads=self.q_heads, kv_heads=self.kv_heads, head_dim=self.head_dim)
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"q_heads must be a multiple of kv_heads, got q_heads={self.q_heads} and kv_heads={self.kv_heads}"
            )
        for name in ("norm", "norm_before_rope", "norm_after_rope"):
            if getattr(self, name) is not None:
                check_type(name, getattr(self, name), Norm, "a Norm or None")
        if self.rope is not None:
            check_type("rope", self.rope, Rope, "a Rope or None")
        if self.rope is not None and self.rope.dim > self.head_dim:
            raise ValueError(f"rope.dim must be at most head_dim={self.head_dim}, got {self.rope.dim}")
        if self.window is not None:
            check_positive(window=self.window)
        if self.scale is not None:
            check_number("scale", self.scale)
        if self.softcap is not None:
            check_number("softcap", self.softcap, above=0)


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """The tensors of one rank, which has q query heads and kv kv heads. All except `qkv` are optional.

    `qkv` [(q + 2 kv) D, hidden] has the rows of Q, then K, then V. `out` [hidden, q D] computes this rank's part of the
    output, which is summed over ranks. `out_bias` [hidden] is therefore on rank 0 only. `sinks` and `alibi_slopes`
    [q_heads] are of the whole model, since ranks attend with other heads than they project.

    Examples:
        >>> config = am.decode.AttentionConfig(hidden=32, q_heads=4, kv_heads=2, head_dim=8)
        >>> q, k, v, out = torch.randn(32, 32), torch.randn(16, 32), torch.randn(16, 32), torch.randn(32, 32)
        >>> whole = am.decode.AttentionWeights.whole(q, k, v, out=out)
        >>> mine = whole.shard(config, am.DecodeSharding(tp=2), rank=1)  # 2 query heads and 1 kv head
        >>> whole.qkv.shape, mine.qkv.shape, mine.out.shape
        (torch.Size([64, 32]), torch.Size([32, 32]), torch.Size([32, 16]))
    """

    qkv: Tensor
    qkv_bias: Tensor | None = None
    out: Tensor | None = None
    out_bias: Tensor | None = None
    norm: Tensor | None = None
    q_norm_before_rope: Tensor | None = None
    k_norm_before_rope: Tensor | None = None
    q_norm_after_rope: Tensor | None = None
    k_norm_after_rope: Tensor | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            tensor = getattr(self, field.name)
            if tensor is None and field.name != "qkv":
                continue
            if not check_tensor(field.name, tensor).is_floating_point():
                raise ValueError(f"{field.name} must be floating point, got {shown(tensor)}")

    @classmethod
    def whole(
        cls, q: Tensor, k: Tensor, v: Tensor, biases: tuple[Tensor, Tensor, Tensor] | None = None,
        **others: Tensor | None,
    ) -> AttentionWeights:  # fmt: skip
        """The weights of the whole model, from separate projections (and biases); `others` are fields by name."""
        for name, x in (("q", q), ("k", k), ("v", v)):
            check_tensor(name, x)
            if x.ndim != 2 or (x.dtype, x.device, x.shape[1:]) != (q.dtype, q.device, q.shape[1:]):
                raise ValueError(f"{name} must be [heads x head_dim, hidden] of the dtype of q, got {shown(x)}")
        if biases is not None:
            check_type("biases", biases, tuple, "a tuple of the biases of q, k and v")
            if len(biases) != 3:
                raise ValueError(f"biases must be the three of q, k and v, got {len(biases)}")
            for i, (bias, x) in enumerate(zip(biases, (q, k, v), strict=True)):
                check_tensor(f"biases[{i}]", bias)
                if (bias.shape, bias.dtype, bias.device) != (x.shape[:1], x.dtype, x.device):
                    raise ValueError(f"biases[{i}] must be [{x.shape[0]}], {x.dtype} on {x.device}, got {shown(bias)}")
        for name in others:
            check_choice("others", name, [field.name for field in fields(cls)][2:])
        qkv_bias = None if biases is None else torch.cat([x.detach() for x in biases])
        return cls(torch.cat([x.detach() for x in (q, k, v)]), qkv_bias, **others)

    def shard(
        self, config: AttentionConfig, sharding: DecodeSharding, rank: int, *, replicate_q: bool = False
    ) -> AttentionWeights:
        """The shard of a rank, from the weights of the whole model: copies, so that the whole can be freed.

        With `replicate_q`, all CP ranks project the same queries and need not gather them.
        """
        self.check(config)
        heads = _Heads.of(config, sharding, rank, replicate_q)
        cut = {"qkv": heads.rows, "qkv_bias": heads.rows, "out": heads.columns}
        tensors = {field.name: getattr(self, field.name) for field in fields(self)}
        shards = {name: cut.get(name, _copy)(x) for name, x in tensors.items() if x is not None}
        if rank != 0:
            shards.pop("out_bias", None)
        return AttentionWeights(**shards)

    def check(
        self, config: AttentionConfig, sharding: DecodeSharding | None = None, rank: int = 0, *,
        replicate_q: bool = False,
    ) -> None:  # fmt: skip
        """Raises ValueError unless these are the tensors of a rank (by default, of the whole model)."""
        heads = _Heads.of(config, DecodeSharding() if sharding is None else sharding, rank, replicate_q)
        for name, shape in heads.shapes().items():
            tensor = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ValueError(f"{name} must be {list(shape)} on rank {rank}, got {list(tensor.shape)}")
        if self.out_bias is not None and (self.out is None or rank != 0):
            wrong = "out is None" if self.out is None else f"this is rank {rank}"
            raise ValueError(f"out_bias must be given on rank 0 only, together with out, but {wrong}")
        for name in ("qkv_bias", "out", "out_bias"):
            tensor = getattr(self, name)
            if tensor is not None and (tensor.dtype, tensor.device) != (self.qkv.dtype, self.qkv.device):
                raise ValueError(
                    f"{name} must have the dtype and device of qkv, {self.qkv.dtype} on {self.qkv.device}, got "
                    f"{tensor.dtype} on {tensor.device}"
                )
        for name in ("sinks", "alibi_slopes"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.device != self.qkv.device:
                raise ValueError(f"{name} must be on the device of qkv, {self.qkv.device}, got {tensor.device}")
        for stage, names in _OF_STAGE.items():
            for name in names:
                if getattr(self, name) is not None and getattr(config, stage) is None:
                    raise ValueError(f"{name} must be None, since config.{stage} is None")


_OF_STAGE = {
    "norm": ("norm",),
    "norm_before_rope": ("q_norm_before_rope", "k_norm_before_rope"),
    "norm_after_rope": ("q_norm_after_rope", "k_norm_after_rope"),
}


@dataclass(frozen=True)
class _Heads:
    """The heads of the whole model that the weights of a rank belong to."""

    config: AttentionConfig
    q: range
    kv: range
    out: range

    @classmethod
    def of(cls, config: AttentionConfig, sharding: DecodeSharding, rank: int, replicate_q: bool) -> _Heads:
        check_type("config", config, AttentionConfig)
        check_type("sharding", sharding, DecodeSharding)
        check_bool(replicate_q=replicate_q)
        sharding.check_heads(config.q_heads, config.kv_heads)
        projected = sharding.replicated_q_heads if replicate_q else sharding.q_heads
        return cls(
            config,
            projected(rank, config.q_heads),
            sharding.kv_heads(rank, config.kv_heads),
            sharding.q_heads(rank, config.q_heads),
        )

    def rows(self, whole: Tensor) -> Tensor:
        """A copy of the rows of these heads, from all rows of Q, K and V (or their biases)."""
        q, kv = self.config.q_heads, self.config.kv_heads
        by_head = whole.detach().unflatten(0, (q + 2 * kv, self.config.head_dim))
        parts = by_head.split([q, kv, kv])
        own = [part[heads.start : heads.stop] for part, heads in zip(parts, (self.q, self.kv, self.kv), strict=True)]
        return torch.cat(own).flatten(0, 1)

    def columns(self, whole: Tensor) -> Tensor:
        """A copy of the columns of these heads, from all columns of the output projection."""
        dim = self.config.head_dim
        return whole.detach()[:, self.out.start * dim : self.out.stop * dim].clone(
            memory_format=torch.contiguous_format
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor."""
        config = self.config
        rows = (len(self.q) + 2 * len(self.kv)) * config.head_dim
        norms = (name for stage, names in _OF_STAGE.items() if stage != "norm" for name in names)
        return {
            "qkv": (rows, config.hidden),
            "qkv_bias": (rows,),
            "out": (config.hidden, len(self.out) * config.head_dim),
            "out_bias": (config.hidden,),
            "norm": (config.hidden,),
            "sinks": (config.q_heads,),
            "alibi_slopes": (config.q_heads,),
        } | dict.fromkeys(norms, (config.head_dim,))


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)


# From the QKV projection to the heads of attention: split into heads, norm, rotary embedding, norm.


def split_and_rotate(
    q: Tensor, kv: Tensor, positions: Tensor, config: AttentionConfig, weights: AttentionWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """Q [B, q, T, D], K and V [B, kv, T, D] from projections q [B, T, q*D] and kv [B, T, 2*kv*D] (keys, then values).

    For a fused projection, pass two views. Positions are integers [B, T]; negative ones mark unused rows.
    """
    k, v = keys_and_values(kv, positions, config, weights)
    return queries(q, positions, config, weights), k, v


def queries(q: Tensor, positions: Tensor | CosSin, config: AttentionConfig, weights: AttentionWeights) -> Tensor:
    """The queries only: [B, q, T, D] from q [B, T, q*D]; cosines and sines may stand for the positions."""
    norms = weights.q_norm_before_rope, weights.q_norm_after_rope
    return _stages(_heads(q, config.head_dim), positions, config, *norms)


def keys_and_values(
    kv: Tensor, positions: Tensor | CosSin, config: AttentionConfig, weights: AttentionWeights
) -> tuple[Tensor, Tensor]:
    """Keys and values only: two tensors [B, kv, T, D] from kv [B, T, 2*kv*D]; positions as in `queries`."""
    k, v = _heads(kv, config.head_dim).chunk(2, 1)
    norms = weights.k_norm_before_rope, weights.k_norm_after_rope
    return _stages(k, positions, config, *norms), v


def _heads(x: Tensor, head_dim: int) -> Tensor:
    heads: Tensor = x.unflatten(-1, (-1, head_dim))
    return heads.transpose(1, 2)


def _stages(
    x: Tensor, positions: Tensor | CosSin, config: AttentionConfig, before: Tensor | None, after: Tensor | None
) -> Tensor:
    wide = widened(x)
    if config.norm_before_rope is not None:
        wide = rms_norm(wide, before, config.norm_before_rope)
    if config.rope is not None:
        rope = config.rope
        wide = rotated(wide, rope, positions) if isinstance(positions, CosSin) else rope.rotate(wide, positions)
    if config.norm_after_rope is not None:
        wide = rms_norm(wide, after, config.norm_after_rope)
    return wide.to(x.dtype)


@dataclass(frozen=True, eq=False)
class ProjectedKV:
    """Projected keys and values of new tokens, and the cache that this rank writes them to.

    `kv` is projected K, then V: [B, T, 2*kv*D] of all rows of the batch, or [len(rows), T, 2*kv*D] of `rows` alone.
    Only `rows` are written, to `slots` int64 [len(rows), T] of the pools [num_blocks, block_size, kv, D]; slots below 0
    are skipped.
    """

    kv: Tensor
    rows: range
    slots: Tensor
    keys: Stored
    values: Stored

    @property
    def first(self) -> int:
        """The index in `kv` of the first of `rows`."""
        return 0 if len(self.kv) == len(self.rows) else self.rows.start
