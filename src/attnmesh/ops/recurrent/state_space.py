"""State-space layers: Mamba-2, with a decay per head and position, and Mamba-1, with one for each entry of a state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from attnmesh.core.segment import Segment, scan
from attnmesh.ops.recurrent.chunked import CHUNK, chunk_size, in_groups, joined, scalar_chunks
from attnmesh.ops.recurrent.kernels import Inputs, KernelChunks, why_no_kernels
from attnmesh.ops.recurrent.layer import (
    Chunks,
    Form,
    Recurrence,
    SegmentedChunks,
    in_chunks,
    reset_at_starts,
    starts_in_chunks,
)


@dataclass(frozen=True, eq=False)
class _StateSpace(Recurrence):
    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    D: Tensor | None = None

    _OPTIONAL: ClassVar[tuple[str, ...]] = ("D",)
    _OUTPUT: ClassVar[str] = "x"


@dataclass(frozen=True, eq=False)
class Mamba2(_StateSpace):
    """Mamba-2 (SSD; Bamba, Granite 4, Nemotron-H, Zamba2): `S = exp(dt A) S + B (dt x)^T`; the output is `C^T S + D x`.

    x is [B, H, S, V], dt [B, H, S] (positive, after softplus), A [H] (negative), B and C [B, G, S, K], where head h of
    x reads group `h // (H // G)`, and D [H]. A state is [B, H, K, V], the transpose of mamba_ssm's.

    Examples:
        >>> x, dt, A = torch.randn(1, 4, 10, 8), torch.rand(1, 4, 10), -torch.rand(4)
        >>> B, C = torch.randn(2, 1, 1, 10, 16)
        >>> out, state = am.recurrent.scan(am.recurrent.Mamba2(x, dt, A, B, C), return_final_state=True)
        >>> out.shape, state.shape
        (torch.Size([1, 4, 10, 8]), torch.Size([1, 4, 16, 8]))
    """

    _FORM: ClassVar[Form] = "scalar"
    _DIMS: ClassVar[dict[str, str]] = {
        "x": "batch heads seq value_dim", "dt": "batch heads seq", "A": "heads",
        "B": "batch groups seq key_dim", "C": "batch groups seq key_dim", "D": "heads",
    }  # fmt: skip

    def _step(self, state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        x, dt, B, C = (self._per_head(name, t) for name in ("x", "dt", "B", "C"))
        dt = dt[..., None, None]
        state = (dt * self.A[:, None, None]).exp() * state + B.unsqueeze(-1) * (dt * x.unsqueeze(-2))
        out = (C.unsqueeze(-1) * state).sum(-2)
        return state, out if self.D is None else out + self.D[:, None] * x

    def _why_no_kernels(self) -> str | None:
        return why_no_kernels(self.C, self.B, self.x, self.dt, self.A, self.D)

    def _chunks(self, ages: Tensor | None, kernels: bool) -> Chunks:
        sizes = self._check()
        size = chunk_size(sizes.length)
        g = self.dt * self.A[:, None]
        if kernels:
            g = self.dt.float() * self.A.float()[:, None]
            return KernelChunks(Inputs(self.C, self.B, self.x, g, self.dt, self.D, ages, 1.0, delta=False))
        C, B, v, g = (in_chunks(x, size, sizes) for x in (self.C, self.B, self.dt.unsqueeze(-1) * self.x, g))
        chunks = scalar_chunks(C, B, v, reset_at_starts(g, ages, size), None, sizes.length)
        return chunks if self.D is None else _WithSkip(chunks, self.D[:, None, None] * self.x)


@dataclass(frozen=True)
class _WithSkip(Chunks):
    """Chunks whose outputs have a term that reads no state."""

    chunks: Chunks
    skip: Tensor

    def total(self) -> Segment:
        return self.chunks.total()

    def run(self, state: Tensor) -> tuple[Tensor, Tensor]:
        out, state = self.chunks.run(state)
        return out + self.skip, state


@dataclass(frozen=True, eq=False)
class Mamba1(_StateSpace):
    """Mamba-1's selective scan (Jamba, Falcon Mamba): `S = exp(dt A) S + dt B x`; the output is `C^T S + D x`.

    x and dt (positive, after softplus) are [B, H, S] with a channel for each head, A [H, K] (negative), B and C
    [B, G, S, K], where channel h reads group `h // (H // G)`, and D [H]. The output is [B, H, S]; a state is
    [B, H, K, 1].

    Examples:
        >>> x, dt, A = torch.randn(1, 6, 10), torch.rand(1, 6, 10), -torch.rand(6, 4)
        >>> B, C = torch.randn(2, 1, 1, 10, 4)
        >>> am.recurrent.scan(am.recurrent.Mamba1(x, dt, A, B, C)).shape
        torch.Size([1, 6, 10])
    """

    _FORM: ClassVar[Form] = "diagonal"
    _DIMS: ClassVar[dict[str, str]] = {
        "x": "batch heads seq", "dt": "batch heads seq", "A": "heads key_dim",
        "B": "batch groups seq key_dim", "C": "batch groups seq key_dim", "D": "heads",
    }  # fmt: skip

    def _step(self, state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        x, dt, B, C = (self._per_head(name, t) for name in ("x", "dt", "B", "C"))
        dt = dt.unsqueeze(-1)
        state = (dt * self.A).exp().unsqueeze(-1) * state + (dt * B * x.unsqueeze(-1)).unsqueeze(-1)
        out = (C * state.squeeze(-1)).sum(-1)
        return state, out if self.D is None else out + self.D * x

    def _chunks(self, ages: Tensor | None, kernels: bool) -> Chunks:
        chunks = _ChannelChunks(self, ages)
        return chunks if self.D is None else _WithSkip(chunks, self.D[:, None] * self.x)


class _ChannelChunks(SegmentedChunks):
    """Chunks of Mamba-1, whose channels share nothing that a product of matrices could use.

    A chunk is a scan over its positions, of all channels and of some chunks at a time. It runs once for the segments,
    and once more for the outputs.
    """

    def __init__(self, layer: Mamba1, ages: Tensor | None) -> None:
        sizes = layer._check()
        size = min(CHUNK, sizes.length)
        x, dt, B, C = (in_chunks(x, size, sizes) for x in (layer.x, layer.dt, layer.B, layer.C))
        self._A: Tensor = layer.A.unflatten(0, (sizes.groups, -1)).unsqueeze(-2)  # [G, H / G, 1, K]
        reset = torch.zeros_like(dt[:, :, :1, :1]) if ages is None else starts_in_chunks(ages, dt, size)
        self._inputs, self._C, self._length = (x, dt, B, reset.bool()), C, sizes.length
        self._elements = dt[:1].numel() * sizes.key_dim
        self.segments = Segment(*in_groups(_segments, self._inputs, self._elements, self._A))

    def outputs(self, states: Tensor) -> Tensor:
        (out,) = in_groups(_outputs, (*self._inputs, self._C, states), self._elements, self._A)
        return joined(out.unsqueeze(-1), self._length).squeeze(-1)


def _segments(x: Tensor, dt: Tensor, B: Tensor, reset: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    g = _log_decays(dt, reset, A)
    state = g.new_zeros(*g.shape[:-2], g.shape[-1], 1)
    return g.sum(-2).exp().unsqueeze(-1), _states(x, dt, B, g, state)[-1]


def _outputs(
    x: Tensor, dt: Tensor, B: Tensor, reset: Tensor, C: Tensor, state: Tensor, A: Tensor
) -> tuple[Tensor]:  # fmt: skip
    states = _states(x, dt, B, _log_decays(dt, reset, A), state)
    return ((C.movedim(-2, 0) * states[1:].squeeze(-1)).sum(-1).movedim(0, -1),)


def _log_decays(dt: Tensor, reset: Tensor, A: Tensor) -> Tensor:
    return (dt.unsqueeze(-1) * A).masked_fill(reset.unsqueeze(-1), -math.inf)


def _states(x: Tensor, dt: Tensor, B: Tensor, g: Tensor, state: Tensor) -> Tensor:
    """The state before every position of the chunks, and after the last, [size + 1, n, B, G, H / G, K, 1]."""
    update = (dt * x).unsqueeze(-1) * B
    return scan(Segment(*(z.movedim(-2, 0).unsqueeze(-1) for z in (g.exp(), update))), state)
