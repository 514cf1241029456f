"""`ContextParallel`: a sequence spread over ranks, and exact attention over all of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import Comm, comm_from
from attnmesh.layout import Layout, Zigzag, dimension
from attnmesh.mask import Causal, Mask
from attnmesh.ops.dense.check import problem_with, scale_for
from attnmesh.ops.dense.choose import choose_fused
from attnmesh.parallel.ring import Ring
from attnmesh.parallel.schedule import attend
from attnmesh.parallel.unshard import unshard
from attnmesh.plan.ring import ring_plan
from attnmesh.plan.spread import spread

SCHEDULES = ("auto", "ring")
RING_BACKENDS = ("auto", "aten", "triton")  # the reference would hold every score in memory


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
        if backend not in RING_BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(RING_BACKENDS)}, got {backend!r}")
        self.comm = comm_from(where)
        self.layout, self.schedule, self.backend = layout, schedule, backend
        self._served: object = None  # the last kind of call that the backend is known to serve

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

        def facts() -> dict[str, object]:
            at = dimension(x, dim)
            self._check_shard(x.shape[at], length)
            return {
                "dim": at, "length": length, "other dimensions": [n for i, n in enumerate(x.shape) if i != at],
                "dtype": x.dtype, "device": x.device.type, "layout": self.layout,
                "gradients": torch.is_grad_enabled() and x.requires_grad,
            }  # fmt: skip

        self._agree("ContextParallel.unshard", facts)
        return unshard(x, dimension(x, dim), length, self.layout, self.comm)

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

        def facts() -> dict[str, object]:
            self._check(q, k, v, mask, scale, length)
            return self._facts(q, k, v, mask, scale, length)

        self._agree("ContextParallel.attention", facts)
        out, lse = attend(q, k, v, self._ring(q, mask, scale, length))
        return (out, lse) if return_lse else out

    def _agree(self, operation: str, facts: Callable[[], dict[str, object]]) -> None:
        """Check this rank's arguments and compare notes: what is wrong on one rank is raised on every rank."""
        try:
            known, error = facts(), None
        except ValueError as wrong:
            known, error = {}, str(wrong)
        self.comm.agree(operation, known, error)

    def _whole(self, q: Tensor, length: int | None) -> int:
        """The length of the whole sequence, as given or from shards of equal length."""
        return q.shape[2] * self.world if length is None else length

    def _ring(self, q: Tensor, mask: Mask, scale: float | None, length: int | None) -> Ring:
        plan = ring_plan(spread(mask, self.layout, self._whole(q, length), self.world))
        return Ring(plan, scale_for(q, scale), self.backend, self.comm)

    def _check(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, length: int | None) -> None:
        """Raise ValueError for what this rank can see to be wrong."""
        problem = problem_with(q, k, v, scale)
        if problem is not None:
            raise ValueError(problem)
        if not isinstance(mask, Mask):
            raise ValueError(f"mask must be an attnmesh mask (Full(), Causal(), ...), got {mask!r}")
        if q.shape[2] != k.shape[2]:
            raise ValueError(f"q and k must hold the same positions, got {q.shape[2]} and {k.shape[2]}")
        length = self._whole(q, length)
        self._check_shard(q.shape[2], length)
        mask.check(length)
        served = (q.dtype, q.device.type, q.shape[3], mask, length)
        if served != self._served:
            for call in self._ring(q, mask, scale, length).calls(q, k, v):
                choose_fused(call, self.backend)
            self._served = served

    def _check_shard(self, rows: int, length: int) -> None:
        if isinstance(length, bool) or not isinstance(length, int) or length < 0:
            raise ValueError(f"length must be an integer >= 0, got {length!r}")
        due = self.layout.local_length(length, self.world, self.rank)
        if rows != due:
            raise ValueError(
                f"under {self.layout} rank {self.rank} of {self.world} holds {due} of {length} positions, but its "
                f"shard has {rows}"
            )

    def _facts(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, length: int | None
    ) -> dict[str, object]:
        """What must be the same on all ranks."""
        grad = torch.is_grad_enabled()
        given = "length" if length is not None else "length (positions a rank x world; pass length= if they differ)"
        return {
            "batch": q.shape[0], "query heads": q.shape[1], "kv heads": k.shape[1], "head_dim": q.shape[3],
            given: self._whole(q, length),
            "dtype": q.dtype, "device": q.device.type, "mask": mask, "scale": scale_for(q, scale),
            "layout": self.layout, "schedule": self.schedule, "backend": self.backend,
            "gradient of q": grad and q.requires_grad, "gradient of k": grad and k.requires_grad,
            "gradient of v": grad and v.requires_grad,
        }  # fmt: skip
