"""A question about attention over ranks: who holds and sees what, the tensors, and how ranks stand in nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attnmesh.plan.shards import Shards, between_nodes
from attnmesh.plan.ulysses import HeadShare


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
class Workload:
    """A spread, the tensors, how many ranks a node has (all of them on a mesh of one dimension), and more to return."""

    shards: Shards
    shape: Shape
    ranks_per_node: int
    lse: bool = False  # whether the lse is asked for, with its gradient: the one other thing that Ulysses trades
    device: str = "cuda"  # the kind of torch device: kernels of a GPU want larger pieces


def refusal(schedule: str, shards: Shards, ranks_per_node: int) -> str | None:
    """Why the schedule cannot serve; None if it can."""
    if "+" in schedule:
        if not 1 < ranks_per_node < shards.world:
            return f"{schedule} wants a mesh of two dimensions (or ranks_per_node=, the ranks of a node)"
        if schedule.startswith("ulysses") and between_nodes(shards, ranks_per_node) is None:
            return f"{schedule} takes the shards of a node together, and those of this layout interleave"
    return None


def check_served(schedule: str, shards: Shards, ranks_per_node: int) -> None:
    """Raise ValueError if the schedule cannot serve."""
    why = refusal(schedule, shards, ranks_per_node)
    if why is not None:
        raise ValueError(f"schedule={schedule!r} cannot serve this: {why}")
