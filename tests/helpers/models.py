"""Tiny random language models of real architectures, their outputs in one process, and models written to disk."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import attnmesh as am
from attnmesh.generation.generator import Generator
from attnmesh.integrations.transformers_attention import register_attention

KINDS = ("llama", "qwen2", "qwen3", "mistral", "gpt_oss")
TYPES = (
    *KINDS, "qwen3_moe", "mixtral", "phi", "phi3", "glm4", "olmo2", "smollm3", "granite", "cohere", "starcoder2",
    "gpt2", "gemma2", "gemma3_text", "llama4_text", "deepseek_v3",
)  # fmt: skip
"""All the architectures that are tested, each as it differs from the others: experts, widths, windows, soft caps."""
LAYOUTS = {"zigzag": am.Zigzag(), "striped": am.Striped(), "contiguous": am.Contiguous()}
VOCABULARY, POSITIONS, STOP = 101, 512, 7
WORDS = ["<s>", "</s>", "<unk>", *"abcdefghijkl", "ab"]

_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": POSITIONS, "head_dim": 8,
}  # fmt: skip
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}
_OWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, **_ALTERNATING},
    "qwen3": {"use_sliding_window": True, "sliding_window": 5, **_ALTERNATING},
    "mistral": {"sliding_window": 9},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7, **_ALTERNATING},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {"sliding_window": 6, "pad_token_id": 0},
    "glm4": {"pad_token_id": 0},
    "olmo2": {},
    "smollm3": {"no_rope_layers": [1, 0], "pad_token_id": 0},
    "granite": {
        "attention_multiplier": 0.2, "embedding_multiplier": 2.0, "logits_scaling": 1.5, "residual_multiplier": 0.7,
    },
    "cohere": {"logit_scale": 1.0},
    "starcoder2": {"sliding_window": 6},
    "gpt2": {"n_positions": POSITIONS, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    "gemma2": {"sliding_window": 6, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 8, **_ALTERNATING},
    "gemma3_text": {"sliding_window": 6, "query_pre_attn_scalar": 8, **_ALTERNATING},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"], "attention_chunk_size": 6, "no_rope_layers": [1, 0],
        "num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2, "intermediate_size_mlp": 64,
        "attn_temperature_tuning": True, "floor_scale": 4, "attn_scale": 0.5,
    },
    "deepseek_v3": {
        "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32,
        "first_k_dense_replace": 1, "num_key_value_heads": 6,
    },
}  # fmt: skip
_NOT_TAKEN = {
    "phi": {"head_dim"}, "starcoder2": {"head_dim"}, "deepseek_v3": {"head_dim"},
    "gpt2": {"head_dim", "num_key_value_heads", "intermediate_size"},
}  # fmt: skip


@cache
@torch.inference_mode(False)
def transformers_model(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return a model with Transformers' own attention; cached, so tests must not change it.

    Its weights are large: attention decides the next token, and two tokens are seldom about as likely.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(TYPES.index(kind))
        sizes = {name: size for name, size in _SIZES.items() if name not in _NOT_TAKEN.get(kind, ())}
        config = AutoConfig.for_model(kind, **sizes | _OWN[kind])
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(torch.float32)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, 0.0 if weight.dim() > 1 else 1.0, 0.2)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = [STOP], 0
    if hasattr(config, "num_local_experts") and dtype == torch.float64:
        model.set_experts_implementation("eager")  # torch's grouped product does not know float64
    return model.to(dtype).eval()


@cache
@torch.inference_mode(False)  # whatever the mode of the test that comes first
def attnmesh_model(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """Return the same model with attnmesh's attention."""
    register_attention()
    model = copy.deepcopy(transformers_model(kind, dtype))
    model.set_attn_implementation("attnmesh")
    return model


def random_ids(length: int, seed: int, low: int = 8, high: int = VOCABULARY) -> list[int]:
    return torch.randint(low, high, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@cache
def _greedy(kind: str, prompt: tuple[int, ...], most: int) -> list[int]:
    ids = torch.tensor([prompt])
    # The mask marks no token as padding: Transformers would otherwise mask ids that look like it.
    out = transformers_model(kind).generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=most
    )
    new = out[0, len(prompt) :].tolist()
    likeliest = logits_of(kind, [*prompt, *new])[len(prompt) - 1 : -1].topk(2).values
    assert (likeliest[:, 0] - likeliest[:, 1]).min() > 1e-3, "two tokens are about as likely: choose another prompt"
    return new


def greedy_tokens(kind: str, prompt: list[int], most: int) -> list[int]:
    """Return the tokens of `model.generate` in one process, greedily."""
    return list(_greedy(kind, tuple(prompt), most))


@torch.no_grad()
def logits_of(kind: str, ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the logits [tokens, vocabulary] of one pass of Transformers over all tokens."""
    return transformers_model(kind, dtype)(input_ids=torch.tensor([ids])).logits[0]


def use_small_blocks(monkeypatch, size=4):
    """Let the caches of generators have blocks of few tokens, so that short prompts have full ones."""
    for module in ("models", "engine"):
        monkeypatch.setattr(f"attnmesh.generation.{module}.BLOCK_SIZE", size)


def generated_rows(generator: Generator, prompts: list[list[int]], **how: Any) -> list[list[int]]:
    """Return all tokens of each row."""
    rows: list[list[int]] = [[] for _ in prompts]
    for token in generator.generate(prompts, **how):
        rows[token.row].append(token.id)
    return rows


def on_virtual_ranks(world: int, fn: Callable[[am.comm.Comm], Any]) -> list[Any]:
    return am.run_virtual(world, fn, timeout=60)


class OneLayer(torch.nn.Module):
    """A model of one attention layer and nothing else, which runs in a fraction of a millisecond.

    Its tokens depend on all keys and values before them, so that wrong or missing ones show.
    """

    class Config(SimpleNamespace):
        def to_dict(self) -> dict[str, Any]:
            return dict(vars(self))

    config_class, _supports_attention_backend, _is_stateful = Config, True, False  # as a PreTrainedModel has them

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.config = self.Config(
            model_type="llama", _attn_implementation="attnmesh", num_hidden_layers=1, num_key_value_heads=1,
            num_attention_heads=2, hidden_size=16, head_dim=8, vocab_size=VOCABULARY, max_position_embeddings=POSITIONS,
        )  # fmt: skip
        self.generation_config = SimpleNamespace(eos_token_id=STOP)
        self.embedding = torch.nn.Embedding(VOCABULARY, 16)
        torch.nn.init.normal_(self.embedding.weight, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("frequencies", torch.rand(16, generator=torch.Generator().manual_seed(seed)))

    def get_input_embeddings(self) -> torch.nn.Embedding:
        return self.embedding

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, *, input_ids, position_ids, past_key_values, attention_pass, logits_to_keep, **_):
        x = self.embedding(input_ids) + torch.sin(position_ids[..., None] * self.frequencies)  # [B, n, 16]
        q = x.unflatten(-1, (2, 8)).transpose(1, 2)
        k, v = past_key_values.update(q[:, :1], q[:, 1:], 0)
        out = attention_pass.attend(0, q, k, v, mask=am.Causal(), scale=1.0, sinks=None).transpose(1, 2).flatten(2)
        out = (out + x)[:, -logits_to_keep:] if logits_to_keep else out + x
        return SimpleNamespace(logits=out @ self.embedding.weight.roll(1, 0).T)


# Models and tokenizers on disk; nothing is downloaded.


_TINY = {
    "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_hidden_layers": 2,
    "intermediate_size": 48, "vocab_size": len(WORDS), "max_position_embeddings": 64, "bos_token_id": 0,
    "eos_token_id": 1, "rms_norm_eps": 1e-5,
}  # fmt: skip


def tiny_config(**changes):
    from transformers import LlamaConfig

    return LlamaConfig(**(_TINY | changes))


def tiny_llama(**changes):
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(tiny_config(**changes)).eval()


def tiny_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def write_folder(folder: Path, model=None, **how) -> Path:
    """Write a model's folder as save_pretrained does; returns the folder."""
    (tiny_llama() if model is None else model).save_pretrained(folder, **how)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def write_gguf(path: Path, model=None) -> Path:
    """Write a Llama in float32 as llama.cpp's converter does; without a model, a file of one tensor."""
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    if model is None:
        _add_metadata(writer, SimpleNamespace(**_TINY, rope_parameters={"rope_theta": 10000.0}))
        writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    else:
        _add_metadata(writer, model.config)
        _add_weights(writer, model)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_metadata(writer, config) -> None:
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3, *[1] * (len(WORDS) - 3)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def _add_weights(writer, model) -> None:
    config = model.config
    names = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "model.layers": "blk",
    }  # fmt: skip
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        values = weight.numpy()
        for part, count in heads.items():  # llama.cpp's rotary embedding pairs neighbours, not halves
            if part in name:
                values = values.reshape(count, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        writer.add_tensor(name, values)


def check_blocks(generator):
    """Every block is in one state, and the sequences are those of requests in progress."""
    for group in generator.engine.cache.by_kvdp_rank:
        group._pool.check_invariants([each.blocks for each in group.sequences.values()])
    sequences = [each for request in generator._batch.requests for each in request.sequences]
    assert sorted(each.row for each in sequences) == sorted(generator.engine.cache.sequences)
