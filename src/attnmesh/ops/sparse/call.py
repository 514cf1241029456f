"""Calls of the sparse functions: arguments that have been checked, as every backend takes them.

Slot j of row i is valid if `bounds` says so; its key is row `indices[i, j] - bounds.k_offset` of the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from attnmesh.ops.sparse.arguments import RowBounds


class SparseCall(NamedTuple):
    """Attention of q [s_q, heads, d] over the keys k [s_kv, d] of `indices` int32 [s_q, topk].

    The values are v [s_kv, d_v] or, if it is None, the first d_v features of the keys. All have contiguous features.
    """

    q: Tensor
    k: Tensor
    v: Tensor | None
    indices: Tensor
    bounds: RowBounds
    scale: float
    d_v: int
    deterministic: bool
    backend: str

    def without_tensors(self) -> SparseCall:
        """The arguments that autograd does not save itself."""
        return self._replace(q=None, k=None, v=None)  # type: ignore[arg-type]

    def over(self, keys: Sequence[Tensor], indices: Tensor, bounds: RowBounds) -> SparseCall:
        """The call over other keys (and values), with their indices."""
        return self._replace(k=keys[0], v=None if self.v is None else keys[1], indices=indices, bounds=bounds)


class IndexerCall(NamedTuple):
    """Index scores of iq [s_q, heads, d] with weights w [s_q, heads], for keys ik [s_kv, d].

    They are of the keys of `indices` int32 [s_q, topk]; None is for operations over all keys.
    """

    iq: Tensor
    ik: Tensor
    w: Tensor
    indices: Tensor | None
    bounds: RowBounds
    scale: float
    relu: bool
    deterministic: bool
    backend: str

    def without_tensors(self) -> IndexerCall:
        """The arguments that autograd does not save itself."""
        return self._replace(iq=None, ik=None, w=None)  # type: ignore[arg-type]

    def over(self, ik: Tensor, indices: Tensor | None, bounds: RowBounds) -> IndexerCall:
        """The call over other keys, with their indices."""
        return self._replace(ik=ik, indices=indices, bounds=bounds)

    def detach(self) -> IndexerCall:
        """The call without gradients."""
        return self._replace(iq=self.iq.detach(), ik=self.ik.detach(), w=self.w.detach())
