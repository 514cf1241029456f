"""A ring within every node and a ring between nodes: slow links carry each block once, while the fast ones turn it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.dense.call import Call, Grads, Result, contiguous_last_dim
from attnmesh.ops.merge import GradAccumulator, StateAccumulator
from attnmesh.parallel.journey import GradReturn, Journey
from attnmesh.parallel.node_groups import NodeGroups
from attnmesh.parallel.ring import Ring
from attnmesh.parallel.schedule import KeepsInputs
from attnmesh.plan.ring import RingPlan
from attnmesh.plan.two_level import TwoLevelPlan, two_level_plan


@dataclass(frozen=True)
class TwoLevelRing(KeepsInputs):
    """The schedule of a ring of rings. `plan` is the forward's."""

    plan: TwoLevelPlan
    scale: float
    backend: str
    comm: NodeGroups

    def calls(self, q: Tensor, k: Tensor, v: Tensor) -> list[Call]:
        """What this rank would compute, outer stage by outer stage."""
        rings = self._rings(self.plan)
        return [call for ring in rings for call in ring.calls(q, k, v)]

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[State, tuple[Tensor, ...]]:
        """At every outer stage, once around the node with the keys it holds then."""
        journey = Journey(contiguous_last_dim(k), contiguous_last_dim(v), self._outer(self.plan), self.comm.inter_node)
        total = StateAccumulator(q)
        for at, ring in enumerate(self._rings(self.plan)):
            travelling = journey.send_on(at)  # the next node's keys travel while these turn
            ring.forward_into(q, *journey.seen(at), total)
            travelling.wait()
        return total.finish(q.dtype), (q, k, v)

    def backward(self, kept: tuple[Tensor, ...], result: Result, needed: Sequence[bool]) -> Grads:
        """The same rings; what a node found for visiting keys travels on with them, and home at the end."""
        q, k, v = kept
        weight = accumulation_dtype(q.dtype).itemsize / q.dtype.itemsize
        plan = two_level_plan(self.plan.shards, self.plan.ranks_per_node, grad_weight=weight)
        journey = Journey(contiguous_last_dim(k), contiguous_last_dim(v), self._outer(plan), self.comm.inter_node)
        grads = Grads(*(GradAccumulator(x) if need else None for x, need in zip(kept, needed, strict=True)))
        own = grads.k, grads.v
        homing = GradReturn(k, self._outer(plan), self.comm.inter_node) if needed[1] or needed[2] else None
        for at, ring in enumerate(self._rings(plan)):
            travelling = journey.send_on(at)
            keys = journey.seen(at)
            mine = own if at == 0 else tuple(None if grad is None else GradAccumulator(keys[0]) for grad in own)
            ring.backward_into(q, *keys, result, Grads(grads.q, *mine))
            travelling.wait()
            if homing is not None and at > 0:
                homing.join(at, mine)
                homing.send_on(at)
        if homing is not None:
            homing.arrive(*own)
        return grads

    def _outer(self, plan: TwoLevelPlan) -> RingPlan:
        return plan.outer(self.comm.intra_node.rank)

    def _rings(self, plan: TwoLevelPlan) -> list[Ring]:
        """The inner ring of every outer stage."""
        rings = [plan.inner_ring(self.comm.inter_node.rank, stage) for stage in range(len(plan.outer_offsets))]
        return [Ring(ring, self.scale, self.backend, self.comm.intra_node) for ring in rings]
