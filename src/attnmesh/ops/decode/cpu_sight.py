"""Which keys the rows of a sequence see: its span, the part of it that all rows see, and the bias of the rest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.ops.decode.call import DecodeCall


class Piece(NamedTuple):
    """Keys [first, end) in `parts` equal parts. `plain`: all rows see all of them."""

    first: int
    end: int
    parts: int
    plain: bool


def pieces(span: range, plain: range, size: int, origin: int, most: int) -> Iterator[Piece]:
    """A span cut every `size` keys from `origin` on and at the ends of `plain`, at most `most` parts a piece."""
    at = span.start
    while at < span.stop:
        whole = (plain.stop - at) // size if at in plain and (at - origin) % size == 0 else 0
        if whole:
            parts = min(whole, most)
            yield Piece(at, at := at + parts * size, parts, True)
            continue
        ends = (at + size - (at - origin) % size, span.stop, plain.start, plain.stop)
        inside = at in plain
        yield Piece(at, at := min(end for end in ends if end > at), 1, inside)


class Sight:
    """What some sequences see that have one last position (and one `key_range`), and one cache if they share it."""

    def __init__(self, call: DecodeCall, sequences: range, last: int) -> None:
        tokens = call.q.shape[2]
        self._call, self._sequences = call, sequences
        self._own = last - tokens + 1  # position of the first token; below 0 it sees nothing
        if call.key_range is None:
            window = call.window or last + 1
            self._firsts = [max(0, own - window + 1) for own in range(self._own, last + 1)]
            self._ends = list(range(self._own + 1, last + 2))
        else:
            firsts, ends = (x[sequences.start].tolist() for x in call.key_range)
            self._firsts, self._ends = [max(0, first) for first in firsts], [min(end, last + 1) for end in ends]
        self.span = range(self._firsts[0], self._ends[-1] if call.mask is None else min(last + 1, call.mask.shape[3]))
        # The last row begins last; the first row ends first, before the new tokens if a tree speaks of them.
        first, stop = self._firsts[-1], self._ends[0] - (call.tree is not None)
        self.plain = range(first, stop) if stop > first and call.mask is None else range(0)
        self.owners = range(1) if call.shared else sequences
        self._pooled = call.shared and len(sequences) > 1  # the rows of several sequences meet one cache

    @property
    def may_have_gaps(self) -> bool:
        """Whether there may be keys in the span that nobody sees."""
        return self._call.mask is not None or self._call.tree is not None

    def as_rows(self, x: Tensor) -> Tensor:
        """x [n, heads, T, X] as the rows of the owners' kv heads: [owners, Hkv, rows, X]; one head stays one."""
        heads = self._call.kv_heads if x.shape[1] == self._call.q.shape[1] else 1
        if self._pooled:
            x = x.unflatten(1, (heads, -1)).transpose(0, 1)  # [Hkv, n, group, T, X]
        return x.reshape(len(self.owners), heads, -1, x.shape[-1])

    def from_rows(self, x: Tensor) -> Tensor:
        """The inverse for all heads: [n, Hq, T, X]."""
        n, (heads, tokens) = len(self._sequences), self._call.q.shape[1:3]
        if self._pooled:
            x = x[0].unflatten(1, (n, -1)).transpose(0, 1)  # [n, Hkv, group * T, X]
        return x.reshape(n, heads, tokens, x.shape[-1])

    def bias(self, first: int, end: int, dtype: torch.dtype) -> Tensor:
        """What is added to the scores of keys [first, end): [owners, Hkv or 1, rows, N], -inf where a row is blind."""
        call, tokens, n = self._call, self._call.q.shape[2], len(self._sequences)
        keys = torch.arange(first, end)
        seen = keys >= torch.tensor(self._firsts)[:, None]
        bias = torch.zeros((), dtype=dtype)
        if call.mask is not None:
            mask = self._of_sequences(call.mask)[..., first:end]
            if mask.dtype == torch.bool:
                seen = seen & mask
            else:
                bias = mask.to(dtype)
        elif call.tree is not None:
            column = keys - self._own  # which of the new tokens a key is
            named = self._of_sequences(call.tree)[:, :, column.clamp(0)]
            seen = (seen & ((column < 0) | named))[:, None]
        else:
            seen = seen & (keys < torch.tensor(self._ends)[:, None])
        bias = bias.masked_fill(~seen, -torch.inf)
        bias = bias[(None,) * (4 - bias.ndim)]
        heads = call.group if bias.shape[1] == 1 else bias.shape[1]
        return self.as_rows(bias.expand(n, heads, tokens, -1))

    def _of_sequences(self, x: Tensor) -> Tensor:
        return x if x.shape[0] == 1 else x[self._sequences.start : self._sequences.stop]
