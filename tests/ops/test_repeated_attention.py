"""A call that repeats is checked as the first one was, and computes its own values."""

import logging
import warnings

import pytest
import torch
from torch.autograd import forward_ad

import attnmesh as am


@pytest.fixture
def qkv():
    return [torch.randn(1, 4, 24, 16, dtype=torch.float64) for _ in range(3)]


def expected(q, k, v, **how):
    return am.attention(q, k, v, **how, backend="reference")


def test_documents_of_other_lengths(qkv):
    """Also where a mask that is gone had the same address."""
    for cut in range(1, 24):
        mask = am.Causal() & am.Documents([cut, 24 - cut])
        assert torch.allclose(am.attention(*qkv, mask=mask), expected(*qkv, mask=mask))
        del mask


def test_positions_of_other_values(qkv):
    q, k, v = qkv
    for start in (0, 5, 12):
        at = torch.arange(start, start + 8)
        how = {"mask": am.Causal(), "q_positions": at}
        assert torch.allclose(am.attention(q[:, :, :8], k, v, **how), expected(q[:, :, :8], k, v, **how))
    at[3] = 100  # in place
    assert torch.allclose(am.attention(q[:, :, :8], k, v, **how), expected(q[:, :, :8], k, v, **how))


def test_slopes_and_sinks_of_other_values(qkv):
    for seed in range(2):
        torch.manual_seed(seed)
        how = {"mask": am.Causal(), "alibi_slopes": torch.rand(qkv[0].shape[1]), "sinks": torch.randn(qkv[0].shape[1])}
        assert torch.allclose(am.attention(*qkv, **how), expected(*qkv, **how))


@pytest.mark.parametrize(
    ("good", "bad", "reason"),
    [
        ({"return_lse": True}, {"return_lse": 1}, "return_lse must be True or False, got 1"),
        ({"backend": "aten"}, {"backend": ["aten"]}, "backend must be"),
        ({"alibi_slopes": torch.ones(2)}, {"alibi_slopes": torch.ones(2, requires_grad=True)}, "must be constants"),
        ({"scale": 1}, {"scale": float("nan")}, "scale must be a finite number, got nan"),
        ({"q_positions": torch.arange(8)}, {"q_positions": torch.arange(8.0)}, "q_positions must be integers"),
        ({"mask": am.Full()}, {"mask": None}, "mask must be an attnmesh mask"),
    ],
)
def test_a_wrong_argument_after_a_right_one(good, bad, reason):
    q = torch.randn(1, 2, 8, 16)
    am.attention(q, q, q, **good)
    with pytest.raises(ValueError, match=reason):
        am.attention(q, q, q, **bad)


def test_a_warning_is_not_lost():
    q = torch.randn(1, 8, 4, 16)
    for _ in range(2):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            am.attention(q, q, q)
        assert len(caught) == 1


def test_a_choice_is_logged_by_a_repeat_if_the_log_is_shown_later(caplog):
    q = torch.randn(1, 2, 9, 16)
    am.attention(q, q, q)
    with caplog.at_level(logging.INFO, logger="attnmesh"):
        am.attention(q, q, q)
    assert "forward of q (1, 2, 9, 16)" in caplog.text


def test_forward_mode_and_second_derivatives_are_refused(qkv):
    q, k, v = qkv
    am.attention(q, k, v)
    with forward_ad.dual_level(), torch.no_grad(), pytest.raises((NotImplementedError, RuntimeError)):
        am.attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)
    q.requires_grad_()
    grad_out = torch.randn_like(q, requires_grad=True)
    (grad,) = torch.autograd.grad(am.attention(q, k, v), q, grad_out, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
