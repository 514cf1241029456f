"""`Request`: the handle of a submitted prompt, with the tokens of its answer. `Token`: one of them.

`BeamSearch`: the beams of one prompt, and which of their continuations are the next beams.

A beam is an answer in progress. In a step all beams of a prompt get their next tokens, and the best of all their
continuations are the next beams. The search is the same as in Transformers, with its defaults: scores are sums of
log-probabilities, the scores of finished answers are divided by their length, and it ends once no beam can become
better than the worst of `num_beams` finished answers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple, TypedDict

import torch
from torch import Tensor

from attnmesh.comm import SharedValues
from attnmesh.generation.prompts import check_stop_strings, eos_tokens
from attnmesh.generation.sampling import (
    FAILED_TOKEN,
    INVALID_TOKEN,
    MAX_ROWS,
    GrammarMatcher,
    InvalidLogits,
    LogitBias,
    LogProbs,
    PromptLookup,
    Sampling,
    TextStream,
    grammar_matcher,
    log_probs,
)
from attnmesh.kv_cache.sequence import Sequence as CacheSequence
from attnmesh.kv_cache.sequence import token_ids
from attnmesh.utils.validation import (
    check_bool,
    check_count,
    check_index,
    check_list,
    check_positive,
    check_type,
    shown,
)

# `BeamSearch`: the beams of one prompt, and which of their continuations are the next beams.


_NO_BEAM = -1.0e9  # the score of beams that do not exist yet: at first all are the prompt


class Candidate(NamedTuple):
    """A continuation: the sum of its log-probabilities, the beam that it continues, and its last token."""

    score: float
    beam: int
    token: int


class BeamSearch:
    """The beams of one prompt and its finished answers: the same on all ranks."""

    def __init__(self, num_beams: int, max_new_tokens: int, stop: frozenset[int]) -> None:
        self._num_beams, self._max_new_tokens, self._stop = num_beams, max_new_tokens, stop
        self.scores = [0.0] + [_NO_BEAM] * (num_beams - 1)
        """The score of each beam, the best first."""
        self._answers: list[list[int]] = [[] for _ in range(num_beams)]
        self._finished: list[tuple[float, list[int]]] = []  # the best first
        self.is_finished = False

    def num_candidates(self, vocabulary: int) -> int:
        """The best continuations that `step` needs: enough for all beams, however many of them end the answer."""
        return min(max(2, 1 + len(self._stop)), vocabulary) * self._num_beams

    @property
    def answer(self) -> list[int]:
        """The best finished answer."""
        return self._finished[0][1]

    def best(self, logits: Tensor) -> Tensor:
        """The best continuations of the beams, from logits [beams, vocabulary]: float64 [n, 3], as in `Candidate`."""
        scores = torch.tensor(self.scores, dtype=torch.float32, device=logits.device)
        total = torch.log_softmax(logits.float(), -1) + scores[:, None]
        best = total.flatten().topk(self.num_candidates(logits.shape[-1]))
        beam = best.indices // logits.shape[-1]  # whose width may exceed the vocabulary of the model's config
        return torch.stack([best.values.double(), beam.double(), (best.indices % logits.shape[-1]).double()], -1)

    @staticmethod
    def candidates(numbers: Sequence[float]) -> list[Candidate]:
        """The continuations that `best` has found, from its numbers in a row."""
        return [
            Candidate(score, int(beam), int(token))
            for score, beam, token in zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True)
        ]

    def step(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        """The next beams, from the best continuations of the beams, in descending order; none if it is finished."""
        length = len(self._answers[0]) + 1
        ends = [each.token in self._stop or length == self._max_new_tokens for each in candidates]
        for candidate, end in zip(candidates[: self._num_beams], ends, strict=False):
            if end:  # a worse one does not count: it is there only so that there are enough to go on
                answer = [*self._answers[candidate.beam], candidate.token]
                self._finished.append((candidate.score / length, answer))
        self._finished.sort(key=lambda each: -each[0])  # stable: the earlier of equal ones comes first
        del self._finished[self._num_beams :]
        beams = [candidate for candidate, end in zip(candidates, ends, strict=True) if not end][: self._num_beams]
        best = max((each.score for each in beams), default=_NO_BEAM) / length
        is_improvable = len(self._finished) < self._num_beams or best > self._finished[-1][0]
        self.is_finished = not beams or not is_improvable
        self.scores = [each.score for each in beams]
        self._answers = [[*self._answers[each.beam], each.token] for each in beams]
        return [] if self.is_finished else beams


MAX_PRIORITY = 2**31
FinishReason = Literal["stop", "length", "cancelled", "moved", "error"]

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]
"""Logits [1, vocabulary] in place of the model's logits, from the ids [1, length] before them and these: as
Transformers' `LogitsProcessor`. Both are on the device of the model."""


@dataclass(frozen=True)
class Token:
    """One generated token.

    Attributes:
        row: the row of the batch, or the number of the request.
        id: the token id.
        text: the text that it completes; "" without a tokenizer, or where a character needs more tokens.
        logprob: the natural logarithm of its probability, where requested.
        top_logprobs: the most likely tokens with theirs, where requested.

    Examples:
        >>> token = next(am.generate(model, None, [[1, 2, 3]], max_new_tokens=1, stop=[]))
        >>> token.row, token.text, token.logprob  # without a tokenizer there is no text
        (0, '', None)
    """

    row: int
    id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class PromptLogprob:
    """How likely a token of a prompt is after those before it.

    Attributes:
        logprob: the natural logarithm of its probability.
        rank: 1 for the most likely token.
        top_logprobs: the most likely tokens with theirs.
    """

    logprob: float
    rank: int
    top_logprobs: tuple[tuple[int, float], ...]


class SubmitOptions(TypedDict, total=False):
    """Arguments of `Generator.submit` that few calls need, by keyword."""

    logits_processors: Sequence[LogitsProcessor]
    sample: int
    grammar: str | None
    priority: int
    skip_special_tokens: bool
    prompt_logprobs: int | None


@dataclass(frozen=True)
class RequestOptions:
    """How a request is answered: the arguments of `Generator.submit`."""

    max_new_tokens: int
    sampling: Sampling
    stop: Any  # Sequence[int] | None as given by a caller, then frozenset[int]
    stop_strings: Sequence[str] = ()
    min_new_tokens: int = 0
    logprobs: int | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    sample: int = 0
    num_beams: int = 1
    speculative: bool = False
    grammar: str | None = None
    priority: int = 0
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None

    def checked(self, model: Any, tokenizer: Any) -> RequestOptions:
        """The options of a caller for a model, whose eos tokens are the default of `stop`; raises ValueError."""
        vocabulary, sampling, num_beams = model.config.vocab_size, self.sampling, self.num_beams
        stop = eos_tokens(model) if self.stop is None else set(token_ids("stop", self.stop))
        check_positive(max_new_tokens=self.max_new_tokens)
        check_type("sampling", sampling, Sampling)
        check_count("min_new_tokens", self.min_new_tokens, most=self.max_new_tokens)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), most=vocabulary)
        processors = check_list("logits_processors", self.logits_processors, "functions")
        for i, processor in enumerate(processors):
            if not callable(processor):
                raise ValueError(f"logits_processors[{i}] must be a function, got {shown(processor)}")
        check_index("sample", self.sample, MAX_ROWS)
        strings = check_stop_strings(tokenizer, self.stop_strings)
        ends = frozenset(token for token in stop if 0 <= token < vocabulary)
        self._check_grammar(tokenizer, vocabulary, ends)
        check_bool(speculative=self.speculative, skip_special_tokens=self.skip_special_tokens)
        check_count("priority", self.priority, least=-MAX_PRIORITY, most=MAX_PRIORITY)
        is_greedy = sampling.greedy and not sampling.has_penalties
        is_plain = is_greedy and self.logprobs is None and not self.min_new_tokens and not processors
        is_plain = is_plain and self.grammar is None and self.prompt_logprobs is None
        if check_count("num_beams", num_beams, least=1) > 1 and (not is_plain or strings or self.speculative):
            raise ValueError(
                "num_beams must be 1 with a sampling that is not greedy or has penalties, stop_strings, "
                f"min_new_tokens, logprobs, prompt_logprobs, logits_processors, grammar or speculative, got {num_beams}"
            )
        if self.speculative and not is_greedy:
            raise ValueError(
                f"sampling must be greedy (temperature 0), without penalties, with speculative, got {sampling}"
            )
        if self.speculative and not is_plain:
            raise ValueError(
                "speculative must be False with min_new_tokens, logprobs, prompt_logprobs, logits_processors or a "
                "grammar, got True"
            )
        return replace(self, stop=ends, stop_strings=strings, logits_processors=tuple(processors))

    def _check_grammar(self, tokenizer: Any, vocabulary: int, stop: frozenset[int]) -> None:
        if self.grammar is None:
            return
        check_type("grammar", self.grammar, str)
        if not stop:  # at the end of the grammar no other token is allowed
            raise ValueError("stop must have a token with a grammar, got none")
        if self.min_new_tokens:
            raise ValueError(f"min_new_tokens must be 0 with a grammar, got {self.min_new_tokens}")
        grammar_matcher(tokenizer, vocabulary, self.grammar)

    @property
    def shared_values(self) -> SharedValues:
        """Arguments that must be equal on all ranks. Functions cannot be compared: only their number is."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**values, "stop": sorted(self.stop), "logits_processors": f"{len(self.logits_processors)} functions"}

    @property
    def width(self) -> int:
        """The numbers that describe a token: its id, its log-probability, and the most likely tokens with theirs."""
        return 1 if self.logprobs is None else 2 + 2 * self.logprobs


@dataclass(eq=False, repr=False)
class Request:
    """A prompt that is being answered. It changes with every step of its `Generator`, until `finish_reason` is set.

    `finish_reason` is None while it is in progress, then "stop" (a stop token or string), "length" (max_new_tokens),
    "cancelled", "moved" (to another `Generator`), or "error" with an `error`. `tokens` has the answer so far, with the
    stop token; `text` ends before a stop string. `cached` is the number of prompt tokens that were in the cache.
    `prompt_logprobs` has the log-probabilities of the prompt's tokens from the second on, where requested, once the
    first token of the answer is known.

    Examples:
        >>> generator = am.Generator(model, cache_tokens=64)
        >>> request = generator.submit([1, 2, 3], max_new_tokens=2, stop=[], logprobs=1)
        >>> [token.id for token in generator.stream(request)] == request.ids
        True
        >>> request.finish_reason, request.tokens[0].logprob < 0
        ('length', True)
    """

    number: int
    prompt: list[int]
    options: RequestOptions
    tokenizer: Any
    owner: object  # the generator
    row: int | None = None  # of a call of `generate`
    tokens: list[Token] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    processor_error: Exception | None = None  # on ranks where a logits processor raised it
    cached: int = 0  # prompt tokens that were in the cache when it began
    held: bool = False  # whether it keeps its place and computes no more tokens, until it moves
    group: int = 0  # of ranks that compute it
    sequences: list[CacheSequence] = field(default_factory=list)  # of each beam, or one; none while it waits
    search: BeamSearch | None = None  # once its prompt is computed, if it has beams
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    prompt_scores: list[list[float]] = field(default_factory=list)  # of the computed part of the prompt, in numbers

    def __post_init__(self) -> None:
        hidden = None if self.options.skip_special_tokens else self.options.stop
        self._text, self._stop = TextStream(self.tokenizer, hidden), StopStrings(self.options.stop_strings)
        self._lookup = PromptLookup()
        self._grammar: GrammarMatcher | None = None  # from its first token on

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

    # What follows is for `ContinuousBatch` and `Scheduler`.

    @property
    def name(self) -> str:
        """The name of the request in errors."""
        return f"request {self.number}" if self.row is None else f"row {self.row}"

    @property
    def label(self) -> int:
        """The row of its tokens."""
        return self.number if self.row is None else self.row

    @property
    def known(self) -> list[int]:
        """The prompt and the answer so far."""
        return [*self.prompt, *self.ids]

    @property
    def max_length(self) -> int:
        """The most tokens of the prompt and the answer, or of one beam of it."""
        return len(self.prompt) + self.options.max_new_tokens

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of its prompt are wanted, and not known yet."""
        return self.options.prompt_logprobs is not None and not self.tokens

    @property
    def cache_key(self) -> str:
        """Requests with different keys share no blocks: only tokens that are computed have log-probabilities."""
        return "" if self.options.prompt_logprobs is None else f"request {self.number}"

    @property
    def width(self) -> int:
        """The numbers that `choose` returns."""
        return self.options.width + (self._score_width * (len(self.prompt) - 1) if self.scores_prompt else 0)

    @property
    def _score_width(self) -> int:
        return 2 + 2 * (self.options.prompt_logprobs or 0)

    def draft(self, ids: Sequence[int], room: int) -> list[int]:
        """At most `room` tokens that may follow the known tokens; never the last token of the answer."""
        room = min(room, self.max_length - len(ids) - 1)
        return self._lookup.draft(ids, room) if self.options.speculative and room > 0 else []

    @property
    def takes_most_likely(self) -> bool:
        """Whether its next token is the most likely token, and nothing else is wanted."""
        options = self.options
        is_plain = options.sampling.greedy and not options.sampling.has_penalties and not options.logits_processors
        is_plain = is_plain and options.logprobs is None and options.grammar is None
        return is_plain and not self._must_go_on and not self.scores_prompt

    @property
    def _must_go_on(self) -> bool:
        return len(self.tokens) < self.options.min_new_tokens

    def choose(self, logits: Tensor, log_probs: LogProbs = log_probs) -> list[float]:
        """The next token and its log-probabilities, then the log-probabilities of the prompt, as `width` numbers.

        From logits [vocabulary], and the scores of the prompt.
        """
        of_prompt = self.prompt_scores[: len(self.prompt) - 1] if self.scores_prompt else []
        return [*self._choose(logits, log_probs), *(number for row in of_prompt for number in row)]

    def _choose(self, logits: Tensor, log_probs: LogProbs) -> list[float]:
        options, sampling, allowed = self.options, self.options.sampling, logits
        try:
            allowed = self._processed(logits) if options.logits_processors else logits
            if options.grammar is not None:
                if self._grammar is None:
                    self._grammar = grammar_matcher(self.tokenizer, len(logits), options.grammar)
                allowed = self._grammar.allowed(allowed, self.ids, options.stop)
        except Exception as error:  # of a function of the caller: it ends this request only
            self.processor_error = error
            return [FAILED_TOKEN] * options.width
        if self._must_go_on and options.stop:
            allowed = allowed.clone()
            allowed[sorted(options.stop)] = float("-inf")
        try:
            generator = sampling.generator(options.sample, len(self.tokens))
            before = (self.prompt, self.ids) if sampling.has_penalties else ()
            token = sampling.sample(allowed, generator, *before)
        except InvalidLogits:
            return [INVALID_TOKEN] * options.width
        if options.logprobs is None:
            return [token]
        scores = log_probs(logits[None])[0]
        top, ids = scores.sort(descending=True, stable=True)
        return [token, float(scores[token]), *ids[: options.logprobs].tolist(), *top[: options.logprobs].tolist()]

    def _processed(self, logits: Tensor) -> Tensor:
        ids = torch.tensor([self.known], dtype=torch.int64, device=logits.device)
        scores = logits[None].clone()  # a function may change them in place
        for i, processor in enumerate(self.options.logits_processors):
            scores = processor(ids, scores)
            if not isinstance(scores, Tensor) or scores.shape != (1, *logits.shape) or not scores.is_floating_point():
                expected = f"floating point [1, {len(logits)}]"
                raise ValueError(f"logits_processors[{i}] must return logits, {expected}, got {shown(scores)}")
        return scores[0]

    def add(self, numbers: Sequence[float]) -> Token:
        """Append the token that these numbers describe; sets `finish_reason` if it is the last token."""
        token, n = int(numbers[0]), self.options.logprobs or 0
        text, reason = self._read(token, len(self.tokens))
        numbers, of_prompt = numbers[: self.options.width], numbers[self.options.width :]
        top = tuple(zip(map(int, numbers[2 : 2 + n]), numbers[2 + n :], strict=True))
        if of_prompt:
            rows = [of_prompt[at : at + self._score_width] for at in range(0, len(of_prompt), self._score_width)]
            self.prompt_logprobs, self.prompt_scores = [_prompt_logprob(row) for row in rows], []
        new = Token(self.label, token, text, None if self.options.logprobs is None else numbers[1], top)
        self.tokens.append(new)
        self.finish_reason = reason
        return new

    def to_json(self) -> dict[str, Any]:
        """The state that another generator needs to continue. Raises ValueError with functions of the caller."""
        options = self.options
        if not all(isinstance(each, LogitBias) for each in options.logits_processors):
            raise ValueError(f"{self.name} must have no logits_processors to be moved, got {shown(self.options)}")
        fields_of = {**asdict(options), "stop": sorted(options.stop)}
        tokens = [
            [each.id, *([] if each.logprob is None else [each.logprob, *zip(*each.top_logprobs, strict=True)])]
            for each in self.tokens
        ]  # fmt: skip
        return {"prompt": list(self.prompt), "options": fields_of, "tokens": tokens, "cached": self.cached}

    @classmethod
    def from_json(cls, value: Any, number: int, model: Any, tokenizer: Any, owner: object) -> Request:
        """A request that continues a saved request; raises ValueError if `model` or `tokenizer` cannot."""
        given = value["options"]
        given = {
            **given, "sampling": Sampling(**given["sampling"]),
            "logits_processors": [
                LogitBias(tuple(each["tokens"]), tuple(each["numbers"])) for each in given["logits_processors"]
            ],
        }  # fmt: skip
        options = RequestOptions(**given).checked(model, tokenizer)
        request = cls(number, list(token_ids("prompt", value["prompt"])), options, tokenizer, owner)
        request.cached = value["cached"]
        for token, *scores in value["tokens"]:
            request.add([token, *scores[:1], *(number for each in scores[1:] for number in each)])
        return request

    def fail(self, error: Exception) -> None:
        """End with an error."""
        self.error, self.finish_reason = error, "error"

    def restore(self) -> None:
        """After an interruption, recompute the state that follows from the appended tokens.

        The answer of a beam search is appended as a whole.
        """
        self.__post_init__()
        if self.options.num_beams > 1 and not self.finished:
            self.tokens.clear()
        for at, token in enumerate(self.tokens):
            _, self.finish_reason = self._read(token.id, at)

    def _read(self, token: int, at: int) -> tuple[str, FinishReason | None]:
        """The text that token number `at` of the answer completes, and the finish reason if it is the last token."""
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


def _prompt_logprob(numbers: Sequence[float]) -> PromptLogprob:
    n = (len(numbers) - 2) // 2
    top = tuple(zip(map(int, numbers[2 : 2 + n]), numbers[2 + n :], strict=True))
    return PromptLogprob(numbers[0], int(numbers[1]), top)


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


# `GenerationStats`: what one rank of a `Generator` has done.


@dataclass
class GenerationStats:
    """Tokens, bytes and times of one rank.

    Attributes:
        rank: the rank.
        cached_tokens: the most tokens of sequences in progress whose keys and values this rank has stored at a time;
            a prefix that several of them share counts for each.
        kv_bytes: bytes of K and V of these tokens on this rank.
        kv_bytes_unsharded: bytes of the same sequences on a single device.
        bytes_sent: bytes that this rank has sent.
        prefill_tokens: tokens of prompts that the ranks have computed together.
        reused_tokens: tokens of prompts that were in the KV cache already.
        generated_tokens: tokens of answers of this rank's group.
        decode_steps: decode steps of this rank's group.
        preemptions: sequences of this rank's group that were evicted and computed again.
        draft_tokens: tokens drafted by speculative decoding.
        accepted_tokens: drafted tokens that were accepted.
        prefill_seconds: time of prefill; a step that computes a part of a prompt counts as a whole.
        decode_seconds: time of the other steps.

    Examples:
        >>> def rank(comm):
        ...     generator = am.Generator(model, comm=comm, cache_tokens=64)
        ...     answer = list(generator.generate([list(range(20))], max_new_tokens=4, stop=[]))
        ...     return generator.stats
        >>> stats = am.run_virtual(2, rank)
        >>> [each.cached_tokens for each in stats], [each.generated_tokens for each in stats]
        ([12, 11], [4, 4])
    """

    rank: int
    cached_tokens: int = 0
    kv_bytes: int = 0
    kv_bytes_unsharded: int = 0
    bytes_sent: int = 0
    prefill_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    decode_steps: int = 0
    preemptions: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
