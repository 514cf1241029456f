"""How much a model computes: operations of its linear layers and of its attention."""

from __future__ import annotations

from attnmesh.planner.models.model import ModelConfig
from attnmesh.planner.models.model_bytes import parameters


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
