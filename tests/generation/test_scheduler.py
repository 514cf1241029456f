"""The scheduler of continuous batching, with a model of random requests: nothing is lost, starved or mixed up.

The fake model's next token depends on all tokens before it. The fake group stores what a plan says, in real block
caches without memory, one for each rank: a plan that shares, copies or frees a wrong block differs from them.
"""

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmesh.core import ranges
from attnmesh.core.layouts import Contiguous, Zigzag
from attnmesh.generation.cached_sequences import CachedSequence, CacheLimits, GroupCache, common_prefix
from attnmesh.generation.scheduler import Job, Scheduler
from attnmesh.generation.windows import KeptPositions
from attnmesh.kv_cache.cache import BlockCache
from attnmesh.parallel.decode.positions import balance, interleave

BLOCK, VOCABULARY = 4, 5
WINDOW, MARGIN = 6, 8


def next_token(ids):
    """A token that depends on all before it; few different ones, so that prefixes are shared."""
    return hash((17, *ids)) % VOCABULARY


def next_beams(answers, beams):
    """The next beams of a search, as (beam, token): they depend on all of them, and some have several or none."""
    mixed = [hash((i, *map(tuple, answers))) for i in range(beams)]
    return [(number // 7 % len(answers), number % VOCABULARY) for number in mixed]


def advanced(answers, beams):
    return [[*answers[beam], token] for beam, token in beams]


def sharding(world, layout=None):
    """The positions that ranks store, as an Engine gives them out."""

    def shard(counts, new):
        if len(new) < 2 * world:
            return interleave(new, world)
        if new.start:
            return balance(new, counts)
        return [(layout or Zigzag()).ranges(len(new), world, rank) for rank in range(world)]

    return shard


@dataclass(eq=False)
class Stored:
    """A sequence as a group stores it."""

    ids: list[int]
    by_rank: list
    kept: set[int] = field(default_factory=set)  # positions, in layers with a window


class FakeGroup:
    """Does what plans say with the block caches of its ranks, and checks that it can."""

    def __init__(self, world, limits, shard):
        self.world, self.shard = world, shard
        self.caches = [
            BlockCache(
                layers=1, num_blocks=limits.blocks, block_size=limits.block_size, kv_heads=1, head_dim=1, device="meta",
                max_sequences=limits.max_sequences, max_length=limits.max_length,
            )
            for _ in range(world)
        ]  # fmt: skip
        self.stored: dict[CachedSequence, Stored] = {}

    def run(self, plan, step_tokens):
        assert len(plan.decode) + sum(len(chunk.ids) for chunk in plan.chunks) <= step_tokens
        jobs = [*plan.decode, *(chunk.job for chunk in plan.chunks)]
        assert len(set(jobs)) == len(jobs)
        for job in jobs:  # the beams of a search together
            assert not job.search or [each for each in plan.decode if each.search is job.search] == job.search.beams
        for sequence in plan.freed:
            self.free(sequence)
        for job in plan.decode:
            self.append(job.sequence, job.ids[-1:])
        for chunk in plan.chunks:
            if chunk.is_new:
                self.start(chunk)
            stored = self.stored[chunk.job.sequence]
            assert len(stored.ids) == chunk.begin
            assert chunk.ids or chunk.job.pending  # the next token follows from one that is computed
            self.append(chunk.job.sequence, chunk.ids)

    def start(self, chunk):
        if chunk.source is None:
            stored = Stored([], [cache.allocate(0) for cache in self.caches])
        elif chunk.source is chunk.job.sequence:
            stored = self.stored[chunk.source]
        else:
            self.fork(chunk.job.sequence, chunk.source)
            stored = self.stored[chunk.job.sequence]
        counts = chunk.job.sequence.shards.truncated(chunk.begin).counts
        for cache, each, count in zip(self.caches, stored.by_rank, counts, strict=True):
            cache.truncate(each, count)
        del stored.ids[chunk.begin :]
        stored.kept = {position for position in stored.kept if position < chunk.begin}
        if chunk.job.sequence.kept is not None:
            assert stored.kept >= set(range(max(0, chunk.begin - WINDOW + 1), chunk.begin))
        self.stored[chunk.job.sequence] = stored

    def fork(self, sequence, source):
        source = self.stored[source]
        forks = [cache.fork(each) for cache, each in zip(self.caches, source.by_rank, strict=True)]
        self.stored[sequence] = Stored(list(source.ids), forks, set(source.kept))

    def append(self, sequence, ids):
        stored = self.stored[sequence]
        begin = len(stored.ids)
        new = self.shard([each.length for each in stored.by_rank], range(begin, begin + len(ids)))
        for cache, each, part in zip(self.caches, stored.by_rank, new, strict=True):
            if ranges.size(part):
                cache.mark_written(cache.append([each], ranges.size(part)))  # raises CacheFull
        stored.ids += ids
        if sequence.kept is not None:
            stored.kept |= set(range(begin, len(stored.ids)))
            stored.kept &= {position for run in sequence.kept.ranges for position in run}

    def free(self, sequence):
        for cache, each in zip(self.caches, self.stored.pop(sequence).by_rank, strict=True):
            cache.free(each)

    def check(self, cache):
        """What is stored is what the scheduler believes, block for block."""
        assert set(self.stored) == set(cache.sequences)
        for sequence, stored in self.stored.items():
            assert sequence.ids == stored.ids
            assert sequence.counts == [each.length for each in stored.by_rank]
            if sequence.kept is not None:
                assert stored.kept == {position for run in sequence.kept.ranges for position in run}
        assert cache.used == [each.stats().used for each in self.caches]
        assert max(cache.used) <= cache.limits.blocks


@dataclass
class Wanted:
    """A request of the random model, and its answer alone."""

    job: Job
    answer: list[int]
    submitted: int
    got: list[int] = field(default_factory=list)


class World:
    """A scheduler and groups of ranks, driven at random."""

    def __init__(self, seed, groups=2, world=2, max_sequences=5, blocks=16, step_tokens=9, layout=None, window=None):
        self.random = random.Random(seed)
        shard = sharding(world, layout)
        limits = CacheLimits(blocks, BLOCK, max_sequences, max_length=blocks * BLOCK)
        self.limits, self.world = limits, world
        self.longest = blocks * BLOCK * world - 6 * world
        self.step_tokens = step_tokens
        self.scheduler = Scheduler(
            [GroupCache(world, shard, limits, window) for _ in range(groups)],
            step_tokens=step_tokens, max_chunk=7 * world, min_chunk=2 * world,
        )  # fmt: skip
        self.groups = [FakeGroup(world, limits, shard) for _ in range(groups)]
        self.open: dict[int, Wanted] = {}
        self.prompts, self.finished, self.cancelled, self.preempted, self.steps, self.number = [], 0, 0, 0, 0, 0
        self.reused = self.admitted = self.searched = 0

    def submit(self):
        draw = self.random
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.choice((2, 5, 9, 30)))]
        if self.prompts and draw.random() < 0.6:  # begins like an earlier one
            earlier = draw.choice(self.prompts[-8:])
            prompt = [*earlier[: draw.randrange(len(earlier) + 1)], *prompt]
        prompt = prompt[: self.longest - 30]
        new, beams = draw.choice((1, 4, 30)), draw.choice((1, 1, 1, 2, 3))
        if beams > 1 and beams <= self.limits.max_sequences:
            new = min(new, 9)
            blocks = self.limits.blocks - beams * -(-(BLOCK + -(-new // self.world)) // BLOCK)
            prompt = prompt[: max(1, (blocks * BLOCK - 4) * self.world)]
            found = [[]]
            for _ in range(new):
                found = advanced(found, next_beams([[*prompt, *each] for each in found], beams))
            answer = found[0]
        else:
            beams, answer, ids = 1, [], list(prompt)
            for _ in range(new):
                ids.append(next_token(ids))
                answer.append(ids[-1])
        self.prompts.append(prompt)
        self.number += 1
        job = Job(self.number, list(prompt), len(prompt) + beams * new, beams)
        self.open[self.number] = Wanted(job, answer, self.steps)
        self.scheduler.add(job)

    def end(self, number, keep=True):
        job = self.open.pop(number).job
        sequences = [part.sequence for part in job.parts]
        freed = self.scheduler.remove(job, keep=keep)
        assert set(freed) <= set(sequences)
        for sequence in freed:
            self.groups[job.group].free(sequence)

    def step(self):
        self.steps += 1
        oldest = min(self.open, default=None)
        before = None if oldest is None else self.progress(oldest)
        plan = self.scheduler.plan()
        assert not plan.failed
        for group, of_group in zip(self.groups, plan.groups, strict=True):
            group.run(of_group, self.step_tokens)
            self.preempted += of_group.preemptions
            self.admitted += sum(chunk.is_new for chunk in of_group.chunks)
            self.reused += sum(chunk.begin for chunk in of_group.chunks if chunk.is_new)
        for group, cache in zip(self.groups, self.scheduler.caches, strict=True):
            group.check(cache)
        sampled = [(group, job) for group, of in zip(self.groups, plan.groups, strict=True) for job in of.sampled]
        assert len({job.number for _, job in sampled}) == len(sampled)
        for group, job in sampled:
            wanted = self.open[job.number]
            if job.num_beams > 1:
                self.search(group, job, wanted)
                continue
            # The model sees what the group has stored for the sequence, and nothing else.
            assert group.stored[job.sequence].ids == job.ids
            token = next_token(group.stored[job.sequence].ids)
            wanted.got.append(token)
            job.ids.append(token)
            assert wanted.got == wanted.answer[: len(wanted.got)]
            if len(wanted.got) == len(wanted.answer):
                self.end(job.number)
                self.finished += 1
        if oldest in self.open:
            waits = self.open[oldest].job in self.scheduler.waiting
            assert self.progress(oldest) > before or waits, "the oldest request waits"

    def search(self, group, job, wanted):
        """One step of a beam search, which ends when all tokens of the answer are there."""
        stored = [group.stored[part.sequence].ids for part in job.parts]
        assert stored == [part.ids for part in job.parts]
        beams = next_beams(stored, job.num_beams)
        found = advanced(stored, beams)
        if len(found[0]) == len(job.ids) + len(wanted.answer):
            assert found[0][len(job.ids) :] == wanted.answer
            self.end(job.number)
            self.finished += 1
            self.searched += 1
            return
        change = self.scheduler.advance(job, beams)
        for sequence in change.freed:
            group.free(sequence)
        for fork, source in change.forks:
            group.fork(fork, source)
        assert [part.ids for part in job.beams] == found

    def progress(self, number):
        job = self.open[number].job.parts[0]
        return len(job.ids) + (0 if job.sequence is None else len(job.sequence.ids))

    def run(self, steps, load=0.35):
        while self.steps < steps:
            if self.random.random() < load:
                self.submit()
            if self.open and self.random.random() < 0.03:
                self.end(self.random.choice(list(self.open)))
                self.cancelled += 1
            self.step()
        bound = self.steps + 40 * (len(self.open) + 2)
        while self.open:
            self.step()
            assert self.steps < bound, f"starved: {self.open}"
        assert self.finished + self.cancelled == self.number


@pytest.mark.parametrize(("groups", "world"), [(1, 1), (2, 2), (1, 4), (3, 1)])
def test_random_requests_are_answered_as_alone(groups, world):
    model = World(groups * 10 + world, groups, world, blocks=6 + 10 // world, step_tokens=10 + 2 * world)
    model.run(250)
    assert model.preempted > 0
    assert model.reused > 0
    assert model.searched > 0


@pytest.mark.parametrize(("groups", "world"), [(1, 2), (2, 1)])
def test_random_requests_to_layers_with_a_window(groups, world):
    nothing = KeptPositions(WINDOW, MARGIN)
    model = World(groups * 10 + world, groups, world, blocks=24, step_tokens=10 + 2 * world, window=nothing)
    model.run(250)
    assert model.reused > 0


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "world", "layout"), [(1, 1, None), (2, 2, Zigzag()), (1, 4, Contiguous())])
def test_10000_steps_of_random_requests(groups, world, layout):
    model = World(7, groups, world, blocks=6 + 10 // world, step_tokens=10 + 2 * world, layout=layout)
    model.run(10_000)
    print(model.finished, "finished", model.preempted, "preempted", model.reused, "tokens reused")
    assert model.finished > 2000
    assert model.preempted > 100


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32), groups=st.integers(1, 3), world=st.integers(1, 3), sequences=st.integers(1, 4),
    blocks=st.integers(16, 24), budget=st.integers(0, 40),
)  # fmt: skip
def test_any_sizes(seed, groups, world, sequences, blocks, budget):
    window = KeptPositions(WINDOW, MARGIN) if seed % 2 else None
    World(seed, groups, world, sequences, blocks, step_tokens=sequences + 2 * world + budget, window=window).run(25)


def make(groups=1, world=1, blocks=8, max_sequences=4, step_tokens=64, max_length=None, layout=None):
    limits = CacheLimits(blocks, BLOCK, max_sequences, blocks * BLOCK if max_length is None else max_length)
    caches = [GroupCache(world, sharding(world, layout), limits) for _ in range(groups)]
    return Scheduler(caches, step_tokens=step_tokens, max_chunk=step_tokens, min_chunk=2 * world)


def plan(scheduler):
    """Plan a step, and give every sampled request a token."""
    step = scheduler.plan()
    for job in [job for of_group in step.groups for job in of_group.sampled]:
        job.ids.append(9)
    return step


def test_prompts_take_what_answers_leave_of_the_budget():
    scheduler = make(step_tokens=6, max_sequences=4, blocks=20)
    short, long = Job(0, [1, 2], 60), Job(1, list(range(20)), 60)
    scheduler.add(short)
    scheduler.add(long)
    steps = [plan(scheduler).groups[0] for _ in range(6)]
    sizes = [(len(step.decode), [len(chunk.ids) for chunk in step.chunks]) for step in steps]
    assert sizes == [(0, [2, 4]), (1, [5]), (1, [5]), (1, [5]), (2, []), (2, [])]


def test_a_full_cache_preempts_the_latest_request_which_is_computed_again(caplog):
    scheduler = make(blocks=4)
    old, new = Job(0, [1] * 7, 20), Job(1, [2] * 7, 20)
    scheduler.add(new)
    scheduler.add(old)  # in the order of numbers
    plan(scheduler)
    assert scheduler.running[0] == [old, new]
    steps = [plan(scheduler) for _ in range(3)]
    assert sum(step.groups[0].preemptions for step in steps) == 1
    logged = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert logged == [("WARNING", "the cache of group 0 is full: a request is preempted and computed again")]
    assert scheduler.waiting == [new]
    assert len(old.ids) == 11
    assert 7 < len(new.ids) < 11  # its tokens are kept
    scheduler.remove(old, keep=False)
    step = plan(scheduler).groups[0]
    assert [(chunk.begin, chunk.ids) for chunk in step.chunks] == [(0, new.ids[:-1])]


def test_beams_are_preempted_together_and_begin_again():
    scheduler = make(blocks=6)
    old, search = Job(0, [1] * 7, 16), Job(1, [2] * 6, 20, num_beams=3)
    scheduler.add(old)
    scheduler.add(search)
    plan(scheduler)
    search.ids.pop()  # the helper's token: a search has no answer before its end
    assert scheduler.running[0] == [old, search]
    change = scheduler.advance(search, [(0, 3), (1, 4), (2, 5)])  # all continue the prompt
    assert (change.freed, [source for _, source in change.forks]) == ([], [search.beams[0].sequence] * 2)
    assert [beam.ids for beam in search.beams] == [[2] * 6 + [token] for token in (3, 4, 5)]
    assert scheduler.running[0] == [old, *search.beams]
    freed = [beam.sequence for beam in search.beams]
    step = scheduler.plan().groups[0]  # copies of the block for two beams: 2 + 4 blocks
    assert (step.decode, step.freed, step.sampled) == ([old, *search.beams], [], [old, search])
    old.ids.append(9)
    for beam in search.beams:
        beam.ids.append(9)
    step = scheduler.plan().groups[0]  # `old` needs a block
    assert (step.decode, step.freed, step.preemptions, step.sampled) == ([old], freed, 1, [old])
    assert (scheduler.waiting, search.beams, search.sequence, search.ids) == ([search], [], None, [2] * 6)


def test_a_search_waits_until_there_are_sequences_for_all_its_beams():
    scheduler = make(blocks=40, max_sequences=4)
    jobs = [Job(0, [1] * 3, 20), Job(1, [2] * 3, 20), Job(2, [3] * 3, 30, num_beams=3), Job(3, [4] * 3, 20)]
    for job in jobs:
        scheduler.add(job)
    plan(scheduler)
    assert scheduler.waiting == jobs[2:]  # a later one does not overtake it
    scheduler.remove(jobs[0], keep=True)
    plan(scheduler)
    assert (scheduler.running, scheduler.waiting) == ([jobs[1:3]], jobs[3:])
    (kept,) = [each for each in scheduler.caches[0].sequences if not each.active]
    change = scheduler.advance(jobs[2], [(0, 5), (0, 6), (0, 7)])
    assert (change.freed, len(change.forks)) == ([kept], 2)  # in place of what was kept for reuse


def test_a_request_that_does_not_fit_is_not_overtaken():
    scheduler = make(blocks=6)
    scheduler.add(Job(0, [1] * 15, 20))
    plan(scheduler)
    scheduler.add(Job(1, [2] * 15, 20))
    scheduler.add(Job(2, [3], 4))
    plan(scheduler)
    assert [job.number for job in scheduler.waiting] == [1, 2]


def test_a_prompt_goes_to_the_group_that_has_most_of_it_and_short_prefixes_do_not_decide():
    scheduler = make(groups=2, blocks=20)
    first, second = Job(0, [1] * 12, 30), Job(1, [2] * 12, 30)
    for job in (first, second):
        scheduler.add(job)
        plan(scheduler)
    assert (first.group, second.group) == (0, 1)
    same, other = Job(2, [2] * 12 + [3], 30), Job(3, [1] * 5 + [4] * 20, 40)
    scheduler.add(same)
    step = plan(scheduler)
    assert (same.group, step.groups[1].chunks[0].begin) == (1, 12)
    scheduler.add(other)
    plan(scheduler)
    assert other.group == 0  # with fewer requests
    third = Job(4, [1] * 5 + [5] * 20, 40)
    scheduler.add(third)
    plan(scheduler)
    assert third.group == 0


def test_a_sequence_that_one_rank_cannot_hold_fails_alone():
    """As with a layout that gives one rank too much: the request ends with an error, others go on."""
    scheduler = make(world=2, blocks=20, max_length=6)
    fits, too_long = Job(0, [1] * 6, 12), Job(1, [2] * 30, 40)
    scheduler.add(fits)
    scheduler.add(too_long)
    failed = [job for _ in range(4) for job in plan(scheduler).failed]
    assert failed == [too_long]
    assert scheduler.running == [[fits]]
    assert len(fits.ids) == 10


def test_a_budget_that_answers_could_use_up_is_refused():
    with pytest.raises(ValueError, match=r"step_tokens must be at least 6, one for each sequence .*, got 5"):
        make(step_tokens=5)


@settings(max_examples=30)
@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40), st.integers(0, 3000))
def test_the_common_prefix(a, b, zeros):
    a, b = [0] * zeros + a, [0] * zeros + b
    expected = next((i for i in range(min(len(a), len(b))) if a[i] != b[i]), min(len(a), len(b)))
    assert common_prefix(a, b) == expected
