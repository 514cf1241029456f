"""What a layer asks of ranks in a step of token generation: products, attention, and the small kernels between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from attnmesh.plan.decode_load import DecodeShape
from attnmesh.plan.program import Kernels
from attnmesh.plan.sharding import DecodeSharding
from attnmesh.planner.hardware import Floats

# Small kernels, in launches, from docs/benchmarks.md ("Overhead of the block"): one is a copy of 0.8 us and the
# microsecond until the next kernel.
AROUND_ATTENTION = 6  # the norm, and the kernel for RoPE and the cache, two each; two pass between the large kernels
AROUND_MLP = 3  # the norm, and what the way up and the gate make together
EXCHANGE = 1  # a rank's own part of what is exchanged is copied
MERGE = 2  # of states, after CP ranks have exchanged them


@dataclass(frozen=True)
class Linear:
    """The parameters of a layer's products, by how ranks divide them, and how large one is."""

    divided: int = 0  # over all ranks: W_q, and what belongs to query heads only
    by_kv_head: int = 0  # with the kv heads: W_k and W_v; ranks that share a kv head hold them alike
    out: int = 0  # W_out, over all ranks
    mlp: int = 0  # over all ranks; of experts, those that somebody chose
    mlp_used: float = 0.0  # parameters of the MLP that a token is multiplied with
    nbytes: float = 2.0  # of a parameter of attention
    mlp_nbytes: float = 2.0


@dataclass(frozen=True)
class DecodeLayer:
    """One layer: its attention, what is cached, and its linear layers."""

    shape: DecodeShape
    cached: float  # bytes of keys and values of one position and kv head
    context: int  # positions that a query sees: the context, or the layer's window
    linear: Linear = Linear()

    @property
    def rows(self) -> int:
        """New tokens of all sequences."""
        return self.shape.batch * self.shape.tokens

    def projected(self, sharding: DecodeSharding) -> Kernels:
        """Queries, keys and values: a rank's part of W_q, and W_k and W_v of all kv heads that it holds."""
        held = [len(sharding.kv_heads(rank, self.shape.kv_heads)) for rank in range(sharding.ranks)]
        used = self.linear.divided / sharding.ranks + self.linear.by_kv_head * np.array(held) / self.shape.kv_heads
        return self._product(used, used, self.linear.nbytes)

    def projected_out(self, sharding: DecodeSharding) -> Kernels:
        """The output projection."""
        used = np.full(sharding.ranks, self.linear.out / sharding.ranks)
        return self._product(used, used, self.linear.nbytes)

    def mlp(self, sharding: DecodeSharding) -> Kernels:
        """The MLP, up and down again."""
        used, read = (np.full(sharding.ranks, n / sharding.ranks) for n in (self.linear.mlp_used, self.linear.mlp))
        return self._product(used, read, self.linear.mlp_nbytes, calls=2)

    def attention(self, sharding: DecodeSharding) -> Kernels:
        """All query heads of a rank's kv heads, over the positions that it holds.

        Reading keys takes longest, but where many heads share what is cached (latent attention) computing may.
        """
        shape, flops, read = self.shape, [], []
        for rank in range(sharding.ranks):
            held = len(sharding.sequences(rank, shape.batch)) * sharding.position_shard(rank).length(self.context)
            heads = len(sharding.group_heads(rank, shape.q_heads))
            flops.append(4.0 * heads * shape.tokens * held * shape.head_dim)
            read.append(len(sharding.kv_heads(rank, shape.kv_heads)) * held * self.cached)
        return Kernels("attention", np.array(flops), np.ones(sharding.ranks), reads=np.array(read))

    def small(self, sharding: DecodeSharding, launches: int) -> Kernels:
        """Kernels that pass over the new tokens: a launch each, unless there are many tokens."""
        once = 2.0 * self.rows * self.shape.hidden * self.shape.itemsize  # read and written
        return Kernels("relayout", np.full(sharding.ranks, launches * once), np.full(sharding.ranks, float(launches)))

    def _product(self, used: Floats, read: Floats, nbytes: float, calls: int = 1) -> Kernels:
        """Rows times parameters: two operations each, and every parameter is read once."""
        return Kernels("matmul", 2.0 * self.rows * used, np.full(len(used), float(calls)), reads=read * nbytes)
