"""`ContinuousBatch`: submitted requests, computed step by step; they join and leave at any step.

In a step, a group of ranks computes the next token of all its answers in one pass, then chunks of prompts, one pass for
each. The new tokens are exchanged within groups (all ranks continue with those of the first) and between groups.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.comm import Comm
from attnmesh.generation.beam_search import BeamSearch
from attnmesh.generation.cached_sequences import CachedSequence, CacheLimits, GroupCache
from attnmesh.generation.engine import Engine, EngineSequence
from attnmesh.generation.prefill_shards import min_prefill_chunk
from attnmesh.generation.rank_memory import BLOCK_SIZE
from attnmesh.generation.requests import Request, Token
from attnmesh.generation.sampling import FAILED_TOKEN, INVALID_TOKEN, InvalidLogits, most_likely
from attnmesh.generation.scheduler import GroupPlan, Job, Scheduler, StepPlan
from attnmesh.generation.stats import GenerationStats
from attnmesh.plan.decode import DecodeSharding

_NO_TOKEN = (INVALID_TOKEN, FAILED_TOKEN)


@dataclass(frozen=True)
class BatchRanks:
    """The groups of sequences (KVDP), and the ranks that compute them.

    The ranks of `group` compute together. With whole weights they are those of one group of sequences, and
    `across_groups` are the ranks with the same part in other groups. With sharded weights all ranks compute the
    sequences of all groups together, and `across_groups` is this rank alone.
    """

    group: Comm
    across_groups: Comm
    kvdp: int
    together: bool = False

    @property
    def computed(self) -> list[int]:
        """The groups of sequences that this rank computes."""
        return list(range(self.kvdp)) if self.together else [self.across_groups.rank]

    def rows(self, batch: int) -> list[range]:
        """The rows of a batch of prompts that belong to each group."""
        groups = DecodeSharding(kvdp=self.kvdp)
        return [groups.sequences(group, batch) for group in range(self.kvdp)]

    def in_engine(self, group: int) -> int:
        """The number of a group in the engine, which knows only those that it computes."""
        return group if self.together else 0


class ContinuousBatch:
    """The requests of a `Generator`. It starts with an empty cache: all ranks track what all groups store.

    `generator` is the number of that. All ranks make the same calls. After a call that was interrupted, the next one
    computes all requests again from the tokens that they have.
    """

    def __init__(
        self,
        engine: Engine,
        ranks: BatchRanks,
        *,
        generator: int,
        step_tokens: int,
        stats: GenerationStats,
        on_logits: Callable[[int, Tensor], None] | None,
    ) -> None:
        limits = CacheLimits(
            # What `cache_tokens` tokens need, the rest of a block for each sequence, and of beams that begin in a
            # block of the prompt a copy of it.
            blocks=-(-engine.capacity // BLOCK_SIZE) + 2 * engine.max_sequences,
            block_size=BLOCK_SIZE,
            max_sequences=engine.max_sequences,
            max_length=engine.capacity,
        )
        world = engine.position_ranks.world
        self.scheduler = Scheduler(
            [GroupCache(world, engine.shard, limits, engine.nothing_kept) for _ in range(ranks.kvdp)],
            step_tokens=step_tokens, max_chunk=engine.prefill_chunk, min_chunk=min_prefill_chunk(world),
        )  # fmt: skip
        engine.clear()
        self._engine, self._ranks, self._stats, self._on_logits = engine, ranks, stats, on_logits
        self._requests: dict[Job, Request] = {}
        self._stored: dict[CachedSequence, EngineSequence] = {}  # of the groups that are computed here
        self._searches: dict[Job, BeamSearch] = {}  # of those whose prompt is computed
        self._changing = False  # also after an interruption
        self._generator = generator

    @property
    def requests(self) -> list[Request]:
        """The requests in progress."""
        return list(self._requests.values())

    def submit(self, request: Request) -> None:
        """Take a request."""
        with self._change():
            job = _job(request)
            self._requests[job] = request
            self.scheduler.add(job)

    def cancel(self, request: Request) -> None:
        """End a request; what was computed stays cached for reuse."""
        with self._change():
            request.finish_reason = "cancelled"
            self._end(next(job for job, each in self._requests.items() if each is request), keep=True)

    def forget_finished(self) -> None:
        """Free the sequences that are kept for reuse."""
        with self._change():
            for group, cache in enumerate(self.scheduler.caches):
                for sequence in [each for each in cache.sequences if not each.active]:
                    cache.free(sequence)
                    if group in self._ranks.computed:
                        self._engine.free(self._stored.pop(sequence))

    def step(self) -> list[Token]:
        """Compute the next step of all groups; returns the new tokens, by the number of the request."""
        with self._change():
            began = time.perf_counter()
            plan = self.scheduler.plan()
            own = [plan.groups[group] for group in self._ranks.computed]
            for comm in (self._ranks.group, self._ranks.across_groups):  # compared with the next message
                comm.note("step", str([self._generator, *(each.digest for each in plan.groups)]))
            self._compute(own)
            new = self._exchange(plan, self._choose([job for each in own for job in each.sampled]))
            seconds = time.perf_counter() - began
            if any(each.chunks for each in own):
                self._stats.prefill_seconds += seconds
            else:
                self._stats.decode_seconds += seconds
            return self._commit(plan, new)

    @contextmanager
    def _change(self) -> Iterator[None]:
        if self._changing:
            self._restore()
        self._changing = True
        yield
        self._changing = False

    def _restore(self) -> None:
        """Compute all requests again from the tokens that they have."""
        self._engine.clear()
        self._stored.clear()
        self._searches.clear()
        for request in self._requests.values():
            if request.finish_reason not in ("cancelled", "error"):
                request.restore()
        self._requests = {_job(request): request for request in self._requests.values() if not request.finished}
        self.scheduler.reset(list(self._requests))

    def _compute(self, plans: list[GroupPlan]) -> None:
        """Run the passes of the groups that this rank computes."""
        engine, stored = self._engine, self._stored
        self._stats.preemptions += sum(plan.preemptions for plan in plans)
        for sequence in [each for plan in plans for each in plan.freed]:
            engine.free(stored.pop(sequence))
        decoded = [job for plan in plans for job in plan.decode]
        if decoded:
            self._stats.decode_steps += 1
            engine.decode([self._stored_for(job) for job in decoded], [job.ids[-1:] for job in decoded])
        for group, plan in zip(self._ranks.computed, plans, strict=True):
            for chunk in plan.chunks:
                if chunk.is_new and chunk.job.sequence is not None:
                    source = None if chunk.source is None else stored[chunk.source]
                    keep = chunk.source is not chunk.job.sequence  # otherwise it is taken over
                    in_engine = self._ranks.in_engine(group)
                    kept = chunk.job.sequence.kept
                    stored[chunk.job.sequence] = engine.start(
                        source, chunk.begin, in_engine, keep=keep, marks=() if kept is None else kept.marks
                    )
                if chunk.ids:
                    engine.extend(self._stored_for(chunk.job), chunk.ids)

    def _stored_for(self, job: Job) -> EngineSequence:
        assert job.sequence is not None
        return self._stored[job.sequence]

    def _choose(self, jobs: list[Job]) -> list[list[float]]:
        """The next token of each request that this rank computes, in numbers."""
        searches = [job for job in jobs if job.num_beams > 1]
        found = {job: self._candidates(job) for job in searches}
        jobs_of_one = [job for job in jobs if job.num_beams == 1]
        logits = {job: self._stored_for(job).logits for job in jobs_of_one}
        if self._on_logits is not None:
            for job, of_job in logits.items():
                self._on_logits(job.number, of_job.clone())  # who keeps them would keep those of all requests
        requests = {job: self._requests[job] for job in jobs_of_one}
        simple = [job for job in jobs_of_one if requests[job].takes_most_likely]
        # One transfer for all of them.
        tokens = most_likely(torch.stack([logits[job] for job in simple])).tolist() if simple else []
        found |= {job: [token] for job, token in zip(simple, tokens, strict=True)}
        return [found.get(job) or requests[job].choose(logits[job]) for job in jobs]

    def _candidates(self, job: Job) -> list[float]:
        """The best continuations of all beams of a search, in numbers."""
        logits = torch.stack([self._stored_for(part).logits for part in job.parts])
        best = self._search(job).best(logits.expand(job.num_beams, -1)).flatten().tolist()
        return [0.0, *best] if all(map(math.isfinite, best)) else [INVALID_TOKEN] * (1 + len(best))

    def _search(self, job: Job) -> BeamSearch:
        """The search of a job, a new one if its prompt was computed just now."""
        if not job.beams:
            options = self._requests[job].options
            self._searches[job] = BeamSearch(options.num_beams, options.max_new_tokens, options.stop)
        return self._searches[job]

    def _exchange(self, plan: StepPlan, own: list[list[float]]) -> list[tuple[Job, list[float]]]:
        """The next tokens of all groups, by the number of the request.

        Ranks of a group may round differently: all take the tokens of the first. There is none if a rank has none.
        """
        group, across, device = self._ranks.group, self._ranks.across_groups, self._engine.device
        jobs = [of_group.sampled for of_group in plan.groups]
        if self._ranks.together:
            jobs = [[job for of_group in jobs for job in of_group]]
        widths = [[self._width(job) for job in of_group] for of_group in jobs]
        if group.world > 1 and own:
            x = torch.tensor([n for row in own for n in row], dtype=torch.float64, device=device)
            with self._engine.exchange(group):
                received = [each.tolist() for each in group.all_gather(x, [x.shape] * group.world)]
            by_rank = [_split(numbers, widths[across.rank]) for numbers in received]
            own = [next((row for row in rows if row[0] in _NO_TOKEN), rows[0]) for rows in zip(*by_rank, strict=True)]
        rows = [own]
        if across.world > 1 and any(widths):
            x = torch.tensor([n for row in own for n in row], dtype=torch.float64, device=device)
            with self._engine.exchange(across):
                gathered = [each.tolist() for each in across.all_gather(x, [(sum(each),) for each in widths])]
            rows = [_split(numbers, each) for numbers, each in zip(gathered, widths, strict=True)]
        elif across.world > 1:
            rows = [[] for _ in jobs]
        pairs = [pair for both in zip(jobs, rows, strict=True) for pair in zip(*both, strict=True)]
        return sorted(pairs, key=lambda pair: pair[0].number)

    def _width(self, job: Job) -> int:
        """The numbers that `_choose` returns for a job."""
        if job.num_beams == 1:
            return self._requests[job].options.width
        return 1 + 3 * self._search(job).num_candidates(self._engine.model.config.vocab_size)

    def _commit(self, plan: StepPlan, new: list[tuple[Job, list[float]]]) -> list[Token]:
        """Append the new tokens to their requests, and end those that are complete."""
        tokens = []
        for job in plan.failed:
            request = self._requests[job]
            request.fail(_no_room(request, self._engine))
            self._forget(job)
        for job, numbers in new:
            request = self._requests[job]
            if numbers[0] in _NO_TOKEN:
                is_invalid = numbers[0] == INVALID_TOKEN
                request.fail(_invalid(request, self._engine) if is_invalid else _processor_error(request))
                self._end(job, keep=not is_invalid)  # its keys and values may be invalid, too
                continue
            if job.num_beams > 1:
                new_tokens = [request.add([token]) for token in self._continue_search(job, numbers[1:])]
            else:
                new_tokens = [request.add(numbers)]
                job.ids.append(new_tokens[0].id)
            tokens += new_tokens
            self._stats.generated_tokens += len(new_tokens) if job.group in self._ranks.computed else 0
            if request.finished:
                self._end(job, keep=True)
        return tokens

    def _continue_search(self, job: Job, numbers: list[float]) -> list[int]:
        """Go on with the best candidates; the tokens of the answer, if it is known."""
        search, engine, stored = self._search(job), self._engine, self._stored
        beams = search.step(search.candidates(numbers))
        if not beams:
            return search.answer
        change = self.scheduler.advance(job, [(each.beam, each.token) for each in beams])
        if job.group in self._ranks.computed:
            for sequence in change.freed:
                engine.free(stored.pop(sequence))
            for fork, source in change.forks:
                stored[fork] = engine.fork(stored[source])
        return []

    def _end(self, job: Job, *, keep: bool) -> None:
        sequences = [part.sequence for part in job.parts]
        freed = self.scheduler.remove(job, keep=keep)
        for sequence in sequences:
            if sequence is not None and job.group in self._ranks.computed:
                if sequence in freed:
                    self._engine.free(self._stored.pop(sequence))
                else:
                    self._engine.release(self._stored[sequence])
        self._forget(job)

    def _forget(self, job: Job) -> None:
        del self._requests[job]
        self._searches.pop(job, None)


def _job(request: Request) -> Job:
    """What the scheduler knows of a request."""
    options = request.options
    length = len(request.prompt) + options.num_beams * options.max_new_tokens
    return Job(request.number, [*request.prompt, *request.ids], length, options.num_beams)


def _split(numbers: list[float], widths: list[int]) -> list[list[float]]:
    parts, at = [], 0
    for width in widths:
        parts.append(numbers[at : at + width])
        at += width
    return parts


def _no_room(request: Request, engine: Engine) -> Exception:
    return RuntimeError(
        f"request {request.number}: {len(request.prompt)} + {len(request.tokens)} tokens do not fit into a cache of "
        f"cache_tokens={engine.cache_tokens}, because the layout gives one rank too many of them"
    )


def _processor_error(request: Request) -> Exception:
    if request.processor_error is not None:
        return request.processor_error
    return RuntimeError(f"request {request.number}: a logits processor raised an exception on another rank")


def _invalid(request: Request, engine: Engine) -> Exception:
    dtype = engine.model.get_input_embeddings().weight.dtype
    return InvalidLogits(
        f"request {request.number}: the logits have a NaN or +inf, or -inf only, after {len(request.tokens)} tokens: "
        f"no token can be chosen; check the weights of the model and the range of its dtype, {dtype}"
    )
