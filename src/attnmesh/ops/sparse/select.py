"""The best of candidates: a total order of scores and keys, so that no order of arrival matters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attnmesh.ops.sparse.canonical import Slots

_LAST = torch.iinfo(torch.int32).max


def in_order(scores: Tensor, indices: Tensor) -> Slots:
    """Chosen slots in ascending order of their keys; a slot whose score is -inf was not chosen."""
    chosen = scores > -torch.inf
    indices, order = indices.masked_fill(~chosen, _LAST).sort(dim=1)
    chosen = chosen.gather(1, order)
    return Slots(indices.masked_fill(~chosen, -1), scores.gather(1, order), chosen.sum(1, dtype=torch.int32))


def reselect(candidates: Sequence[Slots], topk: int) -> Slots:
    """The best `topk` of what was chosen from several stretches of keys; the lowest key wins a tie.

    Exact if each stretch gave its own best `topk`: what is not among those is not among the best of all.
    """
    scores = [slots.scores for slots in candidates if slots.scores is not None]
    if len(scores) != len(candidates):
        raise ValueError("candidates must come with their scores")
    every = in_order(torch.cat(scores, 1), torch.cat([slots.indices for slots in candidates], 1))
    assert every.scores is not None
    best = every.scores.argsort(dim=1, descending=True, stable=True)[:, :topk]
    return in_order(every.scores.gather(1, best), every.indices.gather(1, best))
