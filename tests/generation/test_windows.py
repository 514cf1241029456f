"""Layers with a sliding window: what they keep, that nothing else is read, and what it saves."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnmesh as am
from attnmesh.generation import batching, engine
from attnmesh.generation.engine import Engine
from attnmesh.generation.generator import Generator
from attnmesh.generation.rank_memory import kv_cache_bytes
from attnmesh.generation.windows import KeptPositions, layer_windows, max_window_blocks
from attnmesh.parallel.decode.positions import LocalPositions
from helpers.models import (
    LAYOUTS,
    attnmesh_model,
    generated_rows,
    greedy_tokens,
    logits_of,
    on_virtual_ranks,
    random_ids,
)
from helpers.processes import run_processes

BLOCK, MARGIN = 4, 8
TEXT, OTHER = random_ids(220, seed=1), random_ids(220, seed=2)


@pytest.fixture
def small(monkeypatch):
    """Blocks and margins that short texts leave behind."""
    for module in ("rank_memory", "engine", "batching"):
        monkeypatch.setattr(f"attnmesh.generation.{module}.BLOCK_SIZE", BLOCK)
    for module in ("rank_memory", "engine"):
        monkeypatch.setattr(f"attnmesh.generation.{module}.MARGIN", MARGIN)


# Positions.


events = st.one_of(
    st.tuples(st.just("grow"), st.integers(1, 40)),
    st.tuples(st.just("truncate"), st.floats(0, 1)),
    st.tuples(st.just("mark"), st.lists(st.integers(0, 200), max_size=3)),
)


@settings(max_examples=25)
@given(st.integers(1, 12), st.integers(8, 15), st.lists(events, max_size=12), st.integers(1, 4))
def test_kept_positions_are_those_of_brute_force(window, margin, history, block_size):
    kept, held, length, marks = KeptPositions(window, margin), set(), 0, []

    def wanted(length, marks):
        return {p for end in (*marks, length) for p in range(max(0, end - window - margin), min(end, length))}

    for what, how in history:
        if what == "grow":
            held = (held | set(range(length, length + how))) & wanted(length + how, marks)
            length += how
            kept = kept.grown(length)
        elif what == "truncate":
            length = int(how * length)
            held = {p for p in held if p < length}
            marks = [mark for mark in marks if mark <= length]
            kept = kept.truncated(length)
        else:
            marks = sorted({*marks, *how} - {0})[-2:]
            held &= wanted(length, marks)
            kept = kept.marked(how)
        assert {p for run in kept.ranges for p in run} == held
        assert (kept.length, list(kept.marks)) == (length, marks)
        for prefix in range(length + 1):
            able = [p for p in range(prefix + 1) if all(q in held for q in range(max(0, p - window + 1), p))]
            if window > 1:  # otherwise nothing before a token matters
                assert kept.reusable(prefix) == max(able)
        for mine in (range(0, length, 2), range(length // 3, length)):
            local = LocalPositions((mine,) if mine else ())
            stored = [p for p in mine if p in held]
            assert kept.count(local) == len(stored)
            assert kept.blocks(local, block_size) == {mine.index(p) // block_size for p in stored}


def test_windows_of_configurations():
    windows = {kind: layer_windows(attnmesh_model(kind).config) for kind in ("llama", "qwen3", "mistral", "smollm3")}
    assert windows == {"llama": (None, None), "qwen3": (5, None), "mistral": (9, 9), "smollm3": (None, None)}


# Logits.


def poison_unused(engine):
    """Whatever no sequence has a block for is no number."""
    for which, cache in enumerate(engine.cache.caches):
        used = {block for each in engine.sequences if each.stored for block in each.stored.parts[which].blocks}
        unused = sorted(set(range(cache.stats().total)) - used)
        for x in cache.stored_tensors:
            x[:, unused] = torch.nan


def check_windows(engine):
    """Every rank has the blocks that are to be kept, and few others."""
    cache = engine.cache.caches[1]
    for sequence in engine.sequences:
        have = {at for at, block in enumerate(sequence.stored.parts[1].blocks) if block >= 0}
        assert sequence.kept.blocks(sequence.local, BLOCK) <= have
        assert len(have) <= max_window_blocks(engine.cache.window, MARGIN, BLOCK)
        assert sequence.kept.length == len(sequence.ids)
    cache._pool.check_invariants(
        [[block for block in each.stored.parts[1].blocks if block >= 0] for each in engine.sequences]
    )
    engine.comm.agree("kept", {"kept": str([each.kept for each in engine.sequences])}, force=True)


def a_long_story(kind, layout, prefill_chunk):
    """Everything that an engine does with long sequences: logits as they come, and the text that each follows."""

    def rank(comm):
        engine = Engine(
            attnmesh_model(kind),
            comm,
            cache_tokens=1000 + 400 * comm.world,
            max_sequences=4,
            layout=layout,
            prefill_chunk=prefill_chunk,
        )
        assert engine.cache.window == attnmesh_model(kind).config.sliding_window
        found = []

        def seen(logits, ids):
            found.extend((row, list(ids[: len(ids) - len(logits) + 1 + i])) for i, row in enumerate(logits))
            check_windows(engine)
            poison_unused(engine)

        poison_unused(engine)
        a = engine.prefill(TEXT[:150], 60)
        seen(a.logits[None], TEXT[:150])
        for begin, end in ((150, 151), (151, 157)):
            seen(engine.decode([a], [TEXT[begin:end]])[0], TEXT[:end])
        engine.truncate(a, 152)
        for begin in range(0, 40, 4):
            seen(engine.decode([a], [OTHER[begin : begin + 4]])[0], TEXT[:152] + OTHER[: begin + 4])
        # Another question about the same text, while a is in use; then one that parts where nothing is left.
        b = engine.prefill(TEXT[:145] + OTHER[:20])
        assert (b.reused, b is a) == (145, False)
        seen(b.logits[None], b.ids)
        c = engine.prefill(TEXT[:90] + OTHER[:30])
        assert c.reused == 0
        seen(c.logits[None], c.ids)
        for _ in range(3):
            logits = engine.decode([c, a, b], [OTHER[20:22], OTHER[30:32], OTHER[40:42]])
            for row, sequence in zip(logits, (c, a, b), strict=True):
                seen(row, sequence.ids)
        engine.release(c)
        d = engine.prefill(TEXT[:90] + TEXT[100:160])  # c has marked where it parted
        assert (d.reused, d is c) == (90, True)
        seen(d.logits[None], d.ids)
        engine.release(a)
        again = engine.prefill([*a.ids, *TEXT[60:75]])
        assert (again is a, again.reused) == (True, 198)
        seen(again.logits[None], again.ids)
        for sequence in (a, b, d):
            engine.free(sequence)
        assert [cache.stats().used for cache in engine.cache.caches] == [0, 0]
        return found

    return rank


def check_story(kind, world, layout, prefill_chunk):
    found = on_virtual_ranks(world, a_long_story(kind, LAYOUTS[layout], prefill_chunk))
    for at, (logits, ids) in enumerate(found[0]):
        expected = logits_of(kind, ids)[-1]
        assert (logits - expected).abs().max() < 1e-5 * expected.abs().max(), at
        for other in found[1:]:
            assert torch.equal(other[at][0], logits)


@pytest.mark.parametrize(
    ("kind", "world", "layout", "prefill_chunk"),
    [
        ("mistral", 2, "contiguous", 33),
        pytest.param("gpt_oss", 1, "zigzag", None, marks=pytest.mark.slow),
        pytest.param("qwen3", 3, "striped", 16, marks=pytest.mark.slow),
    ],
)
def test_logits_are_those_of_one_process_at_every_step(small, kind, world, layout, prefill_chunk):
    check_story(kind, world, layout, prefill_chunk)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 4, 5])
@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "mistral", "gpt_oss"])
def test_logits_are_those_of_one_process_everywhere(small, kind, world, layout):
    check_story(kind, world, layout, prefill_chunk=(None, 10, 33)[(len(kind) + world + len(layout)) % 3])


@pytest.mark.parametrize("world", [1, 2])
def test_a_chunk_that_is_interrupted_leaves_what_was_before_it(small, world):
    def rank(comm):
        engine = Engine(attnmesh_model("gpt_oss"), comm, cache_tokens=900, max_sequences=2, prefill_chunk=40)
        forward, calls = engine._forward, []

        def interrupted(*args, **kwargs):
            calls.append(args)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return forward(*args, **kwargs)

        engine._forward = interrupted
        with pytest.raises(KeyboardInterrupt):
            engine.prefill(TEXT[:200])
        if world > 1:
            assert engine.is_out_of_step
            return None
        engine.release_all()
        check_windows(engine)
        poison_unused(engine)
        sequence = engine.prefill(TEXT[:200])
        return sequence.reused, sequence.logits

    found = on_virtual_ranks(world, rank)
    if world == 1:
        reused, logits = found[0]
        assert reused == 80
        expected = logits_of("gpt_oss", TEXT[:200])[-1]
        assert (logits - expected).abs().max() < 1e-5 * expected.abs().max()


# Requests.


DOCUMENT = random_ids(120, 5, high=30)
PROMPTS = [
    DOCUMENT, [*DOCUMENT[:117], 9, 9], random_ids(30, 6), [*DOCUMENT[:60], *random_ids(40, 7)], [*DOCUMENT, 11, 12],
    [*DOCUMENT[:60], *random_ids(20, 8)],
]  # fmt: skip
MOST = 9


def submitted_answers(comm, kind, sharding, weights=None, cache_tokens=700, most=MOST):
    """Some requests at a time, in a cache without room for all; blocks are counted as they are used."""
    model = attnmesh_model(kind) if weights is None else am.shard_model(attnmesh_model(kind), weights, comm)
    settings = {
        "cache_tokens": cache_tokens * (sharding or weights).cp,
        "max_sequences": 3 * (sharding or weights).kvdp,
        "step_tokens": 40,
    }
    generator = Generator(model, None, comm, sharding=sharding, prefill_chunk=24, **settings)
    engine = generator.engine
    assert engine.cache.window is not None
    requests = []
    while len(requests) < len(PROMPTS) or generator.num_unfinished:
        if len(requests) < len(PROMPTS):
            requests.append(generator.submit(PROMPTS[len(requests)], max_new_tokens=most))
        poison_unused(engine)
        generator.step()
        for group in generator._ranks.computed:
            cached = generator._batch.scheduler.caches[group]
            stored = [each for each in engine.sequences if each.group == generator._ranks.in_engine(group)]
            assert sorted((s.ids, s.kept.ranges) for s in cached.sequences) == sorted(
                (s.ids, s.kept.ranges) for s in stored
            )
            if group == engine.own_group or weights is None:
                assert cached.used[engine.position_ranks.rank] == engine.cache.stats().used
    found = [request.ids for request in requests]
    return found, generator.stats


def check_requests(kind, sharding, weights=None, most=MOST, **settings):
    expected = [greedy_tokens(kind, prompt, most) for prompt in PROMPTS]
    world = (sharding or weights).ranks
    found = on_virtual_ranks(
        world, lambda comm: submitted_answers(comm, kind, sharding, weights, most=most, **settings)
    )
    for ids, _ in found:
        assert ids == expected
    return [stats for _, stats in found]


@pytest.mark.slow
def test_answers_are_those_of_one_process(small):
    """Without room for three sequences: some are preempted, and computed again."""
    (stats,) = check_requests("gpt_oss", am.DecodeSharding(), cache_tokens=248, most=25)
    assert stats.reused_tokens > 100
    assert stats.preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen2", "mistral", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize(
    ("sharding", "weights"),
    [
        (am.DecodeSharding(cp=3), None),
        (am.DecodeSharding(kvdp=2, cp=2), None),
        (None, am.DecodeSharding(tp=2, kvdp=2)),
        (None, am.DecodeSharding(tp=2, cp=2)),
        (None, am.DecodeSharding(kvdp=2, cp=2)),
    ],
    ids=str,
)
def test_answers_are_those_of_one_process_everywhere(small, kind, sharding, weights):
    check_requests(kind, sharding, weights)


def on_process(comm):
    engine.BLOCK_SIZE = batching.BLOCK_SIZE = BLOCK
    engine.MARGIN = MARGIN
    both = ((am.DecodeSharding(cp=2), None), (None, am.DecodeSharding(tp=2)))
    return [submitted_answers(comm, "gpt_oss", *each)[0] for each in both]


@pytest.mark.slow
def test_answers_over_processes_are_those_of_one_process():
    expected = [greedy_tokens("gpt_oss", prompt, MOST) for prompt in PROMPTS]
    assert run_processes(2, on_process, timeout=240) == [[expected] * 2] * 2


@pytest.mark.parametrize("storage", ["int8", pytest.param(None, marks=pytest.mark.slow)])
def test_generate_with_drafts_and_a_second_prompt(small, storage):
    """Drafts that are rejected, and the next prompt, which parts before the end of the first one."""
    text = random_ids(20, 9) * 7
    second = [*text[:135], 9, 10]

    def rank(comm):
        how = {"cache_tokens": 900, "sharding": am.DecodeSharding(cp=2), "prefill_chunk": 50, "storage": storage}
        generator = Generator(attnmesh_model("gpt_oss"), None, comm, **how)
        assert generator.engine.cache.window == 7
        rows = [generated_rows(generator, [each], max_new_tokens=10, speculative=True) for each in (text, second)]
        return rows, generator.stats

    one = Generator(attnmesh_model("gpt_oss"), None, cache_tokens=200, max_sequences=99, storage=storage)
    assert one.engine.cache.window is None  # all of it is kept
    expected = [generated_rows(one, [each], max_new_tokens=10) for each in (text, second)]
    for rows, stats in on_virtual_ranks(2, rank):
        assert rows == expected
        assert stats.draft_tokens > stats.accepted_tokens
        assert stats.reused_tokens == 135


@pytest.mark.slow
def test_beams_keep_their_windows(small):
    def rank(comm, **how):
        generator = Generator(attnmesh_model("gpt_oss"), None, comm, sharding=am.DecodeSharding(cp=2), **how)
        rows = generated_rows(generator, [DOCUMENT], max_new_tokens=20, num_beams=3, stop=())
        return generator.engine.cache.window, rows

    for few, many in zip(
        on_virtual_ranks(2, lambda comm: rank(comm, cache_tokens=2000, max_sequences=3)),
        on_virtual_ranks(2, lambda comm: rank(comm, cache_tokens=2000, max_sequences=99)),
        strict=True,
    ):
        assert (few, many[0]) == ((7, many[1]), None)


# Memory.


def engine_bytes(kind, tokens, **how):
    cache = Engine(attnmesh_model(kind), cache_tokens=tokens, **how).cache
    return cache.stored_bytes, cache.window


@pytest.mark.parametrize(("kind", "layers_with_window"), [("gpt_oss", 1), ("mistral", 2), ("llama", 0)])
def test_a_long_cache_is_smaller_by_what_windows_leave_out(kind, layers_with_window):
    """Of two layers. A window takes the memory of 2,500 tokens at most, whatever the length."""
    tokens, per_layer = 100_000, 2 * 2 * 8 * 4  # K and V, kv heads, features in float32
    stored, window = engine_bytes(kind, tokens)
    expected = (tokens * (2 - layers_with_window) + 2500 * layers_with_window) * per_layer
    assert stored <= expected + (4 * tokens if kind == "mistral" else 0) + 40 * 32 * per_layer
    assert (window is None) == (not layers_with_window)
    assert kv_cache_bytes(attnmesh_model(kind).config, "fp32", tokens, 1) <= stored


def test_short_sequences_keep_everything():
    """Where windows would need as many blocks, layers share one cache, and every prefix is reused."""
    assert engine_bytes("gpt_oss", 2000) == ((63 + 4) * 32 * 2 * 2 * 2 * 8 * 4, None)
    assert engine_bytes("gpt_oss", 20_000, max_sequences=64)[1] is None


def test_stats_count_what_is_kept(small):
    generator = Generator(attnmesh_model("gpt_oss"), None, cache_tokens=900)
    generated_rows(generator, [DOCUMENT], max_new_tokens=30, stop=())
    per_layer, kept = 2 * 2 * 8 * 4, 2 * (7 + MARGIN)  # before the end of the prompt and at its end
    assert generator.stats.cached_tokens == 149
    assert generator.stats.kv_bytes == generator.stats.kv_bytes_unsharded == (149 + kept) * per_layer


def test_a_mask_that_is_wider_than_what_is_kept_is_refused(small):
    engine = Engine(attnmesh_model("gpt_oss"), cache_tokens=900)
    engine.cache.check_mask(0, am.SlidingWindow(6))
    engine.cache.check_mask(1, am.Causal())
    for mask in (am.SlidingWindow(7), am.Causal()):
        with pytest.raises(ValueError, match="mask of layer 0 must be a sliding window of at most 7 tokens"):
            engine.cache.check_mask(0, mask)
