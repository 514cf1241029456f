"""What does not fit raises ValueError on every rank, with the reason, before anything is sent or written."""

import re
from dataclasses import replace

import pytest
import torch

import attnmesh as am
from attnmesh.testing.block import BlockRunner, poisoned_cache, random_block, reference_block, shard_block
from helpers.blocks import assert_outputs_close, cache_state, random_sequences, same_state
from helpers.caches import cache_sizes
from helpers.cases import first

WORLD, GUILTY = 4, 2
SHARDING = am.DecodeSharding(1, 2, 2, 4)


def said(program):
    """The ValueError in words, or what else happened."""
    try:
        program()
    except ValueError as error:
        return str(error)
    except Exception as error:
        return f"not a ValueError but {type(error).__name__}: {error}"
    return "nothing was raised"


def assert_all_say(words, program):
    for rank, message in enumerate(am.run_virtual(WORLD, lambda comm: said(lambda: program(comm)), timeout=30)):
        assert re.search(words, message), f"rank {rank}: {message}"


# Making a block.


def make(comm, *, alone=True, sharding=SHARDING, weights=None, config=None, **options):
    """A block in which all is well, but for what is given: on one rank (or on all)."""
    usual_config, usual = random_block(8, 4)
    if alone and comm.rank != GUILTY:
        return shard_block(usual_config, usual, SHARDING, comm)
    own = usual.shard(usual_config, SHARDING, comm.rank)
    own = replace(own, **(weights or {}))
    return am.AttentionBlock(config or usual_config, own, sharding, comm, **options)


WRONG_EVERYWHERE = {
    "more ranks than there are": ({"sharding": am.DecodeSharding(2, 2, 2)}, "2 x 2 x 2 = 8 for 4 ranks"),
    "fewer ranks than there are": ({"sharding": am.DecodeSharding(2)}, "2 x 1 x 1 = 2 for 4 ranks"),
    "heads that tp does not divide": (
        {"config": random_block(12, 3)[0], "sharding": am.DecodeSharding(tp=2, cp=2)},
        "tp must divide the kv heads or be a multiple of them, got tp=2, kv_heads=3",
    ),
    "a rank without a head": (
        {"config": random_block(3, 3)[0], "sharding": am.DecodeSharding(cp=4)},
        "q_heads=3",
    ),
    "splits that ranks would cut": ({"split_size": 8}, "interleave=4 and split_size=8"),
    "splits of nothing": ({"split_size": 0}, "split_size must be an integer >= 1, got 0"),
    "splits that another combine cannot merge": (
        {"split_size": 4, "exchange": am.decode.Exchange(cp="reduce_scatter")},
        "exchange.cp must be all_to_all or auto .* got 'reduce_scatter'",
    ),
    "unknown rows": ({"kv_rows": "mine"}, "kv_rows must be one of auto, all, own, got 'mine'"),
    "no sharding": ({"sharding": (1, 2, 2)}, r"sharding must be DecodeSharding, got \(1, 2, 2\)"),
    "no config": ({"config": "llama"}, "config must be AttentionConfig, got 'llama'"),
    "no exchange": ({"exchange": "all_to_all"}, "exchange must be Exchange, got 'all_to_all'"),
}


@pytest.mark.parametrize("what", WRONG_EVERYWHERE)
def test_wrong_everywhere(what):
    given, words = WRONG_EVERYWHERE[what]
    assert_all_say(words, lambda comm: make(comm, alone=False, **given))


WRONG_ALONE = {
    "another interleave": ({"sharding": replace(SHARDING, interleave=2)}, "ranks disagree: sharding"),
    "another sharding": ({"sharding": am.DecodeSharding(1, 4, 1)}, "ranks disagree: sharding|on rank 2, got"),
    "another exchange": ({"exchange": am.decode.Exchange("all_gather")}, "ranks disagree: exchange"),
    "a replicated projection": (
        {"exchange": am.decode.Exchange(replicate_q=True)},
        r"qkv must be \[96, 24\] on rank 2, got",
    ),
    "another window": ({"config": random_block(8, 4, window=5)[0]}, "ranks disagree: config"),
    "another rope": ({"config": random_block(8, 4, rope="pairs")[0]}, "ranks disagree: config"),
    "other splits": ({"split_size": 4}, "ranks disagree: split_size"),
    "keys of other rows": ({"kv_rows": "own"}, "ranks disagree: kv_rows"),
    "a short projection": (
        {"weights": {"qkv": torch.ones(79, 24)}},
        r"qkv must be \[80, 24\] on rank 2, got \[79, 24\]",
    ),
    "a short bias": ({"weights": {"qkv_bias": torch.ones(79)}}, r"qkv_bias must be \[80\] on rank 2, got \[79\]"),
    "all heads' output": (
        {"weights": {"out": torch.ones(24, 64)}},
        r"out must be \[24, 16\] on rank 2, got \[24, 64\]",
    ),
    "no output": ({"weights": {"out": None}}, "ranks disagree: tensors is"),
    "the bias of rank 0": ({"weights": {"out_bias": torch.ones(24)}}, "out_bias must be given on rank 0 only"),
    "sinks": ({"weights": {"sinks": torch.ones(8)}}, "ranks disagree: tensors is"),
    "sinks of its own heads": ({"weights": {"sinks": torch.ones(4)}}, r"sinks must be \[8\] on rank 2, got \[4\]"),
    "another softcap": ({"config": random_block(8, 4, softcap=2.0)[0]}, "ranks disagree: config"),
    "slopes": ({"weights": {"alibi_slopes": torch.ones(8)}}, "ranks disagree: tensors is"),
    "slopes of its own heads": (
        {"weights": {"alibi_slopes": torch.ones(4)}},
        r"alibi_slopes must be \[8\] on rank 2, got \[4\]",
    ),
    "slopes elsewhere": (
        {"weights": {"alibi_slopes": torch.ones(8, device="meta")}},
        "alibi_slopes must be on the device of qkv, cpu, got meta",
    ),
    "a norm that nobody asked for": ({"weights": {"norm": torch.ones(24)}}, "norm must be None, since config.norm"),
    "weights of another dtype": (
        {"weights": {"qkv": torch.ones(80, 24).half(), "qkv_bias": None, "out": torch.ones(24, 16).half()}},
        "ranks disagree: dtype",
    ),
    "a bias of another dtype": ({"weights": {"qkv_bias": torch.ones(80).half()}}, "qkv_bias must have the dtype .*16"),
    "an output of another dtype": ({"weights": {"out": torch.ones(24, 16).half()}}, "out must have the dtype .*16"),
    "an output elsewhere": ({"weights": {"out": torch.ones(24, 16, device="meta")}}, "out must have .* on meta"),
    "an unknown backend": ({"backend": "cuda"}, "backend must be one of auto, .* got 'cuda'"),
}


@pytest.mark.parametrize("what", WRONG_ALONE)
def test_wrong_on_one_rank_is_heard_on_all(what):
    given, words = WRONG_ALONE[what]
    assert_all_say(words, lambda comm: make(comm, **given))


def test_no_weights_on_one_rank():
    def program(comm):
        config, weights = random_block(8, 4)
        own = None if comm.rank == GUILTY else weights.shard(config, SHARDING, comm.rank)
        am.AttentionBlock(config, own, SHARDING, comm)

    assert_all_say("weights must be AttentionWeights, got None", program)


def test_wrong_weights_of_a_later_layer_are_heard_on_all():
    """Its settings are those of the first, which was agreed on; its weights are not."""

    def program(comm):
        make(comm)
        make(comm, weights={"out": torch.ones(24, 64)})

    assert_all_say(r"out must be \[24, 16\] on rank 2, got \[24, 64\] \(on rank 2\)", program)


# A cache.


def test_a_cache_of_float64_is_refused():
    config, weights = random_block(8, 4, dtype=torch.float64)
    (message,) = am.run_virtual(
        1, lambda comm: said(lambda: poisoned_cache(shard_block(config, weights, am.DecodeSharding(), comm), 2, 8))
    )
    assert "float64" in message
    assert "not a ValueError" not in message


def test_a_cache_that_cannot_hold_one_sequence_is_refused():
    def program(comm):
        make(comm, alone=False).make_cache(batch=2, num_blocks=4, block_size=4, max_length=33)

    assert_all_say("num_blocks must be at least 5.*got 4", program)


# Calling it.


class Ready:
    """A rank of a block with two sequences that have five tokens each, and two more that are to be computed."""

    def __init__(self, comm, sharding=SHARDING, **options):
        config, weights = random_block(8, 4)
        self.comm, self.x = comm, random_sequences(2, 16, config)
        self.block = shard_block(config, weights, sharding, comm, **options)
        self.cache = poisoned_cache(self.block, 2, 16, layers=2)
        self.feeding = BlockRunner(self.block, self.cache, self.x).allocate(0, 1)
        self.next(5)
        for layer in (0, 1):
            self.block(*self.last, layer=layer)

    def next(self, tokens):
        begins = {i: self.feeding.sequences[i].length for i in (0, 1)}
        step = self.cache.append([self.feeding.sequences[i] for i in (0, 1)], tokens)
        self.last = self.feeding.inputs(begins, tokens), self.cache, step
        return self.last

    def guilty(self, wrong, right):
        return wrong if self.comm.rank == GUILTY else right


def called_with(ready, x=None, cache=None, step=None, **options):
    given, own, current = ready.next(2)
    if ready.comm.rank == GUILTY:
        given = given if x is None else x(given)
        own = own if cache is None else cache(ready)
        current = current if step is None else step(current)
    else:
        options = {}
    ready.before = cache_state(ready.cache, 2)
    ready.block(given, own, current, **options)


def of_another_sharding(ready):
    other = am.DecodeSharding(1, 4, 1)
    return am.ShardedCache(
        other,
        GUILTY,
        am.CacheSpec(layers=2, kv_heads=4, head_dim=8, storage="fp32"),
        batch=2,
        num_blocks=9,
        block_size=4,
        max_length=16,
    )


def of(ready, **other):
    how = {"batch": 2, "layers": 2, "num_blocks": 9, "block_size": 4, "kv_heads": 4, "head_dim": 8, "max_length": 16}
    return am.ShardedCache(SHARDING, GUILTY, **cache_sizes(**how | {"storage": "fp32"} | other))


WRONG_CALLS = {
    "a short x": ({"x": lambda x: x[:1]}, r"x must be \[batch, tokens, hidden\] = \[2, 2, 24\], got \[1, 2, 24\]"),
    "a token too many": ({"x": lambda x: x.repeat(1, 2, 1)}, r"got \[2, 4, 24\]"),
    "another hidden size": ({"x": lambda x: x[..., 1:]}, r"got \[2, 2, 23\]"),
    "no x": ({"x": lambda x: None}, "got NoneType"),
    "x in float64": ({"x": lambda x: x.double()}, "must have the weights' dtype and device.*float64"),
    "x elsewhere": ({"x": lambda x: x.to("meta")}, "must have the weights' dtype and device.*meta"),
    "no cache": ({"cache": lambda ready: None}, "cache must be ShardedCache, got None"),
    "no step": ({"step": lambda step: 2}, "step must be what append of the cache returned, got 2"),
    "a cache of another sharding": (
        {"cache": of_another_sharding},
        "cache must be that of rank 2 .*, got rank 2 under .*kvdp=4",
    ),
    "a cache of other heads": (
        {"cache": lambda ready: of(ready, kv_heads=2)},
        "must have 4 kv heads of 8, got 2 heads",
    ),
    "a cache of latents": (
        {"cache": lambda ready: of(ready, kv_heads=1, latent=True)},
        "cache must have keys and values, got one with latent=True",
    ),
    "a cache of other values": ({"cache": lambda ready: of(ready, value_dim=4)}, "with values of 4"),
    "a cache of bf16": (
        {"cache": lambda ready: of(ready, storage="bf16")},
        "cache must have the weights' dtype, .* got storage='bf16'",
    ),
    "a cache that knows nothing of the step": ({"cache": of}, "must be the latest of this cache"),
    "another layer": ({"layer": 1}, "ranks disagree: layer"),
    "a layer that is not there": ({"layer": 2}, "layer must be 0 to 1, got 2"),
    "cosines alone": ({"cos_sin": (torch.ones(2, 2, 4),)}, "cos_sin must be a tuple of two tensors, cosines and sines"),
    "cosines of other tokens": (
        {"cos_sin": (torch.ones(2, 2, 4), torch.ones(2, 1, 4))},
        r"cos_sin\[1\] must be floating point \[2, 2, 4\] on cpu, got .*\[2, 1, 4\]",
    ),
    "cosines on one rank": ({"cos_sin": (torch.ones(2, 2, 4),) * 2}, "ranks disagree: cos_sin"),
    "keys that are not there": ({"update_cache": False}, "layer 0 of this step is not written yet"),
}


@pytest.mark.parametrize("what", first(5, WRONG_CALLS))
def test_a_wrong_call_on_one_rank_is_heard_on_all_and_changes_nothing(what):
    given, words = WRONG_CALLS[what]

    def rank(comm):
        ready = Ready(comm)
        message = said(lambda: called_with(ready, **given))
        return message, same_state(cache_state(ready.cache, 2), ready.before)

    for me, (message, unchanged) in enumerate(am.run_virtual(WORLD, rank, timeout=30)):
        assert re.search(words, message), f"rank {me}: {message}"
        assert unchanged


def test_after_a_wrong_call_the_right_one_is_served():
    def rank(comm):
        ready = Ready(comm)
        message = said(lambda: called_with(ready, x=lambda x: x[:1]))
        assert "x must be" in message
        begins = dict.fromkeys((0, 1), 5)
        ready.feeding.record(begins, ready.block(*ready.last))
        return ready.feeding.outputs

    config, weights = random_block(8, 4)
    for seen in am.run_virtual(WORLD, rank):
        assert_outputs_close(seen, reference_block(config, weights, random_sequences(2, 16, config)))


WRONG_STEPS = {
    "a step that is not the latest": (
        lambda ready: (ready.next(1)[0], ready.cache, (ready.last[2], ready.next(1))[0]),
        "must be the latest of this cache",
    ),
    "tokens before it that were never written": (
        lambda ready: (ready.next(2), ready.next(1))[1],
        "has earlier tokens that are not written in layer 0: truncate it to 5 tokens",
    ),
}


@pytest.mark.parametrize("what", WRONG_STEPS)
def test_a_wrong_step_is_refused_and_nothing_is_written(what):
    program, words = WRONG_STEPS[what]

    def rank(comm):
        ready = Ready(comm)
        given = program(ready)
        before = cache_state(ready.cache, 2)
        message = said(lambda: ready.block(*given))
        return message, same_state(cache_state(ready.cache, 2), before)

    for message, unchanged in am.run_virtual(WORLD, rank, timeout=30):
        assert re.search(words, message), message
        assert unchanged


@pytest.mark.parametrize("what", ["truncated", "freed", "written"])
def test_a_step_that_is_over_on_one_rank_is_refused_on_all(what):
    def rank(comm):
        ready = Ready(comm)
        given = ready.next(2)
        if comm.rank == GUILTY:
            if what == "truncated":
                ready.cache.truncate(ready.feeding.sequences[0], 6)
            elif what == "freed":
                ready.cache.free(ready.feeding.sequences[0])
            else:
                ready.cache.mark_written(given[2], 0)
        before = cache_state(ready.cache, 2)
        message = said(lambda: ready.block(*given))
        return message, same_state(cache_state(ready.cache, 2), before)

    words = {"written": "layer 0 of this step is already written"}.get(what, "must be the latest of this cache")
    for message, unchanged in am.run_virtual(WORLD, rank, timeout=30):
        assert re.search(words + r".*on rank 2", message), message
        assert unchanged


def test_splits_that_cut_blocks_are_refused():
    def program(comm):
        config, weights = random_block(8, 4)
        block = shard_block(config, weights, SHARDING, comm, split_size=2)
        cache = poisoned_cache(block, 2, 16)
        block(torch.ones(2, 1, 24), cache, cache.append([cache.allocate(0)], 1))

    assert_all_say(
        "split_size must be a multiple of the cache's block_size, got split_size=2 and block_size=4", program
    )


@pytest.mark.parametrize(
    "what", [{"block_size": 8}, {"num_blocks": 11}, {"max_length": 20}, {"storage": "int8"}], ids=str
)
def test_caches_that_differ_between_ranks_are_refused(what):
    """Their blocks would differ sooner or later."""

    def program(comm):
        config, weights = random_block(8, 4)
        block = shard_block(config, weights, SHARDING, comm)
        how = {"batch": 2, "num_blocks": 9, "block_size": 4, "max_length": 16}
        cache = block.make_cache(**(how | (what if comm.rank == GUILTY else {})))
        block(torch.ones(2, 1, 24), cache, cache.append([cache.allocate(0)], 1))

    assert_all_say("ranks disagree", program)


def test_a_rank_that_is_late_to_be_wrong_ends_the_run_at_once():
    """All agreed to such a call before, so others are on their way: they hear of it where they wait."""

    def rank(comm):
        ready = Ready(comm)
        for _ in range(2):
            x, cache, step = ready.next(1)
            ready.block(x, cache, step)
            ready.block(x, cache, step, layer=1)
        x, cache, step = ready.next(1)
        try:
            ready.block(ready.guilty(x[:1], x), cache, step)
        except ValueError as error:
            return f"ValueError: {error}"
        except am.comm.CommError as error:
            return f"CommError: {error}"
        return "nothing"

    found = am.run_virtual(WORLD, rank, timeout=30)
    assert found[GUILTY].startswith("ValueError")
    assert all("rank 2" in each for each in found)
