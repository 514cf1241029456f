"""Models with recurrent layers: what their configs say, and plans for their prefill."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from attnmesh.planner.catalog import cluster
from attnmesh.planner.decode import DecodeRequest
from attnmesh.planner.models import cache_bytes, model, model_from_config, parameters, state_bytes
from attnmesh.planner.prefill import Parallelism, PrefillRequest, prefill_memory, prefill_ranking
from attnmesh.utils.optional import installed
from helpers.cases import first
from helpers.recurrent_models import MODELS

H200 = cluster("h200")
FOLDER = Path("config.json")
QWEN = {  # Qwen3-Next 80B
    "model_type": "qwen3_next", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 2, "head_dim": 256, "vocab_size": 151936, "intermediate_size": 5120,
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "mlp_only_layers": [], "decoder_sparse_step": 1, "tie_word_embeddings": False,
}  # fmt: skip


def hybrid(**changed):
    return model_from_config({**QWEN, **changed}, FOLDER)


@pytest.mark.skipif(not installed("transformers"), reason="transformers is not installed")
@pytest.mark.parametrize(
    ("kind", "mixer", "attends"),
    first(
        3,
        [
            ("qwen3_next", "gated_delta_rule", 2),
            ("jamba", "mamba1", 2),
            ("lfm2", "short_convolution", 2),
            ("qwen3_5_text", "gated_delta_rule", 2),
            ("olmo_hybrid", "gated_delta_rule", 1),
            ("kimi_linear", "kimi_delta_attention", 2),
            ("bamba", "mamba2", 2),
            ("falcon_h1", "mamba2", 4),  # beside attention in every layer
            ("granitemoehybrid", "mamba2", 2),
            ("minimax", "lightning_attention", 2),
            ("lfm2_moe", "short_convolution", 2),
        ],
    ),
)
def test_parameters_are_those_of_the_model(kind, mixer, attends):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **MODELS[kind])
    found = model_from_config(config.to_dict(), FOLDER)
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(config)
    assert parameters(found).total == pytest.approx(sum(x.numel() for x in whole.parameters()), rel=5e-3)
    assert (found.recurrent.kind, found.attention_layers) == (mixer, attends)


def test_a_config_file_of_the_hub():
    """`full_attention_interval` without `layer_types`; experts, a gate of attention."""
    found = hybrid()
    assert (found.attention_layers, found.recurrent.count) == (12, 36)
    assert found.attends[:4] == (False, False, False, True)
    assert parameters(found).total == pytest.approx(79.7e9, rel=5e-3)
    assert parameters(found).active == pytest.approx(3.6e9, rel=0.05)  # without the embedding
    assert state_bytes(found) == 36 * 4 * (32 * 128 * 128 + 3 * 8192)
    assert cache_bytes(found, 1000, 2) == 12 * 1000 * 2 * 2 * 256 * 2


@pytest.mark.parametrize("name", ["layers_block_type", "hybrid_override_pattern"])
def test_blocks_of_other_kinds_are_refused(name):
    with pytest.raises(ValueError, match=f"has {name}"):
        hybrid(**{name: "M*M-"})


def test_layers_of_unknown_kinds_are_refused(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**QWEN, "layer_types": ["recurrent"] * 48}))
    with pytest.raises(ValueError, match=r"layer_types in .* must be .*, got recurrent"):
        model(path)


def test_a_plan_counts_recurrent_layers():
    request = PrefillRequest(hybrid(), 2**18, 2, 8, H200)
    option = next(each for each in prefill_ranking(request).options if each.name.startswith("CP8"))
    attention_only = replace(request, model=replace(request.model, recurrent=None, attends=()))
    other = next(each for each in prefill_ranking(attention_only).options if each.name.startswith("CP8"))
    assert option.parts["recurrent layers"] > 0
    assert option.parts["exposed state communication"] > 0
    assert option.parts["attention"] == pytest.approx(other.parts["attention"] / 4)
    assert option.seconds == sum(option.parts.values())


def test_states_are_on_every_rank_of_a_sequence_and_divided_by_heads():
    request = PrefillRequest(hybrid(), 2**15, 2, 8, H200)
    cp, tp = (prefill_memory(request, Parallelism(1, *sizes)) for sizes in ((1, 8), (2, 4)))
    keys = 2 * cache_bytes(request.model, 2**15, 2.0)
    assert cp.cache == pytest.approx(keys / 8 + 2 * state_bytes(request.model))
    assert tp.cache == pytest.approx(keys / 8 + state_bytes(request.model))
    assert cp.weights == 2 * tp.weights


def test_decode_plans_are_refused():
    with pytest.raises(ValueError, match=r"model must have attention in all layers .* 36 recurrent layers"):
        DecodeRequest(hybrid(), 4096, 1, 8, H200)
