"""Generation over int8, fp8 and bfp8 caches: the tokens of one process whose keys and values are as precise."""

import copy
from functools import cache
from itertools import product

import pytest
import torch

import attnmesh as am
from attnmesh.cli.generate import quantized_cache
from attnmesh.generation.batching import Callbacks
from attnmesh.generation.generator import Generator
from attnmesh.generation.models import BLOCK_SIZE, kv_bytes_per_token
from attnmesh.ops.storage import values_of
from helpers.cases import sweep
from helpers.models import attnmesh_model, generated_rows, on_virtual_ranks, random_ids, transformers_model
from helpers.processes import run_processes

MOST = 5
PROMPTS = [random_ids(n, seed, high=30) * 2 for n, seed in ((9, 1), (22, 2), (5, 4))]
FOLLOWING = [[*prompt, 9, 10, 11] for prompt in PROMPTS]
STORAGES = ("int8", "fp8", "bfp8")
KINDS = ("llama", "qwen3", "mistral", "gpt_oss", "gemma3_text")


@cache
@torch.inference_mode(False)
def models(kind):
    """A model with Transformers' attention, and the same one with attnmesh's; heads are as wide as bfp8 requires."""
    am.register_attention()
    narrow = transformers_model(kind)
    config = copy.deepcopy(narrow.config)
    config.head_dim = 16
    with torch.random.fork_rng():
        torch.manual_seed(KINDS.index(kind))
        plain = type(narrow)(config).eval()
        for weight in plain.parameters():
            torch.nn.init.normal_(weight, 0.0 if weight.dim() > 1 else 1.0, 0.2)
    plain.generation_config = narrow.generation_config
    ours = copy.deepcopy(plain)
    ours.set_attn_implementation("attnmesh")
    return plain, ours


@cache
def expected_tokens(kind, storage, prompt):
    """The tokens of one process."""
    ids = torch.tensor([prompt])
    out = models(kind)[0].generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=MOST, output_logits=True,
        return_dict_in_generate=True, past_key_values=quantized_cache(storage),
    )  # fmt: skip
    likeliest = torch.cat(out.logits).topk(2).values
    assert (likeliest[:, 0] - likeliest[:, 1]).min() > 1e-3, "two tokens are about as likely: choose another prompt"
    return out.sequences[0, len(prompt) :].tolist()


def expected_rows(kind, storage, prompts):
    return [expected_tokens(kind, storage, tuple(prompt)) for prompt in prompts]


def make(kind, comm, storage, sharding=None, weights=None, **settings):
    """A generator whose unused cache memory is poisoned."""
    model = models(kind)[1] if weights is None else am.models.shard_model(models(kind)[1], weights, comm)
    settings = {"cache_tokens": 200, "max_sequences": 3, "step_tokens": 19, **settings}
    generator = Generator(model, None, comm, storage=storage, sharding=sharding, **settings)
    for layer in range(model.config.num_hidden_layers):
        for pool in (generator.engine.cache.keys(layer), generator.engine.cache.values(layer)):
            if storage is None:
                pool.fill_(torch.nan)
                continue
            values_of(pool).view(torch.int8).fill_(127)  # NaN in fp8
            if storage != "fp8":
                pool.scales.fill_(torch.nan if pool.scales.is_floating_point() else 127)
    return generator


def answers(comm, kind, storage, sharding=None, weights=None, chunks=(16,)):
    """By generate, in prefill passes of any length, with drafts, over cached prefixes, and by submit."""
    for chunk in chunks:
        generator = make(kind, comm, storage, sharding, weights, prefill_chunk=chunk)
        first = [generated_rows(generator, PROMPTS, max_new_tokens=MOST, speculative=each) for each in (False, True)]
        generator = make(kind, comm, storage, sharding, weights, prefill_chunk=chunk)
        requests = [generator.submit(prompt, max_new_tokens=MOST) for prompt in PROMPTS]
        while generator.num_unfinished:
            generator.step()
        first.append([request.ids for request in requests])
        before = generator.stats.reused_tokens
        following = [generator.submit(prompt, max_new_tokens=MOST) for prompt in FOLLOWING]
        while generator.num_unfinished:
            generator.step()
        assert generator.stats.reused_tokens > before or comm.world > 1
        assert all(rows == expected_rows(kind, storage, PROMPTS) for rows in first)
        assert [request.ids for request in following] == expected_rows(kind, storage, FOLLOWING)
    return True


def check(world, *arguments, **settings):
    assert all(on_virtual_ranks(world, lambda comm: answers(comm, *arguments, **settings)))


@pytest.mark.parametrize(
    ("kind", "storage", "sharding", "weights"),
    [
        ("llama", "bfp8", None, am.DecodeSharding(tp=2, cp=2)),
        sweep("mistral", "int8", am.DecodeSharding(), None),
        sweep("gpt_oss", "fp8", am.DecodeSharding(kvdp=2, cp=2), None),
    ],
    ids=str,
)
def test_the_tokens_of_one_process_over_a_quantized_cache(kind, storage, sharding, weights):
    check((sharding or weights).ranks, kind, storage, sharding, weights)


def all_cases():
    """All models with all storage types, each with a sharding of positions or one of weights."""
    whole = [am.DecodeSharding(*each) for each in ((1, 1, 1), (1, 1, 2), (1, 1, 3), (1, 2, 1), (1, 2, 2))]
    parts = [am.DecodeSharding(*each) for each in ((2, 1, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2), (1, 1, 3), (4, 1, 1))]
    for number, (kind, storage) in enumerate(product(KINDS, STORAGES)):
        yield (kind, storage, None, parts[number % 6]) if number % 2 else (kind, storage, whole[number % 5], None)


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "storage", "sharding", "weights"), all_cases(), ids=str)
def test_the_tokens_of_one_process_for_all_models(kind, storage, sharding, weights):
    check((sharding or weights).ranks, kind, storage, sharding, weights, chunks=(None, 12))


def on_process(comm):
    both = ((am.DecodeSharding(cp=2), None), (None, am.DecodeSharding(tp=2)))
    return [answers(comm, "llama", storage, *each) for storage in STORAGES for each in both]


@pytest.mark.sweep
def test_the_tokens_of_one_process_over_processes():
    assert all(all(found) for found in run_processes(2, on_process, timeout=240))


def logits_of_prompts(comm, storage, chunk):
    found = [[] for _ in PROMPTS]
    sharding = am.DecodeSharding(cp=1 if comm is None else comm.world)
    generator = make(
        "llama",
        comm,
        storage,
        sharding,
        prefill_chunk=chunk,
        callbacks=Callbacks(on_logits=lambda row, logits: found[row].append(logits)),
    )
    generated_rows(generator, PROMPTS, max_new_tokens=2)
    return torch.stack([logits for row in found for logits in row])


@pytest.mark.parametrize("storage", ["int8", sweep("fp8")])
def test_all_tokens_of_a_prompt_attend_to_quantized_keys(storage):
    """So chunks and ranks change nothing, whereas the error of quantization itself shows."""
    one = logits_of_prompts(None, storage, None)
    plain = logits_of_prompts(None, None, None)
    assert (one - plain).abs().max() > 1e-3 * plain.abs().max()
    for chunk in (8, 17):
        assert torch.allclose(logits_of_prompts(None, storage, chunk), one, atol=1e-5 * float(one.abs().max()))
    for found in on_virtual_ranks(3, lambda comm: logits_of_prompts(comm, storage, 12)):
        assert torch.allclose(found, one, atol=1e-5 * float(one.abs().max()))


# Memory.


@pytest.mark.parametrize(("storage", "head_bytes"), [(None, 64), ("int8", 20), ("fp8", 16), ("bfp8", 17)])
def test_bytes_per_token_are_those_of_the_storage_type(storage, head_bytes):
    """Of a head of 16 features: int8 adds a scale of 4 bytes, bfp8 one byte per 16 features."""
    _, model = models("llama")
    generator = Generator(model, None, cache_tokens=200, storage=storage)
    cache = generator.engine.cache.local
    stored = sum(x.nbytes for x in cache.stored_tensors) / (cache.stats().total * BLOCK_SIZE)
    assert stored == 2 * 2 * 2 * head_bytes  # K and V, layers, kv heads
    assert kv_bytes_per_token(model.config, storage or "fp32") == stored
    generated_rows(generator, PROMPTS[:1], max_new_tokens=3)
    held = len(PROMPTS[0]) + 2
    assert (generator.stats.cached_tokens, generator.stats.kv_bytes) == (held, held * stored)


# Bad input, on every rank.


@pytest.mark.parametrize(
    ("kind", "storage", "message"),
    [
        ("llama", "int4", "storage must be None or one of fp32, fp8, int8, bfp8 .*, got 'int4'"),
        ("llama", "bf16", "got 'bf16'"),
        ("llama", 8, "storage must be .* got 8"),
        ("phi", "bfp8", "head_dim must be a multiple of 16 for bfp8, got 8"),
    ],
)
def test_a_storage_type_that_the_cache_cannot_have(kind, storage, message):
    def rank(comm):
        with pytest.raises(ValueError, match=message):
            Generator(attnmesh_model(kind), None, comm, cache_tokens=100, storage=storage)

    on_virtual_ranks(2, rank)


def test_latents_that_a_storage_type_does_not_quantize():
    """fp8_ds_mla is for latents of a multiple of 128 features: see test_generator_latents.py."""

    def rank(comm):
        model = am.models.shard_model(attnmesh_model("deepseek_v3"), am.DecodeSharding(cp=2), comm)
        for storage in ("int8", "fp8_ds_mla"):
            with pytest.raises(ValueError, match=rf"of fp32 for .* with latents of 10 \+ 4 features, got '{storage}'"):
                Generator(model, None, comm, cache_tokens=100, storage=storage)
        with pytest.raises(ValueError, match=r"one of fp32, fp8, int8, bfp8 for a model in .*, got 'fp8_ds_mla'"):
            Generator(attnmesh_model("llama"), None, comm, cache_tokens=100, storage="fp8_ds_mla")

    on_virtual_ranks(2, rank)


def test_ranks_must_have_the_same_storage_type():
    def rank(comm):
        with pytest.raises(ValueError, match=r"storage.*(int8|fp8)"):
            Generator(attnmesh_model("llama"), None, comm, cache_tokens=100, storage=("int8", "fp8")[comm.rank])

    on_virtual_ranks(2, rank)
