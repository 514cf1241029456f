"""A softcap and ALiBi slopes over ranks: every position against float64, in decode steps and prefill.

Rows of x that are not in a step, one of them of a sequence without tokens, and blocks that no token was written to hold
NaN.
"""

from dataclasses import replace

import pytest
import torch

import attnmesh as am
from attnmesh.testing.block import BlockRunner, poisoned_cache, random_block, reference_block, shard_block
from helpers.blocks import assert_outputs_close, exact_weights, fed_lengths, random_sequences
from helpers.cases import sweep

LENGTH = 40
STEPS = [((0,), 1), ((0, 1), 3), ((1, 2), 8), ((0, 2), 12), ((0, 1, 2), 2), ((2,), 1)]  # three decode steps, a prefill
FIRST = [((0, 1), 11), *STEPS[2:]]  # a prefill of the first tokens
ALIBI, SOFTCAP = {"alibi": True}, {"softcap": 0.8, "scale": 1.5}


def fed(sharding, config, weights, x, steps, storage=None, **options):
    """The outputs of every rank for three sequences and one without tokens, in a batch of five."""

    def rank(comm):
        block = shard_block(config, weights, sharding, comm, **options)
        runner = BlockRunner(block, poisoned_cache(block, 5, LENGTH, storage=storage), x).allocate(3, 0, 1, 2)
        for which, tokens in steps:
            runner.feed(which, tokens)
        return runner.outputs

    return am.run_virtual(sharding.ranks, rank)


def assert_exact(found, truth, steps, bound=1e-5):
    for seen in found:
        assert_outputs_close(seen, truth, bound)
        assert fed_lengths(seen) == [sum(n for which, n in steps if i in which) for i in range(4)]


@pytest.mark.parametrize(
    ("sharding", "kind", "steps"),
    [
        ((1, 1, 3, 2), ALIBI | {"window": 5}, STEPS),
        sweep((1, 1, 1, 1), ALIBI | SOFTCAP | {"window": 4}, STEPS),
        ((1, 3, 1, 1), ALIBI | SOFTCAP | {"window": 5}, FIRST),
        sweep((2, 1, 1, 1), ALIBI | {"sinks": True}, FIRST),
        sweep((2, 1, 2, 4), ALIBI | SOFTCAP | {"sinks": True}, FIRST),
    ],
    ids=["CP", "one rank", "KVDP", "TP", "TP and CP"],
)
def test_every_position_in_every_kind_of_sharding(sharding, kind, steps, device):
    config, weights = random_block(8, 2, **kind, device=device)
    x = random_sequences(4, LENGTH, config).to(device)
    backend = "reference" if "softcap" in kind and device.type == "cpu" else "auto"  # the interpreter is slow
    found = fed(am.DecodeSharding(*sharding), config, weights, x, steps, backend=backend)
    assert_exact(found, reference_block(config, weights, x), steps)


def test_quantized_storage_with_replicated_queries():
    config, weights = random_block(8, 2, 16, **ALIBI, **SOFTCAP, rope=None, out=False)
    weights, x = exact_weights(weights, 4, LENGTH)  # projections without rounding: ranks quantize the same numbers
    weights = am.decode.AttentionWeights(
        weights.qkv.double(), weights.qkv_bias.double(), alibi_slopes=weights.alibi_slopes.double()
    )
    exchange = am.decode.Exchange("all_gather", "reduce_scatter", replicate_q=True)
    found = fed(am.DecodeSharding(1, 2, 2, 3), config, weights, x.double(), STEPS, "int8", exchange=exchange)
    assert_exact([torch.cat(found, 2)], reference_block(config, weights, x, storage="int8"), STEPS, 1e-6)


def test_other_slopes_and_a_backend_without_softcap_are_refused_on_every_rank():
    config, weights = random_block(8, 2, **ALIBI, **SOFTCAP)
    x = random_sequences(4, LENGTH, config)

    def rank(comm):
        own = replace(weights, alibi_slopes=weights.alibi_slopes + comm.rank)
        with pytest.raises(ValueError, match="ranks disagree: checksum of alibi_slopes"):
            shard_block(config, own, am.DecodeSharding(cp=2), comm)
        block = shard_block(config, weights, am.DecodeSharding(cp=2), comm, backend="cpu")
        runner = BlockRunner(block, poisoned_cache(block, 5, LENGTH), x).allocate(0)
        with pytest.raises(ValueError, match=r"backend='cpu' cannot serve this call: .*no softcap"):
            runner.feed([0])
        return True

    assert all(am.run_virtual(2, rank))
