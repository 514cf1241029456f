"""What ranks tell each other about a call."""

from __future__ import annotations

import torch
from torch import Tensor

from attnmesh.ops.sparse.mask import SparseMask


def in_words(mask: SparseMask) -> str:
    """What all ranks must say of the whole sequence alike, and which numbers they give for their own rows."""
    said = f"causal={mask.causal}, q_start={mask.q_start}, k_stride={mask.k_stride}"
    own = [name for name in ("topk_length", "q_positions", "k_start", "k_end") if getattr(mask, name) is not None]
    return f"SparseMask({said}{''.join(f', {name}' for name in own)})"


def gradients(**tensors: Tensor | None) -> list[str]:
    """Which of these want one: where one rank sends gradients, all must."""
    if not torch.is_grad_enabled():
        return []
    return [name for name, x in tensors.items() if x is not None and x.requires_grad]
