"""Keys and values in fewer bits on many ranks: what is stored is what one rank would store, and so are the answers."""

from copy import deepcopy

import pytest
import torch

import attnmesh as am
from attnmesh.ops.storage import dequantize
from attnmesh.testing.block import BlockRunner, poisoned_cache, random_block, reference_block, shard_block
from helpers.blocks import (
    FAMILIES,
    block_from_layer,
    exact_weights,
    factorizations,
    generate,
    layer_outputs,
    random_sequences,
    transformers_layer,
)
from helpers.cases import first, in_turn, sweep

LENGTH = 23
SHARDINGS = [(2, 1, 1, 1), (1, 2, 2, 3), (1, 1, 4, 4), (2, 2, 1, 1)]


def generated(sharding, storage):
    """The outputs, and K and V of the second sequence as they are stored: its positions' owners put together."""
    config, weights = random_block(8, 2, 16, sinks=True, window=9)
    weights, x = exact_weights(weights, 3, LENGTH)
    sharding = am.DecodeSharding(*sharding)

    def rank(comm):
        block = shard_block(config, weights, sharding, comm)
        feeding = BlockRunner(block, poisoned_cache(block, 3, LENGTH, storage=storage), x)
        feeding.allocate(0, 1, 2).feed_until(1, 12).feed([0, 1, 2], 6)
        for _ in range(3):
            feeding.feed([0, 1, 2])
        return feeding.outputs, stored(feeding.cache, feeding.sequences[1])

    outputs, parts = zip(*am.run_virtual(sharding.ranks, rank), strict=True)
    whole = torch.full((2, 2, 21, 16), torch.nan)  # K and V, heads, positions, D
    for me, part in enumerate(parts):
        for position, token in part.items():
            heads = sharding.kv_heads(me, 2)
            place = whole[:, heads.start : heads.stop, position]
            assert place.isnan().all() or torch.equal(place, token)  # ranks that share a head hold the same
            whole[:, heads.start : heads.stop, position] = token
    return outputs, whole, reference_block(config, weights, x)


def stored(cache, sequence):
    """What this rank holds of a sequence: K and V [2, heads, D] of its positions."""
    if sequence.row not in cache.rows:
        return {}
    share = cache.sharding.position_shard(cache.rank)
    blocks = cache.block_table[sequence.row - cache.rows.start].tolist()
    k, v = (dequantize(pool, torch.float32) for pool in (cache.keys(0), cache.values(0)))
    found = {}
    for index in range(share.length(sequence.length)):
        at = blocks[index // cache.block_size], index % cache.block_size
        found[share.position(index)] = torch.stack([k[at], v[at]])
    return found


@pytest.mark.parametrize(
    "storage",
    first(1, ["fp8", "bfp8", *(sweep(storage) for storage in ("fp32", "int8"))]),
)
def test_many_ranks_store_and_answer_as_one_does(storage):
    (alone,), whole, truth = generated((1, 1, 1, 1), storage)
    off = (alone - truth).nan_to_num().abs().max() / truth.abs().max()
    assert (off < 1e-5) == (storage == "fp32")  # fewer bits do show
    assert off < 0.1
    for sharding in SHARDINGS:
        outputs, held, _ = generated(sharding, storage)
        assert torch.equal(held, whole)  # NaN, where a token is missing, is not equal
        for seen in outputs:
            torch.testing.assert_close(seen, alone, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_scales_of_fp8_are_cut_with_the_heads():
    config, weights = random_block(8, 4, 16)
    scales = {"k_scale": torch.tensor([0.01, 0.5, 0.002, 0.1]), "v_scale": torch.tensor([0.03, 0.004, 0.2, 0.02])}
    x = random_sequences(2, LENGTH, config)

    def generated(sharding):
        def rank(comm):
            block = shard_block(config, weights, sharding, comm)
            cache = am.ShardedCache(
                sharding, comm.rank, am.CacheSpec(layers=1, kv_heads=4, head_dim=16, storage="fp8", **scales), batch=2,
                num_blocks=16, block_size=4, max_length=LENGTH,
            )  # fmt: skip
            feeding = BlockRunner(block, cache, x).allocate(0, 1).feed_until(0, 9)
            feeding.feed([0, 1], 4)
            return feeding.outputs

        return am.run_virtual(sharding.ranks, rank)

    (alone,) = generated(am.DecodeSharding())
    for sharding in (am.DecodeSharding(tp=4), am.DecodeSharding(2, 2, 2), am.DecodeSharding(tp=8)):
        for seen in generated(sharding):
            torch.testing.assert_close(seen, alone, rtol=2e-5, atol=2e-5, equal_nan=True)


PROMPTS, STEPS = (5, 17, 1), 6


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(
    ("family", "sharding"),
    first(1, zip(FAMILIES, [(2, 2, 2), (1, 1, 4), (1, 2, 2), (1, 4, 1), (4, 1, 2)], strict=True)),
)
def test_bf16_is_at_most_twice_as_far_off_as_the_bf16_module(family, sharding):
    assert_bf16_is_right(family, (16, 4), sharding)


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(("family", "world"), in_turn(FAMILIES, [6, 8]))
def test_bf16_in_every_factorisation(family, world):
    for sharding in factorizations(world):
        assert_bf16_is_right(family, (12, 6) if world == 6 else (16, 4), sharding)


def assert_bf16_is_right(family, heads, sharding):
    """At most twice as far off as the module in bf16, every sequence, on every rank."""
    bf16 = torch.bfloat16
    module = transformers_layer(family, *heads, bf16)
    x = torch.randn(3, max(PROMPTS) + STEPS, module.config.hidden_size).to(bf16)
    truth = layer_outputs(as_doubles(module, family, heads), x.double())
    plain = layer_outputs(module, x).double()
    sharding = am.DecodeSharding(*sharding, interleave=2)

    def rank(comm):
        return generate(block_from_layer(module, sharding, comm), x, PROMPTS, STEPS)

    for seen in am.run_virtual(sharding.ranks, rank):
        assert seen.dtype == bf16
        for row, length in enumerate(n + STEPS for n in PROMPTS):
            far = (seen[row, :length].double() - truth[row, :length]).square().mean().sqrt()
            assert far <= 2 * (plain[row, :length] - truth[row, :length]).square().mean().sqrt()
            worst = (seen[row, :length].double() - truth[row, :length]).abs().max()
            assert worst <= 2 * (plain - truth).abs().max()


def as_doubles(module, family, heads):
    """The module in float64, its weights those of the bf16 one: that they were rounded is no error of either."""
    wide = deepcopy(transformers_layer(family, *heads, torch.float64))
    wide.load_state_dict({name: x.double() for name, x in module.state_dict().items()})
    return wide
