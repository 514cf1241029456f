"""`BeamBatch`: a batch of prompts, answered by beam search.

A beam with several continuations goes on as forks, which share its blocks of the cache, and one without any is freed.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from attnmesh.generation.beam_search import BeamSearch, Candidate
from attnmesh.generation.engine import Engine, EngineSequence
from attnmesh.generation.prompt_batch import PromptBatch
from attnmesh.generation.requests import Token
from attnmesh.generation.sampling import TextStream
from attnmesh.ops.decode.call import MAX_DECODE_TOKENS


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
            rows = self._rows(prompts)
            for group in self.ranks.computed:
                for number in rows[group]:
                    sequence = self.engine.prefill(
                        prompts[number], options.max_new_tokens + MAX_DECODE_TOKENS, self.ranks.in_engine(group),
                        options.num_beams,
                    )  # fmt: skip
                    search = BeamSearch(options.num_beams, options.max_new_tokens, options.stop)
                    own.append(_Beams(number, search, [sequence]))
        with self._timed("decode_seconds"):
            self._search(own)
        answers = {row.number: row.search.answer for row in own}
        gathered = self._all_gather_tokens(answers, rows, options.max_new_tokens)
        self._check_tokens(gathered, [sequence for row in own for sequence in row.sequences])
        self.progress.add_step(gathered)
        self.stats.generated_tokens += sum(map(len, answers.values()))
        texts = {number: TextStream(self.tokenizer) for number, _ in gathered}
        yield from self.progress.last(
            [Token(number, token, texts[number].add(token)) for number, tokens in gathered for token in tokens]
        )

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
        found = [row.search.best(of_row) for row, of_row in zip(rows, logits, strict=True)]
        own, group = torch.stack(found), self.ranks.group
        with self.engine.exchange(group):
            received = own[None] if group.world == 1 else torch.stack(group.all_gather(own, [own.shape] * group.world))
            valid = received[:, :, :, 0].isfinite().all(-1).all(0).tolist()
            agreed = received[0].flatten(1).tolist()
        return [
            row.search.candidates(numbers) if is_valid else None
            for row, numbers, is_valid in zip(rows, agreed, valid, strict=True)
        ]
