"""The configuration of a language model as the planner needs it, and what follows: parameters, bytes, operations."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil
from typing import NamedTuple

from attnmesh.planner.counts import check_sizes
from attnmesh.utils.validation import check_count


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

    def __post_init__(self) -> None:
        check_sizes(
            q_heads=self.q_heads, kv_heads=self.kv_heads, head_dim=self.head_dim, hidden=self.hidden, layers=self.layers
        )  # fmt: skip
        for name in ("vocab_size", "intermediate_size"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), least=1)
        if self.windows and len(self.windows) != self.layers:
            raise ValueError(f"windows must have one entry for each of {self.layers} layers, got {len(self.windows)}")

    def window(self, layer: int) -> int | None:
        """The sliding window of a layer, the query's own position included; None: full attention."""
        return self.windows[layer] if self.windows else None

    @property
    def window_layers(self) -> dict[int | None, int]:
        """The number of layers by window."""
        counts: dict[int | None, int] = {}
        for layer in range(self.layers):
            counts[self.window(layer)] = counts.get(self.window(layer), 0) + 1
        return counts

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
    attention: int
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
    one = 3 * model.hidden  # gate, up and down projections
    return Parameters(
        embedding=0 if model.tied_embeddings else vocabulary,
        attention=model.layers * _attention(model),
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


def attention_parameters(model: ModelConfig) -> AttentionParameters:
    """The parameters of a layer's attention, without biases."""
    hidden, latent, query = model.hidden, model.latent, model.q_heads * model.head_dim
    if latent is None:
        return AttentionParameters(hidden * query, hidden * kv_elements_per_position(model), hidden * query)
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
