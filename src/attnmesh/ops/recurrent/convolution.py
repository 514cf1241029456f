"""The short convolution: depthwise and causal over a few positions. Its state is the last inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmesh.ops.recurrent.layer import RecurrentLayer, Sizes
from attnmesh.utils.validation import check_choice

Activation = Literal["silu"]


@dataclass(frozen=True, eq=False)
class ShortConvolution(RecurrentLayer):
    """A depthwise causal convolution over W positions: `out[t] = bias + sum over i of weight[:, i] x[t - (W - 1) + i]`.

    x is [B, H, S] with H channels, weight [H, W], bias [H]; `activation` is "silu" or None. A state is the last W - 1
    inputs, [B, H, W - 1], oldest first. Before the first position of a document, inputs are 0.

    Examples:
        >>> x, weight = torch.randn(1, 6, 10), torch.randn(6, 4)
        >>> out = am.recurrent.scan(am.recurrent.ShortConvolution(x, weight, activation="silu"))
        >>> late = torch.nn.functional.conv1d(x, weight[:, None], groups=6)  # without the first three outputs
        >>> torch.allclose(out[..., 3:], torch.nn.functional.silu(late), atol=1e-5)
        True
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None = None
    activation: Activation | None = None

    _DIMS: ClassVar[dict[str, str]] = {"x": "batch heads seq", "weight": "heads width", "bias": "heads"}
    _OPTIONAL: ClassVar[tuple[str, ...]] = ("bias",)
    _OUTPUT: ClassVar[str] = "x"

    def _check(self) -> Sizes:
        sizes = self._dimensions()
        if self.activation is not None:
            check_choice("activation", self.activation, get_args(Activation))
        if sizes["width"] < 1:
            raise ValueError(f"weight must be [heads, width] with a width of at least 1, got {list(self.weight.shape)}")
        return Sizes(sizes["batch"], sizes["heads"], 1, sizes["seq"], sizes["width"] - 1, 1)

    @property
    def state_shape(self) -> tuple[int, ...]:
        sizes = self._check()
        return sizes.batch, sizes.heads, sizes.key_dim

    def _run(self, state: Tensor, ages: Tensor | None, kernels: bool) -> tuple[Tensor, Tensor]:
        x = torch.cat([state, self.x], 2)
        return self._convolve(state, ages), last_inputs(x, self.weight.shape[1], None if ages is None else ages[:, -1])

    def _run_reference(self, state: Tensor, ages: Tensor | None) -> tuple[Tensor, Tensor]:
        outs = []
        for t in range(self.x.shape[2]):
            if ages is not None:
                state = state.masked_fill((ages[:, t] == 0)[:, None, None], 0.0)
            inputs = torch.cat([state, self.x[:, :, t : t + 1]], 2)
            out = (inputs * self.weight).sum(2)
            out = out if self.bias is None else out + self.bias
            outs.append(F.silu(out) if self.activation == "silu" else out)
            state = inputs[:, :, 1:]
        return torch.stack(outs, 2), state

    def _convolve(self, before: Tensor, ages: Tensor | None) -> Tensor:
        """The outputs, with the W - 1 inputs before the first position; all in `compute_dtype`."""
        width, length = self.weight.shape[1], self.x.shape[2]
        x = torch.cat([before, self.x], 2)
        out = None
        for i in range(width):
            part = x[:, :, i : i + length]
            if ages is not None and i < width - 1:
                part = part.masked_fill((ages < width - 1 - i).unsqueeze(1), 0.0)
            term = part * self.weight[:, i, None]
            out = term if out is None else out + term
        assert out is not None
        if self.bias is not None:
            out = out + self.bias[:, None]
        return F.silu(out) if self.activation == "silu" else out


def last_inputs(x: Tensor, width: int, age: Tensor | None) -> Tensor:
    """The state after the inputs `x` [B, H, at least width - 1]; `age` [B or 1] is that of the last position."""
    state = x[:, :, x.shape[2] - (width - 1) :]
    if age is None:
        return state
    back = torch.arange(width - 2, -1, -1, device=x.device)
    return state.masked_fill((age[:, None] < back)[:, None], 0.0)
