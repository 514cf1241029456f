"""Tiny models of Transformers with recurrent layers."""

from typing import Any

import torch

from attnmesh.integrations.transformers_attention import register_attention

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA = {
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "full_attention_interval": 2, "head_dim": 8,
}  # fmt: skip
MAMBA2 = {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2,
    "mamba_chunk_size": 16,
}  # fmt: skip
PURE = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "pad_token_id": 0}
MODELS = {
    "qwen3_next": SIZES | DELTA | EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": SIZES | DELTA,
    "olmo_hybrid": SIZES | DELTA | {"linear_num_key_heads": 4},
    "kimi_linear": SIZES | EXPERTS | {
        "linear_num_heads": 4, "linear_head_dim": 8, "kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8, "v_head_dim": 8, "head_dim": 8, "n_routed_experts": 4, "num_experts_per_token": 2,
        "layer_types": ["linear_attention", "full_attention"] * 2, "num_key_value_heads": 4,
    },
    "bamba": SIZES | MAMBA2 | {"attn_layer_indices": [1, 3]},
    "falcon_h1": SIZES | MAMBA2 | {"head_dim": 8, "mamba_d_ssm": 64},
    "granitemoehybrid": SIZES | MAMBA2 | {
        "layer_types": ["mamba", "attention"] * 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 32, "position_embedding_type": "rope",
    },
    "nemotron_h": SIZES | {
        "head_dim": 8, "mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "expand": 2,
        "chunk_size": 16, "hybrid_override_pattern": "M*M-",
    },
    "zamba2": SIZES | {
        "mamba_d_state": 8, "mamba_ngroups": 2, "n_mamba_heads": 8, "mamba_headdim": 8, "mamba_expand": 2,
        "chunk_size": 16, "num_mem_blocks": 1, "layer_types": ["mamba", "hybrid"] * 2, "hybrid_layer_ids": [1, 3],
        "use_mem_rope": True, "attention_head_dim": 16,
    },
    "jamba": SIZES | {
        "mamba_d_state": 8, "mamba_expand": 2, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
        "num_experts": 2, "num_experts_per_tok": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
    },
    "minimax": SIZES | {
        "head_dim": 8, "block_size": 16, "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_local_experts": 4, "num_experts_per_tok": 2,
    },
    "lfm2": SIZES | {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8},
    "lfm2_moe": SIZES | EXPERTS | {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba": PURE | {"time_step_rank": 4},
    "falcon_mamba": PURE | {"time_step_rank": 4},
    "mamba2": PURE | {"num_heads": 8, "head_dim": 8, "n_groups": 2, "expand": 2, "chunk_size": 16},
}  # fmt: skip


def recurrent_model(kind: str, **sizes: Any) -> Any:
    """Return a random model in float32, with other sizes where given; the same for the same seed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    register_attention()
    config = AutoConfig.for_model(kind, **MODELS[kind] | sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="attnmesh")
    model = model.float().train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim >= 2:
                weight.copy_(torch.randn(weight.shape) * 0.1)  # large enough that states matter
            elif name.endswith("bias"):
                weight.copy_(torch.randn(weight.shape) * 0.3)
    return model
