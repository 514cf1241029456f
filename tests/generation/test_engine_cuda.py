"""Models across ranks on a GPU: virtual ranks, bf16, and steps as graphs."""

import copy
from itertools import product

import pytest
import torch

pytest.importorskip("transformers")

import transformers

from attnmesh import DecodeSharding, Striped, Zigzag, run_virtual
from attnmesh.cli.generate import quantized_cache
from attnmesh.generation.generator import Generator
from attnmesh.integrations.transformers_attention import register_attention
from helpers.cases import else_sweep

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SIZES = {
    "vocab_size": 257, "hidden_size": 192, "intermediate_size": 320, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096,
}  # fmt: skip
EXTRA = {
    "llama": {},
    "mistral": {"sliding_window": 100},
    "gpt_oss": {
        "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 40,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "deepseek_v3": {  # with the widths of its full size, and without experts: routing may change with the last bit
        "num_key_value_heads": 6, "q_lora_rank": 96, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128, "v_head_dim": 128, "first_k_dense_replace": 2,
    },
}  # fmt: skip


def model_of(kind: str) -> torch.nn.Module:
    register_attention()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SIZES | EXTRA[kind])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0.0 if parameter.dim() > 1 else 1.0, 0.1)
    return model.cuda().eval()


def engine_of(model, comm=None, **settings):
    sharding = DecodeSharding(cp=1 if comm is None else comm.world)
    return Generator(model, None, comm, sharding=sharding, **{"cache_tokens": 2000, **settings}).engine


def logits_along(model, ids, comm=None, layout=None, prefill_chunk=None, **settings) -> torch.Tensor:
    """Those of the last tokens: a prompt, single steps (the third of a kind is a replayed graph), steps of three."""
    engine = engine_of(model, comm, layout=layout or Zigzag(), prefill_chunk=prefill_chunk, **settings)
    cache = engine.cache.local
    sequence = cache.allocate(ids[:600])
    while sequence.length < 600:
        begin = sequence.length
        new = cache.append([sequence], min(600 - begin, engine.prefill_chunk))
        logits = engine.prefill(sequence, begin, ids[begin : sequence.length], new)
        cache.mark_written(new)
    seen = [logits]
    for count in (1, 1, 1, 1, 1, 3, 3, 3, 3, 3):
        tokens = ids[sequence.length : sequence.length + count]
        new = cache.append([sequence], [tokens])
        seen += engine.decode([sequence], [tokens], new)[0].clone()
        cache.mark_written(new)
    return torch.stack(seen).float()


RANKS = {1: (Zigzag(), None), 4: (Zigzag(), 256), 3: (Striped(), None)}  # layout and prefill_chunk


def asked(model):
    model = copy.deepcopy(model)
    model.set_attn_implementation("attnmesh")
    return model


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "world"),
    else_sweep(  # every model on four ranks; windows striped, and the two kinds of caches on one rank
        product(EXTRA, RANKS),
        lambda kind, world: world == 4 or (kind in ("llama", "deepseek_v3")) == (world == 1),
    ),
)
def test_in_float32_the_logits_are_those_of_one_plain_forward(kind, world):
    layout, prefill_chunk = RANKS[world]
    model = model_of(kind)
    ids = torch.randint(0, 257, (620,)).tolist()
    want = model(torch.tensor([ids], device="cuda")).logits[0, 599:620]
    with torch.autograd.set_multithreading_enabled(False):
        found = run_virtual(world, lambda comm: logits_along(asked(model), ids, comm, layout, prefill_chunk))
    for mine in found:
        assert (mine - want).norm() < 1e-4 * want.norm()


@torch.no_grad()
@pytest.mark.parametrize("kind", ["llama", "deepseek_v3"])
@pytest.mark.parametrize(("world", "prefill_chunk"), [(1, None), (4, 256)])
def test_in_bf16_the_error_is_no_larger_than_that_of_sdpa(kind, world, prefill_chunk):
    exact = model_of(kind)
    ids = torch.randint(0, 257, (620,)).tolist()
    tokens = torch.tensor([ids], device="cuda")
    narrow = copy.deepcopy(exact).bfloat16()
    exact = copy.deepcopy(narrow).double()  # of the same weights
    want = exact(tokens).logits[0, 599:620]
    plain = copy.deepcopy(narrow)
    plain.set_attn_implementation("sdpa")
    sdpa = plain(tokens).logits[0, 599:620].double()
    for mine in run_virtual(world, lambda comm: logits_along(asked(narrow), ids, comm, prefill_chunk=prefill_chunk)):
        assert (mine.double() - want).norm() < 2 * (sdpa - want).norm()


def test_repeated_calls_generate_the_same_tokens():
    """From the second one on prompts are cached but for a few tokens, and from the third one steps are graphs."""
    prompts = [[(7 * i + row) % 257 for i in range(33)] for row in range(2)]
    generator = Generator(asked(model_of("llama")), None, cache_tokens=200, max_sequences=2)
    calls = [[(token.row, token.id) for token in generator.generate(prompts, max_new_tokens=5)] for _ in range(5)]
    assert calls == [calls[0]] * 5


@torch.no_grad()
@pytest.mark.parametrize(
    ("storage", "world"),
    else_sweep(  # every storage on three ranks, and one rank once
        product(["fp8", "int8", "bfp8"], [1, 3]), lambda storage, world: world == 3 or storage == "int8"
    ),
)
def test_over_a_quantized_cache_the_logits_are_those_of_one_process_as_precise(storage, world):
    """Keys that are halfway between two steps may be stored as either: a few of many differ."""
    model = model_of("llama")
    ids = torch.randint(0, 257, (620,)).tolist()
    tokens = torch.tensor([ids], device="cuda")
    want = model(tokens, past_key_values=quantized_cache(storage), use_cache=True).logits[0, 599:620]
    plain = model(tokens).logits[0, 599:620]
    for chunk in (None, 256):
        for mine in run_virtual(
            world, lambda comm, chunk=chunk: logits_along(asked(model), ids, comm, None, chunk, storage=storage)
        ):
            assert (mine - want).norm() < 0.05 * (plain - want).norm()


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "world", "chunk", "storage"),
    else_sweep(
        [
            (*case, storage)
            for case in (("gpt_oss", 1, None), ("mistral", 1, 256), ("gpt_oss", 3, 100))
            for storage in (None, "int8")
        ],
        lambda kind, world, chunk, storage: storage is None or world == 3,
    ),
)
def test_windows_that_are_kept_alone_give_the_same_logits(kind, world, chunk, storage, monkeypatch):
    model = model_of(kind)
    ids = torch.randint(0, 257, (620,)).tolist()
    want = logits_along(asked(model), ids, max_sequences=99, storage=storage)  # all is kept
    for module in ("kv_cache.block_manager", "generation.engine"):
        monkeypatch.setattr(f"attnmesh.{module}.WINDOW_MARGIN", 8)

    def rank(comm):
        return logits_along(asked(model), ids, comm, None, chunk, cache_tokens=2000 * world, storage=storage)

    for mine in run_virtual(world, rank):
        assert (mine - want).norm() < 1e-3 * want.norm()


def test_windows_are_kept_alone_here(monkeypatch):
    for module in ("kv_cache.block_manager", "generation.engine"):
        monkeypatch.setattr(f"attnmesh.{module}.WINDOW_MARGIN", 8)
    for kind, window in (("gpt_oss", 40), ("mistral", 100), ("llama", None)):
        assert engine_of(asked(model_of(kind))).cache.local.window == window
