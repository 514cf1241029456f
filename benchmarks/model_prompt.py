"""What a model is measured on."""

from __future__ import annotations

from typing import Any

import torch

PEER = "sdpa"  # Transformers' own attention
STEPS = 32  # tokens after the first


def prompt_ids(model: Any, count: int) -> list[int]:
    """Tokens of no text; the same on every rank."""
    dice = torch.Generator().manual_seed(0)
    ids: list[int] = torch.randint(1000, model.config.vocab_size, (count,), generator=dice).tolist()
    return ids
