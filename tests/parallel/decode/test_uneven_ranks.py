"""Heads and batches that ranks do not divide: some have one more, some have no sequence at all."""

import pytest

import attnmesh as am
from feeding import Feeding, answer, assert_close, block_with, cache_for, inputs, lengths_of, made

LENGTH = 21


def assert_exact(config, weights, sharding, batch, **options):
    x = inputs(batch, LENGTH, config)
    truth = answer(config, weights, x)

    def rank(comm):
        block = block_with(config, weights, sharding, comm, **options)
        feeding = Feeding(block, cache_for(block, batch, LENGTH), x)
        feeding.begin(*range(batch)).until(batch - 1, 9).feed(range(batch), 3)
        for _ in range(3):
            feeding.feed(range(batch))
        return feeding.seen

    for seen in am.run_virtual(sharding.ranks, rank):
        assert_close(seen, truth)
        assert sorted(lengths_of(seen)) == [6] * (batch - 1) + [15]


@pytest.mark.parametrize("replicate_q", [False, True])
@pytest.mark.parametrize("sharding", [(1, 2, 2), (3, 2, 1), (3, 1, 2), (1, 1, 4), (1, 4, 1), (6, 1, 1), (1, 2, 4)])
def test_heads_that_do_not_divide(sharding, replicate_q):
    """9 query heads read 3 kv heads: 8 ranks have one or two, 4 have two or three."""
    sharding = am.DecodeSharding(*sharding, interleave=2)
    heads = [len(sharding.q_heads(rank, 9)) for rank in range(sharding.ranks)]
    assert len(set(heads)) == 2
    config, weights = made(9, 3, sinks=True, window=7)
    assert_exact(config, weights, sharding, 3, exchange=am.Exchange(replicate_q=replicate_q))


@pytest.mark.parametrize(
    "ways", [("all_to_all", "all_to_all"), ("all_gather", "reduce_scatter"), ("all_to_all", "all_reduce")]
)
@pytest.mark.parametrize(("batch", "sharding"), [(5, (1, 2, 2)), (1, (1, 2, 2)), (2, (1, 3, 2)), (1, (2, 4, 1))])
def test_batches_that_do_not_divide(batch, sharding, ways):
    """Of fewer sequences than KVDP ranks, some ranks have none."""
    sharding = am.DecodeSharding(*sharding)
    config, weights = made(sinks=True)
    assert_exact(config, weights, sharding, batch, exchange=am.Exchange(*ways))


def test_a_rank_without_sequences_keeps_up_with_fixed_splits_and_own_rows():
    config, weights = made(sinks=True)
    sharding = am.DecodeSharding(kvdp=3, cp=2, interleave=4)
    assert_exact(config, weights, sharding, 2, split_size=4, kv_rows="own")
    assert_exact(config, weights, sharding, 2, split_size=4, kv_rows="all")
