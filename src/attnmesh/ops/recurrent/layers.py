"""The kinds of recurrent layers: linear attention, delta rules, state spaces, and short convolutions.

Linear attention is lightning attention with its fixed decay, and RWKV-7, whose transition is diagonal plus rank 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from attnmesh.core.segment import Segment, scan
from attnmesh.ops.recurrent.chunked import (
    CHUNK,
    channel_chunks,
    chunk_size,
    in_groups,
    joined,
    low_rank_chunks,
    scalar_chunks,
)
from attnmesh.ops.recurrent.kernels import Inputs, KernelChunks, why_no_kernels
from attnmesh.ops.recurrent.layer import (
    Chunks,
    Form,
    Recurrence,
    RecurrentLayer,
    SegmentedChunks,
    Sizes,
    check_scale,
    in_chunks,
    reset_at_starts,
    starts_in_chunks,
)
from attnmesh.utils.validation import check_choice


@dataclass(frozen=True, eq=False)
class LightningAttention(Recurrence):
    """Lightning attention (MiniMax): `S = exp(g) S + k v^T`, where g [H] is the same at all positions.

    q and k are [B, G, S, K], v is [B, H, S, V]; g is the logarithm of each head's decay: minus the slope. The output is
    `scale q^T S`, with `scale` 1 / sqrt(K) by default. A state is [B, H, K, V].

    Examples:
        >>> q, k, v = torch.randn(3, 1, 2, 10, 8)
        >>> slopes = torch.tensor([0.5, 0.25])
        >>> am.recurrent.scan(am.recurrent.LightningAttention(q, k, v, -slopes)).shape
        torch.Size([1, 2, 10, 8])
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    scale: float | None = None

    _FORM: ClassVar[Form] = "scalar"
    _DIMS: ClassVar[dict[str, str]] = {
        "q": "batch groups seq key_dim", "k": "batch groups seq key_dim", "v": "batch heads seq value_dim", "g": "heads"
    }  # fmt: skip

    def _check(self) -> Sizes:
        sizes = super()._check()
        check_scale(self.scale, sizes.key_dim)
        return sizes

    def _step(self, state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        q, k, v = (self._per_head(name, t) for name in ("q", "k", "v"))
        state = state * self.g.exp()[:, None, None] + k.unsqueeze(-1) * v.unsqueeze(-2)
        return state, (q.unsqueeze(-1) * state).sum(-2) * check_scale(self.scale, k.shape[-1])

    def _why_no_kernels(self) -> str | None:
        return why_no_kernels(self.q, self.k, self.v, self.g)

    def _chunks(self, ages: Tensor | None, kernels: bool) -> Chunks:
        sizes = self._check()
        size = chunk_size(sizes.length)
        g = self.g[:, None].expand(sizes.batch, -1, sizes.length)
        if kernels:
            scale = check_scale(self.scale, sizes.key_dim)
            return KernelChunks(Inputs(self.q, self.k, self.v, g, None, None, ages, scale, delta=False))
        q, k, v, g = (in_chunks(x, size, sizes) for x in (self.q, self.k, self.v, g))
        q, g = q * check_scale(self.scale, sizes.key_dim), reset_at_starts(g, ages, size)
        return scalar_chunks(q, k, v, g, None, sizes.length)


@dataclass(frozen=True, eq=False)
class RWKV7(Recurrence):
    """RWKV-7: `S = diag(exp(w)) S + b (a^T S) + k v^T`, where `a` reads the state before the position.

    r (the query), w (the logarithm of the decay), k, a and b are [B, H, S, K], and v is [B, H, S, V]. The output is
    `r^T S`. A state is [B, H, K, V], the transpose of the [V, K] of RWKV's own code. Its token shift is a
    `ShortConvolution` of two positions.

    Examples:
        >>> r, w, k, v, a, b = torch.randn(6, 1, 2, 10, 8)
        >>> a, b = -torch.nn.functional.normalize(a, dim=-1), 0.5 * torch.nn.functional.normalize(b, dim=-1)
        >>> am.recurrent.scan(am.recurrent.RWKV7(r, -w.exp(), k, v, a, b)).shape
        torch.Size([1, 2, 10, 8])
    """

    r: Tensor
    w: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor

    _DIMS: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("r", "w", "k"), "batch heads seq key_dim"), "v": "batch heads seq value_dim",
        **dict.fromkeys(("a", "b"), "batch heads seq key_dim"),
    }  # fmt: skip

    def _step(self, state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        r, w, k, v, a, b = (x[:, :, t].unsqueeze(-1) for x in self._tensors().values())
        state = w.exp() * state + b * (a * state).sum(-2, keepdim=True) + k * v.mT
        return state, (r * state).sum(-2)

    def _chunks(self, ages: Tensor | None, kernels: bool) -> Chunks:
        sizes = self._check()
        size = chunk_size(sizes.length)
        r, w, k, v, a, b = (in_chunks(x, size, sizes) for x in self._tensors().values())
        if ages is not None:
            a = a.masked_fill(starts_in_chunks(ages, a, size), 0.0)
        return low_rank_chunks(r, k, v, reset_at_starts(w, ages, size), a, b, sizes.length)


# Delta rules: a position replaces what its key reads from the state. A decay is per head, or per channel of keys.


@dataclass(frozen=True, eq=False)
class _DeltaRule(Recurrence):
    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    scale: float | None = None

    def _check(self) -> Sizes:
        sizes = super()._check()
        check_scale(self.scale, sizes.key_dim)
        return sizes

    def _step(self, state: Tensor, t: int) -> tuple[Tensor, Tensor]:
        q, k, v, g, beta = (self._per_head(name, t) for name in self._DIMS)
        state = state * (g.exp().unsqueeze(-1) if g.ndim == k.ndim else g.exp()[..., None, None])
        u = beta.unsqueeze(-1) * (v - (k.unsqueeze(-1) * state).sum(-2))
        state = state + k.unsqueeze(-1) * u.unsqueeze(-2)
        return state, (q.unsqueeze(-1) * state).sum(-2) * check_scale(self.scale, k.shape[-1])

    def _chunks(self, ages: Tensor | None, kernels: bool) -> Chunks:
        sizes = self._check()
        size = chunk_size(sizes.length)
        q, k, v, g, beta = (in_chunks(x, size, sizes) for x in self._tensors().values())
        q, g = q * check_scale(self.scale, sizes.key_dim), reset_at_starts(g, ages, size)
        compute = channel_chunks if g.ndim == k.ndim else scalar_chunks
        return compute(q, k, v, g, beta, sizes.length)


@dataclass(frozen=True, eq=False)
class GatedDeltaRule(_DeltaRule):
    """The gated delta rule (Qwen3-Next, OLMo Hybrid): `S = exp(g) S`, then `S += k (beta (v - k^T S))^T`.

    q and k are [B, G, S, K], normalized by the caller as the model does; v is [B, H, S, V], and g, the logarithm of the
    decay, and beta are [B, H, S]. Head h of v reads head `h // (H // G)` of q and k. The output is `scale q^T S`, with
    `scale` 1 / sqrt(K) by default. A state is [B, H, K, V].

    Examples:
        >>> q, k, v = torch.randn(3, 1, 2, 10, 8)
        >>> g, beta = -torch.rand(1, 2, 10), torch.rand(1, 2, 10)
        >>> k = torch.nn.functional.normalize(k, dim=-1)
        >>> am.recurrent.scan(am.recurrent.GatedDeltaRule(q, k, v, g, beta)).shape
        torch.Size([1, 2, 10, 8])
    """

    _DIMS: ClassVar[dict[str, str]] = {
        "q": "batch groups seq key_dim", "k": "batch groups seq key_dim", "v": "batch heads seq value_dim",
        "g": "batch heads seq", "beta": "batch heads seq",
    }  # fmt: skip

    def _why_no_kernels(self) -> str | None:
        return why_no_kernels(self.q, self.k, self.v, self.g, self.beta)

    def _chunks(self, ages: Tensor | None, kernels: bool) -> Chunks:
        if not kernels:
            return super()._chunks(ages, kernels)
        scale = check_scale(self.scale, self.k.shape[-1])
        return KernelChunks(Inputs(self.q, self.k, self.v, self.g, self.beta, None, ages, scale, delta=True))


@dataclass(frozen=True, eq=False)
class KimiDeltaAttention(_DeltaRule):
    """Kimi delta attention (Kimi Linear): the gated delta rule with a decay per channel, g [B, H, S, K].

    Other inputs are as in `GatedDeltaRule`: `S = diag(exp(g)) S`, then `S += k (beta (v - k^T S))^T`.

    Examples:
        >>> q, k, v, g = torch.randn(4, 1, 2, 10, 8)
        >>> k, beta = torch.nn.functional.normalize(k, dim=-1), torch.rand(1, 2, 10)
        >>> am.recurrent.scan(am.recurrent.KimiDeltaAttention(q, k, v, -g.abs(), beta)).shape
        torch.Size([1, 2, 10, 8])
    """

    _DIMS: ClassVar[dict[str, str]] = GatedDeltaRule._DIMS | {"g": "batch heads seq key_dim"}


# State-space layers: Mamba-2, with a decay per head and position, and Mamba-1, with one for each entry of a state.


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


# The short convolution: depthwise and causal over a few positions. Its state is the last inputs.


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
