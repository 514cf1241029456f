"""Language models of real architectures, tiny and random, and what one process makes of a prompt with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

import attnmesh as am
from attnmesh.generation.generator import Generator
from attnmesh.integrations.transformers_attention import register_attention

KINDS = ("llama", "qwen2", "qwen3", "mistral", "gpt_oss")
LAYOUTS = {"zigzag": am.Zigzag(), "striped": am.Striped(), "contiguous": am.Contiguous()}
VOCABULARY, POSITIONS, STOP = 101, 512, 7

_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": POSITIONS, "head_dim": 8,
}  # fmt: skip
_ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"]}
_OWN = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, **_ALTERNATING},
    "qwen3": {"use_sliding_window": True, "sliding_window": 5, **_ALTERNATING},
    "mistral": {"sliding_window": 9},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7, **_ALTERNATING},
}


@cache
def plain(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """A model as Transformers computes it; one for all tests of a process, which leave it as it is.

    Its weights are large: attention decides what comes next, and two tokens are seldom about as likely.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(KINDS.index(kind))
        config = AutoConfig.for_model(kind, **_SIZES | _OWN[kind])
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(torch.float32)
        for weight in model.parameters():
            torch.nn.init.normal_(weight, 0.0 if weight.dim() > 1 else 1.0, 0.2)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = [STOP], 0
    if kind == "gpt_oss" and dtype == torch.float64:
        model.set_experts_implementation("eager")  # torch's grouped product does not know float64
    return model.to(dtype).eval()


@cache
def meshed(kind: str, dtype: torch.dtype = torch.float32) -> Any:
    """The same model, which asks attnmesh for its attention."""
    register_attention()
    model = copy.deepcopy(plain(kind, dtype))
    model.set_attn_implementation("attnmesh")
    return model


def drawn_ids(length: int, seed: int, low: int = 8, high: int = VOCABULARY) -> list[int]:
    return torch.randint(low, high, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@cache
def _continued(kind: str, prompt: tuple[int, ...], most: int) -> list[int]:
    ids = torch.tensor([prompt])
    # The mask says that no token is padding: Transformers would else hide those that look like it.
    out = plain(kind).generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=most)
    new = out[0, len(prompt) :].tolist()
    likeliest = logits_of(kind, [*prompt, *new])[len(prompt) - 1 : -1].topk(2).values
    assert (likeliest[:, 0] - likeliest[:, 1]).min() > 1e-3, "two tokens are about as likely: draw another prompt"
    return new


def continued(kind: str, prompt: list[int], most: int) -> list[int]:
    """What `model.generate` of one process says, greedily."""
    return list(_continued(kind, tuple(prompt), most))


@torch.no_grad()
def logits_of(kind: str, ids: list[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Logits [tokens, vocabulary] of one plain pass over everything."""
    return plain(kind, dtype)(input_ids=torch.tensor([ids])).logits[0]


def rows_of(generator: Generator, prompts: list[list[int]], **how: Any) -> list[list[int]]:
    """The tokens of each row, all of them."""
    rows: list[list[int]] = [[] for _ in prompts]
    for token in generator.generate(prompts, **how):
        rows[token.row].append(token.id)
    return rows


def on_ranks(world: int, fn: Callable[[am.Comm], Any]) -> list[Any]:
    return am.run_virtual(world, fn, timeout=60)
