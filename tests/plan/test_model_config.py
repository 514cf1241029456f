"""Config files of models, as Transformers writes them."""

import json

import pytest

from attnmesh.plan.model import ModelConfig
from attnmesh.plan.model_config import read_config

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


@pytest.mark.parametrize("content", [b"heads: 64", b"\xff\xfe\x00"])
def test_a_file_that_is_not_json_is_refused(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        read_config(path)
