"""Subgroups of a comm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from attnmesh.comm.agreement import Signature
from attnmesh.comm.base import Comm, Message, Pending, Shape
from attnmesh.comm.call_log import CallLog
from attnmesh.trace.recorder import Recorder


class SubComm(Comm):
    """The ranks `members` of `parent`, numbered from 0 in that order; this rank must be one of them.

    Messages go through the parent and count in its traffic too. Agreement is between all ranks of the parent, because
    all its subgroups make the same calls.
    """

    def __init__(self, parent: Comm, members: Sequence[int]) -> None:
        if parent.rank not in members:
            raise ValueError(f"members must include this rank ({parent.rank}), got {list(members)}")
        super().__init__(members.index(parent.rank), len(members), parent.timeout)
        self._parent, self._members = parent, tuple(members)
        self.global_ranks = parent.global_ranks  # agreement is between the ranks of the parent
        self.log = self._parent_log()
        self._shares_log = self.log is parent.log
        self.shares_stream = parent.shares_stream

    @property
    def recorder(self) -> Recorder | None:
        """The parent's recorder: a rank is recorded as a whole."""
        return self._parent.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._parent.recorder = recorder

    @property
    def shares_memory(self) -> bool:
        """As for all ranks of the parent."""
        return self._parent.shares_memory

    def buffer(self, shape: Shape, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A receive buffer of the parent's kind."""
        return self._parent.buffer(shape, dtype=dtype, device=device)

    def fail(self, message: str) -> None:
        """Report a failure to all ranks of the parent."""
        self._parent.fail(message)

    @contextmanager
    def replaying(self, operation: str) -> Iterator[None]:
        """As in the parent, which carries the messages."""
        with self._parent.replaying(operation):
            yield

    def _check_one_thread(self, operation: str) -> None:
        self._parent._check_one_thread(operation)

    def _parent_log(self) -> CallLog:
        return self._parent.log

    def _exchange(self, op: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        return self._exchange_with(self.log, op, sends, recvs)

    def _exchange_with(self, log: CallLog, op: str, sends: Sequence[Message], recvs: Sequence[Message]) -> Pending:
        parent, members = self._parent, self._members
        parent.traffic.add("exchange", len(sends), sum([tensor.nbytes for tensor, _ in sends]))
        sent = [(tensor, members[peer]) for tensor, peer in sends]
        return parent._exchange_with(log, "exchange", sent, [(tensor, members[peer]) for tensor, peer in recvs])

    def _compare(self, signature: Signature) -> Mapping[int, Signature]:
        return self._parent._compare(signature)


class IndependentSubComm(SubComm):
    """A subgroup whose calls differ from the calls of the other subgroups, so that they cannot be compared.

    The caller must have agreed with all ranks of the parent on everything that the calls depend on. Its members
    have a log of their own.
    """

    def _parent_log(self) -> CallLog:
        return self._parent.log_of(self._members)

    def _compare(self, signature: Signature) -> Mapping[int, Signature]:
        return {self._parent.rank: signature}
