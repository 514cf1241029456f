"""1 to 8 tokens a step, positions dealt in runs of any length, with windows and sinks, under context parallelism."""

import pytest

import attnmesh as am
from attnmesh.testing.block import BlockRunner, poisoned_cache, random_block, reference_block, shard_block
from helpers.blocks import assert_outputs_close, fed_lengths, random_sequences
from helpers.cases import sweep

BLOCK_SIZE = 4
KINDS = [{}, {"window": 5}, {"sinks": True}, {"window": 11, "sinks": True}]
ODD_LENGTHS = (3, 0)  # the two sequences are never at one position


def assert_exact(config, weights, sharding, counts):
    """Two sequences of different lengths, in steps of these counts."""
    length = ODD_LENGTHS[0] + sum(counts)
    x = random_sequences(2, length, config)
    truth = reference_block(config, weights, x)

    def rank(comm):
        block = shard_block(config, weights, sharding, comm)
        feeding = (
            BlockRunner(block, poisoned_cache(block, 2, length, BLOCK_SIZE), x)
            .allocate(0, 1)
            .feed_until(0, ODD_LENGTHS[0])
        )
        for count in counts:
            feeding.feed([0, 1], count)
        return feeding.outputs

    for seen in am.run_virtual(sharding.ranks, rank):
        assert_outputs_close(seen, truth)
        assert fed_lengths(seen) == [n + sum(counts) for n in ODD_LENGTHS]


@pytest.mark.parametrize(("interleave", "cp"), [(1, 2), sweep(2, 3), sweep(3, 4), sweep(8, 2)])
def test_steps_of_every_number_of_tokens_in_one_run(interleave, cp):
    config, weights = random_block(4, 2, **KINDS[-1 if (cp + interleave) % 3 else 0])
    counts = [(3 * i + interleave) % 8 + 1 for i in range(8)]  # each of 1 to 8 once, in an order of the case's own
    assert sorted(counts) == list(range(1, 9))
    assert_exact(config, weights, am.DecodeSharding(cp=cp, interleave=interleave), counts)


@pytest.mark.parametrize("window", [1, sweep(2), sweep(3)])
def test_windows_shorter_than_a_step(window):
    """Most ranks see nothing for some of the tokens."""
    config, weights = random_block(4, 2, window=window, sinks=True)
    assert_exact(config, weights, am.DecodeSharding(cp=4, interleave=2), [8, 1, 5, 2])
