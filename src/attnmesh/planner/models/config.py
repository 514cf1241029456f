"""What a language model is made of, as far as plans ask: heads, widths, layers, windows, experts, how it is stored."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil


@dataclass(frozen=True)
class Latent:
    """Latent attention (MLA): what is cached is one narrow vector a position, whatever the number of heads."""

    kv_rank: int  # width of what keys and values are made from
    rope: int  # width of a key that carries the position; one for all heads, cached beside
    nope: int  # width of a head's query and key that does not
    value: int  # width of a head's value
    q_rank: int | None = None  # queries are made from a vector of this width; None: from the hidden state

    @property
    def cached(self) -> int:
        """Numbers that a position keeps in a layer."""
        return self.kv_rank + self.rope


@dataclass(frozen=True)
class Experts:
    """A mixture of experts: MLPs of which each token takes a few."""

    count: int
    chosen: int  # by each token
    width: int  # intermediate size of one
    layers: int  # that have experts; the others have one dense MLP
    shared: int = 0  # sum of the intermediate sizes of those that every token takes beside


@dataclass(frozen=True)
class Stored:
    """Bits that a weight takes where it lies, scales of blocks included."""

    projections: float = 16  # of attention, and of dense and shared MLPs
    experts: float = 16
    rest: float = 16  # embedding, head, routers and norms


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a model. Attention needs the first ones only; the others are None where nobody has said them."""

    q_heads: int
    kv_heads: int
    head_dim: int  # of queries and keys; of values too, unless attention is latent
    hidden: int
    layers: int = 1
    name: str = field(default="the model", compare=False)
    vocabulary: int | None = None
    intermediate: int | None = None  # of dense MLPs
    tied: bool = False  # whether the head is the embedding
    attention_bias: bool = False
    windows: tuple[int | None, ...] = ()  # by layer: how many keys a query sees at most; empty: all of them everywhere
    latent: Latent | None = None
    experts: Experts | None = None
    stored: Stored = Stored()

    def window(self, layer: int) -> int | None:
        """How many keys a query of a layer sees at most, itself among them; None: all before it."""
        return self.windows[layer] if self.windows else None

    @property
    def window_layers(self) -> dict[int | None, int]:
        """How many layers have each window."""
        counts: dict[int | None, int] = {}
        for layer in range(self.layers):
            counts[self.window(layer)] = counts.get(self.window(layer), 0) + 1
        return counts

    @property
    def value_dim(self) -> int:
        """Width of a head's value."""
        return self.latent.value if self.latent else self.head_dim


@dataclass(frozen=True)
class Parameters:
    """Parameters by part. An embedding that is also the head is counted as the head."""

    embedding: int
    attention: int
    mlp: int  # dense MLPs, and experts that every token takes
    experts: int  # those that tokens choose from
    routers: int
    norms: int
    head: int
    chosen: int  # of the experts: what one token takes

    @property
    def total(self) -> int:
        """All of them."""
        return self.embedding + self.head + self._every_token + self.experts

    @property
    def active(self) -> int:
        """Those that a token is multiplied with. Looking up its embedding multiplies nothing."""
        return self.head + self._every_token + self.chosen

    @property
    def _every_token(self) -> int:
        return self.attention + self.mlp + self.routers + self.norms


def parameters(model: ModelConfig) -> Parameters:
    """Count a model's parameters; ValueError if its config does not say enough."""
    vocabulary = model.hidden * _said(model, "vocabulary", "vocab_size")
    experts = model.experts or Experts(count=0, chosen=0, width=0, layers=0)
    dense = model.layers - experts.layers
    width = _said(model, "intermediate", "intermediate_size") if dense else 0
    one = 3 * model.hidden  # an MLP has a gate, a way up and a way down for each number of its width
    return Parameters(
        embedding=0 if model.tied else vocabulary,
        attention=model.layers * _attention(model),
        mlp=one * (dense * width + experts.layers * experts.shared),
        experts=one * experts.layers * experts.count * experts.width,
        routers=model.hidden * experts.layers * experts.count,
        norms=model.hidden * (2 * model.layers + 1),
        head=vocabulary,
        chosen=one * experts.layers * experts.chosen * experts.width,
    )


def weight_bytes(model: ModelConfig) -> int:
    """Bytes of all weights as they are stored."""
    count, stored = parameters(model), model.stored
    projections = count.attention + count.mlp
    rest = count.total - projections - count.experts
    return ceil((projections * stored.projections + count.experts * stored.experts + rest * stored.rest) / 8)


def cached_numbers(model: ModelConfig) -> int:
    """Numbers that a layer keeps of a position: all heads' keys and values, or what latent attention makes them of."""
    return model.latent.cached if model.latent else 2 * model.kv_heads * model.head_dim


def cache_bytes_of_a_position(model: ModelConfig, number_bytes: float) -> int:
    """Bytes that a layer keeps of a position, at `number_bytes` for each number."""
    if number_bytes <= 0:
        raise ValueError(f"number_bytes must be above 0, got {number_bytes}")
    return ceil(cached_numbers(model) * number_bytes)


def cached_positions(model: ModelConfig, context: int) -> int:
    """Positions that all layers together keep of a sequence: those with a window no more than it."""
    if context < 1:
        raise ValueError(f"context must be at least 1, got {context}")
    return sum(count * min(context, window or context) for window, count in model.window_layers.items())


def cache_bytes(model: ModelConfig, context: int, number_bytes: float) -> int:
    """Bytes of keys and values of one sequence, all layers."""
    return cached_positions(model, context) * cache_bytes_of_a_position(model, number_bytes)


def _attention(model: ModelConfig) -> int:
    hidden, heads, latent = model.hidden, model.q_heads, model.latent
    if latent is not None:
        query = heads * model.head_dim
        into_query = hidden * query if latent.q_rank is None else latent.q_rank * (hidden + query)
        into_kv = hidden * latent.cached + latent.kv_rank * heads * (latent.nope + latent.value)
        return into_query + into_kv + heads * latent.value * hidden
    query, keys_and_values = heads * model.head_dim, cached_numbers(model)
    bias = query + keys_and_values + hidden if model.attention_bias else 0
    return hidden * (query + keys_and_values) + query * hidden + bias


def _said(model: ModelConfig, field: str, called: str) -> int:
    value: int | None = getattr(model, field)
    if value is None:
        raise ValueError(f"the config of {model.name} has no {called}: its parameters cannot be counted")
    return value


def linear_flops(model: ModelConfig, *, head: bool = True) -> int:
    """Operations of a token in linear layers; `head=False` without the head, which a prompt needs for its end only."""
    count = parameters(model)
    return 2 * (count.active - count.norms - (0 if head else count.head))


def pairs(context: int, window: int | None = None) -> int:
    """How many pairs of a query and a key it sees a causal sequence has, of a layer with a window or without."""
    if context < 1:
        raise ValueError(f"context must be at least 1, got {context}")
    seen = min(context, window or context)
    return seen * (seen + 1) // 2 + (context - seen) * seen


def flops_a_pair(model: ModelConfig) -> int:
    """Operations of one query with one key: a score and its value in every query head.

    Latent attention is taken as prompts compute it: keys and values of all heads are made from what is cached.
    """
    return 2 * model.q_heads * (model.head_dim + model.value_dim)


def prefill_attention_flops(model: ModelConfig, context: int) -> int:
    """Operations of attention over a prompt of `context` positions, all layers."""
    return flops_a_pair(model) * sum(n * pairs(context, window) for window, n in model.window_layers.items())


def experts_read(model: ModelConfig, rows: int) -> float:
    """The share of experts that some of `rows` tokens chose, if each chooses at random: their weights are read."""
    if model.experts is None:
        return 0.0
    return float(1 - (1 - model.experts.chosen / model.experts.count) ** rows)


def layer_weights_read(model: ModelConfig, rows: int) -> float:
    """Bytes of weights of all layers that `rows` tokens are multiplied with together, each read once."""
    count, stored = parameters(model), model.stored
    bits = (count.attention + count.mlp) * stored.projections + count.routers * stored.rest
    return (bits + count.experts * experts_read(model, rows) * stored.experts) / 8
