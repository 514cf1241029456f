"""Stages that may be left out, keys of the own rows only, keys that somebody else has written: the same answers."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import attnmesh as am
from attnmesh.ops.block.config import split_and_rotate
from attnmesh.ops.block.norm_rope import rms_norm
from attnmesh.testing.block import BlockRunner, poisoned_cache, random_block, reference_block, shard_block
from helpers.blocks import assert_outputs_close, cache_state, fed_lengths, random_sequences, same_state
from helpers.cases import first, sweep

LENGTH = 18
SHARDINGS = [(1, 1, 1, 1), (2, 1, 2, 2), (1, 2, 2, 4), (1, 3, 1, 1)]
STAGES = {
    "input norm": {"norm": True},
    "norms before rope": {"norm_before_rope": True},
    "norms after rope": {"norm_after_rope": True, "norm_before_rope": True},
    "pairs": {"rope": "pairs"},
    "part of a head turns": {"rope": "pairs", "rotary_dim": 4, "norm_after_rope": True},
    "no rope, no biases": {"rope": None, "biases": False},
    "a scale": {"scale": 0.9, "sinks": True},
}

shardings = pytest.mark.parametrize("sharding", SHARDINGS, ids=lambda each: "x".join(map(str, each)))


def run(sharding, config, weights, program=None, **options):
    """What `program` (by default, a few steps) makes of a feeding of three sequences, on every rank."""
    sharding = am.DecodeSharding(*sharding)
    x = random_sequences(3, LENGTH, config)

    def rank(comm):
        block = shard_block(config, weights, sharding, comm, **options)
        feeding = BlockRunner(block, poisoned_cache(block, 3, LENGTH), x).allocate(0, 1, 2)
        return (program or a_few_steps)(feeding)

    return am.run_virtual(sharding.ranks, rank), reference_block(config, weights, x)


def a_few_steps(feeding):
    feeding.feed_until(1, 10).feed([0, 1, 2], 4)
    feeding.feed([2, 1], 1)
    feeding.feed([0, 1, 2], 3)
    return feeding.outputs


@pytest.mark.parametrize(
    ("stages", "sharding"),
    first(4, [(stages, SHARDINGS[at % len(SHARDINGS)]) for at, stages in enumerate(STAGES)]),
    ids=str,
)
def test_every_stage(stages, sharding):
    found, truth = run(sharding, *random_block(8, 4, **STAGES[stages]))
    for seen in found:
        assert_outputs_close(seen, truth)
        assert fed_lengths(seen) == [7, 18, 8]


@pytest.mark.parametrize(("sharding"), [((1, 1, 1, 1)), ((2, 1, 2, 2)), ((1, 2, 2, 4)), sweep((1, 3, 1, 1))])
def test_without_an_output_projection_ranks_return_their_heads(sharding):
    config, weights = random_block(8, 4, out=False, sinks=True)
    found, truth = run(sharding, config, weights)
    assert sum(seen.shape[2] for seen in found) == 8
    assert_outputs_close(torch.cat(found, 2), truth)


def test_the_result_without_an_output_projection_has_heads_before_tokens():
    config, weights = random_block(8, 4, out=False)
    found, _ = run((1, 1, 1, 1), config, weights, lambda feeding: feeding.block(*one_step(feeding)))
    assert found[0].shape == (3, 8, 2, 8)


def one_step(feeding):
    step = feeding.cache.append(list(feeding.sequences.values()), 2)
    return feeding.inputs(dict.fromkeys(feeding.sequences, 0), 2), feeding.cache, step


@pytest.mark.parametrize("sharding", [(1, 2, 2, 4), sweep((1, 3, 1, 1)), sweep((2, 2, 1, 1))], ids=str)
def test_keys_of_the_own_rows_only(sharding):
    """The same answers, and the same bits in the cache up to the order of a product's sums."""
    config, weights = random_block(8, 4, norm=True, norm_before_rope=True)

    def program(feeding):
        a_few_steps(feeding)
        return feeding.outputs, feeding.cache.keys(0).clone(), feeding.cache.values(0).clone()

    found = {way: run(sharding, config, weights, program, kv_rows=way)[0] for way in ("own", "all", "auto")}
    truth = reference_block(config, weights, random_sequences(3, LENGTH, config))
    for way in ("own", "auto"):
        for here, there in zip(found[way], found["all"], strict=True):
            assert_outputs_close(here[0], truth)
            for one, other in zip(here, there, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("sharding", [(1, 1, 1, 1), (1, 2, 2, 4), sweep((2, 1, 2, 2)), sweep((1, 3, 1, 1))])
def test_keys_that_are_written_already(sharding):
    """Projected and written by hand: the answers, and every byte of the cache, are those of the usual call."""
    config, weights = random_block(8, 4, norm=True, norm_before_rope=True, sinks=True)

    def by_hand(feeding):
        for some, tokens in (([1], 8), ([0, 1, 2], 3), ([0, 2], 1), ([0, 1, 2], 2)):
            begins = {i: feeding.sequences[i].length for i in some}
            step = feeding.cache.append([feeding.sequences[i] for i in some], tokens)
            x = feeding.inputs(begins, tokens)
            write(feeding, step, x)
            before = cache_state(feeding.cache)
            feeding.record(begins, feeding.block(x, feeding.cache, step, update_cache=False))
            assert same_state(cache_state(feeding.cache), before)
        return feeding.outputs, cache_state(feeding.cache)

    def write(feeding, step, x):
        own, cache = feeding.block.weights, feeding.cache
        width = len(feeding.block.sharding.q_heads(feeding.block.rank, 8)) * 8
        projected = F.linear(rms_norm(x, own.norm, config.norm), own.qkv, own.qkv_bias)
        q, kv = projected.tensor_split([width], -1)
        _, k, v = split_and_rotate(q, kv, step.positions, config, own)
        cache.write(0, step, k[cache.rows.start : cache.rows.stop], v[cache.rows.start : cache.rows.stop])

    def as_usual(feeding):
        for some, tokens in (([1], 8), ([0, 1, 2], 3), ([0, 2], 1), ([0, 1, 2], 2)):
            feeding.feed(some, tokens)
        return feeding.outputs, cache_state(feeding.cache)

    hand, truth = run(sharding, config, weights, by_hand, kv_rows="all")
    usual, _ = run(sharding, config, weights, as_usual, kv_rows="all")
    for (seen, cache), (expected, due) in zip(hand, usual, strict=True):
        assert_outputs_close(seen, truth)
        assert torch.equal(seen.nan_to_num(7.0), expected.nan_to_num(7.0))
        assert same_state(cache, due)


def test_a_poisoned_cache_has_no_number():
    def rank(comm):
        config, weights = random_block(q_heads=2, kv_heads=1, head_dim=8, hidden=16)
        cache = poisoned_cache(shard_block(config, weights, am.DecodeSharding(), comm), 1, 8)
        return all(x.isnan().all() for x in (cache.keys(0), cache.values(0)))

    assert am.run_virtual(1, rank) == [True]


def test_layers_of_one_cache():
    """Two blocks take turns over the layers; each sees its own keys only."""
    config, weights = random_block(8, 4, sinks=True)
    kinds = [random_block(8, 4, window=4), (config, replace(weights, qkv=weights.qkv.flip(0)))]
    sharding = am.DecodeSharding(1, 2, 2, 2)
    x = random_sequences(3, LENGTH, kinds[0][0])

    def rank(comm):
        blocks = [shard_block(*kind, sharding, comm) for kind in kinds]
        cache = poisoned_cache(blocks[0], 3, LENGTH, layers=2)
        feedings = [BlockRunner(block, cache, x) for block in blocks]
        held = {i: cache.allocate(0) for i in range(3)}
        for feeding in feedings:
            feeding.sequences = held
        for some, tokens in (([0, 1], 5), ([1, 2], 8), ([0, 1, 2], 1), ([2], 3)):
            begins = {i: held[i].length for i in some}
            step = cache.append([held[i] for i in some], tokens)
            for layer, feeding in enumerate(feedings):
                given = feeding.inputs(begins, tokens)
                feeding.record(begins, feeding.block(given, cache, step, layer=layer))
        return [feeding.outputs for feeding in feedings]

    for found in am.run_virtual(4, rank):
        for kind, seen in zip(kinds, found, strict=True):
            assert_outputs_close(seen, reference_block(*kind, x))
            assert fed_lengths(seen) == [6, 14, 12]


def test_autocast_changes_nothing():
    config, weights = random_block(8, 4)

    def program(feeding):
        with torch.autocast("cpu", torch.bfloat16):
            return a_few_steps(feeding)

    found, truth = run((1, 2, 2, 4), config, weights, program)
    for seen in found:
        assert seen.dtype == torch.float32
        assert_outputs_close(seen, truth)


def test_inference_mode_may_come_and_go():
    config, weights = random_block(8, 4, window=4)

    def program(feeding):
        with torch.inference_mode():
            feeding.feed([0, 1, 2], 2)
        feeding.outputs = feeding.outputs.clone()
        feeding.feed([0, 1, 2], 2)
        with torch.inference_mode():
            feeding.feed([0, 1], 2)
        return feeding.outputs.clone()

    found, truth = run((1, 2, 2, 1), config, weights, program)
    for seen in found:
        assert_outputs_close(seen, truth)
        assert fed_lengths(seen) == [6, 6, 4]
