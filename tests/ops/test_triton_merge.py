"""Merging and summing parts against float64, in Triton's interpreter or on the GPU."""

import pytest
import torch

from attnmesh.core.state import State, discount_sinks_batch_invariant, merge, merge_sequential
from attnmesh.ops.launch import signature
from attnmesh.ops.merge import merge as merge_any
from attnmesh.ops.triton_merge import accumulate, add, merge_packed, merge_states
from helpers.cases import sweep

SHAPE = (2, 3, 50, 24)  # head_dim is no power of two, and 50 rows are no whole number of tiles


def truth(states, sinks=None, shape=SHAPE):
    """exp(lse)-weighted mean of (state, row, sequence) in float64, row by row."""
    lse = torch.full(shape[:3], -torch.inf, dtype=torch.float64, device=states[0][0].lse.device)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.double()[:, None])
    for state, *at in states:
        whole = covered(lse, state, *at)
        whole.copy_(torch.logaddexp(whole, state.lse.double()))
    out = torch.zeros(shape, dtype=torch.float64, device=lse.device)
    for state, *at in states:
        weight = (state.lse.double() - covered(lse, state, *at)).exp().nan_to_num(0.0)[..., None]
        covered(out, state, *at)[:] += torch.where(weight > 0, weight * state.out.double(), 0.0)
    return State(out, lse)


def covered(x, state, row, sequence):
    batch, _, rows = state.lse.shape
    return x[sequence : sequence + batch, :, row : row + rows]


def make_part(device, rows, dtype, strided=True, batch=SHAPE[0]):
    """A strided part, a third of whose rows saw nothing and hold NaN."""
    _, heads, _, head_dim = SHAPE
    if strided:
        out = torch.randn(batch, rows, heads, head_dim, device=device).transpose(1, 2)
        lse = (3 * torch.randn(batch, rows, heads, device=device)).transpose(1, 2)
    else:
        out = torch.randn(batch, heads, rows, head_dim, device=device)
        lse = 3 * torch.randn(batch, heads, rows, device=device)
    nothing = torch.rand(lse.shape, device=device) < 1 / 3
    out[nothing], lse[nothing] = torch.nan, -torch.inf
    return State(out.to(dtype), lse)


def check(result, expected, rtol, rows=slice(None), sequences=slice(None)):
    result, expected = (State(*(x[sequences][:, :, rows] for x in state)) for state in (result, expected))
    assert torch.equal(result.lse.isneginf(), expected.lse.isneginf())
    assert (result.out[expected.lse.isneginf()] == 0).all()
    torch.testing.assert_close(result.lse.double(), expected.lse, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(result.out.double(), expected.out, atol=rtol, rtol=rtol)


@pytest.mark.parametrize(("count", "with_total"), [(1, True), (4, True), sweep(2, False), sweep(3, False)])
def test_merges_parts_over_any_rows(device, count, with_total):
    kinds = [(0, 45, torch.float16), (20, 25, torch.float32), (7, 1, torch.float32), (0, 50, torch.bfloat16)]
    parts = [(make_part(device, n, dtype), begin, 0) for begin, n, dtype in kinds[:count]]
    total = make_part(device, 50, torch.float32) if with_total else None
    if with_total:
        total.out[:, :, 45:], total.lse[:, :, 45:] = 7.0, 1.0
    expected = truth([*parts, (total, 0, 0)] if with_total else parts)
    result = accumulate(total, parts, torch.float32, SHAPE)
    assert (result is total) == with_total
    assert result.lse.dtype == torch.float32
    check(result, expected, 1e-5)


def test_in_place_leaves_uncovered_rows_and_sequences_alone(device):
    total, part = make_part(device, 50, torch.float32), make_part(device, 10, torch.float32, batch=1)
    kept = State(total.out.clone(), total.lse.clone())
    accumulate(total, [(part, 20, 1)], torch.float32, SHAPE)
    for place in ((1, slice(None), slice(0, 20)), (1, slice(None), slice(30, 50)), (0,)):
        torch.testing.assert_close(total.out[place], kept.out[place], equal_nan=True, atol=0, rtol=0)
        assert torch.equal(total.lse[place], kept.lse[place])
    check(total, truth([(kept, 0, 0), (part, 20, 1)]), 1e-5, rows=slice(20, 30), sequences=[1])


@pytest.mark.parametrize(
    ("with_sinks", "with_total"), [(True, True), sweep(True, False), sweep(False, True), (False, False)]
)
def test_parts_of_some_sequences_and_sinks_into_a_given_state(device, with_sinks, with_total):
    sinks = torch.tensor([1.0, -torch.inf, -3.0], device=device) if with_sinks else None
    parts = [
        (make_part(device, 30, torch.float16, batch=1), 5, 0),
        (make_part(device, 50, torch.float32, batch=1), 0, 1),
        (make_part(device, 9, torch.bfloat16), 41, 0),
    ]
    total = make_part(device, 50, torch.float32) if with_total else None
    expected = truth([*parts, (total, 0, 0)] if with_total else parts, sinks)
    into = State(torch.empty(SHAPE, device=device), torch.empty(SHAPE[:3], device=device))
    assert accumulate(total, parts, torch.float32, SHAPE, into, sinks) is into
    check(into, expected, 1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_casts_once_into_a_new_tensor(device, dtype):
    total, part = make_part(device, 50, torch.float32), make_part(device, 20, torch.float32, strided=False)
    kept = State(total.out.clone(), total.lse.clone())
    result = accumulate(total, [(part, 30, 0)], dtype, SHAPE)
    assert result.out.dtype == dtype
    assert result.out.is_contiguous()
    check(result, truth([(total, 0, 0), (part, 30, 0)]), 1e-2)
    torch.testing.assert_close(total.out, kept.out, equal_nan=True, atol=0, rtol=0)
    torch.testing.assert_close(total.lse, kept.lse, atol=0, rtol=0)


def test_a_weight_of_one_changes_nothing(device):
    part = make_part(device, 50, torch.float32)
    result = accumulate(None, [(part, 0, 0)], torch.float32, SHAPE)
    seen = ~part.lse.isneginf()
    assert torch.equal(result.out[seen], part.out[seen])
    assert torch.equal(result.lse, part.lse)


@pytest.mark.parametrize("count", [1, sweep(4)])
def test_adds_parts_over_any_rows(device, count):
    batch, heads, length, head_dim = SHAPE
    total = torch.randn(batch, length, heads, head_dim, device=device).transpose(1, 2)
    kinds = [
        (20, 25, 0, batch, torch.float16),
        (22, 3, 1, 1, torch.float32),
        (10, 40, 0, 1, torch.bfloat16),
        (5, 20, 0, batch, torch.float32),
    ]
    parts = [
        (torch.randn(sequences, heads, n, head_dim, device=device).to(dtype), row, first)
        for row, n, first, sequences, dtype in kinds[:count]
    ]
    expected = total.double()
    for x, row, first in parts:
        expected[first : first + x.shape[0], :, row : row + x.shape[2]] += x.double()
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
    result = accumulate(None, [(state, 0, 0) for state in states], torch.float32, SHAPE)
    assert torch.equal(result.lse.isposinf(), expected.lse.isposinf())
    check(result, expected, 1e-5)
    check(accumulate(states[0], [(state, 0, 0) for state in states[1:]], torch.float32, SHAPE), expected, 1e-5)


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
        accumulate(None, [(make_part(device, 4, torch.float32), 0, 0)] * 5, torch.float32, SHAPE)


def test_nothing_to_do(device):
    total = torch.zeros(SHAPE, device=device)
    add(total, [(total[:, :, :0], 0, 0)], torch.float32, SHAPE)
    assert (total == 0).all()


def test_no_kernel_merges_what_has_no_signature(monkeypatch):
    """As subclasses of tensors have none: launches are known by it."""
    monkeypatch.setattr("attnmesh.ops.merge._kernel_serves", lambda states: True)
    monkeypatch.setattr("attnmesh.ops.triton_merge.merge_states", lambda states, key: pytest.fail(f"key {key}"))
    out, lse = torch.rand(2, 2, 2, 3, 4), torch.zeros(2, 2, 2, 3)
    states = [State(torch.nn.Parameter(out[i], requires_grad=False), lse[i]) for i in range(2)]
    torch.testing.assert_close(merge_any(states).out, out.mean(0))


@pytest.mark.parametrize("count", [1, sweep(3), sweep(8)])
def test_merges_whole_states_as_torch_does(device, count):
    """Of several dtypes, strided or not, with rows without keys, infinite and NaN; twice, with one launch prepared."""
    dtypes = [torch.float32, torch.float16, torch.bfloat16]
    for _ in range(2):
        states = [make_part(device, 50, dtypes[i % 3], strided=i % 2 == 1) for i in range(count)]
        for i, state in enumerate(states):
            state.lse[0, 0, :2] = -torch.inf  # of all states
            state.lse[1, 2, 10 + i : 13] = torch.inf
        states[0].lse[0, 1, 7] = torch.nan
        found, expected = merge_states(states, signature(*[x for state in states for x in state])), merge(states)
        assert found.out.dtype == found.lse.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6, equal_nan=True)
