"""Who sees whom, written without the masks' own code: what masks, blocks and plans are held against."""

from itertools import accumulate

import torch
from torch import Tensor

from attnmesh.core.masks import And, Causal, Documents, Full, Mask, SlidingWindow


def truth(mask: Mask, q: Tensor, k: Tensor) -> Tensor:
    """Who sees whom, [q, k], written without the masks' own code."""
    q, k = q[:, None], k[None]
    match mask:
        case Full():
            return torch.ones(len(q), k.shape[1], dtype=torch.bool)
        case Causal():
            return k <= q
        case SlidingWindow(left=left, right=right):
            return (k - q <= right) & (q - k <= left)
        case Documents(lengths=lengths):
            # How many documents end at or before a position: the same number in the same document.
            ends = torch.tensor(list(accumulate(lengths)), dtype=torch.long)
            return (ends <= q[..., None]).sum(-1) == (ends <= k[..., None]).sum(-1)
        case And(parts=parts):
            return torch.stack([truth(part, q[:, 0], k[0]) for part in parts]).all(0)
    raise AssertionError(mask)
