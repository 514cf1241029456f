"""How large a model is: parameters, bytes of weights, bytes of keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from attnmesh.planner.models.model import Experts, ModelConfig


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
