"""Answers in OpenAI's format: whole objects, and the chunks of a stream."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from attnmesh.generation.requests import Token

Json = dict[str, Any]
_INCOMPLETE = "\ufffd"
_LOWEST = -9999.0


@dataclass
class Choice:
    """One answer so far."""

    index: int
    text: str = ""
    tokens: list[Token] = field(default_factory=list)
    finish_reason: str | None = None
    cached_tokens: int = 0  # of its prompt, when it began

    def add(self, token: Token, finish_reason: str | None) -> None:
        """Append a token."""
        self.text += token.text
        self.tokens.append(token)
        self.finish_reason = finish_reason


class Formatter:
    """The JSON of one call's answers. `logprobs` is whether they are wanted."""

    def __init__(
        self, tokenizer: Any, model: str, *, is_chat: bool, logprobs: bool, include_usage: bool, eos: frozenset[int]
    ) -> None:
        self._tokenizer, self._is_chat, self._logprobs, self._eos = tokenizer, is_chat, logprobs, eos
        self._include_usage = include_usage
        kind = "chat.completion" if is_chat else "text_completion"
        self._head = {"id": f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}", "created": int(time.time())}
        self._whole = {**self._head, "object": kind, "model": model}
        self._chunk = {**self._head, "object": f"{kind}.chunk" if is_chat else kind, "model": model}

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        """The answer to a call without `stream`."""
        return {**self._whole, "choices": [self._choice(choice) for choice in choices], "usage": usage}

    def first_chunks(self, choices: Sequence[Choice]) -> list[Json]:
        """The first chunks of a stream."""
        delta = {"role": "assistant", "content": ""}
        return [self._stream({"index": each.index, "delta": delta}, None) for each in choices] if self._is_chat else []

    def chunk(self, choice: Choice, token: Token) -> Json | None:
        """The part of a stream for a new token, which the choice has; None if there is nothing to send."""
        if not token.text and choice.finish_reason is None and not self._logprobs:
            return None
        offset = len(choice.text) - len(token.text)
        body: Json = {"delta": {"content": token.text}} if self._is_chat else {"text": token.text}
        return self._stream(
            {"index": choice.index, **body, "logprobs": self._all_logprobs([token], offset)}, choice.finish_reason
        )

    def last_chunk(self, usage: Json) -> Json | None:
        """The usage, if it is wanted."""
        return {**self._chunk, "choices": [], "usage": usage} if self._include_usage else None

    def _stream(self, choice: Json, finish_reason: str | None) -> Json:
        usage = {"usage": None} if self._include_usage else {}
        return {**self._chunk, "choices": [{**choice, "finish_reason": finish_reason}], **usage}

    def _choice(self, choice: Choice) -> Json:
        content = {"role": "assistant", "content": choice.text, "refusal": None}
        body: Json = {"message": content} if self._is_chat else {"text": choice.text}
        logprobs = self._all_logprobs(choice.tokens, 0)
        return {"index": choice.index, **body, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _all_logprobs(self, tokens: Sequence[Token], offset: int) -> Json | None:
        """Without the log-probabilities of an end-of-sequence token, which is not part of the answer."""
        if not self._logprobs:
            return None
        tokens = [token for token in tokens if token.id not in self._eos]
        if self._is_chat:
            return {
                "content": [
                    {
                        **self._token(token.id, token.logprob),
                        "top_logprobs": [self._token(*each) for each in token.top_logprobs],
                    }
                    for token in tokens
                ],
                "refusal": None,
            }
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token.text)
        return {
            "tokens": [self._text(token.id) for token in tokens],
            "token_logprobs": [_finite(token.logprob) for token in tokens],
            "top_logprobs": [
                {self._text(token_id): _finite(logprob) for token_id, logprob in token.top_logprobs} for token in tokens
            ],
            "text_offset": offsets,
        }

    def _token(self, token_id: int, logprob: float | None) -> Json:
        text = self._text(token_id)
        is_partial = _INCOMPLETE in text  # some bytes of a character
        return {"token": text, "logprob": _finite(logprob), "bytes": None if is_partial else list(text.encode())}

    def _text(self, token_id: int) -> str:
        text: str = self._tokenizer.decode([token_id])
        return text


def _finite(logprob: float | None) -> float:
    """JSON has no infinity; OpenAI writes this in place of it."""
    return _LOWEST if logprob is None else max(logprob, _LOWEST)


def usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> Json:
    """The number of tokens of a call, and of its prompt tokens that were in the KV cache."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
