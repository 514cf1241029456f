"""One rank of a world, run by itself: what its share costs on one device, without the other ranks being there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attnmesh.comm.agreement import Claim
from attnmesh.comm.base import Comm, Finished, Message, Pending, Shape


class Memory:
    """Buffers that hold random numbers and are used again by one rank's program after another."""

    def __init__(self) -> None:
        self._buffers: dict[object, list[Tensor]] = {}
        self._sources: dict[torch.dtype, Tensor] = {}

    def buffer(self, number: int, shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The buffer of that number among those of its kind."""
        kind = self._buffers.setdefault((tuple(shape), dtype), [])
        while len(kind) <= number:
            kind.append(torch.randn(tuple(shape), device=device).to(dtype))
        return kind[number]

    def write(self, buffer: Tensor) -> None:
        """Fill a buffer with other numbers."""
        source = self._sources.get(buffer.dtype)
        if source is None or source.numel() < buffer.numel():
            source = self._sources[buffer.dtype] = torch.randn(buffer.numel(), device=buffer.device).to(buffer.dtype)
        buffer.view(-1).copy_(source[: buffer.numel()])


class AloneComm(Comm):
    """Rank `rank` of `world`, whose peers always agree.

    Its receive buffers come from `memory` and hold random numbers, so that kernels work on real data though nobody
    sends. With `copies`, every message is also written anew by a copy on a side stream while the rank computes, as
    bytes off a link would be.
    """

    def __init__(self, rank: int, world: int, memory: Memory, *, copies: bool = False) -> None:
        super().__init__(rank, world, timeout=300)
        self._memory = memory
        self._stream = torch.cuda.Stream() if copies else None
        self._taken: Counter[object] = Counter()

    def begin(self) -> None:
        """Start a run: it takes the same buffers as the one before."""
        self._taken.clear()

    def buffer(self, shape: Shape, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer that no other part of this run has."""
        kind = (tuple(shape), dtype)
        self._taken[kind] += 1
        return self._memory.buffer(self._taken[kind] - 1, shape, dtype, device)

    def _exchange(self, verb: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        if self._stream is None:
            return Finished()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for buffer, _ in recvs:
                self._memory.write(buffer)
        return _OnStream(self._stream)

    def _compare(self, claim: Claim) -> Mapping[int, Claim]:
        return {self.rank: claim}


class _OnStream(Pending):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def wait(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)
