"""canonicalize: one order for the slots of a row."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnmesh import canonicalize
from helpers.sparse import HIGH, LOW


def by_hand(row, scores, s_kv, unique):
    """Slots (key, score) that name a key, ascending; the first of each if unique."""
    named = [
        (key, score) for key, score in zip(row, scores, strict=True) if 0 <= key < (HIGH if s_kv is None else s_kv)
    ]
    if unique:
        named = [slot for n, slot in enumerate(named) if slot[0] not in [key for key, _ in named[:n]]]
    return sorted(named, key=lambda slot: slot[0])


@given(
    rows=st.integers(1, 9).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(-2, 9) | st.sampled_from([LOW, HIGH, HIGH - 1]), min_size=n, max_size=n), max_size=4
        ).map(lambda rows: (rows, n))
    ),
    s_kv=st.none() | st.integers(0, 8),
    unique=st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_ascending_with_what_names_no_key_at_the_end(rows, s_kv, unique):
    rows, n = rows
    indices = torch.tensor(rows, dtype=torch.int32).view(len(rows), n)
    scores = torch.arange(indices.numel(), dtype=torch.float32).view(indices.shape)
    slots = canonicalize(indices, scores, s_kv=s_kv, unique=unique)
    assert slots.indices.dtype == slots.lengths.dtype == torch.int32
    for row, given_, found, found_scores, length in zip(
        rows, scores.tolist(), *map(list, slots[:2]), slots.lengths, strict=True
    ):
        expected = by_hand(row, given_, s_kv, unique)
        rest = n - len(expected)
        assert int(length) == len(expected)
        assert found.tolist() == [key for key, _ in expected] + [-1] * rest
        assert found_scores.tolist() == [score for _, score in expected] + [-torch.inf] * rest
    again = canonicalize(*slots[:2], s_kv=s_kv, unique=unique)
    assert torch.equal(again.indices, slots.indices)
    assert torch.equal(again.scores, slots.scores)


def test_rows_that_chose_the_same_keys_come_out_the_same():
    keys = torch.stack([torch.randperm(40)[:15] for _ in range(6)]).int()
    turned = keys[:, torch.randperm(15)]
    a, b = canonicalize(keys), canonicalize(turned)
    assert torch.equal(a.indices, b.indices)
    assert a.scores is None
    assert a.lengths.tolist() == [15] * 6


def test_a_gradient_flows_through_the_scores():
    indices = torch.tensor([[3, -1, 0, 3]], dtype=torch.int32)
    scores = torch.tensor([[1.0, 2.0, 3.0, 4.0]], requires_grad=True)
    slots = canonicalize(indices, scores, unique=True)
    (grad,) = torch.autograd.grad(slots.scores[slots.indices >= 0] @ torch.tensor([5.0, 7.0]), scores)
    assert grad.tolist() == [[7.0, 0.0, 5.0, 0.0]]


def test_one_kv_head_may_have_a_dimension_and_no_rows_are_no_mistake():
    assert canonicalize(torch.tensor([[[2, 1]]], dtype=torch.int32)).indices.tolist() == [[1, 2]]
    assert canonicalize(torch.zeros(0, 3, dtype=torch.int32)).lengths.shape == (0,)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"indices": torch.zeros(2, 3)}, "indices must be an int32 tensor, got torch.float32"),
        ({"indices": torch.zeros(2, 3, dtype=torch.int64)}, "indices must be an int32 tensor, got torch.int64"),
        ({"indices": torch.zeros(3, dtype=torch.int32)}, r"indices must be \[s_q, topk\] .* got \[3\]"),
        ({"indices": torch.zeros(3, 0, dtype=torch.int32)}, r"with topk >= 1, got \[3, 0\]"),
        ({"scores": torch.zeros(2, 2)}, r"scores must be \[2, 3\], .* got \[2, 2\]"),
        ({"scores": [1.0]}, r"scores must be \[2, 3\], .* got list"),
        ({"s_kv": -1}, "s_kv must be a non-negative integer, got -1"),
        ({"s_kv": 2.5}, "s_kv must be a non-negative integer, got 2.5"),
    ],
    ids=str,
)
def test_refusals(how, said):
    with pytest.raises(ValueError, match=said):
        canonicalize(**{"indices": torch.zeros(2, 3, dtype=torch.int32)} | how)
