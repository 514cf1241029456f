"""Some of a comm's ranks, as a comm of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from attnmesh.comm.agreement import Claim
from attnmesh.comm.base import Comm, Message, Pending, Shape
from attnmesh.trace.recorder import Recorder


class SubComm(Comm):
    """The ranks `members` of `parent`, numbered from 0 in that order; this rank must be one of them.

    Messages go through the parent and count there too. Ranks agree through the parent, all of them: whoever uses a part
    of a world has made sure there that the whole world does the same.
    """

    def __init__(self, parent: Comm, members: Sequence[int]) -> None:
        if parent.rank not in members:
            raise ValueError(f"rank {parent.rank} is not one of the members {list(members)}")
        super().__init__(members.index(parent.rank), len(members), parent.timeout)
        self._parent, self._members = parent, tuple(members)
        self.shares_stream = parent.shares_stream

    @property
    def recorder(self) -> Recorder | None:
        """The parent's: a rank is watched as a whole."""
        return self._parent.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._parent.recorder = recorder

    def buffer(self, shape: Shape, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory of the parent's kind."""
        return self._parent.buffer(shape, dtype=dtype, device=device)

    def fail(self, message: str) -> None:
        """Let all ranks of the parent know."""
        self._parent.fail(message)

    def _exchange(self, verb: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        def abroad(messages: Sequence[Message]) -> list[Message]:
            return [(tensor, self._members[peer]) for tensor, peer in messages]

        return self._parent.exchange(abroad(sends), abroad(recvs))

    def _compare(self, claim: Claim) -> Mapping[int, Claim]:
        return self._parent._compare(claim)
