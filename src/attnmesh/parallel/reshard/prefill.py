"""`PrefillKV`: the keys and values that a prefill by context parallelism leaves on its ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attnmesh.core import ranges
from attnmesh.core.layouts import Layout
from attnmesh.core.ranges import Ranges
from attnmesh.kv_cache.block_manager import root_hash
from attnmesh.kv_cache.sequence import token_ids
from attnmesh.ops.storage import PLAIN
from attnmesh.parallel.reshard.contents import CacheContents, SequenceContents, as_integers
from attnmesh.plan.reshard import Piece
from attnmesh.utils.validation import check_index, check_list, check_positive, check_tensor, check_type, shown


@dataclass(frozen=True, eq=False)
class PrefillKV:
    """Keys and values of all layers of a batch, of which rank `rank` of `world` has its positions by a layout.

    `keys[layer]` is [batch, kv heads, own positions, D] as passed to `ContextParallel.attention`, in bf16, fp16 or
    fp32, and `values[layer]` the same with their own width. All sequences have `length` tokens; with their `ids`, later
    prompts reuse them. `reshard` stores them in a cache, where sequence i is in row i.

    Examples:
        >>> k, v = torch.randn(2, 1, 2, 10, 16)
        >>> def rank(comm):
        ...     mine = [am.Zigzag().shard(x, 2, comm.world, comm.rank) for x in (k, v)]
        ...     prefill = am.decode.PrefillKV([mine[0]], [mine[1]], am.Zigzag(), 10, comm.rank, comm.world)
        ...     return am.decode.reshard(prefill, am.DecodeSharding(tp=2), comm, block_size=4).keys(0).shape
        >>> am.run_virtual(2, rank)[0]  # all positions of one kv head
        torch.Size([3, 4, 1, 16])
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    layout: Layout
    length: int
    rank: int
    world: int
    ids: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        check_type("layout", self.layout, Layout)
        check_positive(length=self.length, world=self.world)
        check_index("rank", self.rank, self.world)
        own = self.layout.local_length(self.length, self.world, self.rank)
        first: Tensor | None = None
        for name in ("keys", "values"):
            layers = check_list(name, getattr(self, name), "tensors, one for each layer")
            if not layers or len(layers) != len(self.keys):
                raise ValueError(
                    f"{name} must have a tensor for each layer, as many as keys, got {shown(getattr(self, name))}"
                )
            for layer, x in enumerate(layers):
                check_tensor(f"{name}[{layer}]", x, "[batch, kv heads, positions, D]")
                first = x if first is None else first
                _check_layer(f"{name}[{layer}]", x, layers[0], first, own)
        if self.ids is not None:
            given = check_list("ids", self.ids, "token ids for each sequence")
            lengths = [len(token_ids(f"ids[{i}]", one)) for i, one in enumerate(given)]
            if lengths != [self.length] * self.batch:
                raise ValueError(
                    f"ids must have {self.length} token ids for each of {self.batch} sequences, got {shown(lengths)}"
                )

    @property
    def batch(self) -> int:
        """The number of sequences."""
        return len(self.keys[0])

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.keys[0].device

    def positions(self) -> list[Ranges]:
        """The positions of every rank."""
        return [self.layout.ranges(self.length, self.world, rank) for rank in range(self.world)]

    def contents(self) -> CacheContents:
        """The sequences, as those of a cache."""
        ids: list[tuple[int, ...]] = [()] * self.batch
        if self.ids is not None:
            ids = [tuple(token_ids("ids", one)) for one in self.ids]
        storage = {dtype: name for name, dtype in PLAIN.items()}[self.keys[0].dtype]
        root = root_hash("").hex()
        _, kv_heads, _, head_dim = self.keys[0].shape
        return CacheContents(
            self.batch, len(self.keys), kv_heads, head_dim, self.values[0].shape[-1], self.length, storage, None, None,
            tuple(SequenceContents(row, self.length, 0, self.length, own, root, -1, 0) for row, own in enumerate(ids)),
        )  # fmt: skip

    def read(self, pieces: Sequence[Piece], heads: range) -> list[Tensor]:
        """The tokens of pieces, as they are stored."""
        own = ranges.as_tensor(self.layout.ranges(self.length, self.world, self.rank))
        at = [torch.searchsorted(own, ranges.as_tensor(piece.positions)) for piece in pieces]
        rows = torch.cat([torch.full_like(index, piece.content) for index, piece in zip(at, pieces, strict=True)])
        rows, index = rows.to(self.device), torch.cat(at).to(self.device)
        stored = []
        for layers in (self.keys, self.values):
            of_heads = [as_integers(x)[:, heads.start : heads.stop].transpose(1, 2) for x in layers]
            tokens = of_heads[0].new_empty((len(layers), len(index), len(heads), layers[0].shape[-1]))
            for layer, x in enumerate(of_heads):  # not stacked: the tokens of one layer are copied at a time
                tokens[layer] = x[rows, index]
            stored.append(tokens)
        return stored


def _check_layer(name: str, x: Tensor, like: Tensor, keys: Tensor, own: int) -> None:
    """Raise ValueError unless a layer has the shape of the first one, and the dtype and the device of the keys."""
    if x.ndim != 4 or x.shape[2] != own or x.shape != like.shape or x.shape[:3] != keys.shape[:3] or not x.shape[-1]:
        raise ValueError(
            f"{name} must be [batch, kv heads, {own} positions of this rank, D], as in other layers, got {shown(x)}"
        )
    if x.dtype not in PLAIN.values() or x.dtype != keys.dtype or x.device != keys.device:
        raise ValueError(f"{name} must be bf16, fp16 or fp32, of one dtype and device in all layers, got {shown(x)}")
