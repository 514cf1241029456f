"""Grammars: which tokens an answer may go on with so that it matches a JSON schema, a regular expression or a grammar.

llguidance computes the masks. They depend on the grammar, the vocabulary and the tokens of the answer only, so that
they are the same on every rank.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attnmesh.utils.optional import require
from attnmesh.utils.validation import shown

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
        bits = torch.frombuffer(bytearray(mask), dtype=torch.uint8)
        allowed = ((bits[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1).flatten()[: len(logits)].bool()
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
