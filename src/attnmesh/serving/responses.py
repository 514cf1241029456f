"""Answers in OpenAI's format: whole objects, and the chunks of a stream."""

from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from attnmesh.generation.requests import PromptLogprob, Token
from attnmesh.generation.sampling import TextStream
from attnmesh.serving.protocol import Call
from attnmesh.serving.tools import Arguments, Thinking, ToolCall, ToolParser

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
    prompt_logprobs: Sequence[PromptLogprob] = ()  # of the first choice of a prompt, from its second token on

    def add(self, token: Token, finish_reason: str | None) -> None:
        """Append a token."""
        self.text += token.text
        self.tokens.append(token)
        self.finish_reason = finish_reason


class Formatter(ABC):
    """The JSON of one call's answers, whole or as the server-sent events of a stream."""

    @abstractmethod
    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        """The answer to a call without `stream`."""

    @abstractmethod
    def begin(self, choices: Sequence[Choice]) -> list[str]:
        """The first events of a stream."""

    @abstractmethod
    def token(self, choice: Choice, token: Token | None) -> list[str]:
        """The events for a new token, which the choice has; None ends an answer without one."""

    @abstractmethod
    def end(self, choices: Sequence[Choice], usage: Json) -> list[str]:
        """The last events."""

    def error(self, body: Json) -> str:
        """The event of an error."""
        return event(body)


def event(body: Json, name: str | None = None) -> str:
    """A server-sent event."""
    head = "" if name is None else f"event: {name}\n"
    return f"{head}data: {json.dumps(body, ensure_ascii=False)}\n\n"


class Deltas:
    """The parts of an answer that may have thoughts and tool calls. `parallel` is whether it may have several calls."""

    def __init__(self, parser: ToolParser, thinking: Thinking | None, *, parallel: bool) -> None:
        self._parser, self._thinking, self._parallel = parser, thinking, parallel
        self.calls = 0

    def add(self, text: str, *, is_last: bool) -> Json:
        """The `reasoning_content`, `content` and `tool_calls` that some text completes, where there are any."""
        thought = ""
        if self._thinking is not None:
            thought, text = self._thinking.add(text, is_last=is_last)
        parts = [*self._parser.add(text), *(self._parser.end() if is_last else ())]
        calls: list[Json] = []
        for part in parts:
            if isinstance(part, ToolCall):
                self.calls += 1
                function = {"name": part.name, "arguments": part.arguments}
                calls.append({"index": self.calls - 1, "id": part.id, "type": "function", "function": function})
            elif isinstance(part, Arguments):
                calls.append({"index": self.calls - 1, "function": {"arguments": part.text}})
        if not self._parallel:
            calls = [each for each in calls if each["index"] == 0]
        content = "".join(part for part in parts if isinstance(part, str))
        found = {"reasoning_content": thought, "content": content, "tool_calls": calls}
        return {name: part for name, part in found.items() if part}


class CompletionFormatter(Formatter):
    """The answers of `/v1/completions` and `/v1/chat/completions`.

    `eos` are the tokens that are not part of an answer, `deltas` makes what divides an answer into its parts, if it has
    several, and `prompts` are the tokens of the prompts.
    """

    def __init__(
        self,
        tokenizer: Any,
        call: Call,
        model: str,
        *,
        eos: frozenset[int],
        deltas: Callable[[], Deltas] | None = None,
        prompts: Sequence[list[int]],
    ) -> None:
        self._tokenizer, self._call, self._is_chat, self._eos = tokenizer, call, call.is_chat, eos
        self._new_deltas, self._prompts = deltas, prompts
        self._echoed = [
            each if isinstance(each, str) else str(tokenizer.decode(each)) for each in call.prompts if call.echo
        ]
        self._deltas: dict[int, Deltas] = {}
        kind = "chat.completion" if call.is_chat else "text_completion"
        self._head = {
            "id": f"{'chatcmpl' if call.is_chat else 'cmpl'}-{uuid.uuid4().hex}", "created": int(time.time()),
            "model": model,
        }  # fmt: skip
        self._whole = {**self._head, "object": kind}
        self._chunk = {**self._head, "object": f"{kind}.chunk" if call.is_chat else kind}

    def whole(self, choices: Sequence[Choice], usage: Json) -> Json:
        firsts = [choices[i - i % self._call.n] for i in range(len(choices))]  # which have what is known of prompts
        found = [self._choice(*each) for each in zip(choices, firsts, strict=True)]
        whole: Json = {**self._whole, "choices": found, "usage": usage}
        if self._call.prompt_logprobs is not None:  # where vLLM has them
            for body, first in [(whole, firsts[0])] if self._is_chat else zip(found, firsts, strict=True):
                body["prompt_logprobs"] = [None, *map(self._described, self._ids(first)[1:], first.prompt_logprobs)]
        return whole

    def begin(self, choices: Sequence[Choice]) -> list[str]:
        if self._is_chat:
            delta = {"role": "assistant", "content": ""}
            return [self._stream({"index": each.index, "delta": delta}, None) for each in choices]
        return [self._stream({"index": i, "text": self._prompt(i)}, None) for i in range(len(choices)) if self._echoed]

    def token(self, choice: Choice, token: Token | None) -> list[str]:
        text, tokens = ("", []) if token is None else (token.text, [token])
        is_last = choice.finish_reason is not None
        delta = {"content": text} if text else {}
        if self._new_deltas is not None:
            delta = self._deltas_of(choice).add(text, is_last=is_last)
        if not delta and not is_last and self._call.logprobs is None:
            return []
        offset = len(self._prompt(choice.index)) + len(choice.text) - len(text)
        body: Json = {"delta": delta} if self._is_chat else {"text": text}
        logprobs = self._all_logprobs(tokens, offset)
        return [self._stream({"index": choice.index, **body, "logprobs": logprobs}, self._finish_reason(choice))]

    def end(self, choices: Sequence[Choice], usage: Json) -> list[str]:
        last = [event({**self._chunk, "choices": [], "usage": usage})] if self._call.include_usage else []
        return [*last, "data: [DONE]\n\n"]

    def _deltas_of(self, choice: Choice) -> Deltas:
        if choice.index not in self._deltas:
            assert self._new_deltas is not None
            self._deltas[choice.index] = self._new_deltas()
        return self._deltas[choice.index]

    def _finish_reason(self, choice: Choice) -> str | None:
        has_calls = choice.index in self._deltas and self._deltas[choice.index].calls
        return "tool_calls" if has_calls and choice.finish_reason == "stop" else choice.finish_reason

    def _prompt(self, index: int) -> str:
        """The text of the prompt of a choice, if it is to be repeated."""
        return self._echoed[index // self._call.n] if self._echoed else ""

    def _stream(self, choice: Json, finish_reason: str | None) -> str:
        usage = {"usage": None} if self._call.include_usage else {}
        return event({**self._chunk, "choices": [{**choice, "finish_reason": finish_reason}], **usage})

    def _ids(self, choice: Choice) -> list[int]:
        """The tokens of the prompt of a choice."""
        return self._prompts[choice.index // self._call.n]

    def _echoed_tokens(self, first: Choice) -> list[Token]:
        """The tokens of a prompt that is repeated, with their log-probabilities; of the first there is none."""
        text, n = TextStream(self._tokenizer), self._call.logprobs
        scored = [(None, ()), *((each.logprob, each.top_logprobs[:n]) for each in first.prompt_logprobs)]
        return [Token(0, token, text.add(token), *x) for token, x in zip(self._ids(first), scored, strict=True)]

    def _described(self, token: int, found: PromptLogprob) -> Json:
        """The log-probabilities of a token of a prompt and of the most likely tokens, in vLLM's format."""
        ranked = {each: (logprob, 1 + i) for i, (each, logprob) in enumerate(found.top_logprobs)}
        ranked[token] = (found.logprob, found.rank)
        return {
            str(each): {"logprob": _finite(logprob), "rank": rank, "decoded_token": self._text(each)}
            for each, (logprob, rank) in ranked.items()
        }

    def _choice(self, choice: Choice, first: Choice) -> Json:
        prompt = self._prompt(choice.index)
        body: Json = {"text": prompt + choice.text}
        if self._is_chat:
            message: Json = {"content": choice.text}
            if self._new_deltas is not None:
                found = self._deltas_of(choice).add(choice.text, is_last=True)
                message = {"content": found.get("content")}
                if "reasoning_content" in found:
                    message["reasoning_content"] = found["reasoning_content"]
                if "tool_calls" in found:
                    calls = [{name: each[name] for name in ("id", "type", "function")} for each in found["tool_calls"]]
                    message["tool_calls"] = calls
            body = {"message": {"role": "assistant", "refusal": None, **message}}
        echoed = self._echoed_tokens(first) if self._call.echo and self._call.logprobs is not None else []
        logprobs = self._all_logprobs(choice.tokens, len(prompt) - sum(len(each.text) for each in echoed), echoed)
        return {"index": choice.index, **body, "logprobs": logprobs, "finish_reason": self._finish_reason(choice)}

    def _all_logprobs(self, tokens: Sequence[Token], offset: int, echoed: Sequence[Token] = ()) -> Json | None:
        """Without the log-probabilities of an end-of-sequence token, which is not part of the answer."""
        if self._call.logprobs is None:
            return None
        tokens = [*echoed, *(token for token in tokens if token.id not in self._eos)]
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
                None if token.logprob is None else {self._text(each): _finite(x) for each, x in token.top_logprobs}
                for token in tokens
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


def _finite(logprob: float | None) -> float | None:
    """JSON has no infinity; OpenAI writes this in place of it."""
    return None if logprob is None else max(logprob, _LOWEST)


def usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> Json:
    """The number of tokens of a call, and of its prompt tokens that were in the KV cache."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
