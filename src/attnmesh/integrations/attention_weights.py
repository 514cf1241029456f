"""The configuration and the weights of an `AttentionBlock` from an attention module of Transformers.

Biases, norms of Q and K, sinks, softcaps and windows are taken from the module's attributes. How its rotary embedding
pairs dimensions is not an attribute: it is known for some model families, for others `rope` must be given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnmesh.ops.block.config import AttentionConfig, AttentionWeights
from attnmesh.ops.block.norm_rope import Norm, Rope
from attnmesh.plan.decode import DecodeSharding
from attnmesh.utils.optional import require
from attnmesh.utils.validation import check_type

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("q_norm", "k_norm")
_ROTATE_HALF = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "GptOss", "Gemma2")
_WINDOW_IN_CONFIG = ("Mistral", "Mixtral")  # in other families layers differ, and the module has it
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_UNSHARDED = DecodeSharding()


def attention_from_transformers(
    module: nn.Module,
    sharding: DecodeSharding = _UNSHARDED,
    rank: int = 0,
    *,
    rope: Rope | None = None,
    input_norm: nn.Module | None = None,
    replicate_q: bool = False,
) -> tuple[AttentionConfig, AttentionWeights]:
    """The configuration of an attention module, and a copy of one rank's shard of its weights.

    Args:
        module: attention as in Llama, Mistral, Qwen3, GPT-OSS or Gemma 2.
        sharding: how the heads are sharded.
        rank: the rank whose shard is returned.
        rope: rotary embedding; by default as the module's config has it.
        input_norm: RMSNorm before the module, if the block is to apply it.
        replicate_q: as in `AttentionWeights.shard`.

    Examples:
        >>> from transformers import LlamaConfig
        >>> from transformers.models.llama.modeling_llama import LlamaAttention
        >>> llama = LlamaConfig(hidden_size=32, num_attention_heads=4, num_key_value_heads=2)
        >>> layer, sharding = LlamaAttention(llama, 0), am.DecodeSharding(tp=2)
        >>> config, weights = am.models.attention_from_transformers(layer, sharding, rank=0)
        >>> config.q_heads, config.head_dim, weights.qkv.shape  # rows of 2 query heads, k and v
        (4, 8, torch.Size([32, 32]))
    """
    _check_parts(module)
    if rope is not None:
        check_type("rope", rope, Rope)
    if input_norm is not None:
        check_type("input_norm", input_norm, nn.Module, "an RMSNorm or None")
    config = _config(module, _rope(module) if rope is None else rope, input_norm)
    return config, _weights(module, config, input_norm).shard(config, sharding, rank, replicate_q=replicate_q)


def _check_parts(module: nn.Module) -> None:
    """Raise ValueError if the module lacks a part that is needed or has one that is not supported."""
    check_type("module", module, nn.Module, "an attention module of Transformers")
    name = type(module).__name__
    have = {part for part, _ in (*module.named_children(), *module.named_parameters(recurse=False))}
    if not {*_PROJECTIONS} <= have or have - {*_PROJECTIONS, *_NORMS, "sinks"}:
        raise ValueError(
            f"module must have {', '.join(_PROJECTIONS)} and may have {', '.join(_NORMS)} and sinks, got {name} with "
            f"{', '.join(sorted(have)) or 'none of them'}"
        )
    if clip := getattr(module.config, "clip_qkv", None):
        raise ValueError(f"module must not use clip_qkv, got {name} with clip_qkv={clip}")
    for part in _PROJECTIONS:
        if (dtype := getattr(module, part).weight.dtype) not in _DTYPES:
            raise ValueError(f"{part} of {name} must have floating point weights, got {dtype}")


def _config(module: Any, rope: Rope, input_norm: nn.Module | None) -> AttentionConfig:
    sizes = module.config
    norms = [_norm(getattr(module, name)) for name in _NORMS if hasattr(module, name)]
    if len(set(norms)) > 1 or len(norms) == 1:
        raise ValueError(f"q_norm and k_norm of {type(module).__name__} must be equal, got {norms}")
    return AttentionConfig(
        sizes.hidden_size,
        sizes.num_attention_heads,
        sizes.num_key_value_heads,
        module.head_dim,
        norm=None if input_norm is None else _norm(input_norm),
        norm_before_rope=norms[0] if norms else None,
        rope=rope,
        window=_window(module),
        scale=module.scaling,
        softcap=getattr(module, "attn_logit_softcapping", None),
    )


def _norm(module: nn.Module) -> Norm:
    """The attribute variance_epsilon identifies Llama's RMSNorm; norms that add 1 to the weight (Gemma) lack it."""
    eps = getattr(module, "variance_epsilon", None)
    if eps is None:
        raise ValueError(f"norms must be RMSNorms with variance_epsilon, as in Llama, got {type(module).__name__}")
    return Norm(eps)


def _window(module: Any) -> int | None:
    if getattr(module, "is_sliding", True) is False:
        return None
    if hasattr(module, "sliding_window"):
        window: int | None = module.sliding_window
        return window
    return getattr(module.config, "sliding_window", None) if _is_of(module, _WINDOW_IN_CONFIG) else None


def _rope(module: Any) -> Rope:
    if not _is_of(module, _ROTATE_HALF):
        raise ValueError(f"rope must be given for {type(module).__name__}; it is known for {', '.join(_ROTATE_HALF)}")
    parameters = module.config.rope_parameters
    kind = parameters["rope_type"]
    if kind == "default":
        return Rope.plain(module.head_dim, parameters["rope_theta"])
    init = require("transformers.modeling_rope_utils", extra="hf").ROPE_INIT_FUNCTIONS
    if kind not in init or kind in ("dynamic", "longrope"):  # their frequencies depend on the length
        fixed = sorted({"default", *init} - {"dynamic", "longrope"})
        raise ValueError(f"rope_type must be one of {', '.join(fixed)}, with fixed frequencies, got {kind!r}")
    frequencies, factor = init[kind](module.config, device="cpu")
    return Rope(tuple(frequencies.tolist()), factor=float(factor))


def _is_of(module: nn.Module, families: tuple[str, ...]) -> bool:
    return any(base.__name__ in {f"{family}Attention" for family in families} for base in type(module).__mro__)


def _weights(module: Any, config: AttentionConfig, input_norm: Any) -> AttentionWeights:
    q, k, v, out = (getattr(module, name) for name in _PROJECTIONS)
    biases = [x.bias for x in (q, k, v) if x.bias is not None]
    if len(biases) not in (0, 3):
        raise ValueError(
            f"all of q_proj, k_proj and v_proj must have a bias, or none of them, got {len(biases)} biases"
        )
    whole = AttentionWeights.whole(
        q.weight, k.weight, v.weight, (biases[0], biases[1], biases[2]) if biases else None,
        out=out.weight,
        out_bias=out.bias,
        norm=_weight_of(input_norm),
        q_norm_before_rope=_weight_of(getattr(module, "q_norm", None)),
        k_norm_before_rope=_weight_of(getattr(module, "k_norm", None)),
        sinks=getattr(module, "sinks", None),
    )  # fmt: skip
    whole.check(config)
    return whole


def _weight_of(module: Any) -> Tensor | None:
    return None if module is None else module.weight
