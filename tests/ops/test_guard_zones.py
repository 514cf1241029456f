"""Kernels write nothing beside their results and read nothing beside their arguments, at sizes that fill no tile.

Results and workspaces lie between zones that are compared; arguments lie between zones of NaN, which would show.
"""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from sparse import test_indexer_kernels, test_paged_indexer_topk
from test_triton_merge import SHAPE, make_part, truth
from test_triton_merge import check as check_state

from attnmesh import Causal, SlidingWindow, attention
from attnmesh.core.state import State
from attnmesh.ops.triton_merge import accumulate
from attnmesh.testing.attention import assert_attention_close, forward_backward, random_inputs
from helpers.guards import GuardZones, guard_zones
from helpers.sparse import assert_sparse_close, random_attention


def test_a_write_beside_a_tensor_is_found():
    for at in (-1, 12):
        zones = GuardZones()
        x = zones.empty(3, 4, dtype=torch.float32)
        x.fill_(0.0)
        zones.check()
        torch.as_strided(x, (1,), (1,), x.storage_offset() + at).zero_()
        with pytest.raises(AssertionError, match=r"written (before|after) a tensor of 48 bytes"):
            zones.check()


@pytest.mark.parametrize(("mask", "head_dim"), [(Causal(), 24), (SlidingWindow(5, 3), 40)], ids=str)
def test_dense(mask, head_dim, device):
    inputs = random_inputs(37, 45, heads=(3, 1), head_dim=head_dim, batch=1, device=device)
    with guard_zones() as zones:
        placed = [zones.copy(x) for x in inputs]
        found = forward_backward(lambda *qkv: attention(*qkv, mask=mask, return_lse=True, backend="triton"), placed)
    assert_attention_close(found, inputs, mask)


@pytest.mark.parametrize("deterministic", [False, True])
def test_sparse(deterministic):
    case = random_attention(5, 23, heads=3, d=24, d_v=20, topk=11, own_values=True)
    case = replace(case, deterministic=deterministic)
    with guard_zones():
        found = case.run("triton")
    assert_sparse_close(case.names, found, case.exact(torch.float32), case.exact())


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_indexer(deterministic, device):
    case = test_indexer_kernels.Named(device, torch.float32, heads=3, dim=24, slots=19)
    # The last slot of the last row names a key: nothing may follow its gradient.
    case.slots[-1], case.indices[-1, -1], case.grad[-1, -1] = 19, case.lo[-1], 1.0
    case.ik = case.ik.nan_to_num(0.0)
    with guard_zones() as zones:
        case.iq, case.ik, case.w, case.grad = map(zones.copy, (case.iq, case.ik, case.w, case.grad))
        found = case.backward(deterministic=deterministic)
    for x in found:
        assert x.isfinite().all()


@pytest.mark.parametrize("fp8", [True, False])
def test_the_topk_of_a_paged_cache(fp8):
    case = test_paged_indexer_topk.random_case((9, 0, 23), tokens=2, heads=3, dim=20, fp8=fp8)
    with guard_zones() as zones:
        case.iq, case.w, case.table = map(zones.copy, (case.iq, case.w, case.table))
        found = case.run(5, "triton")
    test_paged_indexer_topk.check(found, case.expected(5), 5)


def test_merges(device):
    parts = [(make_part(device, rows, torch.float32), begin, 0) for begin, rows in ((0, 45), (7, 1), (20, 30))]
    expected = truth(parts)
    with guard_zones() as zones:
        placed = [(State(zones.copy(each.out), zones.copy(each.lse)), *at) for each, *at in parts]
        result = accumulate(None, placed, torch.float32, SHAPE)
    check_state(result, expected, 1e-5)
