"""Small random models of the decoder types of the installed Transformers."""

from __future__ import annotations

from typing import Any

import torch

from helpers import recurrent_models

# Set where a configuration has them.
_SIZES: dict[str, Any] = {
    "vocab_size": 53, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "sliding_window": 5, "attention_dropout": 0.0, "is_decoder": True, "n_embd": 32, "n_layer": 2,
    "n_head": 4, "n_positions": 64, "dff": 24, "ffn_dim": 24, "word_embed_proj_dim": 32, "embedding_size": 32,
    "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "moe_num_experts": 4, "moe_k": 2,
    "shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "kv_lora_rank": 10, "q_lora_rank": 12, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
    "qk_head_dim": 12, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 53, "num_kv_shared_layers": 0,
    "attention_chunk_size": 6, "attn_pdrop": 0.0,
}  # fmt: skip
_ALTERNATING = ["sliding_attention", "full_attention"]
_ROTARY = {"rope_type": "default", "rope_theta": 10_000.0}
_SEQ2SEQ = {
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 24, "decoder_ffn_dim": 24,
}  # fmt: skip

# What else a type needs to be small, or to have the layers that it is for.
_OWN: dict[str, dict[str, Any]] = {
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": _ALTERNATING * 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.5, 0.0],
    },
    "gemma4_text": {
        "num_hidden_layers": 4, "num_kv_shared_layers": 1, "layer_types": _ALTERNATING * 2, "global_head_dim": 16,
    },
    "gemma4_unified_text": {"layer_types": _ALTERNATING, "global_head_dim": 16},
    "cohere_compass_text": {
        "layer_types": _ALTERNATING, "rope_parameters": {"full_attention": _ROTARY, "sliding_attention": _ROTARY},
    },
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
        "attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 0.5,
    },
    "longcat_flash": {
        "num_layers": 2, "head_dim": 4, "ffn_hidden_size": 24, "expert_ffn_hidden_size": 16, "zero_expert_num": 1,
        "moe_topk": 2,
    },
    "hrm_text": {"H_cycles": 2, "L_cycles": 1, "num_layers_per_stack": 1, "num_hidden_layers": 4},
    "codegen": {"rotary_dim": 4, "n_ctx": 64},
    "gptj": {"rotary_dim": 4},
    **dict.fromkeys(
        ("bart", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart", "whisper"), _SEQ2SEQ
    ),
}  # fmt: skip
_MOST_WEIGHTS = 10**7


def small_config(kind: str, *, decoder: bool = True) -> Any:
    """The configuration of a small model; raises an exception for types that need other options to be small."""
    from transformers import AutoConfig

    if kind in recurrent_models.MODELS:
        return AutoConfig.for_model(kind, **recurrent_models.MODELS[kind] | {"vocab_size": _SIZES["vocab_size"]})
    full = AutoConfig.for_model(kind)
    own = {name: size for name, size in _SIZES.items() if _has(full, name)}
    if "is_decoder" in own:
        own["is_decoder"] = decoder
    layers = getattr(full, "layer_types", None)
    if layers:
        own["layer_types"] = [*dict.fromkeys(layers), layers[-1]][:2]
    if getattr(full, "mlp_layer_types", None):
        own["mlp_layer_types"] = ["dense", "sparse"]
    if "kv_lora_rank" in own:  # of multi-head latent attention
        own.pop("head_dim", None)
        own["num_key_value_heads"] = 4
    return AutoConfig.for_model(kind, **own | _OWN.get(kind, {}))


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name)
    except Exception:  # of an attribute that each layer has
        return True


def small_model(kind: str, implementation: str, head: str = "CausalLM") -> Any:
    """A model with weights that are large enough for attention to decide the next token."""
    import transformers

    auto = getattr(transformers, f"AutoModelFor{head}")
    config = small_config(kind, decoder=head == "CausalLM")
    with torch.device("meta"):
        weights = sum(x.numel() for x in auto.from_config(config).parameters())
    if weights > _MOST_WEIGHTS:
        raise ValueError(f"{weights} weights: other options decide its size")
    torch.manual_seed(0)
    model = auto.from_config(config, attn_implementation=implementation).float()
    deviation = 0.1 if kind in recurrent_models.MODELS else 0.2  # delta rules amplify what is rounded
    for weight in model.parameters():
        torch.nn.init.normal_(weight, 0.0 if weight.dim() > 1 else 1.0, deviation)
    return model.eval()
