"""Bytes of a decode step, held against ranks that hand over query heads one by one."""

from dataclasses import replace
from itertools import product

import pytest

from attnmesh.plan.decode import COMBINES, KVDP_EXCHANGES, DecodeShape, DecodeSharding
from attnmesh.planner.auto import combine_seconds, pick_combine
from attnmesh.planner.catalog import default_cluster
from attnmesh.planner.cost import Copies, bytes_sent, cache_bytes, weight_copies
from helpers.cases import in_turn
from helpers.clusters import link

T, D, HIDDEN = 2, 5, 24
CASES = [
    (DecodeSharding(1, 1, 1), (4, 2), 3),
    (DecodeSharding(2, 3, 2), (24, 2), 5),  # uneven sequences
    (DecodeSharding(3, 1, 2), (9, 3), 2),  # uneven query heads
    (DecodeSharding(16), (24, 8), 2),  # TP beyond the kv heads
    (DecodeSharding(2, 2, 3), (14, 2), 4),  # 7 query heads over 6 ranks
    (DecodeSharding(1, 4, 2), (9, 1), 3),  # fewer sequences than KVDP ranks
    (DecodeSharding(2, 1, 4), (16, 4), 1),
    (DecodeSharding(2, 8, 1), (32, 2), 16),
]
each_case = pytest.mark.parametrize(("sharding", "heads", "batch"), CASES, ids=str)


def shape_of(heads: tuple[int, int], batch: int, itemsize: int = 2) -> DecodeShape:
    return DecodeShape(batch, T, *heads, head_dim=D, hidden=HIDDEN, itemsize=itemsize)


class Step:
    """A step in which (query head, sequence) pairs are put into messages. What each rank has, and what it has sent."""

    def __init__(self, sharding: DecodeSharding, heads: tuple[int, int], batch: int, replicate_q: bool) -> None:
        self.sharding, self.q_heads, self.batch = sharding, heads[0], batch
        self.ranks = range(sharding.ranks)
        self.mine = [set(sharding.q_heads(rank, self.q_heads)) for rank in self.ranks]
        self.group = [set(sharding.group_heads(rank, self.q_heads)) for rank in self.ranks]
        self.held = [set(sharding.sequences(rank, batch)) for rank in self.ranks]
        self.has = [set(product(heads, range(batch))) for heads in self.mine]
        if replicate_q:
            self.has = [set().union(*(self.has[peer] for peer in sharding.cp_peers(rank))) for rank in self.ranks]

    def hand_over(self, peers_of, wants) -> list[int]:
        """Everyone sends each peer what `wants(peer)` accepts; returns how many pairs each has sent."""
        messages = [
            (rank, peer, {pair for pair in self.has[rank] if wants(peer, *pair)})
            for rank in self.ranks
            for peer in peers_of(rank)
            if peer != rank
        ]
        for _, peer, pairs in messages:
            self.has[peer] |= pairs
        return [sum(len(pairs) for sender, _, pairs in messages if sender == rank) for rank in self.ranks]

    def keep(self, wants) -> None:
        self.has = [{pair for pair in pairs if wants(rank, *pair)} for rank, pairs in enumerate(self.has)]


@pytest.mark.parametrize(
    ("sharding", "heads", "batch", "kvdp", "replicate_q"),
    [(*case, *how) for case, *how in in_turn(CASES, KVDP_EXCHANGES, [False, False, True])],
    ids=str,
)
def test_bytes_are_those_of_the_pairs_that_travel(sharding, heads, batch, kvdp, replicate_q):
    shape = shape_of(heads, batch)
    step = Step(sharding, heads, batch, replicate_q)
    all_of_it = kvdp == "all_gather"

    def held_here(rank, head, sequence):
        return sequence in step.held[rank]

    def wanted_back(rank, head, sequence):
        return head in step.mine[rank]

    def everything(rank, head, sequence):
        return True

    found = {"kvdp in": step.hand_over(sharding.kvdp_peers, everything if all_of_it else held_here)}
    step.keep(held_here)
    found["cp in"] = [0] * sharding.ranks if replicate_q else step.hand_over(sharding.cp_peers, held_here)
    for rank in step.ranks:  # everything is there that it attends with, and nothing else
        assert step.has[rank] == set(product(step.group[rank], step.held[rank]))

    cp_heads = [set().union(*(step.mine[peer] for peer in sharding.kvdp_peers(rank))) for rank in step.ranks]
    combined = step.hand_over(sharding.cp_peers, lambda rank, head, sequence: head in cp_heads[rank])
    step.keep(lambda rank, head, sequence: head in cp_heads[rank])
    found["kvdp out"] = step.hand_over(sharding.kvdp_peers, everything if all_of_it else wanted_back)
    step.keep(wanted_back)
    for rank in step.ranks:  # the heads that it projects, of all sequences
        assert step.has[rank] == set(product(step.mine[rank], range(batch)))

    for rank in step.ranks:
        sent = bytes_sent(sharding, shape, rank, kvdp=kvdp, replicate_q=replicate_q)
        for name, pairs in found.items():
            assert sent[name] == pairs[rank] * T * D * 2, name
        assert sent["cp out"] == combined[rank] * T * (D + 1) * 4
        assert sent["cp lse"] == 0


@each_case
def test_summing_ranks_send_every_lse_to_all_and_every_result_to_one(sharding, heads, batch):
    shape = shape_of(heads, batch)
    for rank in range(sharding.ranks):
        peers = [peer for peer in sharding.cp_peers(rank) if peer != rank]
        pairs = [*product(sharding.group_heads(rank, heads[0]), sharding.sequences(rank, batch))]
        lse = sum(T * 4 for _ in peers for _ in pairs)
        out = sum(T * D * 4 for peer in peers for head, _ in pairs if head in sharding.cp_heads(peer, heads[0]))
        scattered = bytes_sent(sharding, shape, rank, combine="reduce_scatter")
        assert (scattered["cp lse"], scattered["cp out"]) == (lse, out)
        reduced = bytes_sent(sharding, shape, rank, combine="all_reduce")
        whole = len(pairs) * T * D * 4
        assert (reduced["cp lse"], reduced["cp out"]) == (lse, round(2 * (sharding.cp - 1) / sharding.cp * whole))
        other = {name: nbytes for name, nbytes in scattered.items() if name not in ("cp lse", "cp out")}
        assert other == {name: reduced[name] for name in other}


def test_an_all_reduce_is_a_scatter_of_sums_and_a_gather():
    """Each rank sends all slices but its own, and then its own to all others."""
    sharding, shape = DecodeSharding(1, 1, 4), DecodeShape(1, 1, 4, 1, head_dim=8, hidden=32, itemsize=2)
    slice_of_out, slice_of_x = 4 * 8 * 4 // 4, 32 * 2 // 4
    for rank in range(4):
        sent = bytes_sent(sharding, shape, rank, combine="all_reduce")
        assert sent["cp out"] == 3 * slice_of_out + 3 * slice_of_out
        assert sent["projection"] == 3 * slice_of_x + 3 * slice_of_x


@each_case
def test_the_projection_is_summed_over_all_ranks_whatever_they_are_called(sharding, heads, batch):
    whole = batch * T * HIDDEN * 4
    for rank in range(sharding.ranks):
        sent = bytes_sent(sharding, shape_of(heads, batch, itemsize=4), rank)["projection"]
        assert sent == round(2 * (sharding.ranks - 1) / sharding.ranks * whole)


def test_bytes_of_the_documents_example():
    """64 query heads, 8 kv heads, 64 ranks; B=8, D=64: a query head of a sequence is 128 bytes."""
    shape = DecodeShape(8, 1, 64, 8, head_dim=64, hidden=2880)
    kvdp = bytes_sent(DecodeSharding(8, kvdp=8), shape, 0)
    assert (kvdp["kvdp in"], kvdp["kvdp out"]) == (7 * 128, 7 * 128)
    gathered = bytes_sent(DecodeSharding(8, kvdp=8), shape, 0, kvdp="all_gather")
    assert (gathered["kvdp in"], gathered["kvdp out"]) == (7 * 8 * 128, 7 * 8 * 128)  # 8 times as much
    cp = bytes_sent(DecodeSharding(8, cp=8), shape, 0)
    assert (cp["cp in"], cp["cp out"]) == (7 * 8 * 128, 7 * 8 * 65 * 4)
    plain = bytes_sent(DecodeSharding(64), shape, 0)
    assert {name for name, nbytes in plain.items() if nbytes} == {"projection"}


# What a rank keeps.


@pytest.mark.parametrize(
    ("sharding", "heads", "batch", "context"),
    [(*case, context) for case, context in in_turn(CASES, [1, 7, 32])],
    ids=str,
)
def test_a_rank_keeps_the_keys_that_it_holds(sharding, heads, batch, context):
    for rank in range(sharding.ranks):
        held = sum(
            100
            for _ in sharding.kv_heads(rank, heads[1])
            for _ in sharding.sequences(rank, batch)
            for position in range(context)
            if sharding.owner(position) == sharding.place(rank).cp
        )
        assert cache_bytes(sharding, shape_of(heads, batch), rank, context, 100) == held


@each_case
def test_weights_are_copied_as_often_as_ranks_hold_their_heads(sharding, heads, batch):
    q_heads, kv_heads = heads
    by_q = [head for rank in range(sharding.ranks) for head in sharding.q_heads(rank, q_heads)]
    by_kv = [head for rank in range(sharding.ranks) for head in sharding.kv_heads(rank, kv_heads)]
    copies = weight_copies(sharding, kv_heads)
    assert {by_q.count(head) for head in range(q_heads)} == {copies.w_q} == {copies.w_out}
    assert {by_kv.count(head) for head in range(kv_heads)} == {copies.w_kv}


def test_queries_projected_by_all_cp_peers_cost_copies_of_their_weight():
    assert weight_copies(DecodeSharding(2, 2, 4), 2, replicate_q=True) == Copies(w_q=4, w_kv=8, w_out=1)


# Which combine.

USUAL = DecodeShape(8, 1, 64, 8, head_dim=128, hidden=8192)
GPU_LINK, CPU_LINK = (default_cluster(device).intra_node for device in ("cuda", "cpu"))
SLOW_TO_START = link(latency=1e-6, message=1e-3, bandwidth=1e9)


def test_one_message_each_is_best_on_usual_links():
    for sharding in (DecodeSharding(8, 1, 8), DecodeSharding(8, 2, 4), DecodeSharding(8, 4, 2), DecodeSharding(64)):
        for shape in (USUAL, replace(USUAL, batch=1), replace(USUAL, batch=512, tokens=8)):
            assert pick_combine(sharding, shape, GPU_LINK) == pick_combine(sharding, shape, CPU_LINK) == "all_to_all"


def test_many_ranks_with_little_to_send_halve_and_double_where_messages_are_slow_to_start():
    wide = DecodeSharding(1, 1, 64)
    assert pick_combine(wide, replace(USUAL, batch=1), SLOW_TO_START) == "reduce_scatter"
    assert pick_combine(wide, replace(USUAL, batch=4096), SLOW_TO_START) == "all_to_all"  # the lse of all weigh more
    assert pick_combine(DecodeSharding(1, 1, 4), USUAL, SLOW_TO_START) == "all_to_all"  # three messages or four


def test_seconds_are_rounds_and_messages_and_bytes():
    """CP4 of 8 heads, one sequence, D=16: 6 heads of other ranks, 4 bytes an element."""
    shape = DecodeShape(1, 1, 8, 8, head_dim=16, hidden=128)
    seconds = combine_seconds(DecodeSharding(1, 1, 4), shape, link(latency=1000.0, message=10.0, bandwidth=4.0))
    assert seconds["all_to_all"] == 1000 + 3 * 10 + 6 * 17
    assert seconds["reduce_scatter"] == 4 * 1000 + 4 * 10 + 3 * 8 + 6 * 16
    assert seconds["all_reduce"] == 6 * 1000 + 6 * 10 + 3 * 8 + 2 * 3 / 4 * 8 * 16


def test_nothing_to_combine_costs_nothing():
    assert set(combine_seconds(DecodeSharding(8, 8), USUAL, GPU_LINK).values()) == {0.0}


@each_case
def test_the_largest_rank_counts(sharding, heads, batch):
    shape = shape_of(heads, batch)
    bytes_only = link(latency=0.0, message=0.0, bandwidth=1.0)
    for combine, seconds in combine_seconds(sharding, shape, bytes_only).items():
        loads = [bytes_sent(sharding, shape, rank, combine=combine) for rank in range(sharding.ranks)]
        assert seconds == max(load["cp lse"] + load["cp out"] for load in loads)


def test_an_all_reduce_costs_more_than_a_reduce_scatter_on_every_link():
    for sharding, heads, batch in CASES:
        for other in (GPU_LINK, CPU_LINK, SLOW_TO_START):
            seconds = combine_seconds(sharding, shape_of(heads, batch), other)
            assert seconds["all_reduce"] >= seconds["reduce_scatter"]
    assert set(seconds) == set(COMBINES)


# What is refused.


@pytest.mark.parametrize("name", ["batch", "tokens", "q_heads", "kv_heads", "head_dim", "hidden", "itemsize"])
def test_a_shape_is_of_positive_integers(name):
    with pytest.raises(ValueError, match=f"{name} must be a positive integer, got 0"):
        replace(USUAL, **{name: 0})


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"kvdp": "ring"}, "kvdp must be one of all_to_all, all_gather, got 'ring'"),
        ({"combine": "tree"}, "combine must be one of all_to_all, reduce_scatter, all_reduce, got 'tree'"),
    ],
)
def test_unknown_ways_to_exchange_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        bytes_sent(DecodeSharding(8, 8), USUAL, 0, **arguments)


def test_heads_and_ranks_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="q_heads=64 for 8 x 16 x 1 = 128 ranks"):
        bytes_sent(DecodeSharding(8, 16), USUAL, 0)
    with pytest.raises(ValueError, match="tp=6, kv_heads=8"):
        cache_bytes(DecodeSharding(6), USUAL, 0, 10, 100)
    with pytest.raises(ValueError, match="context must be a positive integer, got 0"):
        cache_bytes(DecodeSharding(8), USUAL, 0, 0, 100)
