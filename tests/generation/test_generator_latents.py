"""Latent attention (DeepSeek-V3) over a cache of latents: tokens of Transformers, and a fraction of the bytes."""

import warnings
from functools import cache

import pytest
import torch

import attnmesh as am
from attnmesh.cli.generate import quantized_cache
from attnmesh.generation.generator import Generator
from attnmesh.generation.models import LatentProjections, LatentWidths, kv_bytes_per_token
from helpers.cases import sweep
from helpers.models import (
    POSITIONS,
    STOP,
    VOCABULARY,
    attnmesh_model,
    generated_rows,
    greedy_tokens,
    on_virtual_ranks,
    random_ids,
)
from helpers.processes import run_processes

MOST = 5
PROMPTS = [random_ids(n, seed, high=30) * 2 for n, seed in ((9, 1), (16, 2), (5, 4))]
SETTINGS = {"cache_tokens": 200, "max_sequences": 3, "prefill_chunk": 16, "step_tokens": 19}
WIDTHS = LatentWidths(latent=10, rope=4, nope=8, value=6)  # of the tiny model, which has 6 heads and 2 layers


def submitted(generator, prompts):
    """The answers of requests that join one after the other."""
    requests = []
    for prompt in prompts:
        requests.append(generator.submit(prompt, max_new_tokens=MOST))
        generator.step()
    while generator.num_unfinished:
        generator.step()
    return [request.ids for request in requests]


def answers(generator, prompts=PROMPTS):
    for layer in range(generator.model.config.num_hidden_layers):
        pool = generator.engine.cache.keys(layer)
        (pool.scales if isinstance(pool, am.Quantized) else pool).fill_(torch.nan)
    drafted = generated_rows(generator, prompts, max_new_tokens=MOST, speculative=True)
    generator.reset_prefix_cache()
    return drafted, generated_rows(generator, prompts, max_new_tokens=MOST), submitted(generator, prompts)


@pytest.mark.parametrize(
    "sharding",
    [
        am.DecodeSharding(kvdp=2, cp=2),
        *(sweep(am.DecodeSharding(kvdp=n, cp=m)) for n, m in ((1, 1), (1, 3), (3, 1))),
    ],
    ids=str,
)
def test_a_model_that_every_rank_has(sharding):
    expected = [greedy_tokens("deepseek_v3", prompt, MOST) for prompt in PROMPTS]

    def rank(comm):
        return answers(Generator(attnmesh_model("deepseek_v3"), None, comm, sharding=sharding, **SETTINGS))

    for of_rank in on_virtual_ranks(sharding.ranks, rank):
        assert all(rows == expected for rows in of_rank)


@cache
def wide_model(own=None, latent=17):
    """A DeepSeek-V3 with as many heads as 8 ranks need, as Transformers computes it or with attnmesh's attention."""
    from transformers import AutoModelForCausalLM, DeepseekV3Config

    am.register_attention()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        config = DeepseekV3Config(
            vocab_size=VOCABULARY, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=8, max_position_embeddings=POSITIONS, q_lora_rank=None, kv_lora_rank=latent,
            qk_nope_head_dim=12, qk_rope_head_dim=6, v_head_dim=5, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
            topk_group=1, moe_intermediate_size=32, first_k_dense_replace=1,
            rope_parameters={
                "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
                "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
            },
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config, attn_implementation=own or "eager").eval()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, 0.0 if weight.dim() > 1 else 1.0, 0.2)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = [STOP], 0
    return model


@cache
def wide_tokens(latent=17, storage=None):
    """The tokens of Transformers in one process, over latents that are rounded as `storage` stores them."""
    rows = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        out = wide_model(latent=latent).generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MOST,
            past_key_values=None if storage is None else quantized_cache(storage),
        )  # fmt: skip
        rows.append(out[0, len(prompt) :].tolist())
    return rows


@pytest.mark.sweep  # one sharding is in test_sharded_weights.py
@pytest.mark.parametrize(
    "sharding",
    [
        am.DecodeSharding(tp, kvdp, cp)
        for tp in (1, 2, 4) for kvdp in (1, 2, 4, 8) for cp in (1, 2, 4, 8) if tp * kvdp * cp == 8
    ],
    ids=str,
)  # fmt: skip
def test_weights_over_eight_ranks(sharding):
    def rank(comm):
        model = am.models.shard_model(wide_model("attnmesh"), sharding, comm)
        return answers(Generator(model, None, comm, **SETTINGS))

    for of_rank in on_virtual_ranks(sharding.ranks, rank):
        assert all(rows == wide_tokens() for rows in of_rank)


@pytest.mark.parametrize(
    ("sharding", "whole"),
    [
        (am.DecodeSharding(kvdp=2, cp=2), True),
        *(
            sweep(am.DecodeSharding(*each), whole)
            for *each, whole in (
                (1, 1, 1, True),
                (2, 1, 2, False),
                (1, 1, 3, True),
                (4, 1, 2, False),
                (2, 2, 2, False),
                (1, 4, 1, False),
            )
        ),
    ],
    ids=str,
)
def test_quantized_latents(sharding, whole):
    """In DeepSeek's fp8_ds_mla: all tokens attend to what is stored, also those of the first chunk."""
    latent, storage = 128, "fp8_ds_mla"
    assert wide_tokens(latent, storage) != wide_tokens(latent)

    def rank(comm):
        model = wide_model("attnmesh", latent)
        model = model if whole else am.models.shard_model(model, sharding, comm)
        generator = Generator(model, None, comm, sharding=sharding, storage=storage, **SETTINGS)
        found = answers(generator)
        assert generator.stats.kv_bytes == 2 * (128 + 4 + 2 * 6) * generator.stats.cached_tokens
        return found

    for of_rank in on_virtual_ranks(sharding.ranks, rank):
        assert all(rows == wide_tokens(latent, storage) for rows in of_rank)


def on_process(comm):
    shardings = [am.DecodeSharding(tp=2, kvdp=2), am.DecodeSharding(tp=2, cp=2), am.DecodeSharding(kvdp=2, cp=2)]
    models = [am.models.shard_model(wide_model("attnmesh"), sharding, comm) for sharding in shardings]
    return [answers(Generator(model, None, comm, **SETTINGS)) for model in models]


@pytest.mark.sweep
def test_weights_over_processes():
    for of_rank in run_processes(4, on_process, timeout=240):
        assert all(rows == wide_tokens() for of_sharding in of_rank for rows in of_sharding)


def test_a_prompt_shorter_than_the_heads_of_a_rank_is_not_warned_of():
    """As attention() warns of tensors whose heads and positions may have been swapped."""
    prompt, sharding = PROMPTS[0][:2], am.DecodeSharding(tp=2)

    def rank(comm):
        generator = Generator(
            am.models.shard_model(attnmesh_model("deepseek_v3"), sharding, comm), None, comm, cache_tokens=40
        )
        return generated_rows(generator, [prompt], max_new_tokens=2)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert on_virtual_ranks(2, rank) == [[greedy_tokens("deepseek_v3", prompt, 2)]] * 2


def test_the_cache_has_one_vector_per_token():
    heads, layers, size = 6, 2, 4
    expanded = layers * heads * (WIDTHS.nope + WIDTHS.rope + WIDTHS.value) * size
    latents = layers * (WIDTHS.latent + WIDTHS.rope) * size
    model, sharding = attnmesh_model("deepseek_v3"), am.DecodeSharding(tp=2, cp=2)

    def rank(comm):
        part = am.models.shard_model(model, sharding, comm)
        generator = Generator(part, None, comm, cache_tokens=200)
        generated_rows(generator, PROMPTS[:1], max_new_tokens=2)
        pools, stats = generator.engine.cache.local.stored_tensors, generator.stats
        slots = pools[0][0, ..., 0, 0].numel()
        assert stats.kv_bytes == latents * stats.cached_tokens
        assert stats.kv_bytes_unsharded == latents * (len(PROMPTS[0]) + 1)
        return sum(pool.nbytes for pool in pools) / slots, stats.cached_tokens

    for per_token, cached in on_virtual_ranks(4, rank):
        assert per_token == latents < expanded / 7
        assert cached <= -(-len(PROMPTS[0]) // 2) + 1
    assert kv_bytes_per_token(model.config, "fp32") == latents


def test_a_full_size_cache_takes_a_fraction_of_expanded_heads():
    from transformers import DeepseekV3Config

    config = DeepseekV3Config()
    found, expanded = kv_bytes_per_token(config, "bf16"), 61 * 128 * (192 + 128) * 2
    assert found == 61 * 576 * 2
    assert expanded / found == pytest.approx(71.1, abs=0.1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_absorbed_weights_compute_the_attention_of_expanded_heads(dtype):
    generator, heads, tokens = torch.Generator().manual_seed(0), 3, 37

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).double()

    q, latents = normal(2, heads, 5, WIDTHS.nope + WIDTHS.rope), normal(2, 1, tokens, WIDTHS.cached)
    weight = normal(heads * (WIDTHS.nope + WIDTHS.value), WIDTHS.latent) / 3

    def expanded(dtype):
        latent, rope = latents.to(dtype).split([WIDTHS.latent, WIDTHS.rope], -1)
        both = (latent @ weight.to(dtype).T).unflatten(-1, (heads, -1))[:, 0].transpose(1, 2)
        nope, v = both.split([WIDTHS.nope, WIDTHS.value], -1)
        k = torch.cat([nope, rope.expand(-1, heads, -1, -1)], -1)
        return am.attention(q.to(dtype), k, v, scale=0.3).double()

    def absorbed(dtype):
        model = torch.nn.Module()
        model.layer = torch.nn.Module()
        model.layer.layer_idx, model.layer.kv_b_proj = 4, torch.nn.Linear(WIDTHS.latent, len(weight), bias=False)
        model.layer.kv_b_proj.weight = torch.nn.Parameter(weight.to(dtype), requires_grad=False)
        keys = latents.to(dtype)
        return (
            LatentProjections(model, WIDTHS)
            .attend(4, q.to(dtype), lambda queries: am.attention(queries, keys, keys[..., : WIDTHS.latent], scale=0.3))
            .double()
        )

    exact = expanded(torch.float64)
    assert exact.abs().mean() > 0.05
    if dtype == torch.float64:
        torch.testing.assert_close(absorbed(dtype), exact, rtol=1e-12, atol=1e-12)
    else:
        assert (absorbed(dtype) - exact).norm() <= 2 * (expanded(dtype) - exact).norm()


def test_expanded_keys_in_the_cache_are_refused():
    """As versions of Transformers cache them that call `update` with keys and values of all heads."""
    projections = LatentProjections(torch.nn.Module(), WIDTHS)
    with pytest.raises(
        ValueError, match="must cache a latent of one head and 10 features, got 6 of 12: older versions of"
    ):
        projections.vectors(torch.zeros(1, 6, 3, 12), torch.zeros(1, 6, 3, 6))
    with pytest.raises(ValueError, match="must cache a rope of one head and 4 features, got 1 of 6"):
        projections.vectors(torch.zeros(1, 1, 3, 10), torch.zeros(1, 1, 3, 6))
