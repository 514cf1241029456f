"""A ring within every node and a ring between nodes: each block crosses the slow links once, as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor

from attnmesh.core.state import State, accumulation_dtype
from attnmesh.ops.dense.call import Call, Grads, Result, Scores, contiguous_last_dim
from attnmesh.ops.merge import GradAccumulator, StateAccumulator
from attnmesh.parallel.executor import Executor, ExecutorConfig, RowLayout
from attnmesh.parallel.node_groups import NodeGroups
from attnmesh.parallel.ring import GradReturn, GradRoute, KVExchange, KVRoute, Ring
from attnmesh.plan.two_level import TwoLevelPlan, two_level_plan


@dataclass(frozen=True)
class TwoLevelRing(Executor):
    """The executor of "ring+ring"."""

    plan: TwoLevelPlan
    backend: str
    comm: NodeGroups
    _routes: dict[object, tuple[KVRoute, GradRoute]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def build(cls, config: ExecutorConfig) -> TwoLevelRing:
        """The executor over all nodes."""
        plan = two_level_plan(config.shards, config.groups.ranks_per_node)
        return cls(plan, config.backend, config.groups)

    def calls(self, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> list[Call]:
        """The calls of the inner rings, one outer stage after another."""
        return [call for ring in self._rings for call in ring.calls(q, k, v, scores)]

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scores: Scores, sinks: Tensor | None
    ) -> tuple[State, tuple[Tensor, ...]]:
        """One inner ring per outer stage, over the K and V that the node holds at that stage."""
        exchange = self._exchange(k, v)
        total = StateAccumulator(q, v.shape[3], sinks=sinks)
        for at, ring in enumerate(self._rings):
            pending = exchange.start(at)  # the next node's K and V are in flight during the inner ring
            ring.forward_into(q, *exchange.visible_kv(at), scores, total, last=at == self._last_computing)
            pending.wait()
        return total.finish(q.dtype), (q, k, v)

    def backward(
        self, saved: tuple[Tensor, ...], result: Result, scores: Scores, needs_grad: Sequence[bool]
    ) -> Grads:  # fmt: skip
        """The same rings. Gradients of other nodes' K and V are sent on with them and return to the owners."""
        q, k, v = saved
        exchange = self._exchange(k, v)
        grads = Grads(*(GradAccumulator(x) if need else None for x, need in zip(saved, needs_grad, strict=True)))
        grad_return = None
        if (needs_grad[1] or needs_grad[2]) and len(self._rings) > 1:
            grad_return = GradReturn(self._route(k, v)[1], (grads.k, grads.v), self.comm.inter_node)
        for at, ring in enumerate(self._rings):
            pending = exchange.start(at)
            here, (keys, values) = grads, exchange.visible_kv(at)
            if at > 0:
                here = Grads(
                    grads.q,
                    None if grads.k is None else GradAccumulator(keys),
                    None if grads.v is None else GradAccumulator(values),
                )
            ring.backward_into(q, keys, values, scores, result, here)
            pending.wait()
            if grad_return is not None and at > 0:
                grad_return.add(at, here.k, here.v)
                grad_return.send(at)
        if grad_return is not None:
            grad_return.finish()
        return grads

    def _exchange(self, k: Tensor, v: Tensor) -> KVExchange:
        """The exchange between nodes."""
        route = self._route(k, v)[0]
        return KVExchange(contiguous_last_dim(k), contiguous_last_dim(v), route, self.comm.inter_node)

    def _route(self, k: Tensor, v: Tensor) -> tuple[KVRoute, GradRoute]:
        key = k.shape, v.shape, k.dtype, k.device
        routes = self._routes.get(key)
        if routes is None:
            stages, layout = (
                self.plan.outer(self.comm.intra_node.rank).stages(self.comm.inter_node.rank),
                RowLayout.of(k, v),
            )
            routes = self._routes[key] = (
                KVRoute(stages, layout, k.dtype, k.device),
                GradRoute(stages, layout, accumulation_dtype(k.dtype), k.device),
            )
        return routes

    @cached_property
    def _rings(self) -> list[Ring]:
        """The inner ring of every outer stage."""
        node, stages = self.comm.inter_node.rank, range(len(self.plan.outer_offsets))
        return [Ring(self.plan.inner_ring(node, stage), self.backend, self.comm.intra_node) for stage in stages]

    @cached_property
    def _last_computing(self) -> int:
        """The last outer stage at which this rank's queries see any key."""
        return max((at for at, ring in enumerate(self._rings) if ring.computes), default=0)
