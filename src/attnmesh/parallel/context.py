"""`ContextParallel`: a sequence spread over ranks, and exact attention over all of it."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import Comm, comm_from
from attnmesh.layout import Layout, Zigzag
from attnmesh.mask import Causal, Mask
from attnmesh.ops.dense.check import problem_with, scale_for
from attnmesh.parallel.ring import RingProblem, ring_attention
from attnmesh.plan.context import ring_plan

SCHEDULES = ("auto", "ring")
BACKENDS = ("auto", "aten", "triton")


class ContextParallel:
    """Attention over a sequence whose positions are spread over ranks by a layout.

    `where` is a ProcessGroup, a one-dimensional DeviceMesh, a comm, or None for the default group (a world of one
    without torch.distributed). All ranks make the same calls in the same order with the same arguments. Ranks compare
    notes before the first call of a kind; what does not fit raises ValueError on every rank.

    `schedule` "auto" is "ring": the keys of a rank travel once around. `backend` is as in `attention`.
    """

    def __init__(
        self,
        where: Comm | ProcessGroup | DeviceMesh | None = None,
        *,
        layout: Layout = Zigzag(),  # noqa: B008  (immutable)
        schedule: str = "auto",
        backend: str = "auto",
    ) -> None:
        if not isinstance(layout, Layout):
            raise ValueError(f"layout must be Contiguous(), Zigzag() or Striped(), got {layout!r}")
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule must be one of {', '.join(SCHEDULES)}, got {schedule!r}")
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        self.comm = comm_from(where)
        self.layout, self.schedule, self.backend = layout, schedule, backend

    @property
    def rank(self) -> int:
        """This rank."""
        return self.comm.rank

    @property
    def world(self) -> int:
        """How many ranks share the sequence."""
        return self.comm.world

    def positions(self, length: int) -> Tensor:
        """The global positions of this rank's tokens, in local order: what rotary embeddings need."""
        return self.layout.positions(length, self.world, self.rank)

    def shard(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of a whole tensor along `dim`."""
        return self.layout.shard(x, dim, self.world, self.rank)

    def unshard(self, x: Tensor, dim: int, length: int) -> Tensor:
        """The whole tensor, on every rank, from the shards of all. Differentiable: gradients are summed over ranks."""
        dim = dim % x.ndim
        due = self.layout.local_length(length, self.world, self.rank)
        error = None
        if x.shape[dim] != due:
            error = f"rank {self.rank} of {self.world} holds {due} of {length} positions, but x has {x.shape[dim]}"
        rest = [n for i, n in enumerate(x.shape) if i != dim]
        facts = {"dim": dim, "length": length, "other dimensions": rest, "dtype": x.dtype, "layout": self.layout}
        self.comm.agree("ContextParallel.unshard", facts, error)
        whole: Tensor = _Unshard.apply(x, dim, length, self.layout, self.comm)  # type: ignore[no-untyped-call]
        return whole

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = ..., scale: float | None = ...,
        length: int | None = ..., return_lse: Literal[False] = ...,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = ..., scale: float | None = ...,
        length: int | None = ..., return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Mask = Causal(),  # noqa: B008  (immutable)
        scale: float | None = None,
        length: int | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of this rank's queries over the keys of all ranks.

        q [B,Hq,n,D], k and v [B,Hkv,n,D] are this rank's shards, kv heads unexpanded. `length` is that of the whole
        sequence; without it every rank must hold equally many positions. Returns out [B,Hq,n,D], and with `return_lse`
        the float32 lse [B,Hq,n]; both are differentiable.
        """
        problem = problem_with(q, k, v, scale) or self._problem_with_shard(q, k, mask, length)
        if problem is not None:
            self.comm.agree("ContextParallel.attention", {}, problem)
        length = q.shape[2] * self.world if length is None else length
        grad = torch.is_grad_enabled()
        facts = {
            "batch": q.shape[0], "query heads": q.shape[1], "kv heads": k.shape[1], "head_dim": q.shape[3],
            "length": length, "dtype": q.dtype, "device": q.device.type, "mask": mask, "scale": scale,
            "layout": self.layout, "schedule": self.schedule, "backend": self.backend,
            "keys and values need gradients": grad and (k.requires_grad or v.requires_grad),
            "something needs gradients": grad and any(x.requires_grad for x in (q, k, v)),
        }  # fmt: skip
        self.comm.agree("ContextParallel.attention", facts)
        plan = ring_plan(mask, self.layout, length, self.world)
        out, lse = ring_attention(q, k, v, RingProblem(plan, scale_for(q, scale), self.backend, self.comm))
        return (out, lse) if return_lse else out

    def _problem_with_shard(self, q: Tensor, k: Tensor, mask: Mask, length: int | None) -> str | None:
        if not isinstance(mask, Mask):
            return f"mask must be an attnmesh mask (Full(), Causal(), ...), got {mask!r}"
        if q.shape[2] != k.shape[2]:
            return f"q and k must hold the same positions, got {q.shape[2]} and {k.shape[2]}"
        length = q.shape[2] * self.world if length is None else length
        if length < 0:
            return f"length must be >= 0, got {length}"
        due = self.layout.local_length(length, self.world, self.rank)
        if q.shape[2] != due:
            return (
                f"under {self.layout} rank {self.rank} of {self.world} holds {due} of {length} positions, "
                f"but its shard has {q.shape[2]}"
            )
        try:
            mask.check(length)
        except ValueError as wrong:
            return str(wrong)
        return None


class _Unshard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, length: int, layout: Layout, comm: Comm) -> Tensor:
        ctx.dim, ctx.layout, ctx.comm = dim, layout, comm
        shapes = []
        for rank in range(comm.world):
            shape = list(x.shape)
            shape[dim] = layout.local_length(length, comm.world, rank)
            shapes.append(shape)
        return layout.unshard(comm.all_gather(x.contiguous(), shapes), dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        total = ctx.comm.all_reduce(grad.contiguous())
        return ctx.layout.shard(total, ctx.dim, ctx.comm.world, ctx.comm.rank), None, None, None, None
