"""Layers with a sliding window: what they keep, that nothing else is read, and what it saves."""

import copy

import pytest
import torch

import attnmesh as am
from attnmesh.generation import engine, models
from attnmesh.generation.batching import Callbacks
from attnmesh.generation.generator import Generator
from attnmesh.generation.models import kv_cache_bytes, layer_windows
from attnmesh.kv_cache import block_manager
from attnmesh.kv_cache.block_manager import max_window_blocks
from attnmesh.kv_cache.cache import BlockCache
from attnmesh.kv_cache.pools import CacheSpec
from helpers.cases import sweep
from helpers.models import attnmesh_model, generated_rows, greedy_tokens, logits_of, on_virtual_ranks, random_ids
from helpers.processes import run_processes

BLOCK, MARGIN, CHUNK, MOST = 4, 8, 24, 9


def make_small(setattr):
    """Blocks and margins that short texts leave behind."""
    for module in (models, engine):
        setattr(module, "BLOCK_SIZE", BLOCK)
    for module in (block_manager, engine):
        setattr(module, "WINDOW_MARGIN", MARGIN)


@pytest.fixture
def small(monkeypatch):
    make_small(monkeypatch.setattr)


def test_windows_of_configurations():
    windows = {kind: layer_windows(attnmesh_model(kind).config) for kind in ("llama", "qwen3", "mistral", "smollm3")}
    assert windows == {"llama": (None, None), "qwen3": (5, None), "mistral": (9, 9), "smollm3": (None, None)}


# Answers.


DOCUMENT = random_ids(120, 5, high=30)
PROMPTS = [
    DOCUMENT, [*DOCUMENT[:117], 9, 9], random_ids(30, 6), [*DOCUMENT[:60], *random_ids(40, 7)], [*DOCUMENT, 11, 12],
    [*DOCUMENT[:60], *random_ids(20, 8)],
]  # fmt: skip


def check_blocks(cache):
    """Every sequence has what its window reaches and little else; what is free is not read, for it is no number."""
    kinds = cache._manager._kinds
    for kind in kinds:
        held = [[block for block in kind.blocks(each) if block >= 0] for each in cache.sequences.values()]
        kind.pool.check_invariants(held)
        for pools in cache._pools_of(kind.number):
            for x in pools.tensors:
                x[:, kind.pool.free_blocks] = torch.nan
    for each in cache.sequences.values():
        needed = range(kinds[1].first_needed(cache.layout, each.length), cache.layout.num_blocks(each.length))
        assert all(each.window_blocks[at] >= 0 for at in needed)
        held = sum(block >= 0 for block in each.window_blocks)
        assert held <= max_window_blocks(cache.layout, cache.window, 0) + 1


def submitted_answers(comm, kind, sharding, weights=None, cache_tokens=700, prompts=PROMPTS, most=MOST):
    """The answers to requests that come one after the other, their logits, and the stats."""
    model = attnmesh_model(kind) if weights is None else am.models.shard_model(attnmesh_model(kind), weights, comm)
    logits = [[] for _ in prompts]
    generator = Generator(
        model, None, comm, cache_tokens=cache_tokens * (sharding or weights).cp, sharding=sharding, prefill_chunk=CHUNK,
        max_sequences=3 * (sharding or weights).kvdp, step_tokens=40,
        callbacks=Callbacks(on_logits=lambda row, x: logits[row].append(x)),
    )  # fmt: skip
    cache = generator.engine.cache.local
    assert cache.window is not None
    requests = []
    while len(requests) < len(prompts) or generator.num_unfinished:
        if len(requests) < len(prompts):
            how = {"max_new_tokens": most, "speculative": len(requests) % 2 == 0}
            requests.append(generator.submit(prompts[len(requests)], **how))
        check_blocks(cache)
        generator.step()
    assert cache.stats().used == 0
    return [request.ids for request in requests], logits, generator.stats


def check_answers(kind, sharding, weights=None, prompts=PROMPTS, most=MOST, **how):
    """Tokens and logits are those of Transformers in one process."""
    found = on_virtual_ranks(
        (sharding or weights).ranks,
        lambda comm: submitted_answers(comm, kind, sharding, weights, prompts=prompts, most=most, **how),
    )
    for row, prompt in enumerate(prompts):
        answer = greedy_tokens(kind, prompt, most)
        expected = logits_of(kind, [*prompt, *answer])[len(prompt) - 1 : -1]
        for ids, logits, _ in found:
            assert ids[row] == answer
            assert not logits[row] or (torch.stack(logits[row]) - expected).abs().max() < 1e-5 * expected.abs().max()
    return [stats for _, _, stats in found]


@pytest.mark.parametrize(("kind", "cp"), [("mistral", 2), sweep("gemma3_text", 3)])
def test_answers_are_those_of_one_process(small, kind, cp):
    for stats in check_answers(kind, am.DecodeSharding(cp=cp), prompts=PROMPTS[:4]):
        assert stats.reused_tokens > 100
        assert stats.draft_tokens > stats.accepted_tokens


@pytest.mark.sweep
def test_answers_in_a_cache_without_room_for_three(small):
    """Some are preempted, and computed again."""
    (stats,) = check_answers("gpt_oss", am.DecodeSharding(), prompts=PROMPTS[:4], cache_tokens=150, most=16)
    assert stats.reused_tokens > 100
    assert stats.preemptions > 0


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("kind", "sharding", "weights"),
    [
        ("qwen2", am.DecodeSharding(cp=3), None),
        ("mistral", am.DecodeSharding(cp=2, interleave=3), None),
        ("gemma3_text", am.DecodeSharding(kvdp=2, cp=2), None),
        ("gpt_oss", None, am.DecodeSharding(tp=2, kvdp=2)),
        ("mistral", None, am.DecodeSharding(tp=2, cp=2)),
        ("gemma3_text", None, am.DecodeSharding(kvdp=2, cp=2)),
    ],
    ids=str,
)
def test_answers_are_those_of_one_process_everywhere(small, kind, sharding, weights):
    check_answers(kind, sharding, weights)


def on_process(comm):
    make_small(setattr)
    both = ((am.DecodeSharding(cp=2), None), (None, am.DecodeSharding(tp=2)))
    return [submitted_answers(comm, "gpt_oss", *each)[0] for each in both]


@pytest.mark.sweep
def test_answers_over_processes_are_those_of_one_process():
    expected = [greedy_tokens("gpt_oss", prompt, MOST) for prompt in PROMPTS]
    assert run_processes(2, on_process, timeout=240) == [[expected] * 2] * 2


@pytest.mark.parametrize("storage", ["int8", sweep(None)])
def test_a_prompt_that_parts_from_an_earlier_one_where_its_window_has_passed(small, storage):
    """Also drafts that are rejected. The reference keeps everything: it has too little room for windows."""
    text = random_ids(20, 9) * 7
    prompts = [text, [*text[:135], 9, 10], [*text[:50], 9, 10]]

    def rank(comm):
        how = {"cache_tokens": 900, "sharding": am.DecodeSharding(cp=2), "prefill_chunk": 50, "storage": storage}
        generator = Generator(attnmesh_model("gpt_oss"), None, comm, **how)
        assert generator.engine.cache.local.window == 7
        rows, reused = [], []
        for prompt in prompts:
            rows.append(generated_rows(generator, [prompt], max_new_tokens=10, speculative=True))
            reused.append(generator.stats.reused_tokens)
        return rows, reused, generator.stats

    one = Generator(attnmesh_model("gpt_oss"), None, cache_tokens=200, max_sequences=99, storage=storage)
    assert one.engine.cache.local.window is None
    expected = [generated_rows(one, [each], max_new_tokens=10) for each in prompts]
    for rows, reused, stats in on_virtual_ranks(2, rank):
        assert rows == expected
        assert reused == [0, 128, 128]  # the blocks of a window near the beginning are evicted
        assert stats.draft_tokens > stats.accepted_tokens


@pytest.mark.sweep
def test_beams_keep_their_windows(small):
    def rank(comm, sequences):
        generator = Generator(
            attnmesh_model("gpt_oss"), None, comm, sharding=am.DecodeSharding(cp=2), cache_tokens=2000,
            max_sequences=sequences,
        )  # fmt: skip
        rows = generated_rows(generator, [DOCUMENT], max_new_tokens=20, num_beams=3, stop=())
        return generator.engine.cache.local.window, rows

    few, many = (on_virtual_ranks(2, lambda comm, n=n: rank(comm, n)) for n in (3, 99))
    assert few == [(7, rows) for window, rows in many if window is None]


# Memory.


def stored_bytes(kind, tokens, **how):
    cache = Generator(attnmesh_model(kind), cache_tokens=tokens, **how).engine.cache.local
    return sum(x.nbytes for x in cache.stored_tensors), cache.window


@pytest.mark.parametrize(("kind", "layers_with_window"), [("gpt_oss", 1), ("mistral", 2)])
def test_a_long_cache_is_smaller_by_what_windows_leave_out(kind, layers_with_window):
    """Of two layers. A window takes the memory of 1,300 tokens at most, whatever the length."""
    tokens, per_layer = 100_000, 2 * 2 * 8 * 4  # K and V, kv heads, features in float32
    stored, window = stored_bytes(kind, tokens)
    assert stored <= ((tokens + 3 * 32) * (2 - layers_with_window) + 1300 * layers_with_window) * per_layer
    assert window is not None
    assert kv_cache_bytes(attnmesh_model(kind).config, "fp32", tokens, 1) <= stored


def test_short_sequences_keep_everything():
    """Where windows would need as many blocks, layers share one pool, and every prefix is reused."""
    assert stored_bytes("gpt_oss", 1000) == ((32 + 2) * 32 * 2 * 2 * 2 * 8 * 4, None)
    assert stored_bytes("gpt_oss", 20_000, max_sequences=64)[1] is None


def test_stats_count_what_is_kept(small):
    generator = Generator(attnmesh_model("gpt_oss"), None, cache_tokens=900)
    generated_rows(generator, [DOCUMENT], max_new_tokens=30, stop=())
    per_layer, kept = 2 * 2 * 8 * 4, 7 + MARGIN - 1  # besides the next token
    assert generator.stats.cached_tokens == 149
    assert generator.stats.kv_bytes == generator.stats.kv_bytes_unsharded == (149 + kept) * per_layer


def test_a_sequence_that_begins_again_frees_what_its_window_passes(small):
    cache = BlockCache(
        CacheSpec(layers=1, kv_heads=1, head_dim=1, windows=[7]),
        num_blocks=99,
        block_size=BLOCK,
        device="meta",
        max_sequences=1,
        max_length=300,
        window_blocks=99,
    )
    sequence, held = cache.allocate(0), []
    for _ in range(2):
        for _ in range(20):
            cache.mark_written(cache.append([sequence], 10))
        held.append(sum(block >= 0 for block in sequence.window_blocks))
        cache.truncate(sequence, 0)
    assert held == [4, 4]


def test_a_mask_that_is_wider_than_what_is_kept_is_refused(small):
    model = copy.deepcopy(attnmesh_model("mistral"))
    generator = Generator(model, cache_tokens=900)
    model.config.sliding_window = 10
    message = r"the mask of model\.layers\.0\.self_attn must be SlidingWindow\(left=8, .* got SlidingWindow\(left=9, "
    with pytest.raises(ValueError, match=message):
        list(generator.generate([[8, 9]], max_new_tokens=1))
