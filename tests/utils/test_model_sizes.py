"""Limits on the sizes in a model's configuration."""

import json
from pathlib import Path

import pytest

import attnmesh
from attnmesh.utils.sizes import check_model_sizes


@pytest.mark.parametrize("path", sorted((Path(attnmesh.__file__).parent / "planner" / "models").glob("*.json")))
def test_real_models_are_within_all_limits(path):
    check_model_sizes(json.loads(path.read_text()), path)


def test_sizes_may_be_missing_listed_by_layer_or_zero_where_that_has_a_meaning():
    check_model_sizes({"head_dim": None, "num_experts": 0, "intermediate_size": [64, 128], "use_cache": True}, "it")
    check_model_sizes({"lfm2.attention.head_count_kv": [0, 8], "limits": [0.0, float("inf")], "eos": [2, 3]}, "it")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_hidden_layers": 0}, r"num_hidden_layers in it must be a positive integer, got 0"),
        ({"n_layer": 2.0}, r"n_layer in it must be a positive integer, got 2\.0"),
        ({"hidden_size": True}, r"hidden_size in it must be a positive integer, got True"),
        ({"vocab_size": "x" * 1000}, r"vocab_size in it must be a positive integer, got 'x{40,60}\.\.\.x{40,60}'"),
        ({"intermediate_size": [64, -1]}, r"intermediate_size in it must be a positive integer, got -1"),
        ({"intermediate_size": [8] * 4097}, r"intermediate_size in it must have at most 4,096 entries, got 4,097"),
        ({"llama.block_count": 4097}, r"llama\.block_count in it must be at most 4,096, got 4,097"),
        ({"text_config": {"num_heads": 2**17}}, r"num_heads in it must be at most 65,536, got 131,072"),
        ({"parts": [{"hidden_size": 2**25}]}, r"hidden_size in it must be at most 16,777,216, got 33,554,432"),
        ({"attention_types": [[["local"], 10**9]]}, r"attention_types in it must be at most 4,096, got 1,000,000,000"),
        ({"num_labels": 10**9}, r"num_labels in it must be at most 65,536, got 1,000,000,000"),
        ({"seed": 2**64}, r"seed in it must be at most 9,223,372,036,854,775,807"),
        (
            {"num_hidden_layers": 64, "num_experts": 2**15},
            r"at most 1,048,576 experts in all layers together, got 64",
        ),
    ],
)
def test_sizes_beyond_their_limits_are_named(fields, said):
    with pytest.raises(ValueError, match=said):
        check_model_sizes(fields, "it")
