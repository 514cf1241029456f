"""Delta rules: a position replaces what its key reads from the state. A decay is per head, or per channel of keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from attnmesh.ops.recurrent.chunked import channel_chunks, chunk_size, scalar_chunks
from attnmesh.ops.recurrent.kernels import Inputs, KernelChunks, why_no_kernels
from attnmesh.ops.recurrent.layer import Chunks, Recurrence, Sizes, check_scale, in_chunks, reset_at_starts


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
