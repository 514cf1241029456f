"""Text from tokens that come one at a time."""

from __future__ import annotations

from typing import Any

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
