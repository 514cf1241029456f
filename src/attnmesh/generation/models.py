"""The KV cache of a model by its configuration: storage type, windows, widths, and the bytes of a token.

Multi-head latent attention (MLA, as in DeepSeek-V3) over a KV cache of latents.

A model with MLA projects each token to a latent of `kv_lora_rank` features, and a key of `qk_rope_head_dim` features
with a rotary embedding, which all heads share. `kv_b_proj` expands the latent to the key and the value of every head:

    k[h] = (W_uk[h] latent, rope)        v[h] = W_uv[h] latent

The cache has (latent, rope), one vector per token whatever the number of heads. Attention over it does not expand the
keys: W_uk is applied to the queries before it, and W_uv to its results. The scores are the same,

    (q_nope[h], q_rope[h]) . k[h] = (W_uk[h]^T q_nope[h], q_rope[h]) . (latent, rope)

and the output is W_uv[h] times the weighted sum of the latents: attention with one kv head, whose values are the first
features of its keys. Every rank does this for the heads that it projects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from attnmesh.core.ranges import InterleavedShard
from attnmesh.kv_cache.block_manager import BlockLayout, max_window_blocks
from attnmesh.models.sharded import WeightSizes, heads_of
from attnmesh.ops.storage import LATENT_GROUP, PLAIN, STORAGES, bytes_per_token
from attnmesh.plan.decode import DecodeSharding
from attnmesh.utils.validation import shown

# Multi-head latent attention (MLA, as in DeepSeek-V3) over a KV cache of latents.


@dataclass(frozen=True)
class LatentWidths:
    """The widths of a model's latent attention."""

    latent: int  # of the vector that is expanded to keys and values
    rope: int  # of the part of keys and queries with a rotary embedding
    nope: int  # of the part without
    value: int

    @property
    def cached(self) -> int:
        """The features of one token in the cache."""
        return self.latent + self.rope

    @property
    def quantized_storages(self) -> list[str]:
        """The storage types that quantize such latents."""
        fits = self.latent % LATENT_GROUP == 0 and 0 < self.rope < LATENT_GROUP and self.rope % 2 == 0
        return ["fp8_ds_mla"] if fits else []


def latent_widths(config: Any) -> LatentWidths | None:
    """The widths of a model's latent attention; None for models without."""
    rank = getattr(config, "kv_lora_rank", None)
    if rank is None:
        return None
    return LatentWidths(rank, config.qk_rope_head_dim, config.qk_nope_head_dim, config.v_head_dim)


class LatentProjections:
    """`kv_b_proj` of every layer of a model, for the heads that this rank projects."""

    def __init__(self, model: nn.Module, widths: LatentWidths) -> None:
        self.widths = widths
        self._layers: dict[int, Any] = {
            module.layer_idx: module.kv_b_proj  # type: ignore[misc]
            for module in model.modules() if hasattr(module, "kv_b_proj")
        }  # fmt: skip

    def attend(self, layer: int, q: Tensor, attend: Callable[[Tensor], Tensor]) -> Tensor:
        """The output [B, h, T, value] of q [B, h, T, nope + rope]; `attend` computes it over the cache.

        It gets queries [B, h, T, latent + rope] and returns weighted sums of latents, [B, h, T, latent].
        """
        widths = self.widths
        weight = self._layers[layer].weight.unflatten(0, (-1, widths.nope + widths.value))  # [h, nope + value, latent]
        into_key, into_value = weight.split([widths.nope, widths.value], 1)
        nope, rope = q.split([widths.nope, widths.rope], -1)
        sums = attend(torch.cat([torch.einsum("bhtn,hnl->bhtl", nope, into_key), rope], -1))
        return torch.einsum("bhtl,hvl->bhtv", sums, into_value)

    def vectors(self, latent: Tensor, rope: Tensor) -> Tensor:
        """The cached vectors of new tokens, [B, 1, T, latent + rope], from the tensors that the model caches."""
        for name, x, width in (("latent", latent, self.widths.latent), ("rope", rope, self.widths.rope)):
            if x.shape[1] != 1 or x.shape[3] != width:
                raise ValueError(
                    f"the model must cache a {name} of one head and {width} features, got {x.shape[1]} of "
                    f"{x.shape[3]}: older versions of Transformers cache expanded keys and values"
                )
        return torch.cat([latent, rope], -1)

    def parts(self, vectors: Tensor) -> tuple[Tensor, Tensor]:
        """The latents and rope parts of cached vectors."""
        latent, rope = vectors.split([self.widths.latent, self.widths.rope], -1)
        return latent, rope


def cache_storage(latent: LatentWidths | None, dtype: torch.dtype, storage: str | None) -> str:
    """The storage type of the KV cache of a model in `dtype`; raises ValueError unless it can be `storage`.

    `latent` are the widths of the latents that it has; None if it has keys and values.
    """
    plain = {each: name for name, each in PLAIN.items()}
    if dtype not in plain:
        raise ValueError(f"model must be of dtype {', '.join(map(str, plain))}, got {dtype}")
    if latent is None:
        quantized, of = [name for name in STORAGES if name not in PLAIN], ""
    else:
        quantized, of = latent.quantized_storages, f" with latents of {latent.latent} + {latent.rope} features"
    allowed = [plain[dtype], *quantized]
    if storage is not None and (not isinstance(storage, str) or storage not in allowed):
        raise ValueError(
            f"storage must be None or one of {', '.join(allowed)} for a model in {dtype}{of}, got {shown(storage)}"
        )
    return plain[dtype] if storage is None else storage


def kv_bytes_per_token(config: Any, storage: str, kv_heads: int | None = None) -> int:
    """Bytes of the keys and values (or latents) of one token in all layers, with scales; by default of all kv heads."""
    total = 0.0
    for layer in layer_configs(config):
        widths, heads = cached_widths(layer), heads_of(layer).kv if kv_heads is None else kv_heads
        total += heads * bytes_per_token(storage, widths["head_dim"]) * (1 if widths["latent"] else 2)
    return round(total)


def layer_configs(config: Any) -> list[Any]:
    """The configuration of each layer that attends: its own where layers differ, else that of the model."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    return [config] * len(layer_windows(config))


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """The window of each layer that attends, the token itself included; None if it attends to all tokens."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * int(config.num_hidden_layers)
    kinds = [kind for kind in kinds if kind != "linear_attention"]
    if window is None or getattr(config, "use_sliding_window", None) is False:
        return (None,) * len(kinds)
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def cached_widths(config: Any) -> dict[str, Any]:
    """The widths of a kv head, as `CacheSpec` takes them."""
    latent = latent_widths(config)
    if latent is not None:
        return {"head_dim": latent.cached, "value_dim": latent.latent, "latent": True}
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {"head_dim": width, "value_dim": width, "latent": False}


# The memory of a rank before anything is loaded: its KV cache in blocks and bytes, and `ShardedMemory`.


BLOCK_SIZE = 32


@dataclass(frozen=True)
class CacheBlocks:
    """The blocks of a rank's cache: for `cache_tokens` tokens of at most `max_sequences` sequences over its CP ranks.

    Sequences do not fill their last blocks, and beams copy one. Layers with a window have the blocks that they need, if
    that is less; a pass computes at most `prefill_chunk` tokens of a sequence.
    """

    windows: tuple[int | None, ...]
    shard: InterleavedShard
    cache_tokens: int
    max_sequences: int
    prefill_chunk: int

    @property
    def full(self) -> int:
        """Of layers that attend to all tokens."""
        return BlockLayout(self.shard, BLOCK_SIZE).num_blocks(self.cache_tokens) + 2 * self.max_sequences

    @property
    def windowed(self) -> int:
        """Of layers with a window; 0 if these use the blocks of other layers."""
        widest = max((window for window in self.windows if window is not None), default=None)
        if widest is None:
            return 0
        layout = BlockLayout(self.shard, BLOCK_SIZE)
        needed = self.max_sequences * max_window_blocks(layout, widest, self.prefill_chunk)
        return needed if needed < self.full else 0

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The windows of layers that have blocks of their own."""
        return self.windows if self.windowed else (None,) * len(self.windows)

    @property
    def total(self) -> int:
        """Of all layers."""
        return sum(self.full if window is None else self.windowed for window in self.layer_windows)


def kv_cache_bytes(config: Any, storage: str, tokens: int, sequences: int) -> int:
    """Bytes of `tokens` tokens of at most so many sequences on a rank; layers with a window keep only its tokens."""
    blocks = CacheBlocks(layer_windows(config), InterleavedShard(), tokens, sequences, tokens)
    kept = min(tokens, blocks.windowed * BLOCK_SIZE)
    stored = sum(tokens if window is None else kept for window in blocks.layer_windows)
    return stored * kv_bytes_per_token(config, storage) // len(blocks.windows)


@dataclass(frozen=True)
class RankMemory:
    """Bytes of the rank that holds most."""

    weights: int
    kv_cache: int

    @property
    def total(self) -> int:
        """The sum."""
        return self.weights + self.kv_cache


class ShardedMemory:
    """The memory per rank of a `Generator` with sharded weights, under any sharding.

    `storage`, `cache_tokens`, `max_sequences` and `prefill_chunk` are the settings of the `Generator`. Activations are
    not counted.
    """

    def __init__(
        self,
        config: Any,
        dtype: torch.dtype,
        *,
        storage: str | None = None,
        cache_tokens: int,
        max_sequences: int = 1,
        prefill_chunk: int | None = None,
    ) -> None:
        self._weights, self._heads, self._dtype = WeightSizes(config), heads_of(config), dtype
        self._config = config
        stored_as = cache_storage(latent_widths(config), dtype, storage)
        self._bytes_per_head = kv_bytes_per_token(config, stored_as) // self._heads.kv // len(layer_windows(config))
        self._cache_tokens, self._max_sequences = cache_tokens, max_sequences
        self._prefill_chunk = prefill_chunk or cache_tokens

    def of(self, sharding: DecodeSharding) -> RankMemory:
        """The memory under a sharding. Raises ValueError if the model cannot be divided this way."""
        sharding.check_heads(self._heads.q, self._heads.kv)
        blocks = CacheBlocks(
            layer_windows(self._config), sharding.position_shard(0), self._cache_tokens,
            -(-self._max_sequences // sharding.kvdp), self._prefill_chunk,
        )  # fmt: skip
        heads = max(len(sharding.kv_heads(rank, self._heads.kv)) for rank in range(sharding.ranks))
        return RankMemory(
            weights=self._weights.largest_part(sharding) * self._dtype.itemsize,
            kv_cache=blocks.total * BLOCK_SIZE * heads * self._bytes_per_head,
        )
