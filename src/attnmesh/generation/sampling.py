"""The next token from its logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ROW_BITS = 20  # a seed leaves room for so many rows of a batch
_SEEDS = 1 << (63 - _ROW_BITS)


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: the likeliest at temperature 0, else among the likeliest that make up `top_p`."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.temperature >= 0.0:
            raise ValueError(f"temperature must be 0 or more, got {self.temperature!r}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p!r}")
        if not isinstance(self.seed, int) or not 0 <= self.seed < _SEEDS:
            raise ValueError(f"seed must be an integer from 0 to {_SEEDS - 1}, got {self.seed!r}")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken, always."""
        return self.temperature == 0.0

    def dice(self, row: int) -> torch.Generator:
        """What a row of a batch is drawn with: the same however many ranks there are, and whatever the other rows."""
        return torch.Generator().manual_seed((self.seed << _ROW_BITS) + row)

    def draw(self, logits: Tensor, dice: torch.Generator) -> int:
        """A token from logits [vocabulary]."""
        if self.greedy:
            return int(logits.argmax())
        logits = logits.double().cpu()
        # The likeliest stays 0 at any temperature: divided by a tiny one, it would be infinite.
        shares = torch.softmax((logits - logits.max()) / self.temperature, -1)
        ordered, ids = shares.sort(descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered  # the likeliest has nothing before it, so one token is always left
        ordered = torch.where(before < self.top_p, ordered, 0.0)
        return int(ids[torch.multinomial(ordered, 1, generator=dice)])


_LONGEST = 4  # tokens that must have stood there before: the more, the better the guess


class Lookup:
    """The places of every short run of tokens in a growing text."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # where the run last ended, if not at the end of the text

    def draft(self, ids: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may come next, from the longest match there is; none where nothing matches.

        `ids` is all of the text, and begins with what it was at the last call.
        """
        self._learn(ids)
        for n in range(min(_LONGEST, len(ids)), 0, -1):
            end = self._latest.get(tuple(ids[-n:]))
            if end is not None:
                return list(ids[end : end + most])
        return []

    def _learn(self, ids: Sequence[int]) -> None:
        for end in range(max(1, len(self._ids)), len(ids)):
            for n in range(1, min(_LONGEST, end) + 1):
                self._latest[tuple(ids[end - n : end])] = end
        self._ids = list(ids)


_UNFINISHED = "\ufffd"  # what a tokenizer says while the bytes of a character are still coming


class NewText:
    """The text of a growing list of tokens, handed out as soon as it can no longer change."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._said = 0

    def add(self, token: int) -> str:
        """The text that a further token completes; "" within a character, or without a tokenizer."""
        if self._tokenizer is None:
            return ""
        self._ids.append(token)
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=True)
        if text.endswith(_UNFINISHED):
            return ""
        new = text[self._said :]
        self._said = len(text)
        return new
