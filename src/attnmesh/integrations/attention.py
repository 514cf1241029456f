"""An attention module of Transformers as a configuration and one rank's weights.

What a module has is read off its attributes: projections with or without biases, norms of Q and K, sinks, a window. How
its rotary embedding pairs numbers cannot be read off: it is known for some families, for others `rope` must be given.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attnmesh.core.optional import require
from attnmesh.ops.block.config import AttentionConfig, AttentionWeights
from attnmesh.ops.block.stages import Norm, Rope
from attnmesh.plan.decode import DecodeSharding

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NORMS = ("q_norm", "k_norm")
_TURN_HALVES = ("Llama", "Mistral", "Mixtral", "Qwen2", "Qwen2Moe", "Qwen3", "Qwen3Moe", "GptOss")
_WINDOW_IN_CONFIG = ("Mistral", "Mixtral")  # others keep theirs in the module, since their layers differ
_PLAIN = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_ONE_SHARD = DecodeSharding()


def attention_from_transformers(
    module: nn.Module,
    sharding: DecodeSharding = _ONE_SHARD,
    rank: int = 0,
    *,
    rope: Rope | None = None,
    input_norm: nn.Module | None = None,
    replicate_q: bool = False,
) -> tuple[AttentionConfig, AttentionWeights]:
    """The configuration of an attention module, and a rank's shard of its weights, copied.

    Modules are built as Llama's, Mistral's, Qwen3's or GPT-OSS's attention. `rope` is by default what the module's
    config says. `input_norm` is the RMSNorm before the module, if the block is to norm its input. `replicate_q` is
    `AttentionWeights.shard`'s.
    """
    _check_parts(module)
    config = _config(module, _rope(module) if rope is None else rope, input_norm)
    return config, _weights(module, config, input_norm).shard(config, sharding, rank, replicate_q=replicate_q)


def _check_parts(module: nn.Module) -> None:
    """Refuse a module with parts we would leave out, or without those we need."""
    name = type(module).__name__
    have = {part for part, _ in (*module.named_children(), *module.named_parameters(recurse=False))}
    if not {*_PROJECTIONS} <= have or have - {*_PROJECTIONS, *_NORMS, "sinks"}:
        raise ValueError(
            f"module must have {', '.join(_PROJECTIONS)}, and may have {', '.join(_NORMS)} and sinks; "
            f"{name} has {', '.join(sorted(have)) or 'none of them'}"
        )
    if getattr(module, "attn_logit_softcapping", None) or getattr(module.config, "clip_qkv", None):
        raise ValueError(f"{name} caps scores or clips Q, K and V, which a block does not")
    for part in _PROJECTIONS:
        if (dtype := getattr(module, part).weight.dtype) not in _PLAIN:
            raise ValueError(f"{part} of {name} must have plain weights, got {dtype}")


def _config(module: Any, rope: Rope, input_norm: nn.Module | None) -> AttentionConfig:
    sizes = module.config
    norms = [_norm(getattr(module, name)) for name in _NORMS if hasattr(module, name)]
    if len(set(norms)) > 1 or len(norms) == 1:
        raise ValueError(f"q_norm and k_norm of {type(module).__name__} must be alike, got {norms}")
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
    )


def _norm(module: nn.Module) -> Norm:
    """Llama's RMSNorm and its copies name their eps so; those that add 1 to the weight (Gemma) name it otherwise."""
    eps = getattr(module, "variance_epsilon", None)
    if eps is None:
        raise ValueError(f"{type(module).__name__} is not an RMSNorm as Llama has it: it has no variance_epsilon")
    return Norm(eps)


def _window(module: Any) -> int | None:
    if getattr(module, "is_sliding", True) is False:
        return None
    if hasattr(module, "sliding_window"):
        window: int | None = module.sliding_window
        return window
    return getattr(module.config, "sliding_window", None) if _is_of(module, _WINDOW_IN_CONFIG) else None


def _rope(module: Any) -> Rope:
    if not _is_of(module, _TURN_HALVES):
        raise ValueError(
            f"{type(module).__name__} may pair numbers in any way: give rope, or a module of {', '.join(_TURN_HALVES)}"
        )
    parameters = module.config.rope_parameters
    kind = parameters["rope_type"]
    if kind == "default":
        return Rope.plain(module.head_dim, parameters["rope_theta"])
    init = require("transformers.modeling_rope_utils", extra="hf").ROPE_INIT_FUNCTIONS
    if kind not in init or kind in ("dynamic", "longrope"):  # these two change their frequencies as a sequence grows
        fixed = sorted({"default", *init} - {"dynamic", "longrope"})
        raise ValueError(f"rope_type must be one of {', '.join(fixed)}, whose frequencies are fixed; got {kind!r}")
    frequencies, factor = init[kind](module.config, device="cpu")
    return Rope(tuple(frequencies.tolist()), factor=float(factor))


def _is_of(module: nn.Module, families: tuple[str, ...]) -> bool:
    return any(base.__name__ in {f"{family}Attention" for family in families} for base in type(module).__mro__)


def _weights(module: Any, config: AttentionConfig, input_norm: Any) -> AttentionWeights:
    q, k, v, out = (getattr(module, name) for name in _PROJECTIONS)
    biases = [x.bias for x in (q, k, v) if x.bias is not None]
    if len(biases) not in (0, 3):
        raise ValueError(f"q_proj, k_proj and v_proj must all have a bias or none; {len(biases)} of them have one")
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
