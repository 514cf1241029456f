"""Linear layers over few tokens on the CPU."""

import copy
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from attnmesh.generation.layers import linear, one_call, use_linear

pytestmark = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="torch has no MKL")


@pytest.mark.parametrize(
    ("rows", "out", "other"),
    [
        ((3, 1), 96, False),  # MKL's own product reads the weight once
        ((4, 1), 192, True),  # a batched product, in blocks of 96 rows of the weight
        ((1, 11), 51, True),  # blocks of 17
        ((2, 3), 53, True),  # no block divides 53: the transposed product
        ((47,), 96, True),
        ((48,), 96, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("bias", [False, True])
def test_few_rows_have_the_product_of_float64(rows, out, other, bias):
    x, weight, added = torch.randn(*rows, 40), torch.randn(out, 40), torch.randn(out) if bias else None
    with patch("torch.bmm", Mock(wraps=torch.bmm)) as bmm, patch("torch.mm", Mock(wraps=torch.mm)) as mm:
        got = linear(x, weight, added)
        assert bmm.called + mm.called == other
    plain = F.linear(x, weight, added)
    exact = F.linear(x.double(), weight.double(), None if added is None else added.double())
    assert got.shape == plain.shape
    assert got.is_contiguous()
    assert (got - exact).abs().max() <= 2 * (plain - exact).abs().max() + 1e-6


@pytest.mark.parametrize(
    "weight",
    [torch.randn(40, 64).t(), torch.randn(64, 40).bfloat16(), torch.randn(64, 40).double()],
    ids=["transposed", "bfloat16", "float64"],
)
def test_other_weights_take_torchs_product(weight):
    x = torch.randn(8, 40, dtype=weight.dtype)
    assert torch.equal(linear(x, weight), F.linear(x, weight))


def test_plain_linear_layers_compute_so_in_passes_only():
    class Scaled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.ModuleDict({"plain": nn.Linear(40, 64), "scaled": Scaled(40, 64), "own": nn.Linear(40, 64)})
    model["own"].forward = own = Mock(wraps=model["own"].forward)
    use_linear(model)
    assert model["own"].forward is own
    assert "forward" not in vars(model["scaled"])
    x, plain = torch.randn(8, 1, 40), model["plain"]
    with torch.no_grad(), patch("torch.bmm", Mock(wraps=torch.bmm)) as bmm:
        assert torch.equal(plain(x), F.linear(x, plain.weight, plain.bias))
        assert not bmm.called
        copied = copy.deepcopy(plain)
        nn.init.zeros_(copied.weight)
        with one_call():
            torch.testing.assert_close(plain(x), F.linear(x, plain.weight, plain.bias))
            assert torch.equal(copied(x), plain.bias.expand(8, 1, 64))
        assert bmm.called
