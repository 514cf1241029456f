"""Ways to generate tokens: shardings, memory by hand, order."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmesh.plan.decode import DecodeSharding
from attnmesh.planner.catalog import cluster
from attnmesh.planner.cost import RESERVED_MEMORY, cost
from attnmesh.planner.decode import (
    DecodeRequest,
    decode_layers,
    decode_memory,
    decode_program,
    decode_ranking,
    shardings,
)
from attnmesh.planner.models import ModelConfig, model
from helpers.cases import sweep

H200 = cluster("h200")
LLAMA, GPT_OSS, DEEPSEEK = model("llama-3.1-8b"), model("gpt-oss-120b"), model("deepseek-v3")
K = 1024


def asked(of=LLAMA, context: int = 128 * K, batch: int = 4, devices: int = 8, on=H200, **more) -> DecodeRequest:
    return DecodeRequest(of, context, batch, devices, on, **more)


@given(
    devices=st.integers(1, 40),
    batch=st.integers(1, 12),
    name=st.sampled_from(["llama-3.1-8b", "deepseek-v3", "gpt-oss-120b"]),
)
def test_every_way_uses_all_devices_and_leaves_no_rank_idle(devices, batch, name):
    of = model(name)
    found = list(shardings(asked(of, batch=batch, devices=devices)))
    assert len(set(found)) == len(found)
    assert found or devices > of.q_heads
    for replicas, sharding in found:
        assert replicas * sharding.ranks == devices
        assert batch % replicas == 0
        assert sharding.kvdp <= batch // replicas
        sharding.check_heads(of.q_heads, 1 if of.latent else of.kv_heads)


@pytest.mark.parametrize(
    ("devices", "batch", "names"),
    [
        (1, 1, {"TP1"}),
        (2, 1, {"TP2", "CP2"}),
        (3, 1, {"CP3"}),
        (7, 2, {"CP7"}),
        (6, 3, {"TP2-CP3", "TP2-KVDP3", "CP6", "KVDP3-CP2", "KVDP2-CP3", "3 x TP2", "3 x CP2"}),
        (2, 2, {"TP2", "CP2", "KVDP2", "2 x TP1"}),
    ],
)
def test_ways_have_names(devices, batch, names):
    """6 devices and 3 sequences: KVDP6 would leave ranks without a sequence, and 2 replicas cannot share 3 evenly."""
    assert {option.name for option in decode_ranking(asked(devices=devices, batch=batch)).options} == names


# Memory.

LLAMA_KV = 32 * 2 * 4096 * 8 * 128 * 2  # bytes of W_k and W_v of all layers


@pytest.mark.parametrize(
    ("sharding", "copies", "cache"),
    [
        (DecodeSharding(8), 1, 1 / 8),
        (DecodeSharding(1, 4, 2), 8, 1 / 8),
        (DecodeSharding(4, 1, 2), 2, 1 / 8),
        (DecodeSharding(16), 2, 1 / 8),  # beyond the kv heads the cache is held twice
        (DecodeSharding(8, 1, 4), 4, 1 / 32),
    ],
    ids=str,
)
def test_weights_are_divided_over_all_ranks_and_copies_of_kv_heads_add_up(sharding, copies, cache):
    """Llama-3.1-8B: 8,030,261,248 parameters in bf16; 131,072 bytes a position."""
    found = decode_memory(asked(), sharding, 4)
    assert found.weights == (2 * 8_030_261_248 + (copies - 1) * LLAMA_KV) / sharding.ranks
    assert found.cache == 4 * 128 * K * 131_072 * cache


def test_the_rank_with_most_counts_where_sequences_and_positions_are_uneven():
    found = decode_memory(asked(context=100), DecodeSharding(1, 2, 3), 5)
    assert found.cache == 3 * 34 * 131_072


def test_half_of_gpt_oss_layers_keep_a_window():
    found = decode_memory(asked(GPT_OSS), DecodeSharding(8), 4)
    assert found.cache == 4 * 18 * (128 * K + 128) * 2 * 64 * 2
    short = decode_memory(asked(GPT_OSS, context=100), DecodeSharding(8), 4)
    assert short.cache == 4 * 36 * 100 * 2 * 64 * 2
    contexts = {layer.context: layers for layer, layers in decode_layers(asked(GPT_OSS), 4).items()}
    assert contexts == {128: 18, 128 * K: 18}


def test_heads_do_not_divide_a_latent_cache_but_sequences_and_positions_do():
    whole = 61 * 128 * K * 576 * 2 * 8
    for sharding, part in ((DecodeSharding(8), 1), (DecodeSharding(2, 2, 2), 4), (DecodeSharding(1, 8), 8)):
        assert decode_memory(asked(DEEPSEEK), sharding, 8).cache == whole / part


def test_eight_bit_numbers_halve_the_cache():
    full, half = (decode_memory(asked(kv_itemsize=n), DecodeSharding(8), 4) for n in (2.0, 1.0))
    assert (half.cache, half.weights) == (full.cache / 2, full.weights)


# The ranking.


@pytest.mark.parametrize(
    ("devices", "batch"), [(1, 1), sweep(3, 1), sweep(6, 2), (7, 7), sweep(8, 1), sweep(8, 8), (32, 3)]
)
def test_options_are_in_order_and_their_parts_add_up(devices, batch):
    found = decode_ranking(asked(devices=devices, batch=batch))
    fitting = [option for option in found.options if option.fits(found.device_memory)]
    assert list(found.options[: len(fitting)]) == fitting
    assert [option.seconds for option in fitting] == sorted(option.seconds for option in fitting)
    for option in found.options:
        assert option.seconds == pytest.approx(sum(option.parts.values()))
        assert found.why(option)
        assert option.fits(found.device_memory) == (option.memory.total <= (1 - RESERVED_MEMORY) * 141e9)


def test_a_step_is_all_layers_and_the_head():
    task = asked(devices=4, batch=1)
    (layer, layers), *more = decode_layers(task, 1).items()
    assert (layers, more) == (32, [])
    ways = {option.name: option for option in decode_ranking(task).options}
    one = cost(decode_program(DecodeSharding(4), layer, H200.intra_node), H200)
    assert ways["TP4"].parts["compute"] == pytest.approx(32 * one.computed)
    assert ways["TP4"].parts["communication"] == pytest.approx(32 * (one.seconds - one.computed))
    assert ways["TP4"].sent == 32 * one.sent


def test_a_step_on_one_device_reads_all_weights_and_the_cache_and_little_more():
    """16.06 GB less the embedding, and 17.2 GB of keys, at 4.3 TB/s: 7.5 ms; small kernels and launches on top."""
    (only,) = decode_ranking(asked(devices=1, batch=1)).options
    read = 2 * (8_030_261_248 - 128_256 * 4096) + 128 * K * 131_072
    assert 1.0 < only.seconds / (read / 4.4e12) < 1.25


def test_replicas_send_nothing_and_take_a_part_of_the_sequences():
    ways = {option.name: option for option in decode_ranking(asked(devices=2, batch=2)).options}
    (alone,) = decode_ranking(asked(devices=1, batch=1)).options
    assert (ways["2 x TP1"].sent, ways["2 x TP1"].seconds) == (0, pytest.approx(alone.seconds))


def test_long_contexts_of_one_sequence_are_divided():
    """16 devices and 8 kv heads: TP16 reads every key twice."""
    ways = {o.name: o.seconds for o in decode_ranking(asked(context=4096 * K, batch=1, devices=16)).options}
    assert ways["TP8-CP2"] < 0.7 * ways["TP16"]


def test_nothing_fits_where_weights_alone_do_not():
    found = decode_ranking(asked(DEEPSEEK, devices=4))
    assert found.best is None
    assert all(found.why(option) == "does not fit in 126.9 GB" for option in found.options)
    assert decode_ranking(asked(DEEPSEEK, devices=8)).best is not None


def test_more_devices_than_heads_have_nothing_to_do_and_it_says_so():
    found = decode_ranking(asked(devices=64, batch=1))
    assert found.options == ()
    assert found.refused == {"all plans": "32 query heads and a batch of 1 leave some of 64 devices idle"}


@settings(max_examples=5, deadline=None)
@given(
    factor=st.floats(1.0, 50.0), devices=st.sampled_from([4, 6, 16]), end=st.sampled_from(["intra_node", "inter_node"])
)
def test_more_bandwidth_never_makes_the_best_slower(factor, devices, end):
    task = asked(devices=devices, batch=2)
    link = getattr(H200, end)
    faster = replace(H200, **{end: replace(link, bandwidth=factor * link.bandwidth)})
    before, after = (decode_ranking(replace(task, cluster=on)).best for on in (H200, faster))
    assert before is not None
    assert after is not None
    assert after.seconds <= before.seconds * (1 + 1e-9)


def test_more_tokens_a_step_cost_less_than_as_many_steps():
    one, four = (decode_ranking(asked(tokens=n)).best for n in (1, 4))
    assert one is not None
    assert four is not None
    assert one.seconds < four.seconds < 2 * one.seconds


def test_heads_alone_are_enough_and_have_no_weights():
    found = decode_ranking(asked(ModelConfig(q_heads=16, kv_heads=2, head_dim=64, hidden=1024), devices=4))
    assert found.best is not None
    assert found.best.memory.weights == 0
    assert set(found.best.parts) == {"compute", "communication"}


@pytest.mark.parametrize("field", ["context", "batch", "devices", "tokens"])
def test_questions_are_of_positive_numbers(field):
    with pytest.raises(ValueError, match=f"{field} must be a positive integer, got 0"):
        replace(asked(), **{field: 0})
