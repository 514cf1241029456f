"""Merging and summing parts against float64, in Triton's interpreter or on the GPU."""

import pytest
import torch

from attnmesh.core.merge import discount_sinks_batch_invariant, merge, merge_sequential
from attnmesh.core.state import State
from attnmesh.ops.triton_merge import accumulate, add, merge_packed

SHAPE = (2, 3, 50, 24)  # head_dim is no power of two, and 50 rows are no whole number of tiles


def truth(states, shape=SHAPE):
    """exp(lse)-weighted mean of (state, row_begin) in float64, row by row."""
    lse = torch.full(shape[:3], -torch.inf, dtype=torch.float64, device=states[0][0].lse.device)
    for state, begin in states:
        rows = slice(begin, begin + state.lse.shape[2])
        lse[:, :, rows] = torch.logaddexp(lse[:, :, rows], state.lse.double())
    out = torch.zeros(shape, dtype=torch.float64, device=lse.device)
    for state, begin in states:
        rows = slice(begin, begin + state.lse.shape[2])
        weight = (state.lse.double() - lse[:, :, rows]).exp().nan_to_num(0.0)[..., None]
        out[:, :, rows] += torch.where(weight > 0, weight * state.out.double(), 0.0)
    return State(out, lse)


def make_part(device, rows, dtype, strided=True):
    """A strided part, a third of whose rows saw nothing and hold NaN."""
    batch, heads, _, head_dim = SHAPE
    if strided:
        out = torch.randn(batch, rows, heads, head_dim, device=device).transpose(1, 2)
        lse = (3 * torch.randn(batch, rows, heads, device=device)).transpose(1, 2)
    else:
        out = torch.randn(batch, heads, rows, head_dim, device=device)
        lse = 3 * torch.randn(batch, heads, rows, device=device)
    nothing = torch.rand(lse.shape, device=device) < 1 / 3
    out[nothing], lse[nothing] = torch.nan, -torch.inf
    return State(out.to(dtype), lse)


def check(result, expected, rtol):
    assert torch.equal(result.lse.isneginf(), expected.lse.isneginf())
    assert (result.out[expected.lse.isneginf()] == 0).all()
    torch.testing.assert_close(result.lse.double(), expected.lse, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(result.out.double(), expected.out, atol=rtol, rtol=rtol)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
@pytest.mark.parametrize("with_total", [True, False])
def test_merges_parts_over_any_rows(device, count, with_total):
    kinds = [(0, 45, torch.float16), (20, 25, torch.float32), (7, 1, torch.float32), (0, 50, torch.bfloat16)]
    parts = [(make_part(device, n, dtype), begin) for begin, n, dtype in kinds[:count]]
    total = make_part(device, 50, torch.float32) if with_total else None
    if with_total:
        total.out[:, :, 45:], total.lse[:, :, 45:] = 7.0, 1.0
    expected = truth([*parts, (total, 0)] if with_total else parts)
    result = accumulate(total, parts, torch.float32, SHAPE)
    assert (result is total) == with_total
    assert result.lse.dtype == torch.float32
    check(result, expected, 1e-5)


def test_in_place_leaves_uncovered_rows_alone(device):
    total, part = make_part(device, 50, torch.float32), make_part(device, 10, torch.float32)
    kept = State(total.out.clone(), total.lse.clone())
    accumulate(total, [(part, 20)], torch.float32, SHAPE)
    for rows in (slice(0, 20), slice(30, 50)):
        torch.testing.assert_close(total.out[:, :, rows], kept.out[:, :, rows], equal_nan=True, atol=0, rtol=0)
        assert torch.equal(total.lse[:, :, rows], kept.lse[:, :, rows])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_casts_once_into_a_new_tensor(device, dtype):
    total, part = make_part(device, 50, torch.float32), make_part(device, 20, torch.float32, strided=False)
    kept = State(total.out.clone(), total.lse.clone())
    result = accumulate(total, [(part, 30)], dtype, SHAPE)
    assert result.out.dtype == dtype
    assert result.out.is_contiguous()
    check(result, truth([(total, 0), (part, 30)]), 1e-2)
    torch.testing.assert_close(total.out, kept.out, equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(total.lse, kept.lse, atol=0, rtol=0)


def test_a_weight_of_one_changes_nothing(device):
    part = make_part(device, 50, torch.float32)
    result = accumulate(None, [(part, 0)], torch.float32, SHAPE)
    seen = ~part.lse.isneginf()
    assert torch.equal(result.out[seen], part.out[seen])
    assert torch.equal(result.lse, part.lse)


@pytest.mark.parametrize("count", [1, 4])
def test_adds_parts_over_any_rows(device, count):
    batch, heads, length, head_dim = SHAPE
    total = torch.randn(batch, length, heads, head_dim, device=device).transpose(1, 2)
    kinds = [
        (20, 25, torch.float16),
        (22, 3, torch.float32),
        (10, 40, torch.bfloat16),
        (5, 20, torch.float32),
    ]
    parts = [
        (torch.randn(batch, heads, n, head_dim, device=device).to(dtype), begin) for begin, n, dtype in kinds[:count]
    ]
    expected = total.double()
    for x, begin in parts:
        expected[:, :, begin : begin + x.shape[2]] += x.double()
    fresh = add(None, parts, torch.float16, SHAPE).double()
    torch.testing.assert_close(fresh, expected - total.double(), atol=1e-2, rtol=1e-2)
    rounded = add(total, parts, torch.float16, SHAPE).double()
    torch.testing.assert_close(rounded, expected, atol=1e-2, rtol=1e-2)
    assert add(total, parts, torch.float32, SHAPE) is total
    torch.testing.assert_close(total.double(), expected, atol=1e-5, rtol=1e-5)


def test_infinite_lses_outweigh_all_others(device):
    states = [make_part(device, 50, torch.float32, strided=False) for _ in range(4)]
    for i in range(4):  # row 2 + i: the first 1 + i states
        for state in states[: 1 + i]:
            state.lse[:, :, 2 + i] = torch.inf
            state.out[:, :, 2 + i] = torch.randn(2, 3, 24, device=device)
    expected = merge([State(state.out.double(), state.lse.double()) for state in states])
    result = accumulate(None, [(state, 0) for state in states], torch.float32, SHAPE)
    assert torch.equal(result.lse.isposinf(), expected.lse.isposinf())
    check(result, expected, 1e-5)
    check(accumulate(states[0], [(state, 0) for state in states[1:]], torch.float32, SHAPE), expected, 1e-5)


def test_packed_states_with_infinite_lses_and_sinks(device):
    parts = torch.randn(3, 2, 4, 2, 17, device=device)
    parts[0, :, 1:, 0, -1] = torch.inf
    parts[1, :, 2:, 0, -1] = torch.inf
    parts[:, :, 3, 1] = 0.0
    parts[:, :, 3, 1, -1] = -torch.inf
    sinks = torch.tensor([torch.inf, -torch.inf], device=device)
    out, lse = merge_sequential(parts.double())
    for given, expected in ((None, out), (sinks, discount_sinks_batch_invariant(out, lse, sinks[:, None, None]))):
        merged = merge_packed(parts, given, torch.float32).double()
        torch.testing.assert_close(merged, expected.transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_rejects_a_wrong_number_of_parts(device):
    with pytest.raises(ValueError, match="parts must have 1 to 4 elements, got 0"):
        add(torch.zeros(SHAPE, device=device), [], torch.float32, SHAPE)
    with pytest.raises(ValueError, match="parts must have 1 to 4 elements, got 5"):
        accumulate(None, [(make_part(device, 4, torch.float32), 0)] * 5, torch.float32, SHAPE)


def test_nothing_to_do(device):
    total = torch.zeros(SHAPE, device=device)
    add(total, [(total[:, :, :0], 0)], torch.float32, SHAPE)
    assert (total == 0).all()
