"""`PromptBatch`: a batch of prompts, answered together: prefill of each, then decode steps of all.

The ranks that compute a prompt together all take the tokens that the first of them has chosen. Groups of ranks with
prompts of their own prefill and decode independently, and exchange their new tokens after every step.
"""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from attnmesh.generation.agreement import Progress
from attnmesh.generation.batching import BatchRanks
from attnmesh.generation.engine import Engine, EngineSequence
from attnmesh.generation.requests import Token
from attnmesh.generation.sampling import (
    INVALID_TOKEN,
    InvalidLogits,
    PromptLookup,
    Sampling,
    TextStream,
    most_likely,
)
from attnmesh.generation.stats import GenerationStats
from attnmesh.ops.decode.call import MAX_DECODE_TOKENS

_PADDING = -1  # in place of tokens of rows that are finished


@dataclass(eq=False)
class _Row:
    """A row of the batch that is being generated."""

    number: int
    sequence: EngineSequence
    lookup: PromptLookup = field(default_factory=lambda: PromptLookup())
    new: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class BatchOptions:
    """The options of one `generate` call."""

    max_new_tokens: int
    sampling: Sampling
    stop: frozenset[int]
    speculative: bool
    num_beams: int

    def max_tokens(self, prompt: int) -> int:
        """The most tokens that a prompt of so many tokens and its answer take, with drafts, in all beams."""
        return prompt + self.num_beams * (self.max_new_tokens + MAX_DECODE_TOKENS)


@dataclass(frozen=True)
class PromptBatch:
    """The answers to the prompts of one `generate` call."""

    engine: Engine
    ranks: BatchRanks
    options: BatchOptions
    tokenizer: Any
    stats: GenerationStats
    progress: Progress
    on_logits: Callable[[int, Tensor], None] | None

    def answers(self, prompts: list[list[int]]) -> abc.Generator[Token, None, None]:
        """The tokens of all rows, on every rank, as they are generated."""
        batch, options = len(prompts), self.options
        texts = [TextStream(self.tokenizer) for _ in prompts]
        own: list[_Row] = []
        with self._timed("prefill_seconds"):
            rows = self._rows(prompts)
            for group in self.ranks.computed:
                for number in rows[group]:
                    most = options.max_new_tokens + MAX_DECODE_TOKENS
                    sequence = self.engine.prefill(prompts[number], most, self.ranks.in_engine(group))
                    own.append(_Row(number, sequence))
            logits = [row.sequence.logits[None] for row in own]
            new = self._broadcast(_sample(options.sampling, own, logits))
            self._report_logits(own, logits, new)
        active, left = own, dict.fromkeys(range(batch), options.max_new_tokens)
        while True:
            by_row = {row.number: tokens for row, tokens in zip(active, new, strict=True)}
            gathered = self._all_gather_tokens(by_row, rows, MAX_DECODE_TOKENS)
            self._check_tokens(gathered, [row.sequence for row in own])
            self.progress.add_step(gathered)
            for row, tokens in zip(active, new, strict=True):
                row.new += tokens
                self.stats.generated_tokens += len(tokens)
            returned = []
            for number, tokens in gathered:
                left[number] = 0 if tokens[-1] in options.stop else left[number] - len(tokens)
                returned += [Token(number, token, texts[number].add(token)) for token in tokens]
            if not any(left.values()):
                yield from self.progress.last(returned)
                break
            yield from returned
            active = [row for row in active if left[row.number]]
            with self._timed("decode_seconds"):
                new = self._decode_step(active) if active else []

    def _check_tokens(self, new: list[tuple[int, list[int]]], sequences: list[EngineSequence]) -> None:
        """Raise InvalidLogits, on every rank, if any row of any group has invalid logits."""
        rows = [number for number, tokens in new if tokens[-1] == INVALID_TOKEN]
        if rows:
            for sequence in sequences:
                self.engine.free(sequence)  # its keys and values may be invalid, too
            raise InvalidLogits(
                f"generate: the logits of row {', '.join(map(str, rows))} have a NaN or +inf, or -inf only, at step "
                f"{self.progress.steps} (the prompt is step 0): no token can be chosen; check the weights of the "
                f"model and the range of its dtype, {self.engine.model.get_input_embeddings().weight.dtype}"
            )

    def _decode_step(self, active: list[_Row]) -> list[list[int]]:
        """One decode step of the rows that are computed here: the new tokens of each, one or (with drafts) more."""
        options = self.options
        drafts = [self._draft(row, options.max_new_tokens) if options.speculative else [] for row in active]
        width = max(map(len, drafts))
        begins = [len(row.sequence.ids) for row in active]
        # Shorter drafts are padded with token 0, which is truncated with the rejected tokens.
        given = [[row.new[-1], *draft, *[0] * (width - len(draft))] for row, draft in zip(active, drafts, strict=True)]
        logits = self.engine.decode([row.sequence for row in active], given)
        self.stats.decode_steps += 1
        if options.speculative:
            greedy = self._broadcast(most_likely(logits).tolist())
            new = [_accept(draft, tokens) for draft, tokens in zip(drafts, greedy, strict=True)]
        else:
            new = self._broadcast(_sample(options.sampling, active, logits))
        for row, begin, draft, tokens in zip(active, begins, drafts, new, strict=True):
            if len(row.sequence.ids) > begin + len(tokens):
                self.engine.truncate(row.sequence, begin + len(tokens))
            del tokens[options.max_new_tokens - len(row.new) :]
            stopped = next((i for i, token in enumerate(tokens) if token in options.stop), len(tokens))
            del tokens[stopped + 1 :]
            self.stats.draft_tokens += len(draft)
            self.stats.accepted_tokens += len(tokens) - 1
        self._report_logits(active, logits, new)
        return new

    def _report_logits(self, rows: list[_Row], logits: Sequence[Tensor] | Tensor, new: list[list[int]]) -> None:
        if self.on_logits is not None:
            for row, of_row, tokens in zip(rows, logits, new, strict=True):
                for of_token in of_row[: len(tokens)].clone():  # the next step may overwrite them
                    self.on_logits(row.number, of_token)

    def _draft(self, row: _Row, max_new_tokens: int) -> list[int]:
        """Draft tokens: no more than may be generated, or than one step can verify."""
        room = min(MAX_DECODE_TOKENS, max_new_tokens - len(row.new)) - 1
        return row.lookup.draft([*row.sequence.ids, row.new[-1]], room) if room > 0 else []

    def _broadcast(self, tokens: list[list[int]]) -> list[list[int]]:
        """The tokens that the first rank of the group has sampled: ranks may round differently and must not diverge.

        Invalid are those that any rank of the group finds invalid.
        """
        group = self.ranks.group
        if group.world == 1 or not tokens:
            return tokens
        x = torch.tensor(tokens, dtype=torch.int64, device=self.engine.device)  # NCCL sends device tensors only
        with self.engine.exchange(group):
            received = torch.stack(group.all_gather(x, [x.shape] * group.world))
            invalid = (received == INVALID_TOKEN).any(0)
            agreed: list[list[int]] = torch.where(invalid, INVALID_TOKEN, received[0]).tolist()
        return agreed

    def _rows(self, prompts: list[list[int]]) -> list[list[int]]:
        """The rows of each group, about equally many: where most of their prompts is cached, if there is room."""
        ranks, engine, across = self.ranks, self.engine, self.ranks.across_groups
        evenly = [list(rows) for rows in ranks.rows(len(prompts))]
        if ranks.kvdp == 1:
            return evenly
        own = [[engine.cached_prefix(ids, ranks.in_engine(group)) for ids in prompts] for group in ranks.computed]
        x = torch.tensor(own, dtype=torch.int64, device=engine.device)
        with engine.exchange(across):
            found = x if across.world == 1 else torch.cat(across.all_gather(x, [x.shape] * across.world))
            rows = rows_by_prefix(found.tolist()) or evenly
        tokens = [sum(self.options.max_tokens(len(prompts[number])) for number in of_group) for of_group in rows]
        return rows if max(tokens) <= engine.cache_tokens else evenly

    def _all_gather_tokens(
        self, by_row: dict[int, list[int]], rows: list[list[int]], most: int
    ) -> list[tuple[int, list[int]]]:
        """The new tokens of all groups, at most `most` of each row, by row."""
        across = self.ranks.across_groups
        if across.world == 1:
            return sorted(by_row.items())
        own = rows[across.rank]
        x = torch.full((len(own), most), _PADDING, dtype=torch.int64, device="cpu")
        for number, tokens in by_row.items():
            x[own.index(number), : len(tokens)] = torch.tensor(tokens, dtype=torch.int64, device="cpu")
        with self.engine.exchange(across):
            gathered = across.all_gather(x.to(self.engine.device), [(len(each), most) for each in rows])
        unpadded = [
            (number, [token for token in tokens if token != _PADDING])
            for numbers, part in zip(rows, gathered, strict=True)
            for number, tokens in zip(numbers, part.tolist(), strict=True)
        ]
        return [(number, tokens) for number, tokens in sorted(unpadded) if tokens]

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)
        setattr(self.stats, name, getattr(self.stats, name) + time.perf_counter() - began)


def rows_by_prefix(cached: list[list[int]]) -> list[list[int]]:
    """The rows of each group, where `cached[group][row]` tokens of a prompt are cached; none if nothing is.

    The longest prefixes decide first. A group has at most its share of the rows.
    """
    groups, batch = range(len(cached)), range(len(cached[0]))
    most = -(-len(batch) // len(cached))
    rows: list[list[int]] = [[] for _ in groups]
    found = sorted((-cached[group][row], row, group) for group in groups for row in batch if cached[group][row])
    if not found:
        return []
    for row, group in [each[1:] for each in found]:
        if len(rows[group]) < most and not any(row in others for others in rows):
            rows[group].append(row)
    for row in [each for each in batch if not any(each in others for others in rows)]:
        min(rows, key=len).append(row)
    return [sorted(of_group) for of_group in rows]


def _sample(sampling: Sampling, rows: list[_Row], logits: list[Tensor] | Tensor) -> list[list[int]]:
    """The next token of each row, from its logits [1, vocabulary]; `INVALID_TOKEN` where these are invalid."""
    if sampling.greedy and not sampling.has_penalties and rows:  # one transfer for all rows
        tokens: list[list[int]] = most_likely(logits if isinstance(logits, Tensor) else torch.stack(logits)).tolist()
        return tokens
    sampled = []
    for row, of_row in zip(rows, logits, strict=True):
        try:
            ids, new = row.sequence.ids, len(row.new)
            dice = sampling.generator(row.number, new)
            sampled.append([sampling.sample(of_row[0], dice, ids[: len(ids) - new], row.new)])
        except InvalidLogits:
            sampled.append([INVALID_TOKEN])
    return sampled


def _accept(draft: list[int], greedy: list[int]) -> list[int]:
    """The new tokens, from the greedy token after each given one: the correct prefix of a draft, and one more."""
    correct = next((i for i, token in enumerate(draft) if token != greedy[i]), len(draft))
    return greedy[: correct + 1]
