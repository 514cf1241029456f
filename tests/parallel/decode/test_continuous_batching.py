"""Steps of some of the rows, drafts that are rejected, sequences that end and others in their place."""

import pytest
import torch

import attnmesh as am
from attnmesh.testing.block import BlockRunner, poisoned_cache, random_block, reference_block, shard_block
from helpers.blocks import assert_outputs_close, fed_lengths, pools_of, random_sequences
from helpers.cases import first, in_turn

SHARDINGS = [(1, 2, 2, 1), (2, 1, 2, 3), (1, 1, 4, 4), (1, 4, 1, 1)]
KINDS = [{}, {"window": 6, "sinks": True}]

shardings = pytest.mark.parametrize("sharding", SHARDINGS, ids=lambda each: "x".join(map(str, each)))
kinds = pytest.mark.parametrize("kind", KINDS, ids=["plain", "window and sinks"])
shardings_and_kinds = pytest.mark.parametrize(("sharding", "kind"), first(2, in_turn(SHARDINGS, KINDS)), ids=str)


def run(kind, sharding, program, batch, length, sequences=None):
    """`program(feeding)` on every rank; what all sequences were told is right."""
    config, weights = random_block(8, 4, **kind)
    sharding = am.DecodeSharding(*sharding)
    x = random_sequences(sequences or batch, length, config)
    truth = reference_block(config, weights, x)

    def rank(comm):
        block = shard_block(config, weights, sharding, comm)
        feeding = BlockRunner(block, poisoned_cache(block, batch, length), x)
        program(feeding)
        return feeding.outputs

    lengths = []
    for seen in am.run_virtual(sharding.ranks, rank):
        assert_outputs_close(seen, truth)
        lengths.append(fed_lengths(seen))
    assert lengths == [lengths[0]] * len(lengths)
    return lengths[0]


def tokens_of(cache, rows):
    """The bits of all tokens of these of the own rows' blocks, by block of the pool."""
    blocks = cache.block_table[rows].flatten()
    blocks = blocks[blocks >= 0].long()
    return [pool.view(torch.int32)[blocks].clone() for pool in pools_of(cache)]


@shardings_and_kinds
def test_rows_that_are_not_in_a_step_are_left_alone(kind, sharding):
    """They hold NaN in what is given, come back as the bias, and nothing of theirs in the cache changes."""
    _, weights = random_block(8, 4, **kind)

    def program(feeding):
        feeding.allocate(*range(5))
        for i, length in enumerate((3, 8, 1, 13)):  # the fifth has no token yet
            feeding.feed_until(i, length)
        cache = feeding.cache
        for some, tokens in (([1], 1), ([0, 3], 5), ([2], 8), ([4, 1], 2), ([0], 1)):
            rows = [feeding.sequences[i].row for i in some]
            others = [row - cache.rows.start for row in cache.rows if row not in rows]
            before = tokens_of(cache, others)
            written = [pool.view(torch.int32).clone() for pool in pools_of(cache)]
            out = feeding.feed(some, tokens)
            rest = [row for row in range(5) if row not in rows]
            assert torch.equal(out[rest], weights.out_bias.expand(len(rest), tokens, -1))
            assert all(map(torch.equal, tokens_of(cache, others), before))
            changed = sum(
                (pool.view(torch.int32) != old).flatten(2).any(-1).sum().item()
                for pool, old in zip(pools_of(cache), written, strict=True)
            )
            share = feeding.block.sharding.position_shard(feeding.block.rank)
            ends = [feeding.sequences[i].length for i in some if feeding.sequences[i].row in cache.rows]
            assert changed == 2 * sum(share.length(end) - share.length(end - tokens) for end in ends)

    assert run(kind, sharding, program, batch=5, length=24) == [9, 11, 9, 18, 2]


@shardings
@kinds
def test_drafts_are_rejected(kind, sharding):
    """Of five drafted tokens none, some or all are kept; other tokens follow, which had not been drafted."""

    def program(feeding):
        feeding.allocate(0, 1, 2).feed_until(1, 7)
        drafts = torch.randn(feeding.x.shape, generator=torch.Generator().manual_seed(11))
        truth = feeding.x
        for kept in ((5, 0, 2), (1, 4, 3), (0, 0, 0), (2, 5, 1)):
            begins = [feeding.sequences[i].length for i in range(3)]
            feeding.x = truth.clone()
            for i in range(3):
                wrong = begins[i] + kept[i]
                feeding.x[i, wrong:] = drafts[i, wrong:]
            feeding.feed([2, 0, 1], 5)
            for i in range(3):
                feeding.truncate(i, begins[i] + kept[i])
        feeding.x = truth
        feeding.feed([0, 1, 2], 3)

    assert run(kind, sharding, program, batch=3, length=24) == [11, 19, 9]


@shardings_and_kinds
def test_sequences_end_and_others_take_their_rows(kind, sharding):
    """Ten sequences in three rows; blocks of those that ended hold their old keys."""

    def program(feeding):
        feeding.allocate(0, 1, 2)
        waiting = iter(range(3, 10))
        ends = [4, 9, 14, 3, 6, 12, 8, 2, 5, 7]
        while feeding.sequences:
            feeding.feed(
                sorted(feeding.sequences),
                2 if min(ends[i] - feeding.sequences[i].length for i in feeding.sequences) > 1 else 1,
            )
            for i in [i for i in feeding.sequences if feeding.sequences[i].length == ends[i]]:
                feeding.free(i)
                for new in [n for n in [next(waiting, None)] if n is not None]:
                    feeding.allocate(new)

    assert run(kind, sharding, program, batch=3, length=14, sequences=10) == [4, 9, 14, 3, 6, 12, 8, 2, 5, 7]
