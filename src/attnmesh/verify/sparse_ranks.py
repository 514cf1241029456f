"""Sparse attention and its indexer over ranks against float64: heads spread over some, the sequence over others.

Every rank takes its part of a problem, and what all of them found is put together again; of what all tp ranks have,
each one's copy is compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from attnmesh.comm import Comm, SubComm
from attnmesh.core.layouts import Contiguous, Layout, Striped, Zigzag
from attnmesh.parallel.sparse.api import Bringing, SparseParallel
from attnmesh.verify.mode import Compared, ComparedMode
from attnmesh.verify.sparse import (
    DTYPES,
    KEYS,
    MASKS,
    OPERATIONS,
    ROWS,
    OneDevice,
    Operation,
    Problem,
    drawn,
    poisoned,
    shape_of,
)

_LAYOUTS: tuple[Layout, ...] = (Zigzag(), Contiguous(), Striped())

# What ranks hold parts of, by name, in a problem and in what is found. All else is spread by its rows.
_BY_ROW_AND_HEAD = {"q", "lse", "grad_out", "grad_lse", "out", "dq"}
_BY_HEAD = {"sink", "dsink"}
_BY_KEY = {"kv", "v", "ik", "dkv", "d_ik"}
_EVERYWHERE = {"mean"}


def sparse_rank_modes(comm: Comm) -> Iterator[ComparedMode]:
    """Every operation on every grid of ranks, keys gathered and sharded; layouts, masks and precisions in turn."""
    number = 0
    for sizes, operation in product(_grids(comm.world), OPERATIONS):
        for keys in ("gathered", "sharded") if sizes[1] > 1 else ("gathered",):
            layout, mask, dtype = _LAYOUTS[number % 3], MASKS[number % 4], list(DTYPES)[number // 4 % 2]
            number += 1
            grid = _Grid.of(comm, sizes, layout, keys)
            compared = partial(_compared, comm, grid, operation, mask, dtype)
            shape = shape_of(_heads(comm.world), dtype)
            yield ComparedMode(f"sparse {operation.name} {grid} {mask}", shape, compared, together=True)
    grid = _Grid.of(comm, (1, comm.world), Zigzag(), "gathered")
    shape = shape_of(_heads(comm.world), "bf16")
    yield ComparedMode(f"sparse {grid} same bits", shape, partial(_same_bits, comm, grid), together=True)


def _grids(world: int) -> list[tuple[int, int]]:
    """Every (tp, cp) of so many ranks."""
    return [(tp, world // tp) for tp in range(1, world + 1) if world % tp == 0]


def _heads(world: int) -> int:
    return world + 9  # some ranks have one more than others


@dataclass(frozen=True)
class _Grid:
    """Ranks that share the heads, ranks that share the sequence, and how."""

    tp: Comm
    cp: Comm
    layout: Layout
    keys: Bringing

    @classmethod
    def of(cls, comm: Comm, sizes: tuple[int, int], layout: Layout, keys: Bringing) -> _Grid:
        """This rank's place in a grid, rank = cp rank x tp + tp rank."""
        tp, first = sizes[0], comm.rank // sizes[0] * sizes[0]
        heads = SubComm(comm, range(first, first + tp))
        return cls(heads, SubComm(comm, range(comm.rank - first, comm.world, tp)), layout, keys)

    def __str__(self) -> str:
        sizes = [f"{name}{comm.world}" for name, comm in (("TP", self.tp), ("CP", self.cp)) if comm.world > 1]
        how = [self.keys, type(self.layout).__name__.lower()] if self.cp.world > 1 else []
        return " ".join(["-".join(sizes) or "TP1", *how])

    def local(self, problem: Problem) -> Problem:
        """This rank's part of it."""
        each_row = {name: getattr(problem.mask, name) for name in ("topk_length", "q_positions", "k_start", "k_end")}
        own: dict[str, Any] = {name: self._part(name, x) for name, x in each_row.items() if x is not None}
        return problem.changed(self._part)._replace(mask=replace(problem.mask, **own))

    def _part(self, name: str, x: Tensor) -> Tensor:
        if name not in _BY_HEAD:
            x = self.layout.shard(x, 0, self.cp.world, self.cp.rank)
        if name in _BY_ROW_AND_HEAD | _BY_HEAD:
            x = x.tensor_split(self.tp.world, 0 if name in _BY_HEAD else 1)[self.tp.rank]
        return x.contiguous()

    def whole(self, name: str, x: Tensor, heads: int) -> list[Tensor]:
        """What the ranks have found, put together; every tp rank's copy of what they all should have."""
        if name not in _BY_HEAD | _EVERYWHERE:
            length, world = KEYS if name in _BY_KEY else ROWS, self.cp.world
            counts = [self.layout.local_length(length, world, rank) for rank in range(world)]
            x = self.layout.unshard(self.cp.all_gather(x.contiguous(), [(n, *x.shape[1:]) for n in counts]), 0)
        if name not in _BY_ROW_AND_HEAD | _BY_HEAD:
            return self.tp.all_gather(x, [x.shape] * self.tp.world)
        dim = 0 if name in _BY_HEAD else 1
        counts = [part.shape[0] for part in torch.empty(heads).tensor_split(self.tp.world)]
        shapes = [(*x.shape[:dim], n, *x.shape[dim + 1 :]) for n in counts]
        return [torch.cat(self.tp.all_gather(x.contiguous(), shapes), dim)]


def _found(comm: Comm, grid: _Grid, operation: Operation, problem: Problem, device: str) -> dict[str, list[Tensor]]:
    on = SparseParallel(tp=grid.tp, cp=grid.cp, length=ROWS, key_length=KEYS, layout=grid.layout, keys=grid.keys)
    local = grid.local(poisoned(problem, operation.over_slots)).on(device)
    found = operation.found(on, local)
    return {name: grid.whole(name, x, _heads(comm.world)) for name, x in found.items()}


def _compared(
    comm: Comm, grid: _Grid, operation: Operation, mask: str, dtype: str, seed: int, device: str
) -> list[Compared]:
    problem = drawn(_heads(comm.world), mask, seed).to(DTYPES[dtype])
    found = _found(comm, grid, operation, problem, device)
    return operation.compared(found, problem) if comm.rank == 0 else []


def _same_bits(comm: Comm, grid: _Grid, seed: int, device: str) -> list[Compared]:
    """Keys gathered: every row is computed as one device computes it. A CPU's BLAS may go another way for fewer rows:
    there only what is chosen must be the same.
    """
    problem = drawn(_heads(comm.world), "causal", seed).to(torch.bfloat16)
    results = []
    for operation in OPERATIONS:
        found = _found(comm, grid, operation, problem, device)
        if comm.rank == 0:
            alone = operation.found(OneDevice(), poisoned(problem, operation.over_slots).on(device))
            kept = {"best scores", "best keys"}
            if device != "cpu":
                kept |= {"out", "lse", "dq", "attn_sum", "sum", "normalized", "loss"}
            kept &= found.keys()
            results += [Compared(f"{name} bits", found[name][0], alone[name]) for name in sorted(kept)]
    return results
