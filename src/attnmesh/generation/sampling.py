"""The next token from its logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_ROW_BITS = 20  # a seed leaves room for so many rows of a batch
_SEEDS = 1 << (63 - _ROW_BITS)


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: the likeliest at temperature 0, else among the likeliest that make up `top_p`."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature!r}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p!r}")
        if not isinstance(self.seed, int) or not 0 <= self.seed < _SEEDS:
            raise ValueError(f"seed must be an integer from 0 to {_SEEDS - 1}, got {self.seed!r}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, always."""
        return self.temperature == 0.0

    def dice(self, row: int) -> torch.Generator:
        """What a row of a batch is drawn with: the same however many ranks there are, and whatever the other rows."""
        return torch.Generator().manual_seed((self.seed << _ROW_BITS) + row)

    def draw(self, logits: Tensor, dice: torch.Generator) -> int:
        """A token from logits [vocabulary]."""
        if self.greedy:
            return int(logits.argmax())
        logits = logits.double().cpu()
        # The likeliest stays 0 at any temperature: divided by a tiny one, it would be infinite.
        shares = torch.softmax((logits - logits.max()) / self.temperature, -1)
        ordered, ids = shares.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # the likeliest has nothing before it, so one token is always left
        ordered = torch.where(before < self.top_p, ordered, 0.0)
        return int(ids[torch.multinomial(ordered, 1, generator=dice)])
