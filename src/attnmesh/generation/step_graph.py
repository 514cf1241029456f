"""Steps of one rank on a GPU as CUDA graphs: a step of few tokens takes the host longer to queue than the GPU to do.

Steps of the same shape share a graph. It reads what changes from step to step (tokens, positions, slots, tables) from
tensors of its own, which every step fills anew. The cache's pools stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from attnmesh.generation.stepping_pass import SteppingPass

Run = Callable[[SteppingPass, Tensor, Tensor], Tensor]


class StepGraphs:
    """The graphs of a model's steps. The first step of a shape runs as it is, to compile; the second is captured."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._graphs: dict[torch.Size, _StepGraph | None] = {}

    def __call__(self, how: SteppingPass, ids: Tensor, positions: Tensor) -> Tensor:
        """What `run` gives for a step; the tensor is good until the next."""
        if ids.shape not in self._graphs:
            self._graphs[ids.shape] = None
            return self._run(how, ids, positions)
        graph = self._graphs[ids.shape]
        if graph is None:
            graph = self._graphs[ids.shape] = _StepGraph(self._run, how, ids, positions)
        return graph(how, ids, positions)


class _StepGraph:
    def __init__(self, run: Run, how: SteppingPass, ids: Tensor, positions: Tensor) -> None:
        self._inputs = [x.clone() for x in _changing(how, ids, positions)]
        slots, table, cur_pos, own_ids, own_positions = self._inputs
        fixed = replace(how, slots=slots, table=table, cur_pos=cur_pos)
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(ids.device)
        with torch.cuda.graph(self._graph):
            self._logits = run(fixed, own_ids, own_positions)

    def __call__(self, how: SteppingPass, ids: Tensor, positions: Tensor) -> Tensor:
        for own, given in zip(self._inputs, _changing(how, ids, positions), strict=True):
            own.copy_(given)
        self._graph.replay()
        return self._logits


def _changing(how: SteppingPass, ids: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
    return how.slots, how.table, how.cur_pos, ids, positions
