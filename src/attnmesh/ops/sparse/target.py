"""Where attention looks, as a target for its indexer."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.core.state import accumulation_dtype
from attnmesh.ops.sparse.backend import Backend
from attnmesh.ops.sparse.mask import Rows


class AttentionTarget(NamedTuple):
    """The distribution of attention over its heads, from its natural lse."""

    q: Tensor
    k: Tensor
    lse: Tensor
    scale: float
    backend: Backend

    def over(self, keys: slice) -> AttentionTarget:
        """The same, where only some of the keys are at hand."""
        return self._replace(k=self.k[keys])

    def at(self, indices: Tensor, rows: Rows) -> Tensor:
        """The head-summed probabilities of these slots."""
        lse = self.lse.to(accumulation_dtype(self.q.dtype))
        with torch.no_grad():
            return self.backend.distribution(
                self.q, self.k, indices, rows, lse, scale=self.scale, head_group=self.q.shape[1]
            )[0]
