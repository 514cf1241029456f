"""`ContinuousBatch`: requests, computed step by step; they join and leave at any step.

In a step, a group of ranks computes the next tokens of all its answers in one pass, then chunks of prompts, one pass
for each. The new tokens are exchanged within groups (all ranks continue with the tokens of the first rank) and between
groups.
"""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.generation.engine import Engine, min_prefill_chunk
from attnmesh.generation.requests import BeamSearch, FinishReason, GenerationStats, Request, Token
from attnmesh.generation.sampling import FAILED_TOKEN, INVALID_TOKEN, InvalidLogits, most_likely
from attnmesh.generation.scheduler import Chunk, Scheduler, StepPlan
from attnmesh.kv_cache.sequence import Sequence as CacheSequence

_NO_TOKEN = (INVALID_TOKEN, FAILED_TOKEN)


@dataclass(frozen=True)
class BatchRanks:
    """The groups of sequences (KVDP), and the ranks that compute them.

    The ranks of `group` compute together. With whole weights they are the ranks of one group of sequences, and
    `across_groups` are the ranks with the same part in other groups. With sharded weights all ranks compute the
    sequences of all groups together, and `across_groups` is this rank alone.
    """

    group: Comm
    across_groups: Comm
    kvdp: int
    together: bool = False

    @cached_property
    def computed(self) -> list[int]:
        """The groups of sequences that this rank computes."""
        return list(range(self.kvdp)) if self.together else [self.across_groups.rank]


class Callbacks(NamedTuple):
    """Functions that a `Generator` calls.

    `on_prefill` is called after every prefill pass with the number of prompt tokens that are cached and the length of
    the prompt, and `on_logits` with a row, or the number of a request, and the logits [vocabulary] of each of its new
    tokens, on the ranks of its group.

    Examples:
        >>> chosen = []
        >>> callbacks = am.generation.Callbacks(on_logits=lambda row, logits: chosen.append(int(logits.argmax())))
        >>> generator = am.Generator(model, cache_tokens=64, callbacks=callbacks)
        >>> tokens = list(generator.generate([[1, 2, 3]], max_new_tokens=4, stop=[]))
        >>> chosen == [token.id for token in tokens]
        True
    """

    on_prefill: Callable[[int, int], None] | None = None
    on_logits: Callable[[int, Tensor], None] | None = None


class ContinuousBatch:
    """The requests of a `Generator`, whose number on its ranks is `generator`. All ranks make the same calls.

    After an interrupted call, the next call computes all requests again from the tokens that they have.
    """

    def __init__(
        self, engine: Engine, ranks: BatchRanks, *, generator: int, stats: GenerationStats, callbacks: Callbacks
    ) -> None:
        self.scheduler = Scheduler(
            engine.cache.by_kvdp_rank, max_chunk=engine.prefill_chunk,
            min_chunk=min_prefill_chunk(engine.position_ranks.world),
            states=engine.states if engine.calls.recurrent else None,
        )  # fmt: skip
        self._engine, self._ranks, self._stats, self._callbacks = engine, ranks, stats, callbacks
        self.requests: list[Request] = []  # in progress
        self._changing = self._in_ledger = False  # also after an interruption
        self._generator = generator

    def submit(self, request: Request) -> None:
        """Take a request."""
        with self._change(), self._ledger():
            self.requests.append(request)
            self.scheduler.add(request)

    def adopt(self, request: Request, sequence: CacheSequence) -> None:
        """Take a request whose tokens are in the cache already, except the last tokens."""
        with self._change(), self._ledger():
            sequence.ids = array("q", request.known)
            self.requests.append(request)
            self.scheduler.adopt(request, sequence)

    def cancel(self, request: Request, reason: FinishReason = "cancelled") -> None:
        """End a request; its keys and values stay cached for reuse."""
        with self._change(), self._ledger():
            if request in self.requests:  # after an interruption it may have all its tokens
                request.finish_reason = reason
                self._end(request)

    def settle(self) -> None:
        """Restore the state after an interrupted call now, instead of with the next change."""
        with self._change():
            pass

    def restart_searches(self, requests: Iterable[Request]) -> None:
        """Let beam searches among these begin again: of them nothing is known but the prompt."""
        with self._change(), self._ledger():
            for request in requests:
                if request.options.num_beams > 1 and request.sequences:
                    self.scheduler.remove(request)
                    self.scheduler.add(request)

    def forget_finished(self) -> None:
        """Free the blocks that are kept for reuse."""
        with self._change(), self._ledger():
            for cache in self.scheduler.caches:
                cache.forget_cached()

    def step(self, step_tokens: int) -> list[Token]:
        """Compute the next step of all groups, at most `step_tokens` tokens each; the new tokens, by request."""
        with self._change():
            began = time.perf_counter()
            with self._ledger():
                plan = self.scheduler.plan(step_tokens)
            for comm in (self._ranks.group, self._ranks.across_groups):
                if comm.world > 1:  # compared with the next message
                    comm.note("step", str([self._generator, plan.width, *(each.digest for each in plan.groups)]))
            logits = self._compute(plan)
            with self._ledger():
                self._mark_written(plan)
            new = self._exchange(plan, self._choose(plan, logits))
            seconds = time.perf_counter() - began
            if any(plan.groups[group].chunks for group in self._ranks.computed):
                self._stats.prefill_seconds += seconds
            else:
                self._stats.decode_seconds += seconds
            with self._ledger():
                if plan.width > 1 and self._engine.calls.recurrent:
                    self._accept(plan, dict(new))
                tokens = self._commit(plan, new)
                if plan.width > 1:
                    for each in plan.groups:
                        self.scheduler.keep_states(each.decoded, in_answer=True)
            self._report_logits(tokens, logits)
            return [token for of_request in tokens.values() for token in of_request]

    @contextmanager
    def _change(self) -> Iterator[None]:
        if self._changing:
            self._restore()
        self._changing = True
        yield
        self._changing = False

    @contextmanager
    def _ledger(self) -> Iterator[None]:
        """Around changes of caches and requests that belong together."""
        self._in_ledger = True
        yield
        self._in_ledger = False

    def _restore(self) -> None:
        """Compute all requests again from the tokens that they have, where nothing else is cached for them."""
        for request in self.requests:
            if request.finish_reason not in ("cancelled", "moved", "error"):
                request.restore()
        self.requests = [request for request in self.requests if not request.finished]
        self.scheduler.reset(self.requests, clear=self._in_ledger)
        self._in_ledger = False

    def _compute(self, plan: StepPlan) -> dict[Request, Tensor]:
        """Run the passes of the groups that this rank computes.

        Returns the logits [n, vocabulary] of requests: after each token of a step, or of each beam.
        """
        engine, stats = self._engine, self._stats
        own = [plan.groups[group] for group in self._ranks.computed]
        stats.preemptions += sum(each.preemptions for each in own)
        stats.reused_tokens += sum(each.reused for each in own)
        logits: dict[Request, Tensor] = {}
        decoded = [pair for each in own for pair in each.decoded]
        if decoded:
            stats.decode_steps += 1
            stored = next((each.new for each in own if each.new is not None and not each.new.slots.is_meta), None)
            sequences = [sequence for _, sequence in decoded]
            rows = engine.decode(sequences, [plan.given(each) for each in sequences], stored)
            if any(each.chunks for each in own):
                rows = rows.clone()  # not a view of memory that the graph of a short chunk writes
            at: dict[Request, list[int]] = {}
            for i, (request, _) in enumerate(decoded):
                at.setdefault(request, []).append(i)
            for request, indices in at.items():
                num_tokens = self._num_tokens(plan, request)
                logits[request] = rows[indices[0], :num_tokens] if len(indices) == 1 else rows[indices, 0]
        for chunk in [chunk for each in own for chunk in each.chunks]:
            after = self._prefill(chunk)
            stats.prefill_tokens += len(chunk.ids)
            if chunk.ends_prompt:
                logits[chunk.request] = after[None]
            if self._callbacks.on_prefill is not None:
                self._callbacks.on_prefill(chunk.begin + len(chunk.ids), len(chunk.sequence.ids))
        return logits

    def _prefill(self, chunk: Chunk) -> Tensor:
        """The logits [vocabulary] after a chunk; its request keeps the log-probabilities of the prompt, if wanted."""
        request, given = chunk.request, (chunk.sequence, chunk.begin, chunk.ids, chunk.new)
        if not request.scores_prompt:
            return self._engine.prefill(*given)
        after, scores = self._engine.prefill_scored(*given, request.options.prompt_logprobs)
        request.prompt_scores[chunk.begin :] = scores  # a preempted prompt is computed again
        return after

    def _mark_written(self, plan: StepPlan) -> None:
        """Record, for all groups, that the keys and values of a step are in the cache."""
        for cache, each in zip(self.scheduler.caches, plan.groups, strict=True):
            for new in [each.new, *(chunk.new for chunk in each.chunks)]:
                if new is not None:
                    cache.mark_written(new)
            for chunk in each.chunks:
                self.scheduler.keep_states([(chunk.request, chunk.sequence)], in_answer=chunk.ends_prompt)
            if plan.width == 1:
                self.scheduler.keep_states(each.decoded, in_answer=True)
            for request, sequence in each.decoded:
                padding = plan.width - self._num_tokens(plan, request)
                if padding:  # after its draft, where another request has a longer draft
                    cache.truncate(sequence, sequence.length - padding)
        self._note_stored()

    def _note_stored(self) -> None:
        """Record the number of tokens that this rank stores, if it is the most so far."""
        engine, stats = self._engine, self._stats
        own = engine.cache.local.sequences.values()
        stored = sum(engine.shard.length(each.length) for each in own)
        if stored >= stats.cached_tokens:  # also of more tokens, which other ranks store
            held = [engine.kv_bytes(each) for each in own]
            stats.cached_tokens, stats.kv_bytes = stored, sum(each for each, _ in held)
            stats.kv_bytes_unsharded = sum(each for _, each in held)

    def _choose(self, plan: StepPlan, logits: dict[Request, Tensor]) -> list[list[float]]:
        """The next tokens of each request that this rank computes, in numbers."""
        requests = [request for group in self._ranks.computed for request in plan.groups[group].sampled]
        found = {each: self._candidates(each, logits[each]) for each in requests if each.options.num_beams > 1}
        simple = [each for each in requests if each not in found and each.takes_most_likely]
        if simple:  # one transfer for all of them
            rows = torch.cat([logits[each][: self._num_tokens(plan, each)] for each in simple])
            tokens = iter(most_likely(rows).tolist())
            found |= {each: [next(tokens) for _ in range(self._num_tokens(plan, each))] for each in simple}
        return [found.get(each) or each.choose(logits[each][0], self._engine.log_probs) for each in requests]

    def _candidates(self, request: Request, logits: Tensor) -> list[float]:
        """The best continuations of all beams of a search, in numbers."""
        best = self._search(request).best(logits.expand(request.options.num_beams, -1)).flatten().tolist()
        return [0.0, *best] if all(map(math.isfinite, best)) else [INVALID_TOKEN] * (1 + len(best))

    def _search(self, request: Request) -> BeamSearch:
        """The search of a request, a new search if its prompt was computed just now."""
        if request.search is None:
            options = request.options
            request.search = BeamSearch(options.num_beams, options.max_new_tokens, options.stop)
        return request.search

    def _num_tokens(self, plan: StepPlan, request: Request) -> int:
        """The inputs of a step: the last known token of a request, and its draft."""
        return 1 + len(plan.drafts.get(request, ()))

    def _width(self, plan: StepPlan, request: Request) -> int:
        """The numbers that `_choose` returns for a request."""
        if request.options.num_beams > 1:
            return 1 + 3 * self._search(request).num_candidates(self._engine.model.config.vocab_size)
        return max(request.width, self._num_tokens(plan, request))

    def _exchange(self, plan: StepPlan, own: list[list[float]]) -> list[tuple[Request, list[float]]]:
        """The next tokens of all groups, by the number of the request.

        Ranks of a group may round differently: all take the tokens of the first. There is none if a rank has none.
        """
        group, across = self._ranks.group, self._ranks.across_groups
        requests = [of_group.sampled for of_group in plan.groups]
        if self._ranks.together:
            requests = [[each for of_group in requests for each in of_group]]
        widths = [[self._width(plan, each) for each in of_group] for of_group in requests]
        if group.world > 1 and own:
            by_rank = self._all_gather(group, own, [widths[across.rank]] * group.world)
            own = [next((row for row in rows if row[0] in _NO_TOKEN), rows[0]) for rows in zip(*by_rank, strict=True)]
        rows = [own]
        if across.world > 1:
            rows = self._all_gather(across, own, widths) if any(widths) else [[] for _ in requests]
        pairs = [pair for both in zip(requests, rows, strict=True) for pair in zip(*both, strict=True)]
        return sorted(pairs, key=lambda pair: pair[0].number)

    def _all_gather(self, comm: Comm, own: list[list[float]], widths: list[list[int]]) -> list[list[list[float]]]:
        """The numbers of every rank; rank r has `widths[r]` of each of its requests."""
        x = torch.tensor([n for row in own for n in row], dtype=torch.float64, device=self._engine.device)
        with self._engine.exchange(comm):
            gathered = [iter(each.tolist()) for each in comm.all_gather(x, [(sum(each),) for each in widths])]
        return [[list(islice(numbers, n)) for n in each] for numbers, each in zip(gathered, widths, strict=True)]

    def _commit(self, plan: StepPlan, new: list[tuple[Request, list[float]]]) -> dict[Request, list[Token]]:
        """Append the new tokens to their requests, and end the requests that are complete."""
        tokens: dict[Request, list[Token]] = {}
        for request in plan.failed:
            request.fail(_no_room(request, self._engine))
            self.requests.remove(request)
        for request, numbers in new:
            if numbers[0] in _NO_TOKEN:
                is_invalid = numbers[0] == INVALID_TOKEN
                request.fail(_invalid(request, self._engine) if is_invalid else _processor_error(request))
                self._end(request, forget=is_invalid)  # its keys and values may be invalid, too
                continue
            if request.options.num_beams > 1:
                tokens[request] = [request.add([token]) for token in self._continue_search(request, numbers[1:])]
            else:
                tokens[request] = self._extend(plan, request, numbers)
            if request.group in self._ranks.computed:
                self._stats.generated_tokens += len(tokens[request])
            if request.finished:
                self._end(request)
        return tokens

    def _report_logits(self, tokens: dict[Request, list[Token]], logits: dict[Request, Tensor]) -> None:
        """Call the function of the caller with the logits of new tokens, of the groups that this rank computes."""
        if self._callbacks.on_logits is None:
            return
        for request, rows in logits.items():
            for row in rows[: len(tokens.get(request, ()))]:
                self._callbacks.on_logits(request.label, row.clone())  # a view would keep the logits of all requests

    def _accept(self, plan: StepPlan, numbers: dict[Request, list[float]]) -> None:
        """Advance the recurrent states over the tokens of a step with drafts that are not rejected."""
        decoded = [pair for group in self._ranks.computed for pair in plan.groups[group].decoded]
        drafts = [(plan.drafts.get(request, []), numbers[request]) for request, _ in decoded]
        if decoded:
            self._engine.accept_drafts([len(_accepted(*each)) if each[0] else 1 for each in drafts])

    def _extend(self, plan: StepPlan, request: Request, numbers: list[float]) -> list[Token]:
        """Append the next token or, with a draft, the correct part of the draft and one more token."""
        (sequence,), draft = request.sequences, plan.drafts.get(request, [])
        if not draft:
            new = [request.add(numbers)]
        else:
            new = []
            for token in _accepted(draft, numbers):
                if request.finished:
                    break
                new.append(request.add([token]))
            if request.group in self._ranks.computed:
                self._stats.draft_tokens += len(draft)
                self._stats.accepted_tokens += len(new) - 1
        known = len(request.prompt) + len(request.tokens)
        if sequence.length >= known:  # rejected tokens
            self.scheduler.caches[request.group].truncate(sequence, known - 1)
        sequence.ids.append(new[-1].id)
        return new

    def _continue_search(self, request: Request, numbers: list[float]) -> list[int]:
        """Go on with the best candidates; the tokens of the answer, if it is known."""
        search = self._search(request)
        beams = search.step(search.candidates(numbers))
        if not beams:
            return search.answer
        self.scheduler.advance(request, [(each.beam, each.token) for each in beams])
        return []

    def _end(self, request: Request, *, forget: bool = False) -> None:
        self.scheduler.remove(request, forget=forget)
        self.requests.remove(request)


def _accepted(draft: list[int], numbers: list[float]) -> list[float]:
    """The correct part of a draft, and the token after it, where that can be chosen; from the tokens of a step."""
    correct = next((i for i, token in enumerate(draft) if token != numbers[i]), len(draft))
    chosen = numbers[: correct + 1]  # the next step finds again that there is no token, and ends the request
    return chosen[: next((i for i, token in enumerate(chosen) if token in _NO_TOKEN), len(chosen))]


def _no_room(request: Request, engine: Engine) -> Exception:
    return RuntimeError(
        f"{request.name}: {len(request.prompt)} + {len(request.tokens)} tokens do not fit into a cache of "
        f"cache_tokens={engine.cache_tokens}"
    )


def _processor_error(request: Request) -> Exception:
    if request.processor_error is not None:
        return request.processor_error
    return RuntimeError(f"{request.name}: a logits processor raised an exception on another rank")


def _invalid(request: Request, engine: Engine) -> Exception:
    dtype = engine.model.get_input_embeddings().weight.dtype
    return InvalidLogits(
        f"{request.name}: the logits have a NaN or +inf, or -inf only, after {len(request.tokens)} tokens: no token "
        f"can be chosen; check the weights of the model and the range of its dtype, {dtype}"
    )
