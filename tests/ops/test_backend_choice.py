"""The estimates by which backends are chosen: large blocks for torch's kernels, many small ones for Triton's."""

from types import SimpleNamespace

import pytest
import torch

from attnmesh import Causal, Documents, SlidingWindow, attention, explain_attention
from attnmesh.core.masks import BlockCausal, Global, Prefix
from attnmesh.core.visibility import Patch
from attnmesh.ops.dense import cost, dispatch, gluon
from attnmesh.ops.dense.call import Call, Scores
from attnmesh.testing.attention import random_inputs

LENGTH = 32768


BACKENDS = ("gluon", "triton", "aten")


def call(mask, length: int = LENGTH, width: int = 128) -> Call:
    q = torch.empty(1, 32, length, width, device="meta")
    return Call(q, q, q, Patch(mask, (range(length),), (range(length),)), Scores(1.0))


@pytest.fixture(autouse=True)
def processors(monkeypatch):
    cost._estimate.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    yield
    cost._estimate.cache_clear()


@pytest.mark.parametrize(
    ("shape", "key_shape", "value_width", "short"),
    [
        ((1, 32, 512, 128), (1, 32, 512, 128), 128, False),  # 1.07e10 operations
        ((1, 29, 512, 128), (1, 29, 512, 128), 128, True),  # 0.97e10
        ((1, 1, 513, 64), (1, 1, 16, 64), 64, False),
        ((1, 1, 16, 64), (1, 1, 513, 64), 64, False),
        ((1, 1, 16, 192), (1, 1, 16, 192), 128, False),
        ((1, 1, 16, 64), (1, 1, 16, 64), 192, False),
        ((0, 1, 16, 64), (0, 1, 16, 64), 64, False),
    ],
)
def test_gradients_of_short_calls_are_one_launch(shape, key_shape, value_width, short):
    q, k = torch.empty(shape, device="meta"), torch.empty(key_shape, device="meta")
    patch = Patch(Causal(), (range(shape[2]),), (range(key_shape[2]),))
    assert cost.is_short(Call(q, k, k.new_empty(*key_shape[:3], value_width), patch, Scores(1.0))) == short


@pytest.mark.parametrize("mask", [Prefix(8192), BlockCausal(1024), Causal() & Documents([16384] * 2)], ids=str)
def test_a_launch_for_each_of_a_few_large_blocks(mask):
    found = cost.estimate(call(mask), ("triton", "aten"))
    assert found.blocks > 1
    assert found.fastest == "aten"
    assert cost.estimate(call(mask), BACKENDS).fastest == "gluon"


@pytest.mark.parametrize("mask", [BlockCausal(256), Causal() & Documents([256] * 128)], ids=["blocks", "documents"])
def test_one_launch_for_many_small_blocks(mask):
    found = cost.estimate(call(mask), ("triton", "aten"))
    assert found.blocks >= 128
    assert found.fastest == "triton"
    aten, triton = (1e6 * found.seconds[name] for name in ("aten", "triton"))
    assert str(found) == (
        f"about {triton:.0f} us in Triton's kernel, {aten:.0f} us in {found.blocks} launches of torch's kernels"
    )


def test_empty_columns_of_a_tile_take_time():
    gluon = {width: cost.estimate(call(Causal(), width=width), ("gluon",)).seconds["gluon"] for width in (16, 64)}
    assert gluon[16] == pytest.approx(gluon[64])
    assert cost.estimate(call(Causal(), width=16), BACKENDS).fastest == "aten"
    assert cost.estimate(call(Causal(), width=64), BACKENDS).fastest == "gluon"


def test_rates_are_those_of_the_nearest_shape():
    for backward, table in ((False, cost._FORWARD), (True, cost._BACKWARD)):
        for widths, lengths in table.items():
            for length, measured in lengths.items():
                assert cost.rates(*widths, length, backward=backward) == measured
    assert cost.rates(120, 128, 9000, backward=True) == cost._BACKWARD[128, 128][8192]
    assert cost.rates(128, 128, 4096, backward=True) == cost._BACKWARD[128, 128][8192]  # the larger of two as near
    assert cost.rates(300, 300, 10**6, backward=False) == cost._FORWARD[256, 256][8192]


class Serves:
    """A backend that refuses what it is told to."""

    def __init__(self, forward=None, backward=None):
        self.reasons = forward, backward

    def why_not(self, call):
        return self.reasons[0]

    def backward_why_not(self, call, *, grad_lse=False):
        return self.reasons[1] or ("no gradient of lse" if grad_lse else None)


@pytest.fixture
def on_hopper(monkeypatch):
    """`call` as if it were on a GPU, for which these backends are there."""

    def make(**backends):
        every = {name: Serves("not here", "not here") for name in (*BACKENDS, "torch")} | backends
        monkeypatch.setattr(dispatch, "_FUSED", every)
        monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda self: True))

    return make


def test_the_fastest_kernel_forward_and_backward(on_hopper, monkeypatch):
    monkeypatch.setattr(cost, "_FORWARD", {(128, 128): {8192: cost.Rates(500, 400, 600)}})
    monkeypatch.setattr(cost, "_BACKWARD", {(128, 128): {8192: cost.Rates(500, 300, 480)}})
    on_hopper(gluon=Serves(), triton=Serves(), aten=Serves())
    assert dispatch.choose(call(Causal()), "auto").backend == "gluon"
    choice = dispatch.choose_backward(call(Causal()), "auto")
    assert choice.backend == "aten"
    assert "launch of torch's kernels" in choice.reason


def test_a_mask_by_bounds_has_the_faster_kernel_that_serves_it(on_hopper):
    window = call(SlidingWindow(700))
    on_hopper(gluon=Serves(backward="too wide"), triton=Serves())
    assert dispatch.choose(window, "auto").backend == "gluon"
    assert dispatch.choose_backward(window, "auto").backend == "triton"
    assert dispatch.choose_backward(window, "auto").why_not[0] == ("gluon", "too wide")
    with pytest.raises(ValueError, match="backend='gluon' cannot serve this backward: too wide"):
        dispatch.choose_backward(window, "gluon")


def test_gluon_serves_slopes(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(gluon, "is_hopper", lambda device: True)
    q = torch.empty(1, 32, 64, 128, device="meta", dtype=torch.bfloat16)
    slopes = Scores(1.0, alibi_slopes=torch.ones(32, device="meta"))
    found = Call(q, q, q, Patch(Causal(), (range(64),), (range(64),)), slopes)
    assert gluon.Gluon().why_not(found) is None
    assert gluon.Gluon().backward_why_not(found) is None


@pytest.mark.parametrize("mask", [Documents([8] * 128), SlidingWindow(40), Causal() & SlidingWindow(700)], ids=str)
def test_strips_are_short_where_calls_are_cheap(mask):
    first, end = Patch(mask, (range(1024),), (range(1024),)).bounds(torch.device("cpu"))
    by_cost = [cost.strip_rows(first[0, 0], end[0, 0], 8, call) for call in (0, 20_000, 1_000_000)]
    assert by_cost == [64, 64, 256]


def test_the_reason_counts_pairs_and_blocks():
    q, k, v = random_inputs(64)[:3]
    mask = Causal() & (Global(2) | SlidingWindow(7))
    pairs = 2 * int(mask.visible(torch.arange(64)[:, None], torch.arange(64)).sum())
    reason = explain_attention(q, k, v, mask=mask).reason
    assert f"({pairs:,} visible pairs in " in reason
    shuffled = explain_attention(q, k, v, mask=mask, q_positions=torch.randperm(64)).reason
    assert "visible pairs" not in shuffled  # the bounds may be on a device


def test_a_call_cuts_the_blocks_of_a_mask_once(monkeypatch):
    q, k, v = random_inputs(64)[:3]
    mask = Causal() & Documents([5, 59])
    attention(q, k, v, mask=mask)
    monkeypatch.setattr("attnmesh.core.visibility._cut", None)
    attention(q, k, v, mask=mask)
