"""`AttentionConfig`: what an attention block computes, whatever its weights and however it is spread."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, fields

import torch
from torch import Tensor

from attnmesh.core.validation import check_positive
from attnmesh.ops.block.stages import Norm, Rope
from attnmesh.plan.decode import DecodeSharding


@dataclass(frozen=True)
class AttentionConfig:
    """The whole model's sizes, and its stages; None leaves a stage out.

    `norm` is X's, before the projections. `norm_before_rope` and `norm_after_rope` are those of each head of Q and K.
    `window` keeps the last so many keys up to the query's own; `scale` multiplies the scores, by default
    1 / sqrt(head_dim). Whether there are biases, sinks and an output projection is said by the weights.
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

    def __post_init__(self) -> None:
        check_positive(hidden=self.hidden, q_heads=self.q_heads, kv_heads=self.kv_heads, head_dim=self.head_dim)
        if self.q_heads % self.kv_heads:
            raise ValueError(
                f"q_heads must be a multiple of kv_heads, got q_heads={self.q_heads} and kv_heads={self.kv_heads}"
            )
        if self.rope is not None and self.rope.dim > self.head_dim:
            raise ValueError(f"rope turns {self.rope.dim} numbers of a head, but head_dim is {self.head_dim}")
        if self.window is not None:
            check_positive(window=self.window)
        if self.scale is not None and not (isinstance(self.scale, float | int) and math.isfinite(self.scale)):
            raise ValueError(f"scale must be a finite number or None, got {self.scale!r}")


@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """The tensors of one rank, which has q query heads and kv kv heads. All but `qkv` may be missing.

    `qkv` [(q + 2 kv) D, hidden] has the rows of Q, then K, then V. `out` [hidden, q D] makes this rank's part of the
    output: the sum over ranks is the whole. So `out_bias` [hidden] is rank 0's alone, and in the sum once. `sinks`
    [q_heads] are the whole model's, since ranks attend with other heads than they project.
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

    @classmethod
    def whole(
        cls, q: Tensor, k: Tensor, v: Tensor, biases: tuple[Tensor, Tensor, Tensor] | None = None,
        **others: Tensor | None,
    ) -> AttentionWeights:  # fmt: skip
        """A whole model's, from projections (and their biases) that are not fused yet; `others` are fields by name."""
        bias = None if biases is None else torch.cat([x.detach() for x in biases])
        return cls(torch.cat([x.detach() for x in (q, k, v)]), bias, **others)

    def shard(
        self, config: AttentionConfig, sharding: DecodeSharding, rank: int, *, replicate_q: bool = False
    ) -> AttentionWeights:
        """A rank's part of a whole model's weights: copies, so that the whole can be freed.

        With `replicate_q` CP ranks project the same queries, and need not gather them.
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
        """Raise ValueError unless these are the tensors of a rank (by default, of a whole model)."""
        heads = _Heads.of(config, sharding or DecodeSharding(), rank, replicate_q)
        for name, shape in heads.shapes().items():
            tensor = getattr(self, name)
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ValueError(f"{name} must be {list(shape)} on rank {rank}, got {list(tensor.shape)}")
        if self.out_bias is not None and (self.out is None or rank != 0):
            wrong = "out is None" if self.out is None else f"this is rank {rank}"
            raise ValueError(f"out_bias is added once, to what rank 0's out makes, but {wrong}")
        for name in ("qkv_bias", "out", "out_bias"):
            tensor = getattr(self, name)
            if tensor is not None and (tensor.dtype, tensor.device) != (self.qkv.dtype, self.qkv.device):
                raise ValueError(
                    f"{name} must have the dtype and device of qkv, {self.qkv.dtype} on {self.qkv.device}, got "
                    f"{tensor.dtype} on {tensor.device}"
                )
        for stage, names in _OF_STAGE.items():
            for name in names:
                if getattr(self, name) is not None and getattr(config, stage) is None:
                    raise ValueError(f"{name} is a weight of config.{stage}, which is None")


_OF_STAGE = {
    "norm": ("norm",),
    "norm_before_rope": ("q_norm_before_rope", "k_norm_before_rope"),
    "norm_after_rope": ("q_norm_after_rope", "k_norm_after_rope"),
}


@dataclass(frozen=True)
class _Heads:
    """Which of the whole model's heads a rank's weights are for."""

    config: AttentionConfig
    q: range
    kv: range
    out: range

    @classmethod
    def of(cls, config: AttentionConfig, sharding: DecodeSharding, rank: int, replicate_q: bool) -> _Heads:
        sharding.check_heads(config.q_heads, config.kv_heads)
        projected = sharding.replicated_q_heads if replicate_q else sharding.q_heads
        return cls(
            config,
            projected(rank, config.q_heads),
            sharding.kv_heads(rank, config.kv_heads),
            sharding.q_heads(rank, config.q_heads),
        )

    def rows(self, whole: Tensor) -> Tensor:
        """Of all rows of Q, K and V (or their biases), these heads' ones, copied."""
        q, kv = self.config.q_heads, self.config.kv_heads
        by_head = whole.detach().unflatten(0, (q + 2 * kv, self.config.head_dim))
        parts = by_head.split([q, kv, kv])
        own = [part[heads.start : heads.stop] for part, heads in zip(parts, (self.q, self.kv, self.kv), strict=True)]
        return torch.cat(own).flatten(0, 1)

    def columns(self, whole: Tensor) -> Tensor:
        """Of all columns of the output projection, these heads' ones, copied."""
        dim = self.config.head_dim
        return whole.detach()[:, self.out.start * dim : self.out.stop * dim].clone(
            memory_format=torch.contiguous_format
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """What every tensor must be."""
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
        } | dict.fromkeys(norms, (config.head_dim,))


def _copy(x: Tensor) -> Tensor:
    return x.detach().clone(memory_format=torch.contiguous_format)
