"""`Scheduler`: which requests compute which tokens in the next step of continuous batching.

Requests are served in the order of their numbers. Every step computes the next token of all answers in progress, and
chunks of prompts with what is left of a budget of tokens. A waiting request is admitted to the group of ranks that has
the longest prefix of it, if there is room for its whole prompt. Where a group runs out of blocks, the sequences that
are kept for reuse are evicted first; then its latest request is preempted: it waits, and is computed again later.

The beams of a search join, leave and are preempted together. A search that was preempted begins again: until its end no
token of its answer is known.

No tensors, no messages: the plan depends on earlier calls only, so that all ranks that make the same calls have the
same plan, for all groups.
"""

from __future__ import annotations

import logging
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field

from attnmesh.generation.cached_sequences import CachedSequence, GroupCache, Growth, Prefix, common_prefix

_LOG = logging.getLogger(__name__)


@dataclass(eq=False)
class Job:
    """A request: its number, the ids of its prompt and its answer so far, and the most that they can become.

    A beam search is one job until its prompt is computed. Then each of its `beams` is a job that runs, and it does not.
    """

    number: int
    ids: list[int]
    max_length: int  # of a beam search, of all beams together
    num_beams: int = 1
    group: int = 0
    sequence: CachedSequence | None = None  # while it is running
    beams: list[Job] = field(default_factory=list)
    search: Job | None = None  # that this is a beam of

    @property
    def pending(self) -> int:
        """The number of tokens that are not in the cache."""
        return len(self.ids) - (0 if self.sequence is None else len(self.sequence.ids))

    @property
    def request(self) -> Job:
        """The job of the whole request: itself, unless it is a beam."""
        return self.search or self

    @property
    def parts(self) -> list[Job]:
        """The jobs that run for it, if it is running: its beams, or itself."""
        return self.beams or [self]


@dataclass(frozen=True)
class Chunk:
    """Some tokens of one request. A new sequence starts with the first `begin` tokens of `source`."""

    job: Job
    begin: int
    ids: list[int]
    is_new: bool = False
    source: CachedSequence | None = None


@dataclass
class GroupPlan:
    """What a group does in a step, in this order. `decode` are answers, each of which is extended by one token."""

    freed: list[CachedSequence] = field(default_factory=list)
    decode: list[Job] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    preemptions: int = 0
    budget: int = 0  # tokens that it may compute in addition

    @property
    def sampled(self) -> list[Job]:
        """The requests that get their next token."""
        decoded = dict.fromkeys(job.request for job in self.decode)  # a search once, for all its beams
        return [*decoded, *(chunk.job for chunk in self.chunks if not chunk.job.pending)]

    @property
    def sources(self) -> list[CachedSequence | None]:
        """The sequences that new ones start from."""
        return [chunk.source for chunk in self.chunks if chunk.is_new]

    @property
    def digest(self) -> int:
        """Equal on ranks with the same plan."""
        chunks = tuple((chunk.job.number, chunk.begin, len(chunk.ids)) for chunk in self.chunks)
        return hash((len(self.freed), tuple(job.number for job in self.decode), chunks))


@dataclass(frozen=True)
class BeamChange:
    """Sequences that a group frees between two steps of a search, and then forks: each new one with its source."""

    freed: list[CachedSequence]
    forks: list[tuple[CachedSequence, CachedSequence]] = field(default_factory=list)


@dataclass
class StepPlan:
    """The plans of all groups, and the requests that no cache can hold any more."""

    groups: list[GroupPlan]
    failed: list[Job] = field(default_factory=list)


class Scheduler:
    """The requests of some groups of ranks. `caches[g]` is changed by planning, as group g will change its cache.

    A group computes at most `step_tokens` tokens per step, and at most `max_chunk` of one prompt. A chunk has at least
    `min_chunk` tokens, unless it ends a prompt.
    """

    def __init__(self, caches: Sequence[GroupCache], *, step_tokens: int, max_chunk: int, min_chunk: int) -> None:
        least = max(cache.limits.max_sequences for cache in caches) + min_chunk
        if step_tokens < least:  # otherwise answers in progress could leave nothing for a prompt
            raise ValueError(
                f"step_tokens must be at least {least}, one for each sequence of a group and {min_chunk} for a "
                f"prompt, got {step_tokens}"
            )
        self.caches = list(caches)
        self._step_tokens, self._max_chunk, self._min_chunk = step_tokens, max_chunk, min_chunk
        self.waiting: list[Job] = []
        self.running: list[list[Job]] = [[] for _ in caches]

    def add(self, job: Job) -> None:
        """Take a request."""
        insort(self.waiting, job, key=_number)

    def plan(self) -> StepPlan:
        """The next step. The caller computes it, then appends the new tokens to the `ids` of sampled requests."""
        step = StepPlan([GroupPlan() for _ in self.caches])
        for group in range(len(self.caches)):
            self._continue(group, step)
        while self.waiting and self._admit(self.waiting[0], step):
            pass
        return step

    def remove(self, job: Job, *, keep: bool) -> list[CachedSequence]:
        """End a request. Its sequence, that of its best beam, is kept for reuse if there is something to keep.

        Returns the sequences that are freed.
        """
        if job in self.waiting:
            self.waiting.remove(job)
            return []
        cache, freed = self.caches[job.group], []
        for part in job.parts:
            assert part.sequence is not None
            self.running[job.group].remove(part)
            if keep and part.sequence.ids and part is job.parts[0]:
                cache.release(part.sequence)
            else:
                cache.free(part.sequence)
                freed.append(part.sequence)
            part.sequence = None
        job.beams = []
        return freed

    def advance(self, job: Job, beams: Sequence[tuple[int, int]]) -> BeamChange:
        """Go on with the next beams of a search, each given by the number of the one that it continues and a token.

        In the first step there is one, the prompt, whatever the number.
        """
        cache, running, parts = self.caches[job.group], self.running[job.group], job.parts
        before = [part.sequence for part in parts]
        sources = [before[number if job.beams else 0] for number, _ in beams]
        change = BeamChange([each for each in before if each is not None and each not in sources])
        for sequence in change.freed:
            cache.free(sequence)
        for part in parts:
            running.remove(part)
            part.sequence = None
        job.beams = []
        for at, (source, (_, token)) in enumerate(zip(sources, beams, strict=True)):
            assert source is not None
            sequence = source
            if source in sources[:at]:
                if len(cache.sequences) == cache.limits.max_sequences:
                    inactive = cache.oldest_inactive()
                    assert inactive is not None  # `_has_slot`
                    cache.free(inactive)
                    change.freed.append(inactive)
                sequence = cache.start(source, len(source.ids))
                change.forks.append((sequence, source))
            ids = [*sequence.ids, token]
            job.beams.append(Job(job.number, ids, job.max_length, group=job.group, sequence=sequence, search=job))
            insort(running, job.beams[-1], key=_number)
        return change

    def reset(self, jobs: Sequence[Job]) -> None:
        """Let these requests wait, in place of all others, with empty caches."""
        for cache in self.caches:
            cache.clear()
        self.waiting, self.running = sorted(jobs, key=_number), [[] for _ in self.caches]

    def _continue(self, group: int, step: StepPlan) -> None:
        """Plan for the running requests of a group, the oldest first."""
        plan = step.groups[group]
        running = list(self.running[group])
        plan.budget = self._step_tokens - sum(job.pending == 1 for job in running)
        for job in running:
            if job.sequence is None:  # preempted for an older one
                continue
            is_decode = job.pending == 1
            if is_decode and self.caches[group].add_token(job.sequence, job.ids[-1]):
                plan.decode.append(job)
                continue
            tokens = 1 if is_decode else self._chunk_size(job.pending, plan.budget)
            growth = self._make_room(job, tokens, step) if tokens else None
            if growth is None:
                continue
            chunk = self._grow(job, tokens, growth)
            if is_decode:
                plan.decode.append(job)
            else:
                plan.chunks.append(chunk)
                plan.budget -= tokens

    def _chunk_size(self, pending: int, budget: int) -> int:
        """The tokens of the next chunk, or 0 if the budget is too small."""
        tokens = min(pending, budget, self._max_chunk)
        return tokens if tokens == pending or tokens >= self._min_chunk else 0

    def _make_room(self, job: Job, tokens: int, step: StepPlan) -> Growth | None:
        """Evict and preempt until a request can grow; None if it is preempted itself, or can never grow."""
        assert job.sequence is not None
        cache, running, plan = self.caches[job.group], self.running[job.group], step.groups[job.group]
        growth = cache.growth(job.sequence, tokens)
        if cache.is_too_long(job.sequence, growth):
            self._fail(job.request, step)
            return None
        while not cache.has_room(job.sequence, growth):
            inactive = cache.oldest_inactive()
            if inactive is not None:
                cache.free(inactive)
                plan.freed.append(inactive)
                _LOG.info("evicted a cached sequence of group %d", job.group)
            elif running[0].request is running[-1].request:
                self._fail(job.request, step)
                return None
            else:
                latest = running[-1].request
                self._stop(latest, plan)
                plan.preemptions += 1
                _LOG.warning("the cache of group %d is full: a request is preempted and computed again", job.group)
                self.add(latest)
                if latest is job.request:
                    return None
        return growth

    def _stop(self, job: Job, plan: GroupPlan) -> None:
        plan.freed += self.remove(job, keep=False)
        plan.decode = [each for each in plan.decode if each.sequence is not None]  # without beams of this step

    def _fail(self, job: Job, step: StepPlan) -> None:
        self._stop(job, step.groups[job.group])
        step.failed.append(job)

    def _admit(self, job: Job, step: StepPlan) -> bool:
        """Start the first waiting request in the best group that has room for it; False if none has."""
        found = []
        for group, cache in enumerate(self.caches):
            least = min(len(job.ids), self._min_chunk)
            if step.groups[group].budget < least or not self._has_slot(job, group, step.groups[group]):
                continue
            prefix = cache.longest_prefix(job.ids)
            if prefix.source is not None and cache.is_uneven(
                prefix.source, prefix.length, len(job.ids), job.max_length
            ):
                prefix = Prefix(None, 0, prefix.common)
            elif self._will_be_longer(job, group, prefix.length):
                return False
            # A short common prefix, such as a template, does not outweigh an even load.
            saved = prefix.length if 2 * prefix.length >= len(job.ids) else 0
            found.append((-saved, len(self.running[group]), group, prefix))
        for _, _, group, prefix in sorted(found, key=lambda each: each[:3]):
            cache = self.caches[group]
            # An empty group takes any request: those that it can never hold are refused before.
            reserved = [blocks + job.num_beams - 1 for blocks in self._reserved(group)]
            if not self.running[group] or cache.can_hold(job.ids, prefix.source, prefix.length, reserved):
                self._start(job, group, prefix, step.groups[group])
                return True
        return False

    def _has_slot(self, job: Job, group: int, plan: GroupPlan) -> bool:
        """Whether a group can store a job's sequences: one more or, if need be, in place of those that it can evict."""
        cache = self.caches[group]
        taken = sum(each.num_beams for each in self.running[group])  # a search takes those of all beams from the start
        if taken + job.num_beams > cache.limits.max_sequences:
            return False
        is_full = len(cache.sequences) == cache.limits.max_sequences
        return not is_full or cache.oldest_inactive(but=plan.sources) is not None

    def _will_be_longer(self, job: Job, group: int, prefix: int) -> bool:
        """Whether a running request still computes more of a common prefix: parallel samples wait for their prompt."""
        return any(
            common_prefix(running.ids, job.ids) >= max(prefix + self._min_chunk, len(running.sequence.ids) + 1)
            for running in self.running[group]
            if running.sequence is not None and running.pending > 1
        )

    def _reserved(self, group: int) -> list[int]:
        """The blocks per rank that the running requests still need for their prompts."""
        cache = self.caches[group]
        missing = [
            cache.missing_blocks(job.sequence, len(job.ids))
            for job in self.running[group]
            if job.sequence is not None and job.pending > 1
        ]
        return [sum(of_rank) for of_rank in zip(*missing, strict=True)] if missing else [0] * len(cache.used)

    def _start(self, job: Job, group: int, found: Prefix, plan: GroupPlan) -> None:
        cache, source, prefix = self.caches[group], found.source, found.length
        marks = (found.common, len(job.ids))
        kept = [source, *plan.sources]  # what a group frees, it frees first
        is_full, oldest = len(cache.sequences) == cache.limits.max_sequences, cache.oldest_inactive(but=kept)
        keep = False
        if source is not None and not source.active:  # a short common prefix is no reason to lose a long sequence
            loses_blocks = len(source.ids) - prefix >= cache.limits.block_size
            keep = loses_blocks and (not is_full or oldest is not None)
        if is_full and (source is None or source.active or keep):
            assert oldest is not None  # `_has_slot`
            cache.free(oldest)
            plan.freed.append(oldest)
        self.waiting.remove(job)
        insort(self.running[group], job, key=_number)
        job.group, job.sequence = group, cache.start(source, prefix, keep=keep, marks=marks)
        tokens = self._chunk_size(job.pending, plan.budget)
        growth = cache.growth(job.sequence, tokens) if tokens else {}
        while not cache.has_room(job.sequence, growth) and (inactive := cache.oldest_inactive(but=kept)) is not None:
            cache.free(inactive)
            plan.freed.append(inactive)
        if cache.is_too_long(job.sequence, growth) or not cache.has_room(job.sequence, growth):
            tokens, growth = 0, {}  # the next step makes room
        chunk = self._grow(job, tokens, growth)
        plan.chunks.append(Chunk(job, prefix, chunk.ids, is_new=True, source=source))
        plan.budget -= tokens

    def _grow(self, job: Job, tokens: int, growth: Growth) -> Chunk:
        assert job.sequence is not None
        begin = len(job.sequence.ids)
        ids = job.ids[begin : begin + tokens]
        self.caches[job.group].grow(job.sequence, ids, growth)
        return Chunk(job, begin, ids)


def _number(job: Job) -> int:
    return job.number
