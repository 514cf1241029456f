"""Drafts from the text itself: what followed the last few tokens when they stood there before."""

from __future__ import annotations

from collections.abc import Sequence

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
