"""Heads and batches that ranks do not divide: some have one more, some have no sequence at all."""

import pytest

import attnmesh as am
from attnmesh.testing.block import BlockRunner, poisoned_cache, random_block, reference_block, shard_block
from helpers.blocks import assert_outputs_close, fed_lengths, random_sequences
from helpers.cases import sweep

LENGTH = 21


def assert_exact(config, weights, sharding, batch, **options):
    x = random_sequences(batch, LENGTH, config)
    truth = reference_block(config, weights, x)

    def rank(comm):
        block = shard_block(config, weights, sharding, comm, **options)
        feeding = BlockRunner(block, poisoned_cache(block, batch, LENGTH), x)
        feeding.allocate(*range(batch)).feed_until(batch - 1, 9).feed(range(batch), 3)
        for _ in range(3):
            feeding.feed(range(batch))
        return feeding.outputs

    for seen in am.run_virtual(sharding.ranks, rank):
        assert_outputs_close(seen, truth)
        assert sorted(fed_lengths(seen)) == [6] * (batch - 1) + [15]


@pytest.mark.parametrize(
    ("sharding", "replicate_q"),
    [
        ((1, 2, 2), True),
        sweep((3, 2, 1), False),
        sweep((3, 1, 2), True),
        sweep((1, 1, 4), False),
        sweep((6, 1, 1), False),
        sweep((1, 2, 4), True),
    ],
)
def test_heads_that_do_not_divide(sharding, replicate_q):
    """9 query heads read 3 kv heads: 8 ranks have one or two, 4 have two or three."""
    sharding = am.DecodeSharding(*sharding, interleave=2)
    heads = [len(sharding.q_heads(rank, 9)) for rank in range(sharding.ranks)]
    assert len(set(heads)) == 2
    config, weights = random_block(9, 3, sinks=True, window=7)
    assert_exact(config, weights, sharding, 3, exchange=am.decode.Exchange(replicate_q=replicate_q))


@pytest.mark.parametrize(
    ("batch", "sharding", "ways"),
    [
        (5, (1, 2, 2), ("all_gather", "reduce_scatter")),
        sweep(1, (1, 2, 2), ("all_to_all", "all_reduce")),
        sweep(2, (1, 3, 2), ("all_to_all", "all_to_all")),
        sweep(1, (2, 4, 1), ("all_gather", "all_reduce")),
    ],
)
def test_batches_that_do_not_divide(batch, sharding, ways):
    """Of fewer sequences than KVDP ranks, some ranks have none."""
    sharding = am.DecodeSharding(*sharding)
    config, weights = random_block(sinks=True)
    assert_exact(config, weights, sharding, batch, exchange=am.decode.Exchange(*ways))


def test_a_rank_without_sequences_keeps_up_with_fixed_splits_and_own_rows():
    config, weights = random_block(sinks=True)
    sharding = am.DecodeSharding(kvdp=3, cp=2, interleave=4)
    assert_exact(config, weights, sharding, 2, split_size=4, kv_rows="own")
    assert_exact(config, weights, sharding, 2, split_size=4, kv_rows="all")
