"""Models by name."""

import json

import pytest

from attnmesh.planner.models import LatentAttention, model, model_names

TINY = {"num_attention_heads": 4, "hidden_size": 64, "num_hidden_layers": 2}


def test_all_names_have_a_model():
    for name in model_names():
        found = model(name)
        assert found.vocab_size is not None
        assert found.layers > 1
    assert {"llama-3.1-8b", "llama-3.3-70b", "gpt-oss-120b", "deepseek-r1", "smollm2-135m"} <= set(model_names())


def test_aliases_are_the_same_model():
    assert model("llama-3.3-70b") == model("llama-3.1-70b")
    assert model("deepseek-r1") == model("deepseek-v3")


def test_owners_capitals_and_instruct_do_not_matter():
    assert model("meta-llama/Llama-3.1-8B-Instruct") is model("llama-3.1-8b")
    assert model("openai/gpt-oss-120b") is model(" GPT-OSS-120B")


def test_attention_of_the_families():
    assert model("gpt-oss-120b").window_layers == {128: 18, None: 18}
    assert model("gpt-oss-120b").window(0) == 128
    assert model("mistral-7b").window_layers == {4096: 32}
    assert model("qwen3-32b").window_layers == {None: 64}
    assert model("deepseek-v3").latent == LatentAttention(kv_rank=512, rope=64, nope=128, value=128, q_rank=1536)
    assert (model("qwen3-235b-a22b").q_heads, model("qwen3-235b-a22b").kv_heads) == (64, 4)
    assert model("llama-3.1-8b").head_dim == 128


def test_a_file_or_its_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    assert model(tmp_path) == model(str(tmp_path / "config.json"))
    assert model(tmp_path).head_dim == 16


def test_what_is_there_comes_before_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama-3.1-8b").mkdir()
    with pytest.raises(ValueError, match=r"the folder llama-3\.1-8b has no config\.json"):
        model("llama-3.1-8b")
    (tmp_path / "llama-3.1-8b" / "config.json").write_text(json.dumps(TINY))
    assert model("llama-3.1-8b").hidden == 64


@pytest.mark.parametrize(
    ("name", "closest"),
    [("llama-3.1-7b", "llama-3.1-70b"), ("gptoss-120b", "gpt-oss-120b"), ("qwen/Qwen3-9B", "qwen3-8b")],
)
def test_an_unknown_model_is_told_the_nearest(name, closest):
    with pytest.raises(
        ValueError, match=rf"unknown model .*'{name}'\. Did you mean .*{closest}.*\? Known: deepseek-r1, "
    ):
        model(name)


@pytest.mark.parametrize("path", ["gone.json", "./gone/config.json", "/gone/llama-3.1-8b", "a/b/llama-3.1-8b"])
def test_a_path_to_nothing_is_no_name(path):
    with pytest.raises(ValueError, match="there is no config file or folder"):
        model(path)


@pytest.mark.parametrize("name", ["", "  "])
def test_no_name_is_no_model(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"unknown model|no config\.json|must be a path"):
        model(name)
