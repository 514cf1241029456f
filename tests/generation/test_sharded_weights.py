"""Models whose weights are divided over ranks: the tokens of one process, whatever the sharding."""

from functools import cache

import pytest
import torch

import attnmesh as am
from attnmesh.generation import Callbacks
from attnmesh.generation.generator import Generator
from attnmesh.generation.models import BLOCK_SIZE, ShardedMemory
from attnmesh.integrations.transformers_attention import register_attention
from attnmesh.models.sharded import sharded_weights
from helpers.cases import first, in_turn, sweep
from helpers.models import (
    POSITIONS,
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
KINDS = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "smollm3", "granite", "starcoder2", "gemma3_text",
    "gpt_oss", "deepseek_v3",
)  # fmt: skip
SETTINGS = {"cache_tokens": 200, "max_sequences": 3, "step_tokens": 19}


def all_shardings(most):
    return [
        am.DecodeSharding(tp, kvdp, cp)
        for tp in (1, 2, 4) for kvdp in range(1, most + 1) for cp in range(1, most + 1) if tp * kvdp * cp <= most
    ]  # fmt: skip


def generator_of(model, comm, sharding, **settings):
    """A generator whose unused cache memory is poisoned."""
    generator = Generator(am.models.shard_model(model, sharding, comm), None, comm, **SETTINGS | settings)
    for layer in range(model.config.num_hidden_layers):
        generator.engine.cache.keys(layer).fill_(torch.nan)
        generator.engine.cache.values(layer).fill_(torch.nan)
    return generator


def answers(comm, kind, sharding, chunks):
    """The answers of a rank: by generate, in prefill passes of any length, and by submit, in others."""
    model, found = attnmesh_model(kind), []
    for chunk in chunks:
        generator = generator_of(model, comm, sharding, prefill_chunk=chunk)
        found.append(generated_rows(generator, PROMPTS, max_new_tokens=MOST))
    found.append(generated_rows(generator, PROMPTS, max_new_tokens=MOST, speculative=True))
    requests = [generator.submit(prompt, max_new_tokens=MOST) for prompt in PROMPTS]
    while generator.num_unfinished:
        generator.step()
    return [*found, [request.ids for request in requests]]


@pytest.mark.parametrize(
    ("kind", "sharding"),
    [
        ("llama", am.DecodeSharding(tp=2, kvdp=1, cp=2)),
        sweep("llama", am.DecodeSharding(tp=1, kvdp=3, cp=2)),
        sweep("qwen3", am.DecodeSharding(tp=4)),  # more than kv heads
        sweep("qwen3_moe", am.DecodeSharding(tp=2, kvdp=2)),
        sweep("gpt_oss", am.DecodeSharding(kvdp=2, cp=2)),
        sweep("deepseek_v3", am.DecodeSharding(tp=3, cp=2)),
    ],
    ids=str,
)
def test_the_tokens_of_one_process(kind, sharding):
    compare(kind, sharding, chunks=[16])


def compare(kind, sharding, chunks):
    expected = [greedy_tokens(kind, prompt, MOST) for prompt in PROMPTS]
    for of_rank in on_virtual_ranks(sharding.ranks, lambda comm: answers(comm, kind, sharding, chunks)):
        assert all(rows == expected for rows in of_rank)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "sharding"),
    in_turn(KINDS, [am.DecodeSharding(*each) for each in ((1, 1, 5), (2, 3, 1), (4, 1, 1), (1, 2, 3), (2, 1, 3))]),
    ids=str,
)
def test_the_tokens_of_one_process_for_all_models(kind, sharding):
    compare(kind, sharding, chunks=[None, 12])


@cache
def wide_llama(kv_heads):
    """A Llama with as many query heads as 8 ranks need."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    register_attention()
    with torch.random.fork_rng():
        torch.manual_seed(kv_heads)
        config = LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=72, num_hidden_layers=2, num_attention_heads=8,
            num_key_value_heads=kv_heads, max_position_embeddings=POSITIONS, tie_word_embeddings=True,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config, attn_implementation="attnmesh").eval()
        for weight in model.parameters():
            torch.nn.init.normal_(weight, 0.0 if weight.dim() > 1 else 1.0, 0.2)
    model.generation_config.eos_token_id = None
    return model


def wide_answers(comm, kv_heads, sharding):
    """On processes and virtual ranks."""
    generator = generator_of(wide_llama(kv_heads), comm, sharding, prefill_chunk=16)
    return generated_rows(generator, PROMPTS, max_new_tokens=MOST)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kv_heads", "sharding"), in_turn([2, 4], [each for each in all_shardings(8) if each.ranks == 8]), ids=str
)
def test_the_tokens_of_one_process_over_eight_ranks(kv_heads, sharding):
    expected = generated_rows(Generator(wide_llama(kv_heads), **SETTINGS), PROMPTS, max_new_tokens=MOST)
    for rows in on_virtual_ranks(sharding.ranks, lambda comm: wide_answers(comm, kv_heads, sharding)):
        assert rows == expected


@pytest.mark.parametrize("sharding", [am.DecodeSharding(cp=3), sweep(am.DecodeSharding(tp=4))], ids=str)
def test_heads_that_do_not_divide(sharding):
    test_the_tokens_of_one_process_over_eight_ranks(4, sharding)


def on_process(comm):
    shardings = [each for each in all_shardings(4) if each.ranks == comm.world]
    return [wide_answers(comm, 2, sharding) for sharding in shardings]


@pytest.mark.sweep
@pytest.mark.parametrize("world", [2, 4])
def test_the_tokens_of_one_process_over_processes(world):
    expected = generated_rows(Generator(wide_llama(2), **SETTINGS), PROMPTS, max_new_tokens=MOST)
    for of_rank in run_processes(world, on_process, timeout=240):
        assert len(of_rank) >= 3
        assert all(rows == expected for rows in of_rank)


def test_a_rank_holds_its_part_only():
    whole = attnmesh_model("llama")
    sharding = am.DecodeSharding(tp=2, kvdp=1, cp=3)

    def rank(comm):
        generator = generator_of(whole, comm, sharding)
        rows = generated_rows(generator, PROMPTS[:1], max_new_tokens=2)
        return sum(weight.numel() for weight in generator.model.parameters()), generator.stats, rows

    everything = sum(weight.numel() for weight in whole.parameters())
    replicated = 2 * 2 * 8 * 48  # in every layer, keys and values of one of two heads instead of a sixth of both
    norms = 5 * 48
    for held, stats, _ in on_virtual_ranks(6, rank):
        assert abs(held - everything / 6) < replicated + norms + 400
        assert stats.kv_bytes_unsharded == 2 * stats.kv_bytes / stats.cached_tokens * (len(PROMPTS[0]) + 1)


def test_sampling_and_prefix_reuse_are_those_of_one_rank():
    sampling = am.Sampling(temperature=1.0, top_p=0.9, seed=3)
    longer = [[*prompt, 9, 10] for prompt in PROMPTS]

    def rank(comm):
        generator = generator_of(attnmesh_model("llama"), comm, am.DecodeSharding(tp=2, kvdp=2))
        rows = [generated_rows(generator, each, max_new_tokens=4, sampling=sampling) for each in (PROMPTS, longer)]
        return rows, generator.stats.reused_tokens

    one = Generator(attnmesh_model("llama"), None, **SETTINGS)
    expected = [generated_rows(one, each, max_new_tokens=4, sampling=sampling) for each in (PROMPTS, longer)]
    for rows, reused in on_virtual_ranks(4, rank):
        assert rows == expected
        assert reused == sum(len(prompt) // BLOCK_SIZE * BLOCK_SIZE for prompt in PROMPTS) > 0


# Bad input, on every rank.


@pytest.mark.parametrize(
    ("kind", "sharding", "message"),
    [
        ("gpt2", am.DecodeSharding(tp=2), "must divide the projections of queries, .* got none of them"),
        ("olmo2", am.DecodeSharding(kvdp=2), "q_proj.weight: the tensor-parallel plan .* has 'colwise_gather_output'"),
        (
            "llama",
            am.DecodeSharding(tp=3),
            "tp must divide the kv heads or be a multiple of them, got tp=3",
        ),
        ("llama", am.DecodeSharding(tp=4, cp=2), "q_heads must be at least the number of ranks, got q_heads=6 for 4 x"),
        ("llama", am.DecodeSharding(tp=2, cp=2), "sharding must have as many ranks as the group"),
    ],
)
def test_what_cannot_be_divided_is_refused_on_all_ranks(kind, sharding, message):
    def rank(comm):
        with pytest.raises(ValueError, match=message):
            am.models.shard_model(attnmesh_model(kind), sharding, comm)

    on_virtual_ranks(8 if sharding.cp == 2 and sharding.tp == 4 else sharding.ranks - (sharding.ranks == 4), rank)


def test_weights_that_differ_between_ranks_are_refused():
    def rank(comm):
        model = am.models.shard_model(attnmesh_model("llama"), am.DecodeSharding(cp=2), comm)
        if comm.rank == 1:
            model.model.layers[0].self_attn.k_proj.weight.data[3, 4] += 1
        with pytest.raises(ValueError, match=r"different weights in 1 of .*layers\.0\.self_attn\.k_proj\.weight"):
            Generator(model, None, comm, cache_tokens=100)

    on_virtual_ranks(2, rank)


def test_a_sharded_model_has_one_sharding():
    def rank(comm):
        whole, sharding = attnmesh_model("llama"), am.DecodeSharding(tp=2)
        with pytest.raises(ValueError, match=r"tp = 1 for a model that every rank has .*got TP2"):
            Generator(whole, None, comm, cache_tokens=100, sharding=sharding)
        model = am.models.shard_model(whole, sharding, comm)
        assert sharded_weights(whole) is None
        with pytest.raises(ValueError, match="sharding must be that of the model, TP2, or None, got CP2"):
            Generator(model, None, comm, cache_tokens=100, sharding=am.DecodeSharding(cp=2))
        with pytest.raises(ValueError, match="model must be whole, got a sharded model"):
            am.models.shard_model(model, sharding, comm)
        with pytest.raises(ValueError, match=f"comm must have the ranks of the sharded model, {comm.rank} of 2"):
            Generator(model, None, cache_tokens=100)

    on_virtual_ranks(2, rank)


def test_it_works_on_after_an_interruption_and_after_invalid_logits():
    sharding, prompts = am.DecodeSharding(tp=1, kvdp=2), PROMPTS[:2]

    def rank(comm):
        failing = [True]

        def on_logits(row, logits):
            if row == 1 and failing[0]:
                raise OSError("gone")

        generator = generator_of(attnmesh_model("llama"), comm, sharding, callbacks=Callbacks(on_logits=on_logits))
        with pytest.raises(OSError, match="gone"):
            generated_rows(generator, prompts, max_new_tokens=MOST)
        failing[0] = False
        after = generated_rows(generator, prompts, max_new_tokens=MOST)
        weight = generator.model.model.norm.weight
        weight.data.neg_().log_()  # NaN
        with pytest.raises(ValueError, match="row 0: the logits have a NaN"):
            generated_rows(generator, prompts, max_new_tokens=MOST)
        weight.data.copy_(attnmesh_model("llama").model.norm.weight)
        return after, generated_rows(generator, prompts, max_new_tokens=MOST)

    expected = [greedy_tokens("llama", prompt, MOST) for prompt in prompts]
    assert on_virtual_ranks(2, rank) == [(expected, expected)] * 2


@pytest.mark.parametrize(
    ("kind", "sharding"),
    first(1, [
        ("llama", am.DecodeSharding(tp=2, kvdp=1, cp=3)),
        ("gpt_oss", am.DecodeSharding(kvdp=2, cp=2)),
        ("qwen3_moe", am.DecodeSharding(tp=4)),  # more than kv heads
        ("deepseek_v3", am.DecodeSharding(tp=3)),
        *in_turn(KINDS, [am.DecodeSharding(tp=2), am.DecodeSharding(cp=3), am.DecodeSharding(2, 3, 1)]),
    ]),
    ids=str,
)  # fmt: skip
def test_the_memory_of_a_rank_is_known_before_it_loads(kind, sharding):
    settings = {"cache_tokens": 500, "max_sequences": 5, "prefill_chunk": 37}
    model = attnmesh_model(kind)
    known = ShardedMemory(model.config, torch.float32, **settings).of(sharding)

    def rank(comm):
        generator = generator_of(model, comm, sharding, **settings)
        caches = [generator.engine.cache.keys, generator.engine.cache.values]
        tensors = [pool(layer) for pool in caches for layer in range(model.config.num_hidden_layers)]
        pools: dict[int, int] = {}  # values of latents are a part of the keys
        for x in tensors:
            pools.setdefault(x.data_ptr(), x.nbytes)
        weights = {id(x): x for x in generator.model.state_dict(keep_vars=True).values()}
        return sum(x.nbytes for x in weights.values()), sum(pools.values())

    held = on_virtual_ranks(sharding.ranks, rank)
    assert known.weights == max(weights for weights, _ in held)
    assert {known.kv_cache} == {kv_cache for _, kv_cache in held}
