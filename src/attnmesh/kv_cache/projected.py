"""`ProjectedTokens`: the keys and values of one step, on their way to the cache."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from attnmesh.ops.storage import Stored


@dataclass(frozen=True, eq=False)
class ProjectedTokens:
    """What of the new tokens goes to this rank's cache, and where to.

    `kv` is projected K, then V: [B, T, 2*kv*D] of all rows of the batch, or [len(own), T, 2*kv*D] of the rows `own`
    alone. Only those are written, to `slots` int64 [len(own), T] of the pools [num_blocks, block_size, kv, D]; slots
    below 0 are skipped.
    """

    kv: Tensor
    own: range
    slots: Tensor
    keys: Stored
    values: Stored

    @property
    def first(self) -> int:
        """The row of `kv` that is the first own one."""
        return 0 if len(self.kv) == len(self.own) else self.own.start
