"""Who holds what of a spread KV cache, counted head by head, sequence by sequence, position by position."""

import re
from collections import Counter
from itertools import product

import pytest

from attnmesh.plan.decode import DecodeSharding, Place
from helpers.cases import sweep

MESHES = [DecodeSharding(*sizes) for sizes in product((1, 2, 3, 4, 8, 16), (1, 2, 3, 4), (1, 2, 3, 4))]
HEADS = [(64, 8), (8, 8), (9, 3), (24, 8), (40, 8), (7, 1), (6, 2), (32, 4)]


def fits(sharding: DecodeSharding, q_heads: int, kv_heads: int) -> bool:
    divides = kv_heads % sharding.tp == 0 or sharding.tp % kv_heads == 0
    return divides and sharding.tp * sharding.kvdp * sharding.cp <= q_heads


FITTING = [(sharding, *heads) for sharding in MESHES for heads in HEADS if fits(sharding, *heads)]
every_head_count = pytest.mark.parametrize(("q_heads", "kv_heads"), HEADS)


def fitting(*heads: int) -> list[DecodeSharding]:
    return [sharding for sharding, *others in FITTING if tuple(others) == heads]


def test_there_are_uneven_cases_among_them():
    assert (DecodeSharding(3, 1, 2), 9, 3) in FITTING  # 2 and 1 query heads a rank
    assert (DecodeSharding(16), 24, 8) in FITTING  # 1.5 query heads a rank, two ranks a kv head
    assert (DecodeSharding(16, 2), 40, 8) in FITTING  # 2.5 query heads a TP rank
    assert len(FITTING) > 100


# Ranks.


def test_places_and_ranks_are_the_same_thing():
    for sharding in MESHES:
        places = [Place(*p) for p in product(range(sharding.tp), range(sharding.cp), range(sharding.kvdp))]
        assert [sharding.place(rank) for rank in range(sharding.ranks)] == places  # kvdp runs fastest, then cp, then tp
        assert [sharding.rank(place) for place in places] == list(range(sharding.ranks))


def test_peers_differ_in_one_coordinate_only():
    for sharding in MESHES:
        there = {r: sharding.place(r) for r in range(sharding.ranks)}
        for rank, place in there.items():
            assert sharding.kvdp_peers(rank) == [r for r, p in there.items() if (p.tp, p.cp) == (place.tp, place.cp)]
            assert sharding.cp_peers(rank) == [r for r, p in there.items() if (p.tp, p.kvdp) == (place.tp, place.kvdp)]


@pytest.mark.parametrize(
    ("sizes", "name"),
    [((8, 1, 8), "TP8-CP8"), ((8, 2, 4), "TP8-KVDP2-CP4"), ((8, 8), "TP8-KVDP8"), ((1, 2), "KVDP2"), ((), "TP1")],
)
def test_a_sharding_is_called_by_what_it_divides(sizes, name):
    assert str(DecodeSharding(*sizes)) == name


# Heads.


@every_head_count
def test_query_heads_are_projected_once_each_as_under_plain_tensor_parallelism(q_heads, kv_heads):
    for sharding in fitting(q_heads, kv_heads):
        sharding.check_heads(q_heads, kv_heads)
        projected = [list(sharding.q_heads(rank, q_heads)) for rank in range(sharding.ranks)]
        assert [head for heads in projected for head in heads] == list(range(q_heads))
        plain = DecodeSharding(tp=sharding.ranks)
        assert projected == [list(plain.q_heads(rank, q_heads)) for rank in range(sharding.ranks)]
        assert {len(heads) for heads in projected} <= {q_heads // sharding.ranks, -(-q_heads // sharding.ranks)}


@every_head_count
def test_groups_are_the_heads_of_those_that_trade(q_heads, kv_heads):
    for sharding in fitting(q_heads, kv_heads):
        for rank in range(sharding.ranks):
            traded = [head for peer in sharding.kvdp_peers(rank) for head in sharding.q_heads(peer, q_heads)]
            assert list(sharding.cp_heads(rank, q_heads)) == traded
            gathered = [head for peer in sharding.cp_peers(rank) for head in sharding.cp_heads(peer, q_heads)]
            assert list(sharding.group_heads(rank, q_heads)) == gathered


@every_head_count
def test_a_rank_holds_the_kv_heads_that_its_query_heads_read(q_heads, kv_heads):
    for sharding in fitting(q_heads, kv_heads):
        for rank in range(sharding.ranks):
            read = {head // (q_heads // kv_heads) for head in sharding.group_heads(rank, q_heads)}
            assert set(sharding.kv_heads(rank, kv_heads)) == read


@pytest.mark.parametrize(
    ("q_heads", "kv_heads"),
    [(64, 8), sweep(8, 8), sweep(9, 3), sweep(24, 8), sweep(40, 8), sweep(7, 1), sweep(6, 2), sweep(32, 4)],
)
def test_every_key_is_held_as_often_as_heads_are_copied(q_heads, kv_heads):
    for sharding in fitting(q_heads, kv_heads):
        batch, length = 5, 7
        held = Counter(
            (head, sequence, position)
            for rank in range(sharding.ranks)
            for head in sharding.kv_heads(rank, kv_heads)
            for sequence in sharding.sequences(rank, batch)
            for position in range(length)
            if sharding.owner(position) == sharding.place(rank).cp
        )
        assert len(held) == kv_heads * batch * length
        assert set(held.values()) == {max(1, sharding.tp // kv_heads)}


# Sequences and positions.


@pytest.mark.parametrize("batch", [0, 1, 3, 4, 11])
def test_every_sequence_is_on_one_kvdp_rank_and_on_all_that_differ_otherwise(batch):
    sharding = DecodeSharding(2, 4, 3)
    for rank in range(sharding.ranks):
        held = [list(sharding.sequences(peer, batch)) for peer in sharding.kvdp_peers(rank)]
        assert [sequence for sequences in held for sequence in sequences] == list(range(batch))
        assert max(map(len, held)) - min(map(len, held)) <= 1
        assert {tuple(sharding.sequences(peer, batch)) for peer in sharding.cp_peers(rank)} == {
            tuple(sharding.sequences(rank, batch))
        }


@pytest.mark.parametrize(("cp", "interleave"), [(1, 1), (1, 16), (2, 3), (5, 2)])
def test_positions_by_rank_and_their_indices(cp, interleave):
    sharding, length = DecodeSharding(2, 2, cp, interleave), 90
    for rank in range(sharding.ranks):
        place, position_shard = sharding.place(rank), sharding.position_shard(rank)
        mine = [p for p in range(length) if sharding.owner(p) == place.cp]
        assert mine == [position_shard.position(i) for i in range(position_shard.length(length))]
        assert [position_shard.index(p) for p in mine] == list(range(len(mine)))


# What is refused.


@pytest.mark.parametrize("name", ["tp", "kvdp", "cp", "interleave"])
@pytest.mark.parametrize("value", [0, -2, 1.0, True, "2"])
def test_sizes_are_positive_integers(name, value):
    with pytest.raises(ValueError, match=re.escape(f"{name} must be a positive integer, got {value!r}")):
        DecodeSharding(**{name: value})


@pytest.mark.parametrize("rank", [-1, 24])
def test_a_rank_that_is_not_there_is_refused(rank):
    sharding = DecodeSharding(2, 3, 4)
    functions = [
        sharding.place,
        sharding.position_shard,
        sharding.kvdp_peers,
        sharding.cp_peers,
        *(lambda r, f=f: f(r, 24) for f in (sharding.q_heads, sharding.cp_heads, sharding.group_heads)),
        *(lambda r, f=f: f(r, 24) for f in (sharding.kv_heads, sharding.sequences)),
    ]
    for function in functions:
        with pytest.raises(ValueError, match=f"rank must be 0 to 23 for TP2-KVDP3-CP4, got {rank}"):
            function(rank)


@pytest.mark.parametrize(
    ("place", "said"),
    [
        (Place(2, 0, 0), "tp of a place must be 0 to 1 for TP2-KVDP3-CP4, got 2"),
        (Place(0, 4, 0), "cp of a place must be 0 to 3 for TP2-KVDP3-CP4, got 4"),
        (Place(0, 0, -1), "kvdp of a place must be 0 to 2 for TP2-KVDP3-CP4, got -1"),
    ],
)
def test_a_place_that_is_not_there_is_refused(place, said):
    with pytest.raises(ValueError, match=said):
        DecodeSharding(2, 3, 4).rank(place)


@pytest.mark.parametrize(
    ("sharding", "heads", "said"),
    [
        (DecodeSharding(), (9, 2), "q_heads must be a multiple of kv_heads, got q_heads=9 and kv_heads=2"),
        (DecodeSharding(), (8, 0), "q_heads must be a multiple of kv_heads, got q_heads=8 and kv_heads=0"),
        (DecodeSharding(6), (32, 8), "tp must divide the kv heads or be a multiple of them, got tp=6, kv_heads=8"),
        (
            DecodeSharding(8, 2, 4),
            (32, 8),
            "q_heads must be at least the number of ranks, got q_heads=32 for 8 x 2 x 4 = 64 ranks",
        ),
    ],
)
def test_heads_that_do_not_fit_are_refused_with_both_numbers(sharding, heads, said):
    with pytest.raises(ValueError, match=said):
        sharding.check_heads(*heads)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ((8.0, 2), "q_heads must be .*, got 8.0"),
        ((-8, 2), "q_heads must be .*, got -8"),
        ((8, True), "kv_heads must be .*, got True"),
        ((8, 0), "q_heads must be a multiple of kv_heads, got q_heads=8 and kv_heads=0"),
        ((8, 3), "q_heads must be a multiple of kv_heads, got q_heads=8 and kv_heads=3"),
    ],
)
def test_counts_of_heads_are_checked(heads, message):
    with pytest.raises(ValueError, match=message):
        DecodeSharding().check_heads(*heads)
