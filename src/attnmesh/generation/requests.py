"""`Request`: the handle of a submitted prompt, with the tokens of its answer. `Token`: one of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from attnmesh.generation.sampling import INVALID_TOKEN, InvalidLogits, Sampling, TextStream

FinishReason = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True)
class Token:
    """A token of a row of the batch, or of the request with this number, and the text that it completes.

    Where they were requested: the natural logarithm of its probability, and the most likely tokens with theirs.
    """

    row: int
    id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class RequestOptions:
    """How a request is answered: the arguments of `Generator.submit`."""

    max_new_tokens: int
    sampling: Sampling
    stop: frozenset[int]
    stop_strings: tuple[str, ...] = ()
    min_new_tokens: int = 0
    logprobs: int | None = None

    @property
    def width(self) -> int:
        """The numbers that describe a token: its id, its log-probability, and the most likely tokens with theirs."""
        return 1 if self.logprobs is None else 2 + 2 * self.logprobs


@dataclass(eq=False, repr=False)
class Request:
    """A submitted prompt. It changes with every step of its `Generator`, until `finish_reason` is set.

    `finish_reason` is None while it is in progress, then "stop" (a stop token or string), "length" (max_new_tokens),
    "cancelled", or "error" with an `error`. `tokens` has the answer so far, with the stop token; `text` ends before a
    stop string.
    """

    number: int
    prompt: list[int]
    options: RequestOptions
    tokenizer: Any
    owner: object  # the generator
    tokens: list[Token] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        self._text, self._stop = TextStream(self.tokenizer), StopStrings(self.options.stop_strings)

    @property
    def finished(self) -> bool:
        """Whether no more tokens follow."""
        return self.finish_reason is not None

    @property
    def ids(self) -> list[int]:
        """The token ids of the answer so far."""
        return [token.id for token in self.tokens]

    @property
    def text(self) -> str:
        """The text of the answer so far; without text that may become a stop string."""
        return "".join(token.text for token in self.tokens)

    def __repr__(self) -> str:
        state = "in progress" if self.finish_reason is None else self.finish_reason
        return f"Request({self.number}: {len(self.prompt)} + {len(self.tokens)} tokens, {state})"

    # What follows is called by `ContinuousBatch`.

    @property
    def takes_most_likely(self) -> bool:
        """Whether its next token is the most likely one, and nothing else is wanted."""
        options = self.options
        sampling = options.sampling
        return sampling.greedy and not sampling.has_penalties and options.logprobs is None and not self._must_go_on

    @property
    def _must_go_on(self) -> bool:
        return len(self.tokens) < self.options.min_new_tokens

    def choose(self, logits: Tensor) -> list[float]:
        """The next token and its log-probabilities, as `width` numbers, from logits [vocabulary]."""
        options, allowed = self.options, logits
        if self._must_go_on and options.stop:
            allowed = logits.clone()
            allowed[sorted(options.stop)] = float("-inf")
        try:
            dice = options.sampling.generator(0, len(self.tokens))
            token = options.sampling.sample(allowed, dice, self.prompt, self.ids)
        except InvalidLogits:
            return [INVALID_TOKEN] * options.width
        if options.logprobs is None:
            return [token]
        scores = torch.log_softmax(logits.double(), -1)
        top, ids = scores.sort(descending=True, stable=True)
        return [token, float(scores[token]), *ids[: options.logprobs].tolist(), *top[: options.logprobs].tolist()]

    def add(self, numbers: Sequence[float]) -> Token:
        """Append the token that these numbers describe; sets `finish_reason` if it is the last one."""
        token, n = int(numbers[0]), self.options.logprobs or 0
        text, reason = self._read(token, len(self.tokens))
        top = tuple(zip(map(int, numbers[2 : 2 + n]), numbers[2 + n :], strict=True))
        new = Token(self.number, token, text, None if self.options.logprobs is None else numbers[1], top)
        self.tokens.append(new)
        self.finish_reason = reason
        return new

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self.error, self.finish_reason = error, "error"

    def restore(self) -> None:
        """Restore what follows from the tokens that were appended, after an interruption."""
        self.__post_init__()
        for at, token in enumerate(self.tokens):
            _, self.finish_reason = self._read(token.id, at)

    def _read(self, token: int, at: int) -> tuple[str, FinishReason | None]:
        """The text that token number `at` of the answer completes, and why it is the last one, if it is."""
        options = self.options
        text, found = self._text.add(token), False
        if at >= options.min_new_tokens:
            text, found = self._stop.add(text)
        reason: FinishReason | None = None
        if found or (token in options.stop and at >= options.min_new_tokens):
            reason = "stop"
        elif at + 1 == options.max_new_tokens:
            reason = "length"
        return text if found or reason is None else text + self._stop.held, reason


class StopStrings:
    """Finds the first of some strings in a text that grows. `held` is what may become one of them."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self.held = ""

    def add(self, text: str) -> tuple[str, bool]:
        """The text that can no longer be part of a stop string, and whether one was found: it ends before that."""
        text = self.held + text
        begins = [at for string in self._strings if (at := text.find(string)) >= 0]
        if begins:
            self.held = ""
            return text[: min(begins)], True
        longest = max((_overlap(text, string) for string in self._strings), default=0)
        self.held = text[len(text) - longest :]
        return text[: len(text) - longest], False


def _overlap(text: str, string: str) -> int:
    """The length of the longest end of a text that a string begins with."""
    return next((n for n in range(min(len(text), len(string) - 1), 0, -1) if text.endswith(string[:n])), 0)
