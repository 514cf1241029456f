"""`attn_implementation="attnmesh"`: attention functions of Transformers that ask a pass over ranks for the answer.

Transformers hands keyword arguments of a model's call down to its attention. One of them, `mesh`, says how the
attention of this call is computed: over a sequence that is spread (`spread_pass`), or over a cache that is
(`reading_pass`, `stepping_pass`). Without it the attention is that of one device. No mask is ever made: positions say
who sees whom.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from attnmesh.core.masks import Causal, Mask, SlidingWindow
from attnmesh.core.merge import discount_sinks
from attnmesh.core.optional import require
from attnmesh.ops.dense.api import attention

NAME = "attnmesh"
MODELS = ("llama", "qwen2", "qwen3", "mistral", "gpt_oss")
"""The `model_type`s that are tested; others are refused."""

# What a model's call hands down to its attention, and what does not change it.
_HARMLESS = {
    "position_ids", "cache_position", "use_cache", "is_causal", "output_attentions", "output_hidden_states",
    "output_router_logits", "return_dict", "logits_to_keep", "num_items_in_batch", "shift_labels",
}  # fmt: skip


class Pass(Protocol):
    """How the attention of one forward pass is computed."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Out [B, Hq, n, D] of this rank's queries, from its queries, keys and values."""


def register_attention() -> None:
    """Let Transformers know `attn_implementation="attnmesh"`. Twice does no harm."""
    functions = require("transformers.modeling_utils", extra="hf").AttentionInterface
    masks = require("transformers.masking_utils", extra="hf").AttentionMaskInterface
    functions.register(NAME, transformers_attention)
    masks.register(NAME, _no_mask)


def check_config(config: Any, name: str) -> None:
    """Refuse the configuration of a model, called `name`, whose attention may need what we do not have."""
    kind = getattr(config, "model_type", None)
    if kind not in MODELS:
        raise ValueError(
            f"model_type must be one of {', '.join(MODELS)}, got {kind!r} ({name}): its attention may "
            "need something that attnmesh does not have"
        )


def check_model(model: Any) -> None:
    """Refuse a model whose attention may need what we do not have, or that does not ask us."""
    check_config(model.config, type(model).__name__)
    asked = model.config._attn_implementation
    if asked != NAME:
        raise ValueError(
            f"the model must be loaded with attn_implementation={NAME!r} (or model.set_attn_implementation({NAME!r})), "
            f"got {asked!r}"
        )


def transformers_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    mesh: Pass | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The interface that Transformers calls: out [B, n, Hq, D], and no weights."""
    _check_asked(module, attention_mask, dropout, others)
    mask = Causal() if sliding_window is None else SlidingWindow(sliding_window - 1)
    if mesh is None:
        out = _alone(query, key, value, mask=mask, scale=scaling, sinks=s_aux)
    else:
        layer: Any = module.layer_idx
        out = mesh.attend(layer, query, key, value, mask=mask, scale=scaling, sinks=s_aux)
    return out.transpose(1, 2), None


def _alone(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, sinks: Tensor | None) -> Tensor:
    """On one device: the queries are the last of the keys' positions."""
    at = torch.arange(k.shape[2] - q.shape[2], k.shape[2])
    out, lse = attention(q, k, v, mask=mask, scale=scale, q_positions=at, return_lse=True)
    return out if sinks is None else discount_sinks(out, lse, sinks[:, None])


def _no_mask(
    *_: object,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    **__: object,
) -> None:
    """Positions are enough, as long as every token counts and they follow one another."""
    if attention_mask is not None and not attention_mask.all():
        raise ValueError(
            "attention_mask hides tokens, which attnmesh does not: leave out the padding (attnmesh.generate takes "
            "prompts of different lengths)"
        )
    if kv_offset + kv_length != q_offset + q_length:
        raise ValueError(
            f"the last of {kv_length} keys must be the last token's, as in a DynamicCache: attnmesh does not know "
            "which keys of a static cache are still to come"
        )
    if not allow_is_causal_skip:
        raise ValueError(
            "attnmesh.models has no mask but a causal one: position_ids must go up by one (no packed sequences), and "
            "there can be no mask function of one's own"
        )


def _check_asked(module: nn.Module, mask: Tensor | None, dropout: float, others: dict[str, Any]) -> None:
    name = type(module).__name__
    if mask is not None:
        raise ValueError(f"{name} brings a mask of its own, {list(mask.shape)}; attnmesh goes by positions")
    if dropout:
        raise ValueError(f"{name} drops out {dropout} of its attention weights, which attnmesh does not")
    if others.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise ValueError(f"{name} is not causal, which attnmesh.models is not made for")
    strange = sorted(k for k, v in others.items() if v is not None and v is not False and k not in _HARMLESS)
    if strange:
        raise ValueError(f"{name} asks its attention for {', '.join(strange)}, which attnmesh does not know")
