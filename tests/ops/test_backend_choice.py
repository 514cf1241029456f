"""The estimates by which backends are chosen: large blocks for torch's kernels, many small ones for Triton's."""

from types import SimpleNamespace

import pytest
import torch

from attnmesh import Causal, Documents, SlidingWindow, attention, explain_attention
from attnmesh.core.masks import BlockCausal, Global, Prefix
from attnmesh.ops.dense import cost
from attnmesh.ops.dense.call import Call, Scores
from attnmesh.plan.blocks import Patch
from attnmesh.testing.attention import random_inputs

LENGTH = 32768


def estimate(mask, length: int = LENGTH) -> cost.Estimate:
    q = torch.empty(1, 32, length, 128, device="meta")
    return cost.estimate(Call(q, q, q, Patch(mask, (range(length),), (range(length),)), Scores(1.0)))


@pytest.fixture(autouse=True)
def processors(monkeypatch):
    cost._estimate.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    yield
    cost._estimate.cache_clear()


@pytest.mark.parametrize("mask", [Prefix(8192), BlockCausal(1024), Causal() & Documents([16384] * 2)], ids=str)
def test_a_launch_for_each_of_a_few_large_blocks(mask):
    found = estimate(mask)
    assert found.blocks > 1
    assert found.aten < found.triton


@pytest.mark.parametrize("mask", [BlockCausal(256), Causal() & Documents([256] * 128)], ids=["blocks", "documents"])
def test_one_launch_for_many_small_blocks(mask):
    found = estimate(mask)
    assert found.blocks >= 128
    assert found.triton < found.aten
    assert str(found).startswith(f"about {1e6 * found.aten:.0f} us in {found.blocks} launches of torch's kernels")


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
    monkeypatch.setattr("attnmesh.plan.blocks._cut", None)
    attention(q, k, v, mask=mask)
