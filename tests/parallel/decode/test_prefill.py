"""Steps of any number of tokens: every position against float64, what is stored against token-by-token decode.

Blocks that no token was written to, and rows of x that are not in a step, hold NaN throughout.
"""

import re

import pytest
import torch

import attnmesh as am
from attnmesh.comm import SoloComm
from attnmesh.ops import paged
from attnmesh.parallel.decode import prefill
from attnmesh.parallel.decode.exchange import HeadExchange
from attnmesh.testing.block import BlockRunner, poisoned_cache, random_block, reference_block, shard_block
from helpers.blocks import (
    assert_outputs_close,
    cache_state,
    exact_weights,
    factorizations,
    fed_lengths,
    pools_of,
    random_sequences,
    same_state,
)
from helpers.cases import sweep

LENGTH, BATCH = 61, 4
KINDS = [{}, {"window": 5, "sinks": True}, {"window": 30, "norm": True}, {"sinks": True, "norm_before_rope": True}]
STEPS = [((1,), 9), ((0, 1), 20), ((2,), 37), ((0, 1, 2), 3), ((0, 2), 10), ((1,), 1), ((0, 1, 2), 11)]


def fed(block, x, steps, **options):
    """A runner that fed three sequences, in a batch of four, by these steps. Each has its blocks from the start."""
    runner = BlockRunner(block, poisoned_cache(block, BATCH, LENGTH, **options), x)
    runner.allocate(0, 1, 2, prompts=[LENGTH] * 3)
    for which, tokens in steps:
        runner.feed(which, tokens)
    return runner


def assert_exact(sharding, kind, steps=STEPS, dtype=torch.float32, bound=1e-5, storage=None, heads=(8, 2), **options):
    config, weights = random_block(*heads, 16, **kind, dtype=dtype)
    if storage is not None:  # projections without rounding: the same numbers are quantized everywhere
        weights, x = (y for y in exact_weights(weights, 3, LENGTH))
        x = x.to(dtype)
        weights = am.decode.AttentionWeights(
            weights.qkv.to(dtype), weights.qkv_bias.to(dtype), out=weights.out, sinks=weights.sinks
        )
    else:
        x = random_sequences(3, LENGTH, config, dtype)
    truth = reference_block(config, weights, x, storage=storage)

    def rank(comm):
        block = shard_block(config, weights, sharding, comm, **options)
        return fed(block, x, steps, storage=storage).outputs

    for me, seen in enumerate(am.run_virtual(sharding.ranks, rank)):
        own = sharding.q_heads(me, config.q_heads)
        assert_outputs_close(seen, truth if truth.ndim == 3 else truth[:, :, own.start : own.stop], bound)
        assert fed_lengths(seen) == [sum(n for which, n in steps if i in which) for i in range(3)]


SHARDINGS = [(1, 1, 1, 1), (2, 1, 1, 1), (1, 3, 1, 1), (1, 1, 3, 2), (1, 2, 2, 4), (2, 1, 2, 1)]


@pytest.mark.parametrize("sharding", [*SHARDINGS[2:5], *map(sweep, (*SHARDINGS[:2], SHARDINGS[5]))])
def test_prefill_and_decode_in_turn(sharding):
    kind = KINDS[SHARDINGS.index(sharding) % len(KINDS)]
    assert_exact(am.DecodeSharding(*sharding), kind)


@pytest.mark.sweep
@pytest.mark.parametrize("world", [4, 6, 8])
def test_prefill_in_every_factorisation(world):
    for at, (tp, kvdp, cp) in enumerate(factorizations(world)):
        interleave, heads = (1, 3, 8)[at % 3] if cp > 1 else 1, (12, 6) if world == 6 else (8, 2)
        assert_exact(am.DecodeSharding(tp, kvdp, cp, interleave), KINDS[at % len(KINDS)], heads=heads)


@pytest.mark.parametrize("sharding", [(1, 1, 1, 1), sweep((1, 2, 2, 3))])
def test_chunks_and_parts_of_a_few_tokens(sharding, monkeypatch):
    """The pieces that bound memory do not show: here 16 tokens of all rows, and one block of keys, at a time."""
    monkeypatch.setattr(prefill, "_CHUNK_TOKENS", 16)
    monkeypatch.setattr(paged, "_PART_BYTES", 1)
    assert_exact(am.DecodeSharding(*sharding), {"window": 13, "sinks": True, "out": sharding[1] == 1})


@pytest.mark.parametrize("storage", ["int8", *(sweep(x) for x in ("fp8", "bfp8"))])
def test_quantized_storage(storage):
    for sharding in ((1, 1, 1, 1), (1, 2, 2, 3)):
        kind = {"sinks": True, "window": 9, "rope": None}
        assert_exact(am.DecodeSharding(*sharding), kind, dtype=torch.float64, bound=1e-6, storage=storage)


@pytest.mark.parametrize(
    "options",
    [
        {"exchange": am.decode.Exchange(kvdp="all_gather", cp="reduce_scatter")},
        sweep({"exchange": am.decode.Exchange(cp="all_reduce", replicate_q=True), "kv_rows": "own"}),
        sweep({"kv_rows": "all"}),
    ],
)
def test_every_exchange(options):
    assert_exact(am.DecodeSharding(1, 2, 2, 2), {"sinks": True}, **options)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
def test_bf16_is_at_most_twice_as_far_off_as_the_plain_computation():
    config, weights = random_block(8, 2, 16, sinks=True, dtype=torch.bfloat16)
    x = random_sequences(3, LENGTH, config, torch.bfloat16)
    truth = reference_block(config, weights, x)
    plain = (reference_block(config, weights, x, dtype=torch.bfloat16).double() - truth).norm()

    def rank(comm):
        return fed(shard_block(config, weights, am.DecodeSharding(1, 1, 2), comm), x, [((0, 1, 2), LENGTH)]).outputs

    for seen in am.run_virtual(2, rank):
        assert seen.dtype == torch.bfloat16
        assert (seen.double() - truth).norm() <= 2 * plain


@pytest.mark.parametrize(("storage", "sharding"), [("fp32", (1, 2, 1, 1)), sweep("bfp8", (1, 1, 2, 3))])
def test_the_cache_has_the_bits_of_token_by_token_decode(sharding, storage):
    """And so the next decode step has the same output: bit for bit where nothing but the cache differs."""
    sharding = am.DecodeSharding(*sharding)
    config, weights = random_block(8, 2, 16, window=30)
    weights, x = exact_weights(weights, 3, LENGTH)

    def rank(comm):
        block = shard_block(config, weights, sharding, comm)
        at_once = fed(block, x, [((0, 1), 9), ((2,), 12)], storage=storage)
        one_by_one = fed(block, x, [((0, 1), 1)] * 9 + [((2,), 1)] * 12, storage=storage)
        for mine, theirs in zip(pools_of(at_once.cache), pools_of(one_by_one.cache), strict=True):
            assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())
        torch.testing.assert_close(at_once.outputs, one_by_one.outputs, rtol=2e-5, atol=2e-5, equal_nan=True)
        return torch.equal(*(runner.feed([0, 1, 2]) for runner in (at_once, one_by_one)))

    assert all(am.run_virtual(sharding.ranks, rank))


def test_rows_that_are_not_in_the_step_return_the_bias():
    config, weights = random_block(8, 2)

    def rank(comm):
        block = shard_block(config, weights, am.DecodeSharding(1, 2, 1), comm)
        runner = BlockRunner(block, poisoned_cache(block, BATCH, LENGTH), random_sequences(3, LENGTH, config))
        out = runner.allocate(0, 1, 2).feed([1], 12)
        row = runner.sequences[1].row
        assert all(torch.equal(out[i], weights.out_bias.expand(12, -1)) for i in range(BATCH) if i != row)
        return True

    assert all(am.run_virtual(2, rank))


def test_rows_that_are_not_in_the_step_may_be_left_out():
    """Of x, of the cosines and of the result; the others are in the order of their rows."""
    config, weights = random_block(8, 2)
    x = random_sequences(3, LENGTH, config)
    truth = reference_block(config, weights, x)

    def rank(comm):
        block = shard_block(config, weights, am.DecodeSharding(1, 2, 1), comm)
        cache = poisoned_cache(block, BATCH, LENGTH)
        sequences = [cache.allocate(LENGTH) for _ in range(3)]
        for begin, which in ((0, (2, 0)), (17, (2, 0)), (0, (1,))):
            ordered = sorted(which, key=lambda i: sequences[i].row)
            step = cache.append([sequences[i] for i in which], 17)
            rows = torch.arange(begin, begin + 17).expand(len(which), -1)
            out = block(x[ordered, begin : begin + 17], cache, step, cos_sin=config.rope.cos_sin(rows))
            assert_outputs_close(out, truth[ordered, begin : begin + 17])
        with pytest.raises(
            ValueError, match=r"= \[4, 9, 24\], or \[2, 9, 24\] for the rows of the step, got \[3, 9, 24\]"
        ):
            block(x[:, :9], cache, cache.append(sequences[:2], 9))
        return True

    assert all(am.run_virtual(2, rank))


def test_a_prompt_that_continues_a_cached_prefix():
    config, weights = random_block(8, 2)
    x = random_sequences(2, LENGTH, config)
    x[1, :30] = x[0, :30]
    ids = [list(range(40)), [*range(30), *range(100, 120)]]
    truth = reference_block(config, weights, x)

    def rank(comm):
        block = shard_block(config, weights, am.DecodeSharding(1, 1, 2, 2), comm)
        runner = BlockRunner(block, poisoned_cache(block, 2, LENGTH), x)
        for i, prompt in enumerate(ids):
            runner.allocate(i, prompts=[prompt])
            runner.feed([i], len(prompt) - runner.sequences[i].cached)
        return runner.sequences[1].cached, runner.outputs

    for cached, seen in am.run_virtual(2, rank):
        assert cached == 24  # blocks of 4 on both ranks
        seen[1, :cached] = truth[1, :cached]
        assert_outputs_close(seen, truth)
        assert fed_lengths(seen) == [40, 50]


def test_a_prefill_can_be_attended_again_without_writing():
    config, weights = random_block(8, 2)
    block = am.AttentionBlock(config, weights, am.DecodeSharding(), SoloComm())
    x = random_sequences(1, LENGTH, config)
    cache = poisoned_cache(block, 1, LENGTH)
    step = cache.append([cache.allocate(LENGTH)], LENGTH)
    first = block(x, cache, step)
    before = cache_state(cache)
    assert torch.equal(block(x, cache, step, update_cache=False), first)
    assert same_state(cache_state(cache), before)


def test_fixed_splits_refuse_a_prefill_on_every_rank_and_write_nothing():
    config, weights = random_block(8, 2)

    def rank(comm):
        block = shard_block(config, weights, am.DecodeSharding(cp=2, interleave=4), comm, split_size=4)
        runner = BlockRunner(block, poisoned_cache(block, 1, LENGTH), random_sequences(1, LENGTH, config)).allocate(0)
        before = cache_state(runner.cache)
        with pytest.raises(ValueError) as raised:  # noqa: PT011
            runner.feed([0], 9)
        return str(raised.value), torch.equal(cache_state(runner.cache)[0][0], before[0][0])

    for message, unchanged in am.run_virtual(2, rank):
        assert re.search(r"step must have 1 to 8 new tokens .* got 9 tokens and split_size=4", message), message
        assert unchanged


def test_given_cosines_and_sines_rotate_all_layers_of_a_step():
    """In a decode step and in a prefill: those of the positions, and of positions of one's own."""
    config, weights = random_block(8, 2)
    x = random_sequences(2, LENGTH, config)
    shifted = torch.arange(LENGTH) + 7  # all by as much: relative positions, and so the outputs, stay

    def rank(comm):
        block = shard_block(config, weights, am.DecodeSharding(1, 2, 2), comm)
        runner = BlockRunner(block, poisoned_cache(block, BATCH, LENGTH), x).allocate(0, 1)
        for which, tokens in (((0, 1), 21), ((1,), 3), ((0, 1), 1), ((0,), 14)):
            starts = {i: runner.sequences[i].length for i in which}
            at = torch.full((BATCH, tokens), -1)
            for i, start in starts.items():
                at[runner.sequences[i].row] = shifted[start : start + tokens]
            runner.feed(which, tokens, cos_sin=config.rope.cos_sin(at))
        return runner.outputs

    for seen in am.run_virtual(4, rank):
        assert_outputs_close(seen, reference_block(config, weights, x))
        assert fed_lengths(seen) == [36, 25]


@pytest.mark.parametrize("storage", [None, "fp8"])
def test_the_first_tokens_of_sequences_attend_without_a_message(storage, monkeypatch):
    """By query heads, of which ranks have different numbers for a kv head, and without keys of other ranks."""

    def refuse(*args):
        raise AssertionError("queries were exchanged")

    monkeypatch.setattr(HeadExchange, "gather_heads", refuse)
    kind = {"sinks": True, "window": 9, "rope": None if storage else "halves"}
    dtype = torch.float64 if storage else torch.float32
    steps = [((0, 1, 2), 40)]
    assert_exact(am.DecodeSharding(1, 2, 2, 3), kind, steps, dtype, 1e-5, storage, heads=(6, 2))
    with pytest.raises(AssertionError, match="queries were exchanged"):
        assert_exact(am.DecodeSharding(1, 2, 1), kind, [*steps, ((1,), 9)], dtype, 1e-5, storage)
