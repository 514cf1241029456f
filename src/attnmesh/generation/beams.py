"""Beam search: `BeamSearch`, the beams of one prompt, and `BeamBatch`, which decodes them as forks of the prompt.

A beam is an answer in progress. In a step all beams of a prompt get their next tokens, and the best of all their
continuations are the next beams: a beam with several continues as forks, which share its blocks of the cache, and one
without any is freed. The search is that of Transformers, with its defaults: scores are sums of log-probabilities, those
of finished answers are divided by their length, and it ends once no beam can become better than the worst of as many
finished answers as beams.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.generation.engine import Engine, EngineSequence
from attnmesh.generation.prompt_batch import PromptBatch
from attnmesh.generation.requests import Token
from attnmesh.generation.sampling import INVALID_TOKEN, TextStream
from attnmesh.ops.decode.call import MAX_DECODE_TOKENS

_NO_BEAM = -1.0e9  # the score of beams that do not exist yet: at first all are the prompt


class Candidate(NamedTuple):
    """A continuation: the sum of its log-probabilities, the beam that it continues, and its last token."""

    score: float
    beam: int
    token: int


class BeamSearch:
    """The beams of one prompt and its finished answers. Pure Python; the same on all ranks."""

    def __init__(self, num_beams: int, max_new_tokens: int, stop: frozenset[int]) -> None:
        self._num_beams, self._max_new_tokens, self._stop = num_beams, max_new_tokens, stop
        self.scores = [0.0] + [_NO_BEAM] * (num_beams - 1)
        """The score of each beam, the best first."""
        self._answers: list[list[int]] = [[] for _ in range(num_beams)]
        self._finished: list[tuple[float, list[int]]] = []  # the best first
        self.is_finished = False

    @property
    def num_candidates(self) -> int:
        """The best continuations that `step` needs: enough for all beams, however many of them end the answer."""
        return max(2, 1 + len(self._stop)) * self._num_beams

    @property
    def answer(self) -> list[int]:
        """The best finished answer."""
        return self._finished[0][1]

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

    def fail(self) -> None:
        """End the search, with an invalid answer."""
        self._finished, self.is_finished = [(0.0, [INVALID_TOKEN])], True


@dataclass(eq=False)
class _Beams:
    """A row of the batch: its search, and a cached sequence for each beam, with the token that follows it."""

    number: int
    search: BeamSearch
    sequences: list[EngineSequence]
    next_tokens: list[int] = field(default_factory=list)

    def advance(self, engine: Engine, candidates: Sequence[Candidate]) -> None:
        """Continue with the best candidates."""
        beams = self.search.step(candidates)
        if not beams:  # the best one is kept for later prompts
            for sequence in self.sequences[1:]:
                engine.free(sequence)
            del self.sequences[1:]
            return
        for number, sequence in enumerate(self.sequences):
            if all(each.beam != number for each in beams):
                engine.free(sequence)
        taken: set[int] = set()
        next_sequences = []
        for each in beams:
            # Before the first step there is one sequence only, the prompt.
            sequence = self.sequences[each.beam if len(self.sequences) > 1 else 0]
            next_sequences.append(engine.fork(sequence) if id(sequence) in taken else sequence)
            taken.add(id(sequence))
        self.sequences, self.next_tokens = next_sequences, [each.token for each in beams]


@dataclass(frozen=True)
class BeamBatch(PromptBatch):
    """The answers to the prompts of one `generate` call, by beam search. All of them are known at the end only."""

    def answers(self, prompts: list[list[int]]) -> abc.Generator[Token, None, None]:
        """The tokens of all rows, on every rank."""
        options = self.options
        own: list[_Beams] = []
        with self._timed("prefill_seconds"):
            for group in self.ranks.computed:
                for number in self.ranks.rows(len(prompts))[group]:
                    sequence = self.engine.prefill(
                        prompts[number], options.max_new_tokens + MAX_DECODE_TOKENS, self.ranks.in_engine(group),
                        options.num_beams,
                    )  # fmt: skip
                    search = BeamSearch(options.num_beams, options.max_new_tokens, options.stop)
                    own.append(_Beams(number, search, [sequence]))
        with self._timed("decode_seconds"):
            self._search(own)
        answers = {row.number: row.search.answer for row in own}
        gathered = self._all_gather_tokens(answers, len(prompts), options.max_new_tokens)
        self._check_tokens(gathered, [sequence for row in own for sequence in row.sequences])
        self.progress.add_step(gathered)
        self.stats.generated_tokens += sum(map(len, answers.values()))
        for number, tokens in gathered:
            text = TextStream(self.tokenizer)
            for token in tokens:
                yield Token(number, token, text.add(token))

    def _search(self, rows: list[_Beams]) -> None:
        """Decode until the answers of all rows are known."""
        logits = [row.sequences[0].logits.expand(self.options.num_beams, -1) for row in rows]
        while rows:
            for row, candidates in zip(rows, self._candidates(rows, logits), strict=True):
                if candidates is None:
                    row.search.fail()
                else:
                    row.advance(self.engine, candidates)
            rows = [row for row in rows if not row.search.is_finished]
            if rows:
                sequences = [sequence for row in rows for sequence in row.sequences]
                given = [[token] for row in rows for token in row.next_tokens]
                decoded = self.engine.decode(sequences, given)[:, 0]
                logits = list(decoded.split([len(row.sequences) for row in rows]))
                self.stats.decode_steps += 1

    def _candidates(self, rows: list[_Beams], logits: list[Tensor]) -> list[list[Candidate] | None]:
        """The best continuations of each row, those of the first rank of the group; None where logits are invalid."""
        found = []
        for row, of_row in zip(rows, logits, strict=True):
            scores = torch.tensor(row.search.scores, dtype=torch.float32, device=of_row.device)
            total = torch.log_softmax(of_row.float(), -1) + scores[:, None]
            best = total.flatten().topk(min(row.search.num_candidates, total.numel()))
            found.append(torch.stack([best.values.double(), best.indices.double()], -1))
        own, group = torch.stack(found), self.ranks.group
        with self.engine.exchange(group):
            received = own[None] if group.world == 1 else torch.stack(group.all_gather(own, [own.shape] * group.world))
            valid = received[:, :, :, 0].isfinite().all(-1).all(0).tolist()
            agreed = received[0].tolist()
        vocabulary = logits[0].shape[-1]
        return [
            [Candidate(score, *divmod(int(index), vocabulary)) for score, index in of_row] if is_valid else None
            for of_row, is_valid in zip(agreed, valid, strict=True)
        ]
