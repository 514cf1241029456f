"""The error rule: at most twice the error of the plain computation in the same precision, both against float64."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Relative rounding allowed for results whose exact value, or whose plain error, is zero.
ROUNDING = {
    torch.float64: 1e-13,
    torch.float32: 4 * torch.finfo(torch.float32).eps,
    torch.float16: torch.finfo(torch.float16).eps / 8,
    torch.bfloat16: torch.finfo(torch.bfloat16).eps / 8,
}


class Comparison(NamedTuple):
    """A result, its exact value and the plain computation of it; without `plain` the two must be bitwise equal."""

    name: str
    actual: Tensor
    exact: Tensor
    plain: Tensor | None = None
    rounding: float = ROUNDING[torch.float32]

    @property
    def error(self) -> float:
        """The relative error of the result."""
        return relative_error(self.actual, self.exact)

    @property
    def bound(self) -> float:
        """The largest error that passes."""
        if self.plain is None:
            return 0.0
        return 2 * relative_error(self.plain, self.exact) + self.rounding


def relative_error(actual: Tensor, exact: Tensor) -> float:
    """Return the norm of the error divided by the norm of the exact result.

    Entries that are infinite in both are left out. NaN if an entry is finite in only one of the two.
    """
    finite = torch.isfinite(exact)
    if not torch.equal(finite, torch.isfinite(actual)):
        return float("nan")
    actual, exact = actual.double()[finite], exact.double()[finite]
    return float((actual - exact).norm() / exact.norm().clamp(min=1e-30))


def assert_close(name: str, actual: Tensor, plain: Tensor, exact: Tensor, *, rounding: float) -> None:
    """Assert that results [B, H, S] or [B, H, S, D] obey the error rule.

    As a whole, the error is at most twice the plain error. At its worst position, it is at most four times the plain
    error at that computation's worst position.
    """
    assert actual.shape == exact.shape, name
    assert torch.equal(actual.isfinite(), exact.isfinite()), f"{name}: unexpected NaN or inf"
    assert torch.equal(actual.isneginf(), exact.isneginf()), f"{name}: -inf at other positions"
    size = _norm_by_position(exact)
    if not size.numel():
        return
    one = (exact.numel() / size.numel()) ** 0.5  # the norm of a position of ones: gradients cancel down from there
    error, allowed = (_norm_by_position(x.double().sub(exact).nan_to_num(nan=0.0)) for x in (actual, plain))
    bound = 2 * allowed.norm() + rounding * (size.norm() + one)
    assert error.norm() <= bound, f"{name}: error {error.norm():.2e} > {bound:.2e}, norm {size.norm():.2e}"
    bound, worst = 4 * allowed.max() + 4 * rounding * (size.max() + one), int(error.argmax())
    assert error[worst] <= bound, f"{name}: error {error[worst]:.2e} > {bound:.2e} at position {worst}"


def _norm_by_position(x: Tensor) -> Tensor:
    return x.nan_to_num(neginf=0.0).movedim(2, 0).flatten(1).square().sum(1).sqrt()
