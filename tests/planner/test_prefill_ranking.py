"""Ways to read prompts: divisions, memory by hand, order, and what shared ports do."""

from dataclasses import replace
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmesh.planner.catalog import cluster
from attnmesh.planner.cost import RESERVED_MEMORY
from attnmesh.planner.models import expert_fraction_read, layer_weight_bytes_read, model
from attnmesh.planner.prefill import Parallelism, PrefillRequest, parallelisms, prefill_memory, prefill_ranking
from helpers.cases import sweep

H200 = cluster("h200")
LLAMA, GPT_OSS, DEEPSEEK = model("llama-3.1-8b"), model("gpt-oss-120b"), model("deepseek-v3")
K = 1024


def asked(of=LLAMA, context: int = 32 * K, batch: int = 1, devices: int = 8, on=H200, **more) -> PrefillRequest:
    return PrefillRequest(of, context, batch, devices, on, **more)


def best(task: PrefillRequest):
    found = prefill_ranking(task).best
    assert found is not None
    return found


# Divisions.


@given(devices=st.integers(1, 48), batch=st.integers(1, 12), name=st.sampled_from(["llama-3.1-8b", "deepseek-v3"]))
def test_every_division_uses_all_devices_and_divides_heads_and_sequences(devices, batch, name):
    found = list(parallelisms(asked(model(name), batch=batch, devices=devices)))
    assert len({str(division) for division in found}) == len(found) > 0
    for dp, tp, cp in ((one.dp, one.tp, one.cp) for one in found):
        assert prod((dp, tp, cp)) == devices
        assert batch % dp == 0
        assert H200.ranks_per_node % tp == 0  # TP stays within a node
        assert model(name).q_heads % tp == 0


@pytest.mark.parametrize(
    ("devices", "batch", "names"),
    [
        (1, 1, {"one device"}),
        (1, 4, {"one device"}),
        (3, 1, {"CP3"}),
        (7, 1, {"CP7"}),
        (6, 1, {"CP6", "TP2-CP3"}),
        (6, 3, {"CP6", "TP2-CP3", "DP3-CP2", "DP3-TP2"}),
        (4, 4, {"CP4", "TP2-CP2", "TP4", "DP2-CP2", "DP2-TP2", "DP4"}),
    ],
)
def test_divisions_have_names(devices, batch, names):
    assert {str(division) for division in parallelisms(asked(devices=devices, batch=batch))} == names


# Memory.


def test_weights_are_divided_by_tp_only_and_the_cache_by_all():
    """Llama-3.1-8B: 8,030,261,248 parameters; 32 layers of 8 heads of 128: 131,072 bytes a position."""
    task = asked(batch=4, context=128 * K)
    for division, weights, cache in (
        (Parallelism(1, 1, 8), 1, 8),
        (Parallelism(1, 8, 1), 8, 8),
        (Parallelism(1, 2, 4), 2, 8),
        (Parallelism(4, 2, 1), 2, 8),
    ):
        found = prefill_memory(task, division)
        assert found.weights == 2 * 8_030_261_248 / weights
        assert found.cache == 4 * 128 * K * 131_072 / cache
        assert found.total == found.weights + found.cache + found.working


def test_half_of_gpt_oss_layers_keep_a_window():
    found = prefill_memory(asked(GPT_OSS, 128 * K), Parallelism(1, 1, 8))
    assert found.cache == 18 * (128 * K + 128) * 2 * 8 * 64 * 2 / 8


def test_heads_do_not_divide_a_latent_cache():
    """61 layers that keep 576 numbers of a position."""
    whole = 61 * 128 * K * 576 * 2
    for division in (Parallelism(1, 8, 1), Parallelism(1, 4, 2), Parallelism(1, 1, 8)):
        assert prefill_memory(asked(DEEPSEEK, 128 * K), division).cache == whole / division.cp


def test_an_eight_bit_cache_is_half_as_large():
    full, half = (prefill_memory(asked(kv_itemsize=n), Parallelism(1, 8, 1)) for n in (2.0, 1.0))
    assert half.cache == full.cache / 2
    assert (half.weights, half.working) == (full.weights, full.working)


def test_more_ranks_never_want_more_memory():
    for of in (LLAMA, GPT_OSS, DEEPSEEK):
        for less, more in ((Parallelism(1, 1, 4), Parallelism(1, 1, 8)), (Parallelism(1, 4, 2), Parallelism(1, 8, 2))):
            assert prefill_memory(asked(of), more).total < prefill_memory(asked(of), less).total


# The ranking.


@pytest.mark.parametrize("devices", [1, sweep(3), sweep(6), 7, sweep(8), sweep(12), sweep(16)])
def test_options_are_in_order_and_their_parts_add_up(devices):
    found = prefill_ranking(asked(devices=devices, batch=2))
    fitting = [option for option in found.options if option.fits(found.device_memory)]
    assert list(found.options[: len(fitting)]) == fitting
    assert [option.seconds for option in fitting] == sorted(option.seconds for option in fitting)
    for option in found.options:
        assert option.seconds == pytest.approx(sum(option.parts.values()))
        assert all(seconds >= 0 for seconds in option.parts.values())
        assert found.why(option)
        assert option.fits(found.device_memory) == (option.memory.total <= (1 - RESERVED_MEMORY) * 141e9)
    assert len({option.name for option in found.options}) == len(found.options)


def test_one_device_has_one_way_and_sends_nothing():
    (only,) = prefill_ranking(asked(devices=1)).options
    assert (only.name, only.sent, only.parts["TP all-reduce"]) == ("one device", 0, 0)


def test_tp_sends_all_but_its_part_of_every_row_twice_in_each_of_two_sums_per_layer():
    ways = {option.name: option for option in prefill_ranking(asked(devices=4)).options}
    assert ways["TP4"].sent == 32 * 2 * 2 * 3 / 4 * (32 * K * 4096 * 2)


def test_replicas_take_their_sequences_at_once():
    alone, two = (best(asked(devices=n, batch=n)) for n in (1, 2))
    ways = {option.name: option for option in prefill_ranking(asked(devices=2, batch=2)).options}
    assert ways["DP2"].seconds == pytest.approx(alone.seconds)
    assert two.seconds <= alone.seconds * 1.001


def test_what_does_not_fit_is_never_the_best():
    found = prefill_ranking(asked(DEEPSEEK, 32 * K, devices=16))
    assert found.best is not None
    assert found.best.memory.total <= (1 - RESERVED_MEMORY) * 141e9
    assert any(not option.fits(found.device_memory) and option.seconds < found.best.seconds for option in found.options)
    assert prefill_ranking(asked(DEEPSEEK, devices=1)).best is None


@settings(max_examples=5, deadline=None)
@given(
    factor=st.floats(1.0, 50.0), devices=st.sampled_from([4, 6, 16]), end=st.sampled_from(["intra_node", "inter_node"])
)
def test_more_bandwidth_never_makes_the_best_slower(factor, devices, end):
    task = asked(devices=devices, context=8 * K)
    link = getattr(H200, end)
    faster = replace(H200, **{end: replace(link, bandwidth=factor * link.bandwidth)})
    assert best(replace(task, cluster=faster)).seconds <= best(task).seconds * (1 + 1e-9)


def test_two_levels_are_ranked_only_where_there_are_two():
    names = {option.name for option in prefill_ranking(asked(devices=8)).options}
    assert not any("+" in name for name in names)
    assert {"CP16 ring+ring", "CP16 ulysses+ring"} <= {o.name for o in prefill_ranking(asked(devices=16)).options}


def test_more_cp_ranks_than_are_costed_are_refused_and_say_so():
    found = prefill_ranking(asked(devices=2048, context=1 * K, on=replace(H200, ranks_per_node=1, rails=1)))
    assert found.refused == {"CP2048": "more than 1024 CP ranks: use `attnmesh simulate`"}
    assert found.options == ()


def test_few_rows_still_read_all_weights():
    """64 positions on each of 64 ranks: reading 14 GB of layers takes longer than computing with them."""
    ways = {option.name: option for option in prefill_ranking(asked(context=4 * K, devices=64)).options}
    whole, divided = (ways[name].parts["linear layers"] for name in ("CP64 ring", "TP8-CP8 ring"))
    assert 3.3e12 < layer_weight_bytes_read(LLAMA, 64) / whole < 4.4e12  # bytes a second
    assert divided < whole / 2  # an eighth of the bytes; products take their least time


def test_experts_that_nobody_chose_are_not_read():
    """GPT-OSS-120B: 4 of 128 experts a token."""
    assert expert_fraction_read(GPT_OSS, 1) == pytest.approx(4 / 128)
    assert expert_fraction_read(GPT_OSS, 10_000) == pytest.approx(1.0)
    assert expert_fraction_read(LLAMA, 5) == 0.0
    assert layer_weight_bytes_read(GPT_OSS, 1) < layer_weight_bytes_read(GPT_OSS, 10_000) / 8


# Ports.


def test_fewer_ports_never_make_a_way_faster():
    many, one = (prefill_ranking(asked(devices=16, on=replace(H200, rails=rails))).options for rails in (8, 1))
    slower = {option.name: option.seconds for option in one}
    assert all(slower[option.name] >= option.seconds * (1 - 1e-9) for option in many)
    of_many = {option.name: option.seconds for option in many}
    assert slower["TP8-CP2 allgather"] > of_many["TP8-CP2 allgather"]


def test_replicas_that_lie_across_nodes_pay_for_it():
    """12 devices of nodes of 8: the second replica of 6 has 2 in the first node and 4 in the other."""
    slow = replace(H200, inter_node=replace(H200.inter_node, bandwidth=1e9))
    ways = {option.name: option.seconds for option in prefill_ranking(asked(devices=12, batch=2, on=slow)).options}
    one_node = prefill_ranking(asked(devices=6, on=slow)).options
    alone = {option.name: option.seconds for option in one_node}
    assert ways["DP2-CP6 ring"] > 2 * alone["CP6 ring"]


@pytest.mark.parametrize("field", ["context", "batch", "devices"])
def test_questions_are_of_positive_numbers(field):
    with pytest.raises(ValueError, match=f"{field} must be a positive integer, got 0"):
        replace(asked(), **{field: 0})
