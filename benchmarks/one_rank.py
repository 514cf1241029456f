"""One rank of many, run alone on one device: the cost of its share without the other ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attnmesh.comm.base import Comm, Finished, Message, Pending, Shape, Signature


class OneRankComm(Comm):
    """Rank `rank` of `world`, whose peers always agree.

    Its receive buffers are its own, kept from run to run, and hold random numbers, so that kernels work on real data
    though nothing is sent. (Buffers are not shared between programs: gradients of one would be keys of another.)
    With `copies`, every message is also written anew by a copy on a side stream while the rank computes, as bytes off a
    link would be.
    """

    def __init__(self, rank: int, world: int, *, copies: bool = False) -> None:
        super().__init__(rank, world, timeout=300)
        self._stream = torch.cuda.Stream() if copies else None
        self._buffers: dict[object, list[Tensor]] = {}
        self._taken: Counter[object] = Counter()
        self._sources: dict[torch.dtype, Tensor] = {}

    def begin(self) -> None:
        """Start a run, which uses the same buffers as the one before."""
        self._taken.clear()

    def buffer(self, shape: Shape, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a buffer that this run has not used yet."""
        kind = (tuple(shape), dtype)
        number = self._taken[kind]
        self._taken[kind] += 1
        buffers = self._buffers.setdefault(kind, [])
        if number == len(buffers):
            buffers.append(torch.randn(tuple(shape), device=device).to(dtype))
        return buffers[number]

    def _exchange(self, verb: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        if self._stream is None:
            return Finished()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for buffer, _ in recvs:
                buffer.view(-1).copy_(self._source(buffer)[: buffer.numel()])
        return _CopyHandle(self._stream)

    def _all_reduce(self, verb: str, x: Tensor, reuse: bool = False) -> Tensor:
        """Return `x`: no other rank adds to it."""
        return x.detach() if reuse else x.detach().clone()

    def _source(self, like: Tensor) -> Tensor:
        """Return random numbers of that dtype, enough for the largest message."""
        source = self._sources.get(like.dtype)
        if source is None or source.numel() < like.numel():
            source = self._sources[like.dtype] = torch.randn(like.numel(), device=like.device).to(like.dtype)
        return source

    def _compare(self, signature: Signature) -> Mapping[int, Signature]:
        return {self.rank: signature}


class AllocatingComm(OneRankComm):
    """Allocates and frees buffers as real ranks do, so that peak memory is realistic."""

    buffer = Comm.buffer


class _CopyHandle(Pending):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def wait(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)
