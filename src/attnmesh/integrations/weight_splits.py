"""How the weights of a Transformers model are divided over ranks: its tensor-parallel plan, as `Split`s.

Transformers' plan of a model names the layers whose weights are divided by columns or rows. What it leaves open is
added here: heads are divided by heads (kv heads by TP rank), GPT-OSS and the attention of DeepSeek-V3 have no plan, and
the vocabulary is always divided.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from attnmesh.plan.decode import DecodeSharding
from attnmesh.plan.weights import FIRST_RANK, Heads, Split, WeightPart, weight_part

SHARDED_MODELS = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "smollm3", "granite", "starcoder2", "gemma3_text",
    "gpt_oss", "deepseek_v3",
)  # fmt: skip
"""The `model_type`s that generate with sharded weights."""

_BY_Q_HEAD = ("q_proj", "q_b_proj", "kv_b_proj")  # the latter belongs to queries and outputs if the cache has latents
_BY_KV_HEAD = ("k_proj", "v_proj")
_ATTENTION = {"self_attn.q_proj": "colwise", "self_attn.o_proj": "rowwise"}
_OWN_PLANS: dict[str, dict[str, str]] = {
    "gpt_oss": {
        **_ATTENTION, "self_attn.k_proj": "colwise", "self_attn.v_proj": "colwise",
        "mlp.experts.gate_up_proj": "interleaved_colwise", "mlp.experts.gate_up_proj_bias": "interleaved_colwise",
        "mlp.experts.down_proj": "transposed_rowwise", "mlp.experts.down_proj_bias": "first",
    },
    "deepseek_v3": {**_ATTENTION, "self_attn.q_b_proj": "colwise", "self_attn.kv_b_proj": "colwise"},
}  # fmt: skip
_REPLICATED = ("replicated_with_grad_allreduce", "moe_tp_experts")
_NUMBER = re.compile(r"\.\d+\.")


def check_sharded_model(config: Any, name: str, sharding: DecodeSharding) -> None:
    """Raise ValueError unless models of this configuration generate with weights that are divided this way."""
    if config.model_type not in SHARDED_MODELS:
        raise ValueError(
            f"model_type must be one of {', '.join(SHARDED_MODELS)} to shard its weights, got {config.model_type!r} "
            f"({name})"
        )
    heads = heads_of(config)
    sharding.check_heads(heads.q, heads.kv)


def heads_of(config: Any) -> Heads:
    """The heads of the model's attention: kv heads are those of its KV cache, one if that has latents."""
    if getattr(config, "kv_lora_rank", None) is not None:
        return Heads(config.num_attention_heads, 1)
    return Heads(config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def weight_splits(model: Any) -> dict[str, Split | None]:
    """The split of every tensor in the state of a model, by name; None: every rank holds all of it."""
    prefix = f"{model.base_model_prefix}.layers.*."
    own = {prefix + name: style for name, style in _OWN_PLANS.get(model.config.model_type, {}).items()}
    plan = {**(model.tp_plan or {}), **own}
    vocabulary = {id(layer.weight) for layer in (model.get_input_embeddings(), model.get_output_embeddings()) if layer}
    splits: dict[str, Split | None] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        is_vocabulary = id(tensor) in vocabulary
        splits[name] = Split(0, "ranks") if is_vocabulary else _split(name, tensor.ndim, plan)
    return splits


def weight_parts(
    splits: Mapping[str, Split | None], shapes: Mapping[str, tuple[int, ...]], sharding: DecodeSharding, rank: int,
    heads: Heads,
) -> dict[str, WeightPart]:  # fmt: skip
    """The part of every tensor that a rank holds. Raises ValueError if a tensor cannot be divided this way."""
    return {name: weight_part(name, shapes[name], split, sharding, rank, heads) for name, split in splits.items()}


def _split(name: str, ndim: int, plan: Mapping[str, str]) -> Split | None:
    pattern = _NUMBER.sub(".*.", name)
    layer, _, leaf = pattern.rpartition(".")
    style = plan.get(pattern) or plan.get(layer)
    if style is None or style in _REPLICATED:
        return None
    is_bias, is_attention = leaf == "bias", ".self_attn." in pattern
    projection = layer.rpartition(".")[2]
    match style:
        case "colwise":
            if is_attention and projection not in (*_BY_Q_HEAD, *_BY_KV_HEAD):
                names = ", ".join((*_BY_Q_HEAD, *_BY_KV_HEAD))
                raise ValueError(f"{name}: a projection of attention must be one of {names}, got {projection}")
            return Split(0, "ranks" if not is_attention else "q_heads" if projection in _BY_Q_HEAD else "kv_heads")
        case "rowwise":
            return FIRST_RANK if is_bias else Split(-1, "q_heads" if is_attention else "ranks", aligned=ndim == 3)
        case "packed_colwise" if ndim == 3:
            return Split(-2, "ranks", packed=2, aligned=True)
        case "interleaved_colwise":
            return Split(-1, "ranks", unit=2, aligned=True)
        case "transposed_rowwise":
            return Split(-2, "ranks", aligned=True)
        case "first":
            return FIRST_RANK
    raise ValueError(f"{name}: the tensor-parallel plan of the model has {style!r}, which is not supported")
