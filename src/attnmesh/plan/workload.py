"""An attention workload over ranks: shards, shapes, ranks per node."""

from __future__ import annotations

from dataclasses import dataclass, replace

from attnmesh.plan.shards import Shards
from attnmesh.utils.validation import MAX_RANKS, check_bool, check_count, check_device, check_type


@dataclass(frozen=True)
class Shape:
    """Everything about the tensors except their positions.

    Attributes:
        batch: sequences.
        q_heads: query heads.
        kv_heads: KV heads.
        head_dim: features of a query and of a key.
        itemsize: bytes per element.
        sum_itemsize: bytes per element of a sum: gradients that are sent before they are complete.
        value_dim: features of values and outputs, if they differ from head_dim.

    Examples:
        >>> shape = Shape(batch=1, q_heads=32, kv_heads=8, head_dim=128, itemsize=2, sum_itemsize=4)
        >>> shape.key_row  # bytes of K and V of one position
        4096
    """

    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    itemsize: int
    sum_itemsize: int
    value_dim: int | None = None

    def __post_init__(self) -> None:
        for name, n in vars(self).items():
            if n is not None or name != "value_dim":
                check_count(name, n)
        if self.value_dim == self.head_dim:  # equal shapes compare equal
            object.__setattr__(self, "value_dim", None)

    @property
    def out_dim(self) -> int:
        """The head_dim of values and outputs."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def key_row(self) -> int:
        """Bytes of K and V of one position."""
        return self.batch * self.kv_heads * (self.head_dim + self.out_dim) * self.itemsize

    @property
    def key_grad_row(self) -> int:
        """Bytes of dK and dV of one position while they are summed."""
        return self.batch * self.kv_heads * (self.head_dim + self.out_dim) * self.sum_itemsize

    @property
    def query_row(self) -> int:
        """Bytes of Q (or its gradient) of one position."""
        return self.batch * self.q_heads * self.head_dim * self.itemsize

    @property
    def out_row(self) -> int:
        """Bytes of out (or its gradient) of one position."""
        return self.batch * self.q_heads * self.out_dim * self.itemsize

    @property
    def lse_row(self) -> int:
        """Bytes of the lse of one position."""
        return self.batch * self.q_heads * self.sum_itemsize

    def with_heads(self, q_heads: int, kv_heads: int) -> Shape:
        """The same shape with other heads."""
        return replace(self, q_heads=q_heads, kv_heads=kv_heads)


@dataclass(frozen=True)
class Workload:
    """Attention over shards of a sequence.

    Attributes:
        shards: what each rank holds, see `shards`.
        shape: heads and sizes.
        ranks_per_node: on a mesh of one dimension, the world size.
        lse: whether the lse is returned, with its gradient: Ulysses exchanges it too.
        device: the torch device type. GPU kernels need larger pieces.
        reproducible: whether the bits of the results are the same for any number of ranks, see `plan.leaves`.

    Examples:
        >>> Workload(shards(am.Causal(), am.Zigzag(), 131072, 16), shape, ranks_per_node=8).world
        16
    """

    shards: Shards
    shape: Shape
    ranks_per_node: int
    lse: bool = False
    device: str = "cuda"
    reproducible: bool = False

    def __post_init__(self) -> None:
        check_type("shards", self.shards, Shards)
        check_type("shape", self.shape, Shape)
        check_count("ranks_per_node", self.ranks_per_node, least=1, most=MAX_RANKS)
        check_bool(lse=self.lse, reproducible=self.reproducible)
        check_type("device", self.device, str, "the name of a device type")
        check_device("device", self.device)
        sequences = self.shards.mask.sequences
        if sequences not in (None, self.shape.batch):
            raise ValueError(f"batch must be {sequences}, the sequences of the mask, got {self.shape.batch}")

    @property
    def world(self) -> int:
        """The number of ranks."""
        return self.shards.world
