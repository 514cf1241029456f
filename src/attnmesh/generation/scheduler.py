"""`Scheduler`: which requests compute which tokens in the next step, and the blocks of the cache that these take.

Requests are served in the order of their priorities, the lowest first, then of their numbers. Every step computes the
next token of all answers in progress, with drafts where they are asked for, and chunks of prompts with the rest of a
budget of tokens. A waiting request is admitted to the group of ranks that has the longest prefix of it, if there is
room for its whole prompt. Where a group runs out of blocks, its last request in this order is preempted: it waits, and
is computed again later.

The beams of a search join, leave and are preempted together. A search that was preempted begins again: until its end no
token of its answer is known.

No messages: the plan depends on earlier calls only, so that all ranks that make the same calls have the same plan, for
all groups. `caches[g]` is the cache of group g: it has memory where this rank stores the sequences of that group.
"""

from __future__ import annotations

import logging
from array import array
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from attnmesh.generation.recurrent_states import RecurrentStates
from attnmesh.generation.requests import Request
from attnmesh.kv_cache.block_manager import CacheFull
from attnmesh.kv_cache.cache import BlockCache
from attnmesh.kv_cache.sequence import NewTokens
from attnmesh.kv_cache.sequence import Sequence as CacheSequence
from attnmesh.ops.decode.call import MAX_DECODE_TOKENS

_LOG = logging.getLogger(__name__)
_ORDER = attrgetter("options.priority", "number")  # of a request
_COMPARED = 1024  # tokens that are compared at a time


@dataclass(frozen=True)
class Chunk:
    """Some tokens of a prompt, from position `begin` on, and their slots."""

    request: Request
    sequence: CacheSequence
    begin: int
    new: NewTokens

    @property
    def ids(self) -> list[int]:
        """The tokens."""
        return self.sequence.ids[self.begin : self.begin + self.new.slots.shape[1]].tolist()

    @property
    def ends_prompt(self) -> bool:
        """Whether the next token of the request follows."""
        return self.begin + self.new.slots.shape[1] == len(self.sequence.ids)


@dataclass
class GroupPlan:
    """The work of a group in a step: the next tokens of `decoded` sequences, then chunks of prompts."""

    budget: int  # tokens that it may compute in addition
    decoded: list[tuple[Request, CacheSequence]] = field(default_factory=list)
    new: NewTokens | None = None  # the slots of the decoded tokens
    chunks: list[Chunk] = field(default_factory=list)
    preemptions: int = 0
    reused: int = 0  # prompt tokens of the requests that were admitted

    @property
    def sampled(self) -> list[Request]:
        """The requests that get their next tokens: a beam search once, for all its beams."""
        decoded = dict.fromkeys(request for request, _ in self.decoded)
        return [*decoded, *(chunk.request for chunk in self.chunks if chunk.ends_prompt)]

    @property
    def digest(self) -> int:
        """Equal on ranks with the same plan."""
        chunks = tuple((chunk.request.number, chunk.begin, chunk.new.slots.shape[1]) for chunk in self.chunks)
        return hash((tuple((request.number, each.length) for request, each in self.decoded), chunks))


@dataclass
class StepPlan:
    """The plans of all groups, the tokens that answers are extended by, and requests that no cache can hold."""

    groups: list[GroupPlan]
    width: int = 1  # tokens of every decoded sequence: the last token of its answer, a draft, and padding
    drafts: dict[Request, list[int]] = field(default_factory=dict)
    failed: list[Request] = field(default_factory=list)

    def given(self, sequence: CacheSequence) -> list[int]:
        """The tokens of a decoded sequence."""
        return sequence.ids[sequence.length - self.width : sequence.length].tolist()


class Scheduler:
    """The requests of some groups of ranks. A chunk has at most `max_chunk` tokens, and at least `min_chunk` unless it
    ends a prompt or where a state is to be kept. `states` are the states of a model with recurrent layers.
    """

    def __init__(
        self, caches: Sequence[BlockCache], *, max_chunk: int, min_chunk: int,
        states: RecurrentStates | None = None,
    ) -> None:  # fmt: skip
        self.caches, self._states = list(caches), states
        self._max_chunk, self._min_chunk = max_chunk, min_chunk
        self.waiting: list[Request] = []
        self.running: list[list[Request]] = [[] for _ in caches]

    def add(self, request: Request) -> None:
        """Take a request."""
        insort(self.waiting, request, key=_ORDER)

    def adopt(self, request: Request, sequence: CacheSequence) -> None:
        """Take a request that runs already, in the group whose cache has its sequence."""
        request.group, request.sequences = sequence.kvdp_rank, [sequence]
        insort(self.running[request.group], request, key=_ORDER)

    def plan(self, step_tokens: int) -> StepPlan:
        """The next step, of at most `step_tokens` tokens per group, and their slots.

        The caller computes it, marks the slots as written, truncates padding and rejected drafts, and appends the new
        tokens to the `ids` of the sequences.
        """
        step = StepPlan([GroupPlan(step_tokens) for _ in self.caches])
        for group in range(len(self.caches)):
            self._make_room(group, step)
        self._draft(step)
        for group, plan in enumerate(step.groups):
            self._continue(group, plan, step)
        while self.waiting and self._admit(self.waiting[0], step):
            pass
        return step

    def remove(self, request: Request, *, forget: bool = False) -> None:
        """End a request. Keys and values of its sequences stay cached for reuse, unless they are to be forgotten."""
        if request in self.waiting:
            self.waiting.remove(request)
            return
        self.running[request.group].remove(request)
        for sequence in request.sequences:
            self.caches[request.group].free(sequence, forget=forget)
        request.sequences, request.search = [], None

    def advance(self, request: Request, beams: Sequence[tuple[int, int]]) -> None:
        """Continue with the next beams of a search, each given by the number of the beam that it continues and a token.

        In the first step there is one, the prompt, whatever the number.
        """
        cache, before = self.caches[request.group], request.sequences
        sources = [before[number if len(before) > 1 else 0] for number, _ in beams]
        for sequence in before:
            if sequence not in sources:
                cache.free(sequence)
        request.sequences = [
            self._fork(cache, source) if source in sources[:at] else source for at, source in enumerate(sources)
        ]
        for sequence, (_, token) in zip(request.sequences, beams, strict=True):
            sequence.ids.append(token)

    def _fork(self, cache: BlockCache, source: CacheSequence) -> CacheSequence:
        forked = cache.fork(source)
        if self._states is not None:
            self._states.fork(source, forked)
        return forked

    def keep_states(self, pairs: Iterable[tuple[Request, CacheSequence]], *, in_answer: bool) -> None:
        """Keep the present states of sequences for later prompts, where they are at a block boundary that matters."""
        if self._states is None:
            return
        for request, sequence in pairs:
            if sequence.freed or request.cache_key:  # no other request has its key
                continue
            kept = self.caches[request.group].keep_state(sequence, in_answer=in_answer)
            if kept is not None:
                self._states.keep(sequence, kept)

    def reset(self, requests: Sequence[Request], *, clear: bool) -> None:
        """Let these requests wait, in place of all others. Finished blocks stay cached, unless caches are cleared."""
        for cache in self.caches:
            if clear:
                cache.clear()
            for sequence in list(cache.sequences.values()):
                cache.free(sequence)
        for request in requests:
            request.sequences, request.search = [], None
        self.waiting, self.running = sorted(requests, key=_ORDER), [[] for _ in self.caches]

    def _make_room(self, group: int, step: StepPlan) -> None:
        """Preempt requests of a group, the last in order first, until the others can grow by a token."""
        cache, running, plan = self.caches[group], self.running[group], step.groups[group]
        while True:
            active = [request for request in running if not request.held]
            plan.decoded = [(request, each) for request in active for each in request.sequences if _pending(each) == 1]
            try:
                if plan.decoded:
                    cache.check_extend([each for _, each in plan.decoded], 1)
                break
            except CacheFull:
                last = running[-1]
                self.remove(last)
                if not running:
                    step.failed.append(last)
                else:
                    self.add(last)
                    plan.preemptions += 1
                    _LOG.warning("the cache of group %d is full: a request is preempted and computed again", group)
        plan.budget -= len(plan.decoded)

    def _draft(self, step: StepPlan) -> None:
        """Drafts of the answers that are extended in this step, where all groups have room for them.

        They leave the tokens of a chunk: prompts do not wait for the end of answers with drafts.
        """
        decoded = [each for plan in step.groups for each in plan.decoded]
        if not any(request.options.speculative for request, _ in decoded):
            return
        room = min(
            MAX_DECODE_TOKENS, *(request.max_length - each.length for request, each in decoded),
            *(1 + (plan.budget - self._min_chunk) // len(plan.decoded) for plan in step.groups if plan.decoded),
        )  # fmt: skip
        drafts = {request: request.draft(each.ids, self._room(request, each, room) - 1) for request, each in decoded}
        width = 1 + max(map(len, drafts.values()))
        try:
            for cache, plan in zip(self.caches, step.groups, strict=True):
                if plan.decoded:
                    cache.check_extend([each for _, each in plan.decoded], width)
        except CacheFull:
            return
        step.width, step.drafts = width, drafts
        for plan in step.groups:
            plan.budget -= (width - 1) * len(plan.decoded)

    def _room(self, request: Request, sequence: CacheSequence, room: int) -> int:
        """The most tokens of a step: states are kept at block boundaries only, so that drafts do not go beyond."""
        end = 0 if self._states is None else self.caches[request.group].reusable(sequence.length + room)
        return end - sequence.length if end > sequence.length else room

    def _continue(self, group: int, plan: GroupPlan, step: StepPlan) -> None:
        """Give slots to the running requests of a group: to answers, then to chunks of prompts."""
        cache = self.caches[group]
        if plan.decoded:
            given = None
            if step.drafts:  # shorter ones are padded with token 0, which the caller truncates
                drafts = [[each.ids[-1], *step.drafts[request]] for request, each in plan.decoded]
                given = [draft + [0] * (step.width - len(draft)) for draft in drafts]
            plan.new, _ = cache.extend(tuple(each for _, each in plan.decoded), step.width, given)
        for request in self.running[group]:
            if _pending(request.sequences[0]) > 1:
                self._compute_chunk(request, plan)

    def _compute_chunk(self, request: Request, plan: GroupPlan) -> None:
        """Give slots to the next chunk of a prompt, if the budget is not too small."""
        (sequence,) = request.sequences
        pending, begin = _pending(sequence), sequence.length
        tokens = min(pending, plan.budget, self._max_chunk)
        if tokens < pending and tokens < self._min_chunk:
            return
        cache = self.caches[request.group]
        tokens = min(tokens, cache.chunk_end(sequence) - begin)
        new, _ = cache.extend((sequence,), tokens)
        plan.chunks.append(Chunk(request, sequence, begin, new))
        plan.budget -= tokens

    def _admit(self, request: Request, step: StepPlan) -> bool:
        """Start the first waiting request in the best group that has room for it; False if none has."""
        text, key, found = request.known, request.cache_key, []
        for group, cache in enumerate(self.caches):
            taken = sum(each.options.num_beams for each in self.running[group])
            has_rows = taken + request.options.num_beams <= cache.max_sequences
            if step.groups[group].budget < min(len(text), self._min_chunk) or not has_rows:
                continue
            prefix = cache.find_prefix(text, cache_key=key)
            if not key and self._will_be_longer(text, group, prefix):
                return False
            # A short common prefix, such as a template, does not outweigh an even load.
            saved = prefix if 2 * prefix >= len(text) else 0
            found.append((-saved, len(self.running[group]), group))
        for _, _, group in sorted(found):
            cache = self.caches[group]
            try:
                # An empty group takes any request: requests that it can never hold are refused before.
                if self.running[group]:
                    cache.check_allocate(text, spare=request.options.num_beams)
                sequence = cache.allocate(text, cache_key=key)
            except CacheFull:
                continue
            self.waiting.remove(request)
            insort(self.running[group], request, key=_ORDER)
            request.group, request.sequences = group, [sequence]
            if self._states is not None:
                self._states.resume(sequence)
            if not request.tokens:  # and was not preempted
                request.cached = sequence.cached
            step.groups[group].reused += sequence.cached
            self._compute_chunk(request, step.groups[group])
            return True
        return False

    def _will_be_longer(self, text: list[int], group: int, prefix: int) -> bool:
        """Whether a running request still computes more of a common prefix: parallel samples wait for their prompt."""
        cache, ids = self.caches[group], array("q", text)
        return any(
            cache.reusable(min(common_prefix(sequence.ids, ids), len(ids) - 1), sequence)
            > max(prefix, cache.reusable(sequence.written))  # written tokens that are not found now are lost
            for request in self.running[group]
            for sequence in request.sequences[:1]
            if sequence.pending or _pending(sequence) > 1
        )


def common_prefix(a: array[int], b: array[int]) -> int:
    """The length of the common prefix of two lists."""
    at = 0
    while (part := a[at : at + _COMPARED]) and part == b[at : at + _COMPARED]:
        at += len(part)
    rest = b[at : at + _COMPARED]
    return at + next((i for i, (x, y) in enumerate(zip(part, rest, strict=False)) if x != y), min(len(part), len(rest)))


def _pending(sequence: CacheSequence) -> int:
    """The number of known tokens that are not in the cache."""
    return len(sequence.ids) - sequence.length
