"""convert_lse: the base of a log-sum-exp, always by name."""

import math

import pytest
import torch

from attnmesh import convert_lse


def test_there_and_back():
    lse = torch.randn(50, 3, dtype=torch.float64) * 30
    two = convert_lse(lse, "e", "2")
    torch.testing.assert_close(torch.exp2(two), torch.exp(lse))
    torch.testing.assert_close(convert_lse(two, "2", "e"), lse)
    assert torch.equal(convert_lse(lse, "e", "e"), lse)
    assert torch.equal(convert_lse(lse, "2", "2"), lse)
    assert convert_lse(torch.tensor(1.0), "2", "e").item() == pytest.approx(math.log(2))


def test_infinities_stay_what_they_are():
    lse = torch.tensor([torch.inf, -torch.inf, 0.0])
    for src, dst in (("e", "2"), ("2", "e"), ("e", "e")):
        assert torch.equal(convert_lse(lse, src, dst), lse)


def test_a_gradient_flows():
    lse = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: convert_lse(x, "2", "e"), lse)


@pytest.mark.parametrize("base", ["10", "ln", 2, None, "E", ""])
def test_a_base_without_a_name_is_refused(base):
    for given in ((base, "e"), ("e", base)):
        with pytest.raises(ValueError, match=r"(src|dst) must be 'e' \(natural\) or '2', got "):
            convert_lse(torch.zeros(1), *given)
