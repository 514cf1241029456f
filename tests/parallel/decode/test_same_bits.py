"""With fixed splits the bits of attention depend on nothing but the sequence: not on CP, KVDP or the batch.

Projections are matrix products, whose order of sums is the BLAS's. Here they are exact, so that what attention is given
has the same bits for any number of ranks and rows.
"""

from functools import cache

import pytest
import torch

import attnmesh as am
from attnmesh.parallel.decode import core
from attnmesh.testing.block import BlockRunner, poisoned_cache, random_block, reference_block, shard_block
from helpers.blocks import assert_outputs_close, exact_weights, fed_lengths
from helpers.cases import first, in_turn, sweep

SPLIT, LENGTH, SEQUENCES = 8, 40, 3
KINDS = {"plain": {}, "window": {"window": 13}, "sinks": {"sinks": True}, "both": {"window": 5, "sinks": True}}
SCORES = {"slopes": {"alibi": True, "window": 13}, "softcap": {"alibi": True, "softcap": 0.5}}
COUNTS = (1, 8, 3, 1, 5, 2)


@cache
def problem(kind, head_dim=8, heads=(8, 2)):
    """Weights without an output projection, whose sum over ranks would depend on their number, and inputs."""
    config, weights = random_block(*heads, head_dim, 16, out=False, scale=0.1, **(KINDS | SCORES)[kind])
    return config, *exact_weights(weights, SEQUENCES, LENGTH)


def attended(sharding, kind, steps=None, *, head_dim=8, storage=None, block_size=4, split_size=SPLIT, **options):
    """All heads of all positions fed, [SEQUENCES, LENGTH, q, D]."""
    config, weights, x = problem(kind, head_dim)

    def rank(comm):
        block = shard_block(config, weights, sharding, comm, split_size=split_size, **options)
        feeding = BlockRunner(block, poisoned_cache(block, SEQUENCES, LENGTH, block_size, storage=storage), x)
        (steps or together)(feeding)
        return feeding.outputs

    return torch.cat(am.run_virtual(sharding.ranks, rank), 2)


def together(feeding):
    """Three sequences at different positions, all in every step but for the first ones."""
    feeding.allocate(0, 1, 2).feed_until(1, 17).feed_until(2, 6)
    for count in COUNTS:
        feeding.feed([0, 1, 2], count)


def one_after_another(feeding):
    """The same steps, but each sequence by itself, and in other rows."""
    for i, begin in ((2, 6), (0, 0), (1, 17)):
        feeding.allocate(i).feed_until(i, begin)
        for count in COUNTS:
            feeding.feed([i], count)


@cache
def unsharded(kind, **how):
    config, weights, x = problem(kind, how.get("head_dim", 8))
    seen = attended(am.DecodeSharding(), kind, **how)
    assert fed_lengths(seen) == [20, 37, 26]
    if how.get("storage") is None:
        assert_outputs_close(seen, reference_block(config, weights, x))
    return seen


def same(one, other):
    """Equal bits; NaN, where nothing was fed, equals NaN."""
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


SHARDINGS = [
    # tp, kvdp, cp, interleave
    (1, 1, 4, 3 * SPLIT),
    (1, 3, 1, 1),
    (2, 2, 2, SPLIT),
    (1, 1, 2, 2 * SPLIT),
    (1, 1, 8, SPLIT),
]


@pytest.mark.parametrize(
    ("kind", "sharding"),
    first(3, [*(("both", sharding) for sharding in SHARDINGS), *in_turn(KINDS, SHARDINGS)]),
    ids=str,
)
def test_ranks_do_not_show(kind, sharding):
    assert same(attended(am.DecodeSharding(*sharding), kind), unsharded(kind))


@pytest.mark.parametrize(("kind", "backend"), [("slopes", "cpu"), sweep("softcap", "reference")])
def test_ranks_do_not_show_with_other_scores(kind, backend):
    found = attended(am.DecodeSharding(1, 2, 2, 2 * SPLIT), kind, backend=backend)
    assert same(found, unsharded(kind, backend=backend))


@pytest.mark.parametrize("storage", ["int8", *(sweep(storage) for storage in ("fp8", "bfp8"))])
def test_ranks_do_not_show_with_fewer_bits(storage):
    how = {"storage": storage, "head_dim": 16}
    whole = unsharded("both", **how)
    assert not same(whole, unsharded("both", head_dim=16))
    for sharding in ((1, 1, 4, SPLIT), (1, 2, 2, 2 * SPLIT)):
        assert same(attended(am.DecodeSharding(*sharding), "both", **how), whole)


@pytest.mark.parametrize("sharding", [(1, 1, 1, 1), sweep((1, 2, 2, SPLIT)), sweep((1, 1, 4, SPLIT))], ids=str)
def test_the_batch_does_not_show(sharding):
    assert same(attended(am.DecodeSharding(*sharding), "both", one_after_another), unsharded("both"))


def test_block_sizes_and_collectives_do_not_show():
    sharding = am.DecodeSharding(kvdp=2, cp=2, interleave=SPLIT)
    for exchange in (
        am.decode.Exchange("all_gather"),
        am.decode.Exchange(replicate_q=True),
        am.decode.Exchange(cp="all_to_all"),
    ):
        block_size = 2 if exchange.replicate_q else 8
        assert same(attended(sharding, "both", exchange=exchange, block_size=block_size), unsharded("both"))


def test_without_fixed_splits_ranks_do_show():
    whole = attended(am.DecodeSharding(), "plain", split_size=None)
    apart = attended(am.DecodeSharding(cp=4, interleave=SPLIT), "plain", split_size=None)
    assert not same(apart, whole)
    torch.testing.assert_close(apart, whole, equal_nan=True)


def test_another_split_size_does_show():
    assert not same(attended(am.DecodeSharding(), "plain", split_size=4), unsharded("plain"))


def last_step(sharding, backend):
    """One step by a backend, after prompts that were written by the CPU's: the interpreter is slow."""
    config, weights, x = problem("both", 16, heads=(4, 1))

    def rank(comm):
        cpu, kernels = (
            shard_block(config, weights, sharding, comm, split_size=SPLIT, backend=name) for name in ("cpu", backend)
        )
        feeding = BlockRunner(cpu, poisoned_cache(cpu, 2, LENGTH), x).allocate(0, 1).feed_until(0, 6).feed_until(1, 19)
        feeding.block = kernels
        return feeding.feed([0, 1], 2)

    return torch.cat(am.run_virtual(sharding.ranks, rank), 2)


@pytest.mark.parametrize("sharding", [(1, 1, 2, SPLIT), sweep((1, 2, 2, SPLIT))], ids=str)
def test_ranks_do_not_show_in_the_kernels_results(sharding):
    """Triton's, in the interpreter where there is no GPU."""
    pytest.importorskip("triton")
    whole = last_step(am.DecodeSharding(), "triton")
    assert not torch.equal(whole, last_step(am.DecodeSharding(), "cpu"))
    assert torch.equal(last_step(am.DecodeSharding(*sharding), "triton"), whole)


def test_more_pieces_than_a_kernel_takes_at_once(monkeypatch):
    whole = unsharded("both")
    monkeypatch.setattr(core, "MAX_SEQUENCES", 4)
    assert same(attended(am.DecodeSharding(cp=2, interleave=SPLIT), "both"), whole)
