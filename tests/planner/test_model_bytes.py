"""How large models are and how much they compute, against what is published and against counting one by one."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnmesh.planner.models import (
    Experts,
    ModelConfig,
    cache_bytes,
    cached_positions,
    kv_bytes_per_position,
    kv_elements_per_position,
    linear_flops,
    model,
    parameters,
    weight_bytes,
)

# Published by their makers, in billions.
TOTAL = {
    "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.6, "llama-3.1-405b": 405.85, "qwen3-8b": 8.19, "qwen3-32b": 32.8,
    "qwen3-235b-a22b": 235, "gpt-oss-20b": 20.91, "gpt-oss-120b": 116.83, "deepseek-v3": 671, "mistral-7b": 7.24,
    "smollm2-135m": 0.1345,
}  # fmt: skip
# What a token takes, and how coarsely it is published.
ACTIVE = {
    "qwen3-235b-a22b": (22, 0.025),
    "gpt-oss-20b": (3.61, 0.01),
    "gpt-oss-120b": (5.13, 0.01),
    "deepseek-v3": (37, 0.015),
}
GIB = 2**30


@pytest.mark.parametrize(("name", "billions"), TOTAL.items())
def test_parameters_are_those_published(name, billions):
    assert parameters(model(name)).total / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(("name", "billions", "off"), [(name, *said) for name, said in ACTIVE.items()])
def test_what_a_token_takes_is_what_is_published(name, billions, off):
    assert parameters(model(name)).active / 1e9 == pytest.approx(billions, rel=off)


def test_a_dense_model_part_by_part():
    count = parameters(ModelConfig(4, 2, 8, 32, 3, vocab_size=100, intermediate_size=64))
    assert (count.embedding, count.head) == (3200, 3200)
    assert count.attention == 3 * (32 * 32 + 2 * 32 * 16 + 32 * 32)
    assert count.mlp == 3 * 3 * 32 * 64
    assert (count.experts, count.chosen, count.routers) == (0, 0, 0)
    assert count.norms == 32 * 7
    assert count.total - count.active == count.embedding


def test_experts_part_by_part():
    experts = Experts(count=8, chosen=2, width=16, layers=2, shared=24)
    count = parameters(ModelConfig(4, 2, 8, 32, 3, vocab_size=100, intermediate_size=64, experts=experts))
    assert count.mlp == 3 * 32 * (64 + 2 * 24)
    assert (count.experts, count.chosen) == (2 * 8 * 3 * 32 * 16, 2 * 2 * 3 * 32 * 16)
    assert count.routers == 2 * 8 * 32
    assert count.total - count.active == count.embedding + count.experts - count.chosen


def test_latent_attention_with_and_without_a_rank_of_queries():
    deepseek = model("deepseek-v3")
    assert parameters(deepseek).attention == 61 * (
        7168 * 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 * 128 * 256 + 128 * 128 * 7168
    )
    full = replace(deepseek, latent=replace(deepseek.latent, q_rank=None))
    assert parameters(full).attention - parameters(deepseek).attention == 61 * (
        7168 * 128 * 192 - 1536 * (7168 + 128 * 192)
    )


def test_a_tied_embedding_is_there_once():
    small = model("smollm2-135m")
    assert parameters(replace(small, tied_embeddings=False)).total - parameters(small).total == 576 * 49152
    assert parameters(replace(small, tied_embeddings=False)).active == parameters(small).active


def test_weights_in_bytes():
    assert weight_bytes(model("llama-3.1-8b")) == 2 * parameters(model("llama-3.1-8b")).total
    # The checkpoints' sizes as published: most of it is experts of 4.25 bits.
    assert weight_bytes(model("gpt-oss-120b")) / GIB == pytest.approx(60.8, rel=0.01)
    assert weight_bytes(model("gpt-oss-20b")) / GIB == pytest.approx(12.8, rel=0.01)
    deepseek = parameters(model("deepseek-v3"))
    in_bf16 = deepseek.embedding + deepseek.head + deepseek.routers + deepseek.norms
    assert weight_bytes(model("deepseek-v3")) == deepseek.total + in_bf16


@pytest.mark.parametrize(
    ("name", "nbytes"),
    [("llama-3.1-8b", 4096), ("gpt-oss-120b", 2048), ("deepseek-v3", 1152), ("qwen3-235b-a22b", 2048)],
)
def test_bytes_of_a_position(name, nbytes):
    assert kv_bytes_per_position(model(name), 2) == nbytes
    assert kv_bytes_per_position(model(name), 1) == nbytes // 2


def test_latent_attention_keeps_the_same_whatever_its_heads():
    deepseek = model("deepseek-v3")
    assert (
        kv_elements_per_position(replace(deepseek, q_heads=16, kv_heads=16))
        == kv_elements_per_position(deepseek)
        == 576
    )


def test_caches_of_a_sequence():
    assert cache_bytes(model("llama-3.1-8b"), 131072, 2) == 16 * GIB
    assert cache_bytes(model("gpt-oss-120b"), 131072, 2) == 18 * (131072 + 128) * 2048
    assert cache_bytes(model("gpt-oss-120b"), 100, 2) == 36 * 100 * 2048
    assert cache_bytes(model("mistral-7b"), 10**6, 2) == 32 * 4096 * 4096


def test_operations_of_linear_layers():
    llama, count = model("llama-3.1-8b"), parameters(model("llama-3.1-8b"))
    assert linear_flops(llama) == 2 * (count.attention + count.mlp + count.head)
    assert linear_flops(llama) - linear_flops(llama, head=False) == 2 * 4096 * 128256
    oss = parameters(model("gpt-oss-120b"))
    assert linear_flops(model("gpt-oss-120b"), head=False) == 2 * (oss.attention + oss.chosen + oss.routers)


@given(context=st.integers(1, 60), windows=st.lists(st.none() | st.integers(1, 80), min_size=1, max_size=5))
def test_layers_are_counted_one_by_one(context, windows):
    mixed = ModelConfig(4, 2, 8, 32, len(windows), windows=tuple(windows))
    assert cached_positions(mixed, context) == sum(min(context, window or context) for window in windows)


@pytest.mark.parametrize("context", [0, -1])
def test_no_context_is_refused(context):
    with pytest.raises(ValueError, match=f"context must be at least 1, got {context}"):
        cache_bytes(model("llama-3.1-8b"), context, 2)


@pytest.mark.parametrize("kv_itemsize", [0, -2])
def test_numbers_take_bytes(kv_itemsize):
    with pytest.raises(ValueError, match=f"kv_itemsize must be above 0, got {kv_itemsize}"):
        cache_bytes(model("llama-3.1-8b"), 10, kv_itemsize)


@pytest.mark.parametrize("field", ["vocab_size", "intermediate_size"])
def test_a_missing_field_is_named(field):
    with pytest.raises(
        ValueError, match=f"the config of llama-3.1-8b has no {field}: its parameters cannot be counted"
    ):
        parameters(replace(model("llama-3.1-8b"), **{field: None}))
