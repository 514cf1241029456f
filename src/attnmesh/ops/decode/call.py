"""A decode call as a value: what every backend is given, already checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.storage import Stored, values_of

MOST_TOKENS = 8  # queries a sequence: more is prefill, which `attention` does


@dataclass(frozen=True)
class Splits:
    """How a sequence's keys are split among programs: to fill the chip, at most `most`, or by a fixed `size`."""

    most: int | None = None
    size: int | None = None


@dataclass(frozen=True)
class DecodeCall:
    """T queries a sequence, at positions `cur_pos - T + 1 .. cur_pos`, against the keys 0 .. cur_pos of its cache.

    `k` and `v` are caches [B or 1, Hkv, L, D], or pools [blocks, block_size, Hkv, D] with a `table` [B or 1, slots].
    A query sees the keys up to its own position; with `tree` [B or 1, T, T] it sees those before the T new tokens
    and the new ones its row names; with `mask` [B or 1, Hq or 1, T or 1, width], the keys up to cur_pos that it names
    (True) or weighs (added to the score), and none from `width` on. `window` keeps the last so many keys up to a
    query's position, itself among them. `key_range` is two tensors [B, T], first and end: query t sees `first <= k < end`
    of the keys up to cur_pos, whatever its own position. `sinks` [Hq] are scores of keys without a value.
    `cur_pos < 0` skips it. `rounded`: out comes in the dtype of q, and not in that of its sums.
    """

    q: Tensor
    k: Stored
    v: Stored
    table: Tensor | None
    cur_pos: Tensor
    mask: Tensor | None
    tree: Tensor | None
    scale: float
    window: int | None
    key_range: tuple[Tensor, Tensor] | None
    sinks: Tensor | None
    splits: Splits
    rounded: bool

    @property
    def paged(self) -> bool:
        """Whether k and v are pools of blocks."""
        return self.table is not None

    @property
    def shared(self) -> bool:
        """Whether all sequences read one cache."""
        owner = values_of(self.k) if self.table is None else self.table
        return owner.shape[0] == 1 and self.q.shape[0] > 1

    @property
    def head_axis(self) -> int:
        """The dimension of k and v that is the kv heads."""
        return 2 if self.paged else 1

    @property
    def kv_heads(self) -> int:
        """How many kv heads k and v have."""
        return values_of(self.k).shape[self.head_axis]

    @property
    def group(self) -> int:
        """Query heads a kv head."""
        return self.q.shape[1] // self.kv_heads

    @property
    def value_dim(self) -> int:
        """The width of a value, and of out."""
        return values_of(self.v).shape[-1]

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of out."""
        return self.q.dtype if self.rounded else accumulation_dtype(self.q.dtype)

    @property
    def block_size(self) -> int:
        """Tokens a block; 1 in a contiguous cache."""
        return values_of(self.k).shape[1] if self.paged else 1

    def room(self) -> State:
        """Memory for out and lse."""
        shape = (*self.q.shape[:3], self.value_dim)
        return State(
            self.q.new_empty(shape, dtype=self.out_dtype),
            self.q.new_empty(shape[:3], dtype=accumulation_dtype(self.q.dtype)),
        )

    @property
    def capacity(self) -> int:
        """Keys a sequence can have: the length of its cache, or of what its table can name."""
        return values_of(self.k).shape[2] if self.table is None else self.table.shape[1] * self.block_size


class Backend(Protocol):
    """One way to compute a call. It serves the call or says what it cannot do."""

    name: str

    def refusal(self, call: DecodeCall) -> str | None:
        """Why it cannot serve this call; None if it can."""

    def run(self, call: DecodeCall, into: State | None = None) -> State:
        """Out [B, Hq, T, Dv] and its lse [B, Hq, T], written into `into` where that is given."""
