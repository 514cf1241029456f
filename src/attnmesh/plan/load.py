"""What every schedule asks of a rank: work and bytes, from the plans, without starting a process."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from attnmesh import spans
from attnmesh.plan.gather import gather_plan, head_groups
from attnmesh.plan.heads import HeadShare, head_share, replicated
from attnmesh.plan.ring import RingPlan, ring_plan
from attnmesh.plan.spread import Spread, between_nodes
from attnmesh.plan.two_level import two_level_plan


@dataclass(frozen=True)
class Shape:
    """Everything about the tensors but their positions."""

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    itemsize: int  # bytes an element
    sum_itemsize: int  # bytes an element of a sum: gradients that travel before they are complete

    @property
    def key_row(self) -> int:
        """Bytes of K and V of one position."""
        return 2 * self.batch * self.kv_heads * self.head_dim * self.itemsize

    @property
    def key_grad_row(self) -> int:
        """Bytes of dK and dV of one position, on the way to be summed."""
        return 2 * self.batch * self.kv_heads * self.head_dim * self.sum_itemsize

    @property
    def query_row(self) -> int:
        """Bytes of Q (or out, or their gradients) of one position."""
        return self.batch * self.q_heads * self.head_dim * self.itemsize

    @property
    def lse_row(self) -> int:
        """Bytes of the lse of one position."""
        return self.batch * self.q_heads * self.sum_itemsize

    @property
    def grad_weight(self) -> float:
        """How many rows of keys a row of their gradients weighs."""
        return self.sum_itemsize / self.itemsize

    def of(self, share: HeadShare) -> Shape:
        """The same with only the heads of a share."""
        return replace(self, q_heads=len(share.q), kv_heads=len(share.kv))


@dataclass(frozen=True)
class Load:
    """What one rank does in one direction, forward or backward."""

    flops: int = 0
    near: int = 0  # bytes sent within the node
    far: int = 0  # bytes sent to other nodes
    exposed_near: float = 0  # those of them that nothing is computed behind
    exposed_far: float = 0
    stages: int = 0

    @property
    def sent(self) -> int:
        """All bytes sent."""
        return self.near + self.far

    def __add__(self, other: Load) -> Load:
        return Load(
            self.flops + other.flops, self.near + other.near, self.far + other.far,
            self.exposed_near + other.exposed_near, self.exposed_far + other.exposed_far, self.stages + other.stages,
        )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A spread, the tensors, how many ranks a node has (all of them on a mesh of one dimension), and more to return."""

    spread: Spread
    shape: Shape
    inner: int
    lse: bool = False  # whether the lse is asked for, with its gradient: the one other thing that Ulysses trades


def loads(schedule: str, case: Case, *, backward: bool) -> list[Load]:
    """What `schedule` asks of every rank. It must be able to serve the case: see `refusal`."""
    return [_LOADS[schedule](case, rank, backward) for rank in range(case.spread.world)]


def refusal(schedule: str, spread: Spread, inner: int) -> str | None:
    """Why the schedule cannot serve; None if it can."""
    if "+" in schedule:
        if not 1 < inner < spread.world:
            return f"{schedule} wants a mesh of two dimensions (or inner=, the ranks of a node)"
        if schedule.startswith("ulysses") and between_nodes(spread, inner) is None:
            return f"{schedule} takes the shards of a node together, and those of this layout interleave"
    return None


def check_served(schedule: str, spread: Spread, inner: int) -> None:
    """Raise ValueError if the schedule cannot serve."""
    why = refusal(schedule, spread, inner)
    if why is not None:
        raise ValueError(f"schedule={schedule!r} cannot serve this: {why}")


def _ring(case: Case, rank: int, backward: bool) -> Load:
    shape = case.shape
    plan = ring_plan(case.spread, grad_weight=shape.grad_weight if backward else 0.0)
    sent = _ring_messages(plan, rank, shape, backward)
    return _work(case, rank, backward, len(plan.offsets)) + _messages(case, rank, sent)


def _ring_messages(plan: RingPlan, rank: int, shape: Shape, backward: bool) -> list[tuple[int, int]]:
    """(target, bytes) of everything that a rank of a ring sends."""
    stages = plan.stages(rank)
    sent = [(stage.next_rank, len(stage.next_keys) * shape.key_row) for stage in stages]
    if backward:
        sent += [(stage.next_rank, len(stage.grads_out) * shape.key_grad_row) for stage in stages]
    return sent


def _allgather(case: Case, rank: int, backward: bool) -> Load:
    plan, shape = gather_plan(case.spread), case.shape
    others = [other for other in range(plan.world) if other != rank]
    sent = [(other, plan.rows_sent(rank, other) * shape.key_row) for other in others]
    if backward:
        sent += [(other, plan.rows_sent(other, rank) * shape.key_grad_row) for other in others]
    groups = len(head_groups(shape.kv_heads))
    return _work(case, rank, backward, groups) + _messages(case, rank, sent, exposed=1 / groups)


def _ulysses(case: Case, rank: int, backward: bool) -> Load:
    return _traded(case, rank, case.spread.world, backward, _ring)


def _ulysses_ring(case: Case, rank: int, backward: bool) -> Load:
    return _traded(case, rank, case.inner, backward, _ring)


def _ulysses_allgather(case: Case, rank: int, backward: bool) -> Load:
    return _traded(case, rank, case.inner, backward, _allgather)


def _traded(case: Case, rank: int, ranks: int, backward: bool, then: _LoadOf) -> Load:
    """Rows traded for heads among `ranks` neighbours, and what follows between those with the same heads."""
    shape, spread = case.shape, case.spread
    node, me = divmod(rank, ranks)
    mine = head_share(shape.q_heads, shape.kv_heads, ranks, me)
    summed = replicated(shape.q_heads, shape.kv_heads, ranks)
    sent = []
    for other, target in enumerate(range(node * ranks, (node + 1) * ranks)):
        theirs = head_share(shape.q_heads, shape.kv_heads, ranks, other)
        my_rows, their_rows = spans.size(spread.queries[rank]), spans.size(spread.queries[target])
        my_keys, their_keys = spans.size(spread.keys[rank]), spans.size(spread.keys[target])
        there = shape.of(theirs)
        back = shape.of(mine)
        nbytes = my_rows * there.query_row + their_rows * back.query_row  # q and out, or the gradients of out and q
        if backward:
            nbytes += their_keys * (back.key_grad_row if summed else back.key_row)
        else:
            nbytes += my_keys * there.key_row
        if case.lse:
            nbytes += my_rows * there.lse_row if backward else their_rows * back.lse_row
        if target != rank:
            sent.append((target, nbytes))
    trade = _messages(case, rank, sent, exposed=1.0)
    between = between_nodes(spread, ranks)
    assert between is not None, "see refusal"
    return trade + then(Case(between, shape.of(mine), 1), node, backward) if mine.q else trade


def _two_level(case: Case, rank: int, backward: bool) -> Load:
    node, i = divmod(rank, case.inner)
    shape, weight = case.shape, case.shape.grad_weight if backward else 0.0
    plan = two_level_plan(case.spread, case.inner, grad_weight=weight)
    sent = [
        (node * case.inner + target, nbytes)
        for stage in range(len(plan.outer_offsets))
        for target, nbytes in _ring_messages(plan.inner_ring(node, stage, weight), i, shape, backward)
    ]
    sent += [
        (target * case.inner + i, nbytes) for target, nbytes in _ring_messages(plan.outer(i), node, shape, backward)
    ]
    return _work(case, rank, backward, case.spread.world) + _messages(case, rank, sent)


_LoadOf = Callable[[Case, int, bool], Load]
_LOADS: dict[str, _LoadOf] = {
    "ring": _ring,
    "allgather": _allgather,
    "ulysses": _ulysses,
    "ulysses+ring": _ulysses_ring,
    "ulysses+allgather": _ulysses_allgather,
    "ring+ring": _two_level,
}
SCHEDULES = tuple(_LOADS)


def _work(case: Case, rank: int, backward: bool, stages: int) -> Load:
    """Two products forward, five backward; each pair costs two operations an element."""
    shape = case.shape
    products = 5 if backward else 2
    pairs = gather_plan(case.spread).pairs(rank)  # those of any schedule that leaves queries where they are
    return Load(flops=2 * products * pairs * shape.batch * shape.q_heads * shape.head_dim, stages=stages)


def _messages(case: Case, rank: int, sent: Iterable[tuple[int, int]], exposed: float = 0.0) -> Load:
    """Messages (target, bytes) of a rank, of which a share has nothing computed behind it."""
    near = far = 0
    for target, nbytes in sent:
        if target // case.inner != rank // case.inner:
            far += nbytes
        else:
            near += nbytes
    return Load(near=near, far=far, exposed_near=exposed * near, exposed_far=exposed * far)
