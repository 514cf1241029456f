"""A ring within every node and a ring between nodes: each block crosses the slow links once, as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.dense.call import Call, Grads, Result, Scores, contiguous_last_dim
from attnmesh.ops.merge import GradAccumulator, StateAccumulator
from attnmesh.parallel.executor import Executor, ExecutorConfig
from attnmesh.parallel.node_groups import NodeGroups
from attnmesh.parallel.ring import GradReturn, KVExchange, Ring, grads_like
from attnmesh.plan.ring import RingPlan
from attnmesh.plan.two_level import TwoLevelPlan, two_level_plan


@dataclass(frozen=True)
class TwoLevelRing(Executor):
    """The executor of "ring+ring". `plan` is the plan of the forward."""

    plan: TwoLevelPlan
    backend: str
    comm: NodeGroups

    @classmethod
    def build(cls, config: ExecutorConfig) -> TwoLevelRing:
        """The executor over all nodes."""
        plan = two_level_plan(config.shards, config.groups.ranks_per_node)
        return cls(plan, config.backend, config.groups)

    def calls(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> list[Call]:
        """The calls of the inner rings, one outer stage after another."""
        return [call for ring in self._rings(self.plan) for call in ring.calls(q, k, v, scores)]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None
    ) -> tuple[State, tuple[Tensor, ...]]:
        """One inner ring per outer stage, over the K and V that the node holds at that stage."""
        exchange = self._exchange(k, v, self.plan)
        total = StateAccumulator(q, v.shape[3])
        for at, ring in enumerate(self._rings(self.plan)):
            pending = exchange.start(at)  # the next node's K and V are in flight during the inner ring
            ring.forward_into(q, *exchange.visible_kv(at), scores, total)
            pending.wait()
        return total.finish(q.dtype, sinks), (q, k, v)

    def backward(
        self, saved: tuple[Tensor, ...], result: Result, scores: Scores, needs_grad: Sequence[bool]
    ) -> Grads:  # fmt: skip
        """The same rings. Gradients of other nodes' K and V are sent on with them and return to the owners."""
        q, k, v = saved
        weight = accumulation_dtype(q.dtype).itemsize / q.dtype.itemsize
        plan = two_level_plan(self.plan.shards, self.plan.ranks_per_node, grad_weight=weight)
        exchange = self._exchange(k, v, plan)
        grads = Grads(*(GradAccumulator(x) if need else None for x, need in zip(saved, needs_grad, strict=True)))
        own = grads.k, grads.v
        grad_return = None
        if needs_grad[1] or needs_grad[2]:
            grad_return = GradReturn(k, v, self._outer(plan), self.comm.inter_node)
        for at, ring in enumerate(self._rings(plan)):
            pending = exchange.start(at)
            kv = exchange.visible_kv(at)
            kv_grads = own if at == 0 else grads_like(own, kv)
            ring.backward_into(q, *kv, scores, result, Grads(grads.q, *kv_grads))
            pending.wait()
            if grad_return is not None and at > 0:
                grad_return.add(at, kv_grads)
                grad_return.send(at)
        if grad_return is not None:
            grad_return.finish(*own)
        return grads

    def _exchange(self, k: Tensor, v: Tensor, plan: TwoLevelPlan) -> KVExchange:
        """The exchange between nodes."""
        comm = self.comm.inter_node
        return KVExchange(contiguous_last_dim(k), contiguous_last_dim(v), self._outer(plan).stages(comm.rank), comm)

    def _outer(self, plan: TwoLevelPlan) -> RingPlan:
        return plan.outer(self.comm.intra_node.rank)

    def _rings(self, plan: TwoLevelPlan) -> list[Ring]:
        """The inner ring of every outer stage."""
        rings = [plan.inner_ring(self.comm.inter_node.rank, stage) for stage in range(len(plan.outer_offsets))]
        return [Ring(ring, self.backend, self.comm.intra_node) for ring in rings]
