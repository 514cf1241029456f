"""Random queries, pools of blocks in a shuffled order, and the same keys and values one after another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from attnmesh.calibration.timing import Run
from attnmesh.ops.decode.api import decode_attention, paged_decode_attention
from attnmesh.ops.storage import PLAIN, Quantized, Stored, quantize
from benchmarks.decode.cases import Case, Shape

BLOCK_SIZE = 16
_AT_ONCE = 2**26  # values quantized at once: all of a large pool would need several times its size


def backend_on(q: Tensor) -> str:
    """The backend that is measured. By name: "auto" would measure the reference where a kernel refuses."""
    return "triton" if q.is_cuda else "cpu"


@dataclass(frozen=True)
class Contiguous:
    """Caches [B, Hkv, L, D], what torch's own attention takes."""

    q: Tensor
    k: Tensor
    v: Tensor
    cur_pos: Tensor

    def attended(self, max_splits: int | None = None) -> Tensor:
        """Our decode."""
        return decode_attention(
            self.q, self.k, self.v, cur_pos=self.cur_pos, max_splits=max_splits, backend=backend_on(self.q)
        )


@dataclass(frozen=True)
class Paged:
    """Pools of blocks of 16 tokens, and a table that names them in random order, as a cache long in use would."""

    q: Tensor
    k: Stored
    v: Stored
    table: Tensor
    cur_pos: Tensor

    def attended(self, max_splits: int | None = None) -> Tensor:
        """Our decode."""
        table, backend = self.table, backend_on(self.q)
        return paged_decode_attention(
            self.q, self.k, self.v, table, cur_pos=self.cur_pos, max_splits=max_splits, backend=backend
        )

    def gathered(self) -> Contiguous:
        """The same numbers without blocks."""
        k, v = (self._in_order(x) for x in (self.k, self.v))
        return Contiguous(self.q, k, v, self.cur_pos)

    def _in_order(self, pool: Stored) -> Tensor:
        if isinstance(pool, Quantized):
            raise ValueError(f"only plain pools are gathered, this one is {pool.storage}")
        return pool[self.table.long()].flatten(1, 2).transpose(1, 2).contiguous()


def drawn(case: Case, device: str) -> Paged:
    """Inputs of a case: normal numbers, every sequence as long as the shape says."""
    batch, q_heads, _, length, head_dim = case.shape
    if length % BLOCK_SIZE:
        raise ValueError(f"the length must be a multiple of the {BLOCK_SIZE} tokens of a block, got {length}")
    slots = length // BLOCK_SIZE
    q = torch.randn(batch, q_heads, case.tokens, head_dim, device=device).to(PLAIN.get(case.storage, torch.bfloat16))
    k, v = (_pool(case.shape, batch * slots, case.storage, device) for _ in range(2))
    table = torch.randperm(batch * slots, device=device).view(batch, slots).int()
    # On the device: a list would be copied there by every call.
    return Paged(q, k, v, table, torch.full((batch,), length - 1, dtype=torch.int32, device=device))


def program(case: Case, device: str) -> Run:
    """A case with inputs of its own, ready to run."""
    paged = drawn(case, device)
    return partial(paged.attended if case.paged else paged.gathered().attended, case.max_splits)


def _pool(shape: Shape, blocks: int, storage: str, device: str) -> Stored:
    block = (BLOCK_SIZE, shape.kv_heads, shape.head_dim)
    if storage in PLAIN:
        return torch.randn(blocks, *block, device=device, dtype=PLAIN[storage])
    scale = torch.full((), 8 / 448, device=device)  # fp8's; one for all pieces
    step = max(1, _AT_ONCE // (BLOCK_SIZE * shape.kv_heads * shape.head_dim))
    values, scales = [], []
    for first in range(0, blocks, step):
        piece = torch.randn(min(step, blocks - first), *block, device=device)
        stored = quantize(piece, storage, scale=scale if storage == "fp8" else None, head_axis=2)
        assert isinstance(stored, Quantized)
        values.append(stored.values)
        scales.append(stored.scales)
    return Quantized(torch.cat(values), scale if storage == "fp8" else torch.cat(scales))
