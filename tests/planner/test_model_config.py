"""Config files of models, as Transformers writes them."""

import json

import pytest

from attnmesh.planner.models import (
    Experts,
    LatentAttention,
    ModelConfig,
    WeightBits,
    read_config,
    read_model_config,
)

GPT_OSS_120B = {
    "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "hidden_size": 2880, "num_hidden_layers": 36,
    "model_type": "gpt_oss",
}  # fmt: skip


@pytest.fixture
def written(tmp_path):
    """Writes fields to a config file."""

    def write(fields):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(fields))
        return path

    return write


def test_sizes_are_read(written):
    assert read_config(written(GPT_OSS_120B)) == ModelConfig(64, 8, 64, 2880, 36)


@pytest.mark.parametrize("head_dim", [{}, {"head_dim": None}])
def test_without_a_head_dim_heads_divide_the_width(written, head_dim):
    fields = {name: n for name, n in GPT_OSS_120B.items() if name != "head_dim"}
    assert read_config(written({**fields, "hidden_size": 4096, **head_dim})).head_dim == 64


def test_a_model_that_also_sees_has_a_config_of_its_text(written):
    fields = {"text_config": GPT_OSS_120B, "hidden_size": 7, "vision_config": {"num_attention_heads": 3}}
    assert read_config(written(fields)) == ModelConfig(64, 8, 64, 2880, 36)


def test_without_kv_heads_every_query_head_has_one(written):
    fields = {name: n for name, n in GPT_OSS_120B.items() if name != "num_key_value_heads"}
    assert read_config(written(fields)).kv_heads == 64


@pytest.mark.parametrize("name", ["num_attention_heads", "hidden_size", "num_hidden_layers"])
def test_a_missing_field_is_named(written, name):
    path = written({field: n for field, n in GPT_OSS_120B.items() if field != name})
    with pytest.raises(ValueError, match=rf"config\.json has no {name}$"):
        read_config(path)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({**GPT_OSS_120B, "head_dim": 0}, "head_dim in .* must be a positive integer, got 0"),
        ({**GPT_OSS_120B, "hidden_size": "wide"}, "hidden_size in .* must be a positive integer, got 'wide'"),
        ({**GPT_OSS_120B, "num_hidden_layers": True}, "num_hidden_layers in .* must be a positive integer, got True"),
        ({**GPT_OSS_120B, "head_dim": None, "hidden_size": 2881}, "hidden_size=2881 is no multiple of 64 heads"),
        ({**GPT_OSS_120B, "kv_lora_rank": 512}, "has kv_lora_rank: latent attention"),
        ([GPT_OSS_120B], "must hold one JSON object, got list"),
    ],
)
def test_what_cannot_be_read_is_refused(written, fields, said):
    with pytest.raises(ValueError, match=said):
        read_config(written(fields))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"heads: 64", "is not JSON: "),
        (b"\xff\xfe\x00", "is not a text file: byte 0 is not UTF-8"),
        (b'{"num_attention_heads": ' + b"9" * 5000 + b"}", "is not JSON: Exceeds the limit"),
        (b'{"text_config":' * 100_000, "is not JSON that can be read: it is nested too deeply"),
    ],
    ids=["text", "bytes", "digits", "nested"],
)
def test_a_file_that_is_not_json_is_refused(tmp_path, content, said):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"config\.json {said}"):
        read_config(path)


# All of a config


WHOLE = {**GPT_OSS_120B, "vocab_size": 1000, "intermediate_size": 64, "num_hidden_layers": 6}
DEEPSEEK = {
    "num_attention_heads": 4, "num_key_value_heads": 4, "hidden_size": 56, "num_hidden_layers": 5, "kv_lora_rank": 16,
    "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6,
}  # fmt: skip


def test_what_nobody_said_is_none(written):
    found = read_model_config(written(GPT_OSS_120B))
    assert found == read_config(written(GPT_OSS_120B))
    assert (found.vocab_size, found.intermediate_size, found.latent, found.experts, found.windows) == (None,) * 4 + (
        (),
    )


def test_a_model_is_called_by_its_folder_or_as_one_says(written):
    path = written(GPT_OSS_120B)
    assert read_model_config(path).name == path.parent.name
    assert read_model_config(path, "mine").name == "mine"


def test_latent_attention_is_read_where_all_is_asked_for(written):
    found = read_model_config(written(DEEPSEEK))
    assert found.latent == LatentAttention(kv_rank=16, rope=4, nope=8, value=6, q_rank=None)
    assert (found.head_dim, found.value_dim, found.latent.cached) == (12, 6, 20)
    assert read_model_config(written({**DEEPSEEK, "q_lora_rank": 24})).latent.q_rank == 24


@pytest.mark.parametrize("name", ["qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"])
def test_latent_attention_wants_all_its_widths(written, name):
    with pytest.raises(ValueError, match=rf"config\.json has no {name}$"):
        read_model_config(written({**DEEPSEEK, name: None}))


@pytest.mark.parametrize(
    ("fields", "experts"),
    [
        ({}, None),
        ({"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}, Experts(8, 2, 16, 6)),
        ({"num_local_experts": 8, "experts_per_token": 2}, Experts(8, 2, 64, 6)),
        (
            {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 2,
             "mlp_only_layers": [1], "shared_expert_intermediate_size": 32},
            Experts(8, 2, 16, 2, shared=32),
        ),
        (
            {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 2,
             "first_k_dense_replace": 1, "moe_layer_freq": 1},
            Experts(8, 2, 16, 5, shared=32),
        ),
    ],
)  # fmt: skip
def test_experts_of_all_families(written, fields, experts):
    assert read_model_config(written({**WHOLE, **fields})).experts == experts


W, N = 128, None


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({"sliding_window": None}, ()),
        ({"sliding_window": W, "model_type": "mistral"}, (W,) * 6),
        ({"sliding_window": W}, (W, N, W, N, W, N)),  # GPT-OSS, whose layers alternate
        ({"sliding_window": W, "layer_types": ["sliding_attention", "full_attention"] * 3}, (W, N, W, N, W, N)),
        ({"sliding_window": W, "layer_types": ["full_attention"] * 6}, ()),
        ({"sliding_window": W, "use_sliding_window": False, "max_window_layers": 2}, ()),
        ({"sliding_window": W, "use_sliding_window": True, "max_window_layers": 4}, (N, N, N, N, W, W)),
        ({"sliding_window": W, "sliding_window_pattern": 3}, (W, W, N, W, W, N)),
        ({"sliding_window": W, "model_type": "gemma3_text"}, (W, W, W, W, W, N)),
    ],
)
def test_windows_of_all_families(written, fields, windows):
    found = read_model_config(written({**WHOLE, **fields}))
    assert found.windows == windows
    assert [found.window(layer) for layer in range(6)] == list(windows or (N,) * 6)
    assert sum(found.window_layers.values()) == 6


@pytest.mark.parametrize(
    ("fields", "weight_bits"),
    [
        ({}, WeightBits(16, 16, 16)),
        ({"dtype": "float32"}, WeightBits(32, 32, 32)),
        ({"torch_dtype": "float16"}, WeightBits(16, 16, 16)),
        ({"quantization_config": {"quant_method": "mxfp4"}}, WeightBits(16, 4.25, 16)),
        ({"quantization_config": {"quant_method": "fp8"}}, WeightBits(8, 8, 16)),
        ({"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}, WeightBits(4.625, 4.625, 16)),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8, "group_size": -1}}, WeightBits(8, 8, 16)),
    ],
)
def test_how_weights_are_stored(written, fields, weight_bits):
    assert read_model_config(written({**WHOLE, **fields})).weight_bits == weight_bits


def test_what_is_said_beside_the_text_counts_for_the_text(written):
    fields = {"text_config": WHOLE, "tie_word_embeddings": True, "quantization_config": {"quant_method": "fp8"}}
    found = read_model_config(written(fields))
    assert found.tied_embeddings
    assert found.weight_bits.projections == 8


def test_gemma_ties_its_embedding_without_saying_so(written):
    assert read_model_config(written({**WHOLE, "model_type": "gemma2"})).tied_embeddings
    assert not read_model_config(written(WHOLE)).tied_embeddings


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_attention_heads": None}, r"has no num_attention_heads$"),
        ({"vocab_size": 0}, "vocab_size in .* must be a positive integer, got 0"),
        ({"intermediate_size": -3}, "intermediate_size in .* must be a positive integer, got -3"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings in .* must be true or false, got 'yes'"),
        ({"num_experts": 8}, "num_experts_per_tok in .* must be 1 to 8, the experts, got None"),
        ({"num_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok in .* must be 1 to 8, the experts, got 9"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": 1}, "mlp_only_layers in .* must be a list"),
        ({"num_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": -1}, "integer of at least 0, got -1"),
        ({"num_hidden_layers": 10**5}, "num_hidden_layers in .* must be at most 4,096, got 100,000"),
        ({"vocab_size": 2**63}, "vocab_size in .* must be at most 16,777,216"),
        ({"sliding_window": 0}, "sliding_window in .* must be a positive integer, got 0"),
        ({"layer_types": ["sliding_attention"] * 6}, "sliding_window in .* must be a positive integer, got None"),
        ({"layer_types": ["full_attention"]}, "must list one kind for each of 6 layers"),
        (
            {"layer_types": ["linear_attention"] * 6},
            "has recurrent layers whose sizes are not known",
        ),
        ({"layer_types": [[]] * 6}, "must be full_attention or attention or sliding_attention"),
        ({"sliding_window": 9, "use_sliding_window": True, "max_window_layers": -1}, "max_window_layers in .* got -1"),
        ({"sliding_window": 9, "sliding_window_pattern": -1}, "sliding_window_pattern in .* got -1"),
        ({"attention_chunk_size": 8192}, "has attention_chunk_size"),
        ({"dtype": "int4"}, "dtype in .* must be float32, bfloat16, float16, got 'int4'"),
        ({"quantization_config": {"quant_method": "hqq"}}, "must be mxfp4, fp8, gptq or awq, got 'hqq'"),
        ({"quantization_config": "int4"}, "must be mxfp4, fp8, gptq or awq, got 'int4'"),
        ({"quantization_config": {"quant_method": "awq"}}, "has no bits"),
    ],
)
def test_what_is_not_understood_is_refused(written, fields, said):
    with pytest.raises(ValueError, match=said):
        read_model_config(written({**WHOLE, **fields}))


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"gone\.json cannot be read: No such file"):
        read_model_config(tmp_path / "gone.json")
