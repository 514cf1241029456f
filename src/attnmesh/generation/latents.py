"""Multi-head latent attention (MLA, as in DeepSeek-V3) over a KV cache of latents.

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

from attnmesh.ops.storage import LATENT_GROUP


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
