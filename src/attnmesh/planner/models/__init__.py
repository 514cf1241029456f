"""The configuration of a language model as the planner needs it, from `config.json` files and by name.

Transformers is not needed. What follows from a configuration: parameters, bytes, operations.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import NamedTuple

from attnmesh.planner.catalog import unknown
from attnmesh.utils.files import read_json
from attnmesh.utils.sizes import check_model_sizes, check_sizes
from attnmesh.utils.validation import check_count, check_number, check_path, check_type


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (MLA): the KV cache is one vector per position, whatever the number of heads."""

    kv_rank: int  # dimension of the latent vector of keys and values
    rope: int  # dimension of the RoPE part of a key; shared by all heads, cached too
    nope: int  # dimension of a head's query and key without RoPE
    value: int  # dimension of a head's value
    q_rank: int | None = None  # dimension of the latent vector of queries; None: projected from the hidden state

    @property
    def cached(self) -> int:
        """Cached elements per position and layer."""
        return self.kv_rank + self.rope


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: every token is routed to a few of the MLPs."""

    count: int
    chosen: int  # experts per token
    width: int  # intermediate size of an expert
    layers: int  # with experts; every other layer has one dense MLP
    shared: int = 0  # total intermediate size of the shared experts


@dataclass(frozen=True)
class RecurrentLayers:
    """The recurrent layers of a model: how many there are, and the sizes of one of them.

    Attributes:
        kind: one of `planner.recurrent.KINDS`.
        count: layers.
        heads: heads of the values.
        groups: heads of the keys.
        key_dim: rows of a state.
        value_dim: columns of a state.
        parameters: of one layer, without its MLP.
        channels: of the short convolution before the recurrence; 0 without one.
        width: positions of that convolution.

    Examples:
        >>> from attnmesh.planner.models import RecurrentLayers
        >>> mamba = RecurrentLayers("mamba2", 36, 128, 1, 128, 64, parameters=103_000_000, channels=8448, width=4)
        >>> mamba.state_elements  # of one sequence and layer, with the convolution's state
        1073920
    """

    kind: str
    count: int
    heads: int
    groups: int
    key_dim: int
    value_dim: int
    parameters: int
    channels: int = 0
    width: int = 1

    @property
    def state_elements(self) -> int:
        """Elements of the states of one sequence and layer."""
        return self.heads * self.key_dim * self.value_dim + self.channels * (self.width - 1)


@dataclass(frozen=True)
class WeightBits:
    """Bits per stored weight, block scales included."""

    projections: float = 16  # attention, and dense and shared MLPs
    experts: float = 16
    rest: float = 16  # embedding, LM head, routers and norms


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a model. Attention only needs the first; sizes that are not known are None."""

    q_heads: int
    kv_heads: int
    head_dim: int  # of queries and keys; of values too, unless attention is latent
    hidden: int
    layers: int = 1
    name: str = field(default="the model", compare=False)
    vocab_size: int | None = None
    intermediate_size: int | None = None  # of dense MLPs
    tied_embeddings: bool = False  # whether the LM head is the embedding
    attention_bias: bool = False
    windows: tuple[int | None, ...] = ()  # sliding window by layer; empty: full attention in all layers
    latent: LatentAttention | None = None
    experts: Experts | None = None
    weight_bits: WeightBits = WeightBits()
    model_type: str | None = field(default=None, compare=False)  # of Transformers
    recurrent: RecurrentLayers | None = None
    attends: tuple[bool, ...] = ()  # whether a layer has attention; empty: all layers have
    attention_gate: bool = False  # whether outputs of attention are multiplied with a gate as wide as the queries
    softcap: float | None = field(default=None, compare=False)  # of attention scores
    sinks: bool = field(default=False, compare=False)  # whether heads have sinks

    def __post_init__(self) -> None:
        check_sizes(
            q_heads=self.q_heads, kv_heads=self.kv_heads, head_dim=self.head_dim, hidden=self.hidden, layers=self.layers
        )  # fmt: skip
        for name in ("vocab_size", "intermediate_size"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), least=1)
        for name in ("windows", "attends"):
            if (given := getattr(self, name)) and len(given) != self.layers:
                raise ValueError(f"{name} must have one entry for each of {self.layers} layers, got {len(given)}")

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, the query's own position included; None: full attention."""
        return self.windows[layer] if self.windows else None

    @property
    def window_layers(self) -> dict[int | None, int]:
        """The number of layers with attention by window."""
        counts: dict[int | None, int] = {}
        for layer in range(self.layers):
            if self.attends and not self.attends[layer]:
                continue
            counts[self.window(layer)] = counts.get(self.window(layer), 0) + 1
        return counts

    @property
    def attention_layers(self) -> int:
        """The number of layers with attention."""
        return sum(self.attends) if self.attends else self.layers

    @property
    def value_dim(self) -> int:
        """The head dimension of values."""
        return self.latent.value if self.latent else self.head_dim


class AttentionParameters(NamedTuple):
    """The parameters of a layer's attention by how they are sharded."""

    sharded: int = 0  # over all ranks: W_q, and what belongs to query heads only
    by_kv_head: int = 0  # with the kv heads: W_k and W_v; replicated on ranks that share a kv head
    out: int = 0  # W_out, over all ranks


@dataclass(frozen=True)
class Parameters:
    """Parameters by part. A tied embedding is counted as the LM head."""

    embedding: int
    attention: int  # and recurrent layers
    mlp: int  # dense MLPs and shared experts
    experts: int  # routed experts
    routers: int
    norms: int
    head: int
    chosen: int  # parameters of the routed experts of one token

    @property
    def total(self) -> int:
        """All parameters."""
        return self.embedding + self.head + self._every_token + self.experts

    @property
    def active(self) -> int:
        """Parameters that a token is multiplied with; the embedding is only looked up."""
        return self.head + self._every_token + self.chosen

    @property
    def _every_token(self) -> int:
        return self.attention + self.mlp + self.routers + self.norms


def parameters(model: ModelConfig) -> Parameters:
    """The number of parameters of a model; ValueError if its config has no vocabulary or intermediate size."""
    vocabulary = model.hidden * _required(model, "vocab_size")
    experts = model.experts or Experts(count=0, chosen=0, width=0, layers=0)
    dense = model.layers - experts.layers
    width = _required(model, "intermediate_size") if dense else 0
    one, recurrent = 3 * model.hidden, model.recurrent  # gate, up and down projections
    return Parameters(
        embedding=0 if model.tied_embeddings else vocabulary,
        attention=model.attention_layers * _attention(model)
        + (recurrent.count * recurrent.parameters if recurrent else 0),
        mlp=one * (dense * width + experts.layers * experts.shared),
        experts=one * experts.layers * experts.count * experts.width,
        routers=model.hidden * experts.layers * experts.count,
        norms=model.hidden * (2 * model.layers + 1),
        head=vocabulary,
        chosen=one * experts.layers * experts.chosen * experts.width,
    )


def weight_bytes(model: ModelConfig) -> int:
    """Bytes of all weights as stored."""
    count, weight_bits = parameters(model), model.weight_bits
    projections = count.attention + count.mlp
    rest = count.total - projections - count.experts
    return ceil(
        (projections * weight_bits.projections + count.experts * weight_bits.experts + rest * weight_bits.rest) / 8
    )


def kv_elements_per_position(model: ModelConfig) -> int:
    """Cached elements per position and layer: keys and values of all heads, or the latent vector."""
    return model.latent.cached if model.latent else 2 * model.kv_heads * model.head_dim


def kv_bytes_per_position(model: ModelConfig, kv_itemsize: float) -> int:
    """KV cache bytes per position and layer, with `kv_itemsize` bytes per element."""
    if kv_itemsize <= 0:
        raise ValueError(f"kv_itemsize must be above 0, got {kv_itemsize}")
    return ceil(kv_elements_per_position(model) * kv_itemsize)


def cached_positions(model: ModelConfig, context: int) -> int:
    """Cached positions of a sequence, summed over layers; a layer with a window caches no more than that."""
    if context < 1:
        raise ValueError(f"context must be at least 1, got {context}")
    return sum(count * min(context, window or context) for window, count in model.window_layers.items())


def cache_bytes(model: ModelConfig, context: int, kv_itemsize: float) -> int:
    """KV cache bytes of one sequence, all layers."""
    return cached_positions(model, context) * kv_bytes_per_position(model, kv_itemsize)


def state_bytes(model: ModelConfig) -> int:
    """Bytes of the recurrent states of one sequence, all layers, in float32."""
    return 4 * model.recurrent.count * model.recurrent.state_elements if model.recurrent else 0


def attention_parameters(model: ModelConfig) -> AttentionParameters:
    """The parameters of a layer's attention, without biases."""
    hidden, latent, query = model.hidden, model.latent, model.q_heads * model.head_dim
    if latent is None:
        return AttentionParameters(
            (1 + model.attention_gate) * hidden * query, hidden * kv_elements_per_position(model), hidden * query
        )
    # The latent projection is replicated; the rest belongs to heads, W_uk to queries and W_uv to outputs.
    into_query = hidden * query if latent.q_rank is None else latent.q_rank * (hidden + query)
    return AttentionParameters(
        sharded=into_query + latent.kv_rank * model.q_heads * latent.nope,
        by_kv_head=hidden * latent.cached,
        out=model.q_heads * latent.value * (hidden + latent.kv_rank),
    )


def _attention(model: ModelConfig) -> int:
    has_bias = model.attention_bias and model.latent is None
    bias = model.q_heads * model.head_dim + kv_elements_per_position(model) + model.hidden if has_bias else 0
    return sum(attention_parameters(model)) + bias


def _required(model: ModelConfig, field: str) -> int:
    value: int | None = getattr(model, field)
    if value is None:
        raise ValueError(f"the config of {model.name} has no {field}: its parameters cannot be counted")
    return value


def linear_flops(model: ModelConfig, *, head: bool = True) -> int:
    """Operations of a token in linear layers; `head=False` leaves out the LM head, which only a prompt's end needs."""
    count = parameters(model)
    return 2 * (count.active - count.norms - (0 if head else count.head))


def expert_fraction_read(model: ModelConfig, rows: int) -> float:
    """The fraction of experts that at least one of `rows` tokens is routed to, with random routing."""
    if model.experts is None:
        return 0.0
    return float(1 - (1 - model.experts.chosen / model.experts.count) ** rows)


def layer_weight_bytes_read(model: ModelConfig, rows: int) -> float:
    """Bytes of weights of all layers that a pass of `rows` tokens reads."""
    count, weight_bits = parameters(model), model.weight_bits
    bits = (count.attention + count.mlp) * weight_bits.projections + count.routers * weight_bits.rest
    return (bits + count.experts * expert_fraction_read(model, rows) * weight_bits.experts) / 8


_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}
_TIED_BY_DEFAULT = ("gemma",)  # config files only hold what differs from a family's defaults


@dataclass(frozen=True)
class _Fields:
    """The fields of a config file, checked when read."""

    values: Mapping[str, object]
    path: Path

    def size(self, name: str) -> int:
        """A required field."""
        if self.values.get(name) is None:
            raise ValueError(f"{self.path} has no {name}")
        return self._checked(name, at_least=1)

    def optional(self, name: str, *, at_least: int = 1) -> int | None:
        """A field that may be missing or null."""
        return None if self.values.get(name) is None else self._checked(name, at_least)

    def first(self, *names: str) -> int | None:
        """The first of several alternative names that is present."""
        return next((self.size(name) for name in names if self.values.get(name) is not None), None)

    def flag(self, name: str, *, otherwise: bool = False) -> bool:
        """A boolean field."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, bool):
            raise ValueError(f"{name} in {self.path} must be true or false, got {value!r}")
        return otherwise if value is None else value

    def positive(self, name: str) -> float | None:
        """A number above 0 that may be missing or null."""
        value = self.values.get(name)
        return None if value is None else check_number(f"{name} in {self.path}", value, above=0)

    def text(self, name: str) -> str:
        """A string field; empty if missing."""
        value = self.values.get(name)
        return value if isinstance(value, str) else ""

    def _checked(self, name: str, at_least: int) -> int:
        n = self.values[name]
        if isinstance(n, bool) or not isinstance(n, int) or n < at_least:
            what = "a positive integer" if at_least else "an integer of at least 0"
            raise ValueError(f"{name} in {self.path} must be {what}, got {n!r}")
        return n


def read_config(path: Path | str) -> ModelConfig:
    """Only the heads and sizes of attention; ValueError names what is missing. Latent attention is not supported."""
    path = check_path("path", path)
    fields = _read(path)
    if fields.values.get("kv_lora_rank") is not None:
        raise ValueError(f"{path} has kv_lora_rank: latent attention has no kv heads to shard")
    return _heads(fields)


def read_model_config(path: Path | str, name: str | None = None) -> ModelConfig:
    """The whole configuration of a model; ValueError names what is missing or not supported."""
    path = check_path("path", path)
    if name is not None:
        check_type("name", name, str, "a string")
    return _model(_read(path), name or path.parent.name or "the model")


def model_from_config(values: Mapping[str, object], path: Path) -> ModelConfig:
    """The configuration of a model from the values of a config file with all defaults; `path` is for error messages."""
    return _model(_Fields(values, path), path.parent.name or "the model")


def _model(fields: _Fields, name: str) -> ModelConfig:
    path, latent = fields.path, _latent(fields)
    heads = _heads(fields, latent)
    attends, recurs = _mixers(fields, heads.layers)
    recurrent = _recurrent(fields, heads, sum(recurs)) if any(recurs) else None
    return replace(
        heads,
        name=name,
        vocab_size=fields.optional("vocab_size"),
        intermediate_size=_intermediate_size(fields),
        tied_embeddings=fields.flag(
            "tie_word_embeddings", otherwise=fields.text("model_type").startswith(_TIED_BY_DEFAULT)
        ),
        attention_bias=fields.flag("attention_bias"),
        windows=windows(fields.values, heads.layers, path),
        recurrent=recurrent,
        attends=() if all(attends) else attends,
        attention_gate=fields.text("model_type").startswith(_GATED),
        latent=latent,
        experts=_experts(fields, heads.layers),
        weight_bits=_stored(fields),
        model_type=fields.text("model_type") or None,
    )


def _read(path: Path) -> _Fields:
    values = read_json(path, str(path))
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold one JSON object, got {type(values).__name__}")
    check_model_sizes(values, path)
    text = values.get("text_config")
    if isinstance(text, dict):  # of a multimodal model; top-level fields apply to the text model too
        shared = {name: values[name] for name in ("quantization_config", "tie_word_embeddings") if name in values}
        values = {**shared, **text}
    return _Fields(values, path)


def _heads(fields: _Fields, latent: LatentAttention | None = None) -> ModelConfig:
    q_heads = fields.size("num_attention_heads")
    kv_heads = fields.optional("num_key_value_heads") or q_heads
    if q_heads % kv_heads:
        raise ValueError(f"num_key_value_heads in {fields.path} must divide {q_heads} query heads, got {kv_heads}")
    hidden = fields.size("hidden_size")
    return ModelConfig(
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=latent.nope + latent.rope if latent else _head_dim(fields, q_heads, hidden),
        hidden=hidden,
        layers=fields.size("num_hidden_layers"),
        softcap=fields.positive("attn_logit_softcapping"),
        sinks=fields.text("model_type").startswith(_SINKS),
    )


def _head_dim(fields: _Fields, q_heads: int, hidden: int) -> int:
    head_dim = fields.optional("head_dim")
    if head_dim is None and hidden % q_heads:
        raise ValueError(f"{fields.path} has no head_dim, and hidden_size={hidden} is no multiple of {q_heads} heads")
    return head_dim or hidden // q_heads


def _latent(fields: _Fields) -> LatentAttention | None:
    kv_rank = fields.optional("kv_lora_rank")
    if kv_rank is None:
        return None
    return LatentAttention(
        kv_rank=kv_rank,
        rope=fields.size("qk_rope_head_dim"),
        nope=fields.size("qk_nope_head_dim"),
        value=fields.size("v_head_dim"),
        q_rank=fields.optional("q_lora_rank"),
    )


def _experts(fields: _Fields, layers: int) -> Experts | None:
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    count = fields.first(*(name for name in names if fields.values.get(name) != 0))
    if count is None or not any(_has_experts(fields, layer) for layer in range(layers)):
        return None
    chosen = fields.first("num_experts_per_tok", "experts_per_token", "num_experts_per_token")
    if chosen is None or chosen > count:
        raise ValueError(f"num_experts_per_tok in {fields.path} must be 1 to {count}, the experts, got {chosen}")
    # Mixtral and GPT-OSS have no moe_intermediate_size: every MLP is an expert.
    width = fields.first("moe_intermediate_size") or fields.size("intermediate_size")
    several = fields.optional("n_shared_experts", at_least=0) or fields.optional("num_shared_experts", at_least=0) or 0
    shared = several * width
    return Experts(
        count=count,
        chosen=chosen,
        width=width,
        layers=sum(_has_experts(fields, layer) for layer in range(layers)),
        shared=shared or next(filter(None, (fields.optional(name, at_least=0) for name in _SHARED)), 0),
    )


_SHARED = ("shared_expert_intermediate_size", "shared_intermediate_size")


def _has_experts(fields: _Fields, layer: int) -> bool:
    kinds, period = fields.values.get("mlp_layer_types"), fields.optional("expert_layer_period")
    if isinstance(kinds, list) and layer < len(kinds):  # Kimi Linear
        return bool(kinds[layer] == "sparse")
    if period is not None:  # Jamba
        return layer % period == (fields.optional("expert_layer_offset", at_least=0) or 0)
    dense = fields.values.get("mlp_only_layers") or []  # Qwen
    if not isinstance(dense, list):
        raise ValueError(f"mlp_only_layers in {fields.path} must be a list of layers, got {dense!r}")
    dense_first = (fields.optional(name, at_least=0) for name in ("first_k_dense_replace", "num_dense_layers"))
    first = next(filter(None, dense_first), 0)  # DeepSeek, LFM2
    every = fields.optional("moe_layer_freq") or 1
    return (
        layer not in dense
        and (layer + 1) % (fields.optional("decoder_sparse_step") or 1) == 0
        and layer >= first
        and layer % every == 0
    )


def _intermediate_size(fields: _Fields) -> int | None:
    size = fields.optional("intermediate_size") or fields.optional("block_ff_dim")
    if (
        size is None
        or fields.text("model_type") != "lfm2"
        or fields.flag("block_auto_adjust_ff_dim", otherwise=True) is False
    ):
        return size
    # LFM2 gives a size from which its own follows.
    times, multiple = fields.values.get("block_ffn_dim_multiplier", 1.0), fields.optional("block_multiple_of") or 256
    size = int(2 * size / 3)
    return multiple * -(-int((times if isinstance(times, int | float) else 1.0) * size) // multiple)


def _mixers(fields: _Fields, layers: int) -> tuple[tuple[bool, ...], tuple[bool, ...]]:
    """Whether every layer has attention, and whether it has a recurrence."""
    values = fields.values
    blocks = next((name for name in ("layers_block_type", "hybrid_override_pattern") if values.get(name)), None)
    if blocks is not None:
        raise ValueError(f"{fields.path} has {blocks}: layers of several kinds of blocks are not supported")
    kinds, indices = values.get("layer_types"), values.get("attn_layer_indices", values.get("full_attn_idxs"))
    if isinstance(kinds, list) and len(kinds) == layers:
        attends = tuple(str(kind) not in _RECURRENT for kind in kinds)  # `windows` refuses other kinds
    elif isinstance(indices, list):
        attends = tuple(layer in indices for layer in range(layers))
    elif fields.optional("attn_layer_period"):
        period, offset = fields.size("attn_layer_period"), fields.optional("attn_layer_offset", at_least=0) or 0
        attends = tuple(layer % period == offset for layer in range(layers))
    elif fields.optional("linear_num_value_heads"):
        every = fields.optional("full_attention_interval") or 4
        attends = tuple((layer + 1) % every == 0 for layer in range(layers))
    else:
        both = fields.optional("mamba_d_ssm") is not None  # Falcon-H1: side by side in every layer
        return (True,) * layers, (both,) * layers
    return attends, tuple(not each for each in attends)


def _recurrent(fields: _Fields, heads: ModelConfig, count: int) -> RecurrentLayers:
    """The recurrent layers of a model, recognized by the sizes that its config has."""
    hidden = heads.hidden

    def has(name: str) -> bool:
        return fields.values.get(name) is not None

    if has("linear_num_value_heads"):
        values, keys = fields.size("linear_num_value_heads"), fields.size("linear_num_key_heads")
        k, v = fields.size("linear_key_head_dim"), fields.size("linear_value_head_dim")
        width, channels = fields.optional("linear_conv_kernel_dim") or 4, 2 * keys * k + values * v
        projections = hidden * (channels + values * v + 2 * values) + values * v * hidden
        own = channels * width + 2 * values + v
        return RecurrentLayers("gated_delta_rule", count, values, keys, k, v, projections + own, channels, width)
    if has("linear_head_dim"):  # Kimi Linear
        n, d = fields.size("linear_num_heads"), fields.size("linear_head_dim")
        width, channels = fields.optional("linear_conv_kernel_dim") or 4, 3 * n * d
        projections = hidden * (channels + 2 * d + n) + 2 * d * n * d + n * d * hidden
        own = channels * width + n + n * d + d
        return RecurrentLayers("kimi_delta_attention", count, n, n, d, d, projections + own, channels, width)
    if has("mamba_n_heads"):
        n, state, groups = (fields.size(f"mamba_{name}") for name in ("n_heads", "d_state", "n_groups"))
        inner = fields.first("mamba_d_ssm") or (fields.optional("mamba_expand") or 2) * hidden
        width, channels = fields.optional("mamba_d_conv") or 4, inner + 2 * groups * state
        projections = hidden * (inner + channels + n) + inner * hidden
        own = channels * (width + 1) + 3 * n + inner
        return RecurrentLayers("mamba2", count, n, groups, state, inner // n, projections + own, channels, width)
    if has("mamba_d_state"):  # Jamba
        inner, state = (fields.optional("mamba_expand") or 2) * hidden, fields.size("mamba_d_state")
        rank, width = fields.first("mamba_dt_rank") or -(-hidden // 16), fields.optional("mamba_d_conv") or 4
        projections = 3 * hidden * inner + inner * (rank + 2 * state) + rank * inner
        own = inner * (width + 1) + inner * (state + 2) + rank + 2 * state
        return RecurrentLayers("mamba1", count, inner, 1, state, 1, projections + own, inner, width)
    if has("conv_L_cache"):  # LFM2
        width = fields.size("conv_L_cache")
        own = 4 * hidden * hidden + hidden * width
        return RecurrentLayers("short_convolution", count, hidden, 1, width - 1, 1, own)
    if fields.text("model_type").startswith("minimax"):
        n, d = heads.q_heads, heads.head_dim
        return RecurrentLayers("lightning_attention", count, n, n, d, d, 5 * hidden * n * d + n * d)
    raise ValueError(f"{fields.path} has recurrent layers whose sizes are not known")


def _stored(fields: _Fields) -> WeightBits:
    dtype = fields.text("dtype") or fields.text("torch_dtype") or "bfloat16"
    if dtype not in _BITS:
        raise ValueError(f"dtype in {fields.path} must be {', '.join(_BITS)}, got {dtype!r}")
    plain = _BITS[dtype]
    how = fields.values.get("quantization_config")
    if how is None:
        return WeightBits(plain, plain, plain)
    quantized = _Fields(how if isinstance(how, dict) else {}, fields.path)
    match method := quantized.text("quant_method"):
        case "mxfp4":  # experts only; 32 values of 4 bits share a scale of 8
            return WeightBits(plain, 4 + 8 / 32, plain)
        case "fp8":
            return WeightBits(8, 8, plain)
        case "gptq" | "awq":  # a scale of 16 bits and a zero for each group
            bits, group = quantized.size("bits"), quantized.values.get("group_size", 128)
            packed = bits + ((16 + bits) / group if isinstance(group, int) and group > 0 else 0)
            return WeightBits(packed, packed, plain)
        case _:
            raise ValueError(f"quant_method in {fields.path} must be mxfp4, fp8, gptq or awq, got {method or how!r}")


_RECURRENT = ("linear_attention", "mamba", "conv")  # layer types
_SINKS = ("gpt_oss",)
_GATED = ("qwen3_next", "qwen3_5")
_KINDS = {"full_attention": False, "attention": False, "sliding_attention": True} | dict.fromkeys(_RECURRENT, False)
"""Layer types, and whether they have a window."""
_PATTERN = {
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "gpt_oss": 2,
}  # every n-th layer has full attention, unless layer_types is given


def windows(fields: Mapping[str, object], layers: int, path: Path) -> tuple[int | None, ...]:
    """The sliding window of every layer; empty if none has one. A window includes the query's own position."""
    if fields.get("attention_chunk_size") is not None:
        raise ValueError(f"{path} has attention_chunk_size: chunked attention is not supported")
    slides = _sliding(fields, layers, path)
    if not any(slides):
        return ()
    window = fields.get("sliding_window")
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(f"sliding_window in {path} must be a positive integer, got {window!r}")
    return tuple(window if slide else None for slide in slides)


def _sliding(fields: Mapping[str, object], layers: int, path: Path) -> list[bool]:
    kinds = fields.get("layer_types")
    if kinds is not None:
        return _by_kind(kinds, layers, path)
    if fields.get("sliding_window") is None or fields.get("use_sliding_window") is False:
        return []
    if fields.get("use_sliding_window"):  # Qwen: the first layers have full attention
        first = fields.get("max_window_layers", 0)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ValueError(f"max_window_layers in {path} must be an integer of at least 0, got {first!r}")
        return [layer >= first for layer in range(layers)]
    pattern = fields.get("sliding_window_pattern") or _PATTERN.get(str(fields.get("model_type")))
    if pattern is None:  # Mistral: all layers
        return [True] * layers
    if not isinstance(pattern, int) or pattern < 1:
        raise ValueError(f"sliding_window_pattern in {path} must be a positive integer, got {pattern!r}")
    return [(layer + 1) % pattern != 0 for layer in range(layers)]


def _by_kind(kinds: object, layers: int, path: Path) -> list[bool]:
    if not isinstance(kinds, list) or len(kinds) != layers:
        raise ValueError(f"layer_types in {path} must list one kind for each of {layers} layers, got {kinds!r}")
    strange = sorted({str(kind) for kind in kinds} - set(_KINDS))
    if strange:
        raise ValueError(f"layer_types in {path} must be {' or '.join(_KINDS)}, got {', '.join(strange)}")
    return [_KINDS[str(kind)] for kind in kinds]


_FOLDER = Path(__file__).parent
_ALIASES = {"llama-3.3-70b": "llama-3.1-70b", "deepseek-r1": "deepseek-v3", "mistral-7b-v0.1": "mistral-7b"}


def model_names() -> list[str]:
    """The names that `model` accepts."""
    return sorted([path.stem for path in _FOLDER.glob("*.json")] + list(_ALIASES))


def model(name_or_path: str | Path) -> ModelConfig:
    """A model by its name, its config file, or a folder with one.

    An existing file or folder is read; anything else must be a name. An owner before the name, upper case and the
    suffix `-Instruct` are ignored: `meta-llama/Llama-3.1-8B-Instruct` is `llama-3.1-8b`.
    """
    path = check_path("name_or_path", name_or_path)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ValueError(f"the folder {path} has no config.json")
        return read_model_config(path / "config.json")
    if path.is_file():
        return read_model_config(path)
    name = _plain(str(name_or_path))
    if name in model_names():
        return _known(_ALIASES.get(name, name))
    if path.suffix == ".json" or path.is_absolute() or len(path.parts) > 2:
        raise ValueError(f"there is no config file or folder {path}")
    raise unknown("model (nor is it a config file)", str(name_or_path), model_names())


def _plain(name: str) -> str:
    owner, _, last = name.strip().lower().rpartition("/")
    return (name.lower() if "/" in owner or owner in (".", "..") else last).removesuffix("-instruct")


@cache
def _known(name: str) -> ModelConfig:
    return read_model_config(_FOLDER / f"{name}.json", name)
