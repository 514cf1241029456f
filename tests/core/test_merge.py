"""The algebra of states: merge is associative, commutative, total and differentiable."""

import math
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnmesh.core.masks import Causal
from attnmesh.core.state import State, accumulation_dtype, merge, merge_sinks
from attnmesh.ops.dense.api import attention
from helpers.cases import sweep

INF = math.inf
D = 3

plenty = settings(max_examples=25, deadline=None)
lses = st.floats(-50, 50) | st.sampled_from([-INF, -INF, 1e4, -1e4, 0.0])


@st.composite
def some_states(draw, least: int = 1, most: int = 5) -> list[State]:
    """Float64 states of a few rows; a row that saw nothing may hold anything in `out`, NaN included."""
    rows = draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    states = []
    for _ in range(draw(st.integers(least, most))):
        lse = torch.tensor(draw(st.lists(lses, min_size=rows, max_size=rows)), dtype=torch.float64)
        out = torch.randn(rows, D, dtype=torch.float64, generator=generator)
        out[lse == -INF] = draw(st.sampled_from([0.0, math.nan, INF, 7.0]))
        states.append(State(out, lse))
    return states


def merged_in_plain_python(states: list[State]) -> State:
    """The truth, a row at a time, from the definition, with Python's own floats."""
    outs, merged = [], []
    for row in range(len(states[0].lse)):
        parts = [(float(s.lse[row]), s.out[row].tolist()) for s in states if float(s.lse[row]) > -INF]
        if not parts:
            outs.append([0.0] * D)
            merged.append(-INF)
            continue
        top = max(lse for lse, _ in parts)
        total = math.fsum(math.exp(lse - top) for lse, _ in parts)
        outs.append([math.fsum(math.exp(lse - top) * out[d] for lse, out in parts) / total for d in range(D)])
        merged.append(top + math.log(total))
    return State(torch.tensor(outs, dtype=torch.float64), torch.tensor(merged, dtype=torch.float64))


def assert_same(got: State, want: State, rtol: float = 1e-12, atol: float = 1e-12) -> None:
    torch.testing.assert_close(got.out, want.out, rtol=rtol, atol=atol)
    torch.testing.assert_close(got.lse, want.lse, rtol=rtol, atol=atol)


def attend(scores: Tensor, v: Tensor) -> State:
    """Softmax attention over some keys; a row whose scores are all -inf sees nothing."""
    lse = torch.logsumexp(scores, -1)
    weights = torch.where(scores > -INF, torch.exp(scores - lse.unsqueeze(-1)), 0.0)
    return State(weights @ v, lse)


@plenty
@given(some_states())
def test_merge_is_what_the_definition_says(states):
    assert_same(merge(states), merged_in_plain_python(states))


@plenty
@given(some_states(least=3, most=3))
def test_merge_is_associative(states):
    a, b, c = states
    left, right, at_once = merge([merge([a, b]), c]), merge([a, merge([b, c])]), merge(states)
    assert_same(left, right)
    assert_same(left, at_once)


@plenty
@given(some_states(least=2, most=3))
def test_merge_is_commutative(states):
    first = merge(states)
    for order in permutations(states):
        assert_same(merge(order), first)


@plenty
@given(some_states(), st.integers(0, 5))
def test_the_identity_changes_nothing_wherever_it_stands(states, at):
    identity = State.identity(states[0].out.shape, dtype=torch.float64)
    assert_same(merge([*states[:at], identity, *states[at:]]), merge(states))


@plenty
@given(some_states(least=1, most=1))
def test_one_state_is_returned_bit_for_bit(states):
    (state,) = states
    nothing = (state.lse == -INF).unsqueeze(-1)
    out, lse = merge(states)
    assert torch.equal(out, torch.where(nothing, 0.0, state.out))
    assert torch.equal(lse, state.lse)


@plenty
@given(some_states())
def test_rows_nobody_saw_are_exactly_the_identity_and_nothing_is_ever_nan(states):
    out, lse = merge(states)
    unseen = torch.stack([state.lse for state in states]).eq(-INF).all(0)
    assert not out.isnan().any()
    assert not lse.isnan().any()
    assert torch.equal(out[unseen], torch.zeros_like(out[unseen]))
    assert torch.equal(lse == -INF, unseen)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("poison", [math.nan, INF, -INF])
def test_a_single_finite_row_among_unseen_ones_comes_out_alone(dtype, poison):
    states = [State(torch.full((5, D), poison, dtype=dtype), torch.full((5,), -INF, dtype=dtype)) for _ in range(4)]
    states[2].out[3], states[2].lse[3] = torch.tensor([1.0, 2.0, 3.0]), -1e4
    out, lse = merge(states)
    assert out.tolist() == [[0] * D] * 3 + [[1, 2, 3]] + [[0] * D]
    assert lse.tolist() == [-INF, -INF, -INF, -1e4, -INF]


@pytest.mark.parametrize(
    ("dtype", "level"),
    [(torch.float32, 1e4), sweep(torch.float64, 1e4), sweep(torch.float32, -1e4), sweep(torch.float64, -1e4)],
)
def test_a_thousand_states_of_extreme_lse_average_evenly(dtype, level):
    outs = torch.randn(1000, 1, D, dtype=dtype)
    out, lse = merge(State(x, torch.full((1,), level, dtype=dtype)) for x in outs)
    torch.testing.assert_close(out, outs.mean(0))
    torch.testing.assert_close(lse, torch.full((1,), level + math.log(1000), dtype=dtype))


def test_the_far_larger_lse_wins_outright():
    low = State(torch.full((1, D), 5.0), torch.tensor([-1e4]))
    high = State(torch.full((1, D), 2.0), torch.tensor([1e4]))
    out, lse = merge([low, high])
    assert out.tolist() == [[2.0] * D]
    assert lse.tolist() == [1e4]


@plenty
@given(st.data())
def test_keys_split_anywhere_merge_to_softmax_over_all_of_them(data):
    keys = data.draw(st.integers(0, 12))
    cuts = sorted(data.draw(st.lists(st.integers(0, keys), max_size=4)))
    torch.manual_seed(data.draw(st.integers(0, 2**32)))
    scores = 8 * torch.randn(2, 5, keys, dtype=torch.float64)
    scores[torch.rand_like(scores) < data.draw(st.sampled_from([0.0, 0.5, 0.9]))] = -INF
    v = torch.randn(keys, D, dtype=torch.float64)
    parts = zip([0, *cuts], [*cuts, keys], strict=True)
    split = merge(attend(scores[..., a:b], v[a:b]) for a, b in parts)
    assert_same(split, attend(scores, v))


@pytest.mark.parametrize("count", [1, sweep(2), sweep(4)])
def test_gradients_flow_through_every_out_and_every_lse(count):
    hidden = torch.rand(count, 2, 3) < 0.4
    hidden[0] = False  # of a row that nobody saw, finite differences of lse are -inf - -inf
    outs = torch.randn(count, 2, 3, D, dtype=torch.float64, requires_grad=True)
    lses = (3 * torch.randn(count, 2, 3, dtype=torch.float64)).requires_grad_()

    def merged(outs: Tensor, lses: Tensor) -> State:
        lses = torch.where(hidden, -INF, lses)
        return merge(State(out, lse) for out, lse in zip(outs, lses, strict=True))

    assert torch.autograd.gradcheck(merged, (outs, lses))
    assert torch.autograd.gradgradcheck(merged, (outs, lses))


@plenty
@given(some_states())
def test_gradients_are_never_nan_and_zero_where_nothing_was_seen(states):
    for state in states:
        state.out.requires_grad_()
        state.lse.requires_grad_()
    out, lse = merge(states)
    (out.sum() + torch.where(lse > -INF, lse, 0.0).sum()).backward()
    for state in states:
        unseen = state.lse == -INF
        for grad in (state.out.grad, state.lse.grad):
            assert grad.isfinite().all()
            assert not grad[unseen].any()


def test_a_gradient_into_the_lse_of_an_unseen_row_stops_there():
    state = State(torch.full((1, D), math.nan), torch.full((1,), -INF))
    for x in state:
        x.requires_grad_()
    out, lse = merge([state, state])
    torch.autograd.backward([out, lse], [torch.ones_like(out), torch.ones_like(lse)])
    assert state.out.grad.tolist() == [[0.0] * D]
    assert state.lse.grad.tolist() == [0.0]


@pytest.mark.parametrize(
    ("out_dtypes", "lse_dtype", "result"),
    [
        ([torch.bfloat16], torch.bfloat16, torch.float32),
        ([torch.float16, torch.float16], torch.float32, torch.float32),
        ([torch.bfloat16, torch.float16], torch.float32, torch.float32),
        ([torch.bfloat16, torch.float32], torch.float32, torch.float32),
        ([torch.float64, torch.float64], torch.float64, torch.float64),
        ([torch.bfloat16, torch.float64], torch.float32, torch.float64),
        ([torch.float32, torch.float32], torch.float64, torch.float64),
    ],
)
def test_the_result_is_float32_unless_something_is_float64(out_dtypes, lse_dtype, result):
    out, lse = merge(State(torch.ones(2, D, dtype=d), torch.zeros(2, dtype=lse_dtype)) for d in out_dtypes)
    assert (out.dtype, lse.dtype) == (result, result)


def test_sums_are_kept_in_float32_or_float64():
    assert accumulation_dtype(torch.float64) is torch.float64
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert accumulation_dtype(dtype) is torch.float32


def test_low_precision_states_merge_without_rounding_to_their_precision():
    states = [State(torch.randn(64, D).bfloat16(), torch.randn(64)) for _ in range(8)]
    exact = merge(State(s.out.double(), s.lse.double()) for s in states)
    out, lse = merge(states)
    torch.testing.assert_close(out.double(), exact.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse.double(), exact.lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(D,), (0, D), (2, 0, D), (2, 3, 4, D), (4, 0)])
def test_any_shape_merges(shape):
    state = State(torch.randn(shape), torch.randn(shape[:-1]))
    out, lse = merge([state, state])
    torch.testing.assert_close(out, state.out)
    torch.testing.assert_close(lse, state.lse + math.log(2))


def test_inputs_are_left_as_they_were():
    states = [State(torch.randn(2, D), torch.tensor([-INF, 1.0])) for _ in range(2)]
    before = [State(s.out.clone(), s.lse.clone()) for s in states]
    merge(states)
    for state, copy in zip(states, before, strict=True):
        assert torch.equal(state.out, copy.out)
        assert torch.equal(state.lse, copy.lse)


def test_the_identity_has_the_shape_it_was_asked_for():
    out, lse = State.identity([2, 4, D], dtype=torch.float32)
    assert torch.equal(out, torch.zeros(2, 4, D))
    assert torch.equal(lse, torch.full((2, 4), -INF))


def test_merging_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one state"):
        merge([])


@pytest.mark.parametrize(
    ("out_shape", "lse_shape"),
    [((3, D), (3,)), ((2, D + 1), (2,)), ((2, D), (3,)), ((2, D), (2, 1)), ((1, D), (1,)), ((2, D), (1,))],
)
def test_states_of_another_shape_are_refused(out_shape, lse_shape):
    good = State(torch.zeros(2, D), torch.zeros(2))
    with pytest.raises(ValueError, match=r"states\[1\] has out"):
        merge([good, State(torch.zeros(out_shape), torch.zeros(lse_shape))])


def test_a_first_state_whose_lse_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"states\[0\] has out"):
        merge([State(torch.zeros(2, D), torch.zeros(3))])


def test_weights_divide_by_the_new_sum_unlike_the_erratum_of_seed_002():
    scores, v = torch.randn(4, 10, dtype=torch.float64), torch.randn(10, D, dtype=torch.float64)
    states = [attend(scores[:, :6], v[:6]), attend(scores[:, 6:], v[6:])]
    truth = attend(scores, v)

    top = torch.maximum(states[0].lse, states[1].lse)  # the seed: scale = exp(LSE - m_new), and no division
    seed = sum(torch.exp(state.lse - top).unsqueeze(-1) * state.out for state in states)

    torch.testing.assert_close(merge(states).out, truth.out)
    share = torch.exp(truth.lse - top).unsqueeze(-1)  # what the seed's formula is too large by: more than 1, up to 2
    torch.testing.assert_close(seed, share * truth.out)
    assert (share > 1.1).all()


# Sinks.


def test_sinks_of_heads_join_as_they_do_in_attention():
    q, k, v = (torch.randn(2, 3, 7, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    sinks = torch.randn(3, dtype=torch.float64, requires_grad=True)
    leaves, grads = (q, k, v, sinks), (torch.randn(2, 3, 7, 4).double(), torch.randn(2, 3, 7).double())
    inside = attention(q, k, v, mask=Causal(), sinks=sinks, return_lse=True)
    alone = State(*attention(q, k, v, mask=Causal(), return_lse=True))
    joined = merge_sinks(alone, sinks[None, :, None])
    for found, expected in zip(
        (*joined, *torch.autograd.grad(joined, leaves, grads)),
        (*inside, *torch.autograd.grad(inside, leaves, grads)),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_sink_of_each_query_is_one_more_key_of_it():
    scores, values = torch.randn(5, 6, dtype=torch.float64), torch.randn(6, D, dtype=torch.float64)
    sinks = torch.randn(5, dtype=torch.float64)
    found = merge_sinks(State(scores.softmax(-1) @ values, scores.logsumexp(-1)), sinks)
    scores = torch.cat([scores, sinks[:, None]], 1)
    torch.testing.assert_close(found.out, scores.softmax(-1)[:, :-1] @ values)
    torch.testing.assert_close(found.lse, scores.logsumexp(-1))


def test_sinks_and_rows_without_keys():
    lse = torch.tensor([-INF, -INF, 0.0, 0.0, INF, INF], requires_grad=True)
    sinks = torch.tensor([-INF, 2.0, -INF, INF, 1.0, INF], requires_grad=True)
    found = merge_sinks(State(torch.ones(6, D) * (lse[:, None].detach() > -INF), lse), sinks)
    assert found.lse.tolist() == [-INF, 2.0, 0.0, INF, INF, INF]
    assert found.out[:, 0].tolist() == [0.0, 0.0, 1.0, 0.0, 1.0, 0.5]
    for grad in torch.autograd.grad([found.out, found.lse], [lse, sinks], [torch.ones(6, D), torch.ones(6)]):
        assert not grad.isnan().any()


@pytest.mark.parametrize("shape", [(3,), (2, 3), (3, 1), (1, 2, 1), (2, 3, 8)])
def test_sinks_whose_dimensions_are_not_those_of_the_lse_are_refused(shape):
    state = State(torch.zeros(2, 3, 3, D), torch.zeros(2, 3, 3))
    with pytest.raises(ValueError, match="each as long as that of lse or 1"):
        merge_sinks(state, torch.zeros(shape))
