"""`ContextParallel`: a sequence spread over ranks, and exact attention over all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from attnmesh.comm import Comm, SharedValues, check_on_all_ranks
from attnmesh.core.layouts import Layout, Zigzag, dimension
from attnmesh.core.masks import Causal, Mask
from attnmesh.core.state import accumulation_dtype
from attnmesh.core.validation import check_count
from attnmesh.ops.dense.api import choose_fused
from attnmesh.ops.dense.call import input_error, resolve_scale
from attnmesh.parallel.build import Builder
from attnmesh.parallel.node_groups import node_groups
from attnmesh.parallel.operator import Ask, compiled_attention, needed_of, number_of
from attnmesh.parallel.schedule import BACKENDS, Schedule, attend
from attnmesh.parallel.unshard import unshard
from attnmesh.plan.schedules import SCHEDULES, check_schedule
from attnmesh.plan.shards import Shards, shards
from attnmesh.plan.workload import Shape, Workload

if TYPE_CHECKING:
    from attnmesh.planner.auto import Choice
    from attnmesh.planner.explain import Explanation

_MOST_REMEMBERED = 256


@dataclass(frozen=True)
class _Kind:
    """Everything about a call but the numbers in its tensors: what a schedule is made for."""

    mask: Mask
    scale: float
    length: int
    key_length: int
    key_layout: Layout
    shape: Shape
    dtype: torch.dtype
    device: str
    lse: bool


class ContextParallel:
    """Attention over a sequence whose positions are spread over ranks by a layout.

    `group` is a ProcessGroup, a DeviceMesh, a comm, or None for the default group (a world of one without
    torch.distributed). A mesh of two dimensions is (nodes, ranks a node); `ranks_per_node` says the same of other ranks: rank
    `node x ranks_per_node + i` is the i-th of its node. All ranks make the same calls in the same order with the same arguments.
    Ranks compare notes before the first call of a kind; what does not fit raises ValueError on every rank.

    `schedule` is how ranks work together:

        ring               the keys of a rank travel once around
        allgather          the keys a rank sees come to it, a few kv heads at a time
        ulysses            ranks trade their rows of all heads for all rows of some heads
        ulysses+ring       ulysses within a node, a ring between nodes
        ulysses+allgather  ulysses within a node, all-gather between nodes
        ring+ring          a ring within every node, a ring between nodes
        auto               whichever is fastest by an estimate from bytes and operations; `explain` says why

    `backend` is as in `attention`.
    """

    def __init__(
        self,
        group: Comm | ProcessGroup | DeviceMesh | None = None,
        *,
        layout: Layout = Zigzag(),  # noqa: B008  (immutable)
        schedule: str = "auto",
        backend: str = "auto",
        ranks_per_node: int | None = None,
    ) -> None:
        if layout is None:
            raise ValueError("layout must be a layout (Contiguous(), Zigzag(), ...), got None")
        _check_layout("layout", layout)
        if schedule not in ("auto", *SCHEDULES):
            raise ValueError(f"schedule must be one of auto, {', '.join(SCHEDULES)}, got {schedule!r}")
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, got {backend!r}")
        self._ranks = node_groups(group, ranks_per_node)
        self.comm = self._ranks.all_ranks
        self.layout, self.schedule, self.backend = layout, schedule, backend
        self._schedules: dict[_Kind, Schedule] = {}
        self._number = number_of(self)  # by which compiled graphs find it

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

        def check_arguments() -> tuple[int, SharedValues]:
            if not isinstance(x, Tensor):
                raise ValueError(f"x must be a tensor, got {type(x).__name__}")
            at = dimension(x, dim)
            self._check_shard(x.shape[at], length)
            return at, {
                "dim": at, "length": length, "other dimensions": [n for i, n in enumerate(x.shape) if i != at],
                "dtype": x.dtype, "device": x.device.type, "layout": self.layout,
                "gradients": torch.is_grad_enabled() and x.requires_grad,
            }  # fmt: skip

        at = check_on_all_ranks(self._ranks, "ContextParallel.unshard", check_arguments)
        return unshard(x, at, length, self.layout, self.comm)

    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = ..., scale: float | None = ...,
        length: int | None = ..., key_length: int | None = ..., key_layout: Layout | None = ...,
        return_lse: Literal[False] = ...,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Mask = ..., scale: float | None = ...,
        length: int | None = ..., key_length: int | None = ..., key_layout: Layout | None = ...,
        return_lse: Literal[True],
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
        key_length: int | None = None,
        key_layout: Layout | None = None,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attention of this rank's queries over the keys of all ranks.

        q [B,Hq,n,D], k and v [B,Hkv,m,D] are this rank's shards, kv heads unexpanded. `length` is that of the whole
        sequence; without it every rank must hold equally many positions. Keys of another sequence (cross attention)
        have their own `key_length`, and `key_layout` if they lie differently; positions count from 0 in both. Returns
        out [B,Hq,n,D], and with `return_lse` the float32 lse [B,Hq,n]; both are differentiable.
        """
        ask = Ask(mask, scale, length, key_length, key_layout, return_lse, needed_of(q, k, v))
        if torch.compiler.is_compiling():
            out, lse = compiled_attention(q, k, v, self._number, ask)
        else:
            out, lse = attend(q, k, v, self.agree_on(q, k, v, ask))
        return (out, lse) if return_lse else out

    def agree_on(self, q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> Schedule:
        """The schedule that answers, once all ranks agree on what is asked for."""

        def check_arguments() -> tuple[Schedule, SharedValues]:
            kind = self._kind(q, k, v, ask)
            return self._schedule(kind, q, k, v), self._facts(kind, ask)

        return check_on_all_ranks(self._ranks, "ContextParallel.attention", check_arguments)

    def schedule_for(self, q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> Schedule:
        """The schedule that answers what has been agreed on."""
        return self._schedule(self._kind(q, k, v, ask), q, k, v)

    def explain(
        self,
        *,
        length: int,
        q_heads: int,
        kv_heads: int,
        head_dim: int,
        batch: int = 1,
        mask: Mask = Causal(),  # noqa: B008  (immutable)
        dtype: torch.dtype = torch.bfloat16,
        key_length: int | None = None,
        key_layout: Layout | None = None,
        device: str = "cuda",
    ) -> Explanation:
        """The plan of such a call: who computes what, operations and bytes a rank, imbalance, why this schedule.

        Computes and sends nothing; print it. `device` is the kind of machine to choose for.
        """
        _check_lengths(mask, length, key_length)
        _check_layout("key_layout", key_layout)
        _check_shape(batch, q_heads, kv_heads, head_dim, dtype)
        shape = _shape(batch, q_heads, kv_heads, head_dim, dtype)
        positions = self._spread(mask, length, key_length, key_layout)
        workload = Workload(positions, shape, self._ranks.ranks_per_node, device=torch.device(device).type)
        choice = self._choice(workload)
        schedule = self.schedule if choice is None else choice.schedule
        check_schedule(schedule, workload.shards, workload.ranks_per_node)
        from attnmesh.planner.catalog import default_cluster
        from attnmesh.planner.explain import explain_schedule

        return explain_schedule(schedule, workload, default_cluster(device), choice)

    def _kind(self, q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> _Kind:
        """What this call is; ValueError for what this rank can see to be wrong."""
        mask, scale, length, key_length, key_layout, lse, _ = ask
        problem = input_error(q, k, v, scale)
        if problem is not None:
            raise ValueError(problem)
        _check_layout("key_layout", key_layout)
        length = q.shape[2] * self.world if length is None else length
        _check_lengths(mask, length, key_length)
        self._check_shard(q.shape[2], length)
        key_length, key_layout = length if key_length is None else key_length, key_layout or self.layout
        self._check_shard(k.shape[2], key_length, key_layout, "keys")
        return _Kind(
            mask, resolve_scale(q, scale), length, key_length, key_layout,
            _shape(q.shape[0], q.shape[1], k.shape[1], q.shape[3], q.dtype), q.dtype, q.device.type,
            lse,
        )  # fmt: skip

    def _schedule(self, kind: _Kind, q: Tensor, k: Tensor, v: Tensor) -> Schedule:
        """The schedule for calls of a kind; made once. ValueError where it, or its backend, cannot serve."""
        if kind not in self._schedules:
            positions = self._spread(kind.mask, kind.length, kind.key_length, kind.key_layout)
            workload = Workload(positions, kind.shape, self._ranks.ranks_per_node, kind.lse, kind.device)
            choice = self._choice(workload)
            builder = Builder(workload.shards, kind.scale, self.backend, self._ranks, kind.lse)
            schedule = builder.build(self.schedule if choice is None else choice.schedule)
            for call in schedule.calls(q, k, v):
                choose_fused(call, self.backend)
            if len(self._schedules) >= _MOST_REMEMBERED:
                self._schedules.clear()
            self._schedules[kind] = schedule
        return self._schedules[kind]

    def _choice(self, workload: Workload) -> Choice | None:
        """What "auto" picks; None where a schedule was asked for by name."""
        if self.schedule != "auto":
            return None
        from attnmesh.planner.auto import choose_schedule
        from attnmesh.planner.catalog import default_cluster

        return choose_schedule(workload, default_cluster(workload.device))

    def _spread(self, mask: Mask, length: int, key_length: int | None, key_layout: Layout | None) -> Shards:
        return shards(mask, self.layout, length, self.world, key_layout, key_length)

    def _check_shard(self, rows: int, length: int, layout: Layout | None = None, what: str = "positions") -> None:
        layout = layout or self.layout
        check_count("length", length)
        due = layout.local_length(length, self.world, self.rank)
        if rows != due:
            raise ValueError(
                f"under {layout} rank {self.rank} of {self.world} holds {due} of {length} {what}, but its "
                f"shard has {rows}"
            )

    def _facts(self, kind: _Kind, ask: Ask) -> SharedValues:
        """What must be the same on all ranks."""
        given = "length"
        if ask.length is None:
            given = "length (positions a rank x world; pass length= if they differ)"
        return {
            "batch": kind.shape.batch, "query heads": kind.shape.q_heads, "kv heads": kind.shape.kv_heads,
            "head_dim": kind.shape.head_dim, given: kind.length, "key_length": kind.key_length,
            "dtype": kind.dtype, "device": kind.device, "mask": kind.mask, "scale": kind.scale,
            "layout": self.layout, "key_layout": kind.key_layout, "schedule": self.schedule, "backend": self.backend,
            "ranks a node": self._ranks.ranks_per_node, "return_lse": kind.lse,
            "gradient of q": ask.needed[0], "gradient of k": ask.needed[1], "gradient of v": ask.needed[2],
        }  # fmt: skip


def _check_lengths(mask: Mask, length: int, key_length: int | None) -> None:
    if not isinstance(mask, Mask):
        raise ValueError(f"mask must be an attnmesh mask (Full(), Causal(), ...), got {mask!r}")
    check_count("length", length)
    check_count("key_length", length if key_length is None else key_length)
    mask.check(length if key_length is None else key_length)


def _check_layout(name: str, layout: Layout | None) -> None:
    if layout is not None and not isinstance(layout, Layout):
        raise ValueError(f"{name} must be a layout (Contiguous(), Zigzag(), ...), got {layout!r}")


def _check_shape(batch: int, q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    sizes = {"batch": batch, "q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    for name, n in sizes.items():
        check_count(name, n, least=1)
    if q_heads % kv_heads:
        raise ValueError(f"the {kv_heads} kv heads must divide the {q_heads} query heads")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point torch.dtype, got {dtype!r}")


def _shape(batch: int, q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Shape:
    return Shape(batch, q_heads, kv_heads, head_dim, dtype.itemsize, accumulation_dtype(dtype).itemsize)
