"""Every decoder that trains over ranks also generates, by what its layers do: the tokens of `generate`."""

import warnings

import pytest
import torch

import attnmesh as am
from attnmesh.generation.attention_calls import attention_calls
from attnmesh.generation.generator import Generator
from attnmesh.integrations.transformers_attention import register_attention
from helpers.cases import else_sweep
from helpers.decoder_types import (
    MOST,
    PROMPTS,
    all_types,
    generate,
    greedy,
    quiet,
    row_of,
    sharded_types,
    written,
    written_of,
)
from helpers.models import generated_rows, on_virtual_ranks, tiny_tokenizer, use_small_blocks
from helpers.small_models import small_model

DIFFERENT = {
    "gemma2": "soft cap",
    "gemma3n_text": "layers that share keys and values, activations that are cut by their distribution",
    "gemma4_text": "head dims that differ between layers",
    "llama4_text": "chunks, queries scaled by position",
    "mimo_v2_flash": "kv heads that differ between layers, values of another width, sinks in some layers",
    "diffllama": "two attention calls in a layer, with values that are cut and repeated",
    "hrm_text": "layers that run several times in a pass",
    "jetmoe": "keys that are repeated after the cache",
    "deepseek_v2": "latents",
    "longcat_flash": "two attentions in a layer, with latents",
    "opt": "learned positions with an offset",
    "gpt_neox": "attention and MLP in parallel, rotary embedding of a part of the head",
    "cohere2": "parallel blocks, layers without rotary embedding",
}


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    """Blocks of few tokens, and windows that leave blocks behind."""
    use_small_blocks(monkeypatch)
    for module in ("kv_cache.block_manager", "generation.engine"):
        monkeypatch.setattr(f"attnmesh.{module}.WINDOW_MARGIN", 8)
    register_attention()
    with torch.random.fork_rng(), warnings.catch_warnings():
        quiet()
        yield


ALSO_COVERED = ("jetmoe", "longcat_flash", "gpt_neox", "cohere2", "gemma2", "deepseek_v2")  # by parts of the others


@pytest.mark.parametrize("kind", else_sweep([(kind,) for kind in DIFFERENT], lambda kind: kind not in ALSO_COVERED))
def test_the_types_that_differ_most(kind):
    generate(kind, 2, 8)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", DIFFERENT)
def test_drafts_and_prompts_in_one_chunk(kind):
    generate(kind, 1, None)
    generate(kind, 3, 16, speculative=True)


@pytest.mark.sweep
@pytest.mark.parametrize("kind", sharded_types())
def test_types_with_sharded_weights(kind, tmp_path):
    small_model(kind, "attnmesh").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    sharding = am.DecodeSharding(tp=2, cp=2)

    def rank(comm):
        part, _ = am.load_model(tmp_path, sharding=sharding, comm=comm)
        generator = Generator(part, None, comm, cache_tokens=200, max_sequences=3, prefill_chunk=8)
        return generated_rows(generator, PROMPTS, max_new_tokens=MOST, stop=[])

    assert on_virtual_ranks(sharding.ranks, rank) == [greedy(kind)[0]] * sharding.ranks


@pytest.mark.sweep
@pytest.mark.parametrize("part", range(8))
def test_every_type_is_right_or_refused_as_the_documentation_says(part):
    """Loss, logits and generated tokens over ranks are those of one process, or the reason is that of the table."""
    for kind in all_types()[part::8]:
        row, said = row_of(kind), written_of(kind)
        assert said == (None if row is None else str(row) if row.trains or row.generates else row.why), kind


def test_the_counts_below_the_table_are_those_of_its_rows():
    said = [written_of(kind) for kind in all_types()]
    served, unknown = sum(str(each).startswith("| ") for each in said), said.count(None)
    text = f"{served} types are served, {len(said) - served - unknown} are refused, and {unknown} have not been tried"
    assert text in written()


# What is cached.


def test_layers_that_share_keys_and_values_share_a_cache():
    found = attention_calls(small_model("gemma3n_text", "attnmesh"))
    assert [(call.layer, call.is_first) for call in found.calls] == [(0, True), (1, True), (0, False), (1, False)]
    assert found.windows == (5, None)


def test_every_layer_has_its_own_shapes():
    shapes = {
        kind: [(layer.kv_heads, layer.head_dim, layer.value_dim, layer.window) for layer in calls.layers]
        for kind in ("mimo_v2_flash", "gemma4_text")
        for calls in [attention_calls(small_model(kind, "attnmesh"))]
    }
    assert shapes["mimo_v2_flash"] == [(2, 8, 6, None), (4, 8, 6, 5)]
    assert shapes["gemma4_text"] == [(2, 8, 8, 5), (2, 16, 16, None), (2, 8, 8, 5)]


def test_latents_are_cached_where_the_model_expands_them():
    calls = attention_calls(small_model("deepseek_v2", "attnmesh"))
    assert [(layer.kv_heads, layer.head_dim, layer.value_dim) for layer in calls.layers] == [(1, 14, 10)] * 2
    model = small_model("deepseek_v2", "attnmesh")
    for layer in model.model.layers:  # of other code than is known: latents are doubled as they are expanded
        layer.self_attn.kv_b_proj.register_forward_hook(lambda _, __, out: 2 * out)
    other = attention_calls(model)
    assert other.latent is None
    assert [(layer.kv_heads, layer.head_dim, layer.value_dim) for layer in other.layers] == [(4, 12, 6)] * 2


def test_what_is_cached_by_layer_serves_beams_and_quantized_storage_and_is_not_moved():
    model, prompt = small_model("mimo_v2_flash", "attnmesh"), PROMPTS[:1]

    def rank(comm):
        how = {"cache_tokens": 200, "max_sequences": 3, "sharding": am.DecodeSharding(cp=comm.world)}
        quantized = Generator(model, None, comm, storage="int8", **how)
        found = generated_rows(quantized, prompt, max_new_tokens=4, stop=[], num_beams=3)
        quantized.submit(prompt[0], max_new_tokens=4, stop=[])
        quantized.step()
        with pytest.raises(ValueError, match=r"must have the same kv_heads in every layer, got \(2, 4\)"):
            am.generation.move_requests(quantized, Generator(model, None, comm, storage="int8", **how), comm)
        return found

    alone, *both = [*on_virtual_ranks(1, rank), *on_virtual_ranks(2, rank)]
    assert both == [alone, alone]


# What is refused, with the layer.


class Unlike(torch.nn.Module):
    """The attention of a layer of Llama, replaced by one that does something else."""

    def __init__(self, attention, how):
        super().__init__()
        self.attention, self.how, self.layer_idx, self.passes = attention, how, 0, 0

    def forward(self, hidden_states, past_key_values=None, **kwargs):
        self.passes += 1
        if self.how == "attends elsewhere":
            past_key_values.update(hidden_states[:, None], hidden_states[:, None], 0)
            return hidden_states, None
        if self.how == "reads the cache":
            hidden_states = hidden_states + past_key_values.layers[0].keys.mean()
        if self.how == "stops attending" and self.passes > 1:
            return hidden_states, None
        if self.how == "attends again" and self.passes > 1:
            self.attention(hidden_states, past_key_values=past_key_values, **kwargs)
        return self.attention(hidden_states, past_key_values=past_key_values, **kwargs)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("attends elsewhere", "LlamaForCausalLM: layer 0 caches keys and values, but does not attend by the attention"),
        ("reads the cache", "LlamaForCausalLM: the model must not read 'layers' of its KV cache"),
        ("stops attending", r"a pass must have 2 attention calls, got 1: model\.layers\.1\.self_attn is missing"),
        ("attends again", r"a pass must have 2 attention calls, got another after model\.layers\.1\.self_attn"),
    ],
)  # fmt: skip
def test_a_layer_that_does_something_else_is_refused(how, message):
    model = small_model("llama", "attnmesh")
    model.model.layers[0].self_attn = Unlike(model.model.layers[0].self_attn, how)
    with pytest.raises(ValueError, match=message):
        list(Generator(model, cache_tokens=64).generate([[8, 9, 10]], max_new_tokens=2, stop=[]))


def encoder(kind):
    """A small model that is no decoder."""
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 24}
    tokens = {"vocab_size": 53, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    match kind:
        case "t5":
            small = {"d_model": 32, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 4}
            return transformers.T5ForConditionalGeneration, transformers.T5Config(**small, **tokens)
        case "bert":
            return transformers.BertForMaskedLM, transformers.BertConfig(**sizes, **tokens)
        case "roberta":
            return transformers.RobertaForMaskedLM, transformers.RobertaConfig(**sizes, **tokens)
    more = {"cls_token_id": 1, "sep_token_id": 2}
    return transformers.ModernBertForMaskedLM, transformers.ModernBertConfig(**sizes, **tokens, **more)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("t5", "T5ForConditionalGeneration: the model has attention code of its own"),
        ("bert", r"masks must be causal for a model that generates, got Full\(\)"),
        ("modernbert", r"masks must be causal for a model that generates, got Full\(\)"),
        ("roberta", "positions must be position_ids that begin with 0, got a model that counts them"),
    ],
)
def test_encoders_are_refused_in_words_on_every_rank(kind, message):
    cls, config = encoder(kind)
    model = cls._from_config(config, attn_implementation="attnmesh").eval()

    def rank(comm):
        with pytest.raises(ValueError, match=message):
            Generator(model, None, comm, cache_tokens=64)

    on_virtual_ranks(2, rank)
