"""The attention of a sequence that is spread over ranks, as context parallelism computes it."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnmesh.core.masks import Mask
from attnmesh.core.merge import discount_sinks
from attnmesh.parallel.context import ContextParallel


@dataclass(frozen=True)
class SpreadPass:
    """Attention over a sequence of `length` positions, of which this rank has its layout's."""

    ranks: ContextParallel
    length: int

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, sinks: Tensor | None
    ) -> Tensor:
        """Out of this rank's queries over the keys of all ranks."""
        if sinks is None:
            return self.ranks.attention(q, k, v, mask=mask, scale=scale, length=self.length)
        out, lse = self.ranks.attention(q, k, v, mask=mask, scale=scale, length=self.length, return_lse=True)
        return discount_sinks(out, lse, sinks[:, None])
