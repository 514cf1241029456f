"""Which sharding is recommended, what is said about it, and the document's own table cell by cell."""

import re
from dataclasses import astuple
from itertools import product
from math import gcd

import pytest

import attnmesh as am
from attnmesh.plan.decode import DecodeShape, DecodeSharding
from attnmesh.planner.catalog import cluster
from attnmesh.planner.cost import Copies, bytes_sent, cache_bytes, cost
from attnmesh.planner.decode import DecodeLayer, decode_program
from attnmesh.planner.recommend import ShardingComparison, compare_shardings, recommend_sharding
from attnmesh.utils.text import readable_bytes


def names(options) -> list[str]:
    return [str(option.sharding) for option in options]


# The document's table and rule: 64 query heads, 8 kv heads, 64 ranks.

TABLE = """
|                     | Vanilla TP64 | KVDP (TP64 KVDP8) | CP (TP64 CP8)        | DP Attention (TP8 DP8) |
| W_kv replication    | 8x (GQA)     | 8x (GQA)          | 8x (GQA)             | 8x (DP)                |
| W_q replication     | 1x           | 1x                | 1x                   | 8x (DP)                |
| W_out replication   | 1x           | 1x                | 1x                   | 8x (DP)                |
| X input activation  | [B, S, H]    | [B, S, H]         | [B, S, H]            | [B/8, S, H]            |
| KV cache per rank   | B batches    | B/8 batches       | B batches, s_prior/8 | B/8 batches            |
"""
CELLS = [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in TABLE.strip().splitlines()]


@pytest.mark.parametrize(("row", "column"), product(range(6), range(4)))
def test_every_cell_of_the_documents_table(row, column):
    assert astuple(compare_shardings(64, 8, 64)[column])[row] == CELLS[row][column]


def test_the_table_has_no_more_than_the_documents_rows():
    assert len(compare_shardings(64, 8, 64)) == 4


@pytest.mark.parametrize(
    ("batch", "choice"),
    [
        (1, "TP8-CP8"),
        (2, "TP8-KVDP2-CP4"),
        (3, "TP8-KVDP2-CP4"),
        (4, "TP8-KVDP4-CP2"),
        (7, "TP8-KVDP4-CP2"),
        (8, "TP8-KVDP8"),
        (9, "TP8-KVDP8"),
        (512, "TP8-KVDP8"),
    ],
)
def test_the_documents_rule(batch, choice):
    found = recommend_sharding(batch, 64, 8, 64)
    every = {"TP8-CP8", "TP8-KVDP2-CP4", "TP8-KVDP4-CP2", "TP8-KVDP8", "TP64"}
    assert str(found.choice.sharding) == choice
    assert sorted(names(found.alternatives)) == sorted(every - {choice})


@pytest.mark.parametrize(
    ("batch", "heads", "ranks", "choice", "alternatives"),
    [
        (4, (8, 8), 1, "TP1", []),
        (4, (32, 8), 8, "TP8", []),
        (4, (32, 8), 4, "TP4", []),  # fewer ranks than kv heads: two kv heads a rank
        (4, (12, 4), 6, "TP2-KVDP3", ["TP2-CP3"]),  # 6 ranks are no multiple of 4 kv heads, nor a divisor
        (2, (12, 4), 6, "TP2-CP3", ["TP2-KVDP3"]),
        (5, (9, 3), 9, "TP3-KVDP3", ["TP3-CP3", "TP9"]),
        (2, (8, 1), 8, "KVDP2-CP4", ["KVDP8", "KVDP4-CP2", "CP8", "TP8"]),
        (5, (12, 1), 12, "KVDP4-CP3", ["KVDP12", "KVDP6-CP2", "KVDP3-CP4", "KVDP2-CP6", "CP12", "TP12"]),
        (1, (24, 8), 16, "TP8-CP2", ["TP8-KVDP2", "TP16"]),  # query heads do not divide
    ],
)
def test_other_heads_and_ranks(batch, heads, ranks, choice, alternatives):
    found = recommend_sharding(batch, *heads, ranks)
    assert str(found.choice.sharding) == choice
    assert names(found.alternatives) == alternatives


def test_a_choice_uses_all_ranks_copies_no_kv_head_and_leaves_no_rank_idle():
    for batch, kv_heads, group, ranks in product(
        (1, 2, 3, 8, 30), (1, 2, 3, 4, 8), (1, 4, 12), (1, 2, 3, 6, 8, 17, 24)
    ):
        if ranks > kv_heads * group:
            continue
        found = recommend_sharding(batch, kv_heads * group, kv_heads, ranks)
        options = (found.choice, *found.alternatives)
        assert {option.sharding.ranks for option in options} == {ranks}
        assert len(set(names(options))) == len(options)
        assert all(option.reason for option in options)
        chosen = found.choice.sharding
        assert chosen.tp == gcd(ranks, kv_heads)
        assert chosen.kvdp <= batch
        wider = [option.sharding for option in found.alternatives if option.sharding.kvdp > chosen.kvdp]
        assert all(other.kvdp > batch for other in wider)


# Where the machines are known.

H200 = cluster("h200")


def test_with_machines_the_choice_is_the_fastest_of_the_same_ways():
    for batch, context in ((1, 1 << 20), (2, 131072), (2, 2048), (64, 131072), (3, 5)):
        plain = recommend_sharding(batch, 64, 8, 64, context, head_dim=64, hidden=2880)
        timed = recommend_sharding(batch, 64, 8, 64, context, head_dim=64, hidden=2880, cluster=H200)
        options = (timed.choice, *timed.alternatives)
        assert sorted(names(options)) == sorted(names((plain.choice, *plain.alternatives)))
        seconds = [option.seconds for option in options]
        assert seconds == sorted(seconds)
        shape = DecodeShape(batch, 1, 64, 8, 64, 2880)
        for option in options:
            layer = DecodeLayer(shape, cached=2 * 64 * 2, context=context)
            assert option.seconds == cost(decode_program(option.sharding, layer, H200.intra_node), H200).seconds
        by_name = {str(option.sharding): option for option in (plain.choice, *plain.alternatives)}
        for option in options:  # everything else is as it was
            same = by_name[str(option.sharding)]
            assert (option.kv_bytes, option.sent, option.shard) == (same.kv_bytes, same.sent, same.shard)
            assert same.seconds is None


def test_short_contexts_are_not_worth_an_exchange_and_long_ones_are():
    def choice(batch: int, context: int) -> str:
        found = recommend_sharding(batch, 64, 8, 64, context, head_dim=64, hidden=2880, cluster=H200)
        return str(found.choice.sharding)

    assert choice(2, 2048) == "TP64"
    assert choice(64, 131072) == "TP8-KVDP8"
    assert choice(1, 1 << 22) == "TP8-CP8"


def test_a_choice_by_time_says_so_and_where_the_time_goes():
    found = recommend_sharding(64, 64, 8, 64, 131072, head_dim=64, hidden=2880, cluster=H200)
    assert re.fullmatch(
        r"fastest of 5 on h200 with nvlink4: [\d.]+ us compute and [\d.]+ us communication", found.reason
    )
    slowest = found.alternatives[-1]
    assert str(slowest.sharding) == "TP64"
    assert re.fullmatch(r"[\d.]+x slower: [\d.]+ us more compute", slowest.reason)
    few = recommend_sharding(2, 64, 8, 64, 131072, cluster=H200)
    reasons = {str(option.sharding): option.reason for option in (few.choice, *few.alternatives)}
    assert reasons["TP8-KVDP8"].endswith("; 6 of 8 KVDP ranks hold no sequence")
    assert found.choice.row()["time"] in str(found)
    assert "time" not in recommend_sharding(64, 64, 8, 64, 131072).choice.row()


def test_times_are_of_one_layer_however_many_the_cache_is_counted_for():
    one = recommend_sharding(64, 64, 8, 64, 131072, kv_bytes=512, cluster=H200)
    all_layers = recommend_sharding(64, 64, 8, 64, 131072, kv_bytes=36 * 512, layers=36, cluster=H200)
    assert one.choice.seconds == all_layers.choice.seconds
    assert all_layers.choice.kv_bytes == 36 * one.choice.kv_bytes


def test_machines_without_a_context_are_refused():
    with pytest.raises(ValueError, match="got context=None"):
        recommend_sharding(1, 64, 8, 64, cluster=H200)


# What an option says.


def test_figures_are_those_of_the_rank_that_has_most():
    """9 query heads over 6 ranks, 5 sequences over KVDP2: uneven in both."""
    shape = DecodeShape(5, 2, 9, 3, head_dim=16, hidden=100, itemsize=4)
    found = recommend_sharding(5, 9, 3, 6, 7, head_dim=16, hidden=100, tokens=2, itemsize=4, kv_bytes=10)
    for option in (found.choice, *found.alternatives):
        sent = [bytes_sent(option.sharding, shape, rank) for rank in range(6)]
        assert option.sent in sent
        assert sum(option.sent.values()) == max(sum(each.values()) for each in sent)
        assert option.kv_bytes == max(cache_bytes(option.sharding, shape, rank, 7, 10) for rank in range(6))
    assert (str(found.choice.sharding), found.choice.kv_bytes) == ("TP3-KVDP2", 3 * 7 * 10)


def test_the_figures_of_gpt_oss_120b():
    """36 layers, 128k positions, bf16: 64 sequences are 9.7 GB a rank, and 77 under plain tensor parallelism."""
    found = am.recommend_sharding(64, 64, 8, 64, 131072, head_dim=64, hidden=2880, kv_bytes=36 * 2 * 64 * 2)
    assert found.choice.kv_bytes == 8 * 131072 * 36 * 256 == 9663676416
    by_name = {str(option.sharding): option for option in found.alternatives}
    assert by_name["TP64"].kv_bytes == 8 * found.choice.kv_bytes
    assert by_name["TP8-CP8"].kv_bytes == found.choice.kv_bytes
    assert found.choice.copies == Copies(w_q=1, w_kv=8, w_out=1)
    assert found.choice.x == "[B, S, H]"
    assert found.choice.shard == "1 of 8 kv heads, 8 of 64 sequences, all positions"
    assert by_name["TP8-KVDP2-CP4"].shard == "1 of 8 kv heads, 32 of 64 sequences, 1/4 of the positions"
    assert found.choice.sent["kvdp in"] == 7 * 8 * 64 * 2
    assert found.choice.sent["cp out"] == 0 < by_name["TP8-CP8"].sent["cp out"]


def test_widths_have_usual_defaults():
    plain = recommend_sharding(8, 64, 8, 64, 1000)
    given = recommend_sharding(8, 64, 8, 64, 1000, head_dim=128, hidden=8192, tokens=1, itemsize=2, kv_bytes=512)
    assert plain == given
    assert recommend_sharding(8, 64, 8, 64).choice.kv_bytes is None


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((16, 64, 8, 64), ["TP8 gives every rank one kv head", "batch=16 has sequences for KVDP8"]),
        ((1, 64, 8, 64), ["batch=1 is less than the 8 ranks left, so CP8 divides positions"]),
        ((2, 64, 8, 64), ["batch=2 has sequences for KVDP2", "2 is less than the 8 ranks left, so CP4"]),
        ((4, 32, 8, 8), ["no ranks are left"]),
        ((4, 12, 4, 6), ["TP2 is the largest that divides 4 kv heads and 6 ranks"]),
        ((12, 64, 8, 64), ["KVDP8 gives some ranks 1 of 12 sequences and others 2"]),
        ((1, 64, 8, 64, 5), ["context=5 is too short for CP8: 3 of 8 CP ranks hold no position"]),
    ],
)
def test_a_choice_says_why(arguments, said):
    reason = recommend_sharding(*arguments).reason
    for words in said:
        assert words in reason


def test_what_does_not_apply_is_not_said():
    assert recommend_sharding(1, 64, 8, 64, 8).reason == recommend_sharding(1, 64, 8, 64).reason
    assert "some ranks" not in recommend_sharding(16, 64, 8, 64).reason


def test_alternatives_say_why_not():
    reasons = {str(o.sharding): o.reason for o in recommend_sharding(2, 64, 8, 64, 6).alternatives}
    assert reasons["TP64"] == "every kv head is replicated 8 times"
    assert reasons["TP8-KVDP8"] == "6 of 8 KVDP ranks hold no sequence"
    merged, short = reasons["TP8-CP8"].split("; ")
    assert merged == "results are merged over 8 ranks instead of 4"
    assert short == "context=6 is too short for CP8: 2 of 8 CP ranks hold no position"
    reasons = {str(o.sharding): o.reason for o in recommend_sharding(8, 64, 8, 64).alternatives}
    assert reasons["TP8-CP8"] == "results are merged over 8 ranks instead of none"


def test_a_recommendation_prints_a_line_for_every_option():
    found = recommend_sharding(2, 64, 8, 64, 131072, head_dim=64)
    title, head, *lines = str(found).splitlines()
    assert title == "TP8-KVDP2-CP4 over 64 ranks"
    assert [line.split()[0] for line in lines] == names((found.choice, *found.alternatives))
    for line, option in zip(lines, (found.choice, *found.alternatives), strict=True):
        for column, words in option.row().items():
            assert line[head.index(column) :].startswith(words)
    assert "8.389 MB" in lines[0]  # 32768 positions of 256 bytes


@pytest.mark.parametrize(
    ("nbytes", "words"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (8388608, "8.389 MB"), (9663676416, "9.664 GB"), (2.5e15, "2500 TB")],
)
def test_bytes_are_readable(nbytes, words):
    assert readable_bytes(nbytes) == words


# Side by side.


def test_ways_that_do_not_fit_or_do_not_differ_are_left_out():
    assert [way.name for way in compare_shardings(32, 8, 8)] == ["Vanilla TP8"]
    assert astuple(compare_shardings(32, 8, 4)[0])[1:] == ("1x", "1x", "1x", "[B, S, H]", "B batches")
    ways = [way.name for way in compare_shardings(12, 4, 6)]
    assert ways == ["KVDP (TP6 KVDP3)", "CP (TP6 CP3)", "DP Attention (TP2 DP3)"]


def test_the_table_follows_the_heads():
    *_, dp = compare_shardings(32, 2, 32)
    assert dp == ShardingComparison(
        "DP Attention (TP2 DP16)", "16x (DP)", "16x (DP)", "16x (DP)", "[B/16, S, H]", "B/16 batches"
    )


# What is refused.


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((1, 64, 8, 128), "q_heads must be at least the number of ranks, got q_heads=64 for 8 x 1 x 16 = 128 ranks"),
        ((1, 9, 2, 2), "q_heads must be a multiple of kv_heads, got q_heads=9 and kv_heads=2"),
        ((0, 64, 8, 64), "batch must be a positive integer, got 0"),
        ((1, 64, 0, 64), "kv_heads must be a positive integer, got 0"),
        ((1, 64, 8, 0), "ranks must be a positive integer, got 0"),
        ((1, 64, 8, 64.0), "ranks must be a positive integer, got 64.0"),
        ((1, 64, 8, 64, 0), "context must be a positive integer, got 0"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_numbers(arguments, said):
    with pytest.raises(ValueError, match=said):
        recommend_sharding(*arguments)


def test_a_comparison_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="q_heads=64 for 8 x 16 x 1 = 128 ranks"):
        compare_shardings(64, 8, 128)
    with pytest.raises(ValueError, match="ranks must be a positive integer, got 0"):
        compare_shardings(64, 8, 0)


def test_the_front_door_opens_on_both():
    assert am.DecodeSharding is DecodeSharding
    assert am.recommend_sharding is recommend_sharding
