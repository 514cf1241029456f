"""A step of generation over a cache that is spread over ranks: where its tokens are, and what they see, on a device.

Steps of equally many tokens share their tensors. Each append fills them anew, where they are: a CUDA graph captured
with one step serves all later ones.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.kv_cache.check import check_sizes
from attnmesh.kv_cache.sequence import NewTokens, ShardedSequence


class StepTensors:
    """The tensors of steps of `tokens` tokens each. `held[n]` is how many of the first n positions this rank holds."""

    def __init__(self, tokens: int, batch: int, rows: range, held: Tensor) -> None:
        self._rows, self._held = rows, held
        with torch.inference_mode(False):  # what is made within inference mode could not be filled outside it
            device = held.device
            self._steps = torch.arange(1, tokens + 1, device=device)
            self.positions = torch.empty(batch, tokens, dtype=torch.int32, device=device)
            self.slots = torch.empty(len(rows), tokens, dtype=torch.int64, device=device)
            self.cur_pos = torch.empty(len(rows), dtype=torch.int32, device=device)
            self._end = torch.empty(len(rows), tokens, dtype=torch.int32, device=device)
            # One more than a token's position. It stays where it is, too: a captured graph may fill `first` from it.
            self._after = torch.empty(len(rows), tokens, dtype=torch.int64, device=device)
        self._first: dict[int | None, Tensor] = {}

    def fill(self, begins: Tensor, at: Tensor, slots: Tensor) -> None:
        """A new step: where each row of the batch begins (-1: not in the step), and the slots of own rows `at`."""
        begins = begins[:, None]
        after = torch.where(begins >= 0, begins + self._steps, 0)
        self.positions.copy_(after - 1)
        self._after.copy_(after[self._rows.start : self._rows.stop])
        self._end.copy_(self._held[self._after])
        self.cur_pos.copy_(self._end[:, -1] - 1)
        self.slots.fill_(-1).index_copy_(0, at, slots)
        for window in self._first:
            self._fill_first(window)

    def key_range(self, window: int | None) -> tuple[Tensor, Tensor]:
        """What each new token sees of this rank's keys."""
        if window not in self._first:
            if window is not None:
                check_sizes(window=window)
            with torch.inference_mode(False):
                self._first[window] = torch.zeros_like(self._end)
            self._fill_first(window)
        return self._first[window], self._end

    def _fill_first(self, window: int | None) -> None:
        if window is not None:
            self._first[window].copy_(self._held[(self._after - window).clamp_(min=0)])


@dataclass(eq=False, repr=False)
class Step:
    """T new `tokens` for some rows of a batch, whose keys and values are to be written. Made by `ShardedCache.append`.

    `positions` int32 [batch, T] are the new tokens', -1 in rows that are not in the step. Of the rows whose keys this
    rank holds: `slots` int64 [rows, T], -1 where there is nothing to write here, and `cur_pos` int32 [rows], the index
    of the last key held here, -1 where there is none or the row is not in the step.

    Up to 8 tokens, the tensors stay where they are and are those of the latest step with as many tokens.
    """

    tokens: int
    sequences: tuple[ShardedSequence, ...]
    parts: dict[int, NewTokens]  # of each bank that has some of the sequences
    skipped: dict[int, ShardedSequence]  # layers in which a sequence lacks tokens before these, and one that does
    tensors: StepTensors

    @property
    def positions(self) -> Tensor:
        """Of the new tokens, in the whole sequence."""
        return self.tensors.positions

    @property
    def slots(self) -> Tensor:
        """Where new tokens are written on this rank."""
        return self.tensors.slots

    @property
    def cur_pos(self) -> Tensor:
        """The last key of each row on this rank."""
        return self.tensors.cur_pos

    @property
    def missing(self) -> set[int]:
        """The layers that are not yet written: the same in all banks."""
        return next(iter(self.parts.values())).missing

    def key_range(self, window: int | None = None) -> tuple[Tensor, Tensor]:
        """What each new token sees of the keys this rank holds: `first` and `end`, int32 [rows, T], indices of keys.

        With a window, of the last `window` positions. Both are 0 in rows that are not in the step. Once asked for,
        they are filled by every later step with as many tokens; so ask before a graph is captured.
        """
        return self.tensors.key_range(window)

    def __repr__(self) -> str:
        return f"Step({self.tokens} tokens on {list(self.sequences)}, missing layers {sorted(self.missing)})"
