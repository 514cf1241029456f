"""Prompts that begin alike share blocks on every rank: only the rest is fed, and the answers are the same."""

import pytest
import torch

import attnmesh as am
from attnmesh.testing.block import BlockRunner, poisoned_cache, random_block, reference_block, shard_block
from helpers.blocks import assert_outputs_close, random_sequences
from helpers.cases import first, sweep

LENGTH, BLOCK_SIZE = 40, 4
KINDS = [{}, {"window": 11, "sinks": True}]
# tp, kvdp, cp, interleave, and how many tokens of 21 are found: blocks that are full on every rank, whole runs of them.
CASES = [
    ((1, 1, 1, 1), 20),
    ((1, 2, 1, 1), 20),
    ((1, 1, 2, 1), 16),
    ((1, 1, 2, 4), 16),
    ((1, 2, 2, 2), 16),
    ((1, 1, 3, 3), 0),
    ((1, 1, 2, 8), 16),
    ((2, 1, 4, 1), 16),
    ((1, 1, 4, 8), 0),
    ((2, 2, 2, 1), 16),
]

cases = pytest.mark.parametrize(("sharding", "found"), CASES[1::3], ids=str)
every_other = pytest.mark.parametrize(
    ("kind", "sharding", "found"), first(3, [(KINDS[at % 2], *case) for at, case in enumerate(CASES)]), ids=str
)


def ids_and_inputs(config):
    """Prompts of ids, and x that depends on the id alone: 0 and 1 have 21 tokens in common, 2 has none with them."""
    ids = torch.randint(1000, (3, LENGTH), generator=torch.Generator().manual_seed(2)).tolist()
    ids[1][:21] = ids[0][:21]
    table = random_sequences(1000, 1, config)[:, 0]
    return ids, table[torch.tensor(ids)]


def run(kind, sharding, program, *, batch=3, **cache):
    """`program(feeding, ids)` on every rank; all that was said is right. What it returns is the same on all ranks."""
    config, weights = random_block(8, 4, **kind)
    sharding = am.DecodeSharding(*sharding)
    ids, x = ids_and_inputs(config)
    truth = reference_block(config, weights, x)

    def rank(comm):
        block = shard_block(config, weights, sharding, comm)
        feeding = BlockRunner(block, poisoned_cache(block, batch, LENGTH, BLOCK_SIZE, **cache), x)
        return program(feeding, ids), feeding.outputs

    results = []
    for result, seen in am.run_virtual(sharding.ranks, rank):
        assert_outputs_close(seen, truth)
        results.append(result)
    assert results == [results[0]] * len(results)
    return results[0]


def fed(seen, i):
    """The positions of a sequence that were fed."""
    return (~seen[i].isnan().all(-1)).nonzero().flatten().tolist()


@every_other
def test_only_the_rest_of_a_prompt_is_fed(kind, sharding, found):
    """The second prompt comes once the first is written; a third has nothing in common with them."""

    def program(feeding, ids):
        feeding.allocate(0, prompts=[ids[0][:25]]).feed_until(0, 25)
        feeding.allocate(1, 2, prompts=[ids[1][:23], ids[2][:9]])
        cached = [feeding.sequences[i].cached for i in range(3)]
        assert feeding.sequences[1].length == cached[1]
        feeding.feed_until(1, 23).feed_until(2, 9)
        for _ in range(4):
            feeding.feed([0, 1, 2])  # ids unknown: these are not found again
        feeding.feed([2, 1], 8)
        assert fed(feeding.outputs, 1) == list(range(cached[1], 35))
        return cached

    assert run(kind, sharding, program) == [0, found, 0]


@pytest.mark.parametrize(("sharding", "found"), [((1, 2, 1, 1), 20), sweep((1, 2, 2, 2), 16), sweep((2, 1, 4, 1), 16)])
def test_a_prompt_that_came_too_early_finds_nothing(sharding, found):
    def program(feeding, ids):
        feeding.allocate(0, 1, prompts=[ids[0][:25], ids[1][:23]]).feed_until(0, 25).feed_until(1, 23)
        late = feeding.cache.allocate(ids[1][:23])
        return feeding.sequences[0].cached, feeding.sequences[1].cached, late.cached

    assert run({}, sharding, program) == (0, 0, found)


@pytest.mark.parametrize(
    ("sharding", "spare"),
    [
        ((1, 1, 1, 1), 0),
        sweep((1, 1, 1, 1), 1),
        sweep((1, 2, 2, 1), 0),
        sweep((1, 2, 2, 1), 1),
        sweep((1, 1, 2, 4), 0),
        sweep((1, 1, 2, 4), 1),
    ],
)
def test_found_again_after_its_sequence_ended_but_not_what_is_evicted(sharding, spare):
    """A bank has room for one sequence of the longest kind, and perhaps a block more: there the prefix begins."""
    _, kvdp, cp, _ = sharding

    def program(feeding, ids):
        cached = []
        feeding.allocate(0, prompts=[ids[0][:25]]).feed_until(0, 25).free(0)
        feeding.allocate(1, prompts=[ids[1][:23]])
        cached.append(feeding.sequences[1].cached)
        feeding.feed_until(1, 23).free(1)
        others = []
        for _ in range(kvdp):  # every bank is filled with something else
            feeding.allocate(2, prompts=[LENGTH]).feed_until(2, LENGTH)
            others.append(feeding.sequences.pop(2))
        for other in others:
            feeding.cache.free(other)
        feeding.allocate(1, prompts=[ids[1][:23]])
        cached.append(feeding.sequences[1].cached)
        feeding.feed_until(1, 23)
        return cached, sum(stats.evictions for stats in feeding.cache.stats()) > 0

    blocks = LENGTH // cp // BLOCK_SIZE
    expected = [20 if cp == 1 else 16, spare * cp * BLOCK_SIZE]
    assert run({}, sharding, program, num_blocks=blocks + spare) == (expected, True)


@every_other
def test_parallel_samples_diverge(kind, sharding, found):
    """Two continuations of one prompt, by a fork: what one writes the other does not see."""

    def program(feeding, ids):
        feeding.allocate(0, prompts=[ids[0][:21]]).feed_until(0, 21)
        feeding.sequences[1] = feeding.cache.fork(feeding.sequences[0])
        assert feeding.sequences[1].length == 21
        feeding.feed([0, 1])
        feeding.feed([1], 6)
        feeding.feed([0], 2)
        feeding.feed([1, 0], 3)
        feeding.free(0)
        feeding.feed([1], 8)
        return fed(feeding.outputs, 1)

    assert run(kind, sharding, program) == list(range(21, 39))


def test_a_prompt_goes_where_its_prefix_is_unless_no_row_is_free_there():
    def program(feeding, ids):
        feeding.allocate(2, prompts=[ids[2][:9]]).feed_until(2, 9)  # bank 0
        feeding.allocate(0, prompts=[ids[0][:25]]).feed_until(0, 25)  # bank 1, which has more rows free
        feeding.allocate(1, prompts=[ids[1][:23]]).feed_until(1, 23)
        banks = [feeding.sequences[i].kvdp_rank for i in range(3)]
        twin = feeding.cache.allocate(ids[1][:23])
        return banks, feeding.sequences[1].cached, twin.kvdp_rank, twin.cached

    assert run({}, (1, 2, 1, 1), program, batch=4) == ([1, 1, 0], 20, 0, 0)


def test_a_full_cache_says_so_on_every_rank_and_goes_on():
    def program(feeding, ids):
        feeding.allocate(0, prompts=[ids[0][:25]]).feed_until(0, 25)
        with pytest.raises(am.decode.CacheFull):
            feeding.allocate(2, prompts=[LENGTH])
        feeding.allocate(1, prompts=[ids[1][:23]]).feed_until(1, 23)
        return feeding.sequences[1].cached

    assert run({}, (1, 1, 2, 1), program, num_blocks=6) == 16
