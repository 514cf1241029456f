"""`Sampling`: the next token from its logits. `PromptLookup`: draft tokens. `TextStream`: text from tokens.

Grammars: which tokens an answer may go on with so that it matches a JSON schema, a regular expression or a grammar.

llguidance computes the masks. They depend on the grammar, the vocabulary and the tokens of the answer only, so that
they are the same on every rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from attnmesh.kv_cache.sequence import token_ids
from attnmesh.utils.optional import require
from attnmesh.utils.validation import (
    check_count,
    check_index,
    check_number,
    check_tensor,
    check_type,
    is_number,
    shown,
)

_ROW_BITS = 20  # bits of a seed for the row of the batch
MAX_ROWS = 1 << _ROW_BITS
MAX_SEED = (1 << (63 - _ROW_BITS)) - 1
_SCORED = 64  # tokens of a prompt whose log-probabilities are computed at a time: each takes a vocabulary in float64
_MAX_NGRAM = 4  # tokens that must match: longer matches give better drafts
INVALID_TOKEN = -2
"""In place of a token where logits are invalid."""
FAILED_TOKEN = -3
"""In place of a token where a logits processor raises an exception."""
_INCOMPLETE = "\ufffd"  # what a tokenizer returns while the bytes of a character are incomplete


class InvalidLogits(ValueError):  # noqa: N818 - says what is wrong, as CacheFull does
    """Logits that give no probabilities: with a NaN or +inf, or -inf only."""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters: greedy at temperature 0, otherwise among the most likely tokens that make up `top_p`.

    With `top_k` above 0, of the `top_k` most likely tokens only; with `min_p`, only of tokens that are at least `min_p`
    times as likely as the most likely token. `repetition_penalty` divides positive logits, and multiplies negative
    ones, of tokens that the prompt or the answer has; `presence_penalty` is subtracted from logits of tokens that the
    answer has, and `frequency_penalty` once for each time that it has them. The order is the same as in Transformers:
    penalties, temperature, top_k, top_p of the remaining tokens, min_p.

    Examples:
        >>> sampling = am.Sampling(temperature=0.7, top_p=0.9, seed=1)
        >>> def sample():
        ...     return list(am.generate(model, None, [[1, 2]], max_new_tokens=4, stop=[], sampling=sampling))
        >>> sample() == sample()  # the seed decides
        True
        >>> am.Sampling(top_p=1.5)
        Traceback (most recent call last):
            ...
        ValueError: top_p must be above 0 and at most 1, got 1.5
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        if not is_number(self.temperature) or self.temperature < 0:
            raise ValueError(f"temperature must be 0 or more, got {shown(self.temperature)}")
        if not is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {shown(self.top_p)}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed must be an integer from 0 to {MAX_SEED}, got {shown(self.seed)}")
        check_count("top_k", self.top_k)
        if not is_number(self.min_p) or not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be from 0 to 1, got {shown(self.min_p)}")
        check_number("repetition_penalty", self.repetition_penalty, above=0)
        check_number("presence_penalty", self.presence_penalty)
        check_number("frequency_penalty", self.frequency_penalty)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken, after penalties."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens before them."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def generator(self, row: int, token: int = 0) -> torch.Generator:
        """The random generator of a token of a row of the batch, independent of all others and the number of ranks.

        It does not depend on how earlier tokens were computed, either: a request can move to other ranks.
        """
        check_index("row", row, MAX_ROWS)
        check_count("token", token)
        return torch.Generator().manual_seed(_mix(_mix((self.seed << _ROW_BITS) + row) + token))

    def sample(
        self, logits: Tensor, generator: torch.Generator, prompt: Sequence[int] = (), answer: Sequence[int] = ()
    ) -> int:
        """A token from logits [vocabulary]; raises InvalidLogits where they give no probabilities.

        `prompt` and `answer` are the tokens before it, for penalties.
        """
        check_tensor("logits", logits)
        if logits.ndim != 1 or not logits.numel() or not logits.is_floating_point() or logits.is_meta:
            raise ValueError(f"logits must be floating point [vocabulary], got {shown(logits)}")
        check_type("generator", generator, torch.Generator)
        if not self.greedy:
            logits = logits.double().cpu()
        if self.has_penalties:
            logits = self._penalize(logits, _ids_below("prompt", prompt, logits), _ids_below("answer", answer, logits))
        token = int(most_likely(logits))
        if token == INVALID_TOKEN:
            raise InvalidLogits(f"logits must have a finite maximum and no NaN, got {shown(logits)} with one")
        if self.greedy:
            return token
        top = logits[token]
        # Subtracting the maximum first keeps it 0: divided by a tiny temperature, it would be infinite.
        probabilities = torch.softmax((logits - top) / self.temperature, -1)
        ordered, ids = probabilities.sort(descending=True, stable=True)
        if self.top_k:
            ordered = ordered[: self.top_k] / ordered[: self.top_k].sum()
        before = ordered.cumsum(-1) - ordered  # 0 for the most likely token, so at least one token is left
        kept = (before < self.top_p) & (ordered >= self.min_p * ordered[0])
        return int(ids[torch.multinomial(torch.where(kept, ordered, 0.0), 1, generator=generator)])

    def _penalize(self, logits: Tensor, prompt: Tensor, answer: Tensor) -> Tensor:
        logits = logits.clone()
        if self.repetition_penalty != 1.0:
            earlier = torch.cat([prompt, answer]).unique()
            x = logits[earlier]
            logits[earlier] = torch.where(x > 0, x / self.repetition_penalty, x * self.repetition_penalty)
        tokens, times = answer.unique(return_counts=True)
        logits[tokens] -= self.presence_penalty + self.frequency_penalty * times.to(logits.dtype)
        return logits


@dataclass(frozen=True)
class LogitBias:
    """A logits processor that adds `numbers` to the logits of `tokens`. Unlike other ones it can be written as JSON."""

    tokens: tuple[int, ...]
    numbers: tuple[float, ...]

    @classmethod
    def of(cls, bias: Mapping[Any, float]) -> LogitBias:
        """From numbers by token, or by its name: JSON has strings."""
        return cls(tuple(map(int, bias)), tuple(bias.values()))

    def __call__(self, ids: Tensor, scores: Tensor) -> Tensor:
        """The logits [1, vocabulary] that follow from `scores`."""
        tokens = torch.tensor(self.tokens, dtype=torch.int64, device=scores.device)
        numbers = torch.tensor(self.numbers, dtype=scores.dtype, device=scores.device)
        return scores.index_add(1, tokens, numbers[None])


def _mix(x: int) -> int:
    """The 64 bits of x, mixed (splitmix64): torch seeds a generator with the low 32 bits only."""
    x = (x + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def _ids_below(name: str, ids: Sequence[int], logits: Tensor) -> Tensor:
    """Token ids as a tensor; raises ValueError unless all are in the vocabulary of logits [vocabulary]."""
    given = token_ids(name, ids)
    if given and not 0 <= min(given) <= max(given) < len(logits):
        raise ValueError(f"{name} must have token ids 0 to {len(logits) - 1}, got {min(given)} to {max(given)}")
    return torch.tensor(given.tolist(), dtype=torch.int64, device=logits.device)


def most_likely(logits: Tensor) -> Tensor:
    """The most likely token of logits [.., vocabulary], int64 [..], or `INVALID_TOKEN`. Does not synchronize."""
    ids = logits.argmax(-1, keepdim=True)  # the index of a NaN, if there is one
    return torch.where(logits.gather(-1, ids).isfinite(), ids, INVALID_TOKEN).squeeze(-1)


LogProbs = Callable[[Tensor], Tensor]
"""Log-probabilities [n, vocabulary] from logits."""


def log_probs(logits: Tensor) -> Tensor:
    """Log-probabilities [n, vocabulary], float64."""
    return torch.log_softmax(logits.double(), -1)


def prompt_scores(logits: Tensor, following: Tensor, top: int, log_probs: LogProbs = log_probs) -> Tensor:
    """How likely the tokens `following` [n] are by logits [n, vocabulary], as float64 [n, 2 + 2 * top].

    Their log-probabilities and ranks, then the `top` most likely tokens and the log-probabilities of these.
    """
    parts = []
    for x, ids in zip(logits.split(_SCORED), following.to(logits.device).split(_SCORED), strict=True):
        scores = log_probs(x).double()
        own = scores.gather(-1, ids[:, None])
        ranks = 1 + (scores > own).sum(-1, keepdim=True)
        values, tokens = scores.topk(top, -1)
        parts.append(torch.cat([own, ranks.double(), tokens.double(), values], -1))
    return torch.cat(parts) if parts else logits.new_empty(0, 2 + 2 * top, dtype=torch.float64)


class PromptLookup:
    """Speculative drafts by prompt lookup: the tokens that followed the last few tokens earlier in the text."""

    def __init__(self) -> None:
        self._length = 0
        self._latest: dict[tuple[int, ...], int] = {}  # where an n-gram last ended, before the end of the text

    def draft(self, ids: Sequence[int], max_tokens: int) -> list[int]:
        """At most `max_tokens` tokens that may come next, from the longest n-gram match; empty without a match.

        `ids` is the whole text, and must start with the `ids` of the last call.
        """
        self._index(ids)
        for n in range(min(_MAX_NGRAM, len(ids)), 0, -1):
            end = self._latest.get(tuple(ids[-n:]))
            if end is not None:
                return list(ids[end : end + max_tokens])
        return []

    def _index(self, ids: Sequence[int]) -> None:
        for end in range(max(1, self._length), len(ids)):
            for n in range(1, min(_MAX_NGRAM, end) + 1):
                self._latest[tuple(ids[end - n : end])] = end
        self._length = len(ids)


class TextStream:
    """The text of a growing list of tokens, returned as soon as it can no longer change.

    Decodes the last few tokens only. The text of a token can depend on the previous token, such as a space at the
    beginning of a text: so the tokens of the previous piece of text are decoded with the new token. Special tokens have
    no text, unless `hidden` is given: then only these tokens have none.
    """

    def __init__(self, tokenizer: Any, hidden: frozenset[int] | None = None) -> None:
        self._tokenizer, self._hidden = tokenizer, hidden
        self._earlier: list[int] = []  # whose text was returned last
        self._new: list[int] = []  # whose text is not returned yet
        self._earlier_text = ""

    def add(self, token: int) -> str:
        """The text that a further token completes; "" within a character, or without a tokenizer."""
        if self._tokenizer is None:
            return ""
        self._new.append(token)
        text = self._decode([*self._earlier, *self._new])
        new = text[len(self._earlier_text) :]
        if not new or new.endswith(_INCOMPLETE):
            return ""
        self._earlier, self._new = self._new, []
        self._earlier_text = self._decode(self._earlier)
        return new

    def _decode(self, ids: list[int]) -> str:
        if self._hidden is not None:
            ids = [token for token in ids if token not in self._hidden]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._hidden is None)
        return text


# Grammars: which tokens an answer may go on with so that it matches a JSON schema, a regular expression or a grammar.


_MAX_COMPILED = 64  # grammars that are kept
_WHITESPACE = r"( |\n[ \t]{0,20})?"  # between the tokens of JSON: as much as llama.cpp allows, so that it ends
_MAX_MESSAGE = 300  # characters


def grammar_of(kind: str, value: Any) -> str:
    """A grammar in llguidance's format, of kind json (a schema), regex, choice (texts) or grammar (Lark or GBNF).

    Raises ValueError for GBNF that is not valid; other errors are found when the grammar is compiled.
    """
    llguidance = require("llguidance", extra="serve")
    if kind == "json":
        defaults = {"whitespace_pattern": _WHITESPACE}
        return str(llguidance.LLMatcher.grammar_from_json_schema(value, defaults=defaults))
    return str(llguidance.grammar_from(kind, value))


class GrammarMatcher:
    """Where an answer is in its grammar. `eos` is the token that the grammar ends with."""

    def __init__(self, matcher: Any, eos: int) -> None:
        self._matcher, self._eos = matcher, eos
        self._consumed = 0  # tokens of the answer

    def allowed(self, logits: Tensor, answer: Sequence[int], stop: Iterable[int]) -> Tensor:
        """Logits [vocabulary] with -inf for tokens that cannot follow the `answer`, which only grows between calls.

        Where the grammar can end, any of the `stop` tokens can follow.
        """
        self._matcher.consume_tokens(list(answer[self._consumed :]))
        self._consumed = len(answer)
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise ValueError(f"grammar: {_first_line(self._matcher.get_error())}, after {len(answer)} tokens")
        bits = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=len(logits), bitorder="little")
        allowed = torch.from_numpy(bits).bool()
        ends, allowed[self._eos] = bool(allowed[self._eos]), False
        if ends:
            allowed[list(stop)] = True
        return logits.masked_fill(~allowed.to(logits.device), float("-inf"))


class _Compiler:
    """Compiles grammars for the vocabulary of a tokenizer. To make one takes about a second, with 100,000 tokens."""

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        if not getattr(tokenizer, "is_fast", False) or tokenizer.eos_token_id is None:
            raise ValueError(f"grammar requires a fast tokenizer with an eos token, got {shown(tokenizer)}")
        self.eos = tokenizer.eos_token_id
        from_tokenizer = require("llguidance.hf", extra="serve").from_tokenizer
        self._tokenizer = from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=self.eos)
        self._compiled: dict[str, Any] = {}  # the latest ones

    def compile(self, grammar: str) -> Any:
        """What matches a grammar, at its beginning."""
        found = self._compiled.pop(grammar, None)
        if found is None:
            found = require("llguidance", extra="serve").LLMatcher(self._tokenizer, grammar, log_level=0)
            if found.is_error():
                raise ValueError(f"grammar cannot be compiled: {_first_line(found.get_error())}")
        self._compiled[grammar] = found
        if len(self._compiled) > _MAX_COMPILED:
            del self._compiled[next(iter(self._compiled))]
        return found.deep_copy()


_compilers: WeakKeyDictionary[Any, dict[int, _Compiler]] = WeakKeyDictionary()
_lock = threading.Lock()  # virtual ranks are threads that share a tokenizer


def grammar_matcher(tokenizer: Any, vocabulary: int, grammar: str) -> GrammarMatcher:
    """A matcher at the beginning of an answer; raises ValueError for a grammar that cannot be compiled."""
    if tokenizer is None:
        raise ValueError(f"grammar must be None without a tokenizer, got {shown(grammar)}")
    with _lock:
        of_tokenizer = _compilers.setdefault(tokenizer, {})
        if vocabulary not in of_tokenizer:
            of_tokenizer[vocabulary] = _Compiler(tokenizer, vocabulary)
        compiler = of_tokenizer[vocabulary]
        return GrammarMatcher(compiler.compile(grammar), compiler.eos)


def _first_line(text: str) -> str:
    return text.partition("\n<state>")[0].strip().replace("\n", " ")[:_MAX_MESSAGE]
