"""One rank of a world, run by itself: what its share costs on one device, without the other ranks being there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attnmesh.comm.agreement import Claim
from attnmesh.comm.base import Comm, Finished, Message, Pending


class AloneComm(Comm):
    """Rank `rank` of `world`, whose peers always agree and whose messages arrive as `arrivals` says.

    `arrivals` None: receive buffers keep what they hold (kernel time alone; fill them once by a run with arrivals). A
    tensor: every message is copied out of it on a side stream while the rank computes, as bytes off a link would be.
    """

    def __init__(self, rank: int, world: int, arrivals: Tensor | None = None) -> None:
        super().__init__(rank, world, timeout=300)
        self._arrivals = arrivals
        self._stream = torch.cuda.Stream() if arrivals is not None else None

    def _exchange(self, verb: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        if self._stream is None or self._arrivals is None:
            return Finished()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for buffer, _ in recvs:
                buffer.view(torch.uint8).view(-1).copy_(self._arrivals.view(torch.uint8)[: buffer.nbytes])
        return _OnStream(self._stream)

    def _compare(self, claim: Claim) -> Mapping[int, Claim]:
        return {self.rank: claim}


class _OnStream(Pending):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def wait(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)
