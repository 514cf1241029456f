"""Query-distributed attention of a prompt that continues a prefix, and under masks that hide more than `Causal`."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_queries import by_value, local_results, with_a_group
from torch import Tensor

from attnmesh import (
    Causal,
    Chunked,
    Documents,
    Global,
    Mask,
    Padding,
    PerSequence,
    Prefix,
    SlidingWindow,
    Zigzag,
    gather_ring_outputs,
    ring_chunks,
    run_virtual,
)
from attnmesh.comm import Comm
from attnmesh.core.visibility import Patch
from attnmesh.parallel.query_distributed import ring_distributed_attention
from attnmesh.testing.attention import NAMES, assert_attention_close, forward_backward, random_inputs
from helpers.cases import sweep
from helpers.masks import batch_masks

WINDOW = Causal() & SlidingWindow(9)


def assert_exact(ring_size: int, length: int, q_offset: int, mask: Mask, *, run=with_a_group, pairs=1, **kind) -> None:
    """Out, lse and every gradient of a ring are those of float64, at every position and for every key."""
    inputs = random_inputs(length, q_offset + length, seed=length + q_offset, **kind)
    found = run(inputs, ring_size, q_offset=q_offset, mask=mask, pairs=pairs)
    assert_attention_close(found, inputs, mask, q_positions=torch.arange(q_offset, q_offset + length))


CASES = [  # ring, length, prefix, mask, dtype
    (1, 7, 13, Causal(), torch.float32),
    (2, 17, 1, Causal(), torch.bfloat16),
    (3, 29, 40, Causal(), torch.float16),
    (4, 3, 21, Causal(), torch.float64),
    (5, 0, 6, Causal(), torch.float32),
    (2, 33, 0, WINDOW, torch.float16),
    (3, 21, 35, WINDOW, torch.float32),
    (2, 20, 17, SlidingWindow(0), torch.float32),
    (3, 31, 9, Causal() & Documents([5, 0, 12, 23]), torch.float32),
    (2, 26, 38, WINDOW & Documents([7, 40, 17]), torch.float64),
    (3, 25, 16, Chunked(12), torch.float16),
    (2, 28, 19, Causal() & (Global(4) | SlidingWindow(6)), torch.float32),
    (3, 22, 14, Causal() & Prefix(30), torch.float32),
    (2, 19, 12, Causal() & PerSequence([SlidingWindow(5), Chunked(7) | Global(2)]), torch.float64),
    (2, 19, 12, Causal() & Padding([31, 20]), torch.float32),
    (3, 19, 12, Causal() & Padding([31, 20], side="left", length=31), torch.bfloat16),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_prompt_after_a_prefix_is_exact(case):
    *sizes, dtype = case
    assert_exact(*sizes, dtype=dtype)


@pytest.mark.parametrize("examples", [6, sweep(40)])
def test_any_causal_mask_after_any_prefix_is_exact(examples):
    @settings(max_examples=examples, deadline=None, derandomize=True)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        length, q_offset = data.draw(st.integers(0, 20)), data.draw(st.integers(0, 20))
        batch, ring_size = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 4))
        mask = Causal() & data.draw(batch_masks(q_offset + length, batch))
        assert_exact(ring_size, length, q_offset, mask, batch=batch, dtype=torch.float64, run=by_value)

    check()


def test_devices_that_do_not_talk_compute_parts_of_the_whole():
    assert_exact(3, 25, 18, Causal(), run=by_value)
    assert_exact(3, 25, 18, WINDOW, run=by_value, pairs=(2, 0, 1))


@pytest.mark.parametrize("value_dim", [8, 24])
def test_values_of_another_width_than_keys(value_dim):
    for ring_size, length, mask in ((3, 22, Causal()), (4, 3, WINDOW)):
        assert_exact(ring_size, length, 11, mask, value_dim=value_dim)


@pytest.mark.parametrize("mask", [Causal(), WINDOW], ids=str)
def test_softcap_sinks_and_alibi_slopes(mask):
    inputs, sinks = random_inputs(22, 33), torch.randn(4)
    terms = {"softcap": 1.5, "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0])}

    def rank(comm: Comm) -> list[Tensor]:
        own = [x if i < 3 else Zigzag().shard(x, 2, 3, comm.rank) for i, x in enumerate(inputs)]
        how = {"q_offset": 11, "mask": mask, "group": comm, "return_lse": True, **terms}
        out, lse, dq, dk, dv, dsinks = forward_backward(
            lambda q, k, v, sinks: ring_distributed_attention(q, k, v, sinks=sinks, **how), own, sinks
        )
        whole = [gather_ring_outputs(x, length=22, group=comm) for x in (out, lse)]
        return [*whole, comm.all_reduce(dq), dk, dv, comm.all_reduce(dsinks)]  # dsinks is a part of the sum

    for found in run_virtual(3, rank):
        assert_attention_close(found, inputs, mask, q_positions=torch.arange(11, 33), sinks=sinks, **terms)


@pytest.mark.parametrize("mask", [Causal(), WINDOW], ids=str)
def test_the_chunks_of_a_prompt_one_after_another_are_the_whole_prompt(mask):
    q, k, v, *_ = random_inputs(47, dtype=torch.float64)
    whole = Zigzag().unshard(
        [ring_distributed_attention(q, k, v, ring_size=3, ring_id=i, mask=mask) for i in range(3)], 2
    )
    edges = [0, 8, 9, 30, 47]
    for begin, end in pairwise(edges):
        share = {"ring_size": 3, "q_offset": begin, "mask": mask}
        chunk = [
            ring_distributed_attention(q[:, :, begin:end], k[:, :, :end], v[:, :, :end], ring_id=i, **share)
            for i in range(3)
        ]
        torch.testing.assert_close(Zigzag().unshard(chunk, 2), whole[:, :, begin:end])


def test_the_longer_the_prefix_the_less_chunks_differ():
    def work(q_offset: int, pairs: int | tuple[int, ...]) -> list[int]:
        devices = []
        for ring_id in range(4):
            chunks = ring_chunks(1003, 4, ring_id, pairs)
            q = tuple(range(q_offset + chunk.start, q_offset + chunk.stop) for chunk in chunks)
            devices.append(Patch(Causal(), q, (range(q_offset + 1003),)).pairs)
        return devices

    for pairs in (1, 3):
        spreads = [max(w) / min(w) for w in (work(q_offset, pairs) for q_offset in (0, 1000, 100_000))]
        assert spreads[0] < 1.02
        assert spreads[2] < 1.01  # the numbers of positions of the devices differ by one or two
    assert len(set(work(1000, 1))) > 1


@pytest.mark.parametrize("mask", [Causal(), WINDOW, Causal() & Documents([20, 31])], ids=str)
def test_what_a_device_does_not_see_may_be_anything(mask):
    inputs = random_inputs(31, 51, heads=(2, 1), batch=1)
    positions = torch.arange(20, 51)
    for ring_id in range(3):
        how = {"q_offset": 20, "mask": mask}
        clean = local_results(inputs, 3, ring_id, **how)
        q, k, v = (x.clone() for x in inputs[:3])
        own = Zigzag().positions(31, 3, ring_id)
        foreign = torch.ones(31, dtype=torch.bool)
        foreign[own] = False
        q[:, :, foreign] = torch.nan
        unseen = ~mask.visible(positions[own, None], torch.arange(51)).any(0)
        k[:, :, unseen] = v[:, :, unseen] = torch.nan
        poisoned = local_results([q, k, v, *inputs[3:]], 3, ring_id, **how)
        for name, a, b in zip(NAMES, clean, poisoned, strict=True):
            assert torch.equal(a, b), name
