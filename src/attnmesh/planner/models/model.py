"""What a language model is made of, as far as plans ask: heads, widths, layers, windows, experts, how it is stored."""

from __future__ import annotations

from dataclasses import dataclass, field


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
