"""Sequences sharded over ranks: the logits of one process at every step, and every key where its position is stored."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import attnmesh as am
from attnmesh.core import ranges
from attnmesh.generation.batching import Callbacks
from attnmesh.generation.generator import Generator
from attnmesh.generation.models import BLOCK_SIZE
from attnmesh.verify.mode import covering_rows
from helpers.cases import sweep
from helpers.models import KINDS, LAYOUTS, VOCABULARY, OneLayer, attnmesh_model, logits_of, on_virtual_ranks, random_ids

TEXT = random_ids(80, seed=1)
OTHER = random_ids(80, seed=2)
CP = {world: am.DecodeSharding(cp=world) for world in range(1, 6)}


def far_apart(found, expected):
    """The largest difference, relative to the largest logit."""
    return float((found - expected).abs().max() / expected.abs().max())


class Observed:
    """A generator, and the logits of every token that it computes. Memory that was never written is not a number."""

    def __init__(self, model, comm=None, *, cache_tokens=400, **how):
        def keep(number, logits):
            self._logits.setdefault(number, []).append(logits)

        self._logits, self.requests = {}, []
        self.generator = Generator(
            model, None, comm, cache_tokens=cache_tokens, callbacks=Callbacks(on_logits=keep), **how
        )
        cache = self.generator.engine.cache
        for pool in (pool(layer) for layer in range(cache.layers) for pool in (cache.keys, cache.values)):
            if isinstance(pool, torch.Tensor):
                pool.fill_(torch.nan)

    def submit(self, prompt, follows=None, *, new=None, **how):
        """A request whose answer is the text `follows`, or `new` tokens of the model's own choice."""

        def forced(ids, scores):
            wanted = torch.full_like(scores, -torch.inf)
            wanted[:, follows[ids.shape[1] - len(prompt)]] = 0.0
            return wanted

        if follows is not None:
            how["logits_processors"], new = [forced], len(follows)
        self.requests.append(self.generator.submit(prompt, max_new_tokens=new, stop=[], **how))
        return self.requests[-1]

    def step(self, times=1000):
        """Run so many steps, or all that are left."""
        while self.generator.num_unfinished and times:
            self.generator.step()
            times -= 1

    def found(self):
        """The text of every request, and the logits of its answer."""
        return [
            ([*each.prompt, *each.ids], len(each.prompt), torch.stack(self._logits[each.number]))
            for each in self.requests
        ]


def check_logits(found, kind, tolerance=1e-5):
    """All ranks have the logits of one pass over the whole text, and the same bits."""
    for at, (text, prompt, logits) in enumerate(found[0]):
        assert far_apart(logits, logits_of(kind, text)[prompt - 1 : -1]) < tolerance, at  # 1e-4 is what is promised
        for other in found[1:]:
            assert torch.equal(other[at][2], logits)


@pytest.fixture
def small_blocks(monkeypatch):
    """Prompts of a few tokens then have blocks in common."""
    for module in ("rank_memory", "engine"):
        monkeypatch.setattr(f"attnmesh.generation.{module}.BLOCK_SIZE", 4)


# Logits.


def check_story(kind, sharding, layout, prefill_chunk):
    """All that a generator does, in one story."""

    def rank(comm):
        seen = Observed(
            attnmesh_model(kind), comm, max_sequences=4, sharding=sharding, layout=layout, prefill_chunk=prefill_chunk
        )
        seen.submit(TEXT[:45], TEXT[45:55])
        seen.step(4)
        seen.submit(TEXT[:40] + OTHER[:20], OTHER[20:26])  # shares blocks of the first, which is in progress
        seen.submit(OTHER[:3], OTHER[3:10])  # few tokens: fewer than ranks, or one for some
        seen.submit(TEXT[10:60], new=9, speculative=True)  # so steps have several tokens of each
        seen.step()
        seen.submit(TEXT[:50] + OTHER[:30], OTHER[30:33])  # continues what the first has left
        seen.step()
        assert seen.generator.stats.draft_tokens > 0
        return seen.found(), seen.generator.stats.reused_tokens

    found = on_virtual_ranks(sharding.ranks, rank)
    check_logits([of_rank for of_rank, _ in found], kind)
    assert all(reused > 40 for _, reused in found)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("kind", "sharding", "layout", "prefill_chunk"),
    [
        ("qwen2", CP[2], LAYOUTS["striped"], 16),
        sweep("llama", CP[2], am.Zigzag(pairs=(1, 3)), None),  # uneven parts
    ],
    ids=str,
)
def test_logits_are_those_of_one_process_at_every_step(kind, sharding, layout, prefill_chunk):
    check_story(kind, sharding, layout, prefill_chunk)


EVERYWHERE = {
    "kind": KINDS, "sharding": [CP[1], CP[3], am.DecodeSharding(cp=2, interleave=4)], "layout": list(LAYOUTS),
    "prefill_chunk": [None, 10, 33],
}  # fmt: skip


@pytest.mark.sweep
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("case", covering_rows(EVERYWHERE), ids=lambda case: "-".join(map(str, case.values())))
def test_logits_are_those_of_one_process_everywhere(case):
    check_story(case["kind"], case["sharding"], LAYOUTS[case["layout"]], case["prefill_chunk"])


def test_logits_that_are_valid_until_the_next_pass_are_kept_apart():
    """As those of a CUDA graph: a step that decodes a token, and two more that end prompts which are else cached."""
    seen = Observed(attnmesh_model("llama"), max_sequences=3)
    engine, buffer = seen.generator.engine, torch.empty(1, 1, VOCABULARY)
    forward = engine._forward_step
    engine._forward_step = lambda *step: buffer.copy_(forward(*step))
    first, other = TEXT[: BLOCK_SIZE + 1], OTHER[: BLOCK_SIZE + 1]
    for prompt in (first, other):
        seen.submit(prompt, [9])
    seen.step()
    seen.submit(OTHER[:1], [10, 11, 12])
    seen.step(1)
    for prompt in (first, other):
        seen.submit(prompt, [9])
    seen.step(1)
    assert [len(each.ids) for each in seen.requests[2:]] == [2, 1, 1]
    seen.step()
    assert seen.generator.stats.reused_tokens == 2 * BLOCK_SIZE
    check_logits([seen.found()], "llama")


@pytest.mark.parametrize("world", [2, sweep(5)])
def test_text_fed_token_by_token_has_the_logits_of_one_pass(world):
    def rank(comm):
        seen = Observed(attnmesh_model("qwen3"), comm, sharding=CP[world])
        seen.submit(TEXT[:1], TEXT[1:18])
        seen.step()
        return seen.found()

    check_logits(on_virtual_ranks(world, rank), "qwen3")


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # some CPUs cannot multiply bf16, and say so
def test_half_precision_is_as_exact_as_one_process():
    exact = logits_of("llama", TEXT)[59:62].double()
    plain = logits_of("llama", TEXT[:62], torch.bfloat16)[59:].double()

    def rank(comm):
        seen = Observed(attnmesh_model("llama", torch.bfloat16), comm, sharding=CP[3], prefill_chunk=24)
        seen.submit(TEXT[:60], TEXT[60:63])
        seen.step()
        return seen.found()

    for ((_, _, found),) in on_virtual_ranks(3, rank):
        assert found.dtype == torch.bfloat16
        assert far_apart(found.double(), exact) <= 2 * far_apart(plain, exact)


@pytest.mark.parametrize("storage", ["int8", sweep("fp8")])
def test_over_a_quantized_cache_the_logits_are_those_of_one_rank(storage):
    def rank(comm, sharding=am.DecodeSharding(cp=2, interleave=4), chunk=20):  # noqa: B008
        seen = Observed(attnmesh_model("llama"), comm, storage=storage, sharding=sharding, prefill_chunk=chunk)
        for _ in range(2):  # the second time over cached blocks
            seen.submit(OTHER[:70], OTHER[70:73])
            seen.step()
        return torch.cat([logits for _, _, logits in seen.found()])

    one, plain = rank(None, am.DecodeSharding(), None), logits_of("llama", OTHER)[69:72].repeat(2, 1)
    assert far_apart(one, plain) > 1e-3
    # Products of other shapes may round a value near the middle of two steps of the storage the other way.
    assert all(far_apart(found, one) < 1e-4 for found in on_virtual_ranks(2, rank))


def test_the_same_prompt_again_and_again():
    def rank(comm):
        seen = Observed(attnmesh_model("llama"), comm, max_sequences=3, sharding=CP[2])
        for i in range(3):  # each has its own answer
            seen.submit(TEXT[:70], OTHER[10 * i : 10 * i + 5])
        seen.step()
        return seen.found(), seen.generator.stats.reused_tokens, seen.generator.stats.prefill_tokens

    found = on_virtual_ranks(2, rank)
    assert [tuple(counts) for _, *counts in found] == [(2 * 64, 70 + 2 * 6)] * 2
    check_logits([of_rank for of_rank, *_ in found], "llama")


# Which rank stores what.


class Recorder(OneLayer):
    """In place of a model: its keys are token ids and its values positions, so that a test can read them."""

    def forward(self, *, input_ids, position_ids, attention_pass, logits_to_keep, **_):
        k, v = (x[:, None, :, None].float().expand(-1, 1, -1, 8) for x in (input_ids, position_ids))
        attention_pass.attend(0, k, k, v, mask=am.Causal(), scale=1.0, sinks=None)
        following = (3 * input_ids + position_ids)[:, -logits_to_keep:] % VOCABULARY
        return SimpleNamespace(logits=F.one_hot(following, VOCABULARY).float())


def check_positions(generator):
    """This rank has its positions of all sequences in progress, with their tokens. Returns what ranks must agree on."""
    engine = generator.engine
    for sequence in engine.cache.local.sequences.values():
        stored = engine.shard.length(sequence.length)
        ids, positions = (
            pool(0)[sequence.blocks].flatten(0, 1)[:stored, 0, 0].long().tolist()
            for pool in (engine.cache.keys, engine.cache.values)
        )
        assert positions == sorted(ranges.as_tensor(engine.shard.ranges(sequence.length)).tolist())
        assert ids == [sequence.ids[p] for p in positions]
    return engine.state()


@st.composite
def adventures(draw):
    sharding = am.DecodeSharding(cp=draw(st.integers(1, 5)), interleave=draw(st.sampled_from([1, 1, 3, 4])))
    text = st.tuples(st.integers(0, 1), st.floats(0, 1), st.integers(1, 50))  # of two texts, where they part, how long
    event = st.one_of(
        st.tuples(st.just("submit"), text, st.integers(1, 10)),
        st.tuples(st.just("step"), st.integers(1, 4), st.none()),
        st.tuples(st.just("cancel"), st.integers(0, 3), st.none()),
    )
    return (
        {"sharding": sharding, "layout": LAYOUTS[draw(st.sampled_from(sorted(LAYOUTS)))]}
        | {"prefill_chunk": draw(st.sampled_from([None, 10, 16, 31])), "max_sequences": draw(st.integers(1, 3))}
        | {"cache_tokens": draw(st.sampled_from([60, 100, 300]))},
        draw(st.lists(event, min_size=1, max_size=10)),
    )


def live_through(adventure):
    how, events = adventure

    def rank(comm):
        generator, requests, states = Generator(Recorder(), None, comm, **how), [], []
        for what, which, new in [*events, ("step", 1000, None)]:
            if what == "submit":
                text, at, length = which
                at = int(at * length)
                ids = TEXT[:at] + (OTHER if text else TEXT)[at:length]
                requests.append(generator.submit(ids, max_new_tokens=new, stop=[], speculative=bool(text)))
            elif what == "cancel" and which < len(requests) and not requests[which].finished:
                generator.cancel(requests[which])
            for _ in range(which if what == "step" else 0):
                if not generator.num_unfinished:
                    break
                generator.step()
                states.append(check_positions(generator))
        for request in requests:
            known = request.known
            following = [(3 * known[p] + p) % VOCABULARY for p in range(len(request.prompt) - 1, len(known) - 1)]
            assert request.ids == following
        return states

    states = on_virtual_ranks(how["sharding"].ranks, rank)
    assert all(of_rank == states[0] for of_rank in states)


@settings(max_examples=7, deadline=None)
@given(adventures())
def test_every_position_is_stored_once_whatever_happens(adventure):
    live_through(adventure)


@pytest.mark.sweep
@settings(max_examples=50, deadline=None)
@given(adventures())
def test_every_position_is_stored_once_whatever_happens_for_long(adventure):
    live_through(adventure)


@pytest.mark.parametrize(
    ("sharding", "layout", "prefill_chunk"),
    [
        (CP[2], "zigzag", 20),
        sweep(CP[3], "striped", None),
        sweep(am.DecodeSharding(cp=4, interleave=3), "contiguous", None),
    ],
    ids=str,
)
def test_a_rank_stores_its_share(sharding, layout, prefill_chunk):
    def rank(comm):
        generator = Generator(
            Recorder(), None, comm, cache_tokens=600, sharding=sharding, layout=LAYOUTS[layout],
            prefill_chunk=prefill_chunk,
        )  # fmt: skip
        assert len(list(generator.generate([random_ids(401, 3)], max_new_tokens=100, stop=[]))) == 100
        return generator.stats.cached_tokens, generator.engine.cache.num_blocks * BLOCK_SIZE

    for stored, room in on_virtual_ranks(sharding.ranks, rank):
        assert abs(stored - 500 / sharding.ranks) <= sharding.interleave
        assert room <= 600 / sharding.ranks + 3 * BLOCK_SIZE


# What is refused.


def test_what_ranks_cannot_divide_is_refused():
    def rank(comm):
        with pytest.raises(ValueError, match="prefill_chunk must be at least 2 tokens per rank, 6 for 3 ranks, got 5"):
            Generator(OneLayer(), None, comm, cache_tokens=100, prefill_chunk=5)
        with pytest.raises(ValueError, match="layout must give every one of 3 ranks a part of the sequence"):
            Generator(OneLayer(), None, comm, cache_tokens=100, layout=am.Zigzag(pairs=(1, 0, 1)))

    on_virtual_ranks(3, rank)


def test_models_of_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"model must be of dtype .*torch\.float32.*, got torch\.float64"):
        Generator(OneLayer().double(), cache_tokens=10)
