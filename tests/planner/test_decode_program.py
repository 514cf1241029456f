"""Rounds of token generation: bytes held against the plan and against blocks that run, times against measured ones."""

from itertools import product

import numpy as np
import pytest

import attnmesh as am
from attnmesh.plan.decode import DecodeShape, DecodeSharding
from attnmesh.planner.auto import pick_combine
from attnmesh.planner.catalog import cluster as named_cluster
from attnmesh.planner.cost import bytes_sent, cost, messages_sent
from attnmesh.planner.decode import (
    ATTENTION_LAUNCHES,
    EXCHANGE_LAUNCHES,
    MERGE_LAUNCHES,
    DecodeLayer,
    LinearLayers,
    decode_program,
)
from attnmesh.planner.models import AttentionParameters
from attnmesh.testing.block import BlockRunner, poisoned_cache, random_block, shard_block
from helpers.blocks import random_sequences
from helpers.cases import first, in_turn, sweep
from helpers.clusters import cluster, link

CASES = [
    (DecodeSharding(1), (4, 2), 3),
    (DecodeSharding(2), (8, 2), 2),
    (DecodeSharding(16), (24, 8), 2),  # TP beyond the kv heads, query heads that do not divide
    (DecodeSharding(2, 3), (12, 2), 5),  # uneven sequences
    (DecodeSharding(3, 1, 2), (9, 3), 2),  # uneven query heads
    (DecodeSharding(2, 2, 3), (14, 2), 4),  # 7 query heads over 6 ranks
    (DecodeSharding(1, 4, 2), (9, 1), 3),  # fewer sequences than KVDP ranks
    (DecodeSharding(1, 1, 5), (11, 1), 1),
]
each_case = pytest.mark.parametrize(("sharding", "heads", "batch"), CASES, ids=str)
FREE = cluster().intra_node
SLOW_TO_START = link(latency=1e-6, message=1e-3, bandwidth=1e9)


def layer_of(heads: tuple[int, int], batch: int, hidden: int = 48, tokens: int = 2, **more) -> DecodeLayer:
    return DecodeLayer(DecodeShape(batch, tokens, *heads, 5, hidden), cached=20.0, context=64, **more)


def exchanged(sharding: DecodeSharding, layer: DecodeLayer, over=FREE) -> dict[str, np.ndarray]:
    """Bytes that every rank sends, by exchange; those of a sum together."""
    found: dict[str, np.ndarray] = {}
    for part in decode_program(sharding, layer, over).rounds():
        assert set(part.waits) == set(part.starts)  # a chain: what is started is waited for
        for name, messages in part.starts.items():
            sent = found.setdefault(name.split(",")[0], np.zeros(sharding.ranks, dtype=np.int64))
            np.add.at(sent, messages.source, messages.nbytes)
    return found


# Bytes.


@pytest.mark.parametrize(
    ("sharding", "heads", "batch", "over"),
    [(*case, over) for case, over in in_turn(CASES, [FREE, SLOW_TO_START])],
)
def test_every_rank_sends_what_the_plan_says(sharding, heads, batch, over):
    layer = layer_of(heads, batch)
    found = exchanged(sharding, layer, over)
    combine = pick_combine(sharding, layer.shape, over)
    for rank in range(sharding.ranks):
        plan = bytes_sent(sharding, layer.shape, rank, combine=combine)
        for name in ("kvdp in", "cp in", "cp lse", "cp out", "kvdp out"):
            assert (found[name][rank] if name in found else 0) == plan[name], name


@each_case
def test_a_sum_of_all_ranks_is_what_the_plan_says_where_it_divides_and_as_much_in_all_where_not(sharding, heads, batch):
    for hidden in (720, 7):
        layer = layer_of(heads, batch, hidden)
        plan = [bytes_sent(sharding, layer.shape, rank)["projection"] for rank in range(sharding.ranks)]
        found = exchanged(sharding, layer).get("all-reduce of projections", np.zeros(1, dtype=np.int64))
        whole = layer.rows * hidden * 2
        assert found.sum() == 2 * (sharding.ranks - 1) * whole
        if whole % sharding.ranks == 0:
            assert found.tolist() == plan


@pytest.mark.parametrize(
    ("sharding", "heads", "batch", "combine"),
    [(*case, combine) for case, combine in in_turn(CASES, ["reduce_scatter", "all_to_all"])],
)
def test_messages_are_each_peers_own_part(sharding, heads, batch, combine):
    """Heads and sequences handed over one by one."""
    shape = layer_of(heads, batch).shape
    row = shape.tokens * shape.head_dim * shape.itemsize
    for rank in range(sharding.ranks):
        sent = messages_sent(sharding, shape, rank, combine=combine)
        mine = [*product(sharding.q_heads(rank, heads[0]), range(batch))]
        for peer, nbytes in sent["kvdp in"].items():
            assert nbytes == row * sum(sequence in sharding.sequences(peer, batch) for _, sequence in mine)
        for peer, nbytes in sent["kvdp out"].items():
            theirs = product(sharding.q_heads(peer, heads[0]), sharding.sequences(rank, batch))
            assert nbytes == row * len([*theirs])
        plan = bytes_sent(sharding, shape, rank, combine=combine)
        assert {name: sum(parts.values()) for name, parts in sent.items()} == {
            name: nbytes for name, nbytes in plan.items() if name != "projection"
        }


@pytest.mark.parametrize(
    ("degrees", "heads", "batch"),
    [((2, 1, 1), (8, 2), 3), ((1, 2, 2), (9, 3), 3), sweep((2, 2, 1), (8, 2), 5), sweep((3, 1, 2), (9, 3), 1)],
    ids=str,
)
def test_blocks_that_run_send_these_bytes(degrees, heads, batch):
    """Query heads and sequences are uneven in some; ranks are threads that count what they send."""
    config, weights = random_block(*heads, sinks=True, window=6)
    sharding = am.DecodeSharding(*degrees)
    x = random_sequences(batch, 7, config)

    def rank(comm):
        block = shard_block(config, weights, sharding, comm)
        feeding = BlockRunner(block, poisoned_cache(block, batch, 7), x)
        feeding.allocate(*range(batch)).feed(range(batch), 6)
        sent = block._ranks.all_ranks.traffic
        sent.reset()
        feeding.feed(range(batch), 1)
        return sum(nbytes for _, nbytes in sent.by_op.values())

    shape = DecodeShape(batch, 1, *heads, config.head_dim, config.hidden, itemsize=4)
    counted = sum(exchanged(sharding, DecodeLayer(shape, 1.0, 6)).values())
    ran = np.array(am.run_virtual(sharding.ranks, rank))
    # A sum's slices are a byte or two apart where ranks do not divide it; the library counts their mean.
    assert np.abs(ran - counted).max() <= 2 * sharding.ranks
    whole = batch * config.hidden * 4
    if whole % sharding.ranks == 0:
        assert ran.tolist() == counted.tolist()


# Kernels.


def test_a_rank_reads_its_own_heads_sequences_and_positions():
    """14 query heads, 2 kv heads: TP2; 4 sequences: KVDP2; 64 positions: CP3, 22 on the first and 21 on the others."""
    sharding, layer = DecodeSharding(2, 2, 3), layer_of((14, 2), 4)
    kernels = layer.attention(sharding)
    positions = [22, 22, 21, 21, 21, 21] * 2
    assert kernels.bytes_read.tolist() == [2 * n * 20.0 for n in positions]
    assert kernels.size.tolist() == [2 * n * 7 * 2 * 5 * 4.0 for n in positions]


def test_weights_are_divided_but_those_of_kv_heads_which_are_copied():
    linear = LinearLayers(AttentionParameters(120, 40, 60), 600, 300.0, nbytes=2.0, mlp_nbytes=0.5)
    layer = layer_of((12, 2), 3, linear=linear)
    for sharding, part in ((DecodeSharding(2), 0.5), (DecodeSharding(2, 3), 0.5), (DecodeSharding(1, 3), 1.0)):
        into, out, mlp = layer.qkv_projection(sharding), layer.out_projection(sharding), layer.mlp(sharding)
        ranks = sharding.ranks
        assert into.bytes_read.tolist() == [2 * (120 / ranks + 40 * part)] * ranks
        assert into.size.tolist() == [2 * 6 * (120 / ranks + 40 * part)] * ranks  # 3 sequences, 2 tokens
        assert out.bytes_read.tolist() == [2 * 60 / ranks] * ranks
        assert (mlp.bytes_read.tolist(), mlp.size.tolist()) == ([300 / ranks] * ranks, [2 * 6 * 300 / ranks] * ranks)


def test_small_kernels_are_launches_around_attention_and_exchanges():
    machine = cluster(flops=1e300, launch=1.0)
    for sharding, launches in (
        (DecodeSharding(2), ATTENTION_LAUNCHES),
        (DecodeSharding(1, 2), ATTENTION_LAUNCHES + 2 * EXCHANGE_LAUNCHES),
        (DecodeSharding(1, 1, 2), ATTENTION_LAUNCHES + 2 * EXCHANGE_LAUNCHES + MERGE_LAUNCHES),
        (DecodeSharding(1, 2, 2), ATTENTION_LAUNCHES + 4 * EXCHANGE_LAUNCHES + MERGE_LAUNCHES),
    ):
        found = cost(decode_program(sharding, layer_of((8, 2), 4), machine.intra_node), machine)
        assert found.computed == launches + 1  # and attention


def test_a_layer_without_an_mlp_has_one_sum_and_one_with_it_two():
    for linear, sums in ((LinearLayers(), 1), (LinearLayers(mlp=8, mlp_used=8.0), 2)):
        found = exchanged(DecodeSharding(2), layer_of((8, 2), 4, linear=linear))
        assert [name for name in found if name.startswith("all-reduce")] == [
            "all-reduce of projections",
            "all-reduce of MLPs",
        ][:sums]


# docs/benchmarks.md, "Token generation over 64 ranks": kernels of a whole step of a layer, us, 5 of them the clock's.
WAYS = [DecodeSharding(64), *(DecodeSharding(8, kvdp, 8 // kvdp) for kvdp in (8, 4, 2, 1))]
MEASURED = {
    (32, 1): (33, 35, 38, 38, 37),
    (32, 8): (46, 35, 42, 43, 40),
    (32, 64): (154, 53, 58, 59, 58),
    (128, 1): (41, 42, 44, 42, 39),
    (128, 8): (92, 43, 49, 51, 47),
    (128, 64): (508, 99, 104, 106, 104),
    (128, 512): (3788, 591, 527, 529, 525),
}


@pytest.mark.parametrize(("context", "batch"), first(3, MEASURED), ids=str)
def test_kernels_take_what_was_measured_on_the_h200(context, batch):
    """Within 20%. Curves of attention are from the same table; products and small kernels are not."""
    h200 = named_cluster("h200")
    shape = DecodeShape(batch, 1, 64, 8, head_dim=64, hidden=2880)
    weights = LinearLayers(AttentionParameters(2880 * 4096, 2880 * 1024, 2880 * 4096))
    layer = DecodeLayer(shape, cached=256.0, context=1024 * context, linear=weights)
    for way, measured in zip(WAYS, MEASURED[context, batch], strict=True):
        computed = cost(decode_program(way, layer, h200.intra_node), h200).computed
        assert computed == pytest.approx((measured - 5) * 1e-6, rel=0.2), way


def test_many_heads_that_share_a_narrow_cache_are_held_up_by_operations():
    """128 heads over 576 numbers a position are more operations a byte than the H200 has; 8 heads are not."""
    h200 = named_cluster("h200")
    seconds = {
        heads: cost(
            decode_program(
                DecodeSharding(1), DecodeLayer(DecodeShape(8, 2, heads, 1, 576, 64), 1152.0, 1 << 20), h200.intra_node
            ),
            h200,
        ).seconds
        for heads in (1, 8, 128)
    }
    assert seconds[1] == pytest.approx(seconds[8], rel=0.01)
    assert seconds[128] > 1.5 * seconds[8]


def test_heads_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="tp=3, kv_heads=2"):
        decode_program(DecodeSharding(3), layer_of((8, 2), 1), FREE)
