"""The scheduler and the loop over its plans, with a model of random requests: nothing is lost, starved or mixed up.

The fake engine stores the ids of tokens as keys in real block caches, and checks all that it reads: a plan that shares,
copies, truncates or frees a wrong block differs from the ids of a sequence.
"""

import random
from array import array
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnmesh as am
from attnmesh.comm.base import SoloComm
from attnmesh.core.ranges import InterleavedShard
from attnmesh.generation.batching import BatchRanks, Callbacks, ContinuousBatch
from attnmesh.generation.requests import (
    BeamSearch,
    GenerationStats,
    Request,
    RequestOptions,
)
from attnmesh.generation.sampling import log_probs
from attnmesh.generation.scheduler import Scheduler, common_prefix
from attnmesh.kv_cache import block_manager
from attnmesh.kv_cache.block_manager import BlockLayout, max_window_blocks
from attnmesh.kv_cache.cache import BlockCache
from helpers.caches import cache_sizes
from helpers.cases import sweep

BLOCK, VOCABULARY, WINDOW, MARGIN = 4, 6, 6, 8
STOP = VOCABULARY - 1


@pytest.fixture(autouse=True, scope="module")
def small_margin():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_manager, "WINDOW_MARGIN", MARGIN)
        yield


def new_request(number, prompt, new=8, *, stop=(), sampling=am.Sampling(), **how):  # noqa: B008  (immutable)
    return Request(number, list(prompt), RequestOptions(new, sampling, frozenset(stop), **how), None, None)


def new_cache(blocks=8, rows=4, *, length=None, shard=InterleavedShard(), device="meta", **how):  # noqa: B008
    length = blocks * BLOCK if length is None else length
    sizes = cache_sizes(layers=2, num_blocks=blocks, block_size=BLOCK, kv_heads=1, head_dim=1, storage="fp32", **how)
    return BlockCache(**sizes, device=device, max_sequences=rows, max_length=length, shard=shard)


# Random requests.


def logits_after(ids):
    """Logits that repeat themselves, so that drafts are right for a while."""
    draw = random.Random(hash((len(ids) // 20, *ids[-2:])))
    return torch.tensor([draw.random() for _ in range(VOCABULARY)])


def answer_alone(request):
    """The answer to a request of its own."""
    alone, options = Request(0, request.prompt, request.options, None, None), request.options
    if options.num_beams == 1:
        while not alone.finished:
            alone.add(alone.choose(logits_after(alone.known)))
        return alone.ids
    search, texts = BeamSearch(options.num_beams, options.max_new_tokens, options.stop), [alone.prompt]
    while True:
        logits = torch.stack([logits_after(ids) for ids in texts]).expand(options.num_beams, -1)
        beams = search.step(search.candidates(search.best(logits).flatten().tolist()))
        if not beams:
            return search.answer
        texts = [[*texts[each.beam % len(texts)], each.token] for each in beams]


class FakeEngine:
    """Stores tokens where the caches say, and checks that what is stored of a sequence are its tokens."""

    def __init__(self, caches, chunk, shard):
        self.cache = SimpleNamespace(by_kvdp_rank=caches, local=SimpleNamespace(sequences={}))
        self.prefill_chunk, self.position_ranks, self.shard = chunk, SimpleNamespace(world=shard.ranks), shard
        self.model = SimpleNamespace(config=SimpleNamespace(vocab_size=VOCABULARY))
        self.device, self.exchange = torch.device("cpu"), lambda comm: nullcontext()
        self.calls, self.log_probs = SimpleNamespace(recurrent=()), log_probs

    def decode(self, sequences, ids, new):
        assert len({len(row) for row in ids}) == 1
        for sequence, row in zip(sequences, ids, strict=True):
            self._store(sequence, sequence.length - len(row), row)
        return torch.stack([
            torch.stack([logits_after(each.ids[: each.length - len(row) + 1 + i]) for i in range(len(row))])
            for each, row in zip(sequences, ids, strict=True)
        ])  # fmt: skip

    def prefill(self, sequence, begin, ids, new):
        assert begin + len(ids) == sequence.length
        self._store(sequence, begin, ids)
        return logits_after(sequence.ids[: sequence.length])

    def _store(self, sequence, begin, ids):
        """Read what the first new token attends to, and write the new tokens that this rank has."""
        cache, shard = self.cache.by_kvdp_rank[sequence.kvdp_rank], self.shard
        own = range(shard.length(begin), shard.length(sequence.length))
        for layer in (0, 1):
            blocks = sequence.window_blocks if cache.pools[layer].kind else sequence.blocks
            keys = cache.keys(layer).flatten()
            first = shard.length(max(0, begin - cache.window + 1)) if cache.pools[layer].kind else 0
            for at in range(first, own.start):
                assert blocks[at // BLOCK] >= 0
                assert keys[blocks[at // BLOCK] * BLOCK + at % BLOCK] == sequence.ids[shard.position(at)]
            for at in own:
                if blocks[at // BLOCK] >= 0:
                    keys[blocks[at // BLOCK] * BLOCK + at % BLOCK] = ids[shard.position(at) - begin]


class World:
    """Requests to some groups, drawn at random, and computed by a fake engine on `rank` of `world`."""

    def __init__(self, seed, groups=2, world=2, rows=5, tokens=60, budget=5, *, rank=0, windowed=False):
        self.random, self.tokens, self.rows, self.rank = random.Random(seed), tokens, rows, rank
        shard = InterleavedShard(world, rank)
        layout, chunk = BlockLayout(shard, BLOCK), 7 * world
        windows = {"windows": [None, WINDOW], "window_blocks": rows * max_window_blocks(layout, WINDOW, chunk)}
        blocks = layout.num_blocks(tokens) + 2 * min(rows, 3)  # enough for any request alone
        self.caches = [
            new_cache(blocks, rows, length=tokens, shard=shard, device="cpu", kvdp_rank=group,
                      **windows if windowed else {})
            for group in range(groups)
        ]  # fmt: skip
        self.stats, alone = GenerationStats(rank), SoloComm()
        self.batch = ContinuousBatch(
            FakeEngine(self.caches, chunk, shard), BatchRanks(alone, alone, groups, together=True), generator=0,
            stats=self.stats, callbacks=Callbacks(),
        )  # fmt: skip
        self.step_tokens = rows + 2 * world + budget
        self.requests, self.digests, self.steps = [], [], 0
        self._plan, self.batch.scheduler.plan = self.batch.scheduler.plan, self.checked_plan

    def submit(self):
        draw = self.random
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.choice((1, 4, 9, 30)))]
        if self.requests and draw.random() < 0.6:  # begins like an earlier one
            earlier = draw.choice(self.requests[-8:]).known
            prompt = [*earlier[: draw.randrange(len(earlier) + 1)], *prompt]
        how = draw.choice((
            {}, {"speculative": True}, {"speculative": True}, {"num_beams": draw.randint(2, 3)},
            {"sampling": am.Sampling(temperature=1.0, seed=draw.randrange(9))},
        ))  # fmt: skip
        beams = min(how.get("num_beams", 1), self.rows)
        how = how | {"num_beams": beams}
        new = draw.choice((1, 4, 12 if beams > 1 else 30))
        prompt = prompt[: self.tokens - beams * new]
        stop = (STOP,) if draw.random() < 0.3 else ()
        self.requests.append(new_request(len(self.requests), prompt, new, stop=stop, **how))
        self.batch.submit(self.requests[-1])

    def checked_plan(self, step_tokens):
        plan = self._plan(step_tokens)
        assert not plan.failed
        self.digests.append((plan.width, *(each.digest for each in plan.groups)))
        least = self.batch.scheduler._min_chunk
        for group, running in zip(plan.groups, self.batch.scheduler.running, strict=True):
            chunks = [each.new.slots.shape[1] for each in group.chunks]
            assert len(group.decoded) * plan.width + sum(chunks) + group.budget == step_tokens
            assert group.budget >= 0
            assert all(n >= least or each.ends_prompt for n, each in zip(chunks, group.chunks, strict=True))
            assert all(each.length <= request.max_length for request, each in group.decoded)
            assert running == sorted(running, key=lambda request: request.number)
        return plan

    def step(self):
        self.steps += 1
        oldest = min(self.batch.requests, key=lambda request: request.number, default=None)
        before = oldest.sequences[0].length if oldest and oldest.sequences else -1
        interrupted = self.batch._changing
        self.batch.step(self.step_tokens)
        if oldest and oldest.sequences and not interrupted:
            assert oldest.sequences[0].length > before, "the oldest request waits"
        for cache in self.caches:
            for kind in cache._manager._kinds:
                kind.pool.check_invariants([
                    [block for block in kind.blocks(each) if block >= 0] for each in cache.sequences.values()
                ])  # fmt: skip
        held = [sequence for request in self.batch.requests for sequence in request.sequences]
        assert set(held) == {each for cache in self.caches for each in cache.sequences.values()}

    def run(self, steps, load=0.4):
        while self.steps < steps:
            chance = self.random.random()
            if chance < load:
                self.submit()
            elif chance > 0.98:
                self.batch._changing = True  # as after an interruption
            elif chance > 0.95 and self.batch.requests:
                self.batch.cancel(self.random.choice(self.batch.requests))
            self.step()
        bound = self.steps + 40 * (len(self.batch.requests) + 2)
        while self.batch.requests:
            self.step()
            assert self.steps < bound, f"starved: {self.batch.requests}"
        for request in self.requests:
            expected = answer_alone(request)
            assert request.error is None
            assert request.ids == (expected[: len(request.ids)] if request.finish_reason == "cancelled" else expected)
        assert [cache.stats().used for cache in self.caches] == [0] * len(self.caches)
        return self


@pytest.mark.parametrize(("groups", "world", "windowed"), [(1, 1, False), (2, 2, True)])
@pytest.mark.parametrize("steps", [40, sweep(800)])
def test_random_requests_are_answered_as_alone(groups, world, windowed, steps):
    """On all ranks, which have the same plans."""
    found = [World(5, groups, world, rank=rank, windowed=windowed).run(steps) for rank in range(world)]
    assert all(each.digests == found[0].digests for each in found)
    stats = found[0].stats
    assert stats.preemptions > 0
    assert stats.reused_tokens > 0
    assert 0 < stats.accepted_tokens < stats.draft_tokens


@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**32), groups=st.integers(1, 3), world=st.integers(1, 3), rows=st.integers(1, 4),
    tokens=st.integers(40, 90), budget=st.integers(0, 40), windowed=st.booleans(),
)  # fmt: skip
def test_any_sizes(seed, groups, world, rows, tokens, budget, windowed):
    World(seed, groups, world, rows, tokens, budget, windowed=windowed).run(20)


# One rule at a time.


def scheduler_with(*requests, groups=1, world=1, rows=4, blocks=20, max_chunk=64, **how):
    caches = [new_cache(blocks, rows, kvdp_rank=group, **how) for group in range(groups)]
    scheduler = Scheduler(caches, max_chunk=max_chunk, min_chunk=2 * world)
    for request in requests:
        scheduler.add(request)
    return scheduler


def run_step(scheduler, step_tokens=64, token=9):
    """Compute a step of requests without beams: every sampled one gets a token, and no draft is right."""
    step = scheduler.plan(step_tokens)
    for cache, plan in zip(scheduler.caches, step.groups, strict=True):
        sampled = plan.sampled
        for new in [plan.new, *(chunk.new for chunk in plan.chunks)]:
            if new is not None:
                cache.mark_written(new)
        for _, sequence in plan.decoded:
            cache.truncate(sequence, sequence.length - step.width + 1)
        for request in sampled:
            request.add([token])
            request.sequences[0].ids.append(token)
    return step


def sizes(step):
    return [
        ([request.number for request, _ in plan.decoded], [each.new.slots.shape[1] for each in plan.chunks])
        for plan in step.groups
    ]


def test_prompts_take_what_answers_leave_of_the_budget():
    scheduler = scheduler_with(new_request(1, range(30), 9), new_request(0, [1, 2], 9), max_chunk=6)
    found = [sizes(run_step(scheduler, 8))[0] for _ in range(7)]
    assert found == [([], [2, 6]), *[([0], [6])] * 4, ([0, 1], []), ([0, 1], [])]


def test_a_budget_below_the_least_chunk_computes_answers_only():
    scheduler = scheduler_with(new_request(0, [1, 2, 3], speculative=True), new_request(1, range(20)), world=2)
    assert sizes(run_step(scheduler, 3)) == [([], [3])]
    assert [sizes(run_step(scheduler, tokens)) for tokens in (0, 4)] == [[([0], [])]] * 2
    assert sizes(run_step(scheduler, 5)) == [([0], [4])]


def test_a_full_cache_preempts_the_latest_request_which_is_computed_again(caplog):
    old, new = new_request(0, [1] * 7, 20), new_request(1, [2] * 7, 20)
    scheduler = scheduler_with(new, old, blocks=5)  # in the order of numbers
    run_step(scheduler)
    assert scheduler.running == [[old, new]]
    steps = [run_step(scheduler) for _ in range(6)]
    assert [step.groups[0].preemptions for step in steps] == [0, 1, 0, 0, 0, 0]
    logged = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert logged == [("WARNING", "the cache of group 0 is full: a request is preempted and computed again")]
    assert (scheduler.waiting, new.sequences) == ([new], [])
    assert (len(old.tokens), len(new.tokens)) == (7, 2)  # its tokens are kept
    scheduler.remove(old, forget=True)
    (chunk,) = scheduler.plan(64).groups[0].chunks
    assert (chunk.request, chunk.begin + chunk.new.slots.shape[1], chunk.ends_prompt) == (new, 9, True)


def test_a_request_that_can_never_grow_fails_alone():
    too_long, fits = new_request(0, [1] * 5, 30), new_request(1, [2] * 3, 4)
    scheduler = scheduler_with(too_long, fits, blocks=3, length=40)
    steps = [run_step(scheduler) for _ in range(9)]
    assert [step.failed for step in steps] == [[]] * 8 + [[too_long]]
    assert steps[-1].groups[0].decoded == []
    assert (scheduler.running, scheduler.caches[0].stats().used) == ([[fits]], 1)


def test_a_request_that_does_not_fit_is_not_overtaken():
    requests = [new_request(0, [1] * 15), new_request(1, [2] * 8), new_request(2, [3])]
    scheduler = scheduler_with(*requests, blocks=6)
    run_step(scheduler)
    assert scheduler.waiting == requests[1:]  # a block is left for the next token
    scheduler.remove(requests[0])
    run_step(scheduler)
    assert scheduler.running == [requests[1:]]


def test_parallel_samples_wait_for_their_common_prompt_and_not_for_its_answer():
    first, second, third = (new_request(number, [*range(10), 4], 30) for number in range(3))
    scheduler = scheduler_with(first, second, max_chunk=6)
    assert sizes(run_step(scheduler)) == [([], [6])]
    assert sizes(run_step(scheduler)) == [([], [5])]
    step = run_step(scheduler)
    assert (sizes(step), step.groups[0].reused) == ([([0], [3])], 8)
    scheduler.remove(second, forget=True)  # nothing of the prompt can be reused any more
    scheduler.add(third)
    assert sizes(run_step(scheduler)) == [([0], [6])]


def test_a_prompt_goes_to_the_group_that_has_most_of_it_and_short_prefixes_do_not_decide():
    prompts = [[1] * 12, [2] * 12, [2] * 12 + [3], [2] * 8 + [4] * 20, [1] * 4 + [5] * 20, [6] * 20]
    requests = [new_request(number, prompt, 30) for number, prompt in enumerate(prompts)]
    scheduler = scheduler_with(groups=2, blocks=40)
    reused = []
    for request in requests:
        scheduler.add(request)
        reused.append([plan.reused for plan in run_step(scheduler).groups])
    assert [request.group for request in requests] == [0, 1, 1, 0, 0, 1]
    assert reused == [[0, 0], [0, 0], [0, 12], [0, 0], [4, 0], [0, 0]]


def test_beams_are_forked_freed_and_preempted_together_and_begin_again():
    old, search = new_request(0, [1] * 7, 20), new_request(1, [2] * 6, 20, num_beams=3)
    scheduler = scheduler_with(old, search, blocks=7)
    (cache,) = scheduler.caches

    def step_to(beams):
        step = scheduler.plan(64).groups[0]
        for new in [step.new, *(chunk.new for chunk in step.chunks)]:
            if new is not None:
                cache.mark_written(new)
        old.add([9])
        old.sequences[0].ids.append(9)
        if beams:
            scheduler.advance(search, beams)
        return step, [each.ids[6:].tolist() for each in search.sequences]

    _, found = step_to([(0, 3), (1, 4), (2, 5)])  # all continue the prompt
    assert found == [[3], [4], [5]]
    assert len({tuple(each.blocks) for each in search.sequences}) == 1
    first, second, third = search.sequences
    step, found = step_to([(2, 3), (0, 4), (2, 5)])
    assert ([request.number for request, _ in step.decoded], step.sampled) == ([0, 1, 1, 1], [old, search])
    assert (found, second.freed, search.sequences[:2]) == ([[5, 3], [3, 4], [5, 5]], True, [third, first])
    assert cache.stats().used == 5  # the last block has a copy, and a fork shares it
    step_to([(0, 3), (1, 4), (2, 5)])
    step, _ = step_to(None)  # all beams need a block
    assert (step.preemptions, step.sampled, scheduler.waiting) == (1, [old], [search])
    assert (search.sequences, first.freed, search.known) == ([], True, [2] * 6)


def test_a_search_waits_until_there_are_sequences_for_all_its_beams():
    requests = [new_request(number, [number] * 3, num_beams=3 if number == 2 else 1) for number in range(4)]
    scheduler = scheduler_with(*requests)
    run_step(scheduler)
    assert scheduler.waiting == requests[2:]  # a later one does not overtake it
    scheduler.remove(requests[0])
    scheduler.plan(64)
    assert (scheduler.running, scheduler.waiting) == ([requests[1:3]], requests[3:])


@pytest.mark.parametrize("clear", [True, False])
def test_after_a_reset_requests_begin_again_in_their_order(clear):
    requests = [new_request(number, range(number, number + 9)) for number in range(3)]
    scheduler = scheduler_with(*requests, groups=2)
    run_step(scheduler)
    scheduler.reset([requests[2], requests[0]], clear=clear)
    assert (scheduler.waiting, scheduler.running) == ([requests[0], requests[2]], [[], []])
    assert [cache.stats().used for cache in scheduler.caches] == [0, 0]
    if clear:
        assert [cache.stats().free for cache in scheduler.caches] == [20, 20]
        assert sizes(run_step(scheduler)) == [([], [10]), ([], [10])]
    else:  # full blocks are found again
        assert sum(plan.reused for plan in scheduler.plan(64).groups) > 0


# Drafts.


def test_drafts_of_all_groups_have_one_width_and_leave_a_chunk_of_the_budget():
    drafted, plain = new_request(0, [*range(1, 13)] * 2, 30, speculative=True), new_request(1, range(5), 30)
    scheduler = scheduler_with(drafted, plain, groups=2)
    run_step(scheduler, token=1)
    scheduler.add(new_request(2, range(40, 60)))
    step = scheduler.plan(8)
    assert (step.width, step.drafts) == (6, {drafted: [2, 3, 4, 5, 6], plain: []})
    given = [step.given(each) for plan in step.groups for _, each in plan.decoded]
    assert given == [[1, 2, 3, 4, 5, 6], [1, 0, 0, 0, 0, 0]]
    assert sizes(step) == [([0], [2]), ([1], [])]


@pytest.mark.parametrize(("left", "width"), [(2, 1), (3, 2), (20, 8)])
def test_a_draft_ends_before_the_last_token_of_an_answer(left, width):
    scheduler = scheduler_with(new_request(0, [*range(1, 13)] * 2, left, speculative=True))
    run_step(scheduler, token=1)
    assert run_step(scheduler).width == width


@pytest.mark.parametrize(("blocks", "width"), [(13, 1), (14, 8)])
def test_there_are_no_drafts_where_the_cache_has_no_room_for_them(blocks, width):
    drafted, other = new_request(0, [*range(1, 13)] * 2, 30, speculative=True), new_request(1, [5] * 13, 30)
    scheduler = scheduler_with(drafted, other, blocks=blocks, length=60)
    run_step(scheduler, token=1)
    assert run_step(scheduler).width == width


@settings(max_examples=30)
@given(st.lists(st.integers(0, 1), max_size=40), st.lists(st.integers(0, 1), max_size=40), st.integers(0, 3000))
def test_the_common_prefix(a, b, zeros):
    a, b = array("q", [0] * zeros + a), array("q", [0] * zeros + b)
    expected = next((i for i in range(min(len(a), len(b))) if a[i] != b[i]), min(len(a), len(b)))
    assert common_prefix(a, b) == expected
