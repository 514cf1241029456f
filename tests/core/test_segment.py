"""The algebra of segments: composition is associative with an identity, and scans equal one step after another."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from attnmesh.core.segment import Segment, compose, scan, total

plenty = settings(max_examples=25, deadline=None)
FORMS = ("dense", "diagonal", "scalar")


@st.composite
def some_segments(draw, least: int = 1, most: int = 9) -> Segment:
    """Stacked float64 segments of two states [K, V]; some transitions are 0, as where a document starts."""
    count, K, V = draw(st.integers(least, most)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    form = draw(st.sampled_from(FORMS))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    shape = {"dense": (K, K), "diagonal": (K, 1), "scalar": (1, 1)}[form]
    transition = torch.randn(count, 2, *shape, dtype=torch.float64, generator=generator)
    starts = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    transition[torch.tensor(starts)] = 0.0
    return Segment(transition, torch.randn(count, 2, K, V, dtype=torch.float64, generator=generator))


def at(segments: Segment, i: int) -> Segment:
    return Segment(segments.transition[i], segments.update[i])


def dense(transition: Tensor, rows: int) -> Tensor:
    """A transition of any form as a matrix."""
    if transition.shape[-1] == transition.shape[-2] == rows:
        return transition
    return torch.diag_embed(transition.squeeze(-1).expand(*transition.shape[:-2], rows))


def step_by_step(segments: Segment, initial: Tensor) -> Tensor:
    """The states by the definition."""
    states = [initial]
    for transition, update in zip(*segments, strict=True):
        states.append(dense(transition, update.shape[-2]) @ states[-1] + update)
    return torch.stack(states)


def assert_same(found: Segment, expected: Segment) -> None:
    rows = expected.update.shape[-2]
    torch.testing.assert_close(dense(found.transition, rows), dense(expected.transition, rows))
    torch.testing.assert_close(found.update, expected.update)


@plenty
@given(some_segments(3, 3))
def test_composition_is_associative(segments):
    a, b, c = (at(segments, i) for i in range(3))
    assert_same(c.after(b).after(a), c.after(b.after(a)))


@plenty
@given(some_segments(1, 1))
def test_the_identity_changes_nothing(segments):
    one = at(segments, 0)
    nothing = Segment.identity(one.update.shape, dtype=torch.float64)
    for same in (one.after(nothing), nothing.after(one)):
        assert_same(same, one)


@plenty
@given(some_segments(2, 2))
def test_applying_a_composition_is_applying_one_after_the_other(segments):
    first, second = at(segments, 0), at(segments, 1)
    state = torch.randn_like(first.update)
    torch.testing.assert_close(second.after(first).apply(state), second.apply(first.apply(state)))


def test_forms_of_transitions_compose():
    K, V = 3, 2
    forms = [Segment(torch.randn(*form, dtype=torch.float64), torch.randn(K, V, dtype=torch.float64))
             for form in ((K, K), (K, 1), (1, 1))]  # fmt: skip
    for later in forms:
        for earlier in forms:
            matrices = [Segment(dense(x.transition, K), x.update) for x in (later, earlier)]
            assert_same(later.after(earlier), compose(*matrices))


@plenty
@given(some_segments())
def test_scans_and_totals_equal_one_step_after_another(segments):
    initial = torch.randn(segments.update.shape[1:], dtype=torch.float64)
    expected = step_by_step(segments, initial)
    torch.testing.assert_close(scan(segments, initial), expected)
    torch.testing.assert_close(total(segments).apply(initial), expected[-1])


@plenty
@given(some_segments())
def test_the_backward_is_that_of_autograd(segments):
    def gradients(run) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (*segments, torch.ones(segments.update.shape[1:]).double())]
        states = run(Segment(*leaves[:2]), leaves[2])
        weights = torch.linspace(-1, 1, states.numel(), dtype=torch.float64).view_as(states)
        return list(torch.autograd.grad((states * weights).sum(), leaves))

    for found, expected in zip(gradients(scan), gradients(step_by_step), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_document_start_forgets_what_came_before():
    before, start = (Segment(torch.full((2, 1), value), torch.randn(2, 3)) for value in (torch.inf, 0.0))
    assert torch.equal(start.apply(torch.full((2, 3), 1e30)), start.update)
    assert not torch.isfinite(before.apply(torch.ones(2, 3))).any()


@pytest.mark.parametrize(
    ("segment", "message"),
    [
        (Segment(torch.ones(2, 3), torch.ones(2, 4)), r"transition must be \[\.\.\., K, K\]"),
        (Segment(torch.ones(5, 2, 2), torch.ones(2, 4)), "transition must be"),
        (Segment(torch.ones(2, 2).double(), torch.ones(2, 4)), "transition must be floating point, both of one dtype"),
        (Segment(torch.ones(2, 2), None), "update must be a tensor, got NoneType None"),
    ],
)
def test_what_is_no_segment_is_refused(segment, message):
    with pytest.raises(ValueError, match=message):
        segment.apply(torch.ones(2, 4))
    with pytest.raises(ValueError, match=message):
        Segment.identity((2, 4), dtype=torch.float32).after(segment)


def test_a_state_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"state must be as update, float32 tensor \[2, 4\] on cpu, got"):
        Segment(torch.ones(2, 2), torch.ones(2, 4)).apply(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"shape must be that of a state"):
        Segment.identity((2,), dtype=torch.float32)
