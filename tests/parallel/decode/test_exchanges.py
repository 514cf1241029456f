"""Every way to exchange gives one result, and each rank sends the bytes that the plan says."""

from itertools import product

import pytest
import torch

import attnmesh as am
from attnmesh.plan.decode import COMBINES, KVDP_EXCHANGES, DecodeShape
from attnmesh.planner.cost import bytes_sent
from attnmesh.testing.block import BlockRunner, poisoned_cache, random_block, reference_block, shard_block
from helpers.blocks import assert_outputs_close, random_sequences

WAYS = [am.decode.Exchange(*way) for way in product(KVDP_EXCHANGES, COMBINES, (False, True))]
CASES = [
    # heads, sharding, batch, tokens
    ((8, 2), (1, 2, 2), 4, 1),
    ((9, 3), (1, 2, 2), 3, 5),
    ((9, 3), (3, 1, 2), 1, 8),
    ((7, 7), (1, 3, 2), 2, 2),
    ((8, 2), (2, 4, 1), 5, 3),
    ((11, 1), (1, 1, 5), 2, 1),
]


def test_exchanges_are_exact_and_send_the_planned_bytes():
    for at, case in enumerate(CASES):
        check_exchanges(case, WAYS[at :: len(CASES)])  # all combinations, each in a case


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_exchange_is_exact_and_sends_the_planned_bytes(case):
    check_exchanges(case, WAYS)


def check_exchanges(case, ways):
    heads, degrees, batch, tokens = case
    config, weights = random_block(*heads, sinks=True, window=6)
    sharding = am.DecodeSharding(*degrees, interleave=2)
    x = random_sequences(batch, 6 + tokens, config)
    truth = reference_block(config, weights, x)
    shape = DecodeShape(batch, tokens, *heads, config.head_dim, config.hidden, itemsize=4)

    def rank(comm):
        found = []
        for way in ways:
            block = shard_block(config, weights, sharding, comm, exchange=way)
            feeding = BlockRunner(block, poisoned_cache(block, batch, 6 + tokens), x)
            feeding.allocate(*range(batch)).feed(range(batch), 6)
            sent = traffic_of(block)
            for part in sent.values():
                part.reset()
            feeding.feed(range(batch), tokens)
            found.append((feeding.outputs, {name: dict(part.by_op) for name, part in sent.items()}))
        return found

    for me, found in enumerate(am.run_virtual(sharding.ranks, rank)):
        for way, (seen, verbs) in zip(ways, found, strict=True):
            assert_outputs_close(seen, truth)
            plan = bytes_sent(
                sharding, shape, me, kvdp=way.kvdp, combine=way.cp, replicate_q=way.replicate_q
            )  # fmt: skip
            assert_sent(verbs, plan, way, sharding)


def traffic_of(block):
    """What is counted by everyone, and by the peers that trade, unless they are everyone."""
    ranks = block._ranks
    return {"everyone": ranks.all_ranks.traffic, "kvdp": ranks.kvdp.traffic, "cp": ranks.cp.traffic}


def assert_sent(verbs, plan, way, sharding):
    """Bytes by verb: KVDP's and CP's parts count for themselves, and as an exchange of everyone."""
    total = sum(plan.values())
    in_parts = total - plan["projection"]
    if sharding.ranks in (sharding.kvdp, sharding.cp):
        assert sum(nbytes for _, nbytes in verbs["everyone"].values()) == total
        return
    assert verbs["everyone"].get("all_reduce", (0, 0)) == (1, plan["projection"])
    assert verbs["everyone"].get("exchange", (0, 0))[1] == in_parts
    assert set(verbs["everyone"]) <= {"all_reduce", "exchange"}
    traded = {way.kvdp: (2, plan["kvdp in"] + plan["kvdp out"])} if sharding.kvdp > 1 else {}
    assert verbs["kvdp"] == traded
    combined = {}
    for verb, nbytes in (
        ("all_gather", None if way.replicate_q else plan["cp in"]),
        ("all_gather", None if way.cp == "all_to_all" else plan["cp lse"]),
        (way.cp, plan["cp out"]),
    ):
        if nbytes is not None and sharding.cp > 1:
            count, before = combined.get(verb, (0, 0))
            combined[verb] = (count + 1, before + nbytes)
    assert verbs["cp"] == combined


@pytest.mark.parametrize("tokens", [1, 8])
def test_auto_combines_as_the_plan_picks(tokens):
    config, weights = random_block()
    sharding = am.DecodeSharding(cp=4)
    x = random_sequences(2, 9, config)
    shape = DecodeShape(2, tokens, 8, 2, 8, config.hidden, itemsize=4)

    def rank(comm, way):
        block = shard_block(config, weights, sharding, comm, exchange=am.decode.Exchange(cp=way))
        out = BlockRunner(block, poisoned_cache(block, 2, 9), x).allocate(0, 1).feed([0, 1], tokens)
        return out, dict(comm.traffic.by_op)

    picked = am.decode.Exchange().combine(sharding, shape, "cpu")
    by_itself = am.run_virtual(4, lambda comm: rank(comm, "auto"))
    by_name = am.run_virtual(4, lambda comm: rank(comm, picked))
    for (out, sent), (expected, due) in zip(by_itself, by_name, strict=True):
        assert torch.equal(out, expected)
        assert sent == due


def test_results_are_the_same_bits_on_every_rank():
    config, weights = random_block(8, 4)
    sharding = am.DecodeSharding(tp=2, kvdp=2, cp=2)
    x = random_sequences(3, 9, config)

    def rank(comm):
        block = shard_block(config, weights, sharding, comm)
        return BlockRunner(block, poisoned_cache(block, 3, 9), x).allocate(0, 1, 2).feed([0, 2], 7)

    first, *others = am.run_virtual(8, rank)
    assert not first.isnan().any()
    assert all(torch.equal(first, other) for other in others)


def test_bad_exchanges_are_refused():
    for bad, words in (
        ({"replicate_q": 1}, "replicate_q must be True or False, got 1"),
        ({"kvdp": "ring"}, "kvdp must be one of"),
        ({"cp": None}, "cp must be one of"),
    ):
        with pytest.raises(ValueError, match=words):
            am.decode.Exchange(**bad)
    shape = DecodeShape(batch=1, tokens=1, q_heads=2, kv_heads=1, head_dim=8, hidden=16)
    for bad in (("TP2", shape, "cpu"), (am.DecodeSharding(), 3, "cpu"), (am.DecodeSharding(), shape, "nowhere")):
        with pytest.raises(ValueError, match=r"must be"):
            am.decode.Exchange(cp="all_reduce").combine(*bad)
