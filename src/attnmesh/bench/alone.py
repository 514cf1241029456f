"""One rank of a world, run by itself: what its share costs on one device, without the other ranks being there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

import torch
from torch import Tensor

from attnmesh.comm.agreement import Claim
from attnmesh.comm.base import Comm, Finished, Message, Pending, Shape


class AloneComm(Comm):
    """Rank `rank` of `world`, whose peers always agree.

    Its receive buffers are kept from call to call and hold random numbers, so that kernels work on real data though
    nobody sends. With `copies`, every message is also written anew by a copy on a side stream while the rank
    computes, as bytes off a link would be.
    """

    def __init__(self, rank: int, world: int, *, copies: bool = False) -> None:
        super().__init__(rank, world, timeout=300)
        self._stream = torch.cuda.Stream() if copies else None
        self._buffers: dict[object, cycle[Tensor]] = {}
        self._sources: dict[object, Tensor] = {}

    def buffer(self, shape: Shape, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """One of three buffers of that kind, in turn: no call uses more."""
        kind = (tuple(shape), dtype)
        if kind not in self._buffers:
            drawn = [torch.randn(tuple(shape), device=device).to(dtype) for _ in range(4)]
            self._sources[kind] = drawn.pop()
            self._buffers[kind] = cycle(drawn)
        return next(self._buffers[kind])

    def _exchange(self, verb: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        if self._stream is None:
            return Finished()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for buffer, _ in recvs:
                source = next(x for x in self._sources.values() if x.dtype == buffer.dtype and len(x) >= len(buffer))
                buffer.copy_(source[: len(buffer)])
        return _OnStream(self._stream)

    def _compare(self, claim: Claim) -> Mapping[int, Claim]:
        return {self.rank: claim}


class _OnStream(Pending):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def wait(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)
