"""The KV cache of a model by its configuration: storage type, windows, widths, and the bytes of a token."""

from __future__ import annotations

from typing import Any

import torch

from attnmesh.generation.latents import LatentWidths, latent_widths
from attnmesh.models.sharded import heads_of
from attnmesh.ops.storage import PLAIN, STORAGES, bytes_per_token
from attnmesh.utils.validation import shown


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
