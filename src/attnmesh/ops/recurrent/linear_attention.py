"""Linear attention: lightning attention with its fixed decay, and RWKV-7, whose transition is diagonal plus rank 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from attnmesh.ops.recurrent.chunked import chunk_size, low_rank_chunks, scalar_chunks
from attnmesh.ops.recurrent.kernels import Inputs, KernelChunks, why_no_kernels
from attnmesh.ops.recurrent.layer import (
    Chunks,
    Form,
    Recurrence,
    Sizes,
    check_scale,
    in_chunks,
    reset_at_starts,
    starts_in_chunks,
)


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
